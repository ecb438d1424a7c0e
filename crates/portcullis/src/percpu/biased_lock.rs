//! A biased lock: one caller at a time has its value. Its CPU takes it without an atomic
//! read-modify-write; another CPU, rarely, revokes that bias, which costs a barrier of all CPUs.
//! The idea is that of Kawachiya, Koseki and Onodera ("Lock Reservation", OOPSLA 2002).
//!
//! While its CPU holds a lock it is in a [turn](super::Marks), and has the value to itself. The
//! mark that says so stands right behind the value.

use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ptr;

use super::CachePadded;
use super::marks::{Mark, REVOKED, revoke};
use crate::broken::broken;
use crate::heap::{OutOfMemory, place_of, slice, slice_in};
use crate::platform::{LocalCpu, Platform};
use crate::sync::Mutex;

/// One `T` for each CPU, used by the CPU's owner alone, or, rarely, by one other at a time.
#[derive(Debug)]
pub struct BiasedLock<T> {
    cpus: Box<[CachePadded<Owned<T>>]>,
    /// Callers that revoke hold it, one at a time. It lies apart from what every turn reads.
    revoking: CachePadded<Mutex<()>>,
}

#[derive(Debug)]
#[repr(C)]
struct Owned<T> {
    value: T,
    mark: Mark,
}

impl<T> BiasedLock<T> {
    /// Makes a value for each of `cpus` CPUs, by `make`. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn new(cpus: usize, mut make: impl FnMut() -> T) -> Result<Self, OutOfMemory> {
        let cpu = |_| Ok(CachePadded(Owned { value: make(), mark: Mark::default() }));
        Ok(Self { cpus: slice(cpus, cpu)?, revoking: CachePadded::default() })
    }

    /// As [`new`](Self::new), for values that are too large for a stack: `make` makes each in its place.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn new_in(
        cpus: usize,
        mut make: impl for<'a> FnMut(&'a mut MaybeUninit<T>) -> &'a mut T,
    ) -> Result<Self, OutOfMemory> {
        let cpus = slice_in(cpus, |_, place: &mut MaybeUninit<CachePadded<Owned<T>>>| {
            let at = place.as_mut_ptr();
            // SAFETY: the place of the value lies within the place of all, which is the caller's alone.
            let value = unsafe { place_of(&raw mut (*at).0.value) };
            let inner = value.as_mut_ptr();
            if ptr::from_mut(make(value)) != inner {
                broken("a value is made in the place that it was given");
            }
            // SAFETY: the mark is a field in the caller's place; the value is there, by the reference to it, and there is nothing else.
            Ok(unsafe {
                (&raw mut (*at).0.mark).write(Mark::default());
                place.assume_init_mut()
            })
        })?;
        Ok(Self { cpus, revoking: CachePadded::default() })
    }

    /// Calls `f` with the value of `cpu`, alone with it, in a turn. Returns `None`, without a call,
    /// where the caller has no CPU or one without a value, while another caller has the value, and
    /// inside another such call on the same CPU (an interrupt handler's). Two stores and two loads;
    /// never waits.
    #[inline]
    pub fn with<R>(&self, cpu: Option<&LocalCpu<'_>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        let cpu = cpu?;
        let Owned { value, mark } = &self.cpus.get(cpu.index())?.0;
        let _turn = mark.alone(cpu)?;
        Some(f(value))
    }

    /// Calls `f` with every CPU's number and value (or with those of the CPU `only`), one after the
    /// other, each of them alone. Meanwhile the owners do without.
    ///
    /// Costs one barrier of all CPUs and waits for each owner's turn to end. Not to be called inside
    /// [`with`](Self::with) or another such call, with a CPU lent, or from an interrupt handler.
    pub fn with_others<P: Platform>(&self, platform: &P, only: Option<usize>, mut f: impl FnMut(usize, &T)) {
        let which = only.map_or(0..usize::MAX, |only| only..only.saturating_add(1));
        let end = which.end.min(self.cpus.len());
        let first = which.start.min(end);
        let cpus = self.cpus[first..end].iter().map(|cpu| &cpu.0);
        // All turns that have begun end before the first value is looked at: one may send something to another.
        revoke(platform, &self.revoking, cpus.clone().map(|cpu| &cpu.mark), REVOKED, || {
            (first..).zip(cpus).for_each(|(index, cpu)| f(index, &cpu.value));
        });
    }

    /// Every value, without keeping its owner away: for figures that may be a little off.
    pub fn peek(&self) -> impl Iterator<Item = &T> {
        self.cpus.iter().map(|cpu| &cpu.value)
    }

    /// Bytes of memory that the values take, with their marks and what keeps them apart.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.cpus)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_not_inside_another_and_is_over_after_a_panic() {
        let owned = BiasedLock::new(1, || 7).unwrap();
        // SAFETY: one thread uses these values, one call after the other.
        let cpus = [0, 1].map(|index| unsafe { LocalCpu::new(index) });
        let [own, beyond] = &cpus;
        assert_eq!(owned.with(Some(own), |value| (*value, owned.with(Some(own), |_| ()))), Some((7, None)));
        // CPUs without a value, and none at all.
        assert!(owned.with(Some(beyond), |_| ()).is_none() && owned.with(None, |_| ()).is_none());
        let in_turn = || owned.with(Some(own), |_| -> () { panic!("as a platform's clock does") });
        #[cfg(feature = "std")]
        assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(in_turn)).is_err());
        #[cfg(not(feature = "std"))]
        let _ = in_turn;
        assert_eq!(owned.with(Some(own), |value| *value), Some(7));
    }
}
