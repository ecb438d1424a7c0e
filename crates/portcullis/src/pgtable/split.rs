//! Splitting a large page, so that a part of it can be unmapped.
//!
//! The new, smaller leaves are made ready first and put in place entry by entry; translations stay as they are.
//! Where the architecture wants *break before make*, the entries are cleared first and the hardware is made to
//! forget the page; meanwhile, for that long, a device's accesses to it fail. What stands in the entries then
//! is absent for the hardware but not nothing, so that nobody else uses their place.

use alloc::vec::Vec;

use super::format::{Attributes, Entry, Format, Layout, LeafSize};
use super::map::store;
use super::table::PageTable;
use super::unmap::LargePage;
use super::walk::{Conflict, Position};
use crate::addr::PhysAddr;
use crate::platform::{Frames, Platform};
use crate::sync::Ordering;

/// What is to take a large page's place.
struct Split {
    large: LargePage,
    entries: Vec<u64>,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Splits the large page at `iova` into the next smaller leaves. `invalidate` makes the hardware forget a
    /// range (first address and length) and says whether that worked.
    ///
    /// # Errors
    /// No memory; or an invalidation that was not confirmed, [`Conflict::Busy`]. The page is as it was.
    pub(super) fn split<P: Platform>(
        &self,
        platform: &P,
        iova: u64,
        invalidate: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<(), Conflict> {
        let ready = platform.with_slot(|slot| {
            let _section = self.sections().enter(slot);
            let Some(large) = self.unmap_run(iova, 1).sticks_out else {
                // Somebody else has unmapped or split it.
                return Ok(None);
            };
            let split = Split { large, entries: self.smaller(large)? };
            if X::BREAK_BEFORE_MAKE {
                self.replace(&split, |_| X::MARK);
                return Ok(Some(split));
            }
            self.replace(&split, |index| split.entries[index]);
            Ok(None)
        })?;
        let Some(split) = ready else {
            return Ok(());
        };
        let LargePage { iova, size, at, .. } = split.large;
        let confirmed = invalidate(iova, 1 << (self.format().shift(at.level) + size.run));
        platform.with_slot(|slot| {
            let _section = self.sections().enter(slot);
            self.finish(&split, confirmed)
        })
    }

    /// After the hardware has forgotten the page, or did not confirm it: then it comes back as it was.
    fn finish(&self, split: &Split, confirmed: bool) -> Result<(), Conflict> {
        let LargePage { at, page, size, attributes, .. } = split.large;
        let words = &self.words(at)[..1 << size.run];
        if confirmed {
            words.iter().zip(&split.entries).for_each(|(word, entry)| word.store(*entry, Ordering::Release));
            self.clean(words);
            return Ok(());
        }
        store(words, self.format().leaf(page, size, attributes), self.format().stride(size));
        self.clean(words);
        self.free_tables(&split.entries, at.level);
        Err(Conflict::Busy)
    }

    /// The entries that translate as the large page does, in smaller leaves: of the same level, if it has
    /// several entries, else one table of the level below.
    fn smaller(&self, large: LargePage) -> Result<Vec<u64>, Conflict> {
        let LargePage { at, page, size, attributes, .. } = large;
        let mut entries = Vec::new();
        entries.try_reserve_exact(1 << size.run).map_err(|_| Conflict::OutOfMemory)?;
        if size.run == 0 {
            let table = self.new_table(at.level - 1)?;
            self.fill(table, at.level - 1, page, attributes);
            self.count_frames(self.frames_of(at.level - 1) as isize);
            entries.push(self.format().table(table, at.level - 1));
            return Ok(entries);
        }
        let leaf = LeafSize { level: at.level, run: 0 };
        entries.extend((0..1_u64 << size.run).map(|index| {
            let page = page.get() + (index << self.format().shift(at.level));
            self.format().leaf(PhysAddr::new(page), leaf, attributes)
        }));
        Ok(entries)
    }

    /// Stores what `entry` gives for each entry of the large page.
    fn replace(&self, split: &Split, entry: impl Fn(usize) -> u64) {
        let words = &self.words(split.large.at)[..split.entries.len()];
        words.iter().enumerate().for_each(|(index, word)| word.store(entry(index), Ordering::Release));
        self.clean(words);
    }

    /// Fills the new table at `table`, of `level`, with leaves for the memory from `page` on.
    fn fill(&self, table: PhysAddr, level: u32, page: PhysAddr, attributes: Attributes) {
        let format = self.format();
        let (entries, shift) = (1_usize << X::INDEX_BITS, format.shift(level));
        let mut index = 0;
        while index < entries {
            let words = self.words(Position { table, level, index });
            let words = &words[..words.len().min(entries - index)];
            for (word, index) in words.iter().zip(index as u64..) {
                let page = PhysAddr::new(page.get() + (index << shift));
                word.store(format.leaf(page, LeafSize { level, run: 0 }, attributes), Ordering::Release);
            }
            self.clean(words);
            index += words.len();
        }
    }

    fn free_tables(&self, entries: &[u64], level: u32) {
        for entry in entries {
            if let Entry::Table { table, level } = self.format().decode(*entry, level) {
                self.count_frames(-(self.frames_of(level) as isize));
                self.free_table(table, level);
            }
        }
    }
}
