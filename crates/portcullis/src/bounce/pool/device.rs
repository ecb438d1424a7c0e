//! A device with the pool of its domain: what a driver calls.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::BouncePool;
use super::config::{Attributes, DeviceProfile, PoolError};
use super::copy::copy_pieces;
use super::error::{BounceError, BounceMapError, inside};
use super::layout::Place;
use super::mapping::{PoolMapping, Way};
use super::slot::{NOBODY, Phase, Pieces, Slot, Terms, Toward};
use super::split::shape;
use crate::addr::{Direction, Iova, PhysAddr};
use crate::domain::{MapListError, PhysSegment, Policy};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{Ordering, fence};

/// A device of a pool's domain. Cheap to clone.
#[derive(Debug)]
pub struct BounceDevice<M: Mapper, P: Platform, C: CopyMemory> {
    pool: Arc<BouncePool<M, P, C>>,
    profile: DeviceProfile,
    reaches_slots: bool,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Clone for BounceDevice<M, P, C> {
    fn clone(&self) -> Self {
        Self { pool: Arc::clone(&self.pool), ..*self }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BounceDevice<M, P, C> {
    /// A device that is as `profile` says.
    ///
    /// # Errors
    /// [`PoolError::OffsetMask`].
    pub fn new(pool: Arc<BouncePool<M, P, C>>, profile: DeviceProfile) -> Result<Self, PoolError> {
        let mask = profile.offset_mask;
        if mask & mask.wrapping_add(1) != 0 || mask > pool.domain.granule().offset_mask() {
            return Err(PoolError::OffsetMask { mask });
        }
        let reaches_slots = pool.region.last().get() <= profile.mask;
        Ok(Self { pool, profile, reaches_slots })
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<BouncePool<M, P, C>> {
        &self.pool
    }

    /// Lets the device reach the bytes of `list`, or a copy of them: which, the [module](super) says. The list is
    /// mapped as a whole or not at all.
    ///
    /// Through a slot whose buffer is waiting: O(len), for the copy, and O(1) for the rest; no lock, no allocation, and
    /// no atomic read-modify-write (two, and maybe an allocation, for a list). A slot that changes hands between groups
    /// is zeroed. Otherwise allocates memory, tables and book-keeping, and may wait for hardware and for other CPUs'
    /// turns where memory, slots or addresses are exhausted. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`BounceMapError`], with nothing mapped and nothing lost.
    ///
    /// # Safety
    /// Until the mapping has ended by [`unmap`](BouncePool::unmap), or the pool is dropped: all bytes of `list` are
    /// memory that the CPU reaches through the pool's [`CopyMemory`], and nobody but devices (and those who access it
    /// as atomics) touches them while this, a sync or the unmap of the mapping runs. Those are called with the
    /// mapping's address one at a time, and not after its unmap.
    #[inline]
    pub unsafe fn map<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let pool = &*self.pool;
        let len = total(list)?;
        let first = list.first().map_or(0, |piece| piece.phys.get());
        let terms = Terms {
            direction,
            keep_unwritten: attributes.keep_unwritten && direction == Direction::FromDevice,
            wipe: attributes.wipe || pool.config.wipe,
            listed: list.len() > 1,
            offset: first & self.profile.offset_mask,
        };
        let openly = attributes.persistent_streaming || attributes.direct && self.may_reach(list);
        if !openly
            && self.reaches_slots
            && let Some(class) = len.checked_add(terms.offset).and_then(|bytes| pool.layout.class_of(bytes))
        {
            let group = self.profile.group.0.into();
            let taken = pool.take(class, direction.index());
            let taken = if taken.is_some() { taken } else { pool.stock(class, direction, group)? };
            if let Some(index) = taken {
                // SAFETY: the caller's promise.
                return unsafe { pool.map_slot(list, len, (class, index), terms, group) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.map_otherwise(list, len, terms, attributes) }
    }

    /// Whether the device may be given the granules of `list`.
    #[inline]
    pub(crate) fn may_reach(&self, list: &[PhysSegment]) -> bool {
        let granule = self.pool.domain.granule();
        match list {
            _ if !self.profile.untrusted => true,
            [piece] => (piece.phys.get() | piece.len) & granule.offset_mask() == 0,
            _ => shape(list, granule).whole,
        }
    }

    /// A mapping that no slot is for.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    #[inline(never)]
    unsafe fn map_otherwise<'a>(
        &self,
        list: &'a [PhysSegment],
        len: u64,
        terms: Terms,
        attributes: Attributes,
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let (pool, limit) = (&*self.pool, Iova::new(self.profile.mask));
        let shape = shape(list, pool.domain.granule());
        let opens_others = self.profile.untrusted && !shape.whole;
        if attributes.persistent_streaming {
            if opens_others {
                return Err(BounceMapError::PersistentPart { len });
            }
            return pool.map_direct(list, len, terms, (limit, shape.touches));
        }
        if len <= pool.threshold() && (opens_others || !attributes.direct) {
            // SAFETY: the caller's promise.
            return unsafe { pool.map_single_use(list, len, terms, limit) };
        }
        match (opens_others, shape.touches && pool.config.split) {
            (false, _) => pool.map_direct(list, len, terms, (limit, shape.touches)),
            // SAFETY: the caller's promise; a mapping above the threshold has more than a granule.
            (true, true) => unsafe { pool.map_split(list, len, terms, limit) },
            // SAFETY: the caller's promise.
            (true, false) => unsafe { pool.map_single_use(list, len, terms, limit) },
        }
    }
}

/// Bytes of a list. Every sum that its mapping needs is checked.
#[inline]
fn total(list: &[PhysSegment]) -> Result<u64, MapListError> {
    let mut total: u64 = 0;
    for (index, piece) in list.iter().copied().enumerate() {
        piece.last_byte(index)?;
        let PhysSegment { phys, len } = piece;
        total = total.checked_add(len).ok_or(MapListError::Wraps { index, phys, len })?;
    }
    if total == 0 { Err(MapListError::EmptyList) } else { Ok(total) }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes a mapping through a free slot, which is in this caller's hands.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline]
    unsafe fn map_slot<'a>(
        &self,
        list: &'a [PhysSegment],
        len: u64,
        (class, index): (usize, usize),
        terms: Terms,
        group: u64,
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let (slot, kind) = (&self.slots[index], terms.direction.index());
        // Slots on the stacks have a buffer.
        let buffer = slot.buffer().unwrap_or(PhysAddr::new(0));
        if terms.listed
            && let Err(error) = park(slot, list)
        {
            self.give_back(class, kind, index);
            return Err(error);
        }
        if slot.group() != group {
            self.wipe(slot, class, kind);
            slot.set_group(group);
        }
        let at = PhysAddr::new(buffer.get() + terms.offset);
        let origin = list.first().map_or(at, |piece| piece.phys);
        if terms.copies_in() {
            if kind == 0 && slot.dirty() < terms.offset + len {
                slot.set_dirty(terms.offset + len);
            }
            // SAFETY: the original is the caller's promise, the buffer the slot's, with room for `offset + len` bytes.
            unsafe {
                if terms.listed {
                    copy_pieces(&*self.memory, (list, 0), (&[PhysSegment { phys: at, len }], 0), len);
                } else {
                    self.memory.copy(origin, at, len);
                }
            }
            // Before whatever the driver tells the device by.
            fence(Ordering::Release);
        }
        slot.lend(terms, origin, len);
        let iova = Iova::new(self.layout.start_of(class, index) | terms.offset);
        Ok(PoolMapping { iova, len, way: Way::Slot, list: None })
    }

    /// Ends the mapping of `len` bytes at `iova`, as [`PoolMapping`] says they are: what the device wrote is copied to
    /// the original, and the device does not reach the original any more.
    ///
    /// Through a slot: O(len) for the copy and O(1) for the rest, as [`map`](BounceDevice::map); the buffer stays mapped,
    /// but nothing connects it with the original any more. Allocates nothing. A single-use buffer or a split
    /// mapping waits for one invalidation; a direct one ends by the domain's policy. The caller holds no lock and no
    /// slot.
    ///
    /// # Errors
    /// [`BounceError`]. After [`BounceError::Unconfirmed`] and [`BounceError::Direct`] devices may reach what was
    /// mapped directly.
    #[inline]
    pub fn unmap(&self, iova: Iova, len: u64) -> Result<(), BounceError> {
        self.unmap_by(None, iova, len)
    }

    /// The same, by `policy` for what was mapped directly; by the domain's, where it is `None`.
    #[inline]
    pub(crate) fn unmap_by(&self, policy: Option<Policy>, iova: Iova, len: u64) -> Result<(), BounceError> {
        match self.layout.find(iova) {
            Some(place) => self.unmap_slot(place, iova, len),
            None => self.unmap_own(policy, iova, len),
        }
    }

    #[inline]
    fn unmap_slot(&self, place: Place, iova: Iova, len: u64) -> Result<(), BounceError> {
        let (slot, terms, at) = self.lent(place, iova)?;
        let origin = slot.origin();
        if origin.len != len {
            return Err(BounceError::WrongLength { iova, len, mapped: origin.len });
        }
        let list = take_list(slot, terms, iova)?;
        // From here on the address is nobody's: a second unmap finds no mapping.
        slot.set_phase(Phase::Free);
        if terms.copies_out() {
            // After whatever the device told the driver by.
            fence(Ordering::Acquire);
            // SAFETY: the promise of whoever mapped it.
            unsafe { self.copy_slot(at, origin.phys, list.as_deref(), (0, len), Toward::Original) };
        }
        if let Some(list) = list {
            slot.list.put(list);
        }
        let kind = terms.direction.index();
        if terms.wipe {
            self.wipe(slot, place.class, kind);
        } else if terms.keep_unwritten {
            // A buffer with the CPU's bytes in it, and the next driver is to find none.
            slot.set_group(NOBODY);
        }
        self.give_back(place.class, kind, place.index);
        Ok(())
    }

    /// Copies what the device has written of `len` bytes from `offset` on of the mapping at `iova` to the original. Does
    /// nothing for a device that only reads, and for what is mapped directly (but a fence). O(len).
    ///
    /// # Errors
    /// [`BounceError`], with nothing copied.
    pub fn sync_for_cpu(&self, iova: Iova, offset: u64, len: u64) -> Result<(), BounceError> {
        fence(Ordering::Acquire);
        self.sync(iova, offset, len, Toward::Original)
    }

    /// Lets the device see `len` bytes of the original from `offset` on of the mapping at `iova`. Does nothing for a
    /// device that only writes (but with [`keep_unwritten`](Attributes::keep_unwritten)), and for what is mapped
    /// directly (but a fence). O(len).
    ///
    /// # Errors
    /// [`BounceError`], with nothing copied.
    pub fn sync_for_device(&self, iova: Iova, offset: u64, len: u64) -> Result<(), BounceError> {
        let result = self.sync(iova, offset, len, Toward::Buffer);
        fence(Ordering::Release);
        result
    }

    fn sync(&self, iova: Iova, offset: u64, len: u64, into: Toward) -> Result<(), BounceError> {
        let Some(place) = self.layout.find(iova) else {
            return self.sync_own(iova, offset, len, into);
        };
        let (slot, terms, at) = self.lent(place, iova)?;
        let PhysSegment { phys: origin, len: mapped } = slot.origin();
        inside(iova, mapped, (offset, len))?;
        if !terms.copies(into) {
            return Ok(());
        }
        let list = take_list(slot, terms, iova)?;
        // SAFETY: the promise of whoever mapped it.
        unsafe { self.copy_slot(at, origin, list.as_deref(), (offset, len), into) };
        if let Some(list) = list {
            slot.list.put(list);
        }
        Ok(())
    }

    /// The slot whose mapping begins at `iova`, its terms, and where its data is in the buffer.
    #[inline]
    fn lent(&self, place: Place, iova: Iova) -> Result<(&Slot, Terms, PhysAddr), BounceError> {
        let slot = &self.slots[place.index];
        let offset = iova.get() - place.start;
        match (slot.lent(), slot.buffer()) {
            (Some(terms), Some(buffer)) if terms.offset == offset => {
                Ok((slot, terms, PhysAddr::new(buffer.get() + offset)))
            }
            _ => Err(BounceError::NotMapped { iova }),
        }
    }

    /// Copies `len` bytes from `offset` on between the data at `at` in a buffer and an original, in one piece or a list.
    ///
    /// # Safety
    /// As [`copy_pieces`].
    #[inline]
    unsafe fn copy_slot(
        &self,
        at: PhysAddr,
        origin: PhysAddr,
        list: Option<&Pieces>,
        (offset, len): (u64, u64),
        into: Toward,
    ) {
        // The place behind the last byte need not have an address.
        if len == 0 {
            return;
        }
        let Some(list) = list else {
            let (buffer, origin) = (PhysAddr::new(at.get() + offset), PhysAddr::new(origin.get() + offset));
            let (from, to) = if into == Toward::Buffer { (origin, buffer) } else { (buffer, origin) };
            // SAFETY: the caller's promise.
            unsafe { self.memory.copy(from, to, len) };
            return;
        };
        let buffer = [PhysSegment { phys: at, len: offset + len }];
        let (buffer, list) = ((&buffer[..], offset), (&list.0[..], offset));
        let (from, to) = if into == Toward::Buffer { (list, buffer) } else { (buffer, list) };
        // SAFETY: the caller's promise.
        unsafe { copy_pieces(&*self.memory, from, to, len) };
    }
}

/// Remembers a list in its slot.
fn park(slot: &Slot, list: &[PhysSegment]) -> Result<(), BounceMapError> {
    let mut kept: Box<Pieces> = slot.list.take().unwrap_or_default();
    let pieces = list.len();
    kept.0.clear();
    kept.0.try_reserve(pieces).map_err(|_| BounceMapError::NoMemory { pieces })?;
    kept.0.extend_from_slice(list);
    slot.list.put(kept);
    Ok(())
}

/// The list of a mapping that has one, which whoever has it puts back.
#[inline]
fn take_list(slot: &Slot, terms: Terms, iova: Iova) -> Result<Option<Box<Pieces>>, BounceError> {
    if terms.listed { slot.list.take().map(Some).ok_or(BounceError::Busy { iova }) } else { Ok(None) }
}
