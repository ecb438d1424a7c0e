use super::*;

fn feed(cell: &mut Cell, way: Choice, (map, unmap): (u64, u64), times: u32) -> Choice {
    (0..times).fold(cell.choice, |_, _| {
        cell.note(way, Half::Map, map);
        cell.note(way, Half::Unmap, unmap)
    })
}

/// A mean stands for eight samples at the most: each sample replaces an eighth.
#[test]
fn older_samples_fade() {
    let mut mean = Mean::default();
    (0..3).for_each(|_| _ = mean.add(100));
    mean.add(140);
    assert_eq!(mean.ns(), 110, "the fourth is a fourth");
    let mut mean = Mean::default();
    (0..100).for_each(|_| _ = mean.add(100));
    mean.add(180);
    assert_eq!(mean.ns(), 110, "the hundredth is an eighth");
    mean.add(110);
    assert_eq!(mean.ns(), 110);
    // A sample that an interrupt hit counts for four times the mean and 64 ns.
    assert_eq!(mean.add(1_000_000), 16 * (4 * 110 + 64));
}

#[test]
fn it_begins_with_the_cheaper_way_and_with_copying_where_nothing_is_known() {
    let mut cell = Cell::default();
    assert_eq!(cell.begin(), Choice::Copy);
    feed(&mut cell, Choice::Map, (5, 5), 8);
    assert_eq!(cell.begin(), Choice::Copy, "one cost alone says nothing");
    feed(&mut cell, Choice::Copy, (10, 5), 8);
    assert_eq!(cell.begin(), Choice::Map);
    assert_eq!(cell.copy.seen(), Some((10, 5)));
}

#[test]
fn a_cell_that_begins_has_counted_nothing() {
    let (against, turns, left, probing) = (3, 5, 7, true);
    let mut cell = Cell { against, turns, left, probing, ..Cell::default() };
    cell.begin();
    assert_eq!((cell.against, cell.turns, cell.left, cell.probing), (0, 0, 0, false));
}

#[test]
fn a_way_of_which_one_half_is_not_known_is_not_chosen_nor_explained() {
    for (many, few) in [(Half::Map, Half::Unmap), (Half::Unmap, Half::Map)] {
        let mut cell = Cell::default();
        feed(&mut cell, Choice::Copy, (500, 500), 16);
        (0..100).for_each(|_| _ = cell.note(Choice::Map, many, 1));
        (1..ENOUGH).for_each(|_| _ = cell.note(Choice::Map, few, 1));
        assert_eq!((cell.begin(), cell.choice, cell.map.seen()), (Choice::Copy, Choice::Copy, None));
        cell.note(Choice::Map, few, 1);
        assert_eq!((cell.begin(), cell.map.seen()), (Choice::Map, Some((1, 1))));
    }
}

#[test]
fn it_changes_when_the_other_way_stays_cheaper_by_an_eighth() {
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (50, 50), 16);
    feed(&mut cell, Choice::Map, (40, 50), 16);
    assert_eq!(cell.choice, Choice::Copy, "a tenth is not worth a change");
    feed(&mut cell, Choice::Map, (10, 10), 64);
    assert_eq!((cell.choice, cell.switches), (Choice::Map, 1));
    // Now copying must be clearly cheaper.
    feed(&mut cell, Choice::Copy, (10, 9), 64);
    assert_eq!(cell.choice, Choice::Map);
    feed(&mut cell, Choice::Copy, (5, 5), 64);
    assert_eq!((cell.choice, cell.switches), (Choice::Copy, 2));
}

#[test]
fn costs_that_come_and_go_do_not_make_it_swing() {
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (50, 50), 16);
    for round in 0..1000 {
        let noise = [85, 115][round % 2];
        feed(&mut cell, Choice::Map, (0, noise), 1);
        feed(&mut cell, Choice::Copy, (0, 200 - noise), 1);
    }
    assert_eq!(cell.switches, 0);
}

#[test]
fn only_judgements_in_a_row_change_the_way() {
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (50, 50), 16);
    feed(&mut cell, Choice::Map, (50, 50), 16);
    cell.against = PATIENCE - 1;
    feed(&mut cell, Choice::Copy, (50, 50), 1);
    assert_eq!((cell.against, cell.choice), (0, Choice::Copy));
}

/// The next probe, and a change back, come no sooner than in a queue that has begun with that way.
#[test]
fn after_a_change_all_is_counted_from_the_beginning() {
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (50, 50), 16);
    cell.turns = PROBE - 1;
    while feed(&mut cell, Choice::Map, (10, 10), 1) == Choice::Copy {}
    assert_eq!((cell.against, cell.turns, cell.switches), (0, 0, 1));
}

#[test]
fn one_call_that_was_interrupted_changes_nothing() {
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (50, 50), 64);
    feed(&mut cell, Choice::Map, (100, 100), 64);
    feed(&mut cell, Choice::Copy, (50, 5_000_000), 1);
    assert_eq!((cell.choice, cell.switches), (Choice::Copy, 0));
    assert!(cell.copy.seen().is_some_and(|(_, unmap_ns)| unmap_ns < 100), "{:?}", cell.copy.seen());
}

