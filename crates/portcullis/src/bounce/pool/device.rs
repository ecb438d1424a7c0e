//! A device of a pool's domain: what a driver calls to map. It chooses the way of each mapping, so
//! that an untrusted device is never given a granule of the original that holds other data, too.

use super::BouncePool;
use super::client::Client;
use super::config::{Attributes, DeviceProfile};
use super::mapping::PoolMapping;
use super::slot::Terms;
use super::split::{Cut, cut, shape};
use super::wanted::Search;
use crate::addr::{Direction, Iova, PhysAddr, PhysSegment};
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
    /// Makes a device that is as `profile` says.
    ///
    /// # Errors
    /// [`SetupError::OffsetMask`] where the bits to keep are not the lowest, or reach beyond a
    /// granule's offset.
    pub fn new(pool: Shared<BouncePool<M, P, C>>, profile: DeviceProfile) -> Result<Self, SetupError> {
        let client = pool.client(profile)?;
        Ok(Self { pool, client })
    }

    /// The same device, with slots for the ends of lists that it reaches by other addresses than the slots' own: each byte is
    /// as far into its slot as it is into its granule.
    pub(crate) fn for_ends(&self) -> Self {
        let offset_mask = self.pool.domain.granule().offset_mask();
        let profile = DeviceProfile { mask: u64::MAX, offset_mask, ..self.client.profile };
        let client = Client { profile, reaches_slots: true, ..self.client };
        Self { pool: self.pool.clone(), client }
    }

    /// Returns how a list that the device [may not be given](Self::look_at) is cut, so that it is
    /// given the middle, and the bytes of the list; `None` where it may be given nothing of it.
    pub(crate) fn cut(&self, list: &[PhysSegment]) -> Result<Option<(Cut, u64)>, MapListError> {
        let len = total(list)?;
        let cut = cut(list, len, self.pool.domain.granule()).filter(|_| self.pool.config.split);
        Ok(cut.map(|cut| (cut, len)))
    }

    /// As [`map`](Self::map), through a slot or not at all. Returns the address of the slot's mapping.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    pub(crate) unsafe fn map_in_slot(
        &self,
        piece: PhysSegment,
        direction: Direction,
        attributes: Attributes,
    ) -> Option<Iova> {
        let terms = self.pool.terms(&self.client, piece.phys, false, direction, attributes);
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.pool.map_slotted(&self.client, &[piece], piece.len, (terms, true)) };
        mapping.ok().flatten().map(|mapping| mapping.iova())
    }

    /// Checks that the device reaches all slots.
    ///
    /// # Errors
    /// [`SetupError::PoolBeyondReach`].
    pub(crate) fn check_reach(&self) -> Result<(), SetupError> {
        let (last, end) = (self.client.limit().get(), self.pool.region.last());
        if self.client.reaches_slots { Ok(()) } else { Err(SetupError::PoolBeyondReach { last, end }) }
    }

    /// As [`BouncePool::lend`].
    #[inline]
    pub(crate) fn lend(&self, len: u64, direction: Direction) -> Result<(Iova, PhysAddr), DmaMapError> {
        self.pool.lend(&self.client, len, direction)
    }

    /// Whether the device is never given what shares a granule with a buffer.
    pub(crate) fn is_untrusted(&self) -> bool {
        self.client.profile.untrusted
    }

    /// As [`Client::look_at`].
    #[inline]
    pub(crate) fn look_at(&self, list: &[PhysSegment]) -> (u64, bool) {
        self.client.look_at(list)
    }

    /// The pool.
    pub fn pool(&self) -> &Shared<BouncePool<M, P, C>> {
        &self.pool
    }

    /// Lets the device reach the bytes of `list`, or a copy of them: which, the [module](super) says. The list is
    /// mapped as a whole or not at all.
    ///
    /// Through a slot whose buffer is waiting: O(len), for the copy, and O(1) for the rest; no lock, no allocation, and
    /// no atomic read-modify-write (two, and maybe an allocation, for a list). A slot that changes hands between groups
    /// is zeroed. Otherwise allocates memory, tables and book-keeping, and may wait for hardware and for other CPUs'
    /// turns where memory, slots or addresses are exhausted. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaMapError`], with nothing mapped and nothing lost; but after [`MapListError::Unconfirmed`]
    /// devices may reach what was entered of the list, until a flush of the domain succeeds.
    ///
    /// [`MapListError::Unconfirmed`]: crate::domain::MapListError::Unconfirmed
    ///
    /// # Safety
    /// Until [`unmap`](BouncePool::unmap) of the mapping has returned `Ok` (and, where it is mapped and not copied, the flush that
    /// a lazy policy owes is confirmed), or the pool is dropped:
    ///
    /// - All bytes of `list` are memory that the CPU reaches through the pool's [`CopyMemory`].
    /// - They are the caller's to open to the device, as for
    ///   [`Domain::map`](crate::domain::Domain::map): what is large or
    ///   [persistent](Attributes::persistent_streaming) is not copied but mapped. (An untrusted
    ///   device is never given more than these bytes; any other is given all of their granules.)
    /// - Nothing but devices, and what accesses them as atomics, touches them while this, a sync or the unmap of the mapping
    ///   runs: those copy, as a device would.
    #[inline]
    pub unsafe fn map<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        // SAFETY: the caller's promise.
        unsafe { self.pool.map::<false>(&self.client, list, direction, attributes, |_| ()) }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// As [`BounceDevice::map`], for `client`. Calls `counted` with the CPU where that has the slot at hand, as nearly always.
    /// Where all mappings of a direction in which devices write ask for a copy-in, `FILLED` makes that the short way, too.
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
            // SAFETY: the caller's promise.
            let fast = unsafe { self.map_fast::<FILLED>(client, *piece, direction, attributes, counted) };
            if let Some(mapping) = fast {
                return Ok(mapping);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.map_slow(client, list, direction, (attributes, true)) }
    }

    /// Maps one piece through a slot that the CPU has at hand and whose buffer was this group's
    /// before, as nearly all mappings are made. Otherwise returns `None`, with nothing changed.
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
        if attributes.persistent_streaming || !client.reaches_slots {
            return None;
        }
        piece.last().ok()?;
        let terms = self.terms(client, piece.phys, false, direction, attributes);
        let bytes = piece.len.checked_add(terms.offset)?;
        let (place, slot) = self.take_fast::<FILLED>(bytes, (direction.index(), client.group()), counted)?;
        // SAFETY: the caller's promise; the slot is in this caller's hands.
        Some(unsafe { self.fill(slot, place, piece, None, (terms, true)) })
    }

    /// Makes any mapping. What goes through buffers gets the original's bytes now, unless the caller, who has
    /// `copied` to say, leaves that to a later sync.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline]
    pub(crate) unsafe fn map_slow<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        direction: Direction,
        how: (Attributes, bool),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        // One after the other, as what is below either takes much of the stack.
        // SAFETY: the caller's promise.
        if let Some(mapping) = unsafe { self.map_in_any_slot(client, list, direction, how) }? {
            return Ok(mapping);
        }
        // SAFETY: the caller's promise.
        unsafe { self.map_otherwise(client, list, direction, how) }
    }

    /// Maps through a slot, where the mapping may go through one and there is one.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline(never)]
    unsafe fn map_in_any_slot(
        &self,
        client: &Client,
        list: &[PhysSegment],
        direction: Direction,
        (attributes, copied): (Attributes, bool),
    ) -> Result<Option<PoolMapping<'static>>, DmaMapError> {
        let len = total(list)?;
        if attributes.persistent_streaming || !client.reaches_slots {
            return Ok(None);
        }
        let terms = self.terms_of(client, list, direction, attributes);
        // SAFETY: the caller's promise.
        unsafe { self.map_slotted(client, list, len, (terms, copied)) }
    }

    /// Maps through a slot; `None` where there is none for as much.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[inline]
    unsafe fn map_slotted(
        &self,
        client: &Client,
        list: &[PhysSegment],
        len: u64,
        (terms, copied): (Terms, bool),
    ) -> Result<Option<PoolMapping<'static>>, DmaMapError> {
        let bytes = len.checked_add(terms.offset);
        let Some(class) = bytes.and_then(|bytes| self.layout.class_of(bytes)) else { return Ok(None) };
        let taken = self.take_or_refill(class, terms.direction, client.group(), Search::ManyFree)?;
        let Some(index) = taken else { return Ok(None) };
        // SAFETY: the caller's promise.
        unsafe { self.map_slot(list, len, (class, index), (terms, copied), client.group()) }.map(Some)
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
            wipe: attributes.wipe || self.config.wipe,
            listed,
            offset: first.get() & client.profile.offset_mask,
        }
    }

    fn terms_of(
        &self,
        client: &Client,
        list: &[PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Terms {
        let first = list.first().map_or(PhysAddr::new(0), |piece| piece.phys);
        self.terms(client, first, list.len() > 1, direction, attributes)
    }

    /// Makes a mapping that goes through no slot.
    ///
    /// # Safety
    /// As [`BounceDevice::map`].
    #[cold]
    #[inline(never)]
    unsafe fn map_otherwise<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        direction: Direction,
        (attributes, copied): (Attributes, bool),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let (len, terms) = (total(list)?, self.terms_of(client, list, direction, attributes));
        let shape = shape(list, self.domain.granule());
        let opens_others = client.profile.untrusted && !shape.whole;
        if attributes.persistent_streaming {
            if opens_others {
                return Err(DmaMapError::PersistentPart { len });
            }
            // SAFETY: the caller's promise.
            return unsafe { self.map_direct(client, list, len, terms, shape.touches) };
        }
        if len <= self.threshold() {
            // SAFETY: the caller's promise.
            return unsafe { self.map_single_use(client, list, len, (terms, copied)) };
        }
        match (opens_others, shape.touches && self.config.split) {
            // SAFETY: the caller's promise.
            (false, _) => unsafe { self.map_direct(client, list, len, terms, shape.touches) },
            // SAFETY: the caller's promise; a mapping above the threshold has more than a granule.
            (true, true) => unsafe { self.map_split(client, list, len, (terms, copied)) },
            // SAFETY: the caller's promise.
            (true, false) => unsafe { self.map_single_use(client, list, len, (terms, copied)) },
        }
    }
}

/// Returns the bytes of a list. Checks every sum that its mapping needs.
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
