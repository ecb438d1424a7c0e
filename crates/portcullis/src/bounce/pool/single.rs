//! The pool's ordered map: single-use buffers, split mappings, and direct mappings of lists with gaps. No two of its mappings share an address.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::mem::MaybeUninit;
use core::ops::{Bound, Range};

use intrusive_collections::rbtree::CursorMut;
use intrusive_collections::{Bound as At, KeyAdapter, RBTree, RBTreeLink, intrusive_adapter};

use super::slot::Terms;
use crate::addr::{Iova, IovaRange, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::heap::{OutOfMemory, Shared, SharedPlace, empty_box};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// One mapping. It does not change.
#[derive(Debug)]
pub(super) struct Single {
    /// The addresses of its granules, which no other mapping has.
    pub range: IovaRange,
    /// Bytes from the first to the last.
    pub len: u64,
    pub group: u64,
    pub terms: Terms,
    pub parts: Parts,
}

impl Single {
    pub(super) fn iova(&self) -> Iova {
        // The range begins at a granule, and the offset is smaller.
        Iova::new(self.range.start().get() | self.terms.offset)
    }
}

/// The memory of a mapping.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// The original, for copies.
    pub list: Vec<PhysSegment>,
    /// The buffers for the bytes before and after the middle, in the order of addresses. Empty for direct mappings only.
    pub buffers: Vec<PhysSegment>,
    /// The bytes of the mapping that the device reaches in the original.
    pub middle: Range<u64>,
    /// Bytes that share the granules of the original of a direct mapping.
    pub neighbours: u64,
}

impl Parts {
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.buffers.iter().map(|piece| piece.len).sum()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Mapped, by the caller with this number.
    Live(u64),
    /// Claimed by the caller with this number, which maps or unmaps it.
    Taken(u64),
    /// Unmapped, but not confirmed.
    Unconfirmed,
    /// The same, claimed by the trim with this number.
    Trying(u64),
    /// Its claimer has panicked, so its translations are unknown.
    Torn,
}

/// A mapping in the map. The map's lock protects its phase and `lost`.
#[derive(Debug)]
pub(super) struct Entry {
    link: RBTreeLink,
    pub single: Shared<Single>,
    pub phase: Cell<Phase>,
    /// The addresses leak when it ends: another caller has changed the translations there.
    pub lost: Cell<bool>,
}

