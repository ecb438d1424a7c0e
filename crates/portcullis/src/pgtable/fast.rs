//! The fast paths of map and unmap: one walk and some stores, in one exclusive section. They change everything or
//! nothing, and never allocate or wait. The slow paths do the rest: a missing table, contiguous PTEs, a large page that
//! must be split, an entry in use.

use super::format::{Attributes, Entry, Format, LeafSize};
use super::map::{ADDRESS_BITS, store};
use super::place::Position;
use super::table::PageTable;
use super::unmap::{HALF, differ, zero};
use crate::addr::{IovaRange, PhysAddr};
use crate::broken::broken;
use crate::percpu::Turn;
use crate::platform::{Frames, TABLE_ENTRIES};
use crate::sync::{AtomicU64, Ordering};

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Maps `range` to the memory at `phys`, if that takes only a walk and some stores: one page, or granules in one
    /// frame of a lowest table, whose tables exist and whose entries are free. Returns whether it did. If not, or if
    /// the section is not of [this table's flags](Self::marks_for), nothing is changed, and [`map`](Self::map) does the
    /// work or returns the error.
    ///
    /// Costs one walk, a load and a store for each entry. Never allocates or waits.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    // `always`: otherwise inlining depends on the path of the sources, and a call costs 24 instructions.
    #[inline(always)]
    pub unsafe fn map_in(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        let (iova, phys, len) = (range.start().get(), phys.get(), range.len());
        let [stray_iova, stray_phys] = self.stray;
        // A range does not wrap; nor does memory as long as a range that ends inside the aperture.
        let is_stray = Self::ends(iova, len) & stray_iova | Self::ends(phys, len) & stray_phys;
        let Some(near) = self.near.get(turn).filter(|_| is_stray == 0) else {
            return false;
        };
        if len >= self.second {
            return self.map_page(iova, phys, len, attributes);
        }
        self.lowest(near, iova, X::MARK).is_some_and(|at| self.enter_granules(at, phys, len, attributes))
    }

    /// As [`map_in`](Self::map_in), to the pieces of memory in `list`, each with its length, one after the other: if
    /// all of them are granules in one frame of a lowest table, each piece is shorter than the next larger page, and no
    /// multiple of 256 TiB lies between their memory.
    ///
    /// Iterates over the list twice; returns `false` at once if it has more pieces than granules, or more granules than
    /// a frame has entries.
    ///
    /// # Safety
    /// 1. As for [`map`](Self::map), for each piece.
    /// 2. A clone of `list` has the same items as `list`.
    #[inline]
    pub unsafe fn map_list_in(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        let (iova, len) = (range.start().get(), range.len());
        let [stray_iova, stray_phys] = self.stray;
        let granules = len >> X::GRANULE_SHIFT;
        let fits = granules <= TABLE_ENTRIES as u64 && list.len() as u64 <= granules;
        let Some((first, _)) = list.clone().next().filter(|_| fits) else { return false };
        // ORs: of the pieces' ends, of their differences from the first piece, and of the lengths. The OR of the
        // lengths reaches `second`, a power of two, exactly if one length does.
        let (mut ends, mut others, mut lens, mut total) = (0, 0, 0, 0_u64);
        for (phys, len) in list.clone() {
            let phys = phys.get();
            let last = phys.wrapping_add(len.wrapping_sub(1 << X::GRANULE_SHIFT));
            ends |= phys | last;
            others |= (phys ^ first.get()) | (last ^ first.get());
            lens |= len;
            total = total.saturating_add(len);
        }
        let strays = Self::ends(iova, len) & stray_iova | ends & stray_phys | others >> ADDRESS_BITS;
        let is_plain = strays == 0 && lens < self.second && total == len;
        let Some(near) = self.near.get(turn).filter(|_| is_plain) else {
            return false;
        };
        let at = self.lowest(near, iova, X::MARK);
        at.is_some_and(|at| self.enter_list(at, len, (list, first), attributes))
    }

    /// Clears every entry of `range`, if that takes only a walk and some stores: one page that was mapped as such, or
    /// granules in one frame of a lowest table, all of them mapped; no part of a page that was split. Returns whether
    /// it did. If not, or if the section is not of [this table's flags](Self::marks_for), nothing is changed, and
    /// [`unmap`](Self::unmap) does the work.
    ///
    /// Hardware may then still hold leaves of `range`, and nothing else of it. Costs one walk, a load and a store for
    /// each entry. Never allocates or waits.
    #[inline]
    pub fn unmap_in(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        let (iova, len) = (range.start().get(), range.len());
        let is_stray = Self::ends(iova, len) & self.stray[0];
        let Some(near) = self.near.get(turn).filter(|_| is_stray == 0) else {
            return false;
        };
        if len >= self.second {
            return self.unmap_page(iova, len);
        }
        self.lowest(near, iova, Self::CLOSED).is_some_and(|at| self.clear_granules(at, len))
    }

    /// Whether addresses and lengths are multiples of the granule; `bits` is their OR.
    #[inline]
    pub(super) const fn are_whole(bits: u64) -> bool {
        bits & ((1 << X::GRANULE_SHIFT) - 1) == 0
    }

    /// The OR of the addresses of the first and the last granule of `len` bytes at `start`. It has stray bits if
    /// `start` or `len` is no multiple of the granule.
    #[inline]
    const fn ends(start: u64, len: u64) -> u64 {
        start | start.wrapping_add(len.wrapping_sub(1 << X::GRANULE_SHIFT))
    }

    /// Enters granules from `at` on, in a lowest table, if their entries lie in one frame and are free. Returns whether
    /// it did. Called inside the section in which the table was found; the arguments are whole granules that exist.
    #[inline]
    fn enter_granules(&self, at: Position, phys: u64, len: u64, attributes: Attributes) -> bool {
        if len == 1 << X::GRANULE_SHIFT {
            return self.enter_granule(at, phys, attributes);
        }
        // Entries may hold an address's higher bits in another place.
        let is_one_piece = (phys ^ (phys + len - 1)) >> ADDRESS_BITS == 0;
        let words = self.words(at).get(..(len >> X::GRANULE_SHIFT) as usize);
        let Some(words) = words.filter(|_| is_one_piece) else {
            return false;
        };
        let size = LeafSize { level: 1, run: 0 };
        let first = self.format().leaf(PhysAddr::new(phys), size, attributes);
        let is_entered = enter(words, first, self.format().stride(size));
        if is_entered {
            self.clean(words);
        }
        is_entered
    }

    /// As [`enter_granules`](Self::enter_granules), for a list of `len` bytes in all. All addresses agree with `first`
    /// from bit 48 on.
    #[inline]
    fn enter_list(
        &self,
        at: Position,
        len: u64,
        (list, first): (impl Iterator<Item = (PhysAddr, u64)>, PhysAddr),
        attributes: Attributes,
    ) -> bool {
        let words = self.words(at).get(..(len >> X::GRANULE_SHIFT) as usize);
        let Some(words) = words.filter(|words| !differ(words, 0, u64::MAX)) else {
            return false;
        };
        let size = LeafSize { level: 1, run: 0 };
        let (stride, leaf) = (self.format().stride(size), self.format().leaf(first, size, attributes));
        let mut rest = words;
        for (phys, len) in list {
            // A piece may lie before the first.
            let granules = phys.get().wrapping_sub(first.get()).cast_signed() >> X::GRANULE_SHIFT;
            let leaf = leaf.wrapping_add(granules.cast_unsigned().wrapping_mul(stride));
            let parts = rest.split_at_checked((len >> X::GRANULE_SHIFT) as usize);
            let Some((piece, behind)) = parts else {
                broken("a list and its clone, whose lengths were added up, differ")
            };
            match piece {
                [word] => word.store(leaf, Ordering::Release),
                words => _ = store(words, leaf, stride),
            }
            rest = behind;
        }
        self.clean(words);
        true
    }

    /// Clears granules from `at` on, in a lowest table that is open to unmaps and in which no page was split, if all of
    /// them lie in one frame and are mapped. Returns whether it did. Called inside the section in which the table was
    /// found.
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
        let is_cleared = clear::<X>(words, first);
        if is_cleared {
            self.clean(words);
        }
        is_cleared
    }
}

/// Stores `value`, and `stride` more each time, to `words`, if all are free. Returns whether they were. Not inlined:
/// otherwise the path for one word would also save the registers that this needs.
#[inline(never)]
fn enter(words: &[AtomicU64], value: u64, stride: u64) -> bool {
    let is_free = !differ(words, 0, u64::MAX);
    if is_free {
        let (halves, rest) = words.as_chunks::<HALF>();
        let value = halves.iter().fold(value, |value, half| store(half, value, stride));
        store(rest, value, stride);
    }
    is_free
}

/// Clears `words`, if all are of the same kind as `first`. Returns whether they were. Not inlined, as [`enter`].
#[inline(never)]
fn clear<X: Format>(words: &[AtomicU64], first: u64) -> bool {
    let are_alike = !differ(words, first, X::KIND);
    if are_alike {
        zero(words);
    }
    are_alike
}
