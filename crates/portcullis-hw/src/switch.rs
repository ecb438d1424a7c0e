//! Whether a unit may use its driver's device tables. Until then its caches have nothing of them, and it may not take commands: AMD-Vi
//! fetches none before it is on, and a VT-d unit decodes them in the mode of its current root, which is not this driver's.
//!
//! Memory ordering. Only exchanges change the flag, and a caller that finds it clear has made one of them, which acquires and releases.
//! That exchange is before the one of [`Switch::turn_on`], which is before the write of the register that gives the unit the tables: so the
//! unit reads what the caller had stored. The same exchanges put calls in one order for memory, as
//! [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) promises: calls that find the flag clear are before calls that find
//! it set, which acquire, and among themselves in the order of their exchanges.

use crate::sync::{AtomicBool, Ordering};

#[derive(Debug)]
pub(crate) struct Switch(AtomicBool);

impl Switch {
    pub fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// From now on invalidations are needed. Called before the unit is given the tables.
    pub fn turn_on(&self) {
        self.0.swap(true, Ordering::AcqRel);
    }

    /// Whether invalidations are needed. If not, the unit will read what the caller has stored.
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire) || self.0.fetch_or(false, Ordering::AcqRel)
    }
}

#[cfg(all(test, loom))]
mod model {
    use alloc::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    /// A table's entry, data of another caller, and the switch.
    struct Shared {
        entry: AtomicU64,
        kept: AtomicU64,
        switch: Switch,
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared { entry: AtomicU64::new(0), kept: AtomicU64::new(0), switch: Switch::new() })
    }

    /// A caller stores an entry, and the switch tells it that no invalidation is needed. Then the unit, once it is on, reads that entry.
    #[test]
    fn what_was_stored_before_the_unit_is_on_is_read() {
        loom::model(|| {
            let here = shared();
            let there = Arc::clone(&here);
            let unit = thread::spawn(move || {
                there.switch.turn_on();
                there.entry.load(Ordering::Relaxed)
            });
            here.entry.store(1, Ordering::Relaxed);
            let is_on = here.switch.is_on();
            let read = unit.join().unwrap();
            assert!(is_on || read == 1, "nothing to forget, and the unit has read what was there before");
        });
    }

    /// Of two callers one is first, and the other sees its stores.
    #[test]
    fn calls_are_in_one_order() {
        loom::model(|| {
            let here = shared();
            let there = Arc::clone(&here);
            let other = thread::spawn(move || {
                there.entry.store(1, Ordering::Relaxed);
                let is_on = there.switch.is_on();
                (is_on, there.kept.load(Ordering::Relaxed))
            });
            here.kept.store(1, Ordering::Relaxed);
            let is_on = here.switch.is_on();
            let entry = here.entry.load(Ordering::Relaxed);
            let (other_is_on, kept) = other.join().unwrap();
            assert!(!is_on && !other_is_on);
            assert!(entry == 1 || kept == 1, "neither is first");
        });
    }
}
