//! The limits of a cache, the options of an acquisition, and statistics.

use portcullis::addr::Iova;

/// The most memory that a [`RegistrationCache`](super::RegistrationCache) opens to devices at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistrationLimits {
    /// Entries, at least 1. Each has one mapping of the domain.
    pub entries: usize,
    /// Bytes of whole granules in entries, which must stay in memory. At least one granule.
    pub bytes: u64,
}

/// How long a range stays mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// While a registration of exactly this range is held: the last release unmaps it strictly.
    WhileHeld,
    /// Until the owner [forgets](super::RegistrationCache::forget) it, its room is needed for another range, or a trim. **Devices reach it
    /// meanwhile, whether it is held or not**: the caller states that the buffer is long-lived, and that the device may use it all the time
    /// (`PERSISTENT_STREAMING`).
    UntilForgotten,
}

/// A held range that a device reaches. [`release`](super::RegistrationCache::release) it once; it cannot be copied. If it is dropped, the
/// range counts as held until the cache is dropped.
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
    /// Returns the IOVA of the first byte.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the length that was acquired. Never 0.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// The state of a range after its release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Released {
    /// The device still reaches it: other callers hold it, or it is [persistent](Keep::UntilForgotten).
    Open,
    /// It was the last registration, and the device no longer reaches the range.
    Unmapped,
    /// The owner forgot the range while it was held: the device may have met faults. After the last registration of a range that is not
    /// persistent, the device no longer reaches it.
    Forgotten,
}

/// Entries that a [`forget`](super::RegistrationCache::forget) has unmapped, unless other callers were already unmapping them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forgotten {
    /// Entries that overlapped the range.
    pub entries: usize,
    /// Bytes of their granules.
    pub bytes: u64,
    /// How many of them were held: the device may meet faults at their addresses.
    pub held: usize,
}

/// The contents of a cache, and its counts since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistrationUsage {
    /// Entries in use in any state: never more than the limit.
    pub entries: usize,
    /// Bytes of granules that devices reach, or may still reach: never more than the limit.
    pub bytes: u64,
    /// Persistent entries without a holder, which devices reach.
    pub idle_entries: usize,
    /// Bytes of their granules.
    pub idle_bytes: u64,
    /// Entries whose invalidation is not confirmed. They count against the limits. Every call that needs room, trims, or forgets an
    /// overlapping range tries again.
    pub unconfirmed_entries: usize,
    /// Bytes of their granules.
    pub unconfirmed_bytes: u64,
    /// Entries that were forgotten while held: unmapped, with their addresses reserved until the last release, because a holder may still
    /// tell them to a device.
    pub forgotten_entries: usize,
    /// The most entries so far.
    pub peak_entries: usize,
    /// The most bytes so far.
    pub peak_bytes: u64,
    /// Acquisitions of a mapped range.
    pub hits: u64,
    /// Acquisitions that mapped a range.
    pub misses: u64,
    /// Idle entries evicted to make room.
    pub evictions: u64,
}
