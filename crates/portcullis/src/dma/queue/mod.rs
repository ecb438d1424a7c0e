//! The front door: a driver's queue, with the same calls for every protection. A mapping's buffer comes back only when the policy in force allows it,
//! and is leaked if that is unknown.

mod cleaned;
mod config;
mod door;
mod ended;
mod error;
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

use self::lane::{AnyLane, Common, Direct, Lane, by_lane};
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
    lane: AnyLane<X>,
    common: Common<X>,
    /// Buffers that wait: dropped only after a commit, so that a panic below leaks what a device may reach.
    buffers: ManuallyDrop<Vec<B>>,
    /// Memory for lists of segments that the caller did not ask for.
    scratch: Vec<DmaSegment>,
    /// Calls through `&Queue` come from one CPU at a time.
    not_sync: PhantomData<Cell<()>>,
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
        by_lane!(&self.lane, lane => lane.waiting_for(&self.common)) + self.common.owed
    }

    /// The choices of [`QueueConfig::auto`] for each size, and their reasons; nothing for other strategies.
    pub fn explain(&self) -> impl Iterator<Item = super::Explained> {
        let ring = if let AnyLane::Auto(ring) = &self.lane { Some(ring.explain()) } else { None };
        ring.into_iter().flatten()
    }
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
