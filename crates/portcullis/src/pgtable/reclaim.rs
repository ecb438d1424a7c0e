//! Frees empty tables, but only when no CPU's section and no hardware can use them.
//!
//! A table is freed in six steps, up to 16 tables at a time:
//!
//! 1. Set the *busy bit* in the entry that leads to it: a CPU that must change an entry below waits, outside its
//!    section. Increment the generation, so that CPUs do not use the tables that they [remember](super::near).
//! 2. Wait for a grace period: sections may have passed the entry before. From here on, CPUs only clear entries of the
//!    table.
//! 3. If the table is still empty, *set it aside*: the entry becomes non-present but keeps the address. Otherwise clear
//!    the busy bit.
//! 4. Invalidate everything that the hardware has cached, paging structures included.
//! 5. Clear the entry.
//! 6. Wait for another grace period, as some sections may still read the table. Free it.
//!
//! Until step 5 a CPU that needs a table at this place puts this one back (`install`), without a wait. It must not
//! install another: until the invalidation is confirmed, hardware may still walk this one. If the hardware does not
//! confirm step 4, all tables are put back.

use alloc::vec::Vec;

use super::format::{Entry, Format, aside};
use super::place::Position;
use super::table::PageTable;
use crate::addr::PhysAddr;
use crate::platform::{FRAME_SIZE, Frames, Platform, TABLE_ENTRIES};
use crate::sync::Ordering;

/// Busy tables at a time: a CPU that waits for one waits for all of them.
const BATCH: usize = if cfg!(loom) { 2 } else { 16 };

#[derive(Debug, Clone, Copy)]
struct Emptied {
    at: Position,
    /// The entry without the busy bit.
    entry: u64,
    table: PhysAddr,
    level: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its entry leads to it and is busy.
    Marked,
    /// Its entry is non-present, unless another CPU has put the table back.
    Aside,
    Unlinked,
}

type List = arrayvec::ArrayVec<Emptied, BATCH>;

/// Busy tables, and tables that are set aside. A drop, also when a panic unwinds, puts them back; it parks unlinked
/// ones, which a later call frees.
struct Batch<'a, F: Frames, X: Format> {
    owner: &'a PageTable<F, X>,
    tables: List,
    /// Tables that no entry leads to, but that hardware may still walk.
    parked: Vec<PhysAddr>,
}

impl<F: Frames, X: Format> Batch<'_, F, X> {
    /// Sets aside the tables that are still empty. Returns whether there are any.
    fn set_aside(&mut self) -> bool {
        let owner = self.owner;
        self.tables.retain(|Emptied { at, entry, table, level, state }| {
            let empty = owner.is_empty(*table, *level);
            let word = owner.word(*at);
            word.store(if empty { aside::<X>(*entry) } else { *entry }, Ordering::Release);
            if empty {
                *state = State::Aside;
            }
            owner.clean(core::slice::from_ref(word));
            empty
        });
        !self.tables.is_empty()
    }

    /// Clears the entries of the tables that no CPU has put back. Returns whether there are any.
    fn unlink(&mut self) -> bool {
        let owner = self.owner;
        self.tables.retain(|Emptied { at, entry, state, .. }| {
            let word = owner.word(*at);
            let aside = aside::<X>(*entry);
            let unlinked = word.compare_exchange(aside, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if unlinked {
                *state = State::Unlinked;
            }
            owner.clean(core::slice::from_ref(word));
            unlinked
        });
        !self.tables.is_empty()
    }

    /// Frees the tables, which neither CPUs nor hardware use any more. Returns the number of frames.
    fn free(&mut self) -> usize {
        let owner = self.owner;
        let free = |table, level| {
            let frames = owner.frames_of(level);
            owner.count_frames(-(frames as isize));
            owner.free_table(table, level);
            frames
        };
        // One after the other, so that a panic leaves the others where they are. Only the root, which is never parked,
        // has another size.
        let parked: usize = core::iter::from_fn(|| self.parked.pop()).map(|table| free(table, 1)).sum();
        let emptied = core::iter::from_fn(|| self.tables.pop());
        parked + emptied.map(|Emptied { table, level, .. }| free(table, level)).sum::<usize>()
    }
}

