//! Section flags: an asymmetric Dekker protocol with RCU-like grace periods. Each CPU stores that it is in a *section*;
//! other CPUs wait for the section's end, or revoke the CPU's values. An owner in an exclusive section ([`Turn`]) and a
//! caller that has revoked its values never access them at the same time.
//!
//! An uncontended lock costs its owner two atomic read-modify-writes. Here the owner stores that a section begins,
//! loads its revocation flag, and stores that the section ends. Other CPUs visit rarely, and pay for the barrier:
//!
//! - [`Marks::synchronize`] waits for a grace period, as RCU does. Pointers that a CPU has followed in a section
//!   ([`Section`] or [`Turn`]) stay valid until the section ends.
//! - A revocation sets the revocation flags, then waits for the exclusive sections that have begun. Until it ends, the
//!   owner has no access to its values. Values that others visit often are revoked
//!   [separately](super::TurnLocal::apart_in): their owner keeps access to its other values.
//!
//! A caller that holds a lock of the embedder's frame allocator may revoke, but must not `synchronize`: a [`Section`]
//! may allocate table frames, and would wait for that lock; a [`Turn`] allocates none.
//!
//! Memory ordering. A section stores its flag, then loads the revocation flag, pointers or generations. The other side
//! stores the revocation, or changes the pointers or generations, and then loads the section flags. At least one side
//! must see the other's store. The section's fence between the two may be for the compiler only
//! ([`LocalCpu::with_light_fence`]) where [`fence_all`](Platform::fence_all) makes every CPU pass a full barrier:
//! either the section's store is before that barrier, and the other side sees it after; or the section's loads are
//! after it, and see what was stored before.
//!
//! A CPU that has waited for a section's end sees what the section did: the store that ends the section is a release,
//! and the load that finds it ended an acquire. That load may find the beginning of the next section in its place, so
//! this store is a release, too. The revoker need not wait for that next section: it sees the revocation and gets no
//! access. A [`BiasedLock`](super::BiasedLock) does not count its sections, so its revoker may wait for the end of a
//! later section than the one that it saw; that section gets no access either.
//!
//! The owner sees what others did to its values: the store that ends a revocation is a release, the section's load an
//! acquire. The store that begins a revocation is a release, too: a section that reads it, without having read the end
//! of the revocation before, may keep access to values which that earlier revocation covered.

use alloc::boxed::Box;
use core::marker::PhantomData;
use core::ops::Range;

use super::CachePadded;
use crate::heap::{OutOfMemory, slice};
use crate::platform::{LocalCpu, Platform};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, pause};

/// Added to the section count by an exclusive section.
const WITH_VALUES: u64 = 1;
/// Added by any other section.
const WITHOUT: u64 = 3;

/// Revocation flag: the CPU has access to all of its values (0), to none (1), to all but the separately revoked (2).
const GRANTED: u64 = 0;
pub(super) const REVOKED: u64 = 1;
pub(super) const REVOKED_APART: u64 = 2;

/// The section flags of all CPUs, which any number of per-CPU values may share.
#[derive(Debug)]
pub struct Marks {
    cpus: Box<[CachePadded<Mark>]>,
    /// Callers without flags hold this lock for their sections.
    others: CachePadded<Mutex<()>>,
    /// Serialises revocations. Both locks lie on other cache lines than the flags, which every section reads.
    revoking: CachePadded<Mutex<()>>,
}

#[derive(Debug, Default)]
pub(super) struct Mark {
    /// The section count: between sections a multiple of 4; in one, more by [`WITH_VALUES`] or [`WITHOUT`].
    turns: AtomicU64,
    revoked: AtomicU64,
}

/// Ends the section on drop, also when a panic unwinds.
#[derive(Debug)]
struct Begun<'a, const KIND: u64>(&'a Mark);

/// Ends a [`BiasedLock`](super::BiasedLock)'s section, which is not counted, on drop.
#[derive(Debug)]
pub(super) struct Alone<'a>(&'a Mark);

/// An exclusive section: until it is dropped, the CPU has its values to itself.
#[derive(Debug)]
pub struct Turn<'a> {
    marks: &'a Marks,
    index: usize,
    /// Whether the CPU also has the values that are revoked separately.
    is_whole: bool,
    _begun: Begun<'a, WITH_VALUES>,
    /// Not `Send`: it stays with its CPU.
    _on_this_cpu_only: PhantomData<*mut ()>,
}

/// A section, exclusive or not, until it is dropped: others may wait for its end.
#[derive(Debug)]
pub struct Section<'a> {
    /// `None` inside another section of the same CPU, which ends later than this one.
    _begun: Option<Begun<'a, WITHOUT>>,
    _shared: Option<MutexGuard<'a, ()>>,
    _on_this_cpu_only: PhantomData<*mut ()>,
}

