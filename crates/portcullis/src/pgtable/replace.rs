//! Splits contiguous PTEs where hardware must find all of them alike at any time (AMD's sizes between two levels),
//! while devices use the part that stays mapped. At any time hardware finds a complete table: the old one or its copy.
//!
//! Several entries cannot change together, but one store can exchange their table:
//!
//! 1. Set the *busy bit* in the entry that leads to the table, and [`Format::SPLIT`]: maps and unmaps that meet both
//!    wait, outside their sections. Increment the generation, so that CPUs do not use the tables that they
//!    [remember](super::near).
//! 2. Wait for a grace period: then only hardware uses the table.
//! 3. Copy it, with smaller leaves in the page's place, and make the entry lead to the copy, still busy.
//! 4. Invalidate the addresses below, tables included.
//! 5. Clear the busy bit, and after another grace period free the old table.
//!
//! Until step 4 is confirmed, hardware uses either table, and both say the same: the other CPUs wait so that this stays
//! true. If hardware does not confirm, the old table, which never changed, comes back. Hardware may still walk the copy
//! then: the copy is emptied before the busy bit is cleared, so that devices reach through it no page that is unmapped
//! later. It is *parked* until hardware has confirmed that it has forgotten everything (a walk that still looks there
//! faults until then).
//!
//! `taking_out` lets one CPU at a time do this, or reclaim: so no table on the way is freed meanwhile. `split_run` may
//! be called for any entry of the page; [cleared ones](LargePage) stay clear.

use super::format::{Entry, Format, Layout, LeafSize};
use super::place::Position;
use super::table::{Conflict, PageTable};
use super::unmap::LargePage;
use crate::addr::PhysAddr;
use crate::platform::{Frames, Platform};
use crate::sync::{AtomicU64, Ordering};

/// A table that a copy replaces. A drop brings the table back if hardware did not confirm, or a panic unwinds.
struct Replacing<'a, F: Frames, X: Format, P: Platform> {
    owner: &'a PageTable<F, X>,
    platform: &'a P,
    /// The position of the entry that leads to the table, and the value that the entry gets in the end: until hardware
    /// has confirmed, its old one.
    above: Position,
    entry: u64,
    at: Position,
    /// The copy, once the entry leads there.
    copy: Option<PhysAddr>,
    is_confirmed: bool,
}

impl<F: Frames, X: Format, P: Platform> Drop for Replacing<'_, F, X, P> {
    fn drop(&mut self) {
        if self.is_confirmed {
            self.lead(self.entry);
            // Some sections may still read the old table.
            return self.park(self.at.table);
        }
        let Some(copy) = self.copy else {
            return self.lead(self.entry);
        };
        // The busy bit is cleared last: until the copy is empty, hardware may find an entry in it that an unmap clears
        // in the table alone.
        self.lead(self.entry | X::MARK | X::SPLIT);
        let all = self.owner.entries_of(self.at.level);
        self.owner.each_word(Position { table: copy, index: 0, ..self.at }, all, |_| 0);
        self.lead(self.entry);
        self.park(copy);
    }
}

