//! A driver's queue, with the same calls for every protection. A mapping's buffer comes back only after the mapping has ended by its policy. If the
//! queue ends before that is confirmed, the buffer is leaked.

mod cleaned;
mod config;
mod door;
mod ended;
mod lane;
mod lanes;
mod maps;
mod not_coherent;
mod object;
mod swiotlb;
mod syncs;
mod typed;

use alloc::vec::Vec;
use core::cell::Cell;
use core::convert::Infallible;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

use self::lane::{Common, Lane};
use self::lanes::{AnyLane, Direct, by_lane};
use super::DmaBuffer;
use super::Machine;
use super::machine::DeviceOf;
use super::mapping::number;
use crate::addr::DmaSegment;
use crate::heap::{OutOfMemory, room_for};

pub use crate::bounce::error::{DmaMapError, DmaUnmapError};
pub use config::QueueConfig;
#[cfg(feature = "parts")]
pub use config::Strategy;
#[cfg(not(feature = "parts"))]
use config::Strategy;
pub use door::{Device, DmaDomain, DmaMask, DomainBuilder};
pub use object::AnyQueue;

/// Maps a driver's buffers for a device, and gives them back.
///
/// [`QueueConfig`] chooses how. The calls are always these: [`map`](Self::map) takes a buffer and returns a [`Mapping`](super::Mapping) that owns it;
/// [`unmap`](Self::unmap) takes the mapping, and gives its buffer back, now or later; [`commit`](Self::commit), for a queue that falls idle, gives
/// back all waiting ones. A buffer is given back only when no device reaches it. The exception is a lazy policy: mapped buffers of
/// [`direct`](QueueConfig::direct) and [`bounce`](QueueConfig::bounce) come back from their unmap, and devices may reach them until the flush that
/// covers them.
///
/// [`map_raw`](Self::map_raw) and [`unmap_raw`](Self::unmap_raw) do this by address, for kernels that keep track of their buffers themselves:
/// `Queue<X>`, without a type of buffers, has only these. Both kinds of unmaps wait for the same commits.
///
/// | strategy | the device loses its access to | hardware waits |
/// |---|---|---|
/// | [`direct`](QueueConfig::direct) | each mapping, when its unmap returns, by the device's policy | one per mapping, by a strict policy |
/// | [`batched`](QueueConfig::batched), [`ring`](QueueConfig::ring) | the batch, when it is complete or committed | one per batch |
/// | [`bounce`](QueueConfig::bounce) | a buffer too large to copy: by the device's policy, as it is mapped; a copied buffer: it never had access | none for a copy through a buffer that stays mapped; else one, except for a mapped buffer under a lazy policy |
/// | [`auto`](QueueConfig::auto) | a copied mapping, at once; a mapped one, with its batch | a copy: as for `bounce`; a mapped one: one per batch, or one of its own if the ring has no room |
///
/// A mapping longer than the whole ring is mapped outside of it, and ends strictly, with a wait of its own.
///
/// A queue belongs to one CPU at a time: it may be moved to another thread, but is not `Sync`. Give each CPU that drives the device its own queue; they need no lock between
/// them:
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
/// Dropping a queue commits it. Unconfirmed buffers are then leaked, and their addresses held until a later flush of the domain. Open mappings stay
/// mapped. If a layer below panics in a map or an unmap, that buffer is leaked.
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
    lane: AnyLane<X>,
    common: Common<X>,
    /// Waiting ones: dropped only after a commit, so that a panic leaks what a device may reach.
    buffers: ManuallyDrop<Vec<B>>,
    scratch: Vec<DmaSegment>,
    /// Makes the queue `!Sync`: calls through `&Queue` come from one CPU at a time.
    not_sync: PhantomData<Cell<()>>,
}

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
    fn new(device: DeviceOf<X>, lane: AnyLane<X>, config: &QueueConfig) -> Result<Self, OutOfMemory> {
        let room = match lane {
            AnyLane::Batch(_) | AnyLane::Ring(_) | AnyLane::Auto(_) | AnyLane::NotCoherent(_) => {
                config.batch_size()
            }
            AnyLane::Direct(_) | AnyLane::Bounce(_) | AnyLane::Swiotlb(_) => 0,
        };
        let number = match &lane {
            AnyLane::Ring(ring) => ring.number(),
            AnyLane::Auto(ring) => ring.number(),
            _ => number(),
        };
        Ok(Self {
            lane,
            common: Common { device, attributes: config.attributes, number, owed: 0 },
            buffers: ManuallyDrop::new(room_for(room)?),
            scratch: Vec::new(),
            not_sync: PhantomData,
        })
    }

    /// The configured strategy; for [`QueueConfig::auto`] without bounce memory or translation, the one that replaces it.
    #[cfg(feature = "parts")]
    pub fn strategy(&self) -> Strategy {
        self.lane.strategy()
    }

    /// The unmapped mappings whose buffers have not come back: the next [commit](Self::commit) gives them back. Until then treat the device as able
    /// to reach them. After a failed commit, the next unmap commits again to make room. It cannot return the earlier buffers, so they count here
    /// until an [`Ended::Flushed`](super::Ended::Flushed) or a commit returns them.
    #[inline]
    pub fn waiting(&self) -> usize {
        by_lane!(&self.lane, lane => lane.waiting_for(&self.common)) + self.common.owed
    }

    /// The choices of [`QueueConfig::auto`] for each size, with their reasons; nothing for other strategies.
    #[cfg(feature = "parts")]
    pub fn explain(&self) -> impl Iterator<Item = super::Explained> {
        let ring = if let AnyLane::Auto(ring) = &self.lane { Some(ring.explain()) } else { None };
        ring.into_iter().flatten()
    }
}

impl<X: Machine, B: DmaBuffer> Drop for Queue<X, B> {
    fn drop(&mut self) {
        if self.commit_raw().is_ok() {
            // SAFETY: `drop` runs once, and is their last use.
            unsafe { ManuallyDrop::drop(&mut self.buffers) };
        }
    }
}
