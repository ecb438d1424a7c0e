//! The modes of a replay: a domain's policy, or strict protection with batched waits.

use portcullis::dma::QueueConfig;
use portcullis::domain::Policy;
use portcullis::invalidation::Costs;

/// Unmaps of a device that [`Mode::StrictBatch`] commits together.
pub const BATCH_UNMAPS: usize = QueueConfig::BATCH;

/// Descriptors that [`Mode::StrictRing`] commits together.
pub const RING_BATCH: usize = QueueConfig::RING_BATCH;

/// Pages of a ring of [`Mode::StrictRing`]: 16 MiB of addresses, with granules of 4 KiB.
pub const RING_PAGES: u32 = 4096;

/// The longest that a pending unmap waits for its commit, in nanoseconds of the trace's clock: 10 ms, as long as lazy protection's window,
/// so that the two compare. (In recordings of an emulated machine, with packets tens of microseconds apart, a shorter bound would end
/// before a batch is full, unlike on hardware.)
pub const COMMIT_WITHIN_NS: u64 = 10_000_000;

/// A device's queues besides the one for individual mappings.
#[derive(Debug, Clone, Copy)]
pub(super) enum Strategy {
    /// None.
    Alone,
    /// One for all.
    One(QueueConfig),
    /// One for each direction, made at its first use.
    Rings {
        config: QueueConfig,
        /// It is an adaptive queue.
        measures: bool,
    },
}

/// How mappings end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Individually, by the domain's policy.
    Each(Policy),
    /// Strict, and committed once for [`BATCH_UNMAPS`] unmaps of a device, or [`COMMIT_WITHIN_NS`] after the first of them.
    StrictBatch,
    /// Strict, in a ring of addresses for each device and direction, committed once for [`RING_BATCH`] descriptors or after
    /// [`COMMIT_WITHIN_NS`].
    StrictRing,
    /// Copied through a bounce pool for each domain, which stays mapped.
    Bounce,
    /// Copied in this way, or mapped in a ring, whichever is cheaper.
    Adaptive,
    /// Copied through one bounce pool, without translation.
    Swiotlb,
    /// Mapped at the first use, and never unmapped, like libraries with registered memory.
    Registered,
}

impl Mode {
    /// All modes, from strict protection to none.
    pub const ALL: [Self; 9] = [
        Self::Each(Policy::Strict),
        Self::StrictBatch,
        Self::StrictRing,
        Self::Bounce,
        Self::Adaptive,
        Self::Each(Policy::LAZY),
        Self::Registered,
        Self::Swiotlb,
        Self::PASSTHROUGH,
    ];

    /// No translation.
    pub const PASSTHROUGH: Self = Self::Each(Policy::Passthrough);

    /// The mode with this [name](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Its name in the command line and the report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Each(policy) => policy.name(),
            Self::StrictBatch => "strict-batch",
            Self::StrictRing => "strict-ring",
            Self::Bounce => "bounce",
            Self::Adaptive => "adaptive",
            Self::Swiotlb => "swiotlb",
            Self::Registered => "registered",
        }
    }

    /// The policy of its domains, on hardware with these costs: lazy protection gets the default window for them.
    pub fn policy(self, costs: &Costs) -> Policy {
        match self {
            Self::Each(Policy::LAZY) => Policy::lazy_for(costs),
            Self::Each(policy) => policy,
            Self::StrictBatch | Self::StrictRing | Self::Bounce | Self::Adaptive => Policy::Strict,
            Self::Swiotlb | Self::Registered => Policy::Passthrough,
        }
    }

    /// A device's queues, in a domain with granules of `granule` bytes: the only difference between drivers. For `copies_in` see
    /// [`Options::copies_in`](super::Options::copies_in).
    pub(super) const fn strategy(self, granule: u64, copies_in: bool) -> Strategy {
        // A ring also has room for pending unmaps.
        const DESCRIPTORS: u32 = RING_PAGES - RING_BATCH as u32;
        match self {
            Self::Each(_) | Self::Registered => Strategy::Alone,
            Self::StrictBatch => Strategy::One(QueueConfig::batched(BATCH_UNMAPS)),
            Self::StrictRing => Strategy::Rings {
                config: QueueConfig::ring(DESCRIPTORS, granule).batch(RING_BATCH),
                measures: false,
            },
            Self::Bounce if copies_in => Strategy::One(QueueConfig::bounce().copying_in()),
            // A swiotlb always copies in.
            Self::Bounce | Self::Swiotlb => Strategy::One(QueueConfig::bounce()),
            Self::Adaptive => Strategy::Rings {
                config: QueueConfig::auto(DESCRIPTORS, granule).batch(RING_BATCH),
                measures: true,
            },
        }
    }

    /// Whether no device reaches a buffer after it is returned to the driver.
    pub fn is_strict(self) -> bool {
        self.policy(&Costs::BARE_METAL) == Policy::Strict
    }

    /// Whether all buffers are returned in batches, up to [`COMMIT_WITHIN_NS`] after their unmap.
    pub const fn gives_all_back_in_batches(self) -> bool {
        matches!(self, Self::StrictBatch | Self::StrictRing)
    }

    /// Whether mapped, uncopied buffers are returned in batches.
    pub const fn gives_back_in_batches(self) -> bool {
        self.gives_all_back_in_batches() || matches!(self, Self::Adaptive)
    }

    /// Whether the library's calls are replayed. Otherwise only the exposure is computed, at no cost.
    pub const fn is_replayed(self) -> bool {
        !matches!(self, Self::Registered)
    }

    /// Whether a device reaches only the bytes of mappings.
    pub const fn protects_bytes(self) -> bool {
        matches!(self, Self::Bounce | Self::Adaptive)
    }

    /// Whether mappings are copied, so that the trace's memory needs bytes.
    pub const fn copies(self) -> bool {
        matches!(self, Self::Bounce | Self::Adaptive | Self::Swiotlb)
    }
}

impl From<Policy> for Mode {
    fn from(policy: Policy) -> Self {
        Self::Each(policy)
    }
}