#[test]
fn one_of_the_first_calls_that_was_interrupted_says_nothing_either() {
    for interrupted in 0..ENOUGH {
        let mut cell = Cell::default();
        for call in 0..ENOUGH {
            feed(&mut cell, Choice::Copy, (50, if call == interrupted { 5_000_000 } else { 50 }), 1);
            feed(&mut cell, Choice::Map, (250, 250), 1);
        }
        assert_eq!(cell.begin(), Choice::Copy, "call {interrupted}: {:?}", cell.copy.seen());
    }
}

#[test]
fn both_ways_are_tried_now_and_then_and_an_unknown_one_soon() {
    let mut cell = Cell::default();
    let probes = |cell: &mut Cell| (0..640).filter(|_| cell.turn(TIMED) == Choice::Map).count();
    assert_eq!(probes(&mut cell), 160);
    let mut cell = Cell::default();
    feed(&mut cell, Choice::Copy, (500, 500), 8);
    feed(&mut cell, Choice::Map, (500, 500), 8);
    assert_eq!(probes(&mut cell), 10);
}

/// Lets `timed` mappings run whose halves cost `of` each. Returns the cost of all mappings, the extra cost of timed ones that went the
/// dearer way, and the largest extra cost of one of these.
fn probed(cell: &mut Cell, timed: u64, of: impl Fn(u64, Choice) -> u64) -> (u64, u64, u64) {
    let (mut all, mut extra, mut most, mut probes) = (0, 0, 0, 0);
    let mut made = FIRST_TIMED - 1;
    for at in 0..timed {
        let chosen = cell.choice();
        let pause = pause_after(made);
        made += pause;
        let way = cell.turn(pause);
        let (ours, taken) = (2 * of(at, chosen), 2 * of(at, way));
        all += (pause - 1) * ours + taken;
        extra += taken.saturating_sub(ours);
        most = most.max(taken.saturating_sub(ours));
        probes += u64::from(way != chosen);
        feed(cell, way, (taken / 2, taken / 2), 1);
    }
    assert!(probes > timed / 20_000, "{probes} probes: the other way's cost is looked for");
    (all, extra, most)
}

#[test]
fn probes_take_their_share_of_the_time_and_one_probe_at_most() {
    for begins in [Choice::Copy, Choice::Map] {
        for known in [false, true] {
            for dearer in [1, 2, 10, 100, 1000] {
                let cost = |_, way| if way == begins { 50 } else { 50 * dearer };
                let mut cell = Cell { choice: begins, ..Cell::default() };
                if known {
                    feed(&mut cell, begins, (50, 50), 8);
                    feed(&mut cell, begins.other(), (50 * dearer, 50 * dearer), 8);
                }
                let (all, extra, most) = probed(&mut cell, 50_000, cost);
                assert!(
                    extra * PROBES_SHARE <= all + most * PROBES_SHARE,
                    "{begins:?} {dearer}: {extra} of {all}"
                );
                assert_eq!(cell.switches, 0);
            }
        }
    }
    // The other way becomes dearer than it was known to be, and cheaper again.
    let cost = |at: u64, way| if way == Choice::Copy { 50 } else { [60, 6000, 90][(at / 5000 % 3) as usize] };
    let (all, extra, most) = probed(&mut Cell::default(), 50_000, cost);
    assert!(extra * PROBES_SHARE <= all + most * PROBES_SHARE, "{extra} of {all}");
}

#[test]
fn a_size_is_timed_often_at_first_and_turns_before_it_is_two_and_a_half_times_as_old() {
    assert_eq!([0, 7, 8, 40, 244, 10_000].map(pause_after), [1, 1, 2, 10, 61, 61]);
    for first in [FIRST_TIMED, 20, 100] {
        let mut cell = Cell::default();
        feed(&mut cell, Choice::Copy, (500, 500), 8);
        feed(&mut cell, Choice::Map, (100, 100), 8);
        (cell.choice, cell.against) = (Choice::Copy, 0);
        let mut made = first;
        while cell.choice == Choice::Copy {
            made += pause_after(made);
            let way = cell.turn(pause_after(made));
            feed(&mut cell, way, (500, 500), 1);
        }
        assert!(made <= first * 5 / 2, "{first}: {made}");
    }
}

#[test]
fn where_it_waits_alone_it_copies_what_is_cheaper_to_copy() {
    let mut cell = Cell::default();
    assert!(cell.copies_rather_than_wait(0), "nothing is known");
    feed(&mut cell, Choice::Copy, (50, 50), 8);
    feed(&mut cell, Choice::Map, (30, 10), 8);
    assert_eq!([60, 80].map(|wait_ns| cell.copies_rather_than_wait(wait_ns)), [false, true]);
}
