//! The short ways: changes that take one walk and some stores, in one turn of a CPU that the
//! caller holds. They change everything or nothing.
//!
//! They never allocate and never wait. They leave some cases to the long ways, which do the work or
//! return the error: a table that is missing, a page of several entries, a large page that must be
//! split, an entry that is in use.

use super::format::{Attributes, Entry, Format, LeafSize};
use super::map::{ADDRESS_BITS, store};
use super::place::Position;
use super::table::PageTable;
use super::unmap::{HALF, differ, zero};
use crate::addr::{IovaRange, PhysAddr};
use crate::percpu::Turn;
use crate::platform::{Frames, LocalCpu, Platform};
use crate::sync::{AtomicU64, Ordering};

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Maps `range` to the memory at `phys`, if that takes only a walk and some stores: one page,
    /// or granules in one frame of a lowest table, whose tables exist and whose entries are free.
    /// Returns whether the range is mapped. If not, nothing is changed, and [`map`](Self::map) does
    /// the work or returns the error.
    ///
    /// Costs one walk, two stores for the turn, a load and a store for each entry. Never allocates
    /// or waits.
    ///
    /// # Safety
    /// As for [`map`](Self::map); and `cpu` is one that `platform` has lent.
    #[inline]
    pub unsafe fn map_fast<P: Platform>(
        &self,
        platform: &P,
        cpu: &LocalCpu<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        let turn = if self.platform.is(platform) { self.turn(cpu) } else { None };
        // SAFETY: the caller's promise.
        turn.is_some_and(|turn| unsafe { self.map_in(&turn, range, phys, attributes) })
    }

    /// As [`map_fast`](Self::map_fast), in a turn that the caller has. Returns `false` if it
    /// is not a turn of [this table's marks](Self::marks_for).
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    // Always: whether the compiler does it by itself depends on the folder that the sources are in, and costs 24 instructions.
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
        // A range does not wrap; nor does memory, if it is as long as a range that does not run
        // past the last address.
        let is_stray = Self::ends(iova, len) & stray_iova | Self::ends(phys, len) & stray_phys;
        let Some(near) = self.near.get(turn).filter(|_| is_stray == 0) else {
            return false;
        };
        if len >= self.second {
            return self.map_page(iova, phys, len, attributes);
        }
        self.lowest(near, iova, X::MARK).is_some_and(|at| self.enter_granules(at, phys, len, attributes))
    }

    /// Clears every entry of `range`, if that takes only a walk and some stores: one page that was
    /// mapped as such, or granules in one frame of a lowest table, all of them mapped; no part of a
    /// page that was split. Returns whether the range is unmapped. If not, nothing is changed, and
    /// [`unmap`](Self::unmap) does the work.
    ///
    /// Hardware may then still hold leaves of `range`, and nothing else of it. Costs one walk, two
    /// stores for the turn, a load and a store for each entry. Never allocates or waits.
    ///
    /// # Safety
    /// `cpu` is one that `platform` has lent.
    #[inline]
    pub unsafe fn unmap_fast<P: Platform>(&self, platform: &P, cpu: &LocalCpu<'_>, range: IovaRange) -> bool {
        let turn = if self.platform.is(platform) { self.turn(cpu) } else { None };
        turn.is_some_and(|turn| self.unmap_in(&turn, range))
    }

    /// As [`unmap_fast`](Self::unmap_fast), in a turn that the caller has. Returns `false` if
    /// it is not a turn of [this table's marks](Self::marks_for).
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

    /// Returns whether addresses and lengths are multiples of the granule; `bits` is the union of
    /// their bits.
    #[inline]
    pub(super) const fn are_whole(bits: u64) -> bool {
        bits & ((1 << X::GRANULE_SHIFT) - 1) == 0
    }

    /// Returns the union of the bits of the addresses of the first and the last granule of `len`
    /// bytes at `start`. It has stray bits if `start` or `len` is no multiple of the granule.
    #[inline]
    const fn ends(start: u64, len: u64) -> u64 {
        start | start.wrapping_add(len.wrapping_sub(1 << X::GRANULE_SHIFT))
    }

    /// Enters granules from `at` on, which is in a lowest table, if their entries lie in one frame
    /// and are free. Returns whether it entered them. Called inside the section in which the table
    /// was found; the arguments are whole granules that exist.
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

    /// Clears granules from `at` on, which is in a lowest table that is open to unmaps, and in
    /// which no page was split, if all of them lie in one frame and are mapped. Returns whether it
    /// cleared them. Called inside the section in which the table was found.
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

/// Stores `value`, and `stride` more each time, to `words`, if all of them are free. Returns
/// whether they were. This is not inlined, so that the case of one word does not pay for the
/// registers that it takes.
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

/// Clears `words`, if none of them is of another kind than `first`. Returns whether they were
/// alike. This is not inlined, for the reason given at [`enter`].
#[inline(never)]
fn clear<X: Format>(words: &[AtomicU64], first: u64) -> bool {
    let are_alike = !differ(words, first, X::KIND);
    if are_alike {
        zero(words);
    }
    are_alike
}
