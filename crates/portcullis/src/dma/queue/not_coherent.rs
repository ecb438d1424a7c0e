//! Queues of non-coherent devices, whose reads do not see the CPUs' caches, and whose writes leave stale lines there. All cache maintenance is here,
//! except that of the bounce buffers behind an IOMMU (`cleaned`).
//!
//! The lane contains one or two ordinary queues: one that maps, one that copies. Around their calls,
//!
//! - mapped memory is **cleaned before** its translation is entered. A device that reads then finds the CPU's data, and never an earlier owner's. A
//!   device that writes has no dirty line written back over its data.
//! - memory that a device may have written is **invalidated after** its last possible write, and before its owner has it back: a CPU may have
//!   prefetched any line since the map. A mapping in a batch ends with the batch's confirmed commit, not with its unmap; so the list of waiting
//!   mappings is kept here. Under a lazy policy, an unmap makes visible what the device wrote before the driver learnt of its completion. Of later
//!   writes, within the window, each line may be seen or lost; a user of a lazy policy accepts that.
//! - nothing else has bytes in an invalidated line. A piece that a device may write is mapped only if it consists of whole lines; else it
//!   is copied, or refused.
//!
//! This costs a step for each line at the map and, for data from the device, another at the end; and a record of each mapping.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::lane::{Common, Lane, Unmapped};
use super::{AnyQueue, DmaMapError, DmaUnmapError, Machine, Strategy};
use crate::addr::{Direction, DmaSegment, PhysAddr, PhysSegment};
use crate::bounce::pool::Toward;
use crate::broken::broken;
use crate::dma::mapping::Kind;
use crate::dma::slab::Slab;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::MapListError;
use crate::platform::CacheMaintenance;
use crate::sync::{Ordering, fence};

pub(super) type Inner = Box<dyn AnyQueue + Send>;

pub(super) struct Copying {
    pub(super) queue: Inner,
    /// Buffers of up to this length are copied; longer ones are mapped if their ends allow it.
    pub(super) up_to: u64,
    /// The most bytes that are copied if the other queue is full.
    pub(super) most: u64,
    /// The swiotlb's slot size, as this lane cleans and invalidates its slots; 0 for a pool, which does that itself (`Cleaned`).
    pub(super) slot: u64,
    /// Offset masks, for a device that reads and for one that writes, of a granule, a line or a byte: a piece that begins or ends inside such a unit is
    /// copied.
    pub(super) units: [u64; 2],
}

pub(super) struct NotCoherent {
    pub(super) strategy: Strategy,
    pub(super) cache: Arc<dyn CacheMaintenance>,
    pub(super) line: u64,
    pub(super) mapped: Option<Inner>,
    pub(super) copies: Option<Copying>,
    made: Slab<Made>,
    /// Indices of mappings whose buffers come back with a commit.
    waiting: Vec<usize>,
}

#[derive(Default)]
struct Made {
    token: Option<RawMapping>,
    copied: bool,
    writes: bool,
    /// The memory that this lane maintains.
    memory: Vec<PhysSegment>,
    view: Vec<DmaSegment>,
}

impl NotCoherent {
    pub(super) fn new(
        strategy: Strategy,
        (cache, line): (Arc<dyn CacheMaintenance>, u64),
        mapped: Option<Inner>,
        copies: Option<Copying>,
    ) -> Self {
        Self { strategy, cache, line, mapped, copies, made: Slab::default(), waiting: Vec::new() }
    }

    fn is_mapped(&self, list: &[PhysSegment], len: u64, writes: bool) -> Result<bool, DmaMapError> {
        let whole = |unit: u64| list.iter().all(|piece| (piece.phys.get() | piece.len) & unit == 0);
        let line = self.line;
        match (&self.mapped, &self.copies) {
            (Some(_), Some(copies)) => Ok(len > copies.up_to && whole(copies.units[usize::from(writes)])),
            (None, _) => Ok(false),
            (Some(_), None) if writes && !whole(line - 1) => Err(DmaMapError::SharesLine { line }),
            (Some(_), None) => Ok(true),
        }
    }

