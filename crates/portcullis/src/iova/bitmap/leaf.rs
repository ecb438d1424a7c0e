//! The bits: one cache line, one bit for each page.

use super::fit::Fit;
use crate::iova::placement::Placement;

/// Pages in a leaf.
pub(super) const LEAF_PAGES: u32 = 512;
const WORDS: usize = (LEAF_PAGES / u64::BITS) as usize;
/// How many edges of a word are taken down at once.
const EDGES_OF_WORD: usize = 6;
/// Room for those of a leaf and its end; a power of two, so that staying inside costs nothing.
const EDGES: usize = 64;
const _: () = assert!(WORDS * EDGES_OF_WORD < EDGES, "all edges and the end of the leaf");

/// For each order up to 6, the bits of a word that stand for multiples of `2^order`.
const ALIGNED: [u64; 7] = [
    u64::MAX,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];

/// As many pages as a cache line has bits. A bit that is set stands for a page that is free. Pages are
/// numbered from the beginning of the leaf.
#[derive(Clone, Copy)]
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

    /// The run of free pages around `[start, end)`, which is free and not empty.
    #[inline]
    pub(super) fn run_around(&self, start: u32, end: u32) -> (u32, u32) {
        (self.last(start, false).map_or(0, |page| page + 1), self.first(end, false).unwrap_or(LEAF_PAGES))
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

    /// What the leaf has room for. The result is known to be at most `bound`; where that is reached early,
    /// the rest may not be looked at.
    pub(super) fn fit(&self, bound: Fit) -> Fit {
        // Branches that depend on the bits are guessed wrong half of the time, and cost more than all else.
        // So this takes down six edges for each word whether or not there are that many, and keeps those
        // that exist. Leaves with a word that has more are counted run by run.
        let mut edges = [0_u16; EDGES];
        let (mut count, mut more, mut before) = (0, 0, 0);
        for (word, &bits) in self.0.iter().enumerate() {
            // A bit for each page that differs from the one before it: runs begin and end there.
            let mut rest = bits ^ (bits << 1 | before);
            before = bits >> 63;
            for _ in 0..EDGES_OF_WORD {
                edges[count % EDGES] = word as u16 * 64 + rest.trailing_zeros() as u16;
                count += usize::from(rest != 0);
                rest &= rest.wrapping_sub(1);
            }
            more |= rest;
        }
        if more != 0 {
            return self.fit_by_runs(bound);
        }
        edges[count % EDGES] = LEAF_PAGES as u16;
        count += before as usize;
        let mut fit = Fit::NONE;
        for run in edges[..count.min(EDGES)].chunks_exact(2) {
            fit = fit.max(Fit::of_run(run[0].into(), run[1].into()));
        }
        fit
    }

    /// The same for any number of runs.
    #[cold]
    fn fit_by_runs(&self, bound: Fit) -> Fit {
        let mut fit = Fit::NONE;
        let mut from = 0;
        while let Some(start) = self.first(from, true) {
            from = self.first(start, false).unwrap_or(LEAF_PAGES);
            fit = fit.max(Fit::of_run(start, from));
            if fit.is(&bound) {
                break;
            }
        }
        fit
    }

    /// The preferred place for `pages` pages at a multiple of `2^order`, an order of at most 9.
    #[inline]
    pub(super) fn place(&self, pages: u64, order: u32, placement: Placement) -> Option<u32> {
        // Then no fit crosses words.
        if pages <= 1 << order
            && let Some(&aligned) = ALIGNED.get(order as usize)
        {
            let fits = |(word, &bits): (usize, &u64)| {
                let starts = starts(bits, pages as u32) & aligned;
                let bit = match placement {
                    Placement::TopDown => starts.checked_ilog2()?,
                    Placement::BottomUp => Some(starts.trailing_zeros()).filter(|_| starts != 0)?,
                };
                Some(word as u32 * 64 + bit)
            };
            let mut words = self.0.iter().enumerate();
            return match placement {
                Placement::TopDown => words.rev().find_map(fits),
                Placement::BottomUp => words.find_map(fits),
            };
        }
        self.place_in_runs(pages, order, placement)
    }

    /// The same for requests that may cross words: looks at every run.
    fn place_in_runs(&self, pages: u64, order: u32, placement: Placement) -> Option<u32> {
        let mut found = None;
        let mut from = 0;
        while let Some(start) = self.first(from, true) {
            let end = self.first(start, false).unwrap_or(LEAF_PAGES);
            if let Some(page) = placement.within(start.into(), end.into(), pages, order) {
                found = Some(page as u32);
                if placement == Placement::BottomUp {
                    break;
                }
            }
            from = end;
        }
        found
    }
}

/// The bits at which runs of at least `pages` bits begin, from 1 to 64.
#[inline]
fn starts(mut bits: u64, pages: u32) -> u64 {
    // `bits` has what begins runs of `have`; a run of `have + more` is two that begin `more` apart.
    let mut have = 1;
    while have < pages {
        let more = have.min(pages - have);
        bits &= bits >> more;
        have += more;
    }
    bits
}
