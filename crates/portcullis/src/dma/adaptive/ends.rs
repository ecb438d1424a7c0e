//! Slots of the pool that replace, in the ring, the ends of lists that share a granule with other data. A slot goes back to the pool only after a
//! commit, when no device reaches it through the ring.

use alloc::vec::Vec;
use core::mem::forget;

use crate::addr::{Direction, Iova, PhysSegment};
use crate::bounce::error::{DmaUnmapError, inside};
use crate::bounce::pool::{Attributes, BounceDevice, BouncePool, Cut, Toward};
use crate::broken::broken;
use crate::dma::slab::Slab;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// A list whose ends are in slots, by their addresses in the pool.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Taken {
    len: u64,
    cut: Cut,
    head: Option<Iova>,
    tail: Option<Iova>,
}

impl Taken {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn slots(self) -> impl Iterator<Item = Iova> {
        self.head.into_iter().chain(self.tail)
    }
}

#[derive(Debug)]
pub(super) struct Ends<M: Mapper, P: Platform, C: CopyMemory> {
    device: BounceDevice<M, P, C>,
    /// What the ring maps in place of the current list.
    linked: Vec<PhysSegment>,
    made: Slab<Taken>,
    live: usize,
    /// Slots that devices may reach through the ring until the next commit. There is room for the slots of all lists.
    waiting: Vec<Iova>,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Ends<M, P, C> {
    pub(super) fn new(device: &BounceDevice<M, P, C>) -> Self {
        let (linked, waiting) = (Vec::new(), Vec::new());
        Self { device: device.for_ends(), linked, made: Slab::default(), live: 0, waiting }
    }

    fn pool(&self) -> &BouncePool<M, P, C> {
        self.device.pool()
    }

    pub(super) fn linked(&self) -> &[PhysSegment] {
        &self.linked
    }

    /// Puts the ends of `list` into slots. `None` if no whole granule lies between them, or there are no slots or no memory for the record. The next
    /// call [keeps](Self::keep) or [refuses](Self::refuse) the result.
    ///
    /// O(pieces), and a copy of the ends. Allocates if the queue has more open lists, or a longer one, than ever before, and if no slot is idle.
    ///
    /// # Safety
    /// As [`BounceDevice::map`], clauses 1 to 3, until [`end`](Self::end) or [`refuse`](Self::refuse) has returned.
    pub(super) unsafe fn take(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Option<Taken> {
        let (cut, len) = self.device.cut(list).ok()??;
        let (first, last) = (list.first()?, list.last()?);
        self.linked.clear();
        self.linked.try_reserve(list.len() + 2).ok()?;
        self.made.vacant()?;
        self.waiting.try_reserve(2 * self.made.records.len()).ok()?;
        let before = self.waiting.len();
        let mut taken = Taken { len, cut, head: None, tail: None };
        let head = PhysSegment { phys: first.phys, len: cut.head };
        let tail = PhysSegment { phys: last.phys.checked_add(last.len - cut.tail)?, len: cut.tail };
        if cut.head > 0 {
            // SAFETY: clauses 1 to 3 are the caller's, for a part of the list.
            taken.head = unsafe { self.lend(head, direction, attributes) };
        }
        cut.push_middle(list, &mut self.linked);
        if cut.tail > 0 {
            // SAFETY: as above.
            taken.tail = unsafe { self.lend(tail, direction, attributes) };
        }
        let complete = taken.head.is_some() == (cut.head > 0) && taken.tail.is_some() == (cut.tail > 0);
        if !complete {
            self.give_back(before);
            return None;
        }
        Some(taken)
    }

    /// Puts `end` into a slot, which waits from now on, and adds the slot's memory to what the ring maps.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    unsafe fn lend(
        &mut self,
        end: PhysSegment,
        direction: Direction,
        attributes: Attributes,
    ) -> Option<Iova> {
        // SAFETY: clauses 1 to 3 are the caller's.
        let iova = unsafe { self.device.map_in_slot(end, direction, attributes) }?;
        self.waiting.push(iova);
        self.linked.push(self.pool().slot_memory(iova)?);
        Some(iova)
    }

    /// The ring has mapped the taken list. Returns its number.
    pub(super) fn keep(&mut self, taken: Taken) -> u32 {
        self.waiting.truncate(self.waiting.len() - taken.slots().count());
        self.live += 1;
        let number = self.made.take().unwrap_or_else(|| broken("`take` has found a place"));
        self.made.records[number] = taken;
        // Fits a `u32`: each list has a granule of the ring, which has at most 2^31.
        number as u32
    }

    /// The ring has not mapped the taken list. If devices may reach it, its slots wait for a commit.
    pub(super) fn refuse(&mut self, taken: Taken, may_be_reached: bool) {
        if !may_be_reached {
            self.give_back(self.waiting.len() - taken.slots().count());
        }
    }

    /// The ring is about to unmap list `number`: its slots wait for the next commit.
    pub(super) fn wait(&mut self, number: u32) {
        self.live -= 1;
        self.waiting.extend(self.made.records[number as usize].slots());
    }

    /// The ring has not unmapped the list that was to [wait](Self::wait).
    pub(super) fn stay(&mut self, number: u32) {
        self.waiting.truncate(self.waiting.len() - self.made.records[number as usize].slots().count());
        self.live += 1;
    }

    /// Copies the device's writes to the list's ends. Its slots still wait.
    ///
    /// # Safety
    /// As [`BouncePool::unmap`] of the list, clauses 1 and 2; 3. the device is done with it.
    pub(super) unsafe fn end(&mut self, number: u32) {
        for iova in self.made.records[number as usize].slots() {
            // SAFETY: clauses 1 and 2 are the caller's, for this end.
            let parted = unsafe { self.pool().part(iova, true) };
            debug_assert!(parted.is_ok());
        }
        self.made.free(number as usize);
    }

    pub(super) fn committed(&mut self) {
        self.give_back(0);
    }

    /// Gives back the waiting slots from index `first` on: no device reaches them through the ring.
    #[inline]
    fn give_back(&mut self, first: usize) {
        while self.waiting.len() > first
            // Popped first: the pool may lend it to another mapping.
            && let Some(iova) = self.waiting.pop()
        {
            // SAFETY: clause 1: the slot was lent to this value, and nothing else ends or syncs its mapping.
            let given_back = unsafe { self.pool().give_slot_back(iova) };
            debug_assert!(given_back.is_ok());
        }
    }

    /// Syncs the ends of list `number`, which begins at `iova`, within the `len` bytes from `offset` on; after an error nothing is copied.
    ///
    /// # Safety
    /// As [`BouncePool::sync_toward`] of the list, clauses 1 and 2.
    pub(super) unsafe fn sync(
        &self,
        number: u32,
        iova: Iova,
        into: Toward,
        (offset, len): (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        let Taken { len: all, cut, head, tail } = self.made.records[number as usize];
        inside(iova, all, (offset, len))?;
        for (slot, first, end) in [(head, 0, cut.head), (tail, all - cut.tail, all)] {
            let (from, to) = (offset.max(first), (offset + len).min(end));
            let Some(slot) = slot.filter(|_| from < to) else { continue };
            // SAFETY: clauses 1 and 2 are the caller's, for a part of the list.
            unsafe { self.pool().sync_toward(slot, (from - first, to - from), into) }?;
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.live == 0 && self.waiting.is_empty()
    }
}

/// Leaks a pool whose slots a device may still reach through the ring, so that it does not free them.
impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Ends<M, P, C> {
    fn drop(&mut self) {
        if !self.is_empty() {
            forget(self.device.pool().clone());
        }
    }
}
