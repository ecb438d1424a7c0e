//! The pool's map: an ordered map of single-use buffers, split mappings, and lists with gaps that
//! were mapped directly. No two of its mappings have an address in common.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::mem::MaybeUninit;
use core::ops::Bound;

use intrusive_collections::rbtree::CursorMut;
use intrusive_collections::{Bound as At, KeyAdapter, RBTree, RBTreeLink, intrusive_adapter};

use super::slot::Terms;
use crate::addr::{Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::heap::{OutOfMemory, Shared, SharedPlace, empty_box};
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

/// A mapping in the map. What changes of it changes under the map's lock.
#[derive(Debug)]
pub(super) struct Entry {
    link: RBTreeLink,
    pub single: Shared<Single>,
    pub phase: Cell<Phase>,
    /// The addresses must not be used again: another's mapping was met there, or has taken the place of this one.
    pub lost: Cell<bool>,
}

intrusive_adapter!(ByStart = Box<Entry>: Entry { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for ByStart {
    type Key = Iova;

    fn get_key(&self, entry: &'a Entry) -> Iova {
        entry.single.range.start()
    }
}

/// Memory for a mapping and its entry: it is there before the mapping has addresses.
pub(super) struct Place {
    single: SharedPlace<Single>,
    entry: Box<MaybeUninit<Entry>>,
}

impl Place {
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        Ok(Self { single: SharedPlace::new()?, entry: empty_box()? })
    }

    /// The mapping, and its entry, which is in this `phase`.
    pub(super) fn fill(self, single: Single, phase: Phase) -> (Shared<Single>, Box<Entry>) {
        let single = self.single.fill(single);
        let (link, phase, lost) = (RBTreeLink::new(), Cell::new(phase), Cell::new(false));
        (single.clone(), Box::write(self.entry, Entry { link, single, phase, lost }))
    }
}

/// All mappings of the pool that are not through slots, by the first address of their granules. Its nodes are the entries, so a
/// change of it needs no memory.
#[derive(Debug, Default)]
pub(super) struct Map {
    tree: RBTree<ByStart>,
    len: u64,
}

/// The same bound, as the tree has it.
fn at_of(from: &Bound<Iova>) -> At<&Iova> {
    match from {
        Bound::Included(start) => At::Included(start),
        Bound::Excluded(start) => At::Excluded(start),
        Bound::Unbounded => At::Unbounded,
    }
}

impl Map {
    /// Adds an entry, which has no address in common with another.
    pub(super) fn insert(&mut self, entry: Box<Entry>) {
        self.tree.insert(entry);
        self.len += 1;
    }

    /// The entry of the mapping that begins at `start`.
    pub(super) fn get(&self, start: Iova) -> Option<&Entry> {
        self.tree.find(&start).get()
    }

    /// The first entry that begins behind `from`.
    pub(super) fn next(&self, from: Bound<Iova>) -> Option<&Entry> {
        self.tree.lower_bound(at_of(&from)).get()
    }

    /// Returns the entry that has any of the addresses of `range`: the last, where there are several.
    pub(super) fn noted(&self, range: IovaRange) -> Option<&Entry> {
        // No two have an address in common, so none before that goes on for longer.
        let entry = self.tree.upper_bound(At::Included(&range.last())).get()?;
        (entry.single.range.last() >= range.start()).then_some(entry)
    }

    /// Takes the entry of the mapping that begins at `start` out.
    pub(super) fn remove(&mut self, start: Iova) -> Option<Box<Entry>> {
        Self::remove_at(&mut self.tree.find_mut(&start), &mut self.len)
    }

    /// Takes the first entry out.
    pub(super) fn pop_first(&mut self) -> Option<Box<Entry>> {
        Self::remove_at(&mut self.tree.front_mut(), &mut self.len)
    }

    fn remove_at(at: &mut CursorMut<'_, ByStart>, len: &mut u64) -> Option<Box<Entry>> {
        let removed = at.remove();
        *len -= u64::from(removed.is_some());
        removed
    }

    /// Takes the entries out that are not to be kept.
    pub(super) fn retain(&mut self, keep: impl Fn(&Entry) -> bool) {
        let mut at = self.tree.front_mut();
        while let Some(entry) = at.get() {
            if keep(entry) {
                at.move_next();
            } else {
                drop(Self::remove_at(&mut at, &mut self.len));
            }
        }
    }

    /// Shows `f` at most `most` entries, one after the other, as [`Singles::visit`] does. Returns whether there may be more to show.
    fn visit(&mut self, from: &mut Bound<Iova>, most: usize, f: &mut impl FnMut(&Entry) -> Look) -> bool {
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
    map: Mutex<Map>,
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
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Map) -> R) -> R {
        let mut map = self.map.lock();
        let result = f(&mut map);
        self.count.store(map.len, Ordering::Relaxed);
        result
    }

    /// Shows `f` one entry after the other, until it has seen enough. Takes the lock, and has a CPU
    /// lent, for 64 entries at a time, so that neither is held for long. What comes or goes
    /// meanwhile may be left out. Begins at `from`, and leaves there where to go on.
    pub(super) fn visit<P: Platform>(
        &self,
        platform: &P,
        from: &mut Bound<Iova>,
        mut f: impl FnMut(&Entry) -> Look,
    ) {
        let mut slice = |map: &mut Map| map.visit(from, SLICE, &mut f);
        while self.count() > 0 && platform.with_cpu(|_| self.with(&mut slice)) {}
    }
}

/// Finds the mapping of `len` bytes at `iova` (of any length, for `None`), in the granules `range`,
/// among those that have not ended. Returns `None` where the map knows nothing of these addresses:
/// the domain may. The caller with this `number`, if there is one, has the mapping in hand then; one of a `group` gets no
/// mapping of another.
pub(super) fn find(
    map: &Map,
    range: IovaRange,
    iova: Iova,
    len: Option<u64>,
    (number, group): (Option<u64>, Option<u64>),
) -> Result<Option<Shared<Single>>, DmaUnmapError> {
    let Some(entry) = map.noted(range) else { return Ok(None) };
    // Its addresses are in use: only the whole of it may be named.
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

/// A copy of `list`.
pub(super) fn remember(list: &[PhysSegment]) -> Result<Vec<PhysSegment>, DmaMapError> {
    let mut copy = Vec::new();
    let pieces = list.len();
    copy.try_reserve_exact(pieces).map_err(|_| DmaMapError::OutOfMemory)?;
    copy.extend_from_slice(list);
    Ok(copy)
}
