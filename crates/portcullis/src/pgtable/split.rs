//! Splitting a large page, so that a part of it can be unmapped.
//!
//! The new, smaller leaves are made ready first, in a table that takes the page's place by one store; translations stay
//! as they are. (A page of several entries is split [with its table](super::replace).)
//! Where the architecture wants *break before make*, the entries are cleared first and the hardware is made to
//! forget the page; meanwhile, for that long, a device's accesses to it fail. What stands in the entries then
//! is the [mark](Format::MARK) alone, absent for the hardware but not nothing, so that nobody else uses their
//! place, and who wants to unmap another part of the page waits.
//!
//! Elsewhere hardware may go on holding the page as a whole, and an invalidation that names only a part of it need not
//! make it forget that (Intel VT-d, Invalidate Address Register: for a super-page the address mask must cover at least
//! the page). So the entry of a table that takes a page's place keeps the bit [`Format::SPLIT`], and every unmap that
//! passes it, on whichever CPU, has the whole of the page invalidated: until the table is reclaimed, which follows an
//! invalidation of everything.
//!
//! Several CPUs may unmap parts of one page at once: an entry is exchanged only where it still is the page's.

use alloc::vec::Vec;

use super::format::{Attributes, Entry, Format, Layout, LeafSize};
use super::table::PageTable;
use super::unmap::{LargePage, Obstacle};
use super::walk::{Conflict, NewTable, Position};
use crate::addr::PhysAddr;
use crate::platform::{Frames, Platform};
use crate::sync::{AtomicU64, Ordering};

/// What is to take a large page's place.
struct Split<'a, F: Frames, X: Format> {
    large: LargePage,
    entries: Vec<u64>,
    /// Where that is a table.
    new: Option<NewTable<'a, F, X>>,
}

/// A page that is broken until it is [finished](Self::finish), which is done when this is dropped, too: it comes back as
/// it was unless it was confirmed that the hardware has forgotten it.
struct Broken<'a, F: Frames, X: Format, P: Platform> {
    table: &'a PageTable<F, X>,
    platform: &'a P,
    split: Split<'a, F, X>,
    confirmed: bool,
    /// Entries that are finished, and whether all is.
    done: usize,
    is_finished: bool,
}

/// Whether `entry` is one of a page that is broken.
#[inline]
pub(super) const fn is_broken<X: Format>(entry: u64) -> bool {
    X::BREAK_BEFORE_MAKE && entry == X::MARK
}

impl<F: Frames, X: Format, P: Platform> Broken<'_, F, X, P> {
    /// After the hardware has forgotten the page, or did not confirm it: then it comes back as it was. Goes on where a
    /// call that panicked has left off.
    fn finish(&mut self) {
        let Self { table: owner, platform, split, confirmed, done, is_finished } = self;
        owner.with_slot(*platform, |slot| {
            let _section = owner.sections().enter(slot);
            let LargePage { at, page, size, attributes, .. } = split.large;
            let leaf = owner.format().leaf(page, size, attributes);
            let stride = owner.format().stride(size);
            // The marks keep their table where it is, unless somebody else has unmapped them against the rules.
            if !owner.is_still_there(&split.large) {
                return;
            }
            let words = &owner.words(at)[..split.entries.len()];
            for (index, word) in words.iter().enumerate().skip(*done) {
                let smaller = split.entries[index];
                let whole = leaf.wrapping_add(stride.wrapping_mul(index as u64));
                let entry = if *confirmed { smaller } else { whole };
                let exchanged = word.compare_exchange(X::MARK, entry, Ordering::AcqRel, Ordering::Relaxed);
                if *confirmed && exchanged.is_ok() {
                    split.new.take().map(NewTable::keep);
                }
                *done = index + 1;
            }
            owner.clean(words);
        });
        *is_finished = true;
    }
}

