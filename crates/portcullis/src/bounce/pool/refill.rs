//! Takes slots from the CPU's magazines, the depot, or those without memory, and gives them back. The caller that takes a slot owns it, and its
//! buffer is mapped with the wanted permissions.

use super::BouncePool;
use super::hands::Populating;
use super::slot::{Phase, Slot};
use super::wanted;
use crate::addr::{Direction, PhysAddr, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::domain::{Fate, LinkFailed};
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, LocalCpu, Platform};

/// `one_in` of a map that has another way: it collects free slots of other CPUs and kinds only if at least one in 8 of the class's slots is free.
pub(super) const MANY_FREE: u64 = 8;

/// `one_in` of a caller that gets nothing without a slot: it collects any that are free.
pub(super) const ANY_FREE: u64 = u64::MAX;

/// The slots of each other direction that a rebalance evicts.
const CHANGED_AT_ONCE: u64 = 16;

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// The fast path: takes a slot for `bytes` bytes from the CPU's loaded magazine, if its buffer is mapped for `kind` and was `group`'s before;
    /// then calls `counted` with the CPU. `FILLED` says that the mapping overwrites all of its bytes, so the buffer may still hold a CPU's. Returns
    /// the slot's class, its number and the slot. O(1), without an atomic read-modify-write.
    #[inline(always)]
    pub(super) fn take_fast<const FILLED: bool>(
        &self,
        bytes: u64,
        (kind, group): (usize, u64),
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<((usize, usize), &Slot)> {
        // Computed inside the closure: outside, the class would be live across the loan of the CPU, in a register or on the stack.
        let pop = |this_cpu: &LocalCpu<'_>| {
            let class = self.layout.class_of(bytes)?;
            let (index, slot) = self.cpus.with(Some(this_cpu), |cpu| {
                cpu.pop_if(&self.slots, class, kind, |slot| {
                    if FILLED { slot.whose() == group } else { slot.group.get() == group }
                })
            })??;
            counted(this_cpu);
            Some(((class, index), slot))
        };
        self.domain.platform().with_cpu_fast(pop)?
    }

    /// Takes a slot of `class` whose buffer is mapped for `kind`, of any group before. O(1); takes the depot's lock once if the CPU has none.
    pub(super) fn take(&self, class: usize, kind: usize) -> Option<usize> {
        let depot = &self.depots[class];
        self.domain.platform().with_cpu(|this_cpu| {
            let own = self.cpus.with(this_cpu, |cpu| {
                if let Some(index) = cpu.pop(&self.slots, class, kind) {
                    return Some(index);
                }
                let magazine = depot.lock().take(&self.slots, kind)?;
                cpu.load(class, kind, magazine);
                cpu.pop(&self.slots, class, kind)
            });
            own.unwrap_or_else(|| {
                let mut depot = depot.lock();
                let index = depot.take_one(&self.slots, kind)?;
                depot.not_reused += 1;
                Some(index)
            })
        })
    }

    /// Takes back a slot whose buffer is mapped for `kind`. O(1), without an atomic read-modify-write; takes the depot's lock once if a
    /// magazine must go there. Calls `counted` with the CPU if that keeps the slot at once.
    #[inline(always)]
    pub(super) fn give_back(
        &self,
        class: usize,
        kind: usize,
        index: usize,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) {
        let most = self.layout.magazine_slots(class);
        let mut in_hand = Some(self.in_hand(class, kind, index));
        let push = |this_cpu: &LocalCpu<'_>| {
            self.cpus.with(Some(this_cpu), |cpu| {
                in_hand.take().into_iter().for_each(Guard::done);
                counted(this_cpu);
                cpu.push(&self.slots, (class, kind), index, most)
            })
        };
        match self.domain.platform().with_cpu_fast(push) {
            Some(Some(None)) => {}
            Some(Some(Some(full))) => self.store(class, kind, full),
            _ => self.give_back_slow(in_hand, (class, kind), index),
        }
    }

    #[cold]
    #[inline(never)]
    fn give_back_slow(
        &self,
        mut in_hand: Option<Guard<impl FnMut()>>,
        (class, kind): (usize, usize),
        index: usize,
    ) {
        let most = self.layout.magazine_slots(class);
        let depot = &self.depots[class];
        self.domain.platform().with_cpu(|this_cpu| {
            in_hand.take().into_iter().for_each(Guard::done);
            match self.cpus.with(this_cpu, |cpu| cpu.push(&self.slots, (class, kind), index, most)) {
                Some(None) => {}
                Some(Some(full)) => depot.lock().put(&self.slots, kind, full),
                None => depot.lock().put_one(&self.slots, kind, index, most),
            }
        });
    }

    /// Takes a free slot of `class` that is mapped for `direction`. If the CPU has none, it [refills](Self::refill) its lists. `one_in` limits how
    /// many slots a refill collects from other CPUs and directions.
    #[inline]
    pub(super) fn take_or_refill(
        &self,
        class: usize,
        direction: Direction,
        group: u64,
        one_in: u64,
    ) -> Result<Option<usize>, DmaMapError> {
        let taken = self.take(class, direction.index());
        if taken.is_some() { Ok(taken) } else { self.refill(class, direction, group, one_in) }
    }

    /// Takes a slot of `class` for `direction` where none was free: one with new memory, if the class has a slot without a buffer; else one of other
    /// CPUs or another direction. `None` if all are in use, or fewer than one in `one_in` is free. A slot with new memory is zero, and of `group`;
    /// any other still holds its last group's bytes.
    ///
    /// Context: allocates memory and maybe tables. If the class is exhausted, waits for other CPUs' exclusive sections and one invalidation.
    #[cold]
    #[inline(never)]
    fn refill(
        &self,
        class: usize,
        direction: Direction,
        group: u64,
        one_in: u64,
    ) -> Result<Option<usize>, DmaMapError> {
        let mut empty = self.populating(class);
        self.with_depot(class, |depot| empty.index = depot.take_empty(&self.slots));
        if empty.index.is_none() && self.rebalance_now(class, direction, one_in) {
            let found = self.take(class, direction.index());
            if found.is_some() {
                return Ok(found);
            }
            self.with_depot(class, |depot| empty.index = depot.take_empty(&self.slots));
        }
        let Some(index) = empty.index else { return Ok(None) };
        let bytes = self.layout.slot_bytes(class);
        let Some(buffer) = self.alloc(bytes) else {
            drop(empty);
            return Err(self.no_buffer(bytes));
        };
        self.open(class, empty, (index, buffer), direction, group)?;
        Ok(Some(index))
    }

    /// Maps `buffer`, just allocated, at a slot. On failure the slot goes back to those without a buffer, or to a trim if devices may still reach the
    /// memory; it leaks if another caller has a translation at its addresses. Out of line, so that its frame is not on the stack of the allocation
    /// before it.
    #[inline(never)]
    fn open(
        &self,
        class: usize,
        mut populating: Populating<'_, M, P, C>,
        (index, buffer): (usize, PhysAddr),
        direction: Direction,
        group: u64,
    ) -> Result<(), DmaMapError> {
        let bytes = self.layout.slot_bytes(class);
        let slot = &self.slots[index];
        // From here on a panic leaves the slot to a trim.
        slot.set_buffer(Some(buffer));
        slot.set_phase(Phase::Torn);
        let piece = PhysSegment { phys: buffer, len: bytes };
        let range = self.layout.range_of(class, index);
        // SAFETY: `link`'s clauses: the buffer came from `alloc` just now, in whole granules. Only the pool's copies, which allow for a
        // device's accesses, use it until it is freed, after a confirmed unmap or never.
        let linked = unsafe { self.domain.link(range, &[piece], direction.permissions().into(), None) };
        match linked {
            Ok(()) => {
                slot.group.set(group);
                slot.dirty.set(0);
                self.with_depot(class, |depot| {
                    populating.is_counted = true;
                    depot.gained(1);
                    depot.not_reused += 1;
                });
                self.look_later();
                slot.set_phase(Phase::Free);
                populating.index = None;
                Ok(())
            }
            Err(LinkFailed { error, is_reachable, addresses }) => {
                let is_lost = addresses == Fate::Lost;
                if is_reachable {
                    // A device may have cached an entry for the buffer.
                    slot.set_phase(if is_lost { Phase::Lost } else { Phase::Retired });
                } else {
                    slot.set_buffer(None);
                    slot.set_phase(Phase::Empty);
                    // SAFETY: the buffer came from `alloc`, and no device reaches it.
                    unsafe { self.free(buffer, bytes) };
                }
                self.with_depot(class, |depot| {
                    populating.index = None;
                    depot.lost += u64::from(is_lost);
                    if is_reachable {
                        depot.gained(1);
                        depot.retired.push(&self.slots, index);
                    } else if !is_lost {
                        depot.put_empty(&self.slots, index);
                    }
                });
                if is_reachable {
                    self.look_later();
                }
                Err(error.into())
            }
        }
    }

    /// For an exhausted class: if at least one in `one_in` of its slots is free, [rebalances](Self::rebalance) it; or, where maps may not wait,
    /// leaves that to [`maintain`](Self::maintain). Returns whether there may be a slot now.
    fn rebalance_now(&self, class: usize, direction: Direction, one_in: u64) -> bool {
        let free = self.cached_slots(class);
        if free == 0 || free.saturating_mul(one_in) < self.layout.slots(class) as u64 {
            return false;
        }
        if self.domain.is_at_once() {
            self.want(wanted::slots(class, direction));
            return false;
        }
        self.rebalance(class, direction)
    }

    /// Moves free slots of all CPUs to the depots; if none of `class` is for `direction` then, evicts up to 16 for each other direction. Returns
    /// whether there may be a slot now.
    #[inline(never)]
    pub(super) fn rebalance(&self, class: usize, direction: Direction) -> bool {
        self.collect(None);
        let kind = direction.index();
        let mut evicted = self.evicted();
        let most = CHANGED_AT_ONCE * self.layout.slot_bytes(class);
        for other in (0..Direction::ALL.len()).filter(|other| *other != kind) {
            if self.with_depot(class, |depot| depot.free_of(kind)) == 0 {
                self.evict_kind(&mut evicted, (class, other), most, u64::MAX);
            }
        }
        // Unconfirmed slots are out of use until a later trim.
        (evicted.list.slots == 0 && evicted.gather.is_empty()) || self.free_evicted(&mut evicted).is_ok()
    }

    /// Allocates `bytes` bytes of zeroed memory, a multiple of the granule. If there is none, evicts idle buffers, which may wait for hardware and
    /// for other CPUs' exclusive sections, and tries once more; in a domain whose maps may not wait, it leaves the eviction to
    /// [`maintain`](Self::maintain).
    pub(crate) fn alloc(&self, bytes: u64) -> Option<PhysAddr> {
        self.try_alloc(bytes).or_else(|| {
            if self.domain.is_at_once() {
                self.want(wanted::MEMORY);
                return None;
            }
            let made_room = self.trim(0).is_ok_and(|bytes| bytes > 0);
            if made_room { self.try_alloc(bytes) } else { None }
        })
    }

    #[cold]
    pub(super) fn no_buffer(&self, bytes: u64) -> DmaMapError {
        DmaMapError::NoBuffer { bytes, held: self.usage().buffer_bytes }
    }
}
