//! Lines, areas, and where names stand.

use super::*;

#[test]
fn a_line_crosses_an_area_or_passes_it() {
    let area = Area { least: (10, 10), most: (20, 20) };
    for (a, b) in [((0, 15), (30, 15)), ((15, 0), (15, 30)), ((12, 12), (13, 13)), ((5, 10), (10, 5 + 6))] {
        assert!(area.is_crossed(a, b) && area.is_crossed(b, a), "{a:?} {b:?}");
    }
    for (a, b) in [((0, 5), (30, 5)), ((0, 15), (9, 15)), ((0, 12), (12, 0)), ((25, 0), (25, 30))] {
        assert!(!area.is_crossed(a, b) && !area.is_crossed(b, a), "{a:?} {b:?}");
    }
}

#[test]
fn the_ends_of_an_area_belong_to_it() {
    let area = Area { least: (10, 10), most: (20, 20) };
    // Along an edge, through a corner, and to the edge alone.
    for (a, b) in [
        ((10, 0), (10, 30)),
        ((0, 20), (30, 20)),
        ((0, 20), (20, 0)),
        ((0, 15), (10, 15)),
        ((20, 20), (20, 20)),
    ] {
        assert!(area.is_crossed(a, b) && area.is_crossed(b, a), "{a:?} {b:?}");
    }
    for (a, b) in [((9, 0), (9, 30)), ((0, 21), (30, 21)), ((0, 19), (19, 0)), ((21, 21), (21, 21))] {
        assert!(!area.is_crossed(a, b) && !area.is_crossed(b, a), "{a:?} {b:?}");
    }
    // Areas that share an edge do not meet.
    let beside = |least, most| Area { least, most };
    assert!(!area.meets(&beside((20, 10), (30, 20))) && !area.meets(&beside((10, 0), (20, 10))));
    assert!(area.meets(&beside((19, 19), (30, 30))) && area.meets(&beside((0, 0), (11, 11))));
}

#[test]
fn a_name_s_place_is_what_it_covers_and_where_its_lead_ends() {
    let place = |anchor, at, leads| Place { of: (100, 100), at, anchor, leads };
    let area = |place: Place| {
        let Area { least, most } = place.area(40);
        (least, most)
    };
    // Two pixels more on each side, and a line's height.
    assert_eq!(area(place("start", (110, 100), false)), ((108, 93), (152, 107)));
    assert_eq!(area(place("end", (90, 100), false)), ((48, 93), (92, 107)));
    assert_eq!(area(place("middle", (100, 80), false)), ((78, 73), (122, 87)));
    // A lead ends beside a name, or at the edge that is the nearer one.
    let lead = |anchor, at| place(anchor, at, true).lead();
    assert_eq!(lead("start", (140, 70)), Some(((100, 100), (138, 70))));
    assert_eq!(lead("end", (60, 70)), Some(((100, 100), (62, 70))));
    assert_eq!(lead("middle", (100, 60)), Some(((100, 100), (100, 67))));
    assert_eq!(lead("middle", (100, 140)), Some(((100, 100), (100, 133))));
    assert_eq!(place("start", (140, 70), false).lead(), None);
    // Near is better than far, without a lead better than with one, and right better than left.
    let cost = |anchor, at, leads| place(anchor, at, leads).cost();
    assert_eq!(cost("start", (110, 100), false), 10);
    assert_eq!(cost("end", (90, 100), false), 11);
    assert_eq!(cost("start", (108, 83), true), 55);
    let candidates = candidates((100, 100));
    assert_eq!(candidates.len(), 2 + 11 * 2 * 9);
    let said = |place: &Place| (place.at, place.anchor, place.leads);
    assert_eq!(said(&candidates[0]), ((110, 100), "start", false));
    assert_eq!(said(&candidates[1]), ((90, 100), "end", false));
    // Above and below without a lead, and from the second row on with one.
    assert_eq!(said(&candidates[2]), ((100, 83), "middle", false));
    assert_eq!(said(&candidates[3]), ((108, 83), "start", true));
    assert_eq!(said(&candidates[4]), ((92, 83), "end", true));
    assert_eq!(said(&candidates[11]), ((100, 117), "middle", false));
    assert_eq!(said(&candidates[20]), ((100, 68), "middle", true));
}