/// Ends a revocation on drop, also when a panic unwinds.
struct Revoked<'a, I: Iterator<Item = &'a Mark> + Clone>(I);

impl Mark {
    /// Begins a section, [`WITH_VALUES`] or [`WITHOUT`]. Returns `None` inside another.
    #[inline]
    fn begin<const KIND: u64>(&self, cpu: &LocalCpu<'_>) -> Option<Begun<'_, KIND>> {
        let turns = self.turns.load(Ordering::Relaxed);
        if !turns.is_multiple_of(4) {
            return None;
        }
        // Release: a CPU that waits for the section before may read this store in place of its end.
        self.turns.store(turns + KIND, Ordering::Release);
        cpu.fence();
        Some(Begun(self))
    }

    /// Begins an exclusive section for the one value that lies beside these flags. Returns `None` inside another
    /// section, and while the value is revoked. Two stores and two loads in all; never waits.
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

/// Calls `f` while the owners have no access to their values ([`REVOKED`]), or to those that are revoked separately
/// ([`REVOKED_APART`]). `revoking` serialises the callers. Costs one barrier of all CPUs. Without any marks it does
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
    // Release: a section that goes on with its other values sees what the revocation before did to them.
    marks.clone().for_each(|mark| mark.revoked.store(revoked, Ordering::Release));
    wait(platform, marks, |turns| turns % 4 == WITH_VALUES);
    f();
}

/// Waits for the sections that began before the call and whose count is `waited_for`.
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
    /// Makes the flags for `cpus` CPUs. Context: allocates; for set-up.
    pub fn new(cpus: usize) -> Result<Self, OutOfMemory> {
        let cpus = slice(cpus, |_| Ok(CachePadded::default()))?;
        Ok(Self { cpus, others: CachePadded::default(), revoking: CachePadded::default() })
    }

    /// Begins an exclusive section. Returns `None` for a CPU that has no flags, while the CPU's values are revoked, and
    /// inside another section of the same CPU (in an interrupt handler). Two stores and three loads in all. Context:
    /// any that holds a CPU; never waits.
    ///
    /// # Safety
    /// 1. All CPUs that these flags are used with are of one platform.
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

    /// Begins a section without values. A CPU with flags pays two stores. A caller without a CPU, or with one that has
    /// no flags, takes a lock, which other such callers hold for their sections.
    ///
    /// Context: with flags, any, also inside another section; never waits. Without, it may wait, and must not be inside
    /// a section.
    ///
    /// # Safety
    /// As for [`turn`](Self::turn).
    #[inline]
    pub unsafe fn section<'a>(&'a self, cpu: Option<&'a LocalCpu<'_>>) -> Section<'a> {
        let (_begun, _shared) = match cpu.and_then(|cpu| Some((cpu, self.cpus.get(cpu.index())?))) {
            Some((cpu, mark)) => (mark.begin(cpu), None),
            None => (None, Some(self.others.lock())),
        };
        Section { _begun, _shared, _on_this_cpu_only: PhantomData }
    }

    /// Waits for a grace period: until every section that began before the call is over. One barrier of all CPUs.
    ///
    /// Context: may wait. The caller is in no section, holds no CPU, and no lock that is taken in a section, such as
    /// one of the embedder's [`Frames`](crate::platform::Frames).
    pub fn synchronize<P: Platform>(&self, platform: &P) {
        wait(platform, self.cpus.iter().map(|cpu| &cpu.0), |turns| !turns.is_multiple_of(4));
        // With a CPU lent, as for every lock that is taken with one.
        platform.with_cpu(|_| drop(self.others.lock()));
    }

    /// Waits until every exclusive section that a CPU below `end` began before the call is over. Later sections see
    /// what the caller did before it. One barrier of all CPUs, unless `end` is 0. Context: may wait; the caller is in
    /// no section and holds no CPU.
    pub(super) fn wait_for_turns<P: Platform>(&self, platform: &P, end: usize) {
        let which = &self.cpus[..end.min(self.cpus.len())];
        if !which.is_empty() {
            wait(platform, which.iter().map(|cpu| &cpu.0), |turns| turns % 4 == WITH_VALUES);
        }
    }

    /// Calls `f` while the CPUs `which` have no access to the values that are [`REVOKED`], or [`REVOKED_APART`]. Costs
    /// one barrier of all CPUs. Context: may wait, for exclusive sections only, so the caller may hold a lock of the
    /// embedder's. It is in no section, holds no CPU, and is in no other such `f`.
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

    /// Returns how many CPUs have flags.
    pub fn cpus(&self) -> usize {
        self.cpus.len()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.cpus)
    }
}

impl Turn<'_> {
    /// Returns the number of the CPU.
    #[inline]
    pub fn index(&self) -> usize {
        self.index
    }

    #[inline]
    pub(super) fn is_of(&self, marks: &Marks) -> bool {
        core::ptr::eq(self.marks, marks)
    }

    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }
}
