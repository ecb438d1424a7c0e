//! How a replay ends mappings: a domain's policy, or strict protection with shared waits.

use portcullis::dma::QueueConfig;
use portcullis::domain::Policy;
use portcullis::invalidation::Costs;

/// Unmaps of a device that [`Mode::StrictBatch`] commits together.
pub const BATCH_UNMAPS: usize = QueueConfig::BATCH;

/// Descriptors that [`Mode::StrictRing`] commits together.
pub const RING_BATCH: usize = QueueConfig::RING_BATCH;

/// Pages of a ring of [`Mode::StrictRing`]: 16 MiB of addresses, with granules of 4 KiB.
pub const RING_PAGES: u32 = 4096;

/// The longest that an unmap waits for others to share its commit, in nanoseconds of the trace's clock: 10 ms, as
/// long as lazy protection's window, so that the two compare. (Recordings of an emulated machine, whose packets are
/// tens of microseconds apart, would meet a shorter bound before a batch is full, which hardware would not.)
pub const COMMIT_WITHIN_NS: u64 = 10_000_000;

/// The queues of a device besides the one for what goes alone.
#[derive(Debug, Clone, Copy)]
pub(super) enum Strategy {
    /// None.
    Alone,
    /// One for all.
    One(QueueConfig),
    /// One for each direction, made when it is first needed.
    Rings {
        config: QueueConfig,
        /// It measures its direction then.
        measures: bool,
    },
}

/// How mappings end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Each by itself, as the domain's policy says.
    Each(Policy),
    /// Strict, and committed once for [`BATCH_UNMAPS`] unmaps of a device, or [`COMMIT_WITHIN_NS`] after the
    /// first of them.
    StrictBatch,
    /// Strict, out of a ring of addresses for each device and direction, committed once for [`RING_BATCH`]
    /// descriptors or after [`COMMIT_WITHIN_NS`].
    StrictRing,
    /// Copied through the buffers of a pool for each domain, which stay mapped.
    Bounce,
    /// Copied so, or mapped in a ring, whatever is cheaper.
    Adaptive,
    /// Copied through the buffers of one pool, without translation.
    Swiotlb,
    /// Memory that is mapped when it is used first, and never unmapped, as libraries do that want it registered.
    Registered,
}

impl Mode {
    /// Every mode there is: those first that leave nothing stale, last those that protect nothing.
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

    /// The mode that is [called](Self::name) `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Its name, as the command line and the report write it.
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

    /// The policy of the domains behind it, on hardware of these costs: lazy protection's usual window is the one
    /// that suits them.
    pub fn policy(self, costs: &Costs) -> Policy {
        match self {
            Self::Each(Policy::LAZY) => Policy::lazy_for(costs),
            Self::Each(policy) => policy,
            Self::StrictBatch | Self::StrictRing | Self::Bounce | Self::Adaptive => Policy::Strict,
            Self::Swiotlb | Self::Registered => Policy::Passthrough,
        }
    }

    /// The queues that map for a device, in a domain with granules of `granule` bytes: all that differs
    /// between drivers. Where it `copies_in`, [`Options::copies_in`](super::Options::copies_in) says what that is.
    pub(super) const fn strategy(self, granule: u64, copies_in: bool) -> Strategy {
        // A ring has room for what waits besides.
        const DESCRIPTORS: u32 = RING_PAGES - RING_BATCH as u32;
        match self {
            Self::Each(_) | Self::Registered => Strategy::Alone,
            Self::StrictBatch => Strategy::One(QueueConfig::batched(BATCH_UNMAPS)),
            Self::StrictRing => Strategy::Rings {
                config: QueueConfig::ring(DESCRIPTORS, granule).batch(RING_BATCH),
                measures: false,
            },
            Self::Bounce if copies_in => Strategy::One(QueueConfig::bounce().copying_in()),
            // Of these, the swiotlb copies in by itself.
            Self::Bounce | Self::Swiotlb => Strategy::One(QueueConfig::bounce()),
            Self::Adaptive => Strategy::Rings {
                config: QueueConfig::auto(DESCRIPTORS, granule).batch(RING_BATCH),
                measures: true,
            },
        }
    }

    /// Whether no device reaches a buffer that the driver has got back.
    pub fn is_strict(self) -> bool {
        self.policy(&Costs::BARE_METAL) == Policy::Strict
    }

    /// Whether the driver gets buffers back in batches, up to [`COMMIT_WITHIN_NS`] after their unmap.
    pub const fn gives_all_back_in_batches(self) -> bool {
        matches!(self, Self::StrictBatch | Self::StrictRing)
    }

    /// Whether buffers that are mapped, and not copied, come back in groups.
    pub const fn gives_back_in_batches(self) -> bool {
        self.gives_all_back_in_batches() || matches!(self, Self::Adaptive)
    }

    /// Whether the library's calls are replayed. What is left is an account of what would be open, and costs nothing.
    pub const fn is_replayed(self) -> bool {
        !matches!(self, Self::Registered)
    }

    /// Whether a device reaches nothing but the bytes of mappings.
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