impl<F: Frames, X: Format, P: Platform> Replacing<'_, F, X, P> {
    /// Changes the entry above, which no other CPU changes.
    fn lead(&self, entry: u64) {
        let word = self.owner.word(self.above);
        // Release: a CPU that follows it sees the table's contents.
        word.store(entry, Ordering::Release);
        self.owner.clean(core::slice::from_ref(word));
    }

    /// Leaves the old table or the copy to the next reclaim, which frees it. There is room for one.
    fn park(&self, table: PhysAddr) {
        self.platform.with_cpu(|_| self.owner.books.parked.lock().push(table));
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Splits the contiguous PTEs at `iova` into leaves of one entry. `invalidate` makes hardware forget a range (first
    /// address and length), tables included, and returns whether that worked. The caller holds no CPU. Returns whether
    /// it changed the tables: `false` if another CPU was first.
    ///
    /// # Errors
    /// [`Conflict::OutOfMemory`], also if the page is in the root, and [`Conflict::BeyondPhysical`]; [`Conflict::Busy`]
    /// if the hardware did not confirm the invalidation, or the platform's barrier does not reach all CPUs that the
    /// table is for. The page is as it was.
    #[cold]
    pub(super) fn split_run<P: Platform>(
        &self,
        platform: &P,
        iova: u64,
        invalidate: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool, Conflict> {
        if !self.platform.is_reached(platform) {
            // The grace periods below would not cover all CPUs: the page stays.
            return Err(Conflict::Busy);
        }
        let _served = self.books.taking_out.lock();
        let marked = self.platform.with_cpu(platform, |cpu| {
            let _section = self.section(cpu);
            self.books.parked.lock().try_reserve(1).map_err(|_| Conflict::OutOfMemory)?;
            let marked = self.mark_above(iova)?;
            // Made before `clean`, so that the busy bit is cleared if a call panics, too.
            Ok(marked.map(|(word, above, entry, at, run)| {
                let (copy, is_confirmed) = (None, false);
                let this = Replacing { owner: self, platform, above, entry, at, copy, is_confirmed };
                self.clean(core::slice::from_ref(word));
                (this, run)
            }))
        })?;
        let Some((mut this, run)) = marked else {
            return Ok(false);
        };
        let (above, at) = (this.above, this.at);
        self.forget_near();
        self.near.marks().synchronize(platform);
        // Another CPU may have removed it before.
        let entry = self.word(at).load(Ordering::Acquire);
        if self.format().decode(entry, at.level) != (Entry::Leaf { run }) {
            return Ok(false);
        }
        let new = self.new_table(at.level)?;
        self.copy_split(new.table(), &self.large_page(at, iova, entry, run));
        let copy = new.keep();
        this.copy = Some(copy);
        let entry = self.format().table(copy, at.level) | this.entry & X::SPLIT;
        this.lead(entry | X::MARK | X::SPLIT);
        let bytes = 1 << self.format().shift(above.level);
        if !invalidate(iova - iova % bytes, bytes) {
            return Err(Conflict::Busy);
        }
        (this.entry, this.is_confirmed) = (entry, true);
        this.lead(entry);
        // Some sections may still read the old table.
        self.near.marks().synchronize(platform);
        core::mem::forget(this);
        self.count_frames(-(self.frames_of(at.level) as isize));
        self.free_table(at.table, at.level);
        Ok(true)
    }

    /// Sets the busy bit above the contiguous PTEs at `iova`. Returns the word, not cleaned yet, of the entry that
    /// leads to their table, its position and old value, the position of the page's entry, and the binary logarithm of
    /// the number of its entries. Returns `None` if the tables have changed meanwhile. Called inside a section.
    #[allow(clippy::type_complexity, reason = "one caller")]
    fn mark_above(&self, iova: u64) -> Result<Option<(&AtomicU64, Position, u64, Position, u32)>, Conflict> {
        let mut at = self.top(iova);
        let mut above = None;
        loop {
            let entry = self.word(at).load(Ordering::Acquire);
            match self.format().decode(entry, at.level) {
                Entry::Table { .. } if entry & X::MARK != 0 => return Ok(None),
                Entry::Table { table, level } => {
                    above = Some((at, entry));
                    at = self.step(iova, table, level);
                }
                Entry::Leaf { run } if run > 0 => {
                    let (above, entry) = above.ok_or(Conflict::OutOfMemory)?;
                    let (word, mark) = (self.word(above), entry | X::MARK | X::SPLIT);
                    let marked = word.compare_exchange(entry, mark, Ordering::AcqRel, Ordering::Relaxed);
                    return Ok(marked.is_ok().then_some((word, above, entry, at, run)));
                }
                _ => return Ok(None),
            }
        }
    }

    /// Fills `copy` with the contents of the large page's table, and with leaves of one entry for the page.
    fn copy_split(&self, copy: PhysAddr, large: &LargePage) {
        let (format, LargePage { at, page, size, attributes, .. }) = (self.format(), *large);
        let leaf = LeafSize { level: at.level, run: 0 };
        let ours = at.index..at.index + (1 << size.run);
        self.each_word(Position { table: copy, index: 0, ..at }, self.entries_of(at.level), |index| {
            let entry = self.word(Position { index, ..at }).load(Ordering::Acquire);
            if ours.contains(&index) && self.is_part(large, entry) {
                let offset = ((index - at.index) as u64) << format.shift(at.level);
                format.leaf(PhysAddr::new(page.get() + offset), leaf, attributes)
            } else {
                entry
            }
        });
    }

    /// Stores the result of `entry` for each index to the words of the table, from `at` up to index `end`.
    pub(super) fn each_word(&self, mut at: Position, end: usize, entry: impl Fn(usize) -> u64) {
        while at.index < end {
            let words = self.words(at);
            let words: &[AtomicU64] = &words[..words.len().min(end - at.index)];
            for (word, index) in words.iter().zip(at.index..) {
                word.store(entry(index), Ordering::Release);
            }
            self.clean(words);
            at.index += words.len();
        }
    }
}
