//! A biased lock: its CPU takes it without an atomic read-modify-write, and another CPU, rarely, revokes that bias, which
//! costs a barrier of all CPUs. The idea is that of Kawachiya, Koseki and Onodera ("Lock Reservation", OOPSLA 2002).
//!
//! While its CPU holds a lock it is in a [turn](super::Marks), and has the value to itself. The mark that says so stands beside
//! the value, on the same cache lines.

use alloc::boxed::Box;

use super::CachePadded;
use super::marks::{Mark, REVOKED, revoke};
use crate::platform::{LocalSlot, Platform};
use crate::sync::Mutex;

/// One `T` for each slot, used by the slot's owner alone, or, rarely, by one other at a time.
#[derive(Debug)]
pub struct BiasedLock<T> {
    slots: Box<[CachePadded<Slot<T>>]>,
    /// Held by those who revoke, one at a time. Apart from what every turn reads.
    revoking: CachePadded<Mutex<()>>,
}

#[derive(Debug)]
#[repr(C)]
struct Slot<T> {
    value: T,
    mark: Mark,
}

impl<T> BiasedLock<T> {
    /// `slots` values, each made by `make`.
    pub fn new(slots: usize, mut make: impl FnMut() -> T) -> Self {
        let slot = |_| CachePadded(Slot { value: make(), mark: Mark::default() });
        Self { slots: (0..slots).map(slot).collect(), revoking: CachePadded::default() }
    }

    /// Calls `f` with the value of `slot`, alone with it, in a turn. `None`, without a call, for a caller that has no slot, or
    /// one that there is no value for, while another CPU is at it, and inside another such call on the same slot (an
    /// interrupt handler's). Two stores and two loads; never waits.
    #[inline]
    pub fn with<R>(&self, slot: Option<&LocalSlot<'_>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        let slot = slot?;
        let Slot { value, mark } = &self.slots.get(slot.index())?.0;
        let _turn = mark.alone(slot)?;
        Some(f(value))
    }

    /// Calls `f` with every slot's number and value in turn (or with those of the slot `only`), each of them
    /// alone. Meanwhile the owners do without.
    ///
    /// Costs one barrier of all CPUs and waits for each owner's turn to end. Not to be called inside
    /// [`with`](Self::with) or another such call, with a slot lent, or from an interrupt handler.
    pub fn with_others<P: Platform>(&self, platform: &P, only: Option<usize>, mut f: impl FnMut(usize, &T)) {
        let which = only.map_or(0..usize::MAX, |only| only..only.saturating_add(1));
        let end = which.end.min(self.slots.len());
        let first = which.start.min(end);
        let slots = self.slots[first..end].iter().map(|slot| &slot.0);
        // All turns that have begun end before the first value is looked at: one may send something to another.
        revoke(platform, &self.revoking, slots.clone().map(|slot| &slot.mark), REVOKED, || {
            (first..).zip(slots).for_each(|(index, slot)| f(index, &slot.value));
        });
    }

    /// Every value, without keeping its owner away: for figures that may be a little off.
    pub fn peek(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &slot.value)
    }

    /// Bytes of memory that the values take, with their marks and what keeps them apart.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_not_inside_another_and_is_over_after_a_panic() {
        let owned = BiasedLock::new(1, || 7);
        // SAFETY: one thread uses these values, one call after the other.
        let slots = [0, 1].map(|index| unsafe { LocalSlot::new(index) });
        let [own, beyond] = &slots;
        assert_eq!(owned.with(Some(own), |value| (*value, owned.with(Some(own), |_| ()))), Some((7, None)));
        // Slots without a value, and none at all.
        assert!(owned.with(Some(beyond), |_| ()).is_none() && owned.with(None, |_| ()).is_none());
        let in_turn = || owned.with(Some(own), |_| -> () { panic!("as a platform's clock does") });
        #[cfg(feature = "std")]
        assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(in_turn)).is_err());
        #[cfg(not(feature = "std"))]
        let _ = in_turn;
        assert_eq!(owned.with(Some(own), |value| *value), Some(7));
    }
}
