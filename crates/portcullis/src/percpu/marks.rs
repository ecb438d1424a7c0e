//! Turns: what a CPU does with its values in one go, *marked* so that other CPUs can wait for its
//! end or keep it from beginning. A CPU in a turn with values and a caller that has revoked these
//! values are never at them at the same time.
//!
//! A lock costs its owner two atomic operations even when no other CPU contends for it. Here the owner only stores that its turn
//! has begun and that it is over, and loads whether its values were *revoked*. The other CPUs, which come rarely, pay for the
//! rest, in two ways:
//!
//! - They wait until the turns that had begun are over (the idea of read-copy-update): what a turn has found through a pointer
//!   stays where it is until then. Such a turn is a [`Section`].
//! - They revoke the values first, and then wait until the turns with values that had begun are
//!   over: from then on, until the revocation ends, no owner has its values (Dekker's mutual
//!   exclusion with the price moved to the side that is rare). A turn with values is a [`Turn`],
//!   which is a section, too. It takes no frames from the embedder; a section may, for tables.
//!   Values that are visited often are revoked [apart](super::TurnLocal::apart): meanwhile turns go
//!   on with all other values.
//!
//! Memory ordering. A turn stores that it has begun, and then loads whether its values are revoked,
//! and pointers or numbers. The other side stores that they are, or changes these pointers or
//! numbers, and then looks which turns are under way. At least one side must see the other's store.
//! The turn's fence between the two may be for the compiler only ([`LocalCpu::with_light_fence`])
//! where the platform's [`fence_all`](Platform::fence_all) makes every CPU pass a full barrier:
//! either the turn's store is before that barrier, and the other side sees it after, or its loads
//! are after it, and see what was stored before.
//!
//! A CPU that has waited for a turn's end sees what the turn did: the store that ends the turn is a release, and the load
//! that finds it ended an acquire. The store that begins the next turn is a release, too, as that load may find it in the
//! first one's place: the CPU that revokes need not wait for the next turn, which sees the revocation and is without values.
//! A mark beside its value ([`BiasedLock`](super::BiasedLock)) does not count its turns. A CPU that revokes such a value waits for a
//! store that ends a turn, that one or a later one; the later one is without the value, and so as good as over.
//!
//! The owner sees what was done to its values meanwhile: the store that ends a revocation is a release, the turn's load an
//! acquire. The store that begins a revocation is a release, too: a turn that sees it as begun has all other values, and need
//! not have seen the end of the revocation before.

use alloc::boxed::Box;
use core::marker::PhantomData;
use core::ops::Range;

use super::CachePadded;
use crate::heap::{OutOfMemory, slice};
use crate::platform::{LocalCpu, Platform};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, pause};

/// What a mark's count is above a multiple of 4 in a turn with values, and in one without.
const WITH_VALUES: u64 = 1;
const WITHOUT: u64 = 3;

/// What a mark says of its CPU's values: that the CPU has them, that they are revoked, or that only
/// those are revoked which other CPUs may have apart.
const GRANTED: u64 = 0;
pub(super) const REVOKED: u64 = 1;
pub(super) const REVOKED_APART: u64 = 2;

/// The marks of all CPUs, for any number of values in their turns.
#[derive(Debug)]
pub struct Marks {
    cpus: Box<[CachePadded<Mark>]>,
    /// Callers without a mark hold it for their sections.
    others: CachePadded<Mutex<()>>,
    /// Callers that revoke hold it, one at a time. Both locks lie apart from what every turn reads.
    revoking: CachePadded<Mutex<()>>,
}

/// What one CPU marks its turns in.
#[derive(Debug, Default)]
pub(super) struct Mark {
    /// A multiple of 4 between turns; more by [`WITH_VALUES`] or [`WITHOUT`] during one.
    turns: AtomicU64,
    revoked: AtomicU64,
}

/// Ends the turn of this mark when it is dropped, also by a panic.
#[derive(Debug)]
struct Begun<'a, const KIND: u64>(&'a Mark);

/// Ends the turn of a mark that does not count them, when it is dropped, also by a panic.
#[derive(Debug)]
pub(super) struct Alone<'a>(&'a Mark);