    /// Returns the index of a free record, emptied, with room for `len` pieces. Also makes the room that the unmap needs, as it allocates nothing. The
    /// record stays free until the caller takes it.
    fn place_for(&mut self, len: usize) -> Result<usize, DmaMapError> {
        let no_memory = |_| DmaMapError::OutOfMemory;
        let index = self.made.vacant().ok_or(DmaMapError::OutOfMemory)?;
        let records = &mut self.made.records;
        self.waiting.try_reserve(records.len() - self.waiting.len()).map_err(no_memory)?;
        let Made { memory, view, .. } = &mut records[index];
        memory.clear();
        view.clear();
        memory.try_reserve(len).map_err(no_memory)?;
        view.try_reserve(len).map_err(no_memory)?;
        Ok(index)
    }

    /// Commits both queues, then ends all waiting mappings. Returns their number.
    #[inline(never)]
    fn commit_all(&mut self) -> Result<usize, DmaUnmapError> {
        let queues = self.mapped.iter_mut().chain(self.copies.iter_mut().map(|copies| &mut copies.queue));
        for queue in queues {
            queue.commit_raw()?;
        }
        let count = self.waiting.len();
        while let Some(index) = self.waiting.last().copied() {
            // If this panics, the mapping waits for the next commit.
            self.end(index);
            self.waiting.pop();
        }
        Ok(count)
    }

    /// Ends a mapping that no device reaches.
    fn end(&mut self, index: usize) {
        if !self.made.records[index].copied {
            self.invalidate(index);
        }
        self.made.free(index);
    }

    fn invalidate(&self, index: usize) {
        self.invalidate_part(index, 0, u64::MAX);
    }

    fn invalidate_part(&self, index: usize, offset: u64, len: u64) {
        let made = &self.made.records[index];
        if !made.writes {
            return;
        }
        // The driver has loaded the device's completion, or a commit the IOMMU's: the invalidation comes after that load.
        fence(Ordering::Acquire);
        // SAFETY: `invalidate`'s contract: it is memory, by `map_raw`'s clause 4. Its lines are only the mapping's, as `is_mapped` checked, or whole
        // slots; they were cleaned by the map or by a sync, and later stores of a CPU may be lost.
        part(&made.memory, offset, len, |piece| unsafe { self.cache.invalidate(piece.phys, piece.len) });
    }
}

impl<X: Machine> Lane<X> for NotCoherent {
    // Out of line, like the other calls here, so that the calls of other lanes need no stack for this one.
    #[inline(never)]
    unsafe fn map_for(
        &mut self,
        common: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        let mut len: u64 = 0;
        for (index, piece) in list.iter().enumerate() {
            MapListError::check(*piece, index)?;
            len = len.saturating_add(piece.len);
        }
        let (index, writes) = (self.place_for(list.len())?, direction != Direction::ToDevice);
        let mut copied = !self.is_mapped(list, len, writes)?;
        let mut mapped = None;
        if !copied && let Some(queue) = &mut self.mapped {
            // SAFETY: `clean`'s contract is the caller's clause 4.
            each(list, |piece| unsafe { self.cache.clean(piece.phys, piece.len) });
            // SAFETY: clauses 1 to 3 are the caller's.
            match unsafe { queue.map_raw(list, direction, out) } {
                // No room in the ring, or no table: copy it.
                Err(DmaMapError::Full | DmaMapError::List(MapListError::Map(_)))
                    if self.copies.as_ref().is_some_and(|copies| len <= copies.most) =>
                {
                    copied = true;
                }
                result => mapped = Some(result?),
            }
        }
        let mut slot = 0;
        if copied && let Some(copies) = &mut self.copies {
            slot = copies.slot;
            // SAFETY: clauses 1 to 3 are the caller's.
            mapped = Some(unsafe { copies.queue.map_raw(list, direction, out) }?);
        }
        let Some((token, used)) = mapped else { broken("a queue maps or copies") };
        let made = &mut self.made.records[index];
        // `place_for` made room.
        made.view.extend_from_slice(&out[..used]);
        if slot > 0 {
            made.memory.extend(made.view.iter().map(in_memory));
            // The driver gives the device the addresses after this. Cleans whole slots, as the pool zeroed the rest of them.
            // SAFETY: `clean`'s contract: slots are memory of the pool.
            each(&made.memory, |PhysSegment { phys, len }| unsafe {
                let skip = phys.get() & (slot - 1);
                self.cache.clean(PhysAddr::new(phys.get() - skip), (skip + len).next_multiple_of(slot));
            });
        } else if !copied {
            made.memory.extend_from_slice(list);
        }
        let iova = token.iova();
        *made = Made { token: Some(token), copied, writes, ..core::mem::take(made) };
        self.made.take();
        Ok((used, RawMapping { iova, word: index as u64, tag: common.number | Kind::NotCoherent.bits() }))
    }

