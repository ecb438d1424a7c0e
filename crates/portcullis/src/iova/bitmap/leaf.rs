//! The bits of a leaf: one for each page, in one cache line. Its fit is computed from the bits alone, so it is exact.

use super::fit::{FitBits, LEAF_PAGES};
use super::runs::highest_in;
use super::slab::Entry;

const WORDS: usize = (LEAF_PAGES / u64::BITS) as usize;
/// For each order up to 6, the last bits of the blocks of `2^order` bits.
const LAST: [u64; 7] = [
    u64::MAX,
    0xaaaa_aaaa_aaaa_aaaa,
    0x8888_8888_8888_8888,
    0x8080_8080_8080_8080,
    0x8000_8000_8000_8000,
    0x8000_0000_8000_0000,
    0x8000_0000_0000_0000,
];

/// For each word of a leaf, the mask of a leaf that selects this word.
static SELECT: [[u64; WORDS]; WORDS] = {
    let mut select = [[0; WORDS]; WORDS];
    let mut word = 0;
    while word < WORDS {
        select[word][word] = u64::MAX;
        word += 1;
    }
    select
};

/// As many pages as a cache line has bits. A set bit is a free page. Pages are numbered from the beginning of the leaf.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Leaf([u64; WORDS]);

impl Leaf {
    pub(super) const USED: Self = Self([0; WORDS]);
    pub(super) const FREE: Self = Self([u64::MAX; WORDS]);

    /// Returns the words that `[start, end)` touches, each with the bits of the range in it. The range is not empty and
    /// lies inside the leaf.
    #[inline]
    fn masks(start: u32, end: u32) -> impl Iterator<Item = (usize, u64)> {
        let (first, last) = ((start / 64) as usize, ((end - 1) / 64) as usize);
        (first..=last).map(move |word| {
            let low = if word == first { u64::MAX << (start % 64) } else { u64::MAX };
            let high = if word == last { u64::MAX >> (63 - (end - 1) % 64) } else { u64::MAX };
            (word, low & high)
        })
    }

    #[inline]
    pub(super) fn is_used(&self, start: u32, end: u32) -> bool {
        Self::masks(start, end).all(|(word, mask)| self.0[word] & mask == 0)
    }

    pub(super) fn only(mut self, start: u32, end: u32) -> Self {
        for outside in [(0, start), (end, LEAF_PAGES)] {
            if outside.0 < outside.1 {
                self.set(outside.0, outside.1, false);
            }
        }
        self
    }

    /// Returns this leaf without the pages that are free in `part` and used in `left`. Free pages of `left` are free in
    /// `part`, and those of `part` are free here.
    pub(super) fn less(mut self, part: Self, left: Self) -> Self {
        for (bits, (part, left)) in self.0.iter_mut().zip(part.0.into_iter().zip(left.0)) {
            *bits ^= part ^ left;
        }
        self
    }

    #[inline]
    pub(super) fn set(&mut self, start: u32, end: u32, free: bool) -> u32 {
        let mut changed = 0;
        for (word, mask) in Self::masks(start, end) {
            let old = self.0[word];
            self.0[word] = if free { old | mask } else { old & !mask };
            changed += (old ^ self.0[word]).count_ones();
        }
        changed
    }

    #[inline(always)]
    pub(super) fn toggled(mut self, start: u32, end: u32) -> Self {
        if start / 64 != (end - 1) / 64 {
            return self.toggled_across(start, end);
        }
        // All words are written, in vectors: a vector load of a word that was just stored by itself would stall.
        let mask = (u64::MAX >> (64 - (end - start))) << (start % 64);
        for (bits, select) in self.0.iter_mut().zip(SELECT[(start / 64) as usize % WORDS]) {
            *bits ^= mask & select;
        }
        self
    }

    fn toggled_across(mut self, start: u32, end: u32) -> Self {
        for (word, mask) in Self::masks(start, end) {
            self.0[word] ^= mask;
        }
        self
    }

