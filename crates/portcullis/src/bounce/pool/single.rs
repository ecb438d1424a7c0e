//! The pool's map: an ordered map of single-use buffers, split mappings, and lists with gaps that
//! were mapped directly. No two of its mappings have an address in common.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Bound;

use super::slot::Terms;
use crate::addr::{Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::invalidation::SLICE;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// One mapping. It does not change while it lives.
#[derive(Debug)]
pub(super) struct Single {
    /// The addresses of its granules, which no other mapping has.
    pub range: IovaRange,
    /// Bytes from the first to the last.
    pub len: u64,
    /// The group of the device that it was made for.
    pub group: u64,
    pub terms: Terms,
    /// The original.
    pub list: Vec<PhysSegment>,
    pub parts: Parts,
}

impl Single {
    /// The address of the first byte.
    pub(super) fn iova(&self) -> Iova {
        // The range begins at a granule, and the offset is below one.
        Iova::new(self.range.start().get() | self.terms.offset)
    }
}

/// What stands between the device and the original.
#[derive(Debug)]
pub(super) enum Parts {
    /// A buffer for all of it, in pieces.
    Whole(Vec<PhysSegment>),
    /// Granules for its beginning and its end.
    Split(Ends),
    /// Nothing; `neighbours` bytes share the granules of the original.
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
    /// Mapped, by the caller with this number.
    Live(u64),
    /// In the hands of the caller with this number, which maps or unmaps it.
    Taken(u64),
    /// Unmapped, but not confirmed.
    Unconfirmed,
    /// The same, in the hands of the trim with this number.
    Trying(u64),
    /// The caller that had it in hand has panicked, so the pool does not know what is mapped.
    Torn,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub single: Arc<Single>,
    pub phase: Phase,
    /// The addresses must not be used again: another's mapping was met there, or has taken the place of this one.
    pub lost: bool,
}

/// What follows a look at an entry.
pub(super) enum Look {
    /// A look at the next.
    On,
    /// No other look.
    Enough,
    /// No other look, and the entry is removed.
    Remove,
}

/// All mappings of the map, by the first address of their granules.
#[derive(Debug, Default)]
pub(super) struct Singles {
    /// How many there are: written under the lock, read without it. A caller that looks for its own mapping sees 1 at
    /// least, as the count that included it was stored before its address was handed out.
    count: AtomicU64,
    /// Callers that take mappings in hand, so far.
    claims: AtomicU64,
    map: Mutex<BTreeMap<Iova, Entry>>,
}

impl Singles {
    /// How many there are.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// A number that no caller had before.
    pub(super) fn next_number(&self) -> u64 {
        self.claims.fetch_add(1, Ordering::Relaxed)
    }

    /// Calls `f` with the map, locked. The caller has a CPU lent, if its platform has one for it.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut BTreeMap<Iova, Entry>) -> R) -> R {
        let mut map = self.map.lock();
        let result = f(&mut map);
        self.count.store(map.len() as u64, Ordering::Relaxed);
        result
    }

    /// Shows `f` one entry after the other, until it has seen enough. Takes the lock, and has a CPU
    /// lent, for 64 entries at a time, so that neither is held for long. What comes or goes
    /// meanwhile may be left out. Begins at `from`, and leaves there where to go on.
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
        while self.count() > 0 && platform.with_cpu(|_| self.with(&mut slice)) {}
    }
}

/// Returns the entry that the map has at any of the addresses of `range`: the last, where there are
/// several.
pub(super) fn noted(map: &mut BTreeMap<Iova, Entry>, range: IovaRange) -> Option<&mut Entry> {
    // No two have an address in common, so none before that goes on for longer.
    let (_, entry) = map.range_mut(..=range.last()).next_back()?;
    (entry.single.range.last() >= range.start()).then_some(entry)
}

/// Finds the mapping of `len` bytes at `iova` (of any length, for `None`), in the granules `range`,
/// among those that have not ended. Returns `None` where the map knows nothing of these addresses:
/// the domain may. The caller with this `number`, if there is one, has the mapping in hand then; one of a `group` gets no
/// mapping of another.
pub(super) fn find(
    map: &mut BTreeMap<Iova, Entry>,
    range: IovaRange,
    iova: Iova,
    len: Option<u64>,
    (number, group): (Option<u64>, Option<u64>),
) -> Result<Option<Arc<Single>>, DmaUnmapError> {
    let Some(entry) = noted(map, range) else { return Ok(None) };
    // Its addresses are in use: only the whole of it may be named.
    let is_named = entry.single.range.start() == range.start()
        && entry.single.iova() == iova
        && group.is_none_or(|group| group == entry.single.group);
    if !is_named || !matches!(entry.phase, Phase::Live(_)) {
        return Err(DmaUnmapError::NotMapped { iova });
    }
    let mapped = entry.single.len;
    if let Some(len) = len
        && len != mapped
    {
        return Err(DmaUnmapError::OutOfRange { iova, offset: 0, len, mapped });
    }
    if let Some(number) = number {
        entry.phase = Phase::Taken(number);
    }
    Ok(Some(Arc::clone(&entry.single)))
}

/// A copy of `list`.
pub(super) fn remember(list: &[PhysSegment]) -> Result<Vec<PhysSegment>, DmaMapError> {
    let mut copy = Vec::new();
    let pieces = list.len();
    copy.try_reserve_exact(pieces).map_err(|_| DmaMapError::OutOfMemory)?;
    copy.extend_from_slice(list);
    Ok(copy)
}