/// A turn in which the CPU has its values to itself, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    marks: &'a Marks,
    index: usize,
    /// Whether the turn also has the values that may be revoked apart.
    is_whole: bool,
    _begun: Begun<'a, WITH_VALUES>,
    /// It stays with its CPU.
    _on_this_cpu_only: PhantomData<*mut ()>,
}

/// A turn that others wait for, with values or without, until it is dropped.
#[derive(Debug)]
pub struct Section<'a> {
    /// `None` inside another turn on the same CPU, which ends later than this section.
    _begun: Option<Begun<'a, WITHOUT>>,
    _shared: Option<MutexGuard<'a, ()>>,
    /// It stays with its CPU.
    _on_this_cpu_only: PhantomData<*mut ()>,
}

/// Ends a revocation, also when its closure panics.
struct Revoked<'a, I: Iterator<Item = &'a Mark> + Clone>(I);

impl Mark {
    /// Begins a turn, [`WITH_VALUES`] or [`WITHOUT`]; `None` inside another.
    #[inline]
    fn begin<const KIND: u64>(&self, cpu: &LocalCpu<'_>) -> Option<Begun<'_, KIND>> {
        let turns = self.turns.load(Ordering::Relaxed);
        if !turns.is_multiple_of(4) {
            return None;
        }
        // Release: a CPU that waits for the turn before may see this one in its place.
        self.turns.store(turns + KIND, Ordering::Release);
        cpu.fence();
        Some(Begun(self))
    }

    /// Begins a turn with the one value that is beside this mark. Returns `None` inside another
    /// turn, and while the value is revoked. Two stores and two loads in all; never waits.
    #[inline]
    pub(super) fn alone(&self, cpu: &LocalCpu<'_>) -> Option<Alone<'_>> {
        if self.turns.load(Ordering::Relaxed) != 0 {
            return None;
        }
        self.turns.store(WITH_VALUES, Ordering::Relaxed);
        let begun = Alone(self);
        cpu.fence();
        if self.revoked.load(Ordering::Acquire) == GRANTED { Some(begun) } else { None }
    }
}

impl<const KIND: u64> Drop for Begun<'_, KIND> {
    #[inline]
    fn drop(&mut self) {
        let turns = &self.0.turns;
        // Up to the next multiple of 4.
        turns.store(turns.load(Ordering::Relaxed).wrapping_add(4 - KIND), Ordering::Release);
    }
}

impl Drop for Alone<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.turns.store(0, Ordering::Release);
    }
}

impl<'a, I: Iterator<Item = &'a Mark> + Clone> Drop for Revoked<'a, I> {
    fn drop(&mut self) {
        self.0.clone().for_each(|mark| mark.revoked.store(GRANTED, Ordering::Release));
    }
}

/// Calls `f` while the CPUs of `marks` are without values: without all that are theirs
/// ([`REVOKED`]), or without those that are apart ([`REVOKED_APART`]). Only one caller with the
/// same `revoking` does so at a time. Costs one barrier of all CPUs; without any marks it does
/// nothing and does not call `f`.
pub(super) fn revoke<'a, P: Platform>(
    platform: &P,
    revoking: &Mutex<()>,
    marks: impl Iterator<Item = &'a Mark> + Clone,
    revoked: u64,
    f: impl FnOnce(),
) {
    if marks.clone().next().is_none() {
        return;
    }
    let _one_at_a_time = revoking.lock();
    let _revoked = Revoked(marks.clone());
    // Release: a turn that goes on meanwhile, without what is apart, sees what the revocation before did to the rest.
    marks.clone().for_each(|mark| mark.revoked.store(revoked, Ordering::Release));
    wait(platform, marks, |turns| turns % 4 == WITH_VALUES);
    f();
}

/// Waits until the turns of `marks` that began before the call, and are to be `waited_for`, are over.
fn wait<'a, P: Platform>(
    platform: &P,
    marks: impl Iterator<Item = &'a Mark>,
    waited_for: impl Fn(u64) -> bool,
) {
    platform.fence_all();
    for Mark { turns, .. } in marks {
        let began = turns.load(Ordering::Acquire);
        while waited_for(began) && turns.load(Ordering::Acquire) == began {
            pause();
        }
    }
}

