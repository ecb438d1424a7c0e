//! Per-CPU values, each on cache lines of its own, and counters that only their own CPU writes.

mod owned;
mod sections;

pub use owned::Owned;
pub use sections::{Section, Sections, Turn};

use alloc::boxed::Box;
use core::ops::Deref;

use crate::platform::LocalSlot;
use crate::sync::{AtomicU64, Ordering};

/// A value alone on its cache lines: two lines, because x86 fetches them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CachePadded<T>(pub T);

/// A word that only its slot's owner changes: no read-modify-write is needed, and none is done.
///
/// What makes that safe is [`Owned`]: the owner keeps everybody else out with plain stores.
#[derive(Debug, Default)]
pub struct LocalU64(AtomicU64);

impl LocalU64 {
    /// The word `value`.
    pub fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Its value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Makes it `value`.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// One `T` for each local slot, and one more that callers without a slot share.
///
/// Neighbours never share a cache line. A `T` must tolerate shared access (`&T`): whoever drains a slot that
/// its CPU has left reaches it from elsewhere.
#[derive(Debug)]
pub struct PerCpu<T> {
    values: Box<[CachePadded<T>]>,
}

impl<T> PerCpu<T> {
    /// `slots` values and the shared one, each made by `make`. Allocates; may be slow.
    pub fn new(slots: usize, mut make: impl FnMut() -> T) -> Self {
        Self { values: (0..=slots).map(|_| CachePadded(make())).collect() }
    }

    /// The value of `slot`, or the shared one for a caller that has none, or one that there is no value for: see
    /// [`own`](Self::own). O(1).
    #[inline]
    pub fn get(&self, slot: Option<&LocalSlot<'_>>) -> &T {
        match slot.and_then(|slot| self.own(slot)) {
            Some(own) => own,
            None => self.shared(),
        }
    }

    /// The value that is the slot's alone; `None` for a slot beyond those that this was made for. O(1).
    #[inline]
    pub fn own(&self, slot: &LocalSlot<'_>) -> Option<&T> {
        let (_, own) = self.values.split_last()?;
        own.get(slot.index()).map(|padded| &padded.0)
    }

    /// The value that all callers without one of their own share. O(1).
    #[inline]
    pub fn shared(&self) -> &T {
        &self.values[self.values.len() - 1]
    }

    /// How many values there are, the shared one included.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Never: there is a shared value at least.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The value with the number `index`, the shared one's being the last.
    pub fn at(&self, index: usize) -> Option<&T> {
        self.values.get(index).map(|padded| &padded.0)
    }

    /// Every value, the shared one last.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.values.iter().map(|padded| &padded.0)
    }
}

/// A count that is kept per CPU and summed when it is read.
///
/// The owner of a slot adds with a load and a store, without an atomic read-modify-write: nobody else writes
/// that word. Callers without a slot share one word and pay for it.
#[derive(Debug)]
pub struct Counter {
    values: PerCpu<AtomicU64>,
}

impl Counter {
    /// A count of 0 for `slots` slots.
    pub fn new(slots: usize) -> Self {
        Self { values: PerCpu::new(slots, || AtomicU64::new(0)) }
    }

    /// Adds `n`. O(1), no wait.
    #[inline]
    pub fn add(&self, slot: Option<&LocalSlot<'_>>, n: u64) {
        match slot.and_then(|slot| self.values.own(slot)) {
            // Relaxed: the slot is ours alone until the closure that lent it returns, and a reader that sums
            // while others add promises no more than a count that was true at some time.
            Some(own) => own.store(own.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed),
            None => {
                self.values.shared().fetch_add(n, Ordering::Relaxed);
            }
        }
    }

    /// What was added by the caller's slot, or by all without one.
    pub fn of(&self, slot: Option<&LocalSlot<'_>>) -> u64 {
        self.values.get(slot).load(Ordering::Relaxed)
    }

    /// What was added by each slot, and last by those without one.
    pub fn each(&self) -> impl Iterator<Item = u64> {
        self.values.iter().map(|value| value.load(Ordering::Relaxed))
    }

    /// The sum over all slots. O(slots).
    pub fn sum(&self) -> u64 {
        self.each().fold(0, u64::wrapping_add)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn slot(index: usize) -> LocalSlot<'static> {
        // SAFETY: one thread uses these values, one call after the other.
        unsafe { LocalSlot::new(index) }
    }

    #[test]
    fn each_slot_has_a_value_and_those_without_share_one() {
        for slots in [0, 1, 3] {
            let mut next = 0..;
            let values = PerCpu::new(slots, || next.next());
            assert_eq!(values.len(), slots + 1);
            assert_eq!(values.iter().flatten().copied().collect::<Vec<_>>(), (0..=slots).collect::<Vec<_>>());
            for index in 0..slots {
                assert_eq!(values.get(Some(&slot(index))), &Some(index));
            }
            // A slot that is none of these is nobody's.
            for none in [None, Some(&slot(slots)), Some(&slot(usize::MAX))] {
                assert_eq!(values.get(none), &Some(slots));
            }
            assert_eq!((values.at(slots), values.at(slots + 1)), (Some(&Some(slots)), None));
        }
    }

    #[test]
    fn neighbours_share_no_two_lines() {
        let values = PerCpu::new(2, || 0_u8);
        let places: Vec<_> = values.iter().map(|value| core::ptr::from_ref(value).addr()).collect();
        assert!(places.iter().all(|place| place % 128 == 0));
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 128));
    }

    #[test]
    fn what_all_add_is_summed_and_told_apart() {
        let counter = Counter::new(2);
        let adds = [(Some(slot(0)), 5), (Some(slot(1)), 70), (None, 900), (Some(slot(0)), 1), (None, 3)];
        adds.iter().for_each(|(slot, n)| counter.add(slot.as_ref(), *n));
        assert_eq!(counter.each().collect::<Vec<_>>(), [6, 70, 903]);
        assert_eq!(counter.sum(), 979);
        assert_eq!((counter.of(Some(&slot(0))), counter.of(None)), (6, 903));
        // Fewer, on another CPU than counted them.
        counter.add(Some(&slot(1)), 76_u64.wrapping_neg());
        assert_eq!(counter.sum(), 903);
    }
}
