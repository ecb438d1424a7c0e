//! Splits a large page, so that a part of it can be unmapped. The rest of the page stays mapped.
//!
//! The smaller leaves are made first, in a table that takes the page's place by one store; translations stay as they
//! are. (Contiguous PTEs are split [with their table](super::replace).) If the architecture requires
//! *break-before-make*, the entries are cleared and invalidated first; a device's accesses to the page fault meanwhile.
//! The entries then hold the [busy bit](Format::MARK) alone: non-present for the hardware, but not 0, so that no other
//! CPU uses their place, and a CPU that unmaps another part of the page waits.
//!
//! Elsewhere hardware may hold the page as a whole, and an invalidation that names only a part of it need not drop it
//! (Intel VT-d, Invalidate Address Register: for a super-page the address mask must cover at least the page). So the
//! entry of a table that takes a page's place keeps [`Format::SPLIT`], and every unmap that passes it, on any CPU,
//! invalidates the whole page, until the table is reclaimed, which follows an invalidation of everything.
//!
//! Several CPUs may unmap parts of one page at the same time: an entry is exchanged only if it still is the page's. One
//! such entry is enough to split: [others may be clear](LargePage). `taking_out` lets one CPU at a time break
//! contiguous PTEs, or reclaim. If two ran at once and only one were confirmed, smaller entries would stand beside
//! entries of the large page, through which hardware still reaches all of it.

use alloc::vec::Vec;

use super::format::{Attributes, Entry, Format, Layout, LeafSize};
use super::place::Position;
use super::table::{Conflict, NewTable, PageTable};
use super::unmap::{LargePage, Obstacle};
use crate::addr::PhysAddr;
use crate::platform::{Frames, Platform};
use crate::sync::{AtomicU64, Ordering};

struct Split<'a, F: Frames, X: Format> {
    large: LargePage,
    /// The new entries; 0 for one that was not the page's any more.
    entries: Vec<u64>,
    new: Option<NewTable<'a, F, X>>,
}

/// A page under break-before-make until its split is [finished](Self::finish), at the latest by a drop. The page comes
/// back as it was unless the hardware has confirmed that it has forgotten it.
struct Broken<'a, F: Frames, X: Format, P: Platform> {
    table: &'a PageTable<F, X>,
    platform: &'a P,
    split: Split<'a, F, X>,
    confirmed: bool,
    done: usize,
    is_finished: bool,
}

impl<F: Frames, X: Format, P: Platform> Broken<'_, F, X, P> {
    /// Enters the smaller leaves if the hardware has confirmed; otherwise brings the page back. If an earlier call
    /// panicked, this one goes on from there.
    fn finish(&mut self) {
        let Self { table: owner, platform, split, confirmed, done, is_finished } = self;
        owner.platform.with_cpu(*platform, |cpu| {
            let _section = owner.section(cpu);
            let LargePage { at, page, size, attributes, .. } = split.large;
            let leaf = owner.format().leaf(page, size, attributes);
            let stride = owner.format().stride(size);
            // The placeholders keep their table where it is, unless another CPU has unmapped them against the rules.
            if !owner.is_still_there(&split.large) {
                return;
            }
            let words = &owner.words(at)[..split.entries.len()];
            for (index, word) in words.iter().enumerate().skip(*done) {
                let smaller = split.entries[index];
                *done = index + 1;
                if smaller == 0 {
                    // A placeholder here is another call's.
                    continue;
                }
                let whole = leaf.wrapping_add(stride.wrapping_mul(index as u64));
                let entry = if *confirmed { smaller } else { whole };
                let exchanged = word.compare_exchange(X::MARK, entry, Ordering::AcqRel, Ordering::Relaxed);
                if *confirmed && exchanged.is_ok() {
                    split.new.take().map(NewTable::keep);
                }
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
    /// Splits the large page at `iova`, which has 2^`run` entries, into the next smaller leaves. `invalidate` makes the
    /// hardware forget a range (first address and length) and returns whether that worked. The caller holds no CPU.
    /// Returns whether it changed the tables: `false` if another CPU was first.
    ///
    /// # Errors
    /// [`Conflict::OutOfMemory`] and [`Conflict::BeyondPhysical`]; [`Conflict::Busy`] if the hardware did not confirm
    /// the invalidation. The page is as it was.
    pub(super) fn split<P: Platform>(
        &self,
        platform: &P,
        iova: u64,
        run: u32,
        invalidate: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool, Conflict> {
        // Dropped last, when the page is finished.
        let _served = (run > 0).then(|| self.books.taking_out.lock());
        let mut is_replaced = false;
        // Dropped after the section, as a caller without a CPU cannot begin a second one, and after the CPU is
        // returned, as the drop takes it again.
        let mut broken = None;
        self.platform.with_cpu(platform, |cpu| {
            let _section = self.section(cpu);
            let large = match self.unmap_run(iova, iova, 1).obstacle {
                Some(Obstacle::SticksOut(large)) if large.size != LeafSize { level: 1, run: 0 } => large,
                // Another CPU has unmapped or split it, or is about to.
                _ => return Ok(()),
            };
            if large.size.run != run {
                // The page was mapped meanwhile, and pages of its size are split in another way.
                return Ok(());
            }
            let mut split = self.smaller(large)?;
            let words = &self.words(large.at)[..split.entries.len()];
            if !X::BREAK_BEFORE_MAKE {
                let entry = split.entries[0];
                is_replaced = self.exchange_part(&large, &words[0], Self::unseen(entry));
                if is_replaced {
                    split.new.map(NewTable::keep);
                    self.show(&words[0], entry);
                }
                return Ok(());
            }
            let mut is_ours = false;
            for (word, entry) in words.iter().zip(&mut split.entries) {
                match self.exchange_part(&large, word, X::MARK) {
                    true => is_ours = true,
                    false => *entry = 0,
                }
            }
            if is_ours {
                // Made before `clean`, so that the page comes back if a call panics, too.
                broken = Some(Broken {
                    table: self,
                    platform,
                    split,
                    confirmed: false,
                    done: 0,
                    is_finished: false,
                });
                self.clean(words);
            }
            Ok(())
        })?;
        let Some(broken) = &mut broken else {
            return Ok(is_replaced);
        };
        let LargePage { iova, size, .. } = broken.split.large;
        let confirmed = invalidate(iova, 1 << (self.format().shift(size.level) + size.run));
        broken.confirmed = confirmed;
        broken.finish();
        if confirmed { Ok(true) } else { Err(Conflict::Busy) }
    }

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

    /// The smaller leaves of the large page: of the same level for contiguous PTEs, otherwise one table of the level
    /// below.
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

    /// Stores `entry` to the word if that still is one of the large page's, and returns whether it did. Called inside
    /// the section in which the page was found. Cleans no entry, and so never panics.
    fn exchange_part(&self, large: &LargePage, word: &AtomicU64, entry: u64) -> bool {
        // Tried again if the hardware has set a bit of its own meanwhile.
        let change = |old| self.is_part(large, old).then_some(entry);
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    fn fill(&self, table: PhysAddr, level: u32, page: PhysAddr, attributes: Attributes) {
        let format = self.format();
        self.each_word(Position { table, level, index: 0 }, 1 << X::INDEX_BITS, |index| {
            let page = PhysAddr::new(page.get() + ((index as u64) << format.shift(level)));
            format.leaf(page, LeafSize { level, run: 0 }, attributes)
        });
    }
}
