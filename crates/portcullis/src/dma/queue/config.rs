//! Configuration of a queue.

use crate::bounce::pool::Attributes;
use crate::dma::MOST_IN_BATCH;
use crate::setup::SetupError;

/// How a queue maps buffers for its device and ends the mappings.
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

/// The configuration of a [`Queue`](super::Queue). Each strategy has a constructor, and nothing else of a driver changes with it.
/// [`Device::queue`](super::Device::queue) refuses numbers out of bounds, and [`batch`](Self::batch), [`colour`](Self::colour) or
/// [`measuring`](Self::measuring) for a strategy that does not use it. Any strategy takes [`copying_in`](Self::copying_in), which has no effect
/// without copies.
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
    batch: Option<usize>,
    pub(super) colour: Option<u32>,
    pub(super) attributes: Attributes,
    pub(super) direction: Option<crate::addr::Direction>,
}

impl QueueConfig {
    /// The default [`batch`](Self::batch) of [`ring`](Self::ring) and [`auto`](Self::auto). `portcullis replay` and `scale` use it for `strict-ring`.
    pub const RING_BATCH: usize = 64;

    /// A good batch for [`batched`](Self::batched), which `portcullis replay` and `scale` use for `strict-batch`.
    pub const BATCH: usize = 32;

    const fn new(strategy: Strategy) -> Self {
        Self {
            strategy,
            descriptors: 0,
            bytes: 0,
            batch: None,
            colour: None,
            attributes: Attributes { copy_in: false },
            direction: None,
        }
    }

    /// Each mapping on its own, by the policy of the device: Linux's `dma_map_single` and `dma_unmap_single`.
    pub const fn direct() -> Self {
        Self::new(Strategy::Direct)
    }

    /// As [`direct`](Self::direct), but `batch` mappings end together, strictly, with one wait, under every policy but passthrough.
    pub const fn batched(batch: usize) -> Self {
        Self::new(Strategy::Batch).batch(batch)
    }

    /// Mappings take their addresses from a ring, and a batch of them ends together, strictly, with one wait, under every policy but passthrough. For
    /// queues whose buffers come and go in order, with at most `descriptors` (at least 1) in the device at a time. A typical buffer touches pages of
    /// `bytes` bytes (4096 within a page, 8192 if it may cross a page's end); others may have any length. The ring has room for `descriptors` and a
    /// [batch](Self::batch), as an unmapped buffer keeps its place until the end of its batch.
    pub const fn ring(descriptors: u32, bytes: u64) -> Self {
        Self { descriptors, bytes, ..Self::new(Strategy::Ring) }
    }

    /// The device reaches copies, in buffers that stay mapped: a copy ends without a wait, and protects to the byte. Larger buffers are mapped, and
    /// end by the device's policy. But if the device is not [trusted](super::Device::trusted), the parts of such a buffer that share a page with
    /// other data are copied, and its mapping ends strictly, with a wait. Without an IOMMU everything is copied, through the machine's pool
    /// (swiotlb). For non-coherent devices see [`Device::not_coherent`](super::Device::not_coherent).
    pub const fn bounce() -> Self {
        Self::new(Strategy::Bounce)
    }

    /// The cheaper of [`ring`](Self::ring), whose dimensions it takes, and [`bounce`](Self::bounce), as measured. Parts of a buffer that share a page
    /// with other data are always copied, unless the device is [trusted](super::Device::trusted). Without bounce memory in the domain this is a ring;
    /// without translation it is [`direct`](Self::direct). For non-coherent devices see [`Device::not_coherent`](super::Device::not_coherent).
    pub const fn auto(descriptors: u32, bytes: u64) -> Self {
        Self { descriptors, bytes, ..Self::new(Strategy::Auto) }
    }

    /// The number of mappings that end with one wait: 1 to [`MOST_IN_BATCH`]. Rings default to [`RING_BATCH`](Self::RING_BATCH). A larger batch makes
    /// each mapping cheaper, and returns its buffer later: **no timer ends a batch**. A driver that goes idle calls [`commit`](super::Queue::commit).
    pub const fn batch(self, batch: usize) -> Self {
        Self { batch: Some(batch), ..self }
    }

    /// The colour of a ring, which shifts its first address; the domain's next by default. A driver with many domains behind one IOMMU numbers their
    /// rings here.
    pub const fn colour(self, colour: u32) -> Self {
        Self { colour: Some(colour), ..self }
    }

    /// Copies the original in first: for a device that may write only a part of a [`FromDevice`](crate::addr::Direction::FromDevice) mapping, whose
    /// rest must stay as it was. (Without an IOMMU every copy is made like this.)
    pub const fn copying_in(self) -> Self {
        Self { attributes: Attributes { copy_in: true }, ..self }
    }

    /// When the queue is made, [`auto`](Self::auto) measures only this direction. Data of the others can be mapped, too, and is copied at first.
    pub const fn measuring(self, direction: crate::addr::Direction) -> Self {
        Self { direction: Some(direction), ..self }
    }

    /// This configuration with another strategy, and without the options that the strategy does not use.
    pub(super) fn by(self, strategy: Strategy) -> Self {
        let has_ring = matches!(strategy, Strategy::Ring | Strategy::Auto);
        Self {
            strategy,
            batch: self.batch.filter(|_| has_ring || strategy == Strategy::Batch),
            colour: self.colour.filter(|_| has_ring),
            direction: self.direction.filter(|_| strategy == Strategy::Auto),
            ..self
        }
    }

    #[inline]
    pub(super) fn batch_size(&self) -> usize {
        self.batch.unwrap_or(Self::RING_BATCH)
    }

    pub(super) fn check(&self) -> Result<(), SetupError> {
        let Self { strategy, descriptors, bytes, .. } = *self;
        let batch = self.batch_size();
        if !(1..=MOST_IN_BATCH).contains(&batch) {
            return Err(SetupError::Batch { batch, most: MOST_IN_BATCH });
        }
        let has_ring = matches!(strategy, Strategy::Ring | Strategy::Auto);
        if has_ring && (descriptors == 0 || bytes == 0) {
            return Err(SetupError::NoRing { descriptors, bytes });
        }
        let strategy_name = match strategy {
            Strategy::Direct => "direct",
            Strategy::Batch => "batched",
            Strategy::Ring => "ring",
            Strategy::Bounce => "bounce",
            Strategy::Auto => "auto",
        };
        let used = self.by(strategy);
        let unused = |option| Err(SetupError::NoEffect { option, strategy: strategy_name });
        match self {
            _ if self.batch != used.batch => unused("batch"),
            _ if self.colour != used.colour => unused("colour"),
            _ if self.direction != used.direction => unused("measuring"),
            _ => Ok(()),
        }
    }
}
