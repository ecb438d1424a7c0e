//! Finding slots and taking them back: the CPU's lists first, then the areas, then more memory, then the other CPUs'
//! lists.
//!
//! # Nobody waits in vain
//! Whoever fails has read the [token](Token) first and has emptied all lists, or knows that nothing was granted to any
//! list since somebody did (`scarce`). With nothing granted a free goes to an area and moves the token on. The one that
//! grants again says so (`scarce`, first), then frees, and then moves the token on, with release: so whoever has read a
//! token from before is told, and whoever has read the new one (with acquire) knows that lists are in use, and empties
//! them. An area that is added, and the room for one that goes, move the token on, too; so what follows the reading is
//! both a search and an attempt to grow.

use super::areas::OddRun;
use super::bits::WORD_ORDER;
use super::config::Constraints;
use super::cpu::{Cpu, MOST, ORDERS};
use super::error::{BounceError, Pressure, Token};
use super::hands::{Found, Lowered, Told};
use super::slot_meta::{ODD, SlotMeta};
use super::{PAGE, Swiotlb};
use crate::addr::PhysAddr;
use crate::platform::{CopyMemory, LocalSlot, Platform};
use crate::sync::Ordering;

/// The least share of the pool, one over this, that is free when lists are granted something again.
const ENOUGH: u64 = 4;

/// The share of the pool, one over this, that the lists of one size may hold on all CPUs together.
const LIST_SHARE: u64 = 8;

