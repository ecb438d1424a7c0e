//! Rings of addresses, for queues whose descriptors come and go in order. No memory and no address
//! of a descriptor may be used again before the commit of its batch is confirmed. That is strict
//! protection, near the price of none.

mod commit;
mod error;
mod lists;

use alloc::vec::Vec;
use core::num::NonZeroU64;

use super::told::Told;
use super::{DmaDevice, MOST_IN_BATCH};
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PageSize, PhysSegment};
use crate::domain::Tally;
use crate::heap::room_for;
use crate::invalidation::Gather;
use crate::iova::{ArenaError, RingArena, RingConfig};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::unique;

pub use error::{RingError, RingUnmapFailed};

/// What a [`StrictRing`] is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StrictRingConfig {
    /// How many descriptors may be mapped, or wait for a commit, at once: the length of the queue,
    /// and a batch more at the least.
    pub descriptors: u32,
    /// Bytes of the pages that a usual descriptor takes. Others may be of any length.
    pub descriptor_bytes: u64,
    /// Descriptors that become unreachable together, with one wait: 1 to [`MOST_IN_BATCH`].
    pub batch: usize,
    /// The ring's [colour](RingConfig::colour); `None` for the domain's next. A domain numbers only
    /// its own rings: a driver with many domains behind one IOMMU numbers their rings here.
    pub colour: Option<u32>,
}

impl StrictRingConfig {
    /// A ring whose unit of protection is the batch of `batch` descriptors.
    pub const fn new(descriptors: u32, descriptor_bytes: u64, batch: usize) -> Self {
        Self { descriptors, descriptor_bytes, batch, colour: None }
    }
}

/// A descriptor's pages, open to the device until they are [unmapped](StrictRing::unmap).
///
/// It cannot be copied: what is unmapped is unmapped once. Dropping it leaves the pages mapped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the pages stay mapped until the descriptor is unmapped"]
pub struct RingMapping {
    pub(super) first: Iova,
    /// Bytes of its pages; 0 where nothing is translated.
    pub(super) bytes: u64,
    /// Bytes of the pages that are not the list's.
    pub(super) neighbours: u64,
    /// The [number](number) of the ring that it is of.
    pub(super) ring: u64,
}

/// Bits below the number of a ring, or of a queue, in which a queue says how it made a mapping.
pub(super) const KIND_BITS: u32 = 16;

/// A number that no other ring or queue has, with its [lowest bits](KIND_BITS) 0.
pub(super) fn number() -> u64 {
    // Programs do not make 2^48 of them.
    unique() << KIND_BITS
}

impl RingMapping {
    /// The address of the first byte of the list for the device.
    pub fn iova(&self) -> Iova {
        self.first
    }

    /// The pages, in the ring of a domain of this [granule](crate::domain::Domain::granule); `None` where the device uses the
    /// memory's own addresses.
    #[inline]
    pub fn range(&self, granule: PageSize) -> Option<IovaRange> {
        let bytes = NonZeroU64::new(self.bytes)?;
        Some(IovaRange::inside(Iova::new(self.first.get() & !granule.offset_mask()), bytes))
    }

    /// Makes a mapping that begins at the memory's own address, as nothing is translated.
    #[inline]
    pub(super) fn untranslated(first: Iova, ring: u64) -> Self {
        Self { first, bytes: 0, neighbours: 0, ring }
    }

    /// Makes a mapping of `used` bytes in the pages of `range`, the first byte at `first`.
    #[inline]
    pub(super) fn new(first: Iova, range: IovaRange, used: u64, ring: u64) -> Self {
        let bytes = range.len();
        Self { first, bytes, neighbours: bytes.saturating_sub(used), ring }
    }
}

/// What an unmap has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the memory is the driver's again after a commit only"]
pub enum RingUnmap {
    /// The descriptor waits for its batch to become complete: **the device can still reach it**.
    Waiting,
    /// The batch is complete and committed: no device reaches the descriptor, or any unmapped before it.
    Committed,
}

