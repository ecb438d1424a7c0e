//! What invalidations cost, as the driver of the hardware states it. The numbers decide which of
//! several safe ways is taken, never whether anything is safe.

use super::QUEUE_ENTRIES;

/// The most that an unmap should pay for its share of a flush, in nanoseconds.
const SHARE_NS: u32 = 10;

/// What invalidations cost on the hardware at hand, in nanoseconds. The library chooses by these
/// numbers; whether anything is safe never depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// A submission, from the doorbell until it is confirmed, however many requests are in it.
    pub submission_ns: u32,
    /// Each request in it.
    pub request_ns: u32,
    /// The time that devices take to fetch again what they lose when a whole domain is forgotten.
    pub refill_ns: u32,
}

impl Costs {
    /// A VT-d on bare metal: 2,130 cycles a submission (measured in 2015; 3 GHz are assumed). The cost of one
    /// more descriptor is not published; 50 ns are a read of memory. A refill is 64 entries of 197 ns, the reads of
    /// memory that "Fast & Safe" (SOSP 2024) fitted.
    pub const BARE_METAL: Self = Self { submission_ns: 710, request_ns: 50, refill_ns: 64 * 197 };

    /// Whether `requests` for ranges cost more than one for the whole domain and what follows from it.
    pub(crate) fn prefer_domain(&self, requests: usize) -> bool {
        let ranges = u64::from(self.request_ns).saturating_mul(requests as u64);
        ranges > u64::from(self.request_ns) + u64::from(self.refill_ns)
    }

    /// Whether flushes are so expensive that the CPUs should share one long flush queue, which is
    /// flushed seldom. That is so where a flush would cost more than 10 ns for each unmap of a
    /// queue of 256, which each CPU has otherwise. (So it is for IOMMUs that are emulated or
    /// paravirtual: there a flush takes microseconds.)
    pub const fn shares_one_queue(&self) -> bool {
        self.submission_ns > SHARE_NS * QUEUE_ENTRIES as u32
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self::BARE_METAL
    }
}
