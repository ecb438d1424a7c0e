//! Giving back tables that have become empty.
//!
//! A table is given back in five steps, up to 64 tables at a time:
//!
//! 1. the entry that leads to it is *marked*, with a bit that hardware ignores: whoever wants to enter
//!    something below waits, outside its section;
//! 2. all sections that might have passed the entry before it was marked are waited for: from here on nobody
//!    writes to the table but to clear entries;
//! 3. if the table is empty still, the entry is cleared, else the mark is taken off again;
//! 4. the hardware is made to forget what it has cached of the paging structures;
//! 5. once more all sections are waited for, those that only read; then the table is freed.
//!
//! If the hardware does not confirm step 4, the tables stay out of use until a later call succeeds.

use super::format::{Entry, Format};
use super::table::PageTable;
use super::walk::Position;
use crate::addr::PhysAddr;
use crate::platform::{FRAME_SIZE, Frames, Platform, TABLE_ENTRIES};
use crate::sync::Ordering;

/// Tables that are marked at a time: whoever waits for one waits for these.
const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

/// Tables and the levels they are of: unlinked, and not freed yet.
#[derive(Debug, Default)]
pub(super) struct Unlinked(arrayvec::ArrayVec<(PhysAddr, u32), BATCH>);

/// An entry that leads to a table which was empty.
#[derive(Debug, Clone, Copy)]
struct Marked {
    at: Position,
    entry: u64,
    table: PhysAddr,
    level: u32,
}

impl Unlinked {
    /// Frees the tables, which nobody uses any more. How many frames.
    pub(super) fn free_all<F: Frames, X: Format>(&mut self, owner: &PageTable<F, X>) -> usize {
        let free = |(table, level)| {
            owner.free_table(table, level);
            owner.frames_of(level)
        };
        self.0.drain(..).map(free).sum()
    }
}

/// Puts the list back, also when an invalidation panics.
struct Working<'a, F: Frames, X: Format> {
    table: &'a PageTable<F, X>,
    unlinked: Unlinked,
}

impl<F: Frames, X: Format> Drop for Working<'_, F, X> {
    fn drop(&mut self) {
        *self.table.unlinked().lock() = Some(core::mem::take(&mut self.unlinked));
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Frees every table that is empty, and returns how many bytes that were: 0 also while another call is at
    /// it. `invalidate` makes the hardware forget everything about the address space, paging structures
    /// included, and says whether that worked; it may wait for hardware, and no lock is held meanwhile.
    ///
    /// Looks at all tables: one step for each entry of those above the lowest, and for each of a lowest one up
    /// to the first in use. For each 64 empty tables it waits twice for what other CPUs are at; a map that
    /// meets one of those tables waits meanwhile. The caller holds no slot.
    ///
    /// # Errors
    /// What `invalidate` reports. The tables it was about are out of use, and freed by a later call.
    pub fn reclaim<P: Platform, E>(
        &self,
        platform: &P,
        mut invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        let Some(unlinked) = self.unlinked().lock().take() else {
            return Ok(0);
        };
        let mut work = Working { table: self, unlinked };
        let mut freed = 0;
        loop {
            if !work.unlinked.0.is_empty() {
                invalidate()?;
                self.sections().synchronize(platform);
                let frames = work.unlinked.free_all(self);
                self.count_frames(-(frames as isize));
                freed += frames * FRAME_SIZE as usize;
            }
            let mut marked = arrayvec::ArrayVec::new();
            self.mark_empty(self.root(), self.format().levels(), &mut marked);
            if marked.is_empty() {
                return Ok(freed);
            }
            self.sections().synchronize(platform);
            for Marked { at, entry, table, level } in marked {
                let empty = self.is_empty(table, level);
                let word = self.word(at);
                word.store(if empty { 0 } else { entry }, Ordering::Release);
                self.clean(core::slice::from_ref(word));
                if empty {
                    work.unlinked.0.push((table, level));
                }
            }
            if work.unlinked.0.is_empty() {
                // All of them are in use again: the next call may have more luck.
                return Ok(freed);
            }
        }
    }

    /// Marks the entries of the table at `table`, and of those below it, that lead to empty tables.
    fn mark_empty(&self, table: PhysAddr, level: u32, marked: &mut arrayvec::ArrayVec<Marked, BATCH>) {
        if level == 1 {
            return;
        }
        for index in 0..self.entries_of(level) {
            let at = Position { table, level, index };
            let word = self.word(at);
            let entry = word.load(Ordering::Acquire);
            let Entry::Table { table, level } = self.format().decode(entry, level) else {
                continue;
            };
            self.mark_empty(table, level, marked);
            if marked.is_full() {
                return;
            }
            // A failed exchange means that the hardware has set a bit of its own: another time, then.
            if self.is_empty(table, level)
                && word.compare_exchange(entry, entry | X::MARK, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                self.clean(core::slice::from_ref(word));
                marked.push(Marked { at, entry, table, level });
            }
        }
    }

    /// Whether no entry of the table says anything.
    fn is_empty(&self, table: PhysAddr, level: u32) -> bool {
        (0..self.entries_of(level)).step_by(TABLE_ENTRIES).all(|index| {
            let words = self.words(Position { table, level, index });
            words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
        })
    }
}
