//! Taking slots and freeing them: from the CPU's magazines first, then the areas, then more memory, then other CPUs' magazines.
//!
//! A map that fails has drained all magazines before its last search, or its search lies between two looks at one number of [`DRAINED`]: all that
//! time magazines were empty. A drain begins with the next number, so a drain that others have overtaken says nothing. Callers that find one under
//! way drain as well, and the first to finish says [`DRAINED`]. A free into a magazine without room goes to its area. The free that grants room again
//! says [`PLENTY`] first, so later callers drain the magazines anew.

use super::areas::OddRun;
use super::bits::WORD_ORDER;
use super::config::Constraints;
use super::cpu::{Cpu, MOST, ORDERS};
use super::slot_meta::{ODD, SlotMeta};
use super::{PAGE, Swiotlb};
use crate::bounce::error::DmaMapError;
use crate::guard::Guard;
use crate::platform::{CopyMemory, LocalCpu, Platform};
use crate::sync::Ordering;

/// After a drain, magazines are granted room again once 1/`ENOUGH` of the pool is free.
const ENOUGH: u64 = 4;

/// The magazines of one size may hold 1/`LIST_SHARE` of the pool on all CPUs together.
const LIST_SHARE: u64 = 8;

/// States of [`Swiotlb::supply`], in its low bits; the drain's number is in the others. Magazines are granted room.
pub(super) const PLENTY: u64 = 0;
/// The pool was full: magazines get no more room, and callers empty them.
const DRAINING: u64 = 1;
/// All magazines are empty, and stay so until 1/[`ENOUGH`] of the pool is free.
const DRAINED: u64 = 2;
const STATE: u64 = 3;

pub(super) struct Want<'a> {
    /// The order of the smallest aligned run that has room.
    pub order: u32,
    /// The low bits of the buffer's address that are kept.
    pub offset: u64,
    pub len: u64,
    pub constraints: &'a Constraints,
}

/// Slots that were found for a mapping. Dropping it frees them.
#[must_use]
pub(super) struct Found<'a, P: Platform, C: CopyMemory> {
    pool: &'a Swiotlb<P, C>,
    pub meta: &'a SlotMeta,
    pub class: u32,
    /// From the run's start to the mapping's, in bytes.
    pub offset: u64,
}

