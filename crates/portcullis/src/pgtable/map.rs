//! Enters translations: walks down, and writes runs of leaves. A leaf is written only to free entries.

use super::format::{Attributes, Entry, Format, Layout, LeafSize, is_broken};
use super::place::{Last, Position};
use super::table::{Conflict, PageTable};
use crate::addr::PhysAddr;
use crate::platform::Frames;
use crate::sync::{AtomicU64, Ordering};

/// Entries that are checked together before they are written: a cache line.
const LINE: usize = 1 << LINE_BITS;
const LINE_BITS: u32 = 3;

/// Low address bits that every format holds in one piece.
pub(super) const ADDRESS_BITS: u32 = 48;

pub(super) struct Run {
    pub bytes: u64,
    pub conflict: Option<Conflict>,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Returns the largest leaf that alignment and `len` allow at `iova` and `phys`, at level `highest` or below, and
    /// the number of bytes for which it stays the largest in tables of its level.
    #[inline]
    fn leaf_size(&self, (iova, phys, len): (u64, u64, u64), highest: u32) -> (LeafSize, u64) {
        let sizes = self.format().leaf_sizes();
        let mut chosen = LeafSize { level: 1, run: 0 };
        // Each size is a multiple of the one before.
        for size in sizes.get(1..).unwrap_or_default() {
            let bytes = self.format().page_size(*size);
            if len < bytes.bytes() || size.level > highest {
                break;
            }
            if (iova | phys) & bytes.offset_mask() != 0 {
                // The next level begins with another table in any case.
                let fits_later = size.level == chosen.level && (iova ^ phys) & bytes.offset_mask() == 0;
                let before = bytes.bytes() - (iova & bytes.offset_mask());
                let larger = fits_later && len - before >= bytes.bytes();
                return (chosen, if larger { before } else { len });
            }
            chosen = *size;
        }
        (chosen, len)
    }

    /// Maps as much of (`iova`, `phys`, `len`) as one frame of one table holds, in leaves of one size: the largest that
    /// fits at `iova`, up to the address at which a larger one fits. The arguments are aligned to the granule, inside
    /// the aperture, and do not wrap; `len` is not 0. Called inside the section that `last` is of.
    pub(super) fn map_run(
        &self,
        (iova, phys, len): (u64, u64, u64),
        attributes: Attributes,
        last: &mut Last,
    ) -> Run {
        let format = self.format();
        let stop = |conflict| Run { bytes: 0, conflict: Some(conflict) };
        let (mut size, mut until) = self.leaf_size((iova, phys, len), format.levels());
        let remembered = last.position(format, iova).filter(|_| size.level == 1);
        let mut at = remembered.unwrap_or_else(|| self.top(iova));
        loop {
            let word = self.word(at);
            let mut entry = word.load(Ordering::Acquire);
            if entry == 0 && at.level == size.level {
                break;
            }
            if entry & X::PRESENT == 0 {
                entry = match self.install(word, at.level - 1) {
                    Ok(entry) => entry,
                    Err(conflict) => return stop(conflict),
                };
            }
            match format.decode(entry, at.level) {
                Entry::Table { .. } if entry & X::MARK != 0 => return stop(Conflict::Busy),
                // Down into the table, even if a large page would fit: smaller pages once needed the table.
                Entry::Table { table, level } => {
                    if level < size.level {
                        (size, until) = self.leaf_size((iova, phys, len), level);
                    }
                    at = self.step(iova, table, level);
                }
                Entry::Leaf { .. } | Entry::Absent => return stop(Conflict::Mapped { at: iova }),
            }
        }
        if at.level == 1 {
            *last = Last::new(format, iova, at);
        }
        self.write_leaves((iova, phys, until), attributes, size, at)
    }

    /// Maps one page that is larger than a granule, if that takes only a walk and an exchange: a leaf of one entry,
    /// whose tables exist and whose entry is free. Returns whether it did. Called inside a section; the arguments are
    /// as for [`map_run`](Self::map_run).
    pub(super) fn map_page(&self, iova: u64, phys: u64, len: u64, attributes: Attributes) -> bool {
        let Some(level) = self.level_of(iova | phys, len) else {
            return false;
        };
        let Some(at) = self.walk_to(iova, level, X::MARK) else {
            return false;
        };
        let word = self.word(at);
        let leaf = self.format().leaf(PhysAddr::new(phys), LeafSize { level, run: 0 }, attributes);
        // A compare-exchange, not a store: a caller that maps the same range, against the rules, may have installed a
        // table here.
        if word.compare_exchange(0, leaf, Ordering::Release, Ordering::Relaxed).is_err() {
            return false;
        }
        self.clean(core::slice::from_ref(word));
        true
    }

    /// The level at which `len` bytes are one leaf of one entry; `bits` is the OR of their addresses.
    pub(super) fn level_of(&self, bits: u64, len: u64) -> Option<u32> {
        if bits & (len - 1) != 0 {
            None
        } else if len.is_power_of_two() && self.single & len != 0 {
            Some((len.trailing_zeros() - X::GRANULE_SHIFT) / X::INDEX_BITS + 1)
        } else {
            None
        }
    }

