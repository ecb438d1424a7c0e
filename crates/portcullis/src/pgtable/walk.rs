//! Walks, and the installation of tables. A CPU that follows an entry finds a complete table, which is not freed while
//! the CPU's section lasts.
//!
//! Memory ordering. A CPU that follows an entry must see the table zeroed, and the entries that others stored there
//! before: tables are installed with `AcqRel` and followed with `Acquire`. A leaf is stored with `Release`, so that
//! devices see everything that the caller wrote before (the buffer's contents, a table below). Clearing a leaf needs no
//! order of its own: it takes effect by the invalidation that follows, and the invalidation queue orders itself after
//! earlier stores.
//!
//! CPUs follow tables only inside a [`Section`](crate::percpu::Section): a table is freed after a grace period for all
//! sections that might have found it. The tables that a CPU remembers of an earlier section become [stale](super::near)
//! before that.

use super::format::{Entry, Format, Layout, is_broken, put_back};
use super::place::Position;
use super::table::{Conflict, NewTable, PageTable};
use crate::addr::PhysAddr;
use crate::guard::Guard;
use crate::platform::Frames;
use crate::sync::{AtomicU64, Ordering};

impl<F: Frames, X: Format> PageTable<F, X> {
    #[inline]
    pub(super) fn top(&self, iova: u64) -> Position {
        let level = self.format().levels();
        Position { table: self.root(), level, index: (iova >> self.root_shift) as usize }
    }

    #[inline]
    pub(super) fn step(&self, iova: u64, table: PhysAddr, level: u32) -> Position {
        Position { table, level, index: self.format().index(iova, level) }
    }

    /// Returns the position of the entry of `iova` in a table of `level`, if there is one, and no entry on the way has
    /// any bit of `closed`. Called inside a section.
    #[inline]
    pub(super) fn walk_to(&self, iova: u64, level: u32, closed: u64) -> Option<Position> {
        let mut at = self.top(iova);
        while at.level > level {
            let entry = self.word(at).load(Ordering::Acquire);
            match self.format().decode(entry, at.level) {
                Entry::Table { table, level } if entry & closed == 0 => at = self.step(iova, table, level),
                _ => return None,
            }
        }
        (at.level == level).then_some(at)
    }

    /// Returns the value to store for `value`, the entry of a table that [`show`](Self::show) shows next. A
    /// non-coherent walker does not see the table's contents yet, so the entry is busy until then, and no CPU relies on
    /// the tables below.
    pub(super) const fn unseen(value: u64) -> u64 {
        if F::COHERENT { value } else { value | X::MARK }
    }

    /// Shows the walker the table to which `word` leads since [`unseen`](Self::unseen) was stored there. If cleaning
    /// panics, it is tried again, as no other CPU clears the busy bit.
    pub(super) fn show(&self, word: &AtomicU64, value: u64) {
        if !F::COHERENT {
            let show = || {
                self.clean(core::slice::from_ref(word));
                word.store(value, Ordering::Release);
                self.clean(core::slice::from_ref(word));
            };
            let again = Guard::new(show);
            show();
            again.done();
        }
    }

    /// Makes `entry` lead to a table: to a new, empty one of `level`, or to the one that is [set aside](super::reclaim)
    /// there, unless another CPU has changed the entry meanwhile. Returns the entry's value, which leads to no table if
    /// the entry is in other use.
    #[cold]
    pub(super) fn install(&self, entry: &AtomicU64, level: u32) -> Result<u64, Conflict> {
        let mut seen = entry.load(Ordering::Acquire);
        // Ends when the entry is present or a break-before-make placeholder.
        while seen & X::PRESENT == 0 && !is_broken::<X>(seen) {
            let new = if seen == 0 { Some(self.new_table(level)?) } else { None };
            let value =
                new.as_ref().map_or(put_back::<X>(seen), |new| self.format().table(new.table(), level));
            let unseen = Self::unseen(value);
            match entry.compare_exchange(seen, unseen, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    new.map(NewTable::keep);
                    self.show(entry, value);
                    return Ok(value);
                }
                Err(other) => seen = other,
            }
        }
        Ok(seen)
    }
}