    #[inline(never)]
    unsafe fn unmap_for(&mut self, _: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        let index = mapping.word as usize;
        let Some(token) = self.made.records[index].token.take() else { broken("a token is unmapped once") };
        if self.made.records[index].copied {
            // The call below reads the copy, so invalidate first; the driver knows that the device is done.
            self.invalidate(index);
        }
        let copies = self.copies.as_mut().map(|copies| &mut copies.queue);
        match either(self.made.records[index].copied, copies, self.mapped.as_mut()).unmap_raw(token) {
            Ok(Ended::Done(())) => {
                self.end(index);
                Ok(Ended::Done(()))
            }
            Ok(Ended::Pending) => {
                self.waiting.push(index);
                Ok(Ended::Pending)
            }
            Ok(Ended::Flushed(())) => {
                self.waiting.push(index);
                let lost = |error| NotUnmapped { mapping: None, waits: true, error };
                self.commit_all().map(|_| Ended::Flushed(())).map_err(lost)
            }
            Err(NotUnmapped { mapping: token, waits, error }) => {
                let back = token.is_some();
                self.made.records[index].token = token;
                match (back, waits) {
                    (true, _) => {}
                    (false, true) => self.waiting.push(index),
                    // The owner never uses its memory again.
                    (false, false) => self.made.free(index),
                }
                Err(NotUnmapped { mapping: back.then_some(mapping), waits, error })
            }
        }
    }

    #[inline(never)]
    unsafe fn sync_for(
        &self,
        _: &Common<X>,
        mapping: &RawMapping,
        into: Toward,
        (offset, len): (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        let index = mapping.word as usize;
        if into == Toward::Original {
            self.invalidate_part(index, offset, len);
        }
        let Made { token: Some(token), copied, .. } = &self.made.records[index] else {
            broken("a token is synced while it is mapped")
        };
        let copies = self.copies.as_ref().map(|copies| &copies.queue);
        let queue = either(*copied, copies, self.mapped.as_ref());
        match into {
            Toward::Original => queue.sync_raw_for_cpu(token, offset, len),
            Toward::Buffer => {
                queue.sync_raw_for_device(token, offset, len)?;
                let Self { made, cache, .. } = self;
                // Also for a device that only writes, so that no dirty line is left.
                // SAFETY: `clean`'s contract is `map_raw`'s clause 4, of the mapping's caller.
                part(&made.records[index].memory, offset, len, |piece| unsafe {
                    cache.clean(piece.phys, piece.len)
                });
                Ok(())
            }
        }
    }

    fn segments_for(&self, _: &Common<X>, mapping: &RawMapping) -> Option<&[DmaSegment]> {
        Some(&self.made.records[mapping.word as usize].view)
    }

    fn commit_for(&mut self, _: &Common<X>) -> Result<usize, DmaUnmapError> {
        self.commit_all()
    }

    fn waiting_for(&self, _: &Common<X>) -> usize {
        self.waiting.len()
    }
}

fn either<Q>(copied: bool, copies: Option<Q>, mapped: Option<Q>) -> Q {
    let queue = if copied { copies } else { mapped };
    queue.unwrap_or_else(|| broken("a mapping is of a queue"))
}

fn in_memory(segment: &DmaSegment) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(segment.iova.get()), len: segment.len }
}

fn each(list: &[PhysSegment], f: impl FnMut(PhysSegment)) {
    list.iter().copied().for_each(f);
}

fn part(list: &[PhysSegment], offset: u64, len: u64, mut f: impl FnMut(PhysSegment)) {
    let (mut skip, mut left) = (offset, len);
    for piece in list {
        let behind = skip.min(piece.len);
        let len = (piece.len - behind).min(left);
        if len > 0 {
            // Does not overflow: the piece has these bytes.
            f(PhysSegment { phys: PhysAddr::new(piece.phys.get() + behind), len });
        }
        (skip, left) = (skip - behind, left - len);
    }
}
