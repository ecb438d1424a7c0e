//! A biased lock: one caller at a time has its value. Its CPU takes it without an atomic read-modify-write. Rarely
//! another CPU revokes the bias, at the cost of a barrier on all CPUs (Kawachiya, Koseki and Onodera, "Lock
//! Reservation", OOPSLA 2002). While its CPU holds the lock, it is in an exclusive [section](super::Marks).

use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ptr;

use super::CachePadded;
use super::marks::{Mark, REVOKED, revoke};
use crate::broken::broken;
use crate::heap::{OutOfMemory, place_of, slice, slice_in};
use crate::platform::{LocalCpu, Platform};
use crate::sync::Mutex;

/// One `T` for each CPU, used by the owner, or, rarely, by one other caller at a time.
#[derive(Debug)]
pub struct BiasedLock<T> {
    cpus: Box<[CachePadded<Owned<T>>]>,
    /// Serialises revocations. It lies on other cache lines than the flags, which every section reads.
    revoking: CachePadded<Mutex<()>>,
}

#[derive(Debug)]
#[repr(C)]
struct Owned<T> {
    value: T,
    mark: Mark,
}

impl<T> BiasedLock<T> {
    /// Makes a value for each of `cpus` CPUs. Context: allocates; for set-up.
    pub fn new(cpus: usize, mut make: impl FnMut() -> T) -> Result<Self, OutOfMemory> {
        let cpu = |_| Ok(CachePadded(Owned { value: make(), mark: Mark::default() }));
        Ok(Self { cpus: slice(cpus, cpu)?, revoking: CachePadded::default() })
    }

    /// As [`new`](Self::new), for values that are too large for a stack: `make` builds each in its place.
    pub(crate) fn new_in(
        cpus: usize,
        mut make: impl for<'a> FnMut(&'a mut MaybeUninit<T>) -> &'a mut T,
    ) -> Result<Self, OutOfMemory> {
        let cpus = slice_in(cpus, |_, place: &mut MaybeUninit<CachePadded<Owned<T>>>| {
            let at = place.as_mut_ptr();
            // SAFETY: `place_of`, 1: the field lies within `place`, which is borrowed exclusively and used in no other
            // way until `make` returns.
            let value = unsafe { place_of(&raw mut (*at).0.value) };
            let inner = value.as_mut_ptr();
            if ptr::from_mut(make(value)) != inner {
                broken("a value is made in the place that it was given");
            }
            // SAFETY: the mark is a field of `place`. `make` returned a reference to an initialised value at the other
            // field's address. There are no more fields.
            Ok(unsafe {
                (&raw mut (*at).0.mark).write(Mark::default());
                place.assume_init_mut()
            })
        })?;
        Ok(Self { cpus, revoking: CachePadded::default() })
    }

    /// Calls `f` with the value of `cpu`, in an exclusive section. Returns `None`, without a call, where the caller has
    /// no CPU or one without a value, while the value is revoked, and inside another such call on the same CPU (in an
    /// interrupt handler). Two stores and two loads. Context: any; never waits.
    #[inline]
    pub fn with<R>(&self, cpu: Option<&LocalCpu<'_>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        let cpu = cpu?;
        let Owned { value, mark } = &self.cpus.get(cpu.index())?.0;
        let _turn = mark.alone(cpu)?;
        Some(f(value))
    }

    /// As [`TurnLocal::with_others`](super::TurnLocal::with_others), for these values: not inside [`with`](Self::with)
    /// or another such call.
    pub fn with_others<P: Platform>(&self, platform: &P, only: Option<usize>, mut f: impl FnMut(usize, &T)) {
        let which = only.map_or(0..usize::MAX, |only| only..only.saturating_add(1));
        let end = which.end.min(self.cpus.len());
        let first = which.start.min(end);
        let cpus = self.cpus[first..end].iter().map(|cpu| &cpu.0);
        // All begun sections end before `f` sees the first value: a section may send to another CPU's value.
        revoke(platform, &self.revoking, cpus.clone().map(|cpu| &cpu.mark), REVOKED, || {
            (first..).zip(cpus).for_each(|(index, cpu)| f(index, &cpu.value));
        });
    }

    /// Returns all values, without a revocation: for figures that may be slightly off.
    pub fn peek(&self) -> impl Iterator<Item = &T> {
        self.cpus.iter().map(|cpu| &cpu.value)
    }

    /// Bytes of memory in the values, their flags and padding.
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
        // CPUs without a value, and no CPU.
        assert!(owned.with(Some(beyond), |_| ()).is_none() && owned.with(None, |_| ()).is_none());
        let in_turn = || owned.with(Some(own), |_| -> () { panic!("as a platform's clock does") });
        #[cfg(feature = "std")]
        assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(in_turn)).is_err());
        #[cfg(not(feature = "std"))]
        let _ = in_turn;
        assert_eq!(owned.with(Some(own), |value| *value), Some(7));
    }
}