intrusive_adapter!(ByStart = Box<Entry>: Entry { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for ByStart {
    type Key = Iova;

    fn get_key(&self, entry: &'a Entry) -> Iova {
        entry.single.range.start()
    }
}

/// Memory for a mapping and its entry, allocated before the mapping has addresses.
pub(super) struct Place {
    single: SharedPlace<Single>,
    entry: Box<MaybeUninit<Entry>>,
}

impl Place {
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        Ok(Self { single: SharedPlace::new()?, entry: empty_box()? })
    }

    pub(super) fn fill(self, single: Single, phase: Phase) -> (Shared<Single>, Box<Entry>) {
        let single = self.single.fill(single);
        let (link, phase, lost) = (RBTreeLink::new(), Cell::new(phase), Cell::new(false));
        (single.clone(), Box::write(self.entry, Entry { link, single, phase, lost }))
    }
}

/// The pool's mappings by the first address of their granules, in a red-black tree whose nodes are the entries, so changes need no memory.
#[derive(Debug, Default)]
pub(super) struct Map {
    tree: RBTree<ByStart>,
    len: u64,
}

fn at_of(from: &Bound<Iova>) -> At<&Iova> {
    match from {
        Bound::Included(start) => At::Included(start),
        Bound::Excluded(start) => At::Excluded(start),
        Bound::Unbounded => At::Unbounded,
    }
}

impl Map {
    /// Adds an entry, which shares no address with another.
    pub(super) fn insert(&mut self, entry: Box<Entry>) {
        self.tree.insert(entry);
        self.len += 1;
    }

    pub(super) fn get(&self, start: Iova) -> Option<&Entry> {
        self.tree.find(&start).get()
    }

    pub(super) fn next(&self, from: Bound<Iova>) -> Option<&Entry> {
        self.tree.lower_bound(at_of(&from)).get()
    }

    /// The entry that has any address of `range`: the last of several.
    pub(super) fn noted(&self, range: IovaRange) -> Option<&Entry> {
        // No two share an address, so no earlier entry reaches further.
        let entry = self.tree.upper_bound(At::Included(&range.last())).get()?;
        (entry.single.range.last() >= range.start()).then_some(entry)
    }

    pub(super) fn remove(&mut self, start: Iova) -> Option<Box<Entry>> {
        Self::remove_at(&mut self.tree.find_mut(&start), &mut self.len)
    }

    pub(super) fn pop_first(&mut self) -> Option<Box<Entry>> {
        Self::remove_at(&mut self.tree.front_mut(), &mut self.len)
    }

    fn remove_at(at: &mut CursorMut<'_, ByStart>, len: &mut u64) -> Option<Box<Entry>> {
        let removed = at.remove();
        *len -= u64::from(removed.is_some());
        removed
    }

    /// Calls `f` with at most `most` entries after `from`, and stores there where to continue. Returns whether there may be more.
    pub(super) fn visit(
        &mut self,
        from: &mut Bound<Iova>,
        most: usize,
        f: &mut impl FnMut(&Entry) -> Look,
    ) -> bool {
        let mut at = self.tree.lower_bound_mut(at_of(from));
        for _ in 0..most {
            let Some(entry) = at.get() else { return false };
            *from = Bound::Excluded(entry.single.range.start());
            match f(entry) {
                Look::On => at.move_next(),
                Look::Enough => return false,
                Look::Remove => {
                    drop(Self::remove_at(&mut at, &mut self.len));
                    return false;
                }
            }
        }
        true
    }
}

pub(super) enum Look {
    On,
    Enough,
    /// Remove the entry, and stop.
    Remove,
}

#[derive(Debug, Default)]
pub(super) struct Singles {
    /// The number of mappings: written under the lock, read without it. A caller with a mapping of its own reads at least 1, as the count with it was
    /// stored before the caller got its address.
    count: AtomicU64,
    claims: AtomicU64,
    map: Mutex<Map>,
}

impl Singles {
    #[inline]
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn next_number(&self) -> u64 {
        self.claims.fetch_add(1, Ordering::Relaxed)
    }

    /// Calls `f` with the locked map. The caller has a CPU lent, if its platform has one for it.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Map) -> R) -> R {
        let mut map = self.map.lock();
        let result = f(&mut map);
        self.count.store(map.len, Ordering::Relaxed);
        result
    }
}

/// Finds the open mapping of `len` bytes (`None`: any length) at `iova`, in the granules `range`, and of `group` if one is given; claims it for
/// `number`, if one is given. `Ok(None)` if the map has none of these addresses: the domain may.
pub(super) fn find(
    map: &Map,
    range: IovaRange,
    iova: Iova,
    len: Option<u64>,
    (number, group): (Option<u64>, Option<u64>),
) -> Result<Option<Shared<Single>>, DmaUnmapError> {
    let Some(entry) = map.noted(range) else { return Ok(None) };
    // Its addresses are in use: the caller must name all of it.
    let is_named = entry.single.range.start() == range.start()
        && entry.single.iova() == iova
        && group.is_none_or(|group| group == entry.single.group);
    if !is_named || !matches!(entry.phase.get(), Phase::Live(_)) {
        return Err(DmaUnmapError::NotMapped { iova });
    }
    let mapped = entry.single.len;
    if let Some(len) = len
        && len != mapped
    {
        return Err(DmaUnmapError::OutOfRange { iova, offset: 0, len, mapped });
    }
    if let Some(number) = number {
        entry.phase.set(Phase::Taken(number));
    }
    Ok(Some(entry.single.clone()))
}

pub(super) fn room(pieces: usize) -> Result<Vec<PhysSegment>, DmaMapError> {
    let mut list = Vec::new();
    list.try_reserve_exact(pieces).map_err(|_| DmaMapError::OutOfMemory)?;
    Ok(list)
}
