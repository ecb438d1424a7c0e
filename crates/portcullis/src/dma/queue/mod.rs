//! The front door: a driver's queue, with the same calls for every protection. A mapping's buffer comes back only when the policy in force allows it,
//! and is leaked if that is unknown.

mod cleaned;
mod config;
mod door;
mod ended;
mod error;
mod not_coherent;
mod object;
mod swiotlb;
mod typed;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::convert::Infallible;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

use self::not_coherent::NotCoherent;
use self::swiotlb::{Copied, Copies, Side};
use super::Machine;
use super::machine::{AdaptiveOf, BatchOf, CopyingOf, DeviceOf, RingOf};
use super::mapping::{Kind, number};
use super::{DmaBuffer, RawMapping};
use crate::addr::{Direction, DmaSegment, IovaRange, PhysSegment};
use crate::bounce::pool::{Attributes, PoolMapping};
use crate::domain::MapListError;
use crate::heap::{OutOfMemory, room_for};

pub use crate::bounce::error::{DmaMapError, DmaUnmapError};
pub use config::QueueConfig;
#[cfg(feature = "parts")]
pub use config::Strategy;
#[cfg(not(feature = "parts"))]
use config::Strategy;
pub use door::{Device, DmaDomain, DmaMask, DomainBuilder};
pub use error::{NotAllUnmapped, NotMapped};
pub use object::AnyQueue;

/// A queue of a device: it maps buffers for the device, and gives them back.
///
/// [`QueueConfig`] chooses how. The calls are always these: [`map`](Self::map) takes a buffer and gives a [`Mapping`](super::Mapping) that owns
/// it; [`unmap`](Self::unmap) takes the mapping, and gives buffers back, this one now or later; [`commit`](Self::commit), for a queue that falls
/// idle, gives back all waiting ones. A buffer is given back only when no device reaches it. The exception is a lazy policy: mapped buffers of
/// [`direct`](QueueConfig::direct) and [`bounce`](QueueConfig::bounce) come back at once, and devices may reach them until the flush that
/// covers them.
///
/// [`map_raw`](Self::map_raw) and [`unmap_raw`](Self::unmap_raw) do the same by number, for kernels that keep track of their buffers themselves:
/// `Queue<X>`, without a type of buffers, has only these. Both kinds of unmaps wait for the same commits.
///
/// | strategy | the device loses its access to | hardware waits |
/// |---|---|---|
/// | [`direct`](QueueConfig::direct) | each mapping, when its unmap returns, by the device's policy | one per mapping, by a strict policy |
/// | [`batched`](QueueConfig::batched), [`ring`](QueueConfig::ring) | the batch, when it is complete or committed | one per batch |
/// | [`bounce`](QueueConfig::bounce) | a buffer that is too large to copy and therefore mapped, by the device's policy; to a copied buffer it never had any | none for a copy through a buffer that stays mapped; else one, except for a mapped buffer under a lazy policy |
/// | [`auto`](QueueConfig::auto) | a copied mapping, at once; a mapped one, with its batch | none; one per batch |
///
/// A mapping that does not fit into a ring at all is mapped and ended directly, strictly.
///
/// A queue belongs to one CPU at a time: it may be moved to another thread, and is not `Sync`. CPUs that drive one device have a queue
/// each, and share nothing that they must manage:
///
/// ```
/// # #[cfg(feature = "std")]
/// fn each_cpu<X, B>(nic: &portcullis::dma::Device<X>, buffers: Vec<B>) -> Result<(), portcullis::SetupError>
/// where
///     X: portcullis::dma::Machine,
///     B: portcullis::dma::DmaBuffer + Send,
/// {
///     use portcullis::prelude::*;
///
///     std::thread::scope(|cpus| {
///         for buffer in buffers {
///             let mut queue = nic.queue(QueueConfig::batched(64))?;
///             cpus.spawn(move || {
///                 let Ok(mapping) = queue.map(buffer, Direction::ToDevice) else { return };
///                 // .. the device reads it ..
///                 let _ = queue.unmap(mapping);
///             });
///         }
///         Ok(())
///     })
/// }
/// ```
///
/// Dropping a queue commits it. Unconfirmed buffers are then leaked rather than freed, and their addresses are held until a later flush of
/// the domain. Open mappings stay mapped. If something below panics in a map or an unmap, that buffer is leaked.
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # use portcullis::addr::{DeviceId, DomainId, Direction::FromDevice};
/// # use portcullis::dma::{DmaMask, Ended, QueueConfig};
/// # use portcullis::domain::{Domain, Policy};
/// # use portcullis::pgtable::{PageTable, VtdSecondStage};
/// # use portcullis::std_platform::StdPlatform;
/// # use portcullis_model::{Context, Iommu, IommuConfig, Memory};
/// # let memory = Memory::new(16 << 20);
/// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
/// # let platform = StdPlatform::new();
/// # let format = VtdSecondStage::four_level();
/// # let table = PageTable::new(Arc::clone(&memory), format)?;
/// # let (id, card) = (DomainId(1), portcullis_model::DeviceId(0));
/// # iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
/// # let domain = Domain::builder(table, iommu.queue(), id).policy(Policy::Strict).build(platform)?;
/// # let nic = domain.attach(DeviceId(0), DmaMask::BITS_64)?;
/// # let mut buffers = (0..2).map(|_| memory.buffer(2048).ok_or("no memory"));
/// // Two buffers become unreachable together.
/// let mut rx = nic.queue(QueueConfig::ring(512, 4096).batch(2))?;
/// let first = rx.map(buffers.next().unwrap()?, FromDevice)?;
/// let second = rx.map(buffers.next().unwrap()?, FromDevice)?;
/// let late = first.iova();
/// iommu.dma_write(card, late, b"a packet")?;
/// assert!(matches!(rx.unmap(first)?, Ended::Pending));
/// let Ended::Flushed(both) = rx.unmap(second)? else { panic!("two are a batch") };
/// assert_eq!(both.len(), 2);
/// assert!(iommu.dma_write(card, late, b"too late").is_err());
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
pub struct Queue<X: Machine, B: DmaBuffer = Infallible> {
    lane: Lane<X>,
    device: DeviceOf<X>,
    attributes: Attributes,
    /// Tells its mappings from another queue's; the number of the ring, if it has one.
    number: u64,
    /// Single unmaps that were not confirmed, and wait for a flush of the domain.
    owed: usize,
    /// Buffers that wait: dropped only after a commit, so that a panic below leaks what a device may reach.
    buffers: ManuallyDrop<Vec<B>>,
    /// Memory for lists of segments that the caller did not ask for.
    scratch: Vec<DmaSegment>,
    /// Calls through `&Queue` come from one CPU at a time.
    not_sync: PhantomData<Cell<()>>,
}

