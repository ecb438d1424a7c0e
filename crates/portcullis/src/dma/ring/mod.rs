//! Rings of addresses, for queues whose descriptors come and go in order.

mod commit;
mod error;
mod lists;
mod unmaps;

use alloc::vec::Vec;
use core::num::NonZeroU64;

use super::mapping::number;
use super::told::Told;
use super::{DmaDevice, MOST_IN_BATCH, RawMapping};
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::domain::Tally;
use crate::guard::Guard;
use crate::heap::room_for;
use crate::invalidation::Gather;
use crate::iova::{RingArena, RingConfig};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::setup::SetupError;

use self::error::{no_addresses, no_ring};
use self::unmaps::hold;

/// The configuration of a [`StrictRing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StrictRingConfig {
    /// The most descriptors that are mapped or wait for a commit at a time: give it at least the queue's length plus a batch.
    pub descriptors: u32,
    /// Bytes, in whole pages, of a typical descriptor's buffer. Other buffers may have any length.
    pub descriptor_bytes: u64,
    /// Descriptors that become unreachable together, with one wait for hardware: 1 to [`MOST_IN_BATCH`].
    pub batch: usize,
    /// The ring's [colour](RingConfig::colour); `None` for the domain's next. A domain numbers only its own rings: a driver with many
    /// domains behind one IOMMU numbers their rings here.
    pub colour: Option<u32>,
}

impl StrictRingConfig {
    /// With the domain's next colour.
    pub const fn new(descriptors: u32, descriptor_bytes: u64, batch: usize) -> Self {
        Self { descriptors, descriptor_bytes, batch, colour: None }
    }
}

