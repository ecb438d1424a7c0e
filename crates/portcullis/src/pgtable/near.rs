//! The lowest tables that a CPU was in last: what is mapped or unmapped there again needs no walk.
//!
//! Memory ordering. What a CPU remembers is used only while the page table's *stamp* is the one under which it was
//! found; both are looked at inside a section. The stamp is read before the walk that finds a table (acquire), and
//! changed by [`reclaim`](super::reclaim) and [`replace`](super::replace) between marking tables and the first wait for
//! the sections (release). For a table that is marked there are two kinds of sections then:
//!
//! - One that the wait sees. It may use a table that was found under the old stamp; what it changes there is seen when the
//!   table is looked at, or copied, after the wait.
//! - One that begins after the wait's barrier. It sees the new stamp, and so uses nothing that was found before; to find a
//!   table it walks, and who sees the new stamp sees the marks that were stored before it.
//!
//! So what is remembered under the new stamp is a marked table only if that was found without its mark afterwards: kept,
//! or put back, which takes it out of what is freed. The next attempt to free it begins with a new stamp.
//!
//! A walk that passes a table which took a large page's place ([`Format::SPLIT`]) is not remembered: an unmap there is not
//! done by the short way. No table becomes one later but by `replace`, which changes the stamp.

use super::format::{Format, Layout};
use super::map::Last;
use super::table::PageTable;
use super::walk::Position;
use crate::addr::PhysAddr;
use crate::percpu::LocalU64;
use crate::platform::Frames;
use crate::sync::Ordering;

/// How many tables a CPU remembers, each of the regions whose numbers are alike modulo this.
const TABLES: usize = 4;

/// What one CPU remembers.
#[derive(Debug, Default)]
pub(super) struct Near {
    /// That of the page table when the tables were found; 0, which is none, before.
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

    /// The table of `region`, if it was found under `stamp`.
    #[inline]
    fn find(&self, stamp: u64, region: u64) -> Option<PhysAddr> {
        let table = self.table(region);
        let is_it = self.stamp.get() == stamp && table.region.get() == region;
        is_it.then(|| PhysAddr::new(table.table.get()))
    }

    /// Remembers `last`, which was found under `stamp`, and forgets what was found under another.
    fn remember(&self, stamp: u64, last: Last) {
        if self.stamp.get() != stamp {
            self.tables.iter().for_each(|table| table.region.set(Last::NONE.region));
            self.stamp.set(stamp);
        }
        let Table { region, table } = self.table(last.region);
        region.set(last.region);
        table.set(last.table.get());
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Where `iova`, which lies inside the aperture, has its entry in a lowest table, if there is one, and no entry on the
    /// way there has any bit of `closed`, of which [`MARK`](Format::MARK) and [`SPLIT`](Format::SPLIT) are all that there are.
    ///
    /// No walk in the tables of the CPU's last turns.
    #[inline]
    pub(super) fn lowest(&self, near: &Near, iova: u64, closed: u64) -> Option<Position> {
        // Acquire, and before any step down: see above.
        let stamp = self.stamp.load(Ordering::Acquire);
        let table = match near.find(stamp, Last::region(self.format(), iova)) {
            Some(table) => table,
            None => self.find_lowest(near, stamp, iova, closed)?,
        };
        Some(Position { table, level: 1, index: self.format().index(iova, 1) })
    }

    /// The lowest table for `iova`, as [`lowest`](Self::lowest) says: the part of it that has the entry, where it is the root.
    #[cold]
    #[inline(never)]
    fn find_lowest(&self, near: &Near, stamp: u64, iova: u64, closed: u64) -> Option<PhysAddr> {
        let found = |at| Last::new(self.format(), iova, at);
        let Some(last) = self.walk_to(iova, 1, X::MARK | X::SPLIT).map(found) else {
            return self.walk_to(iova, 1, closed).map(|at| found(at).table);
        };
        near.remember(stamp, last);
        Some(last.table)
    }

    /// Has every CPU forget what it remembers. For the one CPU that takes tables out of their places.
    pub(super) fn forget_near(&self) {
        // Release: who sees it sees the marks. It never is 0: 2^64 calls do not happen.
        self.stamp.fetch_add(1, Ordering::Release);
    }
}