/// A queue's own addresses, mapped and unmapped by descriptor.
///
/// **The unit of protection is the batch** of [`batch`](StrictRingConfig::batch) descriptors, which
/// is one descriptor where that is 1. A descriptor that is unmapped counts as mapped, and is, until
/// its batch is committed. The ring commits as soon as a whole batch waits. A driver calls
/// [`commit`](Self::commit) when the queue falls idle, so that nothing waits for ever. After a
/// commit no device reaches anything of the batch. This is so whatever the domain's policy, but for
/// passthrough, where nothing is ever unreachable.
///
/// A list is mapped with one reservation in a [`RingArena`] and one walk, and needs no
/// walk where its pages are in a lowest table that the CPU was in lately. Descriptors that are
/// unmapped together lie side by side when the queue works in order: one walk clears all of them,
/// and one range invalidation (of the leaves only, so that the paging-structure caches are kept)
/// covers all. In any other order they are sorted. That costs O(n log n) for a batch of n, and more
/// requests where others are mapped in between, still with one wait.
///
/// It belongs to the owner of the queue: one CPU at a time calls it. A driver whose mappings and unmaps are of different sizes
/// builds its queue of a domain's [steps](crate::domain::Reserved).
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # use portcullis::addr::{Direction, DmaSegment, DomainId, PhysSegment};
/// # use portcullis::dma::{DmaDevice, RingUnmap, StrictRing, StrictRingConfig};
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
/// assert_eq!(ring.unmap(first)?, RingUnmap::Waiting);
/// assert_eq!(ring.unmap(second)?, RingUnmap::Committed);
/// assert!(iommu.dma_write(nic, late, b"too late").is_err());
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct StrictRing<M: Mapper, P: Platform> {
    device: DmaDevice<M, P>,
    /// `None` where nothing is translated.
    arena: Option<RingArena>,
    /// Tells its descriptors from those of a ring of another domain, which may have the same addresses.
    number: u64,
    batch: usize,
    /// Ranges that are unmapped, and neither cleared nor confirmed; neighbours that were unmapped
    /// one after the other are one range. There is room for a batch, as an unmap allocates nothing.
    waiting: Vec<IovaRange>,
    /// How many descriptors are unmapped and wait. Without translation nothing else is known of
    /// them.
    unmapped: usize,
    /// What is cleared, and not confirmed.
    unlinked: Gather,
    /// Ranges of lists that were refused, where it is not confirmed that no device reaches them.
    /// Empty unless hardware fails.
    unconfirmed: Vec<IovaRange>,
    /// Bytes beside the buffers of those that wait.
    closing: u64,
    /// What the domain has not been told yet.
    tally: Tally,
    told: Told,
}

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// Makes a ring of addresses that `device` reaches, of the colour that `config` names or of the
    /// domain's next. Allocates; may be slow: see [`RingArena::new`].
    ///
    /// # Errors
    /// [`RingError::Batch`]; [`RingError::Arena`], where the space has no such range.
    pub fn new(device: &DmaDevice<M, P>, config: StrictRingConfig) -> Result<Self, RingError> {
        let StrictRingConfig { descriptors, descriptor_bytes, batch, colour } = config;
        device.maps()?;
        if !(1..=MOST_IN_BATCH).contains(&batch) {
            return Err(RingError::Batch { batch, most: MOST_IN_BATCH });
        }
        // Before the addresses, which nothing takes back where this fails.
        let waiting = room_for(batch + 1)?;
        let arena = if device.is_translated() {
            let domain = device.domain();
            let ring = RingConfig {
                colour,
                limit: Iova::new(device.mask()),
                ..RingConfig::new(descriptors, descriptor_bytes, domain.granule())
            };
            Some(domain.new_ring(ring)?)
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

    /// Maps a descriptor's list with one reservation and at most one walk, and writes to `out` what
    /// the device is to be given: segments that touch are merged. Returns how many segments it
    /// wrote, `list.len()` at the most; `out` must have room for that many.
    ///
    /// O(1) and a step for each page; may allocate page tables. Waits for hardware where a list
    /// that was refused half-way must be undone, where memory for tables has run out, so that empty
    /// ones are reclaimed, and where the hardware caches what is absent. The caller holds no lock
    /// and no CPU.
    ///
    /// # Errors
    /// [`RingError::Map`], and [`RingError::Arena`] with [`ArenaError::Full`] until descriptors are unmapped *and*
    /// committed: the list is mapped as a whole or not at all.
    /// After [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed) devices may reach the list until a
    /// [`commit`](Self::commit) succeeds.
    ///
    /// # Safety
    /// As for [`Domain::map`](crate::domain::Domain::map), until a commit has returned `Ok` after the unmap: the descriptor's own
    /// ([`RingUnmap::Committed`]) or another. After [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed) until a
    /// commit has.
    #[inline(always)]
    pub unsafe fn map_sg(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RingMapping, usize), RingError> {
        if let ([segment], [first, ..]) = (list, &mut *out)
            // SAFETY: the caller's promise.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            let mapping = self.mapped_fast(*segment, range);
            *first = DmaSegment { iova: mapping.first, len: segment.len };
            return Ok((mapping, 1));
        }
        // Word by word: where the two ways meet, the words are in registers then, and not in memory
        // that was given to a call.
        // SAFETY: the caller's promise.
        let (RingMapping { first, bytes, neighbours, ring }, used) =
            unsafe { self.map_list_sg(list, direction, out) }?;
        Ok((RingMapping { first, bytes, neighbours, ring }, used))
    }

    /// As [`map_sg`](Self::map_sg), without the device's view of the list: for one segment,
    /// [`RingMapping::iova`] says it all.
    ///
    /// # Errors
    /// As [`map_sg`](Self::map_sg).
    ///
    /// # Safety
    /// As for [`map_sg`](Self::map_sg).
    #[inline(always)]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
    ) -> Result<RingMapping, RingError> {
        if let [segment] = list
            // SAFETY: the caller's promise.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            return Ok(self.mapped_fast(*segment, range));
        }
        // As in `map_sg`. SAFETY: the caller's promise.
        let RingMapping { first, bytes, neighbours, ring } = unsafe { self.map_list(list, direction) }?;
        Ok(RingMapping { first, bytes, neighbours, ring })
    }

    /// Makes the mapping of what [`map_fast`](Self::map_fast) has mapped to the pages of `range`.
    #[inline]
    pub(super) fn mapped_fast(&self, segment: PhysSegment, range: IovaRange) -> RingMapping {
        RingMapping::new(self.device.first_of(segment, range), range, segment.len, self.number)
    }

    /// Maps one segment, if that is quickly done, and returns its pages. Else nothing is changed.
    ///
    /// # Safety
    /// As for [`map_sg`](Self::map_sg).
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
        // A segment of no bytes, and one that wraps, are refused elsewhere.
        phys.checked_add(NonZeroU64::new(len)?.get() - 1)?;
        let bytes = granule.round_up(offset.checked_add(len)?)?;
        let (domain, waiting) = (self.device.domain(), &mut self.waiting);
        let page = phys.align_down(granule);
        let link = |range| {
            let torn = Torn { waiting, range };
            // SAFETY: the caller's promise, for all of the granules that the memory touches.
            let linked = unsafe { domain.link_fast(range, page, direction.permissions().into()) };
            torn.done();
            linked
        };
        let range = arena.reserve_if(bytes, link)?;
        self.count(range, bytes - len);
        Some(range)
    }

    /// Ends a descriptor's mapping. The last of a batch commits it, and so waits for the hardware
    /// once, for all of them.
    ///
    /// Otherwise O(1), without a wait. Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// Where a whole batch waits already, as its commit failed, this commits it first. The descriptor is then the first of
    /// the next batch, and the commit of that tells of both: until then all of them are [waiting](Self::waiting).
    ///
    /// # Errors
    /// [`RingUnmapFailed`]: what was not confirmed goes on waiting. The descriptor comes back as it
    /// was in two cases: it is another ring's; or a whole batch waits already, because its commit
    /// failed, and has now failed once more.
    #[inline(always)]
    pub fn unmap(&mut self, mapping: RingMapping) -> Result<RingUnmap, RingUnmapFailed> {
        // Word by word, as in `map_sg`.
        let RingMapping { first, bytes, neighbours, ring } = mapping;
        let range = RingMapping { first, bytes, neighbours, ring }.range(self.device.domain().granule());
        if let Some(range) = range
            && ring == self.number
            && self.unmapped + 1 < self.batch
        {
            self.wait_for_batch(range, neighbours);
            return Ok(RingUnmap::Waiting);
        }
        self.unmap_last(first, bytes, neighbours, ring)
    }

    /// Has `range` wait for its batch.
    #[inline(never)]
    pub(super) fn wait_for_batch(&mut self, range: IovaRange, neighbours: u64) {
        match self.waiting.last_mut().and_then(|run| Some((run.joined(range)?, run))) {
            Some((joined, run)) => *run = joined,
            None => self.waiting.push(range),
        }
        self.closing += neighbours;
        self.unmapped += 1;
    }

    /// Ends a descriptor that may be the last of its batch, or that may not be of this ring.
    #[inline(never)]
    fn unmap_last(
        &mut self,
        first: Iova,
        bytes: u64,
        neighbours: u64,
        ring: u64,
    ) -> Result<RingUnmap, RingUnmapFailed> {
        let mapping = RingMapping { first, bytes, neighbours, ring };
        let granule = self.device.domain().granule();
        match (mapping.range(granule), &self.arena) {
            (Some(range), Some(_)) if mapping.ring == self.number => {
                if self.unmapped >= self.batch
                    && let Err(error) = self.commit_before(range)
                {
                    return Err(RingUnmapFailed { mapping: Some(mapping), error });
                }
                self.wait_for_batch(range, neighbours);
            }
            (None, None) => self.unmapped += 1,
            (range, _) => {
                let range = range.ok_or(RingError::Untranslated);
                let error = range.map_or_else(|error| error, |range| RingError::Foreign { range });
                return Err(RingUnmapFailed { mapping: Some(mapping), error });
            }
        }
        if self.unmapped < self.batch {
            return Ok(RingUnmap::Waiting);
        }
        match self.commit() {
            Ok(_) => Ok(RingUnmap::Committed),
            Err(error) => Err(RingUnmapFailed { mapping: None, error }),
        }
    }

    /// Counts a map of `range`. The domain is told with the next commit, or when there are as many as a batch.
    #[inline]
    fn count(&mut self, range: IovaRange, neighbours: u64) {
        let torn = Torn { waiting: &mut self.waiting, range };
        self.tally.maps += 1;
        if neighbours > 0 {
            if self.tally.opened == 0 {
                self.tally.since_ns = self.device.domain().now_ns();
            }
            self.tally.opened += neighbours;
        }
        if self.tally.maps >= self.batch as u64 {
            self.device.domain().settle(core::mem::take(&mut self.tally));
        }
        torn.done();
    }

    /// How many descriptors are unmapped and wait for a commit. Those that one has ended which could not say so
    /// (see [`unmap`](Self::unmap)) are among them.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.unmapped + self.told.untold()
    }

    /// The number by which its descriptors are told from another ring's.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The device that the ring is for.
    pub fn device(&self) -> &DmaDevice<M, P> {
        &self.device
    }

    /// The addresses that the ring has; `None` where nothing is translated.
    pub fn arena(&self) -> Option<&RingArena> {
        self.arena.as_ref()
    }

    /// Commits, and gives the addresses back to the domain. All descriptors must be unmapped.
    ///
    /// # Errors
    /// [`RingError::Unconfirmed`] or [`RingError::StillMapped`] of the commit, or
    /// [`RingError::Arena`] with [`ArenaError::InUse`] while descriptors are mapped. The ring comes
    /// back with the error, and can be used as before.
    #[allow(clippy::result_large_err, reason = "the ring comes back in place, once in its life")]
    pub fn close(mut self) -> Result<(), (Self, RingError)> {
        if let Err(error) = self.commit() {
            return Err((self, error));
        }
        match self.arena.take().map(|arena| self.device.domain().release_ring(arena)) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(failed)) => {
                self.arena = Some(failed.arena);
                Err((self, failed.error.into()))
            }
        }
    }
}

