//! The way down through the tables, and the tables on it. A CPU that follows a pointer finds a
//! complete table that is not freed while its section lasts.
//!
//! Memory ordering. A CPU that follows a table pointer must see the table zeroed and with the
//! entries that others entered before: the pointer is installed with `AcqRel` and read with
//! `Acquire`. A leaf is stored with `Release`, so that whatever the caller wrote before (the
//! buffer's contents, a table below) is there before the translation is. Clearing a leaf needs no
//! order of its own: it takes effect by the invalidation that follows, and the invalidation queue
//! orders itself after earlier stores.
//!
//! CPUs follow tables only inside a [`Section`](crate::percpu::Section): a table is freed after a
//! wait for all sections that might have seen it linked. The tables that a CPU remembers of an
//! earlier section are [made stale](super::near) before that wait.

use super::format::{Entry, Format, Layout};
use super::reclaim::put_back;
use super::split::is_broken;
use super::table::PageTable;
use crate::addr::PhysAddr;
use crate::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES};
use crate::sync::{AtomicU64, Ordering};

/// The reason why a run of mapping stopped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conflict {
    /// The page at this address is in use.
    Mapped { at: u64 },
    /// No frame for a table is free.
    OutOfMemory,
    /// The frame that was found lies where no entry can point to.
    BeyondPhysical { table: PhysAddr },
    /// A table on the way is being reclaimed, or not shown to the hardware yet: try again, outside the section.
    Busy,
}

/// A table, and the place in it at which an address has its entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    pub table: PhysAddr,
    pub level: u32,
    /// Below about 2^18; counted from the table's start.
    pub index: usize,
}

/// A table that no entry leads to yet. Dropping it frees the table.
pub(super) struct NewTable<'a, F: Frames, X: Format> {
    owner: &'a PageTable<F, X>,
    table: PhysAddr,
    level: u32,
}

impl<F: Frames, X: Format> NewTable<'_, F, X> {
    pub(super) fn table(&self) -> PhysAddr {
        self.table
    }

    /// Counts the table as one of the page table's: an entry leads to it now.
    pub(super) fn keep(self) -> PhysAddr {
        self.owner.count_frames(self.owner.frames_of(self.level) as isize);
        let table = self.table;
        core::mem::forget(self);
        table
    }
}

impl<F: Frames, X: Format> Drop for NewTable<'_, F, X> {
    fn drop(&mut self) {
        self.owner.free_table(self.table, self.level);
    }
}

/// An entry that the walker must be shown. Dropping it shows the entry, too, as cleaning may have
/// panicked.
struct Unseen<'a, F: Frames, X: Format> {
    owner: &'a PageTable<F, X>,
    word: &'a AtomicU64,
    value: u64,
}

impl<F: Frames, X: Format> Unseen<'_, F, X> {
    fn show(&self) {
        self.owner.clean(core::slice::from_ref(self.word));
        self.word.store(self.value, Ordering::Release);
        self.owner.clean(core::slice::from_ref(self.word));
    }
}

