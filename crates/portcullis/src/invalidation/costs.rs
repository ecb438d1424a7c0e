//! What invalidations cost, as the hardware's driver states it.

use super::QUEUE_ENTRIES;

/// The most that an unmap should pay for its share of a flush, in nanoseconds.
const SHARE_NS: u32 = 10;

/// What invalidations cost on the present hardware, in nanoseconds. The library uses it to choose between equally safe ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// A submission, from the doorbell to the confirmation, whatever the number of requests.
    pub submission_ns: u32,
    /// Each request in it.
    pub request_ns: u32,
    /// The time in which devices refetch what a domain-wide invalidation drops.
    pub refill_ns: u32,
}

impl Costs {
    /// A VT-d on bare metal: 2,130 cycles a submission (measured in 2015; 3 GHz are assumed). The cost of a further descriptor is not
    /// published; 50 ns are a read of memory. A refill is 64 entries of 197 ns, the reads of memory that "Fast & Safe" (SOSP 2024) fitted.
    pub const BARE_METAL: Self = Self { submission_ns: 710, request_ns: 50, refill_ns: 64 * 197 };

    /// Whether `requests` for ranges cost more than one for the whole domain and its refill.
    pub(crate) fn prefer_domain(&self, requests: usize) -> bool {
        let ranges = u64::from(self.request_ns).saturating_mul(requests as u64);
        ranges > u64::from(self.request_ns) + u64::from(self.refill_ns)
    }

    /// Whether flushes are so expensive that all CPUs should share one long flush queue: with a queue of 256 for each CPU, a flush would
    /// cost more than 10 ns for each unmap. That is so for emulated and paravirtual IOMMUs, whose flushes take microseconds.
    pub const fn shares_one_queue(&self) -> bool {
        self.submission_ns > SHARE_NS * QUEUE_ENTRIES as u32
    }
}
