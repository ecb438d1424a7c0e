//! Mappings that the pool keeps in an ordered map: single-use buffers, split mappings, lists with gaps.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Bound;

use super::error::{BounceError, BounceMapError};
use super::slot::Terms;
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::domain::PhysSegment;
use crate::invalidation::SLICE;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// One mapping. It does not change while it lives.
#[derive(Debug)]
pub(super) struct Single {
    /// The addresses of its granules, which no other mapping has.
    pub range: IovaRange,
    /// The first byte.
    pub iova: Iova,
    /// Bytes from the first to the last.
    pub len: u64,
    pub terms: Terms,
    /// The original.
    pub list: Vec<PhysSegment>,
    pub parts: Parts,
}

/// What stands between the device and the original.
#[derive(Debug)]
pub(super) enum Parts {
    /// A buffer for all of it, in pieces.
    Whole(Vec<PhysSegment>),
    /// Granules for its beginning and its end.
    Split(Ends),
    /// Nothing; so many bytes share the granules of the original.
    Direct { neighbours: u64 },
}

/// The bounced ends of a split mapping: the granule's memory, and how many bytes of the mapping are in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub head: Option<(PhysAddr, u64)>,
    pub tail: Option<(PhysAddr, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Live,
    /// Somebody is unmapping it.
    Ending,
    /// Unmapped, but not confirmed.
    Unconfirmed,
    /// The same, and the trim with this number is at it.
    Trying(u64),
    /// Whoever was unmapping it has not come back.
    Torn,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub single: Arc<Single>,
    pub phase: Phase,
    /// The addresses must not be used again: somebody else's mapping was met there, or has taken the place of this one.
    pub lost: bool,
}

/// What follows a look at an entry.
pub(super) enum Look {
    /// One at the next.
    On,
    /// None.
    Enough,
    /// None, and the entry goes.
    Remove,
}

/// All of them, by the first address of their granules.
#[derive(Debug, Default)]
pub(super) struct Singles {
    /// How many there are: written under the lock, read without it. Whoever looks for its own mapping sees 1 at least,
    /// as the count that included it was stored before its address was handed out.
    count: AtomicU64,
    attempts: AtomicU64,
    map: Mutex<BTreeMap<Iova, Entry>>,
}

impl Singles {
    /// How many there are.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// A number that no attempt had before.
    pub(super) fn next_attempt(&self) -> u64 {
        self.attempts.fetch_add(1, Ordering::Relaxed)
    }

    /// Calls `f` with the map, locked. The caller has a slot lent, if its platform has one for it.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut BTreeMap<Iova, Entry>) -> R) -> R {
        let mut map = self.map.lock();
        let result = f(&mut map);
        self.count.store(map.len() as u64, Ordering::Relaxed);
        result
    }

    /// Shows `f` one entry after the other, until it has seen enough: 64 with each turn of the lock and
    /// each slot, so that neither is held for long. What comes or goes meanwhile may be left out. Begins at `from`, and
    /// leaves there where to go on.
    pub(super) fn visit<P: Platform>(
        &self,
        platform: &P,
        from: &mut Bound<Iova>,
        mut f: impl FnMut(&mut Entry) -> Look,
    ) {
        let mut slice = |map: &mut BTreeMap<Iova, Entry>| {
            let mut seen = 0;
            for (start, entry) in map.range_mut((*from, Bound::Unbounded)).take(SLICE) {
                let start = *start;
                *from = Bound::Excluded(start);
                seen += 1;
                match f(entry) {
                    Look::On => {}
                    Look::Enough => return false,
                    Look::Remove => {
                        map.remove(&start);
                        return false;
                    }
                }
            }
            seen == SLICE
        };
        while self.count() > 0 && platform.with_slot(|_| self.with(&mut slice)) {}
    }

    /// What is there, for whoever has the pool to itself.
    pub(super) fn drain(&self) -> BTreeMap<Iova, Entry> {
        self.with(core::mem::take)
    }
}

/// A range of whole granules that is to be unmapped, and what the map knows of it.
pub(super) enum Found {
    /// Its mapping.
    Single(Arc<Single>),
    /// Nothing: the domain may know.
    Unknown,
}

/// Finds the mapping of `len` bytes at `iova` (of any length, for `None`) among those that have not ended, in
/// granules of `granule_start`. Marks it with `next`.
pub(super) fn find(
    map: &mut BTreeMap<Iova, Entry>,
    range: IovaRange,
    iova: Iova,
    len: Option<u64>,
    next: Phase,
) -> Result<Found, BounceError> {
    let wrong = Err(BounceError::NotMapped { iova });
    let Some((start, entry)) = map.range_mut(..=range.last()).next_back() else {
        return Ok(Found::Unknown);
    };
    if entry.single.range.last() < range.start() {
        return Ok(Found::Unknown);
    }
    // Its addresses are in use: only the whole of it may be named.
    if *start != range.start() || entry.single.iova != iova || entry.phase != Phase::Live {
        return wrong;
    }
    let mapped = entry.single.len;
    if let Some(len) = len
        && len != mapped
    {
        return Err(BounceError::WrongLength { iova, len, mapped });
    }
    entry.phase = next;
    Ok(Found::Single(Arc::clone(&entry.single)))
}

/// A copy of `list`.
pub(super) fn remember(list: &[PhysSegment]) -> Result<Vec<PhysSegment>, BounceMapError> {
    let mut copy = Vec::new();
    let pieces = list.len();
    copy.try_reserve_exact(pieces).map_err(|_| BounceMapError::NoMemory { pieces })?;
    copy.extend_from_slice(list);
    Ok(copy)
}
