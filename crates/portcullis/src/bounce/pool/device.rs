//! A device of a pool's domain, through which a driver maps. It chooses the way of each mapping, so that an untrusted device never reaches a
//! granule of the original that holds other data, too.

use super::BouncePool;
use super::client::{Client, Request};
use super::config::{Attributes, DeviceProfile};
use super::mapping::PoolMapping;
use super::refill::MANY_FREE;
use super::slot::Terms;
use super::split::{Cut, cut};
use crate::addr::{Direction, Iova, PhysAddr, PhysSegment, touch};
use crate::bounce::error::DmaMapError;
use crate::domain::MapListError;
use crate::heap::Shared;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, LocalCpu, Platform};
use crate::setup::SetupError;

/// A device of a pool's domain. Cheap to clone.
#[derive(Debug)]
pub struct BounceDevice<M: Mapper, P: Platform, C: CopyMemory> {
    pool: Shared<BouncePool<M, P, C>>,
    client: Client,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Clone for BounceDevice<M, P, C> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), client: self.client }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BounceDevice<M, P, C> {
    /// Makes a device with this profile.
    ///
    /// # Errors
    /// [`SetupError::OffsetMask`]: the bits to keep are not the lowest, or reach beyond a granule's offset.
    pub fn new(pool: Shared<BouncePool<M, P, C>>, profile: DeviceProfile) -> Result<Self, SetupError> {
        let client = pool.client(profile)?;
        Ok(Self { pool, client })
    }

    /// The same device, for slots that stand in for the ends of lists. It reaches their memory at the list's addresses, so the slots' own need not be
    /// in reach; and each byte has the same offset in its slot as in its granule.
    pub(crate) fn for_ends(&self) -> Self {
        let offset_mask = self.pool.domain.granule().offset_mask();
        let profile = DeviceProfile { mask: u64::MAX, offset_mask, ..self.client.profile };
        let client = Client { profile, reaches_slots: true, ..self.client };
        Self { pool: self.pool.clone(), client }
    }

    /// How to cut a list that the device [may not get](Self::look_at), so that it gets the middle; and the list's bytes. `None` where it gets
    /// nothing.
    pub(crate) fn cut(&self, list: &[PhysSegment]) -> Result<Option<(Cut, u64)>, MapListError> {
        let len = total(list)?;
        let cut = cut(list, len, self.pool.domain.granule()).filter(|_| self.pool.config.split);
        Ok(cut.map(|cut| (cut, len)))
    }

    /// As [`map`](Self::map), through a slot or not at all. Returns the mapping's address.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    pub(crate) unsafe fn map_in_slot(
        &self,
        piece: PhysSegment,
        direction: Direction,
        attributes: Attributes,
    ) -> Option<Iova> {
        let list = [piece];
        let request = self.pool.request(&self.client, &list, direction, (attributes, true)).ok()?;
        // SAFETY: clauses 1 to 3 are the caller's.
        let mapping = unsafe { self.pool.map_in_any_slot(&request) };
        mapping.ok().flatten().map(|mapping| mapping.iova())
    }

    /// Maps a list of any length directly. The device may have [all of its granules](Client::look_at).
    ///
    /// # Safety
    /// As [`map`](Self::map).
    pub(crate) unsafe fn map_uncopied<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let (pool, how) = (&*self.pool, (Attributes::default(), false));
        let mut request = pool.request(&self.client, list, direction, how)?;
        let touches = touch(list, pool.domain.granule());
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { pool.map_direct(&mut request, touches) }
    }

    /// Checks that the device reaches all slots.
    ///
    /// # Errors
    /// [`SetupError::PoolBeyondReach`].
    pub(crate) fn check_reach(&self) -> Result<(), SetupError> {
        let (last, end) = (self.client.profile.mask, self.pool.region.last());
        if self.client.reaches_slots { Ok(()) } else { Err(SetupError::PoolBeyondReach { last, end }) }
    }

    #[inline]
    pub(crate) fn lend(&self, len: u64, direction: Direction) -> Result<(Iova, PhysAddr), DmaMapError> {
        self.pool.lend(&self.client, len, direction)
    }

    #[cfg(feature = "parts")]
    pub(crate) fn is_untrusted(&self) -> bool {
        self.client.profile.untrusted
    }

    #[inline]
    pub(crate) fn look_at(&self, list: &[PhysSegment]) -> (u64, bool) {
        self.client.look_at(list)
    }

    /// The pool.
    pub fn pool(&self) -> &Shared<BouncePool<M, P, C>> {
        &self.pool
    }

    /// Lets the device reach the bytes of `list`, or a copy of them: the [module](super) has the table. The list is mapped as a whole or not at all.
    ///
    /// From the CPU's magazine: O(len) for the copy, O(1) for the rest; no lock, no allocation, and no atomic read-modify-write (two, and maybe an
    /// allocation, for a list). A slot that moves to another group is zeroed.
    ///
    /// Context: otherwise allocates memory, tables and metadata, and may wait for hardware and for other CPUs' exclusive sections where memory, slots
    /// or addresses are exhausted. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaMapError`]: nothing is mapped, and nothing leaks. After [`MapListError::Unconfirmed`] devices may reach entries of the list until a flush
    /// of the domain succeeds.
    ///
    /// # Safety
    /// The mapping *lasts* until [`unmap`](BouncePool::unmap) of it has returned `Ok` (and, if it is mapped and not copied, the flush that a lazy
    /// policy owes is confirmed), or the pool is dropped. As long as it lasts:
    ///
    /// 1. All bytes of `list` are memory that the CPU reaches through the pool's [`CopyMemory`].
    /// 2. They are the caller's to open to the device, as for [`Domain::map`](crate::domain::Domain::map), clauses 1 to 3: large mappings
    ///    are not copied but mapped. (An untrusted device gets only these bytes; any other gets all of their granules.)
    /// 3. While this, a sync or the unmap of the mapping runs, only devices and atomic accesses touch them: these calls copy as a device would.
    #[inline]
    pub unsafe fn map<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.pool.map::<false>(&self.client, list, direction, attributes, |_| ()) }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes the client of a device with this profile. Errors as for [`BounceDevice::new`].
    pub(crate) fn client(&self, profile: DeviceProfile) -> Result<Client, SetupError> {
        let mask = profile.offset_mask;
        let inside = self.domain.granule().offset_mask();
        if mask & mask.wrapping_add(1) != 0 || mask > inside {
            return Err(SetupError::OffsetMask { mask });
        }
        let reaches_slots = self.region.last().get() <= profile.mask;
        let group = profile.group.into();
        Ok(Client { profile, group, reaches_slots, inside: if profile.untrusted { inside } else { 0 } })
    }

    /// As [`BounceDevice::map`], for `client`. Calls `counted` with the CPU if its magazine has the slot, as nearly always. `FILLED` puts mappings
    /// with a copy-in on the fast path, too; then all of the caller's `FromDevice` mappings must ask for one.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline(always)]
    pub(crate) unsafe fn map<'a, const FILLED: bool>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        if let [piece] = list {
            // SAFETY: clauses 1 to 3 are the caller's.
            let fast = unsafe { self.map_fast::<FILLED>(client, *piece, direction, attributes, counted) };
            if let Some(mapping) = fast {
                return Ok(mapping);
            }
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.map_slow(client, list, direction, (attributes, true)) }
    }

    /// The fast path: one piece, through a slot of the CPU's magazine whose buffer was this group's before. Otherwise returns `None`, with nothing
    /// changed.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline(always)]
    unsafe fn map_fast<'a, const FILLED: bool>(
        &self,
        client: &Client,
        piece: PhysSegment,
        direction: Direction,
        attributes: Attributes,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<PoolMapping<'a>> {
        if !client.reaches_slots {
            return None;
        }
        piece.last().ok()?;
        let terms = self.terms(client, piece.phys, false, direction, attributes);
        let bytes = piece.len.checked_add(terms.offset)?;
        let (place, slot) = self.take_fast::<FILLED>(bytes, (direction.index(), client.group), counted)?;
        // SAFETY: clauses 1 to 3 are the caller's; this caller owns the slot (`fill`, 2), of which the magazine matched the group (`fill`, 3).
        Some(unsafe { self.fill(slot, place, piece, None, (terms, true)) })
    }

    /// The slow path, for any mapping. Fills the buffers if the second of `how` is set; else a later sync does.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline(never)]
    pub(crate) unsafe fn map_slow<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        direction: Direction,
        how: (Attributes, bool),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let mut request = self.request(client, list, direction, how)?;
        // Two calls out of line, so that only one's frames are on the stack.
        // SAFETY: clauses 1 to 3 are the caller's.
        if let Some(mapping) = unsafe { self.map_in_any_slot(&request) }? {
            return Ok(mapping);
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.map_otherwise(&mut request) }
    }

    /// Makes the request of a map, and checks the sums of its list.
    fn request<'c, 'r>(
        &self,
        client: &'c Client,
        list: &'r [PhysSegment],
        direction: Direction,
        (attributes, copied): (Attributes, bool),
    ) -> Result<Request<'c, 'r>, MapListError> {
        let phys = list.first().map_or(PhysAddr::new(0), |piece| piece.phys);
        let terms = self.terms(client, phys, list.len() > 1, direction, attributes);
        Ok(Request { client, list, origin: PhysSegment { phys, len: total(list)? }, terms, copied })
    }

    #[inline]
    fn terms(
        &self,
        client: &Client,
        first: PhysAddr,
        listed: bool,
        direction: Direction,
        attributes: Attributes,
    ) -> Terms {
        Terms {
            direction,
            copy_in: attributes.copy_in && direction == Direction::FromDevice,
            wipe: self.config.wipe,
            listed,
            offset: first.get() & client.profile.offset_mask,
        }
    }

    /// Maps through a slot, if the mapping may use one and there is one.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline(never)]
    unsafe fn map_in_any_slot(
        &self,
        request: &Request<'_, '_>,
    ) -> Result<Option<PoolMapping<'static>>, DmaMapError> {
        let Request { client, terms, .. } = *request;
        let bytes = request.origin.len.checked_add(terms.offset).filter(|_| client.reaches_slots);
        let Some(class) = bytes.and_then(|bytes| self.layout.class_of(bytes)) else { return Ok(None) };
        let taken = self.take_or_refill(class, terms.direction, client.group, MANY_FREE)?;
        let Some(index) = taken else { return Ok(None) };
        // SAFETY: clauses 1 to 3 are the caller's; `take_or_refill` gave this caller the slot (`map_slot`, 4).
        unsafe { self.map_slot(request, (class, index)) }.map(Some)
    }

    /// Makes a mapping without a slot.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[cold]
    #[inline(never)]
    unsafe fn map_otherwise<'a>(
        &self,
        request: &mut Request<'_, 'a>,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let (list, granule) = (request.list, self.domain.granule());
        let (touches, cut) = (touch(list, granule), Cut::of(list, granule));
        let opens_others = request.client.profile.untrusted && !(touches && cut == Cut::default());
        let is_large = request.origin.len > self.threshold();
        if is_large && !opens_others {
            // SAFETY: clauses 1 to 3 are the caller's.
            return unsafe { self.map_direct(request, touches) };
        }
        let is_split = is_large && touches && self.config.split;
        if is_split {
            request.terms.offset = request.origin.phys.page_offset(granule);
        }
        // SAFETY: clauses 1 to 3 are the caller's; a mapping above the threshold has more than a granule.
        unsafe { self.map_buffered(request, is_split.then_some(cut)) }
    }
}

/// The bytes of a list. Checks every sum that its mapping needs.
#[inline]
fn total(list: &[PhysSegment]) -> Result<u64, MapListError> {
    let mut total: u64 = 0;
    for (index, piece) in list.iter().copied().enumerate() {
        MapListError::check(piece, index)?;
        let PhysSegment { phys, len } = piece;
        total = total.checked_add(len).ok_or(MapListError::Wraps { index, phys, len })?;
    }
    if total == 0 { Err(MapListError::EmptyList) } else { Ok(total) }
}
