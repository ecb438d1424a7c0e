//! Where names stand, and what fits.

use super::*;

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
fn text_is_cut_and_wrapped_to_its_room() {
    assert_eq!(cut("strict", 12.0, 60.0), "strict");
    let short = cut("a-policy-with-a-long-name", 12.0, 80.0);
    assert!(short.ends_with('…') && width(&short, 12.0, false) <= 84.0, "{short}");
    let wrapped = lines("costs 43 % (before: 41 %), 1.2 µs a buffer", 12.0, 120.0);
    assert!(wrapped.len() > 2 && wrapped.iter().all(|line| width(line, 12.0, false) <= 120.0), "{wrapped:?}");
}
