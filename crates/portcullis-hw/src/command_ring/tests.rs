//! Units that consume all commands, and units with invalid heads.

use super::*;

/// A unit that consumes up to a given index.
#[derive(Default)]
struct Unit {
    head: core::cell::Cell<u32>,
    tail: core::cell::Cell<u32>,
    rings: core::cell::Cell<u32>,
    /// Reads of its head.
    looks: core::cell::Cell<u32>,
}

impl Doorbell for Unit {
    fn ring(&self, tail: u32) {
        self.tail.set(tail);
        self.rings.set(self.rings.get() + 1);
    }

    fn head(&self) -> u32 {
        self.looks.set(self.looks.get() + 1);
        self.head.get()
    }
}

#[test]
fn places_come_back_when_the_unit_has_consumed_them_and_not_before() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    for round in 0..100_u64 {
        let first = ring.reserve(5, &unit, || panic!("there is room")).unwrap();
        assert_eq!(first, round * 5);
        ring.publish(first, 5, &unit);
        assert_eq!(u64::from(unit.tail.get()), (first + 5) % 8);
        // Two more fit, five do not.
        assert_eq!(ring.reserve(5, &unit, || false), None);
        unit.head.set(unit.tail.get());
    }
    assert_eq!(ring.reserve(8, &unit, || panic!("it never fits")), None);
}

#[test]
fn many_places_are_not_kept_from_a_cpu_by_others_that_take_one_at_a_time() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    let all = ring.reserve(7, &unit, || panic!("there is room")).unwrap();
    ring.publish(all, 7, &unit);
    let mut turns = 0;
    let first = ring.reserve(6, &unit, || {
        turns += 1;
        if unit.head != unit.tail {
            unit.head.set((unit.head.get() + 1) % 8);
        }
        // Another CPU submits whenever a place is free.
        if let Some(place) = ring.reserve(1, &unit, || false) {
            ring.publish(place, 1, &unit);
        }
        turns < 1000
    });
    assert_eq!((first, turns), (Some(7), 6));
}

/// A head that does not move frees nothing.
#[test]
fn a_full_ring_is_looked_at_once_for_each_turn_of_a_wait() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    let all = ring.reserve(7, &unit, || panic!("there is room")).unwrap();
    ring.publish(all, 7, &unit);
    let mut turns = 0;
    let first = ring.reserve(1, &unit, || {
        turns += 1;
        turns < 5
    });
    assert_eq!((first, turns, unit.looks.get()), (None, 5, 5));
}

/// A held place frees nothing, however far the head moves.
#[test]
fn a_full_ring_with_a_held_place_is_looked_at_once_for_each_turn_of_a_wait() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    let all = ring.reserve(7, &unit, || panic!("there is room")).unwrap();
    ring.publish(all, 7, &unit);
    let held = ring.hold(2).unwrap();
    unit.head.set(3);
    let mut turns = 0;
    let first = ring.reserve(1, &unit, || {
        turns += 1;
        turns < 5
    });
    assert_eq!((first, turns, unit.looks.get()), (None, 5, 5));
    drop(held);
    assert_eq!(ring.reserve(3, &unit, || panic!("there is room")), Some(7));
}

#[test]
fn what_was_reserved_first_is_rung_first() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    let first = ring.reserve(2, &unit, || false).unwrap();
    let second = ring.reserve(3, &unit, || false).unwrap();
    ring.publish(second, 3, &unit);
    assert_eq!(unit.rings.get(), 0, "the first two are not written yet");
    ring.publish(first, 2, &unit);
    assert_eq!((unit.rings.get(), unit.tail.get()), (1, 5), "one doorbell for both");
}

#[test]
fn a_unit_that_says_it_is_beyond_what_it_was_given_frees_nothing() {
    let (ring, unit) = (CommandRing::new(4).unwrap(), Unit::default());
    let first = ring.reserve(2, &unit, || false).unwrap();
    ring.publish(first, 2, &unit);
    unit.head.set(3);
    assert_eq!(ring.reserve(2, &unit, || false), None);
    unit.head.set(2);
    assert_eq!(ring.reserve(2, &unit, || false), Some(2));
}

#[test]
fn a_unit_that_missed_a_doorbell_is_told_again() {
    let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
    let first = ring.reserve(3, &unit, || false).unwrap();
    ring.publish(first, 3, &unit);
    unit.tail.set(0);
    ring.ring_again(&unit);
    assert_eq!((unit.tail.get(), unit.rings.get()), (3, 2));
}

#[test]
fn with_a_wrap_bit_a_ring_is_filled_to_the_last_place() {
    let (ring, unit) = (CommandRing::with_wrap_bit(4).unwrap(), Unit::default());
    for round in 0..100_u64 {
        let first = ring.reserve(4, &unit, || panic!("there is room")).unwrap();
        assert!(!ring.has_consumed(first, &unit), "it is not even published");
        ring.publish(first, 4, &unit);
        assert_eq!(u64::from(unit.tail.get()), (round + 1) * 4 % 8);
        assert_eq!(ring.reserve(1, &unit, || false), None, "full, and not taken for empty");
        for place in first..first + 4 {
            assert!(!ring.has_consumed(place, &unit));
            unit.head.set((place + 1) as u32 % 8);
            assert!(ring.has_consumed(place, &unit));
            assert_eq!(place == first + 3, ring.has_consumed(first + 3, &unit));
        }
    }
}

#[test]
fn a_unit_that_claims_to_have_consumed_what_was_never_there_is_not_believed() {
    let (ring, unit) = (CommandRing::with_wrap_bit(4).unwrap(), Unit::default());
    let first = ring.reserve(2, &unit, || false).unwrap();
    ring.publish(first, 2, &unit);
    for nonsense in [3, 4, 5, 6, 7, 8, u32::MAX] {
        unit.head.set(nonsense);
        assert!(!ring.has_consumed(first, &unit), "{nonsense}");
    }
    unit.head.set(2);
    assert!(ring.has_consumed(first + 1, &unit));
}

/// A submission that waits for room comes first: others do not take the room while they may wait, and then give up.
#[test]
fn room_is_left_to_a_submission_that_waits_for_it() {
    let (ring, unit) = (CommandRing::new(4).unwrap(), Unit::default());
    ring.waiting.store(true, Ordering::Relaxed);
    let mut turns = 0;
    let lasting = ring.reserve(1, &unit, || {
        turns += 1;
        turns < 5
    });
    assert_eq!((lasting, turns), (None, 5));
    let passing = ring.reserve(1, &unit, || {
        turns += 1;
        ring.waiting.store(turns < 8, Ordering::Relaxed);
        true
    });
    assert_eq!((passing, turns), (Some(0), 8));
}

#[test]
fn a_unit_that_does_not_answer_frees_nothing() {
    let (ring, unit) = (CommandRing::new(4).unwrap(), Unit::default());
    let first = ring.reserve(3, &unit, || false).unwrap();
    ring.publish(first, 3, &unit);
    unit.head.set(u32::MAX);
    let mut looks = 0;
    let full = ring.reserve(1, &unit, || {
        looks += 1;
        looks < 5
    });
    assert_eq!((full, looks), (None, 5));
}
