//! Per-CPU values that share section flags: one exclusive section ([`Turn`]) gives access to several values. At any
//! time at most one caller has access to a value, as with a [`BiasedLock`](super::BiasedLock).

use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ops::Range;

use super::marks::{REVOKED, REVOKED_APART};
use super::{CachePadded, Marks, Turn};
use crate::heap::{OutOfMemory, Shared, slice, slice_in};
use crate::platform::{LocalCpu, Platform};

/// One `T` for each CPU. The owner uses it in its exclusive sections of `marks`. Rarely, one other caller at a time has
/// it: meanwhile the owner has no access to any value of these marks, or, with values that are [revoked
/// separately](Self::apart_in), no access to these.
#[derive(Debug)]
pub struct TurnLocal<T, const APART: bool = false> {
    values: Box<[CachePadded<T>]>,
    marks: Shared<Marks>,
}

impl<T> TurnLocal<T> {
    /// Makes a value for each of the first `cpus` CPUs that have `marks`; `make` gets the CPU's number. Context:
    /// allocates; for set-up.
    ///
    /// # Errors
    /// [`OutOfMemory`], also where `make` returns it.
    pub fn new(
        marks: Shared<Marks>,
        cpus: usize,
        mut make: impl FnMut(usize) -> Result<T, OutOfMemory>,
    ) -> Result<Self, OutOfMemory> {
        let cpus = cpus.min(marks.cpus());
        Ok(Self { values: slice(cpus, |cpu| Ok(CachePadded(make(cpu)?)))?, marks })
    }

    /// As [`new`](Self::new), for values that are too large for a stack: `make` builds each in its place.
    pub(crate) fn new_in(
        marks: Shared<Marks>,
        cpus: usize,
        mut make: impl for<'a> FnMut(usize, &'a mut MaybeUninit<T>) -> Result<&'a mut T, OutOfMemory>,
    ) -> Result<Self, OutOfMemory> {
        let cpus = cpus.min(marks.cpus());
        let values = slice_in(cpus, |cpu, place| CachePadded::make_in(place, |place| make(cpu, place)))?;
        Ok(Self { values, marks })
    }
}

impl<T> TurnLocal<T, true> {
    /// As [`new`](TurnLocal::new), for values that are revoked *separately*: meanwhile their owners keep access to all
    /// other values of the same marks. `make` builds each in its place, as they may be too large for a stack.
    pub fn apart_in(
        marks: Shared<Marks>,
        cpus: usize,
        make: impl for<'a> FnMut(usize, &'a mut MaybeUninit<T>) -> Result<&'a mut T, OutOfMemory>,
    ) -> Result<Self, OutOfMemory> {
        let TurnLocal { values, marks } = TurnLocal::new_in(marks, cpus, make)?;
        Ok(Self { values, marks })
    }
}

impl<T, const APART: bool> TurnLocal<T, APART> {
    #[inline]
    pub(crate) fn marks(&self) -> &Shared<Marks> {
        &self.marks
    }

    /// Returns the value of the section's CPU. `None` for a section of other marks, for a CPU that has no value, and
    /// while another CPU has revoked it separately.
    #[inline]
    pub fn get<'a>(&'a self, turn: &'a Turn<'_>) -> Option<&'a T> {
        if turn.is_of(&self.marks) { self.of_own(turn) } else { None }
    }

    /// As [`get`](Self::get), for a section of these marks.
    #[inline]
    fn of_own<'a>(&'a self, turn: &'a Turn<'_>) -> Option<&'a T> {
        if APART && !turn.is_whole() { None } else { self.values.get(turn.index()).map(|value| &value.0) }
    }

    /// Begins an exclusive section of `cpu`, which must be of the platform that these values are for.
    #[inline]
    pub(crate) fn turn<'a>(&'a self, cpu: &'a LocalCpu<'_>) -> Option<Turn<'a>> {
        // SAFETY: `Marks::turn`, 1: the crate uses such values with CPUs of one platform only (`OnePlatform`).
        unsafe { self.marks.turn(cpu) }
    }

    /// Calls `f` in an exclusive section of `cpu`, with its value if it has one. Returns `None`, without a call, where
    /// the section cannot begin.
    #[inline(always)]
    pub(crate) fn in_turn<R>(
        &self,
        cpu: &LocalCpu<'_>,
        f: impl FnOnce(&Turn<'_>, Option<&T>) -> R,
    ) -> Option<R> {
        let turn = self.turn(cpu)?;
        Some(f(&turn, self.of_own(&turn)))
    }

    /// Calls `f` with the number and value of each CPU, or of the CPU `only`, one after the other. Meanwhile the owners
    /// have no access to any value of the marks, or, where these values are [revoked separately](Self::apart_in), to
    /// these.
    ///
    /// Costs one barrier of all CPUs. Context: waits for each owner's exclusive section to end. Not inside a section,
    /// or another such call, of the same marks; not with a CPU lent; not in an interrupt handler.
    pub fn with_others<P: Platform>(&self, platform: &P, only: Option<usize>, f: impl FnMut(usize, &T)) {
        let which = only.map_or(0..usize::MAX, |only| only..only.saturating_add(1));
        self.with_range(platform, which, f);
    }

    /// As [`with_others`](Self::with_others), for the CPUs below `end`.
    pub fn with_first<P: Platform>(&self, platform: &P, end: usize, f: impl FnMut(usize, &T)) {
        self.with_range(platform, 0..end, f);
    }

    fn with_range<P: Platform>(&self, platform: &P, which: Range<usize>, mut f: impl FnMut(usize, &T)) {
        let end = which.end.min(self.values.len());
        let which = which.start.min(end)..end;
        let revoked = if APART { REVOKED_APART } else { REVOKED };
        // As in `BiasedLock::with_others`, all sections that have begun end before `f` sees the first value.
        self.marks.revoke(platform, which.clone(), revoked, || {
            which.clone().zip(&self.values[which]).for_each(|(index, value)| f(index, &value.0));
        });
    }

    /// Waits, without a revocation, until the exclusive sections that CPUs below `end` began before the call are over.
    /// The caller sees what these sections did, and what their CPUs did before; later sections see what the caller did
    /// before the call.
    ///
    /// Costs one barrier of all CPUs, unless `end` is 0, and a load for each. Context: as for
    /// [`with_others`](Self::with_others).
    pub fn wait_for_first<P: Platform>(&self, platform: &P, end: usize) {
        self.marks.wait_for_turns(platform, end.min(self.values.len()));
    }

    /// Returns all values, without a revocation: for figures that may be slightly off.
    pub fn peek(&self) -> impl Iterator<Item = &T> {
        self.values.iter().map(|value| &value.0)
    }

    /// Returns the number of values.
    pub fn cpus(&self) -> usize {
        self.values.len()
    }

    /// Bytes of memory in the values, their padding and the section flags.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.values) + self.marks.bytes()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/percpu/turn_local.rs"]
mod tests;