#[test]
fn names_in_a_column_are_a_line_apart_and_between_its_ends() {
    let ys = |points: &[At]| {
        let places = in_a_column(points, 200, (0, 60));
        places.iter().map(|place| (place.at.1, place.leads)).collect::<Vec<_>>()
    };
    // Where they are, in whatever order; pushed down; pushed up from the bottom.
    assert_eq!(ys(&[(190, 40), (190, 10)]), [(40, false), (10, false)]);
    assert_eq!(ys(&[(190, 10), (190, 12), (190, 15)]), [(10, false), (25, true), (40, true)]);
    assert_eq!(ys(&[(190, 58), (190, 59), (190, 60)]), [(30, true), (45, true), (60, false)]);
    // A lead is drawn from 4 pixels on, down, or from 17 to the side.
    assert_eq!(ys(&[(190, 10), (190, 22)]), [(10, false), (25, false)]);
    assert_eq!(ys(&[(190, 10), (190, 21)]), [(10, false), (25, true)]);
    assert_eq!(ys(&[(184, 10), (183, 40)]), [(10, false), (40, true)]);
}

#[test]
fn a_plot_of_very_many_points_has_no_names() {
    let points: Vec<At> = (0..257).map(|n| (100 + 40 * n, 150)).collect();
    let widths = [10.0; 257];
    let named = |n: usize| {
        let taken = Taken { points: Vec::new(), ways: Vec::new(), bounds: ((0, 135), (20_000, 165)) };
        beside(&points[..n], &widths[..n], &taken).iter().flatten().count()
    };
    assert_eq!((named(1), named(256), named(257)), (1, 256, 0));
}

#[test]
fn names_stand_apart_from_lines_points_and_names() {
    // Ten points in a crowd, each at the end of a line that comes from its right, where its name would stand.
    let points: Vec<At> = (0..10).map(|n| (100 + 12 * n, 150 + 5 * (n % 3))).collect();
    let ways: Vec<(At, At)> = points.iter().map(|(x, y)| ((x + 120, y - 30), (*x, *y))).collect();
    let widths = [60.0; 10];
    let taken = |bounds| Taken { points: Vec::new(), ways: ways.clone(), bounds };
    let places = beside(&points, &widths, &taken(((0, 0), (400, 300))));
    let areas: Vec<Area> = places.iter().map(|place| place.as_ref().unwrap().area(60)).collect();
    for (at, area) in areas.iter().enumerate() {
        assert!(ways.iter().all(|(a, b)| !area.is_crossed(*a, *b)), "{at}");
        assert!(areas[..at].iter().all(|other| !area.meets(other)), "{at}");
        assert!(points.iter().all(|(x, y)| !area.is_crossed((*x, *y), (*x, *y))), "{at}");
    }
    // Where there is no room there is no name, rather than one over another.
    let crowd = beside(&points, &widths, &taken(((90, 140), (240, 165))));
    assert!(crowd.iter().any(Option::is_none));
}

#[test]
fn text_is_cut_and_wrapped_to_its_room() {
    assert_eq!(cut("strict", 12.0, 60.0), "strict");
    let short = cut("a-policy-with-a-long-name", 12.0, 80.0);
    assert!(short.ends_with('…') && width(&short, 12.0, false) <= 84.0, "{short}");
    let wrapped = lines("costs 43 % (before: 41 %), 1.2 µs a buffer", 12.0, 120.0);
    assert!(wrapped.len() > 2 && wrapped.iter().all(|line| width(line, 12.0, false) <= 120.0), "{wrapped:?}");
}
