//! What a queue is made for.

use crate::bounce::pool::Attributes;
use crate::dma::MOST_IN_BATCH;

/// How a queue lets its device reach buffers, and keeps it from them afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// [`QueueConfig::direct`].
    Direct,
    /// [`QueueConfig::batched`].
    Batch,
    /// [`QueueConfig::ring`].
    Ring,
    /// [`QueueConfig::bounce`].
    Bounce,
    /// [`QueueConfig::auto`].
    Auto,
}

/// What a [`Queue`](super::Queue) is made for. Another strategy is another constructor, and nothing else changes:
///
/// ```
/// # use portcullis::dma::QueueConfig;
/// let config = QueueConfig::direct();                      // each unmap waits, on a strict domain
/// let config = QueueConfig::batched(64);                   // 64 unmaps wait once
/// let config = QueueConfig::ring(512, 4096).batch(64);     // the same, for a ring of 512 descriptors of a page
/// let config = QueueConfig::bounce();                      // copied: nothing waits
/// let config = QueueConfig::auto(512, 4096).batch(64);     // copied or mapped, whatever is cheaper
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    pub(super) strategy: Strategy,
    pub(super) descriptors: u32,
    pub(super) bytes: u64,
    pub(super) batch: usize,
    pub(super) colour: Option<u32>,
    pub(super) attributes: Attributes,
    pub(super) direction: Option<crate::addr::Direction>,
}

/// Unmaps that end together unless the driver says otherwise.
const BATCH: usize = 32;

impl QueueConfig {
    const fn new(strategy: Strategy) -> Self {
        Self {
            strategy,
            descriptors: 0,
            bytes: 0,
            batch: BATCH,
            colour: None,
            attributes: Attributes { persistent_streaming: false, wipe: false, copy_in: false },
            direction: None,
        }
    }

    /// Each mapping by itself, by the policy of the device: Linux's `dma_map_single` and `dma_unmap_single`.
    pub const fn direct() -> Self {
        Self::new(Strategy::Direct)
    }

    /// As [`direct`](Self::direct), but a batch of mappings ends with one wait: 1 to [`MOST_IN_BATCH`].
    pub const fn batched(batch: usize) -> Self {
        Self::new(Strategy::Batch).batch(batch)
    }

    /// Out of a ring of addresses, a batch with one wait: for queues whose buffers come and go in order, up to `descriptors` of
    /// which the device has at once. Each usually touches pages of `bytes` bytes (4096 for a buffer within a page, 8192 for one that may lie across the end of one); others may be of any
    /// length.
    pub const fn ring(descriptors: u32, bytes: u64) -> Self {
        Self { descriptors, bytes, ..Self::new(Strategy::Ring) }
    }

    /// Through buffers that stay mapped, by copying: no wait, and protection to the byte. Without an IOMMU, through the pool
    /// that the device reaches (swiotlb).
    pub const fn bounce() -> Self {
        Self::new(Strategy::Bounce)
    }

    /// What is cheaper of [`ring`](Self::ring), whose dimensions it has, and [`bounce`](Self::bounce), as measured; what shares a
    /// page with other data is copied. Where the domain has no memory to copy through it is one,
    /// and [`direct`](Self::direct) where nothing is translated.
    pub const fn auto(descriptors: u32, bytes: u64) -> Self {
        Self { descriptors, bytes, ..Self::new(Strategy::Auto) }
    }

    /// How many mappings end with one wait, where they share one: 1 to [`MOST_IN_BATCH`], 32 unless it is said. More cost less
    /// each, and their buffers come back later.
    pub const fn batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// The colour of a ring, by which its first address is moved; the domain's next unless it is said. A
    /// driver with many domains behind one IOMMU numbers their rings here.
    pub const fn colour(self, colour: u32) -> Self {
        Self { colour: Some(colour), ..self }
    }

    /// Each copy is zeroed when its mapping ends.
    pub const fn wiping(self) -> Self {
        Self { attributes: Attributes { wipe: true, ..self.attributes }, ..self }
    }

    /// The device may write less than the whole of a [`FromDevice`](crate::addr::Direction::FromDevice) mapping, and the rest is
    /// to stay as it was: the original is copied in first.
    pub const fn copying_in(self) -> Self {
        Self { attributes: Attributes { copy_in: true, ..self.attributes }, ..self }
    }

    /// Mappings live long, and their owner does not call the sync methods (Linux's proposal calls it `PERSISTENT_STREAMING`): they
    /// are never copied, and an error ([`DmaMapError::PersistentPart`](super::DmaMapError::PersistentPart)) where only copying would
    /// protect.
    pub const fn persistent(self) -> Self {
        Self { attributes: Attributes { persistent_streaming: true, ..self.attributes }, ..self }
    }

    /// [`auto`](Self::auto) measures both ways for data of this direction when the queue is made, not for all three. (Others may
    /// be mapped, and are copied at first.)
    pub const fn measuring(self, direction: crate::addr::Direction) -> Self {
        Self { direction: Some(direction), ..self }
    }

    /// The batch, within its limits.
    pub(super) fn batch_size(&self) -> usize {
        self.batch.clamp(1, MOST_IN_BATCH)
    }
}