    /// Maps a granule in the table that `last` remembers, if it lies there and its entry is free. Returns whether it
    /// did. The arguments are as for [`map_run`](Self::map_run).
    #[inline]
    pub(super) fn map_next(&self, iova: u64, phys: u64, attributes: Attributes, last: &Last) -> bool {
        last.position(self.format(), iova).is_some_and(|at| self.enter_granule(at, phys, attributes))
    }

    /// Enters one granule at `at`, in a lowest table, if the entry is free. Returns whether it did. Called inside the
    /// section in which the table was found.
    #[inline]
    pub(super) fn enter_granule(&self, at: Position, phys: u64, attributes: Attributes) -> bool {
        let word = self.word(at);
        if word.load(Ordering::Relaxed) != 0 {
            return false;
        }
        let leaf = self.format().leaf(PhysAddr::new(phys), LeafSize { level: 1, run: 0 }, attributes);
        word.store(leaf, Ordering::Release);
        self.clean(core::slice::from_ref(word));
        true
    }

    fn write_leaves(
        &self,
        (iova, phys, len): (u64, u64, u64),
        attributes: Attributes,
        size: LeafSize,
        at: Position,
    ) -> Run {
        let format = self.format();
        let shift = format.shift(size.level);
        let words = self.words(at);
        // Entries hold higher address bits in another place: entries of pages across that border do not differ by the
        // stride.
        let len = len.min((1 << ADDRESS_BITS) - phys % (1 << ADDRESS_BITS));
        let pages = (len >> (shift + size.run)).min((words.len() >> size.run) as u64) as usize;
        let words = &words[..pages << size.run];
        let stride = format.stride(size);
        // If entries differ by the stride, all form one group; otherwise each page is its own group.
        let group = if stride == 0 { 1 << size.run } else { words.len() };
        let mut done = 0;
        let mut conflict = None;
        for group in words.chunks(group) {
            let page = PhysAddr::new(phys.wrapping_add((done as u64) << shift));
            let stored = store_free(group, format.leaf(page, size, attributes), stride, size.run);
            done += stored;
            if stored < group.len() {
                let before = (done as u64) << shift;
                let left = (iova + before, phys.wrapping_add(before), len - before);
                let (more, stopped) = self.obstacle(left, attributes, size, &group[stored..], at, done);
                conflict = stopped;
                done += more;
                break;
            }
        }
        self.clean(&words[..done]);
        Run { bytes: (done as u64) << shift, conflict }
    }

    /// Handles the first page of `words`, some of whose entries are in use, at `at` plus `done`. Returns the number of
    /// entries that it wrote, and why no more can be.
    #[cold]
    fn obstacle(
        &self,
        (iova, phys, _): (u64, u64, u64),
        attributes: Attributes,
        size: LeafSize,
        words: &[AtomicU64],
        at: Position,
        done: usize,
    ) -> (usize, Option<Conflict>) {
        let entries = words.iter().take(1 << size.run).map(|word| word.load(Ordering::Relaxed));
        let Some((index, entry)) = entries.enumerate().find(|(_, entry)| *entry != 0) else {
            // The entry has been cleared meanwhile: the next run finds it so.
            return (0, None);
        };
        let shift = self.format().shift(size.level);
        match self.format().decode(entry, size.level) {
            // A table that is set aside decodes as absent, and counts here, too.
            Entry::Table { .. } | Entry::Absent if index > 0 && !is_broken::<X>(entry) => {
                // Write the part before the table as single entries; the next run goes down into the table.
                let (len, size) = ((index as u64) << shift, LeafSize { run: 0, ..size });
                let run = self.write_leaves(
                    (iova, phys, len),
                    attributes,
                    size,
                    Position { index: at.index + done, ..at },
                );
                ((run.bytes >> shift) as usize, run.conflict)
            }
            Entry::Table { .. } | Entry::Absent if !is_broken::<X>(entry) => (0, None),
            _ => (0, Some(Conflict::Mapped { at: iova + ((index as u64) << shift) })),
        }
    }
}

/// Stores `value`, and `stride` more each time, to `words`, as long as whole pages of 2^`run` words are free. Returns
/// the number of words that it stored.
#[inline]
fn store_free(words: &[AtomicU64], mut value: u64, stride: u64, run: u32) -> usize {
    let in_use =
        |words: &[AtomicU64]| words.iter().fold(0, |bits, word| bits | word.load(Ordering::Relaxed)) != 0;
    let mut done = 0;
    if run <= LINE_BITS {
        for line in words.as_chunks::<LINE>().0 {
            if in_use(line) {
                break;
            }
            value = store(line, value, stride);
            done += LINE;
        }
    }
    for page in words[done..].chunks(1 << run) {
        if in_use(page) {
            break;
        }
        value = store(page, value, stride);
        done += page.len();
    }
    done
}

/// Stores `value`, and `stride` more each time. Returns the value after the last.
#[inline]
pub(super) fn store(words: &[AtomicU64], mut value: u64, stride: u64) -> u64 {
    for word in words {
        word.store(value, Ordering::Release);
        value = value.wrapping_add(stride);
    }
    value
}