// One byte tells them apart, as every call does that.
#[repr(u8)]
enum Lane<X: Machine> {
    Direct,
    Batch(BatchOf<X>),
    Ring(RingOf<X>),
    Bounce(CopyingOf<X>),
    Auto(Box<AdaptiveOf<X>>),
    Swiotlb(Box<Copies<X>>),
    NotCoherent(Box<NotCoherent>),
}

impl<X: Machine> Lane<X> {
    fn strategy(&self) -> Strategy {
        match self {
            Self::Direct => Strategy::Direct,
            Self::Batch(_) => Strategy::Batch,
            Self::Ring(_) => Strategy::Ring,
            Self::Bounce(_) | Self::Swiotlb(_) => Strategy::Bounce,
            Self::Auto(_) => Strategy::Auto,
            Self::NotCoherent(lane) => lane.strategy,
        }
    }
}

/// Shows the queue's strategy: the configured one, except [`QueueConfig::auto`] where there is no choice.
impl<X: Machine, B: DmaBuffer> fmt::Debug for Queue<X, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("strategy", &self.lane.strategy())
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    fn new(device: DeviceOf<X>, lane: Lane<X>, config: &QueueConfig) -> Result<Self, OutOfMemory> {
        let room = match lane {
            Lane::Batch(_) | Lane::Ring(_) | Lane::Auto(_) | Lane::NotCoherent(_) => config.batch_size(),
            Lane::Direct | Lane::Bounce(_) | Lane::Swiotlb(_) => 0,
        };
        let number = match &lane {
            Lane::Ring(ring) => ring.number(),
            Lane::Auto(ring) => ring.number(),
            _ => number(),
        };
        Ok(Self {
            lane,
            device,
            attributes: config.attributes,
            number,
            owed: 0,
            buffers: ManuallyDrop::new(room_for(room)?),
            scratch: Vec::new(),
            not_sync: PhantomData,
        })
    }

    /// The queue's strategy: the configured one, except [`QueueConfig::auto`] where there is no choice.
    #[cfg(feature = "parts")]
    pub fn strategy(&self) -> Strategy {
        self.lane.strategy()
    }

    /// The number of mappings that were unmapped, and whose buffers have not come back: the next [commit](Self::commit) gives back all of
    /// them, and until then the device may reach them. After a commit that failed, an unmap that finds its batch full commits again; its result
    /// has no place for the earlier buffers, so they count here until the next [`Ended::Flushed`](super::Ended::Flushed) or commit has them.
    #[inline]
    pub fn waiting(&self) -> usize {
        let waiting = match &self.lane {
            Lane::Batch(batch) => batch.len(),
            Lane::Ring(ring) => ring.waiting(),
            Lane::Auto(ring) => ring.waiting(),
            Lane::NotCoherent(lane) => lane.waiting(),
            Lane::Direct | Lane::Bounce(_) | Lane::Swiotlb(_) => 0,
        };
        waiting + self.owed
    }

    /// The choices of [`QueueConfig::auto`] for each size, and their reasons; nothing for other strategies.
    pub fn explain(&self) -> impl Iterator<Item = super::Explained> {
        let ring = if let Lane::Auto(ring) = &self.lane { Some(ring.explain()) } else { None };
        ring.into_iter().flatten()
    }

    /// Lets the device reach the bytes of `list`, or a copy of them, and writes the device's segments to `out`: touching ones are merged.
    /// Returns their number, at most `list.len()`; `out` must have room for that many.
    ///
    /// Cost and context as for the strategy's part: [`DmaDevice::map_sg`](super::DmaDevice::map_sg), and with the feature `parts`
    /// `StrictRing::map_sg`, `BounceDevice::map`, `Swiotlb::map`. For a [non-coherent](Device::not_coherent) device a map allocates notes
    /// of the list, unless an earlier one left them, and a map and an unmap take a step for each cache line; a commit, and the unmap that
    /// completes a batch, a step for each line of all that waited.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all.
    ///
    /// # Safety
    /// The mapping *lasts* until one of these has ended it:
    ///
    /// - an [unmap](Self::unmap_raw) that returns [`Ended::Flushed`](super::Ended::Flushed) or [`Ended::Done`](super::Ended::Done), under a lazy
    ///   policy together with the flush that this owes;
    /// - after [`Ended::Pending`](super::Ended::Pending), and after an error that [waits](super::NotUnmapped::waits): the next
    ///   [`Ended::Flushed`](super::Ended::Flushed), or the next successful [`commit`](Self::commit);
    /// - after [`MapListError::Unconfirmed`]: a successful [flush](crate::domain::Domain::flush) of the domain.
    ///
    /// From the call on and as long as the mapping lasts:
    ///
    /// 1. The memory is the caller's to open to the device, as for [`Domain::map`](crate::domain::Domain::map), clauses 1 and 2.
    /// 2. If the queue copies, all bytes of `list` are memory that the CPU reaches through the domain's [memory](Machine::Memory), and only
    ///    devices and atomic accesses touch them while a call to this queue copies: this, the mapping's syncs and its unmap.
    /// 3. Only this queue ends the mapping.
    /// 4. For a [non-coherent](Device::not_coherent) device, all bytes of `list` are memory that CPUs reach. (A CPU's stores to memory that
    ///    such a device writes, between the map and the mapping's end, are lost, unless a sync gives them to the device.)
    #[inline(always)]
    pub unsafe fn map_raw(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        if let ([segment], [place, ..]) = (list, &mut *out)
            // SAFETY: clauses 1 to 4 are the caller's.
            && let Some(mapping) = unsafe { self.map_fast(*segment, direction) }
        {
            *place = DmaSegment { iova: mapping.iova, len: segment.len };
            return Ok((mapping, 1));
        }
        if let ([segment], [place, ..], Lane::Auto(lane)) = (list, &mut *out, &mut self.lane)
            && !self.attributes.persistent_streaming
            // SAFETY: clauses 1 to 4 are the caller's.
            && let Some(range) = unsafe { lane.map_fast(*segment, direction) }
        {
            let first = self.device.first_of(*segment, range);
            *place = DmaSegment { iova: first, len: segment.len };
            return Ok((RawMapping::in_pages(first, range, segment.len, self.number | Kind::RING), 1));
        }
        // SAFETY: clauses 1 to 4 are the caller's.
        match unsafe { self.map_otherwise(list, direction, out) } {
            // Word by word: where both paths meet the words are in registers, not in memory that a call was given.
            Ok((used, RawMapping { iova, word, tag })) => Ok((RawMapping { iova, word, tag }, used)),
            Err(error) => Err(error),
        }
    }

    /// The fast path: maps one segment. Otherwise returns `None`, with nothing changed.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(always)]
    unsafe fn map_fast(&mut self, segment: PhysSegment, direction: Direction) -> Option<RawMapping> {
        let alone = self.number | Kind::ALONE;
        match &mut self.lane {
            Lane::Ring(ring) => {
                // SAFETY: clauses 1 and 3 are the caller's.
                let range = unsafe { ring.map_fast(segment, direction) };
                range.map(|range| ring.mapped_fast(segment, range))
            }
            Lane::Direct | Lane::Batch(_) => match self.device.passed_through(segment) {
                Some(first) => Some(RawMapping::untranslated(first, alone)),
                None => {
                    // SAFETY: `Domain::map`'s clauses are the caller's clause 1.
                    let range = unsafe { self.device.map_fast(segment, direction) };
                    let first = |range| self.device.first_of(segment, range);
                    range.map(|range| RawMapping::in_pages(first(range), range, segment.len, alone))
                }
            },
            _ => None,
        }
    }

    /// The slow path of [`map_raw`](Self::map_raw).
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    unsafe fn map_otherwise(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        let queue = self.number;
        match &mut self.lane {
            Lane::Bounce(device) => {
                let (needed, room) = (list.len(), out.len());
                if room < needed {
                    return Err(MapListError::NoRoom { needed, room }.into());
                }
                // SAFETY: the pool's clauses: 1 and 3 are the caller's clause 2, and 2 is clause 1.
                let mapping = unsafe { device.map(list, direction, self.attributes) }?;
                Ok(of_pool(&mapping, queue, out))
            }
            Lane::Auto(lane) => {
                if list.len() > 1 && !self.attributes.persistent_streaming {
                    // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                    if let Some((mapping, used)) = unsafe { lane.map_in_ring(list, direction, out) }? {
                        return Ok((used, mapping));
                    }
                }
                if out.len() >= list.len()
                    // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                    && let Some(copied) = unsafe { lane.copy_fast(list, direction, self.attributes) }
                {
                    return Ok(of_pool(&copied?, queue, out));
                }
                // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                let (mapping, used) = unsafe { lane.map_toward(list, direction, self.attributes, out) }?;
                Ok((used, mapping))
            }
            Lane::Swiotlb(copies) => {
                // SAFETY: the pool's clauses are the caller's clause 2.
                let (Copied { first, is_list, word }, used) = unsafe { copies.map(list, direction, out) }?;
                let tag = queue | Kind::Swiotlb { is_list }.bits();
                Ok((used, RawMapping { iova: first, word, tag }))
            }
            Lane::NotCoherent(lane) => {
                // SAFETY: clauses 1 to 4 are the caller's.
                let (used, first, index) = unsafe { lane.map(list, direction, out) }?;
                let tag = queue | Kind::NotCoherent.bits();
                Ok((used, RawMapping { iova: first, word: index as u64, tag }))
            }
            // SAFETY: clauses 1 and 3 are the caller's.
            Lane::Ring(ring) => match unsafe { ring.map_list_sg(list, direction, out) } {
                Ok((mapping, used)) => Ok((used, mapping)),
                // The list is longer than the ring, and never fits into it.
                Err(DmaMapError::TooLong { .. }) => {
                    // SAFETY: clauses 1 and 3 are the caller's.
                    Ok(unsafe { self.map_list_alone(list, direction, out) }?)
                }
                Err(error) => Err(error),
            },
            // SAFETY: clauses 1 and 3 are the caller's.
            Lane::Direct | Lane::Batch(_) => Ok(unsafe { self.map_list_alone(list, direction, out) }?),
        }
    }

    /// Maps a list directly.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    unsafe fn map_list_alone(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), MapListError> {
        // SAFETY: the domain's clauses are the caller's clauses 1 and 3.
        let mapped = unsafe { self.device.map_list_sg(list, direction, out, RawMapping::fits) };
        let ((first, range, beside, count), tag) = (mapped?, self.number | Kind::ALONE);
        let in_pages = |range: IovaRange| RawMapping::in_pages(first, range, range.len() - beside, tag);
        Ok((count, range.map_or(RawMapping::untranslated(first, tag), in_pages)))
    }

    /// Makes the device's writes of `len` bytes, from `offset` on, of an open mapping visible to the CPU: copies them, if there is a copy,
    /// and orders the CPU's later reads after that. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// A raw mapping does not know its length, so a part outside of it is an error only if there is a copy.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    pub fn sync_raw_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Side::Cpu, (offset, len))
    }

    /// Makes the CPU's writes of `len` bytes, from `offset` on, of an open mapping visible to the device: copies them, if there is a copy,
    /// and orders the CPU's later writes after that. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// A raw mapping does not know its length, so a part outside of it is an error only if there is a copy.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    pub fn sync_raw_for_device(
        &self,
        mapping: &RawMapping,
        offset: u64,
        len: u64,
    ) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Side::Device, (offset, len))
    }

    fn sync(&self, mapping: &RawMapping, side: Side, part: (u64, u64)) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number {
            return Err(DmaUnmapError::OtherQueue);
        }
        let ((offset, len), &RawMapping { iova, word, .. }) = (part, mapping);
        let pool = match (&self.lane, mapping.kind()) {
            (Lane::Bounce(device), Kind::Pool(_)) => device.pool(),
            (Lane::Auto(ring), _) => {
                return match side {
                    Side::Cpu => ring.sync_for_cpu(mapping, offset, len),
                    Side::Device => ring.sync_for_device(mapping, offset, len),
                };
            }
            (Lane::NotCoherent(lane), Kind::NotCoherent) => {
                return lane.sync(word as usize, side, part);
            }
            (Lane::Swiotlb(copies), Kind::Swiotlb { is_list }) => {
                let one = [DmaSegment { iova, len: word }];
                let pieces = if is_list { copies.list(word as usize) } else { &one[..] };
                // SAFETY: as for the pool below.
                return unsafe { copies.sync(pieces, side, part) };
            }
            _ => {
                match side {
                    Side::Cpu => self.device.sync_for_cpu(),
                    Side::Device => self.device.sync_for_device(),
                }
                return Ok(());
            }
        };
        // SAFETY: the pool's clause 1: the mapping is borrowed, so it does not end meanwhile, and a queue is not `Sync`, so no two of its syncs
        // meet. Clause 2 is `map_raw`'s clause 2, its maker's.
        unsafe {
            match side {
                Side::Cpu => pool.sync_for_cpu(iova, offset, len),
                Side::Device => pool.sync_for_device(iova, offset, len),
            }
        }
    }
}

/// Writes the device's segments of a pool's mapping, and returns their number, with the mapping of `queue`.
#[inline]
fn of_pool(mapping: &PoolMapping<'_>, queue: u64, out: &mut [DmaSegment]) -> (usize, RawMapping) {
    (mapping.write_segments(out), RawMapping::of_pool(mapping, queue))
}

/// Commits, and drops the buffers that wait; if the hardware does not confirm, they are leaked.
impl<X: Machine, B: DmaBuffer> Drop for Queue<X, B> {
    fn drop(&mut self) {
        if self.commit_raw().is_ok() {
            // SAFETY: `drop` runs once, and is their last use.
            unsafe { ManuallyDrop::drop(&mut self.buffers) };
        }
    }
}
