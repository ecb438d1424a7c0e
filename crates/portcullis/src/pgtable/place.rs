//! Positions of entries, and the lowest tables that a CPU remembers. [`walk`](super::walk) and [`near`](super::near)
//! say how long a position may be used.

use super::format::{Format, Layout};
use crate::addr::PhysAddr;
use crate::percpu::LocalU64;

#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    pub table: PhysAddr,
    pub level: u32,
    /// The number of the entry in the table, below 2^18.
    pub index: usize,
}

/// The lowest table of a walk, remembered for neighbouring pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Last {
    /// The address divided by the bytes that a lowest table translates.
    pub region: u64,
    /// The table; in a root of several frames, the table-sized part that holds the entry.
    pub table: PhysAddr,
}

impl Last {
    pub(super) const NONE: Self = Self { region: u64::MAX, table: PhysAddr::new(0) };

    pub(super) fn new<X: Format>(format: &X, iova: u64, at: Position) -> Self {
        let part = (at.index >> X::INDEX_BITS) as u64;
        let table = PhysAddr::new(at.table.get() + (part << X::GRANULE_SHIFT));
        Self { region: Self::region(format, iova), table }
    }

    #[inline]
    pub(super) fn region<X: Format>(format: &X, iova: u64) -> u64 {
        iova >> format.shift(2)
    }

    /// Returns the position of the entry of `iova`, which lies inside the aperture, if it is in this table.
    #[inline]
    pub(super) fn position<X: Format>(&self, format: &X, iova: u64) -> Option<Position> {
        let at = Position { table: self.table, level: 1, index: format.index(iova, 1) };
        (self.region == Self::region(format, iova)).then_some(at)
    }
}

/// Tables that a CPU remembers, direct-mapped by region.
const TABLES: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Near {
    /// The generation of the page table under which they were found; 0, which no page table has, at first.
    stamp: LocalU64,
    tables: [Table; TABLES],
}

#[derive(Debug, Default)]
struct Table {
    region: LocalU64,
    table: LocalU64,
}

impl Near {
    #[inline]
    fn table(&self, region: u64) -> &Table {
        &self.tables[region as usize % TABLES]
    }

    #[inline]
    pub(super) fn find(&self, stamp: u64, region: u64) -> Option<PhysAddr> {
        let table = self.table(region);
        let is_it = self.stamp.get() == stamp && table.region.get() == region;
        is_it.then(|| PhysAddr::new(table.table.get()))
    }

    /// Remembers `last`, which was found under `stamp`, and drops tables of another generation.
    pub(super) fn remember(&self, stamp: u64, last: Last) {
        if self.stamp.get() != stamp {
            self.tables.iter().for_each(|table| table.region.set(Last::NONE.region));
            self.stamp.set(stamp);
        }
        let Table { region, table } = self.table(last.region);
        region.set(last.region);
        table.set(last.table.get());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn tables_are_remembered_until_the_stamp_changes() {
        let near = Near::default();
        let last = |region| Last { region, table: PhysAddr::new(region << 12) };
        let found = |stamp| [1, 2, 5].map(|region| near.find(stamp, region).is_some());
        assert_eq!(found(7), [false; 3]);
        near.remember(7, last(1));
        near.remember(7, last(2));
        assert_eq!(near.find(7, 1), Some(last(1).table));
        assert_eq!((found(7), found(8)), ([true, true, false], [false; 3]));
        // Of two regions with one place the last is remembered.
        near.remember(7, last(1 + TABLES as u64));
        assert_eq!(found(7), [false, true, true]);
        near.remember(8, last(2));
        assert_eq!((found(7), found(8)), ([false; 3], [false, true, false]));
    }
}