/// What a mapping needs.
pub(super) struct Want<'a> {
    /// Of the smallest aligned run that would do.
    pub order: u32,
    /// The low bits of the buffer's address that are kept.
    pub offset: u64,
    pub len: u64,
    pub constraints: &'a Constraints,
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// A run from the list of the CPU, which has two stores and a load to make for that, and two more stores to take it.
    #[inline]
    pub(super) fn take_own(
        &self,
        order: u32,
        offset: u64,
        constraints: &Constraints,
    ) -> Option<Found<'_, P, C>> {
        if order >= ORDERS || constraints.reach() < self.areas.reach() {
            return None;
        }
        // SAFETY: these CPUs' lists are used with these areas only, here and everywhere.
        let take = |cpu: &Cpu| unsafe { cpu.take(&self.areas, order) };
        let take = |cpu: &Cpu| take(cpu).map(|meta| self.found(meta, order, offset));
        let own = |slot: &LocalSlot<'_>| self.cpus.with(Some(slot), take);
        self.platform.with_slot_at_hand(own)??
    }

    /// Takes back a run, whose metadata says that it is mapped.
    #[inline]
    pub(super) fn give(&self, meta: &SlotMeta, class: u32) {
        if class < ORDERS {
            let own = |slot: &LocalSlot<'_>| self.cpus.with(Some(slot), |cpu| cpu.put(meta, class));
            if self.platform.with_slot_at_hand(own) == Some(Some(true)) {
                return;
            }
        }
        self.give_slow(meta, class);
    }

    /// Slots for `want`, which the CPU's loaded magazine does not have.
    #[cold]
    pub(super) fn take_slow(&self, want: &Want<'_>) -> Result<Found<'_, P, C>, BounceError> {
        let mut since = Token(self.freed.load(Ordering::Acquire));
        // A run of several words may lie where an aligned one does not.
        let odd = match want.order <= WORD_ORDER {
            true => None,
            false => Some(self.odd_run(want)?),
        };
        let search = |prefer| self.search(want, odd.as_ref(), prefer);
        let attempt = || {
            let mut answer = search(None);
            while answer.is_none()
                && let Some(area) = self.grow(want.constraints.reach())
            {
                answer = search(Some(area));
            }
            answer
        };
        let mut answer = attempt();
        if answer.is_none() && !self.scarce.load(Ordering::Relaxed) {
            self.scarce.store(true, Ordering::Relaxed);
            let stays = Lowered(&self.scarce);
            self.drain(None);
            core::mem::forget(stays);
            since = Token(self.freed.load(Ordering::Acquire));
            answer = attempt();
        }
        if let Some(found) = answer {
            self.grow_soon();
            return Ok(found);
        }
        let reach = want.constraints.reach();
        if !self.areas.any_within(reach) {
            return Err(BounceError::BeyondReach { reach: PhysAddr::new(reach) });
        }
        let slots = odd.as_ref().map_or(1 << want.order, |run| run.slots as u64);
        Err(BounceError::Pressure(self.pressure(slots, since)))
    }

    fn pressure(&self, slots: u64, since: Token) -> Pressure {
        let shift = self.areas.slot_shift();
        let capacity = self.areas.capacity();
        Pressure {
            needed: slots << shift,
            free: capacity.saturating_sub(self.areas.taken().0) << shift,
            capacity: capacity << shift,
            limit: self.areas.max() as u64 * self.areas.area_bytes(),
            since,
        }
    }

    /// Where a run of slots too long for lists may lie: slots that are wholly in front of the mapping are left out.
    fn odd_run(&self, want: &Want<'_>) -> Result<OddRun, BounceError> {
        let (shift, most) = (self.areas.slot_shift(), self.areas.area_bytes());
        let unit = self.unit(want.constraints);
        let align = unit.max(want.constraints.min_align().saturating_add(1));
        if align > most {
            return Err(BounceError::Alignment { align, most });
        }
        let too_long = BounceError::TooLong { len: want.len, offset: want.offset, most };
        let end = want.offset.checked_add(want.len).and_then(|end| end.checked_next_multiple_of(unit));
        let end = end.filter(|end| *end <= most).ok_or(too_long)?;
        let skipped = want.offset & !(unit - 1);
        let step = if want.len >= PAGE { align.max(PAGE) } else { align };
        Ok(OddRun {
            slots: ((end - skipped) >> shift) as usize,
            first: (skipped >> shift) as usize,
            step: ((step >> shift) as usize).max(1),
            offset: want.offset - skipped,
            len: want.len,
            boundary: want.constraints.boundary(),
        })
    }

    /// Looks in the CPU's lists and in the areas, `prefer` first.
    fn search(
        &self,
        want: &Want<'_>,
        odd: Option<&OddRun>,
        prefer: Option<usize>,
    ) -> Option<Found<'_, P, C>> {
        let reach = want.constraints.reach();
        // CPUs begin with areas of their own, as long as there are enough.
        let first = |slot: Option<&LocalSlot<'_>>| prefer.or(slot.map(LocalSlot::index)).unwrap_or(0);
        let listed = |slot: Option<&LocalSlot<'_>>| {
            let first = first(slot);
            let meta = match self.cpus.with(slot, |cpu| self.refill(cpu, first, want.order, reach)) {
                Some(found) => found,
                None => {
                    let mut run = [None];
                    self.areas.take_runs(first, want.order, reach, &mut run);
                    run[0]
                }
            };
            meta.map(|meta| self.found(meta, want.order, want.offset))
        };
        if want.order < ORDERS
            && let Some(found) = self.platform.with_slot(listed)
        {
            return Some(found);
        }
        let run = odd?;
        let first = self.platform.with_slot(first);
        // A slot for each area, so that none is held for long.
        let take = |area| {
            let found = |meta| self.found(meta, ODD, run.offset);
            self.platform.with_slot(|_| self.areas.take_odd(area, reach, run).map(found))
        };
        self.areas.from(first).find_map(take)
    }

    /// A run from the CPU's lists, or from the areas with some more for the lists.
    fn refill(&self, cpu: &Cpu, prefer: usize, order: u32, reach: u64) -> Option<&SlotMeta> {
        cpu.turn(order);
        // SAFETY: as in `take_own`.
        if let Some(meta) = unsafe { cpu.take(&self.areas, order) } {
            if self.areas.is_reached(meta.address(), reach) {
                return Some(meta);
            }
            if !cpu.put(meta, order) {
                self.areas.give([meta], 1 << order);
            }
        }
        let scarce = self.scarce.load(Ordering::Relaxed);
        if !scarce {
            self.grant(cpu, order);
        }
        // Where the list has something, this device does not reach it: others like it would not reach what is added.
        let batch = if scarce || !cpu.is_empty(order) { 1 } else { cpu.next_batch(order) };
        let mut runs = [None; MOST];
        let count = self.areas.take_runs(prefer, order, reach, &mut runs[..batch]);
        let (first, rest) = runs[..count].split_first()?;
        // The last one first, so that it is the last to be used.
        for meta in rest.iter().rev().copied().flatten() {
            if !cpu.put(meta, order) {
                self.areas.give([meta], 1 << order);
            }
        }
        *first
    }

    /// Grants a list what its CPU may have of the pool as large as it is now.
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
        // Last, see above.
        let _told = Told(&self.freed);
        self.platform.with_slot(|slot| {
            let kept = match class < ORDERS {
                true => self.cpus.with(slot, |cpu| self.keep(cpu, meta, class)),
                false => None,
            };
            if kept != Some(true) {
                self.give_to_area(meta, class);
            }
        });
    }

    /// Takes back a run that is on no list.
    pub(super) fn give_to_area(&self, meta: &SlotMeta, class: u32) {
        let slots = if class == ODD { meta.odd_slots() } else { 1 << class };
        self.areas.give([meta], slots);
    }

    /// Puts a run onto a list that is full, or that nothing is granted to. Whether it did.
    fn keep(&self, cpu: &Cpu, meta: &SlotMeta, order: u32) -> bool {
        if self.scarce.load(Ordering::Relaxed) {
            let capacity = self.areas.capacity();
            if capacity.saturating_sub(self.areas.taken().0) < capacity / ENOUGH {
                return false;
            }
            // First, see above.
            self.scarce.store(false, Ordering::Relaxed);
        }
        self.grant(cpu, order);
        // What is granted may be less than it was, and more than there is.
        if !cpu.put(meta, order) {
            // SAFETY: as in `take_own`.
            unsafe { cpu.turn_out(&self.areas, order) };
            return cpu.put(meta, order);
        }
        true
    }

    /// Empties the lists of all CPUs, or of one. Waits for their turns to end.
    pub(super) fn drain(&self, only: Option<usize>) {
        // Somebody may have found the pool full half-way through.
        let _told = Told(&self.freed);
        self.cpus.with_others(&self.platform, only, |_, cpu| {
            // A slot for each, so that none is held for long.
            // SAFETY: as in `take_own`.
            self.platform.with_slot(|_| unsafe { cpu.drain(&self.areas) });
            if only.is_some() && cpu.joined.get() == 1 {
                cpu.joined.set(0);
                self.joined.fetch_sub(1, Ordering::Relaxed);
            }
        });
    }
}
