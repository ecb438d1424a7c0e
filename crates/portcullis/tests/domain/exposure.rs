//! The account of what a domain has left exposed, against a plain model that knows every byte at every nanosecond.
//!
//! One thread plays all CPUs and the clock. The model is told of each step and, by the hardware, of each flush. It
//! keeps the exact sums; and, since the domain reads its clock now and then only, how wrong the domain may be: for
//! each time between two readings, the difference of the most and the fewest bytes in it (half of that for what waits
//! in a queue, which only grows in between). Which readings those are it does not know, but for the two that the
//! documentation names: one for each 64th change, and one when a flush is over.

mod plain;
mod random;

use std::sync::{Arc, Mutex};

use crate::rig::{LAZY_FOREVER, PAGE};
use plain::{Plain, Tally};
use portcullis::invalidation::{Costs, InvalidationError};
use random::{Machine, Step};

/// As where flushes are so expensive that all CPUs share one queue.
const EXPENSIVE: Costs = Costs { submission_ns: 20_000, request_ns: 100, refill_ns: 1_000 };

/// Where the clock is read at every change, the account is exact.
#[test]
fn what_comes_at_a_reading_of_the_clock_is_counted_to_the_nanosecond() {
    for costs in [Costs::BARE_METAL, EXPENSIVE] {
        let mut machine = Machine::new(costs, LAZY_FOREVER);
        for round in 1..=20_u64 {
            // The first change of a CPU, and the first that is queued after a flush began, read the clock.
            let cpu = (round % 4) as usize;
            machine.step(&Step::Map { cpu, offset: 100, len: 1000 });
            machine.step(&Step::Wait { ns: 1_000 * round });
            machine.step(&Step::Unmap { cpu: (cpu + 1) % 4, which: 0, strictly: false });
            machine.step(&Step::Wait { ns: 777 });
            machine.step(&Step::Flush);
            let (found, exact) = (machine.exposure(), machine.exact());
            assert_eq!(found.stale_byte_ns, exact.used, "round {round}");
            assert_eq!(exact.used, 1000 * u128::from(round) * (777 + u128::from(rig_flush_ns())));
            if round == 1 {
                assert_eq!(found.neighbour_byte_ns, exact.neighbour);
                assert_eq!(exact.neighbour, 3096 * (1_000 + 777 + u128::from(rig_flush_ns())));
            }
        }
    }
}

fn rig_flush_ns() -> u64 {
    random::FLUSH_NS
}

/// A steady stream: the error is small beside the sum, not just within its bound.
#[test]
fn a_steady_stream_is_counted_within_a_hundredth() {
    let mut machine = Machine::new(Costs::BARE_METAL, portcullis::domain::Policy::LAZY);
    for round in 0..20_000_u64 {
        let cpu = (round % 2) as usize;
        machine.step(&Step::Map { cpu, offset: 0, len: 1500 });
        machine.step(&Step::Wait { ns: 3_000 });
        if round >= 64 {
            machine.step(&Step::Unmap { cpu, which: 0, strictly: round % 3 == 0 });
        }
    }
    let (found, exact) = (machine.exposure(), machine.exact());
    for (found, exact) in [(found.stale_byte_ns, exact.used), (found.neighbour_byte_ns, exact.neighbour)] {
        assert!(exact > 0 && found.abs_diff(exact) * 100 <= exact, "{found} for {exact}");
    }
}

/// Many changes in no time make readings rare. Then a large one, and small ones far apart: the large one is taken to
/// have come evenly for as long as 64 of those take, and no longer.
#[test]
fn the_clock_is_read_for_each_64th_change_at_the_latest() {
    let (fast, slow) = (Step::Wait { ns: 10 }, Step::Wait { ns: 1_000_000 });
    let lazily = Step::Unmap { cpu: 0, which: 0, strictly: false };
    // What waits in a queue that is never full.
    let mut machine = Machine::new(EXPENSIVE, LAZY_FOREVER);
    for (bytes, times, wait) in [(PAGE, 2_000, &fast), (512 * PAGE, 1, &fast), (1, 300, &slow)] {
        for _ in 0..times {
            machine.step(&Step::Map { cpu: 0, offset: 0, len: bytes });
            machine.step(&lazily);
            machine.step(wait);
        }
    }
    machine.check();
    // The neighbours of what is live.
    let mut machine = Machine::new(EXPENSIVE, LAZY_FOREVER);
    for (len, times, wait) in [(PAGE - 1, 2_000, &fast), (1, 1, &fast), (PAGE - 1, 300, &slow)] {
        for _ in 0..times {
            machine.step(&Step::Map { cpu: 0, offset: 0, len });
            machine.step(wait);
        }
    }
    machine.check();
}

/// What is not confirmed goes on being exposed, and the longest is counted from the first unmap on.
#[test]
fn flushes_that_fail_end_nothing() {
    let mut machine = Machine::new(Costs::BARE_METAL, LAZY_FOREVER);
    machine.step(&Step::Map { cpu: 0, offset: 0, len: PAGE });
    machine.step(&Step::Unmap { cpu: 0, which: 0, strictly: false });
    // More than the account keeps apart.
    for _ in 0..10 {
        machine.step(&Step::Wait { ns: 1_000 });
        machine.fail_next(1, InvalidationError::TimedOut { waited_ns: 5 });
        machine.step(&Step::Flush);
        machine.step(&Step::Map { cpu: 1, offset: 0, len: PAGE });
        machine.step(&Step::Unmap { cpu: 1, which: 0, strictly: false });
        machine.check();
    }
    let waited = 10 * (1_000 + rig_flush_ns());
    assert_eq!(machine.exposure().longest_stale_ns, waited, "and it is not over");
    machine.step(&Step::Flush);
    let found = machine.exposure();
    assert_eq!(found.longest_stale_ns, waited + rig_flush_ns());
    machine.step(&Step::Wait { ns: 1_000_000 });
    assert_eq!(machine.exposure(), found, "nothing is exposed any more");
    machine.check();
}

/// The model itself, on figures that one can do in one's head.
#[test]
fn the_model_adds_up() {
    let model = Arc::new(Mutex::new(Plain::new(1, 1)));
    let mut model = model.lock().unwrap();
    model.mapped(0, 96);
    model.advance(10);
    model.unmapped(0, 96);
    model.queued(0, 4000, 96);
    model.advance(5);
    model.advance(1);
    model.flushed();
    model.advance(100);
    assert_eq!(model.exact(), Tally { used: 4000 * 6, neighbour: 96 * 16 });
    assert_eq!(model.longest_ns(), 6);
    // What waited grew from nothing, at any time, as did what was live, and went again; and six roundings.
    let (below, _) = model.error();
    assert_eq!(below.used, 4000 * 6 / 2 + 6);
    assert_eq!(below.neighbour, 96 * 6 / 2 + 96 * 116 + 6);
}
