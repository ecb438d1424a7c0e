//! Buffers that come a large page at a time: memory in one piece, mapped by one entry, for all slots whose addresses
//! lie in one large page.
//!
//! Such a *run* of slots is of one class, and mapped for one kind of permission: its memory comes as a whole, and goes
//! as a whole. In between, its slots are as any other. A trim *parks* those that wait with their run; the run whose
//! last slot is parked is unmapped, with one entry, and the others get back to the depot.
//!
//! A run's words are changed under the lock of its class's depot. Its memory is set before its slots are handed to
//! the depot and taken away when all of them are in the hands of trims, so whoever has one of its slots may read it.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::BouncePool;
use super::cpu::Chain;
use super::depot::Depot;
use super::error::BounceMapError;
use super::hands::{Doomed, Held};
use super::layout::Layout;
use super::slot::{NO_BUFFER, Phase, link_to};
use crate::addr::{Direction, Iova, IovaRange, PageSize, PageSizes, PhysAddr};
use crate::broken::broken;
use crate::domain::PhysSegment;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::percpu::LocalU64;
use crate::platform::{CopyMemory, Platform};

/// The large page is the largest one of no more than so much: more would rarely be free as a whole again.
const MOST: PageSize = PageSize::SIZE_2M;

/// The slots of one large page.
#[derive(Debug)]
pub(super) struct Run {
    /// Where its memory is, or [`NO_BUFFER`]: then each slot has its own, if any.
    memory: LocalU64,
    /// What it is mapped for.
    kind: LocalU64,
    /// The link to the first slot that a trim has parked, and how many there are.
    parked: LocalU64,
    parked_slots: LocalU64,
    /// Slots that nobody reaches any more.
    gone: LocalU64,
}

impl Run {
    fn new() -> Self {
        let word = || LocalU64::new(0);
        Self {
            memory: LocalU64::new(NO_BUFFER),
            kind: word(),
            parked: word(),
            parked_slots: word(),
            gone: word(),
        }
    }

    pub(super) fn memory(&self) -> Option<PhysAddr> {
        let memory = self.memory.get();
        (memory != NO_BUFFER).then_some(PhysAddr::new(memory))
    }

    /// Hands out the parked slots.
    fn take_parked(&self) -> Chain {
        let chain = Chain { first: self.parked.get(), slots: self.parked_slots.get() };
        self.parked.set(0);
        self.parked_slots.set(0);
        chain
    }
}

/// All runs of a pool, by their addresses.
#[derive(Debug)]
pub(super) struct Runs {
    /// The binary logarithm of a run's bytes; 0 for a pool without runs.
    shift: u32,
    all: Box<[Run]>,
}

impl Runs {
    /// Runs for the slots of `layout`, of the largest of `sizes` that fits; none unless `wanted`, and where no page is larger
    /// than the granule. `None` without memory.
    pub(super) fn new(layout: &Layout, sizes: PageSizes, wanted: bool) -> Option<Self> {
        let fits = |shift: &u32| PageSize::from_shift(*shift).is_some_and(|size| sizes.contains(size));
        let shifts = layout.granule_shift() + 1..=MOST.shift().min(layout.class_shift());
        let shift = shifts.rev().find(fits).filter(|_| wanted).unwrap_or(0);
        let count = if shift == 0 { 0 } else { (layout.bytes() >> shift) as usize };
        let mut all = Vec::new();
        all.try_reserve_exact(count).ok()?;
        all.extend((0..count).map(|_| Run::new()));
        Some(Self { shift, all: all.into_boxed_slice() })
    }

    /// Bytes of a run.
    fn run_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Slots of `slot_bytes` bytes in a run; 0 where they do not come in runs.
    pub(super) fn slots(&self, slot_bytes: u64) -> usize {
        let slots = (self.run_bytes() / slot_bytes) as usize;
        if slots > 1 { slots } else { 0 }
    }