/// Maps and unmaps a queue's descriptors in a ring of addresses of its own.
///
/// **The unit of protection is the batch** of [`batch`](StrictRingConfig::batch) descriptors, which may be 1. An unmapped descriptor stays mapped
/// until its batch is committed. The ring commits as soon as a whole batch waits. A driver calls [`commit`](Self::commit) when the queue falls idle,
/// so that nothing waits for ever. After a commit no device reaches anything of the batch, under every policy of the domain but passthrough.
///
/// A list is mapped with one reservation in a [`RingArena`] and one walk, or none if its pages are in a leaf table that the CPU used lately. If the
/// queue works in order, the descriptors of a batch are adjacent: one walk clears all of them, and one range invalidation covers them (of leaves
/// only, so the paging-structure caches stay). In any other order a commit sorts them, in O(n log n) for a batch of n, and makes more requests if
/// others are mapped in between, still with one wait.
///
/// One CPU at a time calls it. A driver that unmaps other units than it mapped builds its queue from a domain's [tokens](crate::domain::Reserved).
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # use portcullis::addr::{Direction, DmaSegment, DomainId, PhysSegment};
/// # use portcullis::dma::{DmaDevice, Ended, StrictRing, StrictRingConfig};
/// # use portcullis::domain::{Domain, Policy};
/// # use portcullis::mapper::TableMapper;
/// # use portcullis::pgtable::{PageTable, VtdSecondStage};
/// # use portcullis::std_platform::StdPlatform;
/// # use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};
/// # let memory = Memory::new(16 << 20);
/// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
/// # let platform = StdPlatform::new();
/// # let format = VtdSecondStage::four_level();
/// # let table = PageTable::new(Arc::clone(&memory), format)?;
/// # let (id, nic) = (DomainId(1), DeviceId(0));
/// # iommu.attach(nic, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
/// # let mapper = TableMapper::new(table, iommu.queue(), id, Vec::new());
/// # let domain = Domain::new(platform, mapper, Policy::Strict)?;
/// # let device = DmaDevice::new(domain, u64::MAX)?;
/// # let buffers = [memory.buffer(2048).ok_or("no memory")?, memory.buffer(2048).ok_or("no memory")?];
/// // A receive queue of up to 512 descriptors of a page, two of which become unreachable together.
/// let mut ring = StrictRing::new(&device, StrictRingConfig::new(512, 4096, 2))?;
/// let mut view = [DmaSegment::default(); 1];
/// let list = |n: usize| [PhysSegment { phys: buffers[n].phys(), len: 2048 }];
/// // SAFETY: the buffers are ours, and are read as atomics only, until the commit after their unmaps.
/// let (first, _) = unsafe { ring.map_sg(&list(0), Direction::FromDevice, &mut view) }?;
/// // SAFETY: as above.
/// let (second, _) = unsafe { ring.map_sg(&list(1), Direction::FromDevice, &mut view) }?;
/// let late = first.iova();
/// iommu.dma_write(nic, late, b"a packet")?;
/// // The card is done with both. The first waits, and only the second's unmap makes both unreachable.
/// assert_eq!(ring.unmap(first)?, Ended::Pending);
/// assert_eq!(ring.unmap(second)?, Ended::Flushed(()));
/// assert!(iommu.dma_write(nic, late, b"too late").is_err());
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct StrictRing<M: Mapper, P: Platform> {
    device: DmaDevice<M, P>,
    /// `None` without translation.
    arena: Option<RingArena>,
    /// Tells its descriptors from those of a ring of another domain, which may have the same addresses.
    number: u64,
    batch: usize,
    /// Ranges that a commit has to clear and confirm. Adjacent ranges that were unmapped in order are one. There is room for a batch, as an unmap
    /// allocates nothing.
    waiting: Vec<IovaRange>,
    unmapped: usize,
    unlinked: Gather,
    /// Ranges of refused lists, which devices may still reach. Empty unless hardware fails.
    unconfirmed: Vec<IovaRange>,
    closing: u64,
    /// Counts that the domain's statistics do not include yet.
    tally: Tally,
    told: Told,
}

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// Makes a ring of addresses that `device` reaches. Allocates; may be slow: see [`RingArena::new`]. If addresses
    /// are exhausted, it flushes, which waits for hardware.
    ///
    /// # Errors
    /// [`SetupError::NotCoherent`], [`SetupError::Batch`], [`SetupError::OutOfMemory`]; [`SetupError::NoRing`] and [`SetupError::Space`] if the
    /// space has no such range.
    pub fn new(device: &DmaDevice<M, P>, config: StrictRingConfig) -> Result<Self, SetupError> {
        let StrictRingConfig { descriptors, descriptor_bytes, batch, colour } = config;
        if !device.is_coherent() {
            return Err(SetupError::NotCoherent);
        }
        if !(1..=MOST_IN_BATCH).contains(&batch) {
            return Err(SetupError::Batch { batch, most: MOST_IN_BATCH });
        }
        // First: if this failed after the arena was made, its addresses would leak.
        let waiting = room_for(batch + 1)?;
        let arena = if device.is_translated() {
            let domain = device.domain();
            let ring = RingConfig {
                colour,
                limit: Iova::new(device.mask()),
                ..RingConfig::new(descriptors, descriptor_bytes, domain.granule())
            };
            Some(domain.new_ring(ring).map_err(|error| no_ring(error, &config))?)
        } else {
            None
        };
        Ok(Self {
            device: device.clone(),
            arena,
            number: number(),
            batch,
            waiting,
            unmapped: 0,
            unlinked: Gather::new(),
            unconfirmed: Vec::new(),
            closing: 0,
            tally: Tally::default(),
            told: Told::default(),
        })
    }

    /// Maps a descriptor's list, and writes the device's segments to `out`: touching ones are merged. Returns their number, at most `list.len()`;
    /// `out` must have room for that many. O(pages).
    ///
    /// Context: may allocate page tables. Waits for hardware if a refused list is undone, if memory for tables has run out, so that empty ones are
    /// reclaimed, and in caching mode. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all. [`DmaMapError::Full`] until descriptors are unmapped *and* committed;
    /// [`DmaMapError::TooLong`] for a list longer than the ring. After
    /// [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed) devices may reach the list until a [`commit`](Self::commit) succeeds.
    ///
    /// # Safety
    /// 1. As for [`Domain::map`](crate::domain::Domain::map), clauses 1 and 2. The mapping lasts until a commit has returned `Ok` after the
    ///    unmap: the descriptor's own ([`Ended::Flushed`](crate::dma::Ended::Flushed)) or another.
    /// 2. After [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed), clause 1 holds until a commit has returned `Ok`.
    #[inline(always)]
    pub unsafe fn map_sg(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        if let ([segment], [first, ..]) = (list, &mut *out)
            // SAFETY: clause 1 is the caller's.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            let mapping = self.mapped_fast(*segment, range);
            *first = DmaSegment { iova: mapping.iova, len: segment.len };
            return Ok((mapping, 1));
        }
        // Rebuilt word by word, so that the words stay in registers where the two paths meet (see `RawMapping`).
        // SAFETY: clauses 1 and 2 are the caller's.
        let (RawMapping { iova, word, tag }, used) = unsafe { self.map_list_sg(list, direction, out) }?;
        Ok((RawMapping { iova, word, tag }, used))
    }

    /// As [`map_sg`](Self::map_sg), but does not write the device's segments. One segment needs only [`RawMapping::iova`].
    ///
    /// # Safety
    /// As for [`map_sg`](Self::map_sg), clauses 1 and 2.
    #[inline(always)]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
    ) -> Result<RawMapping, DmaMapError> {
        if let [segment] = list
            // SAFETY: clause 1 is the caller's.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            return Ok(self.mapped_fast(*segment, range));
        }
        // As in `map_sg`. SAFETY: clauses 1 and 2 are the caller's.
        let RawMapping { iova, word, tag } = unsafe { self.map_list(list, direction) }?;
        Ok(RawMapping { iova, word, tag })
    }

    #[inline]
    pub(super) fn mapped_fast(&self, segment: PhysSegment, range: IovaRange) -> RawMapping {
        RawMapping::in_pages(self.device.first_of(segment, range), range, segment.len, self.number)
    }

    /// The fast path: maps one segment, and returns its pages, or changes nothing.
    ///
    /// # Safety
    /// As for [`map_sg`](Self::map_sg), clause 1.
    // Out of line, it returns in two registers.
    #[inline(never)]
    pub(super) unsafe fn map_fast(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Option<IovaRange> {
        let arena = self.arena.as_mut()?;
        let granule = arena.granule();
        let PhysSegment { phys, len } = segment;
        let offset = phys.page_offset(granule);
        // The slow path reports empty segments, and ones that wrap.
        phys.checked_add(NonZeroU64::new(len)?.get() - 1)?;
        let bytes = granule.round_up(offset.checked_add(len)?)?;
        let (domain, waiting) = (self.device.domain(), &mut self.waiting);
        let link = |range| {
            let torn = Guard::new(|| hold(waiting, range));
            // SAFETY: `map`'s clauses are the caller's clause 1, for all granules that the memory touches: checked and counted above. The arena
            // owns the range, which is as long.
            let linked =
                unsafe { domain.link_fast::<true>(range, &[segment], direction.permissions().into()) };
            torn.done();
            linked
        };
        let range = arena.reserve_if(bytes, link)?;
        self.count(range, bytes - len);
        Some(range)
    }

    /// Unmapped descriptors that no commit has reported, including those that one has ended but could not report (see [`unmap`](Self::unmap)).
    #[inline]
    pub fn waiting(&self) -> usize {
        self.unmapped + self.told.untold()
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The device.
    pub fn device(&self) -> &DmaDevice<M, P> {
        &self.device
    }

    /// The addresses; `None` without translation.
    #[cfg(feature = "parts")]
    pub fn arena(&self) -> Option<&RingArena> {
        self.arena.as_ref()
    }
}

/// Commits. Mapped descriptors stay mapped. If there are any, or if the hardware does not confirm, the ring's addresses leak.
impl<M: Mapper, P: Platform> Drop for StrictRing<M, P> {
    fn drop(&mut self) {
        let device = self.device.clone();
        let changing = self.arena.as_ref().map(|arena| device.domain().changing(arena.range()));
        let ended = self.commit();
        let Some((arena, changing)) = self.arena.take().zip(changing) else { return };
        if ended.is_err() {
            device.domain().count_tally(core::mem::take(&mut self.tally));
            // Open until a flush is confirmed. This counts all reserved bytes, of which some may not be mapped.
            let bytes = arena.in_use();
            drop(changing);
            return device.domain().hold(bytes, None);
        }
        changing.done();
        device.domain().free_ring(arena);
    }
}
