//! Removes translations in runs. A call clears neither the entry of a table nor another CPU's busy bit.

use super::format::{Attributes, Entry, Format, Layout, LeafSize, is_broken};
use super::place::Position;
use super::table::PageTable;
use crate::addr::PhysAddr;
use crate::platform::Frames;
use crate::sync::{AtomicU64, Ordering};

/// Entries that are checked together before they are cleared: a cache line.
const LINE: usize = 8;
pub(super) const HALF: usize = LINE / 2;

pub(super) struct UnmapRun {
    pub bytes: u64,
    /// Bytes after those removed in which no page is mapped.
    pub skip: u64,
    /// The binary logarithm of the bytes of the largest page around the run that was split, and that hardware may still
    /// hold as a whole; 0 if there is none.
    pub split: u32,
    pub obstacle: Option<Obstacle>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Obstacle {
    /// The next entry belongs to this page, which exceeds the range.
    SticksOut(LargePage),
    /// The next entry is in a table that another CPU is changing, or in a page that it is splitting: try again, outside
    /// the section.
    Busy,
}

/// A page that is larger than the part to be removed. A late unmap, of a mapping that had ended before, may have
/// cleared some of its contiguous PTEs.
#[derive(Debug, Clone, Copy)]
pub(super) struct LargePage {
    /// The position of its first entry. Valid inside the section in which it was found.
    pub at: Position,
    /// The first address that it translates, and the memory there.
    pub iova: u64,
    pub page: PhysAddr,
    pub size: LeafSize,
    pub attributes: Attributes,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// An entry that is [closed](Self::is_closed) to unmaps has at least one of these bits.
    pub(super) const CLOSED: u64 = if F::COHERENT { X::SPLIT } else { X::SPLIT | X::MARK };

    /// Whether no page may be removed below the entry of a table: hardware may see the page in another table, while the
    /// table is [replaced](super::replace); or a non-coherent walker may still see the large page that was here. (A
    /// busy table of a reclaim is open with coherent frames, if it did not take a large page's place, as clearing
    /// entries helps the reclaim. Otherwise it is closed until the busy bit is clear.)
    #[inline]
    const fn is_closed(entry: u64) -> bool {
        entry & X::MARK != 0 && entry & Self::CLOSED != 0
    }

    /// Clears one page that is larger than a granule, if that takes only a walk and an exchange: a leaf of just that
    /// size that has one entry, in tables that no CPU is changing, and no part of a page that was split. Returns
    /// whether it did. Called inside a section.
    pub(super) fn unmap_page(&self, iova: u64, len: u64) -> bool {
        let Some(level) = self.level_of(iova, len) else {
            return false;
        };
        let Some(at) = self.walk_to(iova, level, Self::CLOSED) else {
            return false;
        };
        let word = self.word(at);
        let entry = word.load(Ordering::Acquire);
        let is_leaf = self.format().decode(entry, level) == (Entry::Leaf { run: 0 });
        if !is_leaf || !exchange::<X>(word, entry) {
            return false;
        }
        self.clean(core::slice::from_ref(word));
        true
    }

    /// Clears the leaves of (`iova`, `len`) that lie in one frame of one table, up to the first of another kind. The
    /// caller removes all of the range from `from` on, and has visited the part up to `iova`. `iova` and `len` lie
    /// inside the aperture, and `len` is not 0.
    ///
    /// The run removes and skips at least one byte together, unless there is an obstacle, or another CPU has just
    /// changed the entries. Called inside a section.
    pub(super) fn unmap_run(&self, from: u64, iova: u64, len: u64) -> UnmapRun {
        let format = self.format();
        let mut at = self.top(iova);
        let mut split = 0;
        let (first, run) = loop {
            let word = self.word(at);
            let entry = word.load(Ordering::Acquire);
            match format.decode(entry, at.level) {
                Entry::Leaf { run } => break (entry, run),
                Entry::Table { .. } if Self::is_closed(entry) => {
                    return UnmapRun { bytes: 0, skip: 0, split, obstacle: Some(Obstacle::Busy) };
                }
                Entry::Table { table, level } => {
                    if entry & X::SPLIT != 0 {
                        split = split.max(format.shift(at.level));
                    }
                    at = self.step(iova, table, level);
                }
                Entry::Absent if is_broken::<X>(entry) => {
                    return UnmapRun { bytes: 0, skip: 0, split, obstacle: Some(Obstacle::Busy) };
                }
                Entry::Absent => {
                    // The CPU that removed it may not have cleaned it yet, or may never do so.
                    self.clean(core::slice::from_ref(word));
                    let entry_bytes = 1 << format.shift(at.level);
                    let skip = entry_bytes - iova % entry_bytes;
                    return UnmapRun { bytes: 0, skip, split, obstacle: None };
                }
            }
        };
        let (shift, size) = (format.shift(at.level), LeafSize { level: at.level, run });
        let page_bytes = 1 << (shift + run);
        if !iova.is_multiple_of(page_bytes) || len < page_bytes {
            return UnmapRun { split, ..self.unmap_entry(from, (iova, len), at, first, run) };
        }
        let words = self.words(at);
        let pages = if run > 0 && format.stride(size) == 0 { 1 } else { len >> (shift + run) };
        let count = pages.min((words.len() >> run) as u64) << run;
        let words = &words[..count as usize];
        let cleared = clear::<X>(words, first, 1 << run, at.level);
        self.clean(&words[..cleared]);
        if cleared == 0 && run > 0 {
            return UnmapRun { split, ..self.unmap_entry(from, (iova, len), at, first, run) };
        }
        // If no entry was cleared, another CPU has changed the first one meanwhile: the caller tries again.
        UnmapRun { bytes: (cleared as u64) << shift, skip: 0, split, obstacle: None }
    }

