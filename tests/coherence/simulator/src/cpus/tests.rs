//! What the clocks of CPUs say after accesses, transfers and waits.

use super::*;

fn two() -> Cpus {
    let mut cpus = Cpus::new(Machine::server(2, 64));
    assert!(!cpus.arrive(0) && cpus.arrive(1));
    assert_eq!(cpus.next(), Some(0));
    cpus
}

#[test]
fn the_one_that_is_furthest_behind_runs() {
    let mut cpus = two();
    // The second begins 37 ns later.
    assert_eq!(cpus.pass(0, 37_000), None);
    assert_eq!(cpus.pass(0, 1), Some(1));
    assert_eq!(cpus.next(), Some(1));
    assert_eq!(cpus.pass(1, 2), Some(0));
}

#[test]
fn ones_own_lines_may_be_touched_ahead_of_the_others_and_shared_ones_may_not() {
    let mut cpus = two();
    cpus.cpus[0].clock = 500_000;
    assert_eq!(cpus.access(0, 7, Access::Write, 0), None);
    cpus.lines.access(7, 1, true, 0, 0);
    assert_eq!(cpus.access(0, 7, Access::Write, 0), Some(1));
    // The other one looks, and lets it go on.
    assert_eq!(cpus.pass(1, 0), None);
    assert_eq!(cpus.pass(1, 600_000), Some(0));
    cpus.cpus[0].clock += AHEAD + 200_000;
    assert_eq!(cpus.access(0, 8, Access::Write, 0), Some(1));
}

#[test]
fn transfers_are_counted_where_they_happen() {
    let mut cpus = two();
    cpus.machine.sites = 1;
    cpus.begin(0);
    cpus.begin(1);
    assert_eq!(cpus.access(0, 7, Access::Write, 1), None);
    cpus.call(1, 99);
    cpus.others = NEVER;
    assert_eq!((cpus.access(1, 7, Access::Write, 2), cpus.access(1, 7, Access::Read, 3)), (None, None));
    cpus.atomic(1);
    assert_eq!(cpus.end(0), Figures { time: 5_200, accesses: 1, ..Figures::default() });
    let expected = Figures { time: 66_000, accesses: 2, transfers: 1, far: 0, atomics: 1 };
    assert_eq!(cpus.end(1), expected);
    assert_eq!(cpus.sites(), [Site { count: 1, frames: [2, 99, 0, 0, 0, 0, 0, 0] }]);
}

/// What it takes a CPU to read `count` lines that the other one has written, where it was told to fetch them first or not.
fn reads(count: u64, fetches: bool) -> (u64, u64) {
    let mut cpus = two();
    cpus.others = NEVER;
    (0..count).for_each(|line| assert_eq!(cpus.access(1, line, Access::Write, 0), None));
    cpus.cpus[0].clock = 1_000_000;
    cpus.begin(0);
    if fetches {
        (0..count).for_each(|line| assert_eq!(cpus.fetch(0, line, 0), None));
    }
    (0..count).for_each(|line| assert_eq!(cpus.access(0, line, Access::Read, 0), None));
    let figures = cpus.end(0);
    assert_eq!(figures.accesses, count);
    (figures.time, figures.transfers)
}

#[test]
fn lines_that_are_fetched_ahead_come_at_the_same_time_and_ten_at_the_most() {
    // One after the other: 60 ns each, and 0.2 for the access.
    assert_eq!((reads(1, false), reads(4, false)), ((60_200, 1), (240_800, 4)));
    // At once, 0.2 apart; the last one is there when the others were accessed.
    assert_eq!((reads(1, true), reads(4, true)), ((60_400, 1), (61_000, 4)));
    assert_eq!(reads(10, true), (62_200, 10));
    // The eleventh begins when the first is there.
    let (time, transfers) = reads(11, true);
    assert!((120_000..123_000).contains(&time), "{time}");
    assert_eq!((transfers, reads(20, true).1), (11, 20));
    assert!((120_000..125_000).contains(&reads(20, true).0));
}

#[test]
fn a_line_that_others_have_taken_again_is_fetched_once_more() {
    let mut cpus = two();
    cpus.others = NEVER;
    assert_eq!(cpus.access(1, 7, Access::Write, 0), None);
    cpus.cpus[0].clock = 1_000_000;
    assert_eq!(cpus.fetch(0, 7, 0), None);
    cpus.cpus[1].clock = 1_010_000;
    // It waits until the other one has its copy, and then half of a transfer, as it has a copy itself.
    assert_eq!(cpus.access(1, 7, Access::Update, 0), None);
    assert_eq!(cpus.clock(1), 1_090_400);
    cpus.cpus[0].clock = 1_200_000;
    assert_eq!(cpus.access(0, 7, Access::Read, 0), None);
    assert_eq!(cpus.clock(0), 1_260_200);
    // What is there already takes no time.
    assert_eq!((cpus.fetch(0, 7, 0), cpus.clock(0)), (None, 1_260_400));
}

/// When CPU 0 goes on after stores to lines that the other one has, and after a fence then.
fn stores(lines: impl Iterator<Item = u64>) -> (u64, u64) {
    let mut cpus = two();
    cpus.others = NEVER;
    (0..32).for_each(|line| assert_eq!(cpus.access(1, line, Access::Write, 0), None));
    cpus.cpus[0].clock = 1_000_000;
    lines.for_each(|line| assert_eq!(cpus.access(0, line, Access::Write, 0), None));
    let after = cpus.clock(0);
    cpus.atomic(0);
    (after - 1_000_000, cpus.clock(0) - 1_006_000)
}

