//! The short ways: what takes one walk and some stores, in one turn of a slot that the caller holds.
//!
//! They change everything or nothing, never allocate and never wait. What they leave (a table that is missing, a page of
//! several entries, a large page that must be split, something in the way) the long ways do, or say why not.

use super::format::{Attributes, Entry, Format, LeafSize};
use super::map::{ADDRESS_BITS, store};
use super::table::PageTable;
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
        let Some(_turn) = self.sections().begin(slot) else {
            return false;
        };
        let (iova, phys, len) = (range.start().get(), phys.get(), range.len());
        match self.are_granules(len) {
            true => self.map_granules(iova, phys, len, attributes),
            false => self.map_page(iova, phys, len, attributes),
        }
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
        let is_whole = (range.start().get() | range.len()) & ((1 << X::GRANULE_SHIFT) - 1) == 0;
        if !self.is_home(platform) || !is_whole || range.last() > self.last_iova() {
            return false;
        }
        let Some(_turn) = self.sections().begin(slot) else {
            return false;
        };
        let (iova, len) = (range.start().get(), range.len());
        match self.are_granules(len) {
            true => self.unmap_granules(iova, len),
            false => self.unmap_page(iova, len),
        }
    }

    /// Whether `len` bytes are several granules that make no larger page.
    #[inline]
    fn are_granules(&self, len: u64) -> bool {
        len > 1 << X::GRANULE_SHIFT && len < self.second
    }

    /// Whether `range` can be mapped to the memory at `phys`, without a word on why not; and whether all of the memory
    /// lies where entries hold an address's higher bits the same.
    #[inline]
    pub(super) fn is_plain(&self, range: IovaRange, phys: PhysAddr) -> bool {
        let bits = range.start().get() | phys.get() | range.len();
        let last = phys.get().wrapping_add(range.len() - 1);
        bits & ((1 << X::GRANULE_SHIFT) - 1) == 0
            && range.last() <= self.last_iova()
            && phys.get() <= last
            && last <= self.last_phys()
            && (last ^ phys.get()) >> ADDRESS_BITS == 0
    }

    /// Maps granules, if a lowest table has room for them in one frame. Returns whether it did. Inside a section; the
    /// arguments [are plain](Self::is_plain).
    #[inline]
    fn map_granules(&self, iova: u64, phys: u64, len: u64, attributes: Attributes) -> bool {
        match self.lowest(iova) {
            Some((at, marks)) if marks & X::MARK == 0 => self.enter_granules(at, phys, len, attributes),
            _ => false,
        }
    }

    /// Enters granules from `at` on, which is in a lowest table, if their entries lie in one frame and are free. Returns
    /// whether it did. Inside the section in which the table was found.
    #[inline]
    pub(super) fn enter_granules(&self, at: Position, phys: u64, len: u64, attributes: Attributes) -> bool {
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

    /// Clears granules, if they lie in one frame of a lowest table that is open to unmaps, and no page was split there.
    /// Returns whether it did. Inside a section.
    #[inline]
    fn unmap_granules(&self, iova: u64, len: u64) -> bool {
        let Some((at, marks)) = self.lowest(iova) else {
            return false;
        };
        let Some(words) = self.words(at).get(..(len >> X::GRANULE_SHIFT) as usize) else {
            return false;
        };
        let Some(first) = words.first().map(|word| word.load(Ordering::Relaxed)) else {
            return false;
        };
        let other = words.iter().fold(0, |bits, word| bits | (word.load(Ordering::Relaxed) ^ first));
        let is_leaf = matches!(self.format().decode(first, 1), Entry::Leaf { run: 0 });
        if marks & Self::CLOSED != 0 || other & X::KIND != 0 || !is_leaf {
            return false;
        }
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.clean(words);
        true
    }

    /// Where `iova` has its entry in a lowest table, if there is one; and all bits of the entries on the way. Inside a
    /// section.
    #[inline]
    pub(super) fn lowest(&self, iova: u64) -> Option<(Position, u64)> {
        let mut at = self.top(iova);
        let mut passed = 0;
        while at.level > 1 {
            let entry = self.word(at).load(Ordering::Acquire);
            let Entry::Table { table, level } = self.format().decode(entry, at.level) else {
                return None;
            };
            passed |= entry;
            at = self.step(iova, table, level);
        }
        Some((at, passed))
    }
}
