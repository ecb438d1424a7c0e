//! The host panics once, at each of its calls. The driver works as before afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Runs `work` on new benches whose hosts panic at their first call, their second, and so on, while the device answers late or at once; and
/// then runs it once more.
fn at_each_call(new: fn() -> Bench, work: impl Fn(&Bench) -> Result<(), UnitError>) {
    for holds in [false, true] {
        // Most calls that are answered late only poll.
        for left in (0..).step_by(if holds { 997 } else { 1 }) {
            let bench = new();
            bench.fake.device().holds = holds;
            bench.fake.left.store(left, core::sync::atomic::Ordering::Relaxed);
            let done = catch_unwind(AssertUnwindSafe(|| work(&bench)));
            bench.fake.left.store(u64::MAX, core::sync::atomic::Ordering::Relaxed);
            bench.fake.device().holds = false;
            if done.is_ok() {
                assert!(left > 2, "{left}");
                break;
            }
            // Earlier requests take effect now, even if their sender has unwound.
            bench.fake.catch_up();
            bench.works(left);
        }
    }
}

impl Bench {
    /// Checks that the driver still works: devices come and go, and unmapped pieces are gone.
    fn works(&self, left: u64) {
        let gone = |error: &UnitError| matches!(error, UnitError::NotAttached { .. });
        let detached = self.unit.detach(DeviceId(ENDPOINT));
        assert!(detached.as_ref().err().is_none_or(gone), "{left}: {detached:?}");
        assert_eq!(self.fake.device().endpoints.get(&ENDPOINT), None, "{left}: attached, and nobody knows");
        self.mapper.attach(DeviceId(ENDPOINT)).unwrap();
        assert!(self.mapped().iter().all(|piece| piece.0 < 64 * PAGE), "{left}");
        // Other pieces may stay mapped; but unmapped ones are gone.
        let _ = self.unmap(0, 64, &mut Gather::new());
        assert_eq!(self.mapper.sync(&Gather::everything()), Ok(()), "{left}");
        assert_eq!(self.mapped(), [], "{left}");
        // As many pieces as there are slots go with one doorbell.
        let before = self.fake.device().doorbells;
        self.map(64, &[1, 3, 5]);
        assert_eq!(
            (self.mapped().len(), self.fake.device().doorbells),
            (3, before + 1),
            "{left}: all slots are there"
        );
    }
}

/// A queue of three slots, so that a leaked one shows.
fn few_slots() -> Bench {
    let fake = Fake::new();
    fake.device().queue_sizes[0] = 8;
    Bench::of(fake)
}

#[test]
fn a_device_that_was_just_attached_or_detached_is_known() {
    let recorded = || {
        let bench = few_slots();
        bench.map(16, &[1, 3, 5]);
        bench
    };
    at_each_call(recorded, |bench| {
        bench.mapper.attach(DeviceId(ENDPOINT))?;
        bench.unit.detach(DeviceId(ENDPOINT))
    });
}

#[test]
fn what_was_just_mapped_or_unmapped_can_be_unmapped() {
    let attached = || {
        let bench = few_slots();
        bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
        bench
    };
    at_each_call(attached, |bench| {
        let mut gather = Gather::new();
        let late = |_| UnitError::TimedOut { what: "map", waited_ns: 0 };
        bench.map_in(16, &[1, 3, 5], &mut gather).map_err(late)?;
        let _ = bench.unmap(16, 3, &mut gather);
        bench.mapper.sync(&gather).map_err(UnitError::Unconfirmed)
    });
}