#[test]
fn a_store_goes_on_in_the_background_and_a_fence_waits_for_it() {
    assert_eq!(stores(0..1), (200, 60_000));
    // Their lines come at the same time, ten at the most: the eleventh waits for the first.
    assert_eq!(stores(0..10), (2_000, 61_800));
    assert_eq!(stores(0..11), (60_200, 120_000));
    // What is stored again is there already: it takes none of the ten places.
    assert_eq!(stores((0..10).chain(0..10)), (4_000, 61_800));
}

#[test]
fn stores_are_seen_in_their_order_and_an_update_waits_for_those_before() {
    let mut cpus = two();
    cpus.others = NEVER;
    assert_eq!(cpus.access(1, 7, Access::Write, 0), None);
    assert_eq!(cpus.access(0, 8, Access::Write, 0), None);
    (cpus.cpus[0].clock, cpus.cpus[1].clock) = (1_000_000, 1_010_000);
    // Its own line 8 is at hand, but the store to 7 comes before.
    (7..9).for_each(|line| assert_eq!(cpus.access(0, line, Access::Write, 0), None));
    assert_eq!(cpus.clock(0), 1_000_400);
    assert_eq!((cpus.access(0, 7, Access::Read, 0), cpus.clock(0)), (None, 1_000_600));
    assert_eq!(cpus.access(1, 8, Access::Read, 0), None);
    assert_eq!(cpus.clock(1), 1_120_200);
    assert_eq!(cpus.access(0, 9, Access::Update, 0), None);
    assert_eq!(cpus.clock(0), 1_065_200);
}

#[test]
fn a_server_does_one_after_the_other() {
    let mut cpus = two();
    assert_eq!(cpus.serve(0, 0, 1_000_000), Ok(()));
    assert_eq!(cpus.serve(0, 0, 1), Err(1));
    assert_eq!(cpus.serve(1, 0, 1_000_000), Ok(()));
    assert_eq!(cpus.clock(1), 2_000_000);
}

#[test]
fn sleepers_are_woken_or_their_time_comes() {
    let mut cpus = two();
    assert_eq!(cpus.sleep(0, 16, NEVER), Some(1));
    assert_eq!((cpus.wake(1, 8, 1), cpus.wake(1, 16, 9)), (0, 1));
    assert_eq!(cpus.clock(1), 537_000);
    assert!((1_537_000..=3_537_000).contains(&cpus.clock(0)), "{}", cpus.clock(0));
    assert_eq!(cpus.sleep(1, 16, 4_000_000), Some(0));
    assert_eq!(cpus.sleep(0, 16, NEVER), Some(1));
    assert_eq!(cpus.clock(1), 4_000_000);
    // Nobody would ever run again.
    assert_eq!(cpus.sleep(1, 16, NEVER), None);
}

#[test]
fn who_watches_a_line_goes_on_when_it_is_written() {
    let mut cpus = two();
    // It has no copy of the line: somebody has written it.
    assert_eq!(cpus.watch(0, 7), Some(0));
    assert_eq!(cpus.access(0, 7, Access::Read, 0), None);
    assert_eq!(cpus.watch(0, 7), Some(1));
    assert_eq!(cpus.pass(1, 500_000), None);
    assert_eq!(cpus.access(1, 8, Access::Write, 0), None);
    assert_eq!(cpus.next(), Some(1));
    assert_eq!(cpus.access(1, 7, Access::Write, 0), None);
    assert_eq!((cpus.clock(0), cpus.watching), (cpus.clock(1), 0));
    // Nobody is left to write it.
    cpus.watch(1, 7);
    assert_eq!(cpus.access(0, 7, Access::Read, 0), None);
    assert_eq!(cpus.watch(0, 7), None);
}

#[test]
fn who_is_about_to_watch_a_line_sees_that_a_hidden_cpu_writes_it() {
    let mut cpus = two();
    cpus.others = NEVER;
    for cpu in [0, 1, 0] {
        assert_eq!(cpus.access(cpu, 7, Access::Write, 0), None);
    }
    cpus.hide(1, true);
    assert_eq!(cpus.access(1, 7, Access::Write, 0), None);
    assert_eq!(cpus.watch(0, 7), Some(0));
}

#[test]
fn loads_that_repeat_are_turns_of_a_loop_unless_something_was_written() {
    let mut cpus = two();
    cpus.others = NEVER;
    let mut load = |pc, kind| {
        cpus.access(0, 7, kind, pc);
        let before = cpus.clock(0);
        cpus.load(0, 7 * 64, pc);
        cpus.clock(0) - before
    };
    let turns = |loads: [u64; 3]| loads.map(|time| (20_000..=60_000).contains(&time));
    assert_eq!(
        turns([load(1, Access::Read), load(1, Access::Read), load(2, Access::Read)]),
        [false, true, false]
    );
    assert_eq!(
        turns([load(1, Access::Read), load(2, Access::Read), load(2, Access::Update)]),
        [true, false, false]
    );
}
