use super::*;

fn used(used: u64) -> Bytes {
    Bytes { used, neighbour: 0 }
}

#[test]
fn a_level_is_integrated_by_trapezia() {
    let mut level = Level::default();
    level.sample(10, used(0), used(0));
    level.sample(20, used(100), used(100));
    assert_eq!(level.total(20, used(100), used(100)).used, 500);
    level.jump(used(0), used(100));
    assert_eq!(level.total(1_000, used(0), used(100)).used, 500);
    assert_eq!(level.total(40, used(10), used(110)).used, 600);
}

/// Ten bytes came and went, and three came and stayed, in a second: at any time of it there may have been 13.
#[test]
fn what_came_in_a_pause_counts_for_all_of_it() {
    let mut level = Level::default();
    level.sample(0, used(5), used(5));
    level.sample(1_000_000_000, used(8), used(18));
    assert_eq!(level.total(1_000_000_000, used(8), used(18)).used, (5 + 13) * 1_000_000_000);
    // What went is counted to the end of a pause, and no longer.
    level.sample(2_000_000_000, used(0), used(18));
    assert_eq!(level.total(2_000_000_000, used(0), used(18)).used, (5 + 13 + 8) * 1_000_000_000);
    assert_eq!((came_during(10, EVEN_NS), came_during(10, 1 << 20)), (5 * EVEN_NS as i128, 10 << 20));
}

#[test]
fn the_clock_is_read_for_every_change_when_changes_are_rare_and_seldom_when_they_are_not() {
    let mut level = Level::default();
    let mut now_ns = 0;
    let mut run = |level: &mut Level, apart_ns: u64, samples: u64| {
        for _ in 0..samples {
            now_ns += apart_ns * level.next_sample();
            level.sample(now_ns, used(1), used(1));
        }
        level.next_sample()
    };
    assert_eq!(run(&mut level, 1_000_000, 3), 1);
    assert_eq!(run(&mut level, 100, 10), MOST_CHANGES);
    assert_eq!(run(&mut level, 10_000, 10), READ_EVERY_NS / 10_000);
    assert_eq!(run(&mut level, 1_000_000_000, 1), 1);
}

#[test]
fn a_part_below_zero_is_taken_off() {
    let mut level = Level::default();
    level.sample(0, used(0), used(0));
    level.jump(used(0) - used(7), used(0));
    assert_eq!(level.total(100, used(0) - used(7), used(0)).used, -700);
}

#[test]
fn a_reading_that_comes_late_does_not_turn_the_clock_back() {
    let mut level = Level::default();
    level.sample(100, used(10), used(10));
    let before = level.total(100, used(10), used(10)).used;
    // Another CPU has read the clock before, and got the lock after.
    level.sample(50, used(10), used(10));
    assert_eq!(level.total(110, used(10), used(10)).used, before + 100);
}

#[test]
fn what_went_before_the_last_reading_is_taken_off_again() {
    // Of 100 bytes 60 go after 60 ns, which becomes known before or after the reading at 80 ns.
    for reads in [0, 80] {
        let mut level = Level::default();
        level.jump(used(100), used(100));
        level.sample(reads, used(100), used(100));
        level.fell(60, used(100), used(100), used(60));
        assert_eq!(level.total(100, used(40), used(100)).used, 60 * 100 + 40 * 40, "{reads}");
    }
}

#[test]
fn what_no_level_shows_is_added() {
    let mut level = Level::default();
    level.add(ByteTime { used: 3, neighbour: 4 });
    level.add(ByteTime { used: 1, neighbour: 1 });
    assert_eq!(level.total(9, used(0), used(0)), ByteTime { used: 4, neighbour: 5 });
}

#[test]
fn readings_become_rarer_by_twice_at_the_most() {
    let mut level = Level::default();
    for (reading, most) in (1..=8_u64).zip([1, 2, 4, 8, 16, 32, 64, 64]) {
        assert!(level.next_sample() <= most, "before reading {reading}: {}", level.next_sample());
        level.sample(reading, used(1), used(1));
    }
}
