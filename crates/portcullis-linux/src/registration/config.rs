//! The limits of a cache, the options of an acquisition, and the figures that a cache reports.

use portcullis::addr::Iova;

/// The most that a [`RegistrationCache`](super::RegistrationCache) opens to devices at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistrationLimits {
    /// Entries, from 1 on. Each takes one mapping of the domain.
    pub entries: usize,
    /// Bytes of the whole granules that entries cover, which must stay in memory for them. At least
    /// one granule.
    pub bytes: u64,
}

/// How long a range stays mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// While a registration of just this range is held: the last release unmaps it strictly.
    WhileHeld,
    /// Until the owner [forgets](super::RegistrationCache::forget) it, or the room is needed for
    /// another range, or a trim. **Devices reach it meanwhile, whether it is held or not**: the
    /// caller states that the buffer is long-lived, and that the device may use it all the time
    /// (`PERSISTENT_STREAMING`).
    UntilForgotten,
}

/// A range that a device reaches, held. Give it back to
/// [`release`](super::RegistrationCache::release), once; it cannot be copied. If it is dropped
/// without that, the range counts as held until the cache is dropped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a registration that is not released stays held, and cannot make room for another"]
pub struct Registration {
    pub(super) iova: Iova,
    pub(super) len: u64,
    pub(super) cache: u64,
    pub(super) slot: u32,
    pub(super) generation: u64,
    /// Whether it covers the whole range of the entry.
    pub(super) whole: bool,
}

impl Registration {
    /// Returns the address of the first byte for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns how many bytes were asked for. Never 0.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// The state in which a release leaves the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Released {
    /// The device still reaches it: other callers hold it, or it is kept [until it is
    /// forgotten](Keep::UntilForgotten).
    Open,
    /// The registration was the last, and the device reaches the range no more.
    Unmapped,
    /// The owner had the range forgotten while it was held: the device may have met faults instead
    /// of the memory. If the registration was the last of a range that is not kept, the device
    /// reaches it no more.
    Forgotten,
}

/// The entries that a [`forget`](super::RegistrationCache::forget) has unmapped, besides those that
/// other callers were unmapping already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forgotten {
    /// Entries that overlapped the range.
    pub entries: usize,
    /// Bytes of their granules.
    pub bytes: u64,
    /// How many of the entries were held: the device may meet faults at their addresses.
    pub held: usize,
}

/// What a cache holds now, and its counts since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistrationUsage {
    /// Entries in use, whatever for: never more than the limit.
    pub entries: usize,
    /// Bytes of granules that devices reach, or may still reach: never more than the limit.
    pub bytes: u64,
    /// Entries that have no holder and that devices reach, as they are kept [until they are
    /// forgotten](Keep::UntilForgotten).
    pub idle_entries: usize,
    /// Bytes of their granules.
    pub idle_bytes: u64,
    /// Entries whose unmapping the hardware has not confirmed. They count against the limits.
    /// Every call that needs room, trims, or forgets a range that overlaps them tries again.
    pub unconfirmed_entries: usize,
    /// Bytes of their granules.
    pub unconfirmed_bytes: u64,
    /// Entries that were forgotten while held: unmapped, and kept until the last release, so that
    /// no other caller gets addresses which the holder may still tell a device.
    pub forgotten_entries: usize,
    /// The most entries that there ever were.
    pub peak_entries: usize,
    /// The most bytes that there ever were.
    pub peak_bytes: u64,
    /// Acquisitions of a range that was mapped already.
    pub hits: u64,
    /// Acquisitions that mapped a range.
    pub misses: u64,
    /// Idle entries unmapped to make room for others.
    pub evictions: u64,
}