/// Commits. Descriptors that are still mapped stay so. If there are any, or if the hardware does
/// not confirm, the ring's addresses are given up for good.
impl<M: Mapper, P: Platform> Drop for StrictRing<M, P> {
    fn drop(&mut self) {
        let device = self.device.clone();
        let changing = self.arena.as_ref().map(|arena| device.domain().changing(arena.range()));
        let ended = self.commit();
        let Some((arena, changing)) = self.arena.take().zip(changing) else { return };
        if ended.is_err() {
            device.domain().settle(core::mem::take(&mut self.tally));
            // What was opened stays so, until a flush is confirmed, and its addresses are not used again. Less may be mapped than
            // is reserved: this counts all that may be.
            let bytes = arena.in_use();
            drop(changing);
            return device.domain().leave_open(bytes);
        }
        let bytes = changing.done().len();
        if device.domain().release_ring(arena).is_err() {
            device.domain().lose(bytes);
        }
    }
}

/// A reservation at which a map or its accounting is under way. Dropping it, where a call below
/// panics and it is not known what is mapped there, has the next commit clear and release it.
struct Torn<'a> {
    waiting: &'a mut Vec<IovaRange>,
    range: IovaRange,
}

impl Torn<'_> {
    #[inline]
    fn done(self) {
        core::mem::forget(self);
    }
}

impl Drop for Torn<'_> {
    #[cold]
    fn drop(&mut self) {
        hold(self.waiting, self.range);
    }
}

/// Has `range` wait for the next commit, beside a batch. Where there is no memory for that, it stays reserved, and as it is: nothing
/// is known of it but that a call has panicked.
#[cold]
pub(super) fn hold(waiting: &mut Vec<IovaRange>, range: IovaRange) {
    // Whatever the ring's batch has, it has room as before.
    if waiting.try_reserve(MOST_IN_BATCH + 2).is_ok() {
        waiting.push(range);
    }
}

impl RingError {
    /// Returns whether the ring is full: a [`commit`](StrictRing::commit) makes room, if
    /// descriptors wait for one.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Arena(ArenaError::Full { .. }))
    }
}