    /// Bytes of this book-keeping.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.all)
    }

    /// Bytes of the memory that is in runs.
    pub(super) fn held(&self) -> u64 {
        self.all.iter().filter(|run| run.memory().is_some()).count() as u64 * self.run_bytes()
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// The run that slot `index` of `class` has its memory from, and the run's addresses.
    pub(super) fn run_of(&self, class: usize, index: usize) -> Option<(&Run, IovaRange)> {
        let offset = self.layout.start_of(class, index).wrapping_sub(self.region.start().get());
        let number = (offset >> self.runs.shift) as usize;
        let run = self.runs.all.get(number).filter(|run| run.memory().is_some())?;
        Some((run, self.range_of_run(number)))
    }

    /// Each run that has memory, with its addresses.
    pub(super) fn runs_with_memory(&self) -> impl Iterator<Item = (PhysAddr, IovaRange)> {
        let runs = self.runs.all.iter().enumerate();
        runs.filter_map(|(number, run)| Some((run.memory()?, self.range_of_run(number))))
    }

    fn range_of_run(&self, number: usize) -> IovaRange {
        let start = self.region.start().get() + ((number as u64) << self.runs.shift);
        IovaRange::new(Iova::new(start), self.runs.run_bytes())
            .unwrap_or_else(|_| broken("a run lies inside the region, which is a range"))
    }

    /// A slot of `class` for `direction`, with all others of its run, where the class has buffers enough for that and
    /// there is memory in one piece. `None` where not: one slot alone may still be had. The slot's contents are
    /// `group`'s, and zero. O(slots of a run), the locked parts O(1).
    pub(super) fn stock_run(
        &self,
        class: usize,
        direction: Direction,
        group: u64,
    ) -> Result<Option<usize>, BounceMapError> {
        let (bytes, run_bytes) = (self.layout.slot_bytes(class), self.runs.run_bytes());
        let count = self.runs.slots(bytes);
        let is_large = |depot: &Depot| depot.buffers().0 * bytes >= self.config.large_from;
        if count == 0 {
            return Ok(None);
        }
        let take = |depot: &mut Depot| if is_large(depot) { depot.take_run(&self.slots) } else { None };
        let mut raising = Raising { pool: self, class, first: None, run: None, is_counted: false };
        self.with_depot(class, |depot| raising.first = take(depot));
        let Some(first) = raising.first else { return Ok(None) };
        let offset = self.layout.start_of(class, first).wrapping_sub(self.region.start().get());
        let number = (offset >> self.runs.shift) as usize;
        // There is one for each page of the region. Nothing is given back to make room: that is for a slot alone.
        let (Some(run), Some(memory)) = (self.runs.all.get(number), self.try_alloc(run_bytes)) else {
            return Ok(None);
        };
        raising.run = Some(run);
        let all = &self.slots[first..first + count];
        let set = |phase| all.iter().for_each(|slot| slot.set_phase(phase));
        // From here on a panic leaves it to a trim.
        run.memory.set(memory.get());
        run.kind.set(direction.index() as u64);
        for (slot, at) in all.iter().zip((memory.get()..).step_by(bytes as usize)) {
            slot.set_buffer(Some(PhysAddr::new(at)));
            slot.set_group(group);
            slot.set_dirty(0);
        }
        set(Phase::Torn);
        let mut unconfirmed = Gather::new();
        let (range, piece) = (self.range_of_run(number), PhysSegment { phys: memory, len: run_bytes });
        // SAFETY: as for one slot's buffer: the memory came from `alloc`, is used by the pool's copies only, and is freed after an
        // unmap that is confirmed, or never.
        let linked = unsafe { self.domain.link(range, &[piece], direction.permissions(), &mut unconfirmed) };
        let (phase, retired) = match &linked {
            Ok(()) => (Phase::Free, false),
            // A device may have met the memory for a moment, and still know it.
            Err(failed) if failed.unconfirmed => {
                (if failed.occupied { Phase::Lost } else { Phase::Retired }, true)
            }
            Err(failed) => {
                run.memory.set(NO_BUFFER);
                all.iter().for_each(|slot| slot.set_buffer(None));
                set(Phase::Empty);
                // SAFETY: the memory came from `alloc`, and no device reaches it.
                unsafe { self.free(memory, run_bytes) };
                self.with_depot(class, |depot| {
                    raising.first = None;
                    match failed.occupied {
                        // Somebody else's mapping: which slots must not be used is found out one by one.
                        true => depot.put_empties(&self.slots, first),
                        false => depot.put_run(&self.slots, first),
                    }
                });
                return Ok(None);
            }
        };
        self.with_depot(class, |depot| {
            raising.is_counted = true;
            depot.gained(count as u64);
            depot.lost += if phase == Phase::Lost { count as u64 } else { 0 };
            depot.bounced += u64::from(!retired);
            if retired {
                raising.first = None;
                set(phase);
                (first..first + count).for_each(|index| depot.put_retired(&self.slots, index));
            }
        });
        self.look_later();
        linked.map_err(|failed| failed.error)?;
        set(phase);
        raising.first = None;
        let kind = direction.index();
        let (mut others, in_hand) = (self.held(class, kind), self.in_hand(class, kind, first));
        (first + 1..first + count).for_each(|index| others.push(index));
        self.store_all(others);
        in_hand.done();
        Ok(Some(first))
    }

    /// Takes in free slots, as chains. Those that were pushed first are the newest of theirs.
    fn store_all(&self, mut held: Held<'_, M, P, C>) {
        let (class, kind) = (held.class, held.kind);
        while held.chain.slots > 0 {
            let mut part = self.held(class, kind);
            while part.chain.slots < self.layout.chain_slots(class)
                && let Some(index) = held.pop()
            {
                part.push(index);
            }
            part.store();
        }
    }

    /// Parks slot `index` of `run`, the first of those held. When that was the last one of the run and they are no more than
    /// `most`, all are unmapped and added to `doomed`. How many.
    pub(super) fn park(
        &self,
        doomed: &mut Doomed<'_, M, P, C>,
        (class, index): (usize, usize),
        held: &mut Held<'_, M, P, C>,
        (run, range): (&Run, IovaRange),
        most: u64,
    ) -> u64 {
        let count = self.runs.slots(self.layout.slot_bytes(class)) as u64;
        let mut all = self.held(class, held.kind);
        self.with_depot(class, |_| {
            held.pop();
            self.slots[index].set_next(run.parked.get());
            run.parked.set(link_to(index));
            run.parked_slots.set(run.parked_slots.get() + 1);
            if run.parked_slots.get() == count && count <= most {
                all.chain = run.take_parked();
            }
        });
        if all.chain.slots == 0 {
            return 0;
        }
        while let Some(index) = all.pop() {
            // Before anything can go wrong.
            self.slots[index].set_phase(Phase::Torn);
            doomed.thread(index);
        }
        let whole = self.unlink(range, &mut doomed.gather);
        let first = self.first_of_run(class, index);
        self.retire(class, first..first + count as usize, whole);
        count
    }

    /// The first slot of the run that slot `index` of `class` lies in.
    fn first_of_run(&self, class: usize, index: usize) -> usize {
        index - (index - self.layout.first(class)) % self.runs.slots(self.layout.slot_bytes(class))
    }

    /// Gives parked slots of `class` back to its depot. (Maybe another trim's, too, which gives back less for it.)
    pub(super) fn spare(&self, class: usize) {
        if self.runs.all.is_empty() {
            return;
        }
        let runs = 1_usize << (self.layout.class_shift() - self.runs.shift);
        let of_class = self.runs.all.iter().skip(class * runs).take(runs);
        for run in of_class.filter(|run| run.parked.get() != 0) {
            let mut held = self.held(class, 0);
            self.with_depot(class, |_| {
                held.kind = run.kind.get() as usize;
                held.chain = run.take_parked();
            });
            self.store_all(held);
        }
    }

    /// Notes that nobody reaches slot `index` of `run` any more, and gives the memory back where that was the last one.
    /// How many bytes. The slot is the first of those doomed, which go on.
    pub(super) fn strip_of_run(
        &self,
        doomed: &mut Doomed<'_, M, P, C>,
        class: usize,
        index: usize,
        run: &Run,
    ) -> u64 {
        let count = self.runs.slots(self.layout.slot_bytes(class)) as u64;
        let slot = &self.slots[index];
        let next = slot.next();
        drop(slot.list.take());
        slot.set_buffer(None);
        if slot.phase() != Phase::Lost {
            slot.set_phase(Phase::Empty);
        }
        let memory = self.with_depot(class, |depot| {
            doomed.pass(next);
            run.gone.set(run.gone.get() + 1);
            let memory = run.memory().filter(|_| run.gone.get() == count)?;
            run.memory.set(NO_BUFFER);
            run.gone.set(0);
            depot.gave_up(count);
            if slot.phase() != Phase::Lost {
                depot.put_run(&self.slots, self.first_of_run(class, index));
            }
            Some(memory)
        });
        let Some(memory) = memory else { return 0 };
        // SAFETY: the memory came from `alloc`; the unmapping of each of its slots is confirmed, and all of them were in
        // the hands of trims, of which this was the last.
        unsafe { self.free(memory, self.runs.run_bytes()) };
        self.runs.run_bytes()
    }
}

/// A run that gets memory. Dropped, it is back where it came from, or, with memory that devices may reach, waits for a trim.
struct Raising<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    class: usize,
    first: Option<usize>,
    run: Option<&'a Run>,
    /// The depot knows of its memory.
    is_counted: bool,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Raising<'_, M, P, C> {
    fn drop(&mut self) {
        let Self { pool, class, first: Some(first), run, is_counted } = *self else { return };
        let count = pool.runs.slots(pool.layout.slot_bytes(class));
        pool.with_depot(class, |depot| {
            if run.and_then(Run::memory).is_none() {
                depot.put_run(&pool.slots, first);
                return;
            }
            depot.gained(if is_counted { 0 } else { count as u64 });
            for index in first..first + count {
                pool.slots[index].set_phase(Phase::Torn);
                depot.put_retired(&pool.slots, index);
            }
        });
    }
}
