//! Values that their CPU uses without an atomic read-modify-write, and that others can still reach, rarely.
//!
//! A lock costs its owner two atomic operations even when nobody else wants it. Here the owner only stores
//! that it is *busy* and loads whether it was *revoked*; whoever else wants in revokes, makes every CPU pass a
//! barrier, and waits until the owner is not busy. It is Dekker's mutual exclusion with the price moved to
//! the side that is rare.
//!
//! Memory ordering. Both sides store their own flag and then load the other's; at least one must see the
//! other's store. The owner's fence between the two may be for the compiler only
//! ([`LocalSlot::with_light_fence`]) where the platform's [`fence_all`](Platform::fence_all) makes every CPU
//! pass a full barrier: then either the owner's store is before that barrier, and the other side sees it
//! after, or the owner's load is after it, and sees the revocation. The values themselves are handed over by
//! the release store that ends each side's turn and the acquire load by which the other finds out.

use alloc::boxed::Box;
use core::ops::Range;

use super::CachePadded;
use crate::platform::{LocalSlot, Platform};
use crate::sync::{AtomicU64, Mutex, Ordering, pause};

/// One `T` for each slot, used by the slot's owner alone, or, rarely, by one other at a time.
#[derive(Debug)]
pub struct Owned<T> {
    slots: Box<[CachePadded<Slot<T>>]>,
    /// Held by those who revoke, one at a time. Apart from what every turn reads.
    others: CachePadded<Mutex<()>>,
}

#[derive(Debug)]
#[repr(C)]
struct Slot<T> {
    value: T,
    busy: AtomicU64,
    revoked: AtomicU64,
}

/// Ends the owner's turn, also when its closure panics.
struct Busy<'a>(&'a AtomicU64);

impl Drop for Busy<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Gives all owners their values back, also when the closure panics.
struct Revoked<'a, T>(&'a [CachePadded<Slot<T>>]);

impl<T> Drop for Revoked<'_, T> {
    fn drop(&mut self) {
        self.0.iter().for_each(|slot| slot.revoked.store(0, Ordering::Release));
    }
}

impl<T> Owned<T> {
    /// `slots` values, each made by `make`.
    pub fn new(slots: usize, mut make: impl FnMut() -> T) -> Self {
        let slot = |value| Slot { value, busy: AtomicU64::new(0), revoked: AtomicU64::new(0) };
        Self {
            slots: (0..slots).map(|_| CachePadded(slot(make()))).collect(),
            others: CachePadded::default(),
        }
    }

    /// Calls `f` with the value of `slot`, alone with it. `None`, without a call, for a caller that has no
    /// slot, while somebody else is at it, and inside another such call on the same slot (an interrupt
    /// handler's). Two stores and a load; never waits.
    #[inline]
    pub fn with<R>(&self, slot: Option<&LocalSlot<'_>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        let slot = slot?;
        let own = &self.slots.get(slot.index())?.0;
        if own.busy.load(Ordering::Relaxed) != 0 {
            return None;
        }
        own.busy.store(1, Ordering::Relaxed);
        let busy = Busy(&own.busy);
        slot.fence();
        if own.revoked.load(Ordering::Acquire) != 0 {
            return None;
        }
        let result = f(&own.value);
        drop(busy);
        Some(result)
    }

    /// Calls `f` with every slot's number and value in turn (or with those of the slot `only`), each of them
    /// alone. Meanwhile the owners do without.
    ///
    /// Costs one barrier of all CPUs and waits for each owner's turn to end. Not to be called inside
    /// [`with`](Self::with), with a slot lent, or from an interrupt handler.
    pub fn with_others<P: Platform>(&self, platform: &P, only: Option<usize>, f: impl FnMut(usize, &T)) {
        let which = only.map_or(0..usize::MAX, |only| only..only.saturating_add(1));
        self.with_range(platform, which, f);
    }

    /// The same with those of the slots below `end`.
    pub fn with_first<P: Platform>(&self, platform: &P, end: usize, f: impl FnMut(usize, &T)) {
        self.with_range(platform, 0..end, f);
    }

    fn with_range<P: Platform>(&self, platform: &P, which: Range<usize>, mut f: impl FnMut(usize, &T)) {
        let end = which.end.min(self.slots.len());
        let first = which.start.min(end);
        let which = &self.slots[first..end];
        if which.is_empty() {
            return;
        }
        let _one_at_a_time = self.others.lock();
        let chosen = || (first..).zip(which);
        let _revoked = Revoked(which);
        chosen().for_each(|(_, slot)| slot.revoked.store(1, Ordering::Relaxed));
        platform.fence_all();
        // All turns that have begun end before the first value is looked at: one may send something to another.
        for (_, slot) in chosen() {
            while slot.busy.load(Ordering::Acquire) != 0 {
                pause();
            }
        }
        chosen().for_each(|(index, slot)| f(index, &slot.value));
    }

    /// Every value, without keeping its owner away: for figures that may be a little off.
    pub fn peek(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &slot.value)
    }

    /// How many slots it has values for.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of memory that the values take, with what keeps them apart.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }
}
