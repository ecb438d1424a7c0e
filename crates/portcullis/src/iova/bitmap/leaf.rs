//! The bits: one cache line, one bit for each page.

use super::loose::Loose;
use crate::iova::placement::Placement;

/// Pages in a leaf.
pub(super) const LEAF_PAGES: u32 = 512;
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

/// For each word of a leaf, what selects it.
static SELECT: [[u64; WORDS]; WORDS] = {
    let mut select = [[0; WORDS]; WORDS];
    let mut word = 0;
    while word < WORDS {
        select[word][word] = u64::MAX;
        word += 1;
    }
    select
};

/// As many pages as a cache line has bits. A bit that is set stands for a page that is free. Pages are
/// numbered from the beginning of the leaf.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Leaf(pub(super) [u64; WORDS]);

impl Leaf {
    /// Nothing is free.
    pub(super) const USED: Self = Self([0; WORDS]);
    /// Everything is free.
    pub(super) const FREE: Self = Self([u64::MAX; WORDS]);

    /// The words that `[start, end)` touches, each with the bits of the range in it. The range is not empty
    /// and lies inside the leaf.
    #[inline]
    fn masks(start: u32, end: u32) -> impl Iterator<Item = (usize, u64)> {
        let (first, last) = ((start / 64) as usize, ((end - 1) / 64) as usize);
        (first..=last).map(move |word| {
            let low = if word == first { u64::MAX << (start % 64) } else { u64::MAX };
            let high = if word == last { u64::MAX >> (63 - (end - 1) % 64) } else { u64::MAX };
            (word, low & high)
        })
    }

    /// Whether no page of `[start, end)` is free.
    #[inline]
    pub(super) fn is_used(&self, start: u32, end: u32) -> bool {
        Self::masks(start, end).all(|(word, mask)| self.0[word] & mask == 0)
    }

    /// Makes `[start, end)` free or used; returns for how many pages that is new.
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

    /// With `[start, end)` the other way round.
    #[inline(always)]
    pub(super) fn toggled(mut self, start: u32, end: u32) -> Self {
        if start / 64 != (end - 1) / 64 {
            return self.toggled_across(start, end);
        }
        // No word is written alone: the next that happens is that all are read in vectors.
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

    /// The first page from `from` on that is free, or that is used.
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

    /// The last page before `to` that is free, or that is used.
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

    /// Whether `[start, end)` and what is free around it reaches either end of the leaf.
    pub(super) fn is_edge(&self, start: u32, end: u32) -> bool {
        self.last(start, false).is_none() || self.first(end, false).is_none()
    }

    /// The free pages at the beginning, and those at the end.
    pub(super) fn ends(&self) -> (u64, u64) {
        let prefix = self.first(0, false).unwrap_or(LEAF_PAGES);
        let suffix = LEAF_PAGES - self.last(LEAF_PAGES, false).map_or(0, |page| page + 1);
        (prefix.into(), suffix.into())
    }

    /// The runs in the leaf, as its first page and the page behind it, in order.
    fn runs(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut from = 0;
        core::iter::from_fn(move || {
            let start = self.first(from, true)?;
            from = self.first(start, false).unwrap_or(LEAF_PAGES);
            Some((start, from))
        })
    }

    /// The longest runs, for every order.
    pub(super) fn loose(&self) -> Loose {
        self.runs().fold(Loose::NONE, |best, (start, end)| best.max(Loose::of_run(start, end)))
    }

    /// The preferred place for `pages` pages at a multiple of `2^order`, an order of at most 9.
    #[inline]
    pub(super) fn place(&self, pages: u64, order: u32, placement: Placement) -> Option<u32> {
        match LAST.get(order as usize) {
            // Then no fit crosses words.
            Some(&last) if pages <= 1 << order => self.place_in_words(pages, order, last, placement),
            _ => self.place_in_runs(pages, order, placement),
        }
    }

    /// The same for natural alignment inside words. `last` has the last bit of each block of the order.
    #[inline]
    fn place_in_words(&self, pages: u64, order: u32, last: u64, placement: Placement) -> Option<u32> {
        let width = 1 << order;
        // The pages that it would take from each block.
        let wanted = (u64::MAX >> (64 - pages)) * (last >> (width - 1));
        let fits = |(word, bits): (usize, &u64)| {
            // Adding all lower bits carries into the last one if any of them is set.
            let missing = !bits & wanted;
            let blocks = !(((missing & !last) + !last) | missing) & last;
            let bit = match placement {
                Placement::TopDown => blocks.checked_ilog2()?,
                Placement::BottomUp => Some(blocks.trailing_zeros()).filter(|_| blocks != 0)?,
            };
            Some(word as u32 * 64 + bit + 1 - width)
        };
        let mut words = self.0.iter().enumerate();
        match placement {
            Placement::TopDown => words.rev().find_map(fits),
            Placement::BottomUp => words.find_map(fits),
        }
    }

    /// The same for requests that may cross words: looks at every run.
    fn place_in_runs(&self, pages: u64, order: u32, placement: Placement) -> Option<u32> {
        let mut places = self.runs().filter_map(|(start, end)| {
            let page = placement.within(start.into(), end.into(), pages, order)?;
            Some(page as u32)
        });
        match placement {
            Placement::TopDown => places.last(),
            Placement::BottomUp => places.next(),
        }
    }
}