impl<P: Platform, C: CopyMemory> Drop for Found<'_, P, C> {
    #[cold]
    fn drop(&mut self) {
        // Without a CPU: the code that panicked may be the code that lends CPUs.
        self.pool.give_to_area(self.meta, self.class);
    }
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// The fast path: takes a run from the CPU's loaded magazine. Two stores and two loads for the exclusive section, and two stores for the run.
    #[inline]
    pub(super) fn take_own(&self, want: &Want<'_>) -> Option<Found<'_, P, C>> {
        let Want { order, offset, constraints, .. } = *want;
        if order >= ORDERS || constraints.reach < self.areas.reach {
            return None;
        }
        // SAFETY: clause 1 of `Cpu::take`: these CPUs' magazines are only ever used with these areas.
        let take = |cpu: &Cpu| unsafe { cpu.take(&self.areas, order) };
        let take = |cpu: &Cpu| take(cpu).map(|meta| Found { pool: self, meta, class: order, offset });
        let own = |this_cpu: &LocalCpu<'_>| self.cpus.with(Some(this_cpu), take);
        self.platform.with_cpu_fast(own)??
    }

    /// Takes back a run whose metadata still records it as mapped.
    #[inline]
    pub(super) fn give(&self, meta: &SlotMeta, class: u32) {
        if class < ORDERS {
            let own = |this_cpu: &LocalCpu<'_>| self.cpus.with(Some(this_cpu), |cpu| cpu.put(meta, class));
            if self.platform.with_cpu_fast(own) == Some(Some(true)) {
                return;
            }
        }
        self.give_slow(meta, class);
    }

    /// The slow path: takes slots for `want` that the CPU's loaded magazine does not have.
    #[cold]
    pub(super) fn take_slow(&self, want: &Want<'_>) -> Result<Found<'_, P, C>, DmaMapError> {
        // A run of several words may fit where an aligned one does not.
        let odd = if want.order > WORD_ORDER { Some(self.odd_run(want)?) } else { None };
        let search = |prefer| self.search(want, odd.as_ref(), prefer);
        let attempt = || {
            let mut answer = search(None);
            while answer.is_none()
                && let Some(area) = self.grow(want.constraints.reach)
            {
                answer = search(Some(area));
            }
            answer
        };
        let mut seen = self.supply.load(Ordering::Acquire);
        let mut answer = attempt();
        let mut has_drained = false;
        while answer.is_none() && !has_drained {
            // Acquire, with a drain's Release: the next search finds what it gave to the areas.
            let now = self.supply.load(Ordering::Acquire);
            if now & STATE != DRAINED {
                has_drained = self.drain_all(now);
            } else if now == seen {
                break;
            }
            seen = now;
            answer = attempt();
        }
        if let Some(found) = answer {
            self.grow_soon();
            return Ok(found);
        }
        let reach = want.constraints.reach;
        if !self.areas.any_within(reach) {
            return Err(DmaMapError::BeyondReach { last: reach });
        }
        let slots = odd.as_ref().map_or(1 << want.order, |run| run.slots as u64);
        let (shift, capacity) = (self.areas.slot_shift, self.areas.capacity());
        Err(DmaMapError::Pressure {
            needed: slots << shift,
            free: capacity.saturating_sub(self.areas.taken().0) << shift,
            capacity: capacity << shift,
            limit: self.areas.max() as u64 * self.areas.area_bytes(),
        })
    }

    /// The odd run for a request that one word of bits cannot hold. Slots that lie wholly before the mapping are left out.
    fn odd_run(&self, want: &Want<'_>) -> Result<OddRun, DmaMapError> {
        let (shift, most) = (self.areas.slot_shift, self.areas.area_bytes());
        let slot = 1 << shift;
        let align = slot.max(want.constraints.min_align + 1);
        if align > most {
            return Err(DmaMapError::BeyondReach { last: want.constraints.reach });
        }
        let too_long = DmaMapError::TooLong { len: want.len, most: most - want.offset };
        let end = want.offset.checked_add(want.len).and_then(|end| end.checked_next_multiple_of(slot));
        let end = end.filter(|end| *end <= most).ok_or(too_long)?;
        let skipped = want.offset & !(slot - 1);
        let step = if want.len >= PAGE { align.max(PAGE) } else { align };
        Ok(OddRun {
            slots: ((end - skipped) >> shift) as usize,
            first: (skipped >> shift) as usize,
            step: ((step >> shift) as usize).max(1),
            offset: want.offset - skipped,
        })
    }

    /// Searches the CPU's magazines and the areas, `prefer` first.
    fn search(
        &self,
        want: &Want<'_>,
        odd: Option<&OddRun>,
        prefer: Option<usize>,
    ) -> Option<Found<'_, P, C>> {
        let reach = want.constraints.reach;
        // CPUs begin with different areas, as long as there are enough.
        let first = |this_cpu: Option<&LocalCpu<'_>>| prefer.or(this_cpu.map(LocalCpu::index)).unwrap_or(0);
        let listed = |this_cpu: Option<&LocalCpu<'_>>| {
            let first = first(this_cpu);
            let own = self.cpus.with(this_cpu, |cpu| self.refill(cpu, first, want.order, reach));
            let meta = own.unwrap_or_else(|| {
                let mut run = [None];
                self.areas.take_runs(first, want.order, reach, &mut run);
                run[0]
            });
            meta.map(|meta| Found { pool: self, meta, class: want.order, offset: want.offset })
        };
        if want.order < ORDERS
            && let Some(found) = self.platform.with_cpu(listed)
        {
            return Some(found);
        }
        let run = odd?;
        let first = self.platform.with_cpu(first);
        // Borrows a CPU for each area anew, so that no loan lasts long.
        let take = |area| {
            let found = |meta| Found { pool: self, meta, class: ODD, offset: run.offset };
            self.platform.with_cpu(|_| self.areas.take_odd(area, reach, run).map(found))
        };
        self.areas.from(first).find_map(take)
    }

    /// Takes a run from the CPU's magazines, or from the areas with some more for the magazines.
    fn refill(&self, cpu: &Cpu, prefer: usize, order: u32, reach: u64) -> Option<&SlotMeta> {
        cpu.load_previous(order);
        // SAFETY: as in `take_own`.
        if let Some(meta) = unsafe { cpu.take(&self.areas, order) } {
            if self.areas.is_reached(meta.address(), reach) {
                return Some(meta);
            }
            if !cpu.put(meta, order) {
                self.areas.give([meta], 1 << order);
            }
        }
        let is_scarce = self.supply.load(Ordering::Relaxed) & STATE != PLENTY;
        if !is_scarce {
            self.grant(cpu, order);
        }
        // If the magazine has runs, this device does not reach them, so more of its kind are not worth a batch.
        let batch = if is_scarce || !cpu.is_empty(order) { 1 } else { cpu.next_batch(order) };
        let mut runs = [None; MOST];
        let count = self.areas.take_runs(prefer, order, reach, &mut runs[..batch]);
        let (first, rest) = runs[..count].split_first()?;
        // The last one first, so that it is used last.
        for meta in rest.iter().rev().copied().flatten() {
            if !cpu.put(meta, order) {
                self.areas.give([meta], 1 << order);
            }
        }
        *first
    }

    /// Grants a magazine the CPU's share of the pool at its present size.
    fn grant(&self, cpu: &Cpu, order: u32) {
        if cpu.joined.get() == 0 {
            cpu.joined.set(1);
            self.joined.fetch_add(1, Ordering::Relaxed);
        }
        let joined = self.joined.load(Ordering::Relaxed).max(1);
        let share = self.areas.capacity() / LIST_SHARE / joined;
        cpu.grant(order, ((share >> order) / 2).max(1));
    }

    #[cold]
    fn give_slow(&self, meta: &SlotMeta, class: u32) {
        self.platform.with_cpu(|this_cpu| {
            let keep = |cpu: &Cpu| class < ORDERS && self.keep(cpu, meta, class);
            if self.cpus.with(this_cpu, keep) != Some(true) {
                self.give_to_area(meta, class);
            }
        });
    }

    pub(super) fn give_to_area(&self, meta: &SlotMeta, class: u32) {
        let slots = if class == ODD { meta.odd_slots() } else { 1 << class };
        self.areas.give([meta], slots);
    }

    /// Puts a run into a magazine that is full, or has no room granted. Returns whether it did.
    fn keep(&self, cpu: &Cpu, meta: &SlotMeta, order: u32) -> bool {
        let supply = self.supply.load(Ordering::Relaxed);
        if supply & STATE != PLENTY {
            let capacity = self.areas.capacity();
            if capacity.saturating_sub(self.areas.taken().0) < capacity / ENOUGH {
                return false;
            }
            // Before the grant, as the module's text needs it.
            if !self.set_supply(supply, PLENTY, Ordering::Relaxed) {
                return false;
            }
        }
        self.grant(cpu, order);
        // The new grant may be smaller than the last one, and than the magazine's content.
        if !cpu.put(meta, order) {
            // SAFETY: as in `take_own`.
            unsafe { cpu.retire_previous(&self.areas, order) };
            return cpu.put(meta, order);
        }
        true
    }

    /// Sets the state of the drain with the number in `found`, unless the word has changed.
    fn set_supply(&self, found: u64, state: u64, order: Ordering) -> bool {
        self.supply.compare_exchange(found, found & !STATE | state, order, Ordering::Relaxed).is_ok()
    }

    /// Empties all magazines, as a drain of the next number, or as the one that is under way in `found`. Returns `false`, with nothing done, if the
    /// word has changed.
    fn drain_all(&self, found: u64) -> bool {
        let mut draining = found;
        if found & STATE == PLENTY {
            draining = found.wrapping_add(STATE + 1) | DRAINING;
            if self.supply.compare_exchange(found, draining, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                return false;
            }
        }
        let stays = Guard::new(|| _ = self.set_supply(draining, PLENTY, Ordering::Relaxed));
        self.drain(None);
        stays.done();
        // Unless another caller has finished it, or a free has granted room.
        self.set_supply(draining, DRAINED, Ordering::Release);
        true
    }

    /// Empties the magazines of all CPUs, or of one. Waits for exclusive sections.
    pub(super) fn drain(&self, only: Option<usize>) {
        self.cpus.with_others(&self.platform, only, |_, cpu| {
            // Borrows a CPU for each, so that no loan lasts long.
            // SAFETY: as in `take_own`.
            self.platform.with_cpu(|_| unsafe { cpu.drain(&self.areas) });
            if only.is_some() && cpu.joined.get() == 1 {
                cpu.joined.set(0);
                self.joined.fetch_sub(1, Ordering::Relaxed);
            }
        });
    }
}