    /// The first page at or after `from` that is free, or that is used.
    #[inline]
    pub(super) fn first(&self, from: u32, free: bool) -> Option<u32> {
        let flip = if free { 0 } else { u64::MAX };
        let mut word = (from / 64) as usize;
        let mut bits = (self.0.get(word)? ^ flip) & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = self.0.get(word)? ^ flip;
        }
        Some(word as u32 * 64 + bits.trailing_zeros())
    }

    #[inline]
    pub(super) fn last(&self, to: u32, free: bool) -> Option<u32> {
        let flip = if free { 0 } else { u64::MAX };
        let last = to.checked_sub(1)?;
        let mut word = (last / 64) as usize;
        let mut bits = (self.0.get(word)? ^ flip) & (u64::MAX >> (63 - last % 64));
        while bits == 0 {
            word = word.checked_sub(1)?;
            bits = self.0[word] ^ flip;
        }
        Some(word as u32 * 64 + bits.ilog2())
    }

    /// Whether `[start, end)`, with the free pages around it, reaches either end of the leaf.
    pub(super) fn is_edge(&self, start: u32, end: u32) -> bool {
        self.last(start, false).is_none() || self.first(end, false).is_none()
    }

    pub(super) fn ends(&self) -> (u64, u64) {
        let prefix = self.first(0, false).unwrap_or(LEAF_PAGES);
        let suffix = LEAF_PAGES - self.last(LEAF_PAGES, false).map_or(0, |page| page + 1);
        (prefix.into(), suffix.into())
    }

    /// The runs in order, each as its first page and the page after it.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut from = 0;
        core::iter::from_fn(move || {
            let start = self.first(from, true)?;
            from = self.first(start, false).unwrap_or(LEAF_PAGES);
            Some((start, from))
        })
    }

    /// The highest place for `pages` pages at a multiple of `2^order`. The order is at most 9.
    #[inline]
    pub(super) fn place(&self, pages: u64, order: u32) -> Option<u32> {
        match LAST.get(order as usize) {
            // An aligned block of such an order lies in one word.
            Some(&last) if pages <= 1 << order => self.place_in_words(pages, order, last),
            _ => self.place_in_runs(pages, order),
        }
    }

    /// Takes up to `most` places, and calls `put` with the first page of each, as that many calls of
    /// [`place`](Self::place) would find them. Returns their number. `first` is the leaf's first page.
    pub(super) fn take(
        &mut self,
        pages: u64,
        order: u32,
        first: u64,
        most: usize,
        mut put: impl FnMut(u64),
    ) -> usize {
        let mut taken = 0;
        let Some(&last) = LAST.get(order as usize).filter(|_| pages <= 1 << order) else {
            while taken < most
                && let Some(start) = self.place(pages, order)
            {
                self.set(start, start + pages as u32, false);
                put(first + u64::from(start));
                taken += 1;
            }
            return taken;
        };
        // Each block lies in one word, and taking one leaves the others free: each word is searched once.
        let (width, low) = (1 << order, u64::MAX >> (64 - pages));
        for word in (0..WORDS).rev() {
            let mut blocks = blocks(self.0[word], low, width, last);
            while let Some(bit) = blocks.checked_ilog2() {
                if taken == most {
                    return taken;
                }
                let start = bit + 1 - width;
                blocks ^= 1 << bit;
                self.0[word] ^= low << start;
                put(first + u64::from(word as u32 * 64 + start));
                taken += 1;
            }
        }
        taken
    }

    /// As [`place`](Self::place), for natural alignment inside words. `last` has the last bit of each block of the
    /// order.
    #[inline]
    fn place_in_words(&self, pages: u64, order: u32, last: u64) -> Option<u32> {
        let (width, low) = (1 << order, u64::MAX >> (64 - pages));
        let fits = |(word, bits): (usize, &u64)| {
            let blocks = blocks(*bits, low, width, last);
            Some(word as u32 * 64 + blocks.checked_ilog2()? + 1 - width)
        };
        self.0.iter().enumerate().rev().find_map(fits)
    }

    /// As [`place`](Self::place), for requests that may cross words: looks at every run.
    fn place_in_runs(&self, pages: u64, order: u32) -> Option<u32> {
        let place = |(start, end): (u32, u32)| highest_in(start.into(), end.into(), pages, order);
        self.runs().filter_map(place).last().map(|page| page as u32)
    }
}

/// The last bit of each block of `width` bits in which all bits of `low` are set. `last` has the last bit of every
/// block.
#[inline]
const fn blocks(bits: u64, low: u64, width: u32, last: u64) -> u64 {
    // The pages that a request would take from each block.
    let wanted = low * (last >> (width - 1));
    // Adding all lower bits carries into the last one if any of them is set.
    let missing = !bits & wanted;
    !(((missing & !last) + !last) | missing) & last
}

impl Entry for Leaf {
    fn unused(next: u32) -> Self {
        let mut leaf = Self::USED;
        leaf.0[0] = next.into();
        leaf
    }

    fn next(&self) -> u32 {
        self.0[0] as u32
    }
}

const NIBBLES: u64 = u64::MAX / 0xf;
const BYTES: u64 = u64::MAX / 0xff;
const SHORTS: u64 = u64::MAX / 0xffff;
const HALVES: u64 = u64::MAX / 0xffff_ffff;

const EVEN: u64 = u64::MAX / 0x3;

/// Joins each lane in `low` with the one in the same place in `high`. The lanes count up to `1 << order`; `full` has
/// this bit of each of them.
#[inline(always)]
fn join(low: u64, high: u64, order: u32, full: u64) -> u64 {
    // The high count is added, with all of its bits, if the low one is full.
    let full = low & full;
    low + (high & ((full << 1) - (full >> order)))
}

