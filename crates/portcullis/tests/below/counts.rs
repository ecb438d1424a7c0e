//! What an embedder counts by itself in the account of a domain.

use std::panic::{AssertUnwindSafe, catch_unwind};

use portcullis::domain::Policy;

use crate::faults::{Call, Mode};
use crate::run::World;

const BYTES: i64 = 100;

/// Whether the platform lends no CPU, or does not tell the time, or panics when all is done.
#[test]
fn bytes_that_a_cache_leaves_open_are_counted_wherever_the_platform_panics() {
    let count = |fault| {
        let world = World::new(Policy::Strict, u64::MAX);
        world.hostile.faults.arm(fault);
        let done = catch_unwind(AssertUnwindSafe(|| world.domain.count_neighbours(BYTES))).is_ok();
        let calls = world.hostile.faults.disarm().0;
        assert_eq!(done, fault.is_none());
        let in_a_while = || {
            let before = world.domain.exposure().neighbour_byte_ns;
            world.platform.pass(1000);
            world.domain.exposure().neighbour_byte_ns - before
        };
        // Where the clock panicked, they count as half until it is read again.
        let is_read = fault.is_none_or(|(at, _)| calls[at] != Call::NowNs);
        assert_eq!(in_a_while(), BYTES as u128 * if is_read { 1000 } else { 500 }, "{fault:?}");
        // A CPU's first change is exact, and the next after a panic of the clock.
        world.platform.be(usize::from(is_read));
        world.domain.count_neighbours(-BYTES);
        assert_eq!(in_a_while(), 0, "{fault:?}");
        calls
    };
    let calls = count(None);
    assert!(calls.len() > 1, "{calls:?}");
    for (at, call) in calls.into_iter().enumerate() {
        for mode in call.modes().iter().filter(|mode| matches!(mode, Mode::Panic | Mode::PanicAfter)) {
            count(Some((at, *mode)));
        }
    }
}
