//! Units that stop, and units that wrongly report a stop.

use core::cell::Cell;

use super::*;
use crate::queue::REFUSED;

#[derive(Default)]
struct Unit {
    /// The index of the bad command.
    stopped: Cell<Option<u32>>,
    head: Cell<u32>,
    drops_waits: Cell<bool>,
    rings: Cell<u32>,
}

impl Doorbell for Unit {
    fn ring(&self, _: u32) {
        self.rings.set(self.rings.get() + 1);
    }

    fn head(&self) -> u32 {
        self.head.get()
    }
}

impl Port for Unit {
    const NOTHING: Command = [0; 2];

    fn wait(_: u32, _: u64) -> Command {
        [1; 2]
    }

    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        let drops_waits = self.drops_waits.get();
        self.stopped.get().map(|bad| Failure { error: Some(REFUSED), bad: Some(bad), drops_waits, status: 0 })
    }

    fn go_on(&self, _: &Failure) {
        self.stopped.set(None);
    }
}

fn publish(ring: &CommandRing, unit: &Unit, count: u64) -> u64 {
    let first = ring.reserve(count, unit, || false).unwrap();
    ring.publish(first, count, unit);
    first
}

/// The index that is replaced if the unit has stopped at `bad`.
fn replaced(failures: &Failures, ring: &CommandRing, unit: &Unit, bad: u32) -> Option<usize> {
    let mut replaced = None;
    unit.stopped.set(Some(bad));
    failures.look(ring, unit, &|_| 0, |index| replaced = Some(index));
    assert_eq!(unit.stopped.get(), None, "it goes on");
    replaced
}

/// A unit may resume by itself once it finds a valid command.
#[test]
fn a_failure_is_counted_before_the_unit_is_shown_another_command() {
    let (failures, ring, unit) = (Failures::new(), CommandRing::new(8).unwrap(), Unit::default());
    let before = failures.so_far();
    publish(&ring, &unit, 1);
    unit.stopped.set(Some(0));
    let mut counted = None;
    failures.look(&ring, &unit, &|_| 0, |_| counted = Some(failures.since(before)));
    assert_eq!(counted, Some(Err(REFUSED)));
    let after = failures.so_far();
    failures.look(&ring, &unit, &|_| 0, |_| panic!("the unit runs"));
    assert_eq!((failures.since(after), failures.since(before)), (Ok(()), Err(REFUSED)));
}

/// Any other place belongs to its submission, which may not have read the count yet.
#[test]
fn nothing_is_replaced_but_what_is_published_and_not_known_to_be_consumed() {
    let rings = [(CommandRing::new(8).unwrap(), 8), (CommandRing::with_wrap_bit(8).unwrap(), 16)];
    for (ring, modulus) in rings {
        let (failures, unit) = (Failures::new(), Unit::default());
        for lap in 0..20_u64 {
            let first = publish(&ring, &unit, 3);
            let second = ring.reserve(2, &unit, || false).unwrap();
            assert_eq!((first, second), (lap * 5, lap * 5 + 3));
            let others = (0..40).chain([255, 256, u32::MAX - 1, u32::MAX]);
            for bad in others {
                let is_there = (first..first + 3).any(|place| place % modulus == u64::from(bad));
                let expected = is_there.then_some(bad as usize % 8);
                assert_eq!(replaced(&failures, &ring, &unit, bad), expected, "lap {lap}, {bad}");
            }
            ring.publish(second, 2, &unit);
            // A command that is known to be consumed is not replaced.
            unit.head.set(((second + 2) % modulus) as u32);
            assert!(ring.has_consumed(second + 1, &unit));
            assert_eq!(replaced(&failures, &ring, &unit, ((second + 1) % modulus) as u32), None);
        }
    }
}

#[test]
fn a_place_whose_command_is_being_replaced_is_nobody_elses_even_if_the_unit_goes_on() {
    let (failures, ring, unit) = (Failures::new(), CommandRing::with_wrap_bit(2).unwrap(), Unit::default());
    publish(&ring, &unit, 1);
    unit.stopped.set(Some(0));
    let mut waits = 0;
    failures.look(&ring, &unit, &|_| 0, |index| {
        assert_eq!(index, 0);
        unit.head.set(1);
        let none = ring.reserve(2, &unit, || {
            waits += 1;
            waits < 10
        });
        assert_eq!(none, None, "one of these is the place that is replaced");
        assert!(!ring.has_consumed(0, &unit));
    });
    assert_eq!(waits, 10, "it waits its turn");
    assert!(ring.has_consumed(0, &unit));
    assert_eq!(ring.reserve(2, &unit, || false), Some(1));
}

#[test]
fn a_stop_and_waits_that_are_dropped_can_come_together() {
    let (failures, ring, unit) = (Failures::new(), CommandRing::new(8).unwrap(), Unit::default());
    publish(&ring, &unit, 1);
    for (drops_waits, dropped) in [(false, Ok(())), (true, Err(REFUSED))] {
        let before = failures.so_far();
        unit.drops_waits.set(drops_waits);
        assert_eq!(replaced(&failures, &ring, &unit, 0), Some(0));
        assert_eq!((failures.since(before), failures.dropped_since(before)), (Err(REFUSED), dropped));
    }
}

#[test]
fn a_unit_that_goes_on_is_told_of_what_it_missed() {
    let (failures, ring, unit) = (Failures::new(), CommandRing::new(8).unwrap(), Unit::default());
    publish(&ring, &unit, 1);
    assert_eq!(unit.rings.get(), 1);
    replaced(&failures, &ring, &unit, 0);
    assert_eq!(unit.rings.get(), 2);
}

/// An interrupt handler during a write, or a read, of the error does not wait for the interrupted code.
#[test]
fn nobody_waits_for_the_last_error() {
    let (failures, ring, unit) = (Failures::new(), CommandRing::new(8).unwrap(), Unit::default());
    let before = failures.so_far();
    let interrupted = failures.last.lock();
    replaced(&failures, &ring, &unit, 0);
    assert_eq!(failures.since(before), Err(InvalidationError::Abandoned));
    drop(interrupted);
}
