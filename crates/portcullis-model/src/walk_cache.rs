//! The paging-structure caches: where the tables are that a walk would find on its way down.
//!
//! One cache per level of table (1 is the leaf level), keyed by domain and the part of the address that leads
//! to the table. A walk starts at the lowest table that is cached, so a hit at level 1 leaves one entry to
//! read. An entry outlives the table it points to unless an invalidation removes it: that is how a table
//! freed too early is walked.
//!
//! Cost: a lookup is O(levels x ways); removing a range is O(min(tables x ways, capacity)) per level.

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::DomainId;
use portcullis::pgtable::vtd;

use crate::sets::Sets;
use crate::walker::TablePointer;

const WAYS: usize = 4;
/// The root's address is in the context, so the highest table that is cached is one below a five-level root.
const HIGHEST: u32 = vtd::MAX_LEVELS - 1;

#[derive(Debug, Clone, Copy)]
struct Entry {
    prefix: u64,
    table: PhysAddr,
    domain: DomainId,
    permissions: Permissions,
}

/// The caches of all levels.
#[derive(Debug)]
pub struct WalkCache {
    levels: [Sets<Entry>; HIGHEST as usize],
}

impl WalkCache {
    /// Empty caches of `entries` for each level, in sets of 4. They never allocate again.
    pub fn new(entries: usize) -> Self {
        let placeholder =
            Entry { prefix: 0, table: PhysAddr::new(0), domain: DomainId(0), permissions: Permissions::READ };
        Self { levels: std::array::from_fn(|_| Sets::new(entries, WAYS, placeholder)) }
    }

    /// How many tables of `level` are cached.
    pub fn len(&self, level: u32) -> usize {
        self.at(level).map_or(0, Sets::len)
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(|level| level.len() == 0)
    }

    /// The lowest cached table on the way to `iova`, below a root at level `levels`; it becomes the most
    /// recently used of its set.
    pub fn lookup(&mut self, domain: DomainId, iova: Iova, levels: u32) -> Option<TablePointer> {
        let (level, slot) = self.find(domain, iova, levels)?;
        let sets = &mut self.levels[level as usize - 1];
        sets.touch(slot);
        Some(pointer(level, sets.get(slot)))
    }

    /// The same; the order of replacement stays as it is.
    pub fn peek(&self, domain: DomainId, iova: Iova, levels: u32) -> Option<TablePointer> {
        let (level, slot) = self.find(domain, iova, levels)?;
        Some(pointer(level, self.levels[level as usize - 1].get(slot)))
    }

    /// Remembers that `pointer` is on the way to `iova`. A level that is not cached is ignored.
    pub fn insert(&mut self, domain: DomainId, iova: Iova, pointer: TablePointer) {
        let TablePointer { level, table, permissions } = pointer;
        if !(1..=HIGHEST).contains(&level) {
            return;
        }
        let prefix = prefix(iova, level);
        let entry = Entry { prefix, table, domain, permissions };
        self.levels[level as usize - 1]
            .insert(prefix, entry, |other| other.prefix == prefix && other.domain == domain);
    }

    /// Forgets the tables of `domain` that lead to a part of `range`.
    pub fn invalidate_range(&mut self, domain: DomainId, range: IovaRange) {
        for (level, sets) in (1..).zip(&mut self.levels) {
            let prefixes = prefix(range.start(), level)..=prefix(range.last(), level);
            let gone = |entry: &Entry| entry.domain == domain && prefixes.contains(&entry.prefix);
            sets.remove_numbers(prefixes.clone(), gone, |_| ());
        }
    }

    /// Forgets every table of `domain`.
    pub fn invalidate_domain(&mut self, domain: DomainId) {
        for sets in &mut self.levels {
            sets.remove(|entry| entry.domain == domain, |_| ());
        }
    }

    fn at(&self, level: u32) -> Option<&Sets<Entry>> {
        self.levels.get((level as usize).checked_sub(1)?)
    }

    fn find(&self, domain: DomainId, iova: Iova, levels: u32) -> Option<(u32, usize)> {
        (1..levels.min(HIGHEST + 1)).find_map(|level| {
            let prefix = prefix(iova, level);
            let is = |entry: &Entry| entry.prefix == prefix && entry.domain == domain;
            Some((level, self.levels[level as usize - 1].find(prefix, is)?))
        })
    }
}

/// The part of an address that a walk has used up when it reaches the table at `level`.
fn prefix(iova: Iova, level: u32) -> u64 {
    iova.get() >> vtd::page_size(level + 1).shift()
}

fn pointer(level: u32, entry: Entry) -> TablePointer {
    TablePointer { level, table: entry.table, permissions: entry.permissions }
}