impl<F: Frames, X: Format> Drop for Unseen<'_, F, X> {
    #[cold]
    fn drop(&mut self) {
        self.show();
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Returns where the walk for `iova` begins.
    #[inline]
    pub(super) fn top(&self, iova: u64) -> Position {
        let level = self.format().levels();
        Position { table: self.root(), level, index: (iova >> self.root_shift()) as usize }
    }

    /// Returns the next step of the walk, in the table that was found: one below the root.
    #[inline]
    pub(super) fn step(&self, iova: u64, table: PhysAddr, level: u32) -> Position {
        Position { table, level, index: self.format().index(iova, level) }
    }

    /// Returns the words from the position on, up to the end of its frame.
    #[inline]
    pub(super) fn words(&self, at: Position) -> &[AtomicU64] {
        let frame = at.table.get() + (at.index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        // SAFETY: the root and every table that an entry points to came from `frames` when this
        // page table made them, as many frames as their index has room for. They are freed in its
        // `drop`, which no `&PageTable` outlives, or by `reclaim` and `split_run` after all
        // sections that could have found them; and a CPU uses those that it remembers of an earlier
        // section only under the stamp of before (see `near`).
        let words = unsafe { self.frames().table(PhysAddr::new(frame)) };
        &words[at.index % TABLE_ENTRIES..]
    }

    /// Returns the word at the position.
    #[inline]
    pub(super) fn word(&self, at: Position) -> &AtomicU64 {
        let frame = at.table.get() + (at.index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        // SAFETY: as in `words`.
        let words = unsafe { self.frames().table(PhysAddr::new(frame)) };
        &words[at.index % TABLE_ENTRIES]
    }

    /// Makes a walker that is not coherent see the stores to `words`.
    #[inline]
    pub(super) fn clean(&self, words: &[AtomicU64]) {
        if !F::COHERENT {
            self.frames().clean(words);
        }
    }

    /// Returns the value to store for the entry `value` of a table that [`show`](Self::show) is to
    /// show next: a walker that is not coherent does not see it yet. Until then it is marked, so
    /// that no CPU relies on the tables below.
    pub(super) const fn unseen(value: u64) -> u64 {
        if F::COHERENT { value } else { value | X::MARK }
    }

    /// Shows the walker the table that `word` leads to since [`unseen`](Self::unseen) was stored
    /// there. If cleaning panics it is tried again, as no other CPU takes the mark off.
    pub(super) fn show(&self, word: &AtomicU64, value: u64) {
        if !F::COHERENT {
            let unseen = Unseen { owner: self, word, value };
            unseen.show();
            core::mem::forget(unseen);
        }
    }

    /// Returns how many entries a table of `level` has.
    pub(super) fn entries_of(&self, level: u32) -> usize {
        1 << if level == self.format().levels() { self.format().root_bits() } else { X::INDEX_BITS }
    }

    /// Returns how many frames a table of `level` has.
    pub(super) fn frames_of(&self, level: u32) -> usize {
        if level == self.format().levels() {
            self.format().root_frames()
        } else {
            self.format().table_frames()
        }
    }

    /// Makes a new, empty table of `level`, in memory that the format can point to.
    pub(super) fn new_table(&self, level: u32) -> Result<NewTable<'_, F, X>, Conflict> {
        let count = self.frames_of(level);
        let table = self.frames().alloc(count).ok_or(Conflict::OutOfMemory)?;
        let last = table.checked_add(count as u64 * FRAME_SIZE - 1);
        if last.is_none_or(|last| last > self.format().last_phys()) {
            // SAFETY: the frames came from the line above and no entry ever pointed to them.
            unsafe { self.frames().free(table, count) };
            return Err(Conflict::BeyondPhysical { table });
        }
        let new = NewTable { owner: self, table, level };
        if !F::COHERENT {
            let size = TABLE_ENTRIES * count;
            (0..size)
                .step_by(TABLE_ENTRIES)
                .for_each(|index| self.clean(self.words(Position { table, level, index })));
        }
        Ok(new)
    }

    /// Frees a table that no entry points to and that no CPU has found.
    pub(super) fn free_table(&self, table: PhysAddr, level: u32) {
        // SAFETY: it came from `new_table` for the same level; by the caller's word nothing uses
        // it.
        unsafe { self.frames().free(table, self.frames_of(level)) };
    }

    /// Puts a new, empty table of `level` into `entry`, or the one back that is [set
    /// aside](super::reclaim) there, unless another CPU has done so meanwhile. Returns the entry's
    /// value, which leads to no table if the entry is in other use.
    #[cold]
    pub(super) fn install(&self, entry: &AtomicU64, level: u32) -> Result<u64, Conflict> {
        let mut seen = entry.load(Ordering::Acquire);
        // Present, or a page that is being split.
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
                // A new table is dropped.
                Err(other) => seen = other,
            }
        }
        Ok(seen)
    }

    /// Frees the table at `table` and all tables below it. `level` is its level; recursion is that deep.
    ///
    /// # Safety
    /// Nothing, hardware included, uses them any more.
    pub(super) unsafe fn free_below(&self, table: PhysAddr, level: u32) {
        if level > 1 {
            for index in 0..self.entries_of(level) {
                let entry = self.word(Position { table, level, index }).load(Ordering::Acquire);
                if let Entry::Table { table, level } = self.format().decode(entry, level) {
                    // SAFETY: as for this table: an entry points to a table of the same page table.
                    unsafe { self.free_below(table, level) };
                }
            }
        }
        self.free_table(table, level);
    }
}
