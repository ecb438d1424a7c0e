//! Short turns during which what a CPU has found stays where it is: what others unlink is freed only when
//! every turn that might have seen it is over (the idea of read-copy-update).
//!
//! Memory ordering. A turn stores that it has begun and then loads pointers; whoever unlinks stores to the
//! pointer and then looks which turns are under way. As in [`Owned`](super::Owned), one of the two sees the
//! other's store: the turn's fence may be for the compiler only where the platform's
//! [`fence_all`](Platform::fence_all) makes every CPU pass a full barrier. What a turn did is seen by whoever
//! waited for its end: the store that ends it is a release, the load that finds out an acquire.

use alloc::boxed::Box;

use super::CachePadded;
use crate::platform::{LocalSlot, Platform};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, pause};

/// The turns of all CPUs.
#[derive(Debug)]
pub struct Sections {
    /// Odd during a turn.
    slots: Box<[CachePadded<AtomicU64>]>,
    /// Held for their turns by those without a slot.
    others: Mutex<()>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub enum Section<'a> {
    /// Of a CPU with a slot.
    Slot(&'a AtomicU64),
    /// Of one without.
    Shared(#[allow(dead_code, reason = "held until dropped")] MutexGuard<'a, ()>),
}

impl Sections {
    /// For `slots` CPUs.
    pub fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| CachePadded(AtomicU64::new(0))).collect(), others: Mutex::new(()) }
    }

    /// Begins a turn. Two stores in all, and no wait, for a CPU with a slot; a lock, which others hold for
    /// their turns, without one. Must not be called during another turn on the same slot.
    #[inline]
    pub fn enter(&self, slot: Option<&LocalSlot<'_>>) -> Section<'_> {
        match slot.and_then(|slot| Some((slot, self.slots.get(slot.index())?))) {
            Some((slot, turn)) => {
                turn.0.store(turn.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                slot.fence();
                Section::Slot(&turn.0)
            }
            None => Section::Shared(self.others.lock()),
        }
    }

    /// Waits until every turn that began before the call is over. One barrier of all CPUs; the caller is in
    /// no turn of its own and holds no slot.
    pub fn synchronize<P: Platform>(&self, platform: &P) {
        platform.fence_all();
        for turn in &self.slots {
            let began = turn.0.load(Ordering::Acquire);
            while began % 2 == 1 && turn.0.load(Ordering::Acquire) == began {
                pause();
            }
        }
        drop(self.others.lock());
    }
}

impl Drop for Section<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Self::Slot(turn) = self {
            turn.store(turn.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
    }
}
