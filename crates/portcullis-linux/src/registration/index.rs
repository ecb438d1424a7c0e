//! The entries sorted by start and size, to find entries that cover a range, and all that overlap it.
//!
//! Entries may overlap in any way. In one ordered set, a search for overlaps would have to begin as far before the range as the longest
//! entry is long. So the set is divided by permission and by size class: the entries of one class are less than twice as long as each
//! other, so each search begins at most two of its own lengths before the range.

use std::collections::BTreeSet;
use std::ops::Bound;

use portcullis::addr::{Permissions, PhysAddr, PhysSegment};

const KINDS: usize = 3;

/// Size classes of each kind: from one power of two to the next.
const CLASSES: usize = 64;

/// Entries of a class that a search for a covering one visits. If more of them begin before the range and do not reach its end, they
/// overlap heavily. Finding none is then right often enough, and otherwise the range is mapped once more.
const NEAREST: usize = 8;

/// A range of bytes, first and last, and the access to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    first: u64,
    last: u64,
    permissions: Permissions,
}

impl Span {
    /// Returns `None` for an empty range, and for one that runs past the last address.
    pub(super) fn new(memory: PhysSegment, permissions: Permissions) -> Option<Self> {
        let last = memory.phys.checked_add(memory.len.checked_sub(1)?)?;
        Some(Self { first: memory.phys.get(), last: last.get(), permissions })
    }

    pub(super) fn memory(&self) -> PhysSegment {
        // No `u64` holds the length of all 2^64 bytes, and no segment of memory has it either.
        PhysSegment { phys: PhysAddr::new(self.first), len: (self.last - self.first).wrapping_add(1) }
    }

    pub(super) fn permissions(&self) -> Permissions {
        self.permissions
    }

    /// A hash: it differs for ranges of one length, and mostly for others.
    #[inline]
    pub(super) fn mixed(&self) -> u64 {
        self.first ^ (self.last - self.first).rotate_left(40) ^ (self.kind() as u64) << 62
    }

    /// Returns whether both share a byte, whatever the access.
    pub(super) fn touches(&self, other: &Self) -> bool {
        self.first <= other.last && self.last >= other.first
    }

    fn kind(&self) -> usize {
        match (self.permissions.allows(Permissions::READ), self.permissions.allows(Permissions::WRITE)) {
            (true, false) => 0,
            (false, _) => 1,
            (true, true) => 2,
        }
    }

    fn class(&self) -> usize {
        // By the distance of the last byte, because no `u64` holds the length of all 2^64 bytes.
        (self.last - self.first).checked_ilog2().map_or(0, |log| log as usize)
    }

    fn key(&self, slot: u32) -> Key {
        let group = self.kind() * CLASSES + self.class();
        Key { group: group as u8, first: self.first, last: self.last, slot }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    group: u8,
    first: u64,
    last: u64,
    slot: u32,
}

impl Key {
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }

    /// The bounds of `group` for entries that begin from `first` to `last`.
    fn bounds(group: usize, first: u64, last: u64) -> (Self, Self) {
        let group = group as u8;
        (Self { group, first, last: 0, slot: 0 }, Self { group, first: last, last: u64::MAX, slot: u32::MAX })
    }
}

/// Entry numbers, by range.
#[derive(Debug)]
pub(super) struct Index {
    keys: BTreeSet<Key>,
    /// Entries in each class of each kind.
    counts: [u32; KINDS * CLASSES],
}

impl Index {
    pub(super) fn new() -> Self {
        Self { keys: BTreeSet::new(), counts: [0; KINDS * CLASSES] }
    }

    /// O(log n). Allocates.
    pub(super) fn insert(&mut self, span: &Span, slot: u32) {
        let key = span.key(slot);
        if self.keys.insert(key) {
            self.counts[usize::from(key.group)] += 1;
        }
    }

    /// O(log n).
    pub(super) fn remove(&mut self, span: &Span, slot: u32) {
        let key = span.key(slot);
        if self.keys.remove(&key) {
            self.counts[usize::from(key.group)] -= 1;
        }
    }

    /// Returns the first entry of exactly `span` that `wanted` accepts. O(log n), and O(1) for each such entry.
    pub(super) fn exact(&self, span: &Span, wanted: impl Fn(u32) -> bool) -> Option<u32> {
        let same = self.keys.range(span.key(0)..=span.key(u32::MAX));
        same.map(Key::slot).find(|slot| wanted(*slot))
    }