impl<F: Frames, X: Format> Drop for Batch<'_, F, X> {
    fn drop(&mut self) {
        for &Emptied { at, entry, table, state, .. } in &self.tables {
            let (old, new) = match state {
                State::Marked => (entry | X::MARK, entry),
                State::Aside => (aside::<X>(entry), PageTable::<F, X>::unseen(entry)),
                State::Unlinked => {
                    // A call has panicked. Without memory to park the table, it leaks.
                    if self.parked.try_reserve(1).is_ok() {
                        self.parked.push(table);
                    }
                    continue;
                }
            };
            let word = self.owner.word(at);
            // If the entry is not `old`, another CPU has put the table back, and shows it itself.
            if word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.owner.show(word, entry);
            }
        }
        if !self.parked.is_empty() {
            // No other call has parked tables meanwhile, so the list there is empty, and this takes no memory.
            *self.owner.books.parked.lock() = core::mem::take(&mut self.parked);
        }
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Frees every table that is empty at the call, and returns the number of bytes. With another
    /// [platform](Platform::number) than the first that the table was used with it does nothing and returns 0.
    ///
    /// `invalidate` makes the hardware forget everything about the address space, paging structures included, and
    /// returns whether that worked; it may wait for hardware. It must not reclaim in this table, nor split pages there.
    ///
    /// Works in rounds of up to 16 empty tables. Each round reads the tables in the order of addresses until it has
    /// found 16: every entry of the higher tables, and the entries of a lowest table up to the first in use. So the
    /// cost grows with the number of rounds times the number of tables. A round calls `invalidate` once and waits for
    /// two grace periods; a map that meets one of its tables waits for the first of these, never for hardware.
    ///
    /// Context: waits for the reclaims, and the splits of contiguous PTEs, that were called before; later ones wait for
    /// this. So even if it returns 0, another reclaim may have freed memory meanwhile. The caller holds no CPU, and is
    /// no interrupt handler (see [`try_reclaim`](Self::try_reclaim)).
    ///
    /// # Errors
    /// The error of `invalidate`, if no table was freed before. The tables that were to be freed stay, and a later call
    /// frees them.
    ///
    /// # Safety
    /// 1. **`invalidate` returns `Ok` only if all hardware that walks this table has forgotten everything about the
    ///    address space**, its tables included, and every walk that began before is over. Other owners get the tables'
    ///    memory from then on.
    pub unsafe fn reclaim<P: Platform, E>(
        &self,
        platform: &P,
        invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        if !self.platform.is_reached(platform) {
            return Ok(0);
        }
        let _served = self.books.taking_out.lock();
        self.free_empty(platform, invalidate)
    }

    /// As [`reclaim`](Self::reclaim), but does nothing and returns 0 while another reclaim, or a split of contiguous
    /// PTEs, is under way or waits. So it waits for none of these, which an interrupt handler may have interrupted.
    ///
    /// # Safety
    /// As for [`reclaim`](Self::reclaim).
    pub unsafe fn try_reclaim<P: Platform, E>(
        &self,
        platform: &P,
        invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        if !self.platform.is_reached(platform) {
            return Ok(0);
        }
        let Some(_served) = self.books.taking_out.try_lock() else { return Ok(0) };
        self.free_empty(platform, invalidate)
    }

    /// Frees every empty table. The caller has the lock of `taking_out`, and its `invalidate` is as
    /// [`reclaim`](Self::reclaim) says.
    fn free_empty<P: Platform, E>(
        &self,
        platform: &P,
        mut invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        let mut freed = 0;
        // The number of rounds is bounded, as later calls wait for this one while others make and empty tables. The
        // tables present at the call take one round for each batch, plus one for each level, whose last batch may not
        // be full.
        let levels = self.format().levels();
        let rounds = self.table_bytes() / (BATCH * FRAME_SIZE as usize) + levels as usize + 1;
        for _ in 0..rounds {
            let mut batch = Batch { owner: self, tables: List::new(), parked: Vec::new() };
            platform.with_cpu(|_| core::mem::swap(&mut batch.parked, &mut *self.books.parked.lock()));
            self.mark_empty(self.root(), levels, &mut batch.tables);
            if batch.tables.is_empty() && batch.parked.is_empty() {
                return Ok(freed);
            }
            self.forget_near();
            self.near.marks().synchronize(platform);
            if !batch.set_aside() && batch.parked.is_empty() {
                // All of them are in use again: a later call may find some empty.
                return Ok(freed);
            }
            match invalidate() {
                Ok(()) => {}
                // A later call meets the error again.
                Err(_) if freed > 0 => return Ok(freed),
                Err(error) => return Err(error),
            }
            if !batch.unlink() && batch.parked.is_empty() {
                return Ok(freed);
            }
            self.near.marks().synchronize(platform);
            let frames = batch.free();
            freed += frames * FRAME_SIZE as usize;
        }
        Ok(freed)
    }

    /// Sets the busy bit in the entries, of the table at `table` and of those below it, that lead to empty tables.
    fn mark_empty(&self, table: PhysAddr, level: u32, marked: &mut List) {
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
            if entry & X::MARK != 0 {
                // The table is new, and not yet shown to the hardware.
                continue;
            }
            self.mark_empty(table, level, marked);
            if marked.is_full() {
                return;
            }
            // The exchange fails if the hardware has set a bit of its own: a later call tries again.
            if self.is_empty(table, level)
                && word.compare_exchange(entry, entry | X::MARK, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                // Before `clean`, which may panic, so that the busy bit is cleared in any case.
                marked.push(Emptied { at, entry, table, level, state: State::Marked });
                self.clean(core::slice::from_ref(word));
            }
        }
    }

    fn is_empty(&self, table: PhysAddr, level: u32) -> bool {
        let entries = self.entries_of(level);
        (0..entries).step_by(TABLE_ENTRIES).all(|index| {
            let words = self.words(Position { table, level, index });
            words.iter().take(entries).all(|word| word.load(Ordering::Relaxed) == 0)
        })
    }
}
