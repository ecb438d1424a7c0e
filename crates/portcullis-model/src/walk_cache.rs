//! The paging-structure caches: the tables on the path of a walk.
//!
//! One cache per level of table (1 is the leaf level), keyed by domain and the part of the address that leads to the table: as many of its
//! bits as the tables' format says. A walk starts at the lowest cached table, so a hit at level 1 leaves one entry to read. An entry
//! outlives its table unless an invalidation removes it: so a table that was freed too early is walked.
//!
//! Cost: a lookup is O(levels x ways); removing a range is O(min(tables x ways, capacity)) per level, for each granule in use.

use portcullis::addr::{DomainId, Iova, IovaRange, PhysAddr};

use crate::sets::{Sets, bits};
use crate::walker::{Geometry, Rights, TableFormat, TablePointer};

const WAYS: usize = 4;
/// The context has the root's address, so the highest cached table is one below a six-level root.
const HIGHEST: u32 = 5;

#[derive(Debug, Clone, Copy)]
struct Entry {
    prefix: u64,
    table: PhysAddr,
    domain: DomainId,
    rights: Rights,
    /// The address is shifted by this to make `prefix`.
    shift: u8,
}

/// The cache of one level.
#[derive(Debug)]
struct Level {
    sets: Sets<Entry>,
    /// Bit n: entries with a shift of n were inserted. Granules differ, so there may be several.
    shifts: u64,
}

/// The caches of all levels.
#[derive(Debug)]
pub struct WalkCache {
    levels: [Level; HIGHEST as usize],
}

impl WalkCache {
    /// Empty caches of `entries` for each level, in sets of 4, at their full allocation.
    pub fn new(entries: usize) -> Self {
        let placeholder =
            Entry { prefix: 0, table: PhysAddr::new(0), domain: DomainId(0), rights: Rights::ALL, shift: 0 };
        let level = |_| Level { sets: Sets::new(entries, WAYS, placeholder), shifts: 0 };
        Self { levels: std::array::from_fn(level) }
    }

    /// Cached tables of `level`.
    pub fn len(&self, level: u32) -> usize {
        self.at(level).map_or(0, |level| level.sets.len())
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(|level| level.sets.len() == 0)
    }

    /// The lowest cached table on the path to `iova`, below the root of tables of `format`; it becomes the most recently used of its set.
    pub fn lookup(&mut self, domain: DomainId, iova: Iova, format: TableFormat) -> Option<TablePointer> {
        let (level, slot) = self.find(domain, iova, format)?;
        let sets = &mut self.levels[level as usize - 1].sets;
        sets.touch(slot);
        Some(pointer(level, sets.get(slot)))
    }

    /// The same without effect on the LRU order.
    pub fn peek(&self, domain: DomainId, iova: Iova, format: TableFormat) -> Option<TablePointer> {
        let (level, slot) = self.find(domain, iova, format)?;
        Some(pointer(level, self.levels[level as usize - 1].sets.get(slot)))
    }

    /// Caches `pointer` on the path to `iova`. Ignores the root, and a level that does not exist.
    pub fn insert(&mut self, domain: DomainId, iova: Iova, format: TableFormat, pointer: TablePointer) {
        let TablePointer { level, table, rights } = pointer;
        let geometry = format.geometry();
        if !(1..geometry.levels.min(HIGHEST + 1)).contains(&level) {
            return;
        }
        let key = Key::new(domain, iova, geometry, level);
        let entry = Entry { prefix: key.prefix, table, domain, rights, shift: key.shift };
        let Level { sets, shifts } = &mut self.levels[level as usize - 1];
        *shifts |= 1 << key.shift;
        sets.insert(key.prefix, entry, |other| key.is_of(other));
    }

    /// Removes the tables of `domain` on the path to a part of `range`.
    pub fn invalidate_range(&mut self, domain: DomainId, range: IovaRange) {
        for Level { sets, shifts } in &mut self.levels {
            for shift in bits(*shifts) {
                let prefixes = range.start().get() >> shift..=range.last().get() >> shift;
                let gone = |entry: &Entry| {
                    entry.domain == domain
                        && u32::from(entry.shift) == shift
                        && prefixes.contains(&entry.prefix)
                };
                sets.remove_numbers(prefixes.clone(), gone, |_| ());
            }
        }
    }

    /// Invalidates all entries of `domain`.
    pub fn invalidate_domain(&mut self, domain: DomainId) {
        for level in &mut self.levels {
            level.sets.remove(|entry| entry.domain == domain, |_| ());
        }
    }

    fn at(&self, level: u32) -> Option<&Level> {
        self.levels.get((level as usize).checked_sub(1)?)
    }

    fn find(&self, domain: DomainId, iova: Iova, format: TableFormat) -> Option<(u32, usize)> {
        let geometry = format.geometry();
        (1..geometry.levels.min(HIGHEST + 1)).find_map(|level| {
            let key = Key::new(domain, iova, geometry, level);
            let sets = &self.levels[level as usize - 1].sets;
            Some((level, sets.find(key.prefix, |entry| key.is_of(entry))?))
        })
    }
}

/// The key of a table.
#[derive(Debug, Clone, Copy)]
struct Key {
    domain: DomainId,
    prefix: u64,
    shift: u8,
}

impl Key {
    /// Of the table at `level`, at most one below the root.
    #[inline]
    fn new(domain: DomainId, iova: Iova, geometry: Geometry, level: u32) -> Self {
        // Below the root of at most six levels a shift is less than 64, if the tables' dimensions are valid.
        let shift = geometry.shift(level + 1) % u64::BITS;
        Self { domain, prefix: iova.get() >> shift, shift: shift as u8 }
    }

    fn is_of(&self, entry: &Entry) -> bool {
        entry.prefix == self.prefix && entry.domain == self.domain && entry.shift == self.shift
    }
}

fn pointer(level: u32, entry: Entry) -> TablePointer {
    TablePointer { level, table: entry.table, rights: entry.rights }
}