    /// Handles a large page that exceeds the range, and 2^`run` contiguous PTEs [some of which differ](LargePage).
    /// `first` is the entry as read. If the whole page is to be removed, clears this one entry; otherwise returns the
    /// page as the obstacle. The other arguments are as for [`unmap_run`](Self::unmap_run).
    #[cold]
    fn unmap_entry(
        &self,
        from: u64,
        (iova, len): (u64, u64),
        at: Position,
        first: u64,
        run: u32,
    ) -> UnmapRun {
        let page = self.large_page(at, iova, first, run);
        let shift = self.format().shift(at.level);
        if page.iova < from || len < page.iova + (1 << (shift + run)) - iova {
            return UnmapRun { bytes: 0, skip: 0, split: 0, obstacle: Some(Obstacle::SticksOut(page)) };
        }
        let word = self.word(at);
        let is_cleared = exchange::<X>(word, first);
        self.clean(core::slice::from_ref(word));
        let bytes = if is_cleared { (1 << shift) - iova % (1 << shift) } else { 0 };
        UnmapRun { bytes, skip: 0, split: 0, obstacle: None }
    }

    pub(super) fn large_page(&self, at: Position, iova: u64, entry: u64, run: u32) -> LargePage {
        let format = self.format();
        LargePage {
            at: Position { index: at.index >> run << run, ..at },
            iova: iova >> (format.shift(at.level) + run) << (format.shift(at.level) + run),
            page: format.page(entry, at.level),
            size: LeafSize { level: at.level, run },
            attributes: format.attributes(entry, at.level),
        }
    }

    pub(super) fn is_part(&self, large: &LargePage, old: u64) -> bool {
        let (format, level) = (self.format(), large.at.level);
        format.decode(old, level) == Entry::Leaf { run: large.size.run }
            && format.page(old, level) == large.page
            // An entry of another mapping of the same memory is not the page's: it may allow less.
            && format.attributes(old, level) == large.attributes
    }
}

/// Clears an entry if it still is a leaf of the same kind as `first`, and returns whether it did. A store would lose
/// the table, or the busy bit, of a CPU that has split the page meanwhile.
#[inline]
fn exchange<X: Format>(word: &AtomicU64, first: u64) -> bool {
    // Tried again if the hardware has set a bit of its own meanwhile. Relaxed, as for the stores below.
    let clear = |old| ((old ^ first) & X::KIND == 0).then_some(0);
    word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, clear).is_ok()
}

#[inline]
pub(super) fn differ(words: &[AtomicU64], first: u64, kind: u64) -> bool {
    let bits = |words: &[AtomicU64]| {
        words.iter().fold(0, |bits, word| bits | (word.load(Ordering::Relaxed) ^ first))
    };
    let (halves, rest) = words.as_chunks::<HALF>();
    halves.iter().fold(bits(rest), |all, half| all | bits(half)) & kind != 0
}

#[inline]
pub(super) fn zero(words: &[AtomicU64]) {
    let zero = |words: &[AtomicU64]| words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let (halves, rest) = words.as_chunks::<HALF>();
    halves.iter().for_each(|half| zero(half));
    zero(rest);
}

/// Clears leaves of `level` of the same kind as `first`, whole groups of `group` entries, up to the first that is not.
/// It clears a part of a group only if another CPU changes an entry meanwhile. Returns the number of entries.
#[inline]
fn clear<X: Format>(words: &[AtomicU64], first: u64, group: usize, level: u32) -> usize {
    let other = |words: &[AtomicU64]| differ(words, first, X::KIND);
    if level > 1 || X::BREAK_BEFORE_MAKE && group > 1 {
        // If another CPU splits a page of one entry, the entry becomes a table at any moment. If it breaks contiguous
        // PTEs, this call must not clear its placeholders.
        let alike = words.chunks(group).take_while(|page| !other(page)).count() * group;
        return words[..alike].iter().take_while(|word| exchange::<X>(word, first)).count();
    }
    let mut done = 0;
    if group <= LINE {
        for line in words.as_chunks::<LINE>().0 {
            if other(line) {
                break;
            }
            zero(line);
            done += LINE;
        }
    }
    for page in words[done..].chunks(group) {
        if other(page) {
            break;
        }
        zero(page);
        done += page.len();
    }
    done
}
