//! How a replay ends mappings: a domain's policy, or strict protection with shared waits.

use portcullis::domain::Policy;
use portcullis::invalidation::Costs;

/// Unmaps of a device that [`Mode::StrictBatch`] commits together.
pub const BATCH_UNMAPS: usize = 32;

/// Descriptors that [`Mode::StrictRing`] commits together.
pub const RING_BATCH: usize = 64;

/// Pages of a ring of [`Mode::StrictRing`]: 16 MiB of addresses, with granules of 4 KiB.
pub const RING_PAGES: u32 = 4096;

/// The longest that an unmap waits for others to share its commit, in nanoseconds of the trace's clock: 10 ms, as
/// long as lazy protection's window, so that the two compare. (Recordings of an emulated machine, whose packets are
/// tens of microseconds apart, would meet a shorter bound before a batch is full, which hardware would not.)
pub const COMMIT_WITHIN_NS: u64 = 10_000_000;

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
}

impl Mode {
    /// Every mode there is, the most protective first.
    pub const ALL: [Self; 5] = [
        Self::Each(Policy::Strict),
        Self::StrictBatch,
        Self::StrictRing,
        Self::Each(Policy::LAZY),
        Self::PASSTHROUGH,
    ];

    /// No translation.
    pub const PASSTHROUGH: Self = Self::Each(Policy::Passthrough);

    /// Its name, as the command line and the report write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Each(policy) => policy.name(),
            Self::StrictBatch => "strict-batch",
            Self::StrictRing => "strict-ring",
        }
    }

    /// The policy of the domains behind it, on hardware of these costs: lazy protection's usual window is the one
    /// that suits them.
    pub fn policy(self, costs: &Costs) -> Policy {
        match self {
            Self::Each(Policy::LAZY) => Policy::lazy_for(costs),
            Self::Each(policy) => policy,
            Self::StrictBatch | Self::StrictRing => Policy::Strict,
        }
    }
}

impl From<Policy> for Mode {
    fn from(policy: Policy) -> Self {
        Self::Each(policy)
    }
}