impl Marks {
    /// Makes marks for `cpus` CPUs. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn new(cpus: usize) -> Result<Self, OutOfMemory> {
        let cpus = slice(cpus, |_| Ok(CachePadded::default()))?;
        Ok(Self { cpus, others: CachePadded::default(), revoking: CachePadded::default() })
    }

    /// Begins a turn with values. Returns `None` for a CPU that has no mark, while another caller
    /// has the CPU's values, and inside another turn on the same CPU (an interrupt handler's). Two
    /// stores and three loads in all; never waits.
    ///
    /// # Safety
    /// All CPUs that the marks are used with are of one platform.
    #[inline]
    pub unsafe fn turn<'a>(&'a self, cpu: &'a LocalCpu<'_>) -> Option<Turn<'a>> {
        let index = cpu.index();
        let mark = &self.cpus.get(index)?.0;
        let _begun = mark.begin(cpu)?;
        let revoked = mark.revoked.load(Ordering::Acquire);
        let is_whole = revoked == GRANTED;
        let turn = Turn { marks: self, index, is_whole, _begun, _on_this_cpu_only: PhantomData };
        (revoked != REVOKED).then_some(turn)
    }

    /// Begins a turn without values. A CPU with a mark pays two stores for it and never waits. A
    /// caller without one takes a lock, which other such callers hold for their sections: it may
    /// wait, and must not be in a section already. A CPU with a mark may be.
    ///
    /// # Safety
    /// As for [`turn`](Self::turn).
    #[cfg(feature = "parts")]
    pub unsafe fn section<'a>(&'a self, cpu: Option<&'a LocalCpu<'_>>) -> Section<'a> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_section(cpu) }
    }

    /// The same, for the crate itself.
    ///
    /// # Safety
    /// As for [`turn`](Self::turn).
    #[inline]
    pub(crate) unsafe fn begin_section<'a>(&'a self, cpu: Option<&'a LocalCpu<'_>>) -> Section<'a> {
        let (_begun, _shared) = match cpu.and_then(|cpu| Some((cpu, self.cpus.get(cpu.index())?))) {
            Some((cpu, mark)) => (mark.begin(cpu), None),
            None => (None, Some(self.others.lock())),
        };
        Section { _begun, _shared, _on_this_cpu_only: PhantomData }
    }

    /// Waits until every section that began before the call is over. One barrier of all CPUs; the caller is in no turn of its
    /// own and holds no CPU, and no lock that is taken in a section, such as one of the embedder's
    /// [`Frames`](crate::platform::Frames).
    pub fn synchronize<P: Platform>(&self, platform: &P) {
        wait(platform, self.cpus.iter().map(|cpu| &cpu.0), |turns| !turns.is_multiple_of(4));
        // With a CPU lent, as for every lock that is taken in one.
        platform.with_cpu(|_| drop(self.others.lock()));
    }

    /// Waits until every turn with values that a CPU below `end` began before the call is over;
    /// turns that begin later see what the caller did before it. One barrier of all CPUs, where
    /// `end` is not 0; the caller is in no turn and holds no CPU.
    pub(super) fn wait_for_turns<P: Platform>(&self, platform: &P, end: usize) {
        let which = &self.cpus[..end.min(self.cpus.len())];
        if !which.is_empty() {
            wait(platform, which.iter().map(|cpu| &cpu.0), |turns| turns % 4 == WITH_VALUES);
        }
    }

    /// Calls `f` while the CPUs `which` are without values that are [`REVOKED`], or
    /// [`REVOKED_APART`]. Waits for turns with values only, so it may be called while the caller
    /// holds a lock of the embedder's. Costs one barrier of all CPUs; the caller is in no turn,
    /// holds no CPU, and is in no other such `f`.
    pub(super) fn revoke<P: Platform>(
        &self,
        platform: &P,
        which: Range<usize>,
        revoked: u64,
        f: impl FnOnce(),
    ) {
        let which = self.cpus.get(which).unwrap_or_default();
        revoke(platform, &self.revoking, which.iter().map(|cpu| &cpu.0), revoked, f);
    }

    /// How many CPUs have a mark.
    pub fn cpus(&self) -> usize {
        self.cpus.len()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.cpus)
    }
}

impl Turn<'_> {
    /// The number of the CPU.
    #[inline]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether the turn is one of `marks`.
    #[inline]
    pub(super) fn is_of(&self, marks: &Marks) -> bool {
        core::ptr::eq(self.marks, marks)
    }

    /// Whether the turn also has the values that may be revoked apart.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }
}
