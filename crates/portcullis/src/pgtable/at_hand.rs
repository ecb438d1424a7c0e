//! The short ways: what takes one walk and some stores, in one turn of a slot that the caller holds.
//!
//! They change everything or nothing, never allocate and never wait. What they leave (a table that is missing, a page of
//! several entries, a large page that must be split, something in the way) the long ways do, or say why not.

use super::format::{Attributes, Entry, Format, LeafSize};
use super::map::{ADDRESS_BITS, store};
use super::table::PageTable;
use super::unmap::{differ, zero};
use super::walk::Position;
use crate::addr::{IovaRange, PhysAddr};
use crate::platform::{Frames, LocalSlot, Platform};
use crate::sync::Ordering;

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Maps `range` to the memory at `phys`, if that takes no more than a walk and some stores: one page, or granules
    /// in one frame of a lowest table; tables that are there, nothing in their place. Returns whether it did; if not, nothing
    /// is changed, and [`map`](Self::map) does it or says why not.
    ///
    /// One walk, two stores for the turn, a load and a store for each entry. Never allocates or waits.
    ///
    /// # Safety
    /// As for [`map`](Self::map); and `slot` is one that `platform` has lent.
    #[inline]
    pub unsafe fn map_at_hand<P: Platform>(
        &self,
        platform: &P,
        slot: &LocalSlot<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        if !self.is_home(platform) || !self.is_plain(range, phys) {
            return false;
        }
        let Some(turn) = self.sections().begin(slot) else {
            return false;
        };
        let (iova, phys, len) = (range.start().get(), phys.get(), range.len());
        if len >= self.second {
            return self.map_page(iova, phys, len, attributes);
        }
        self.lowest(&turn, iova, X::MARK).is_some_and(|at| self.enter_granules(at, phys, len, attributes))
    }

    /// Clears every entry of `range`, if that takes no more than a walk and some stores: one page that was mapped as
    /// such, or granules in one frame of a lowest table, all of them mapped; no part of a page that was split. Returns
    /// whether it did; if not, nothing is changed, and [`unmap`](Self::unmap) does it.
    ///
    /// What is stale then is `range`, in leaves only. One walk, two stores for the turn, a load and a store for each entry.
    /// Never allocates or waits.
    ///
    /// # Safety
    /// `slot` is one that `platform` has lent.
    #[inline]
    pub unsafe fn unmap_at_hand<P: Platform>(
        &self,
        platform: &P,
        slot: &LocalSlot<'_>,
        range: IovaRange,
    ) -> bool {
        let is_whole = Self::are_whole(range.start().get() | range.len());
        if !self.is_home(platform) || !is_whole || range.last() > self.last_iova() {
            return false;
        }
        let Some(turn) = self.sections().begin(slot) else {
            return false;
        };
        let (iova, len) = (range.start().get(), range.len());
        if len >= self.second {
            return self.unmap_page(iova, len);
        }
        self.lowest(&turn, iova, Self::CLOSED).is_some_and(|at| self.clear_granules(at, len))
    }

    /// Whether addresses and lengths are multiples of the granule, given all bits that any of them has.
    #[inline]
    pub(super) const fn are_whole(bits: u64) -> bool {
        bits & ((1 << X::GRANULE_SHIFT) - 1) == 0
    }

    /// Whether `range` can be mapped to the memory at `phys`, without a word on why not; and whether all of the memory
    /// lies where entries hold an address's higher bits the same.
    #[inline]
    pub(super) fn is_plain(&self, range: IovaRange, phys: PhysAddr) -> bool {
        let bits = range.start().get() | phys.get() | range.len();
        let last = phys.get().wrapping_add(range.len() - 1);
        Self::are_whole(bits)
            && range.last() <= self.last_iova()
            && phys.get() <= last
            && last <= self.last_phys()
            && (last ^ phys.get()) >> ADDRESS_BITS == 0
    }

    /// Enters granules from `at` on, which is in a lowest table, if their entries lie in one frame and are free. Returns
    /// whether it did. Inside the section in which the table was found; the arguments [are plain](Self::is_plain).
    #[inline]
    fn enter_granules(&self, at: Position, phys: u64, len: u64, attributes: Attributes) -> bool {
        if len == 1 << X::GRANULE_SHIFT {
            return self.enter_granule(at, phys, attributes);
        }
        let Some(words) = self.words(at).get(..(len >> X::GRANULE_SHIFT) as usize) else {
            return false;
        };
        if words.iter().fold(0, |bits, word| bits | word.load(Ordering::Relaxed)) != 0 {
            return false;
        }
        let size = LeafSize { level: 1, run: 0 };
        let first = self.format().leaf(PhysAddr::new(phys), size, attributes);
        store(words, first, self.format().stride(size));
        self.clean(words);
        true
    }

    /// The same for one.
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

    /// Clears granules from `at` on, which is in a lowest table that is open to unmaps, and in which no page was split, if
    /// all of them lie in one frame and are mapped. Returns whether it did. Inside the section in which the table was found.
    #[inline]
    fn clear_granules(&self, at: Position, len: u64) -> bool {
        let word = self.word(at);
        let first = word.load(Ordering::Relaxed);
        if self.format().decode(first, 1) != (Entry::Leaf { run: 0 }) {
            return false;
        }
        if len == 1 << X::GRANULE_SHIFT {
            word.store(0, Ordering::Relaxed);
            self.clean(core::slice::from_ref(word));
            return true;
        }
        let Some(words) = self.words(at).get(..(len >> X::GRANULE_SHIFT) as usize) else {
            return false;
        };
        if differ::<X>(words, first) {
            return false;
        }
        zero(words);
        self.clean(words);
        true
    }

    /// Where `iova` has its entry in a table of `level`, if there is one, and no entry on the way has any bit of `closed`.
    /// Inside a section.
    #[inline]
    pub(super) fn walk_to(&self, iova: u64, level: u32, closed: u64) -> Option<Position> {
        let mut at = self.top(iova);
        while at.level > level {
            let entry = self.word(at).load(Ordering::Acquire);
            match self.format().decode(entry, at.level) {
                Entry::Table { table, level } if entry & closed == 0 => at = self.step(iova, table, level),
                _ => return None,
            }
        }
        (at.level == level).then_some(at)
    }
}
