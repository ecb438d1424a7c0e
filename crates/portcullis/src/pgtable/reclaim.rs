//! Giving back tables that have become empty.
//!
//! A table is given back in six steps, up to 64 tables at a time:
//!
//! 1. the entry that leads to it is *marked*, with a bit that hardware ignores: whoever wants to change
//!    something below waits, outside its section; and CPUs are made to forget which tables they were [in last](super::near);
//! 2. all sections that might have passed the entry before it was marked are waited for: from here on nobody
//!    writes to the table but to clear entries;
//! 3. if the table is empty still, it is *set aside*: the entry becomes absent for the hardware but keeps the
//!    address; else the mark is taken off again;
//! 4. the hardware is made to forget what it has cached of the paging structures;
//! 5. the entry is cleared;
//! 6. once more all sections are waited for, those that only read; then the table is freed.
//!
//! Until step 5 whoever needs a table at its place puts it back (`install`), and waits for nobody. It must be
//! this one: until the hardware has forgotten where it was it looks nowhere else. If the hardware does not
//! confirm step 4, all of them are put back.

use alloc::vec::Vec;

use super::format::{Entry, Format};
use super::table::PageTable;
use super::walk::Position;
use crate::addr::PhysAddr;
use crate::platform::{FRAME_SIZE, Frames, Platform, TABLE_ENTRIES};
use crate::sync::{AtomicBool, Ordering, pause};

/// Tables that are marked at a time: whoever waits for one waits for these.
const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

/// An entry that leads to a table which was empty.
#[derive(Debug, Clone, Copy)]
struct Emptied {
    at: Position,
    /// As it was.
    entry: u64,
    table: PhysAddr,
    level: u32,
    state: State,
}

/// How far an [`Emptied`] has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Marked,
    /// A mark that is met now is that of a CPU that has put it back.
    Aside,
    /// Its entry is clear.
    Unlinked,
}

type List = arrayvec::ArrayVec<Emptied, BATCH>;

/// Tables that are marked or set aside. What is left of them is put back in the end, also when something
/// panics; what is unlinked by then is for a later call to free.
struct Batch<'a, F: Frames, X: Format> {
    owner: &'a PageTable<F, X>,
    tables: List,
    /// Tables that no entry leads to, but hardware may know.
    parked: Vec<PhysAddr>,
}

impl<F: Frames, X: Format> Batch<'_, F, X> {
    /// Sets the tables aside that are empty still. Whether there are any.
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

    /// Clears the entries of the tables that nobody has put back. Whether there are any.
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

    /// Frees the tables, which nobody uses any more. How many frames.
    fn free(&mut self) -> usize {
        let owner = self.owner;
        let free = |table, level| {
            let frames = owner.frames_of(level);
            owner.count_frames(-(frames as isize));
            owner.free_table(table, level);
            frames
        };
        // One after the other, so that a panic leaves the others where they are. Only the root's size is its own.
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
                    // Something has panicked. Without memory for it the table is leaked.
                    if self.parked.try_reserve(1).is_ok() {
                        self.parked.push(table);
                    }
                    continue;
                }
            };
            let word = self.owner.word(at);
            // Where it is something else, another CPU has put it back, and shows it itself.
            if word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.owner.show(word, entry);
            }
        }
        if !self.parked.is_empty() {
            // Nobody has parked others meanwhile, so this takes no memory.
            *self.owner.parked().lock() = core::mem::take(&mut self.parked);
        }
    }
}

/// The right to take tables out of their places, of which there is one.
pub(super) struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    /// The right, unless somebody has it.
    fn take(taken: &'a AtomicBool) -> Option<Self> {
        taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| Self(taken))
    }

    /// Waits for the right: as long as hardware takes to forget what another CPU takes out.
    pub(super) fn wait(taken: &'a AtomicBool) -> Self {
        loop {
            match Self::take(taken) {
                Some(turn) => return turn,
                None => pause(),
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The entry of a table that is set aside.
fn aside<X: Format>(entry: u64) -> u64 {
    entry & !X::PRESENT | X::MARK
}

/// The entry of the table that `aside` is the entry of, set aside.
pub(super) fn put_back<X: Format>(aside: u64) -> u64 {
    aside & !X::MARK | X::PRESENT
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Frees every table that is empty, and returns how many bytes that were: 0 also while another call is at
    /// it, and always with another [platform](Platform::number) than the first that the table was used with. `invalidate`
    /// makes the hardware forget everything about the address space, paging structures included, and says whether that
    /// worked; it may wait for hardware, and no lock is held meanwhile.
    ///
    /// Looks at all tables: one step for each entry of those above the lowest, and for each of a lowest one up
    /// to the first in use. For each 64 empty tables it waits twice for what other CPUs are at; a map that
    /// meets one of those tables waits for the first of these, never for hardware. The caller holds no slot.
    ///
    /// # Errors
    /// What `invalidate` reports, where nothing was freed before. The tables it was about stay, and are freed by a later
    /// call.
    ///
    /// # Safety
    /// **`invalidate` returns `Ok` only where all hardware that walks this table has forgotten everything about the address
    /// space**, where its tables are included, and every walk that began before is over. The tables are freed on that
    /// word, and are somebody else's memory from then on.
    pub unsafe fn reclaim<P: Platform, E>(
        &self,
        platform: &P,
        mut invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        if !self.is_reached(platform) {
            return Ok(0);
        }
        let Some(_turn) = Turn::take(self.is_reclaiming()) else {
            return Ok(0);
        };
        let mut freed = 0;
        loop {
            let mut batch = Batch { owner: self, tables: List::new(), parked: Vec::new() };
            platform.with_slot(|_| core::mem::swap(&mut batch.parked, &mut *self.parked().lock()));
            self.mark_empty(self.root(), self.format().levels(), &mut batch.tables);
            if batch.tables.is_empty() && batch.parked.is_empty() {
                return Ok(freed);
            }
            self.forget_near();
            self.marks().synchronize(platform);
            if !batch.set_aside() && batch.parked.is_empty() {
                // All of them are in use again: the next call may have more luck.
                return Ok(freed);
            }
            match invalidate() {
                Ok(()) => {}
                // A later call meets it again.
                Err(_) if freed > 0 => return Ok(freed),
                Err(error) => return Err(error),
            }
            if !batch.unlink() && batch.parked.is_empty() {
                return Ok(freed);
            }
            self.marks().synchronize(platform);
            let frames = batch.free();
            freed += frames * FRAME_SIZE as usize;
        }
    }

    /// Marks the entries of the table at `table`, and of those below it, that lead to empty tables.
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
                // New, and not shown to the hardware yet.
                continue;
            }
            self.mark_empty(table, level, marked);
            if marked.is_full() {
                return;
            }
            // A failed exchange means that the hardware has set a bit of its own: another time, then.
            if self.is_empty(table, level)
                && word.compare_exchange(entry, entry | X::MARK, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                // Before what may panic, so that the mark goes in any case.
                marked.push(Emptied { at, entry, table, level, state: State::Marked });
                self.clean(core::slice::from_ref(word));
            }
        }
    }

    /// Whether no entry of the table says anything.
    fn is_empty(&self, table: PhysAddr, level: u32) -> bool {
        let entries = self.entries_of(level);
        (0..entries).step_by(TABLE_ENTRIES).all(|index| {
            let words = self.words(Position { table, level, index });
            words.iter().take(entries).all(|word| word.load(Ordering::Relaxed) == 0)
        })
    }
}
