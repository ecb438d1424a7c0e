//! The lowest tables that a CPU was in last, so that mapping or unmapping there again needs no
//! walk. A CPU never uses a remembered table that may have been freed.
//!
//! Memory ordering. A CPU uses the tables that it remembers only while the page table's *stamp* is
//! the one under which it found them; it looks at both inside a section. It reads the stamp before
//! the walk that finds a table (acquire), and [`reclaim`](super::reclaim) and
//! [`replace`](super::replace) change the stamp between marking tables and the first wait for the
//! sections (release). For a table that is marked there are two kinds of sections then:
//!
//! - One that the wait sees. It may use a table that was found under the old stamp; the changes
//!   that it makes there are seen when the table is looked at, or copied, after the wait.
//! - One that begins after the wait's barrier. It sees the new stamp, and so uses no table that was
//!   found before; to find a table it walks, and a CPU that sees the new stamp sees the marks that
//!   were stored before it.
//!
//! So a table remembered under the new stamp was marked only if it was found without its mark
//! afterwards: it was kept, or put back, which takes it out of those to be freed. The next attempt
//! to free it begins with a new stamp.
//!
//! A walk that passes a table which took a large page's place ([`Format::SPLIT`]) is not
//! remembered: the short way does not unmap there. Only `replace`, which changes the stamp, turns a
//! table into such a one later.

use super::format::{Format, Layout};
use super::place::{Last, Near, Position};
use super::table::PageTable;
use crate::addr::PhysAddr;
use crate::platform::Frames;
use crate::sync::Ordering;

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Returns the position of the entry of `iova`, which lies inside the aperture, in a lowest
    /// table, if there is one, and no entry on the way there has any bit of `closed`, which may
    /// hold only [`MARK`](Format::MARK) and [`SPLIT`](Format::SPLIT).
    ///
    /// Takes no walk in the tables of the CPU's last turns.
    #[inline]
    pub(super) fn lowest(&self, near: &Near, iova: u64, closed: u64) -> Option<Position> {
        // Acquire, and before any step down, as the module says.
        let stamp = self.stamp.load(Ordering::Acquire);
        let table = match near.find(stamp, Last::region(self.format(), iova)) {
            Some(table) => table,
            None => self.find_lowest(near, stamp, iova, closed)?,
        };
        Some(Position { table, level: 1, index: self.format().index(iova, 1) })
    }

    /// Returns the lowest table for `iova`, under the conditions of [`lowest`](Self::lowest); if
    /// that is the root, the part of it that has the entry.
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

    /// Makes every CPU forget the tables that it remembers. Only the one CPU that takes tables out
    /// of their places calls this.
    pub(super) fn forget_near(&self) {
        // Release: a CPU that sees it sees the marks. It never is 0: 2^64 calls do not happen.
        self.stamp.fetch_add(1, Ordering::Release);
    }
}
