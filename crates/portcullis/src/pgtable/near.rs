//! The lowest tables that a CPU used last, so that mapping or unmapping there again needs no walk. A CPU never uses a
//! remembered table that may have been freed.
//!
//! Memory ordering. A CPU uses the tables that it remembers only while the page table's *generation* (`stamp`) is the
//! one under which it found them. It loads the generation inside the section, before the walk that finds a table
//! (acquire). [`reclaim`](super::reclaim) and [`replace`](super::replace) increment it after they have set busy bits
//! and before the first grace period (release). For a busy table there are then two kinds of sections:
//!
//! - The grace period covers the section. The section may use a table that it found under the old generation; the
//!   caller looks at the table, or copies it, after the grace period, and so sees the section's changes.
//! - The section begins after the grace period's barrier. It sees the new generation, so it uses no table that was
//!   found before; it walks, and a CPU that sees the new generation sees the busy bits that were stored before it.
//!
//! So a table that is remembered under the new generation was found without its busy bit afterwards: it stays, or was
//! put back, and is not among those to be freed. The next attempt to free it begins with a new generation.
//!
//! A CPU does not remember a table that took a large page's place ([`Format::SPLIT`]), as the fast path does not unmap
//! there. Only `replace` sets this bit for a table that is in use, and it increments the generation.

use super::format::{Format, Layout};
use super::place::{Last, Near, Position};
use super::table::PageTable;
use crate::addr::PhysAddr;
use crate::platform::Frames;
use crate::sync::Ordering;

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Returns the position of the entry of `iova`, which lies inside the aperture, in a lowest table, if there is one,
    /// and no entry on the way has any bit of `closed`, which may hold only [`MARK`](Format::MARK) and
    /// [`SPLIT`](Format::SPLIT). Takes no walk in tables that the CPU remembers.
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

    /// Walks for [`lowest`](Self::lowest). If the lowest table is the root, returns the part of it that has the entry.
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

    /// Makes the tables that CPUs remember stale. Only the one CPU that takes tables out of their places calls this.
    pub(super) fn forget_near(&self) {
        // Release: a CPU that sees it sees the busy bits. It never becomes 0: 2^64 calls do not happen.
        self.stamp.fetch_add(1, Ordering::Release);
    }
}