impl<F: Frames, X: Format, P: Platform> Drop for Broken<'_, F, X, P> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.finish();
        }
    }
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
        let broken = self.with_slot(platform, |slot| {
            // Dropped after the section, which one without a slot has only once.
            let mut broken = None;
            let _section = self.sections().enter(slot);
            let large = match self.unmap_run(iova, 1).obstacle {
                Some(Obstacle::SticksOut(large)) if large.size != LeafSize { level: 1, run: 0 } => large,
                // Somebody else has unmapped or split it, or is about to.
                _ => return Ok(None),
            };
            if !X::BREAK_BEFORE_MAKE && large.size.run > 0 {
                // It has come meanwhile, and is split in another way.
                return Ok(None);
            }
            let split = self.smaller(large)?;
            let words = &self.words(large.at)[..split.entries.len()];
            if !X::BREAK_BEFORE_MAKE {
                let entry = split.entries[0];
                if self.replace(&large, words, Self::unseen(entry)) > 0 {
                    split.new.map(NewTable::keep);
                    self.show(&words[0], entry);
                }
                return Ok(None);
            }
            // The CPU that exchanges the first entry has the page.
            let (first, others) = words.split_at(1);
            if self.replace(&large, first, X::MARK) > 0 {
                // From here on, so that the page comes back too where something panics.
                broken = Some(Broken {
                    table: self,
                    platform,
                    split,
                    confirmed: false,
                    done: 0,
                    is_finished: false,
                });
                self.replace(&large, others, X::MARK);
                self.clean(words);
            }
            Ok(broken)
        })?;
        let Some(mut broken) = broken else {
            return Ok(());
        };
        let LargePage { iova, size, .. } = broken.split.large;
        let confirmed = invalidate(iova, 1 << (self.format().shift(size.level) + size.run));
        broken.confirmed = confirmed;
        broken.finish();
        if confirmed { Ok(()) } else { Err(Conflict::Busy) }
    }

    /// Whether a walk for the page ends in the table in which it was found.
    fn is_still_there(&self, large: &LargePage) -> bool {
        let mut at = self.top(large.iova);
        while at.level > large.at.level {
            match self.format().decode(self.word(at).load(Ordering::Acquire), at.level) {
                Entry::Table { table, level } => at = self.step(large.iova, table, level),
                _ => return false,
            }
        }
        at.table == large.at.table && at.level == large.at.level
    }

    /// The entries that translate as the large page does, in smaller leaves: of the same level, if it has
    /// several entries, else one table of the level below.
    fn smaller(&self, large: LargePage) -> Result<Split<'_, F, X>, Conflict> {
        let LargePage { at, page, size, attributes, .. } = large;
        let mut entries = Vec::new();
        entries.try_reserve_exact(1 << size.run).map_err(|_| Conflict::OutOfMemory)?;
        if size.run == 0 {
            let new = self.new_table(at.level - 1)?;
            self.fill(new.table(), at.level - 1, page, attributes);
            entries.push(self.format().table(new.table(), at.level - 1) | X::SPLIT);
            return Ok(Split { large, entries, new: Some(new) });
        }
        let leaf = LeafSize { level: at.level, run: 0 };
        entries.extend((0..1_u64 << size.run).map(|index| {
            let page = page.get() + (index << self.format().shift(at.level));
            self.format().leaf(PhysAddr::new(page), leaf, attributes)
        }));
        Ok(Split { large, entries, new: None })
    }

    /// Stores `entry` for those of the large page's `words` that are still its own. How many. Inside the section in which
    /// it was found; cleans nothing, and so never panics.
    fn replace(&self, large: &LargePage, words: &[AtomicU64], entry: u64) -> usize {
        let (format, level) = (self.format(), large.at.level);
        let is_ours = |old| {
            format.decode(old, level) == Entry::Leaf { run: large.size.run }
                && format.page(old, level) == large.page
                // Another mapping of the same memory is not ours, either: it may allow less.
                && format.attributes(old, level) == large.attributes
        };
        // Tried again where the hardware has set a bit of its own meanwhile.
        let change = |old| is_ours(old).then_some(entry);
        let replace =
            |word: &&AtomicU64| word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok();
        words.iter().filter(replace).count()
    }

    /// Fills the new table at `table`, of `level`, with leaves for the memory from `page` on.
    fn fill(&self, table: PhysAddr, level: u32, page: PhysAddr, attributes: Attributes) {
        let format = self.format();
        self.each_word(Position { table, level, index: 0 }, 1 << X::INDEX_BITS, |index| {
            let page = PhysAddr::new(page.get() + ((index as u64) << format.shift(level)));
            format.leaf(page, LeafSize { level, run: 0 }, attributes)
        });
    }
}
