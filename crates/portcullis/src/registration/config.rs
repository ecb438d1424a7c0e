//! What a cache may hold, what is asked of it, and what it reports.

use crate::addr::Iova;

/// The most that a [`RegistrationCache`](super::RegistrationCache) opens to devices at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistrationLimits {
    /// Entries: each takes one mapping of the domain. From 1 on.
    pub entries: usize,
    /// Bytes of the whole granules that entries cover: what must stay in memory for them. At least one granule.
    pub bytes: u64,
}

/// Until when a range stays mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// While somebody holds a registration of just this range: the last release unmaps it strictly.
    WhileHeld,
    /// Until the owner [forgets](super::RegistrationCache::forget) it, or the room is needed for another range, or a
    /// trim. **Devices reach it meanwhile, whether it is held or not**: the caller says that the buffer is long-lived,
    /// and what it is used for is the device's business all the time (`PERSISTENT_STREAMING`).
    UntilForgotten,
}

/// A range that a device reaches, held. It is given back to [`release`](super::RegistrationCache::release), once, as
/// it cannot be copied; dropped without that, the range counts as held until the cache is dropped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a registration that is not released stays held, and cannot make room for another"]
pub struct Registration {
    pub(super) iova: Iova,
    pub(super) len: u64,
    pub(super) cache: u64,
    pub(super) slot: u32,
    pub(super) generation: u64,
    /// Whether it is of all that the entry covers.
    pub(super) whole: bool,
}

impl Registration {
    /// The address of the first byte for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Bytes, as they were asked for. Never 0.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// What a release has left of the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Released {
    /// The device still reaches it: others hold it, or it is kept [until it is forgotten](Keep::UntilForgotten).
    Open,
    /// It was the last, and the device reaches it no more.
    Unmapped,
    /// The owner had it forgotten while it was held: the device may have met faults instead of the memory. If this was the last of
    /// a range that is not kept, the device reaches it no more.
    Forgotten,
}

/// What a [`forget`](super::RegistrationCache::forget) has unmapped, besides what others were unmapping already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forgotten {
    /// Entries that overlapped the range.
    pub entries: usize,
    /// Bytes of their granules.
    pub bytes: u64,
    /// Of the entries, those that somebody held: the device may meet faults where they were.
    pub held: usize,
}

/// What a cache holds, and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistrationUsage {
    /// Entries in use for anything: never more than the limit.
    pub entries: usize,
    /// Bytes of granules that devices reach, or may still reach: never more than the limit.
    pub bytes: u64,
    /// Entries that nobody holds and that devices reach, as they are kept
    /// [until they are forgotten](Keep::UntilForgotten).
    pub idle_entries: usize,
    /// Bytes of their granules.
    pub idle_bytes: u64,
    /// Entries whose unmapping the hardware has not confirmed. They count against the limits, and are tried again by
    /// whoever needs room, trims, or forgets something that they overlap.
    pub unconfirmed_entries: usize,
    /// Bytes of their granules.
    pub unconfirmed_bytes: u64,
    /// Entries that were forgotten while held: unmapped, and kept until the last release so that nobody else gets
    /// addresses which the holder may still tell a device.
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
