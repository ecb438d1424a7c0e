//! Per-CPU values, each on cache lines of its own. The owner changes its value without an atomic read-modify-write.
//!
//! For a [`BiasedLock`] or a [`TurnLocal`] it does so in an exclusive section, during which nobody else has the value;
//! for a [`Counter`], which others only read, while it holds the CPU.
//!
//! Read `marks.rs` first: it has the protocol and its memory ordering. This layer uses `addr`, `heap`, `sync` and
//! `platform`.

mod biased_lock;
mod marks;
mod turn_local;

pub use biased_lock::BiasedLock;
pub use marks::{Marks, Section, Turn};
pub use turn_local::TurnLocal;

use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr;

use crate::broken::broken;
use crate::heap::{OutOfMemory, place_of, slice, write_fields};
use crate::sync::{AtomicU64, Ordering};

/// A value with two cache lines of its own, as x86 prefetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CachePadded<T>(pub T);

/// A word that only its holder changes, with plain loads and stores. A [`BiasedLock`], a [`TurnLocal`], or a lock
/// ensures that one caller at a time does.
#[derive(Debug, Default)]
pub struct LocalU64(AtomicU64);

impl LocalU64 {
    /// A word with `value`.
    pub fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Returns the value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Stores `value`.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl<T> CachePadded<T> {
    /// Makes one in `place`, around the value that `make` builds there.
    pub(crate) fn make_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        make: impl for<'b> FnOnce(&'b mut MaybeUninit<T>) -> Result<&'b mut T, OutOfMemory>,
    ) -> Result<&'a mut Self, OutOfMemory> {
        // SAFETY: `place_of`, 1: the field lies within `place`, which is borrowed exclusively and used in no other way
        // until `make` returns.
        let inner = unsafe { place_of(&raw mut (*place.as_mut_ptr()).0) };
        let at = inner.as_mut_ptr();
        if ptr::from_mut(make(inner)?) != at {
            broken("a value is made in the place that it was given");
        }
        // SAFETY: `make` returned a reference to an initialised value at this address, and the value is the only field.
        Ok(unsafe { place.assume_init_mut() })
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// One `T` for each CPU, and one more that callers without a CPU share. Other CPUs may use a value at the same time, by
/// `&T`: they drain that of a released CPU.
#[derive(Debug)]
pub struct PerCpu<T> {
    own: Box<[CachePadded<T>]>,
    shared: CachePadded<T>,
}

impl<T> PerCpu<T> {
    /// Makes `cpus` values and the shared one. Context: allocates; for set-up.
    pub fn new(cpus: usize, mut make: impl FnMut() -> T) -> Result<Self, OutOfMemory> {
        Ok(Self { own: slice(cpus, |_| Ok(CachePadded(make())))?, shared: CachePadded(make()) })
    }

    /// As [`new`](Self::new), in `place`, for values that are too large for a stack. After an error the place is empty.
    pub(crate) fn make_in(
        place: &mut MaybeUninit<Self>,
        cpus: usize,
        mut make: impl FnMut() -> T,
    ) -> Result<&mut Self, OutOfMemory> {
        let own = slice(cpus, |_| Ok(CachePadded(make())))?;
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field of `place`, which is borrowed exclusively. `write_fields` covers all fields.
        unsafe {
            write_fields!(at, made [], own: own, shared: CachePadded(make()));
            Ok(place.assume_init_mut())
        }
    }

    /// Returns the value of CPU `index` and `true`, or the shared value and `false` for a caller without a CPU or with
    /// a number that has no value. O(1).
    #[inline]
    pub fn get(&self, index: Option<usize>) -> (&T, bool) {
        match index.and_then(|index| self.own(index)) {
            Some(own) => (own, true),
            None => (&self.shared.0, false),
        }
    }

    /// Returns the value of CPU `index`, if there is one. O(1).
    #[inline]
    pub fn own(&self, index: usize) -> Option<&T> {
        self.own.get(index).map(|own| &own.0)
    }

    /// Returns all values, the shared one last.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.own.iter().chain([&self.shared]).map(|padded| &padded.0)
    }
}

/// A per-CPU count in a [`PerCpu`], summed when it is read. The CPU's holder adds with a load and a store. Callers
/// without a CPU share one word and pay for an atomic addition.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`, which may wrap. `alone` says that the count is of the caller's CPU, not shared. O(1). Context: any;
    /// never waits.
    #[inline]
    pub fn add(&self, alone: bool, n: u64) {
        // Relaxed: no other caller writes the word of a CPU that we hold, and a reader's sum promises no more than a
        // value that was true at some time.
        if alone {
            self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
        } else {
            self.0.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Returns the count.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/percpu.rs"]
mod tests;