    /// Returns an entry that covers `span` and that `wanted` accepts. O(log n) for each used size class from that of `span` on; visits the
    /// [`NEAREST`] entries in each.
    pub(super) fn covering(&self, span: &Span, wanted: impl Fn(u32) -> bool) -> Option<u32> {
        (span.class()..CLASSES).find_map(|class| {
            let group = span.kind() * CLASSES + class;
            if self.counts[group] == 0 {
                return None;
            }
            let (first, last) = Key::bounds(group, span.first.saturating_sub(longest(class)), span.first);
            let reaches = |key: &&Key| key.last >= span.last && wanted(key.slot);
            self.keys.range(first..=last).rev().take(NEAREST).find(reaches).map(Key::slot)
        })
    }

    /// Returns the next entry after `after` that shares a byte with `span`, with any permissions. O(log n) for each used class of each
    /// kind, and O(1) for each entry that begins less than two of its own lengths before `span` and ends there, too.
    pub(super) fn overlapping(&self, span: &Span, after: Option<Key>) -> Option<Key> {
        let begin = after.map_or(0, |key| usize::from(key.group));
        (begin..self.counts.len()).find_map(|group| {
            if self.counts[group] == 0 {
                return None;
            }
            let distance = longest(group % CLASSES);
            let (first, last) = Key::bounds(group, span.first.saturating_sub(distance), span.last);
            let lower = match after {
                Some(after) if after >= first => Bound::Excluded(after),
                _ => Bound::Included(first),
            };
            if after.is_some_and(|after| after >= last) {
                return None;
            }
            self.keys.range((lower, Bound::Included(last))).find(|key| key.last >= span.first).copied()
        })
    }
}

/// The largest distance between the last and the first byte of an entry of `class`.
fn longest(class: usize) -> u64 {
    u64::MAX >> (CLASSES - 1 - class)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first: u64, last: u64, permissions: Permissions) -> Span {
        Span { first, last, permissions }
    }

    fn all_overlapping(index: &Index, wanted: &Span) -> Vec<u32> {
        let mut found = Vec::new();
        let mut after = None;
        while let Some(key) = index.overlapping(wanted, after) {
            found.push(key.slot());
            after = Some(key);
        }
        found.sort_unstable();
        found
    }

    #[test]
    fn searches_find_what_a_plain_search_finds() {
        let kinds = [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE];
        let edges = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 1 << 40, u64::MAX - 8, u64::MAX - 1, u64::MAX];
        let mut spans = Vec::new();
        for (n, first) in edges.iter().enumerate() {
            for last in &edges[n..] {
                spans.push(span(*first, *last, kinds[spans.len() % 3]));
            }
        }
        // Only every other entry is in the index, so that a search can miss.
        let mut index = Index::new();
        let inside = |slot: &u32| slot.is_multiple_of(2);
        (0..spans.len() as u32).for_each(|slot| index.insert(&spans[slot as usize], slot));
        (0..spans.len() as u32).filter(|slot| !inside(slot)).for_each(|slot| {
            index.remove(&spans[slot as usize], slot);
        });
        for wanted in &spans {
            let slots = || (0..spans.len() as u32).filter(inside);
            let overlapping: Vec<u32> =
                slots().filter(|slot| spans[*slot as usize].touches(wanted)).collect();
            assert_eq!(all_overlapping(&index, wanted), overlapping, "{wanted:?}");
            let exact = slots().find(|slot| spans[*slot as usize] == *wanted);
            assert_eq!(index.exact(wanted, |_| true), exact);
            if let Some(found) = index.covering(wanted, |_| true) {
                let found = (&spans[found as usize], inside(&found));
                assert!(found.0.first <= wanted.first && found.0.last >= wanted.last && found.1);
                assert_eq!(found.0.permissions, wanted.permissions);
            }
        }
    }

    #[test]
    fn a_large_entry_is_found_behind_small_ones_and_only_with_its_own_permissions() {
        let mut index = Index::new();
        index.insert(&span(0, (1 << 30) - 1, Permissions::READ), 0);
        (1..100_u32).for_each(|slot| {
            let first = u64::from(slot) << 12;
            index.insert(&span(first, first + 4095, Permissions::READ), slot);
        });
        assert_eq!(index.covering(&span(0x5_0800, 0x5_17ff, Permissions::READ), |_| true), Some(0));
        assert_eq!(index.covering(&span(0x5_0800, 0x5_08ff, Permissions::READ), |_| true), Some(0x50));
        assert_eq!(index.covering(&span(0x5_0800, 0x5_17ff, Permissions::READ_WRITE), |_| true), None);
        assert_eq!(index.covering(&span(1 << 30, 1 << 30, Permissions::READ), |_| true), None);
        assert_eq!(index.covering(&span(0x5_0800, 0x5_17ff, Permissions::READ), |slot| slot > 0), None);
    }
}
