//! Short turns during which what a CPU has found stays where it is: what others unlink is freed only when
//! every turn that might have seen it is over (the idea of read-copy-update).
//!
//! Memory ordering. A turn stores that it has begun and then loads pointers; whoever unlinks stores to the
//! pointer and then looks which turns are under way. As in [`Owned`](super::Owned), one of the two sees the
//! other's store: the turn's fence may be for the compiler only where the platform's
//! [`fence_all`](Platform::fence_all) makes every CPU pass a full barrier. What a turn did is seen by whoever
//! waited for its end: the store that ends it is a release, the load that finds out an acquire. So is the store
//! that begins the next, by which the end of the one before may be found out.

use alloc::boxed::Box;

use super::CachePadded;
use crate::platform::{LocalSlot, Platform};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, pause};

/// The turns of all CPUs, and beside each what that CPU keeps from one of its turns to the next.
#[derive(Debug)]
pub struct Sections<T = ()> {
    slots: Box<[CachePadded<Cpu<T>>]>,
    /// Held for their turns by those without a slot.
    others: Mutex<()>,
}

#[derive(Debug)]
#[repr(C)]
struct Cpu<T> {
    /// Odd during a turn.
    turns: AtomicU64,
    kept: T,
}

/// The turn of a CPU with a slot, until it is dropped; nothing, inside another turn on the same slot: that one is
/// the longer.
#[derive(Debug)]
pub struct Turn<'a, T = ()>(Option<&'a Cpu<T>>);

/// A turn, until it is dropped.
#[derive(Debug)]
pub enum Section<'a, T = ()> {
    /// Of a CPU with a slot.
    Slot(#[allow(dead_code, reason = "held until dropped")] Turn<'a, T>),
    /// Of one without.
    Shared(#[allow(dead_code, reason = "held until dropped")] MutexGuard<'a, ()>),
}

impl<T: Default> Sections<T> {
    /// For `slots` CPUs.
    pub fn new(slots: usize) -> Self {
        let cpu = |_| CachePadded(Cpu { turns: AtomicU64::new(0), kept: T::default() });
        Self { slots: (0..slots).map(cpu).collect(), others: Mutex::new(()) }
    }
}

impl<T> Sections<T> {
    /// Begins a turn. Two stores in all, and no wait, for a CPU with a slot; a lock, which others hold for
    /// their turns, without one. A caller without a slot must not be in a turn already; one with a slot may.
    #[inline]
    pub fn enter(&self, slot: Option<&LocalSlot<'_>>) -> Section<'_, T> {
        match slot.and_then(|slot| self.begin(slot)) {
            Some(turn) => Section::Slot(turn),
            None => Section::Shared(self.others.lock()),
        }
    }

    /// As [`enter`](Self::enter), without the way for those without a slot: `None` where the slot is none of
    /// these.
    #[inline]
    pub fn begin(&self, slot: &LocalSlot<'_>) -> Option<Turn<'_, T>> {
        let cpu = &self.slots.get(slot.index())?.0;
        let turns = cpu.turns.load(Ordering::Relaxed);
        if turns % 2 == 1 {
            return Some(Turn(None));
        }
        // Release: who waits for the turn before may see this one in its place.
        cpu.turns.store(turns.wrapping_add(1), Ordering::Release);
        slot.fence();
        Some(Turn(Some(cpu)))
    }

    /// Waits until every turn that began before the call is over. One barrier of all CPUs; the caller is in
    /// no turn of its own and holds no slot.
    pub fn synchronize<P: Platform>(&self, platform: &P) {
        platform.fence_all();
        for cpu in &self.slots {
            let began = cpu.turns.load(Ordering::Acquire);
            while began % 2 == 1 && cpu.turns.load(Ordering::Acquire) == began {
                pause();
            }
        }
        drop(self.others.lock());
    }
}

impl<T> Turn<'_, T> {
    /// What the CPU keeps, which no other reads or writes; nothing inside another turn on the same slot.
    #[inline]
    pub fn kept(&self) -> Option<&T> {
        self.0.map(|cpu| &cpu.kept)
    }
}

impl<T> Drop for Turn<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(Cpu { turns, .. }) = self.0 {
            turns.store(turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
    }
}