/// The larger of each pair of bytes. All bytes are less than 128.
#[inline(always)]
fn max(a: u64, b: u64) -> u64 {
    const GUARDS: u64 = BYTES << 7;
    let difference = (a | GUARDS) - b;
    let larger = difference & GUARDS;
    b + (difference & (larger - (larger >> 7)))
}

impl Leaf {
    /// Returns what fits in the leaf. Constant time: all orders and words are computed at once and without branches,
    /// which would be mispredicted half of the time.
    ///
    /// For each order `k`, a word is a row of lanes of `2^k` bits, one for each block of the order. A lane counts the
    /// free pages at the start of its block. The count of two neighbours together is that of the first, plus that of
    /// the second if the first is full.
    // Inlined, the code would leave the vector registers too early.
    #[inline(never)]
    pub(super) fn fit(&self) -> FitBits {
        // Order 1, then 2, then 3.
        let pairs = self.0.map(|bits| (bits & EVEN) + (bits & (bits >> 1) & EVEN));
        let fours = pairs.map(|lanes| {
            let (low, high) = (lanes & (NIBBLES * 3), (lanes >> 2) & (NIBBLES * 3));
            join(low, high, 1, NIBBLES << 1)
        });
        let eights = fours.map(|lanes| {
            let (low, high) = (lanes & (BYTES * 7), (lanes >> 4) & (BYTES * 7));
            join(low, high, 2, BYTES << 2)
        });
        // A byte holds the counts of all orders up to 6. So from here on the lanes of several words share a word: order
        // 4 of two words, order 5 of four, order 6 of all.
        let lanes =
            eights.map(|lanes| join(lanes & (SHORTS * 0xf), (lanes >> 8) & (SHORTS * 0xf), 3, SHORTS << 3));
        let four: [u64; 4] = core::array::from_fn(|at| lanes[2 * at] | lanes[2 * at + 1] << 8);
        let low = HALVES * 0xffff;
        let lanes = four.map(|lanes| join(lanes & low, (lanes >> 16) & low, 4, BYTES << 4));
        let five: [u64; 2] = core::array::from_fn(|at| lanes[2 * at] | lanes[2 * at + 1] << 16);
        let low = u64::from(u32::MAX);
        let lanes = five.map(|lanes| join(lanes & low, lanes >> 32, 5, BYTES << 5));
        let six = lanes[0] | lanes[1] << 32;
        let low = SHORTS * 0xff;
        let seven = join(six & low, (six >> 8) & low, 6, SHORTS << 6);
        let low = HALVES * 0xffff;
        let eight = join(seven & low, (seven >> 16) & low, 7, HALVES << 7);
        let nine = join(eight & u64::from(u32::MAX), eight >> 32, 8, 1 << 8);

        // For the smallest lanes it is enough to know which counts occur.
        let any = |words: [u64; 8]| words.into_iter().fold(0, |any, word| any | word);
        let (pair, two) = (any(pairs), any(fours));
        let threes = any(fours.map(|lanes| lanes & (lanes >> 1) & NIBBLES)) | (two & (NIBBLES << 2));
        let count = |lanes: u64| u64::from(lanes != 0);
        let one = count(any(self.0)) + count(pair) + count(pair & (EVEN << 1));
        let two = count(two) + count(two & (NIBBLES * 6)) + count(threes) + count(two & (NIBBLES << 2));

        let eights: [u64; 4] = core::array::from_fn(|at| max(eights[at], eights[at + 4]));
        let four: [u64; 2] = core::array::from_fn(|at| max(four[at], four[at + 2]));
        let eights: [u64; 2] = core::array::from_fn(|at| max(eights[at], eights[at + 2]));
        // Each order is reduced to four bytes, and then to one.
        let half = |bytes: u64| max(bytes, bytes >> 32) & u64::from(u32::MAX);
        let low = half(max(eights[0], eights[1])) | half(max(four[0], four[1])) << 32;
        let high = half(max(five[0], five[1])) | half(six) << 32;
        let fold = |bytes: u64| {
            let bytes = max(bytes, bytes >> 16);
            max(bytes, bytes >> 8) & (HALVES * 0xff)
        };
        let low = fold(low) | fold(high) << 8;
        // Orders 3 and 5 in the lower half, 4 and 6 in the upper one.
        let low = one
            | two << 8
            | (low & 0xff) << 16
            | (low >> 32 & 0xff) << 24
            | (low & 0xff00) << 24
            | (low >> 40) << 40;
        let seven = (seven & 0xffff).max(seven >> 16 & 0xffff).max((seven >> 32 & 0xffff).max(seven >> 48));
        let eight = (eight & 0xffff).max(eight >> 32);
        FitBits::new(low, seven as u32, eight as u32, nine as u32)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/iova/bitmap/leaf.rs"]
mod tests;
