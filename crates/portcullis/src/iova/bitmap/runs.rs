//! Summaries of the runs of free pages that touch the boundary of a leaf.
//!
//! A block's summary has its *prefix* and *suffix* (the free pages at its start and at its end) and its *longest* run,
//! as a segment tree for the longest run has, and Go's page allocator (`start`, `max` and `end` of `pallocSum`). The
//! summaries of neighbours join in constant time: the suffix of one block and the prefix of the next are one run.
//!
//! Aligned requests need more: for every order `k` from 9 on, the longest *remainder*, the part of a run from its first
//! multiple of `2^k` on. The request fits if it is no longer than that. Remainders are stored as *losses*, by which
//! they are shorter than the longest run. Fewer than `2^k` pages precede a run's first multiple of `2^k`. So a loss has
//! at most `k` bits, however long the runs are, a vector register holds those of several orders, and the least loss of
//! all runs gives the longest remainder.

/// The highest order to which [`Bitmap::alloc`](super::Bitmap::alloc) can align: `2^18` pages, 1 GiB in pages of 4 KiB.
pub const MAX_ORDER: u32 = 18;

/// Returns the highest multiple of `2^order` in `[start, end)` with at least `pages` pages from there to `end`. The
/// order is less than 64.
#[inline]
pub(super) fn highest_in(start: u64, end: u64, pages: u64, order: u32) -> Option<u64> {
    let highest = end.checked_sub(pages)? >> order << order;
    (highest >= start).then_some(highest)
}

/// The summary of a block. The block's ends cut runs off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Runs {
    pub(super) prefix: u64,
    pub(super) suffix: u64,
    longest: u64,
    /// Losses of orders 9 to 16.
    middle: [u16; 8],
    /// Losses of orders 17 and 18.
    far: [u32; 2],
}

const MIDDLE_MASKS: [u16; 8] = [0x01ff, 0x03ff, 0x07ff, 0x0fff, 0x1fff, 0x3fff, 0x7fff, 0xffff];
const FAR_MASKS: [u32; 2] = [0x1_ffff, 0x3_ffff];
/// A run that is shorter than another by this much has no longer remainder at any order.
const OUTDONE: u64 = 1 << MAX_ORDER;

/// A block's contribution to the one that it is a part of.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) prefix: u64,
    pub(super) suffix: u64,
    /// The part's own summary, if it is a node: runs may lie inside.
    pub(super) inner: Option<&'a Runs>,
}

impl Part<'_> {
    pub(super) const NONE: Self = Self { prefix: 0, suffix: 0, inner: None };

    pub(super) const fn whole(pages: u64) -> Self {
        Self { prefix: pages, suffix: pages, inner: None }
    }
}

impl Runs {
    pub(super) const NONE: Self = Self { prefix: 0, suffix: 0, longest: 0, middle: [0; 8], far: [0; 2] };

    /// The runs of a block at page `base` that consists of `parts` of `size` pages each.
    pub(super) fn of_parts<const N: usize>(base: u64, size: u64, parts: &[Part<'_>; N]) -> Self {
        // The runs at the boundaries of parts, except for the last one, which is `(start, len)`.
        let mut spans = [(0, 0); N];
        let mut count = 0;
        let (mut start, mut len, mut end) = (base, 0, base);
        let mut longest = 0;
        for part in parts {
            end += size;
            len += part.prefix;
            if part.prefix == size {
                continue;
            }
            if len > 0 {
                spans[count] = (start, len);
                count += 1;
                longest = longest.max(len);
            }
            longest = part.inner.map_or(longest, |inner| longest.max(inner.longest));
            (start, len) = (end - part.suffix, part.suffix);
        }
        longest = longest.max(len);
        if longest == 0 {
            return Self::NONE;
        }
        let last = (start, len);
        let spans = &spans[..count];
        let prefix = spans.first().unwrap_or(&last);
        let prefix = if prefix.0 == base { prefix.1 } else { 0 };
        let mut runs = Self { prefix, suffix: len, longest, middle: [!0; 8], far: [!0; 2] };
        for &(start, len) in spans.iter().chain([&last]) {
            runs.add_run(start, len);
        }
        for inner in parts.iter().filter_map(|part| part.inner) {
            runs.add_inner(inner);
        }
        runs
    }

    /// Adds the remainders of the run of `len` pages at `start`. `longest` is final already.
    #[inline]
    fn add_run(&mut self, start: u64, len: u64) {
        // The losses of the longest run do not saturate, and only the least of each order is kept.
        let short = self.longest - len;
        if short >= OUTDONE {
            return;
        }
        let before = start.wrapping_neg();
        let less = short.min(0xffff) as u16;
        for (loss, mask) in self.middle.iter_mut().zip(MIDDLE_MASKS) {
            *loss = (*loss).min((before as u16 & mask).saturating_add(less));
        }
        for (loss, mask) in self.far.iter_mut().zip(FAR_MASKS) {
            *loss = (*loss).min((before as u32 & mask) + short as u32);
        }
    }

    #[inline]
    fn add_inner(&mut self, inner: &Self) {
        let short = self.longest - inner.longest;
        if short >= OUTDONE {
            return;
        }
        let less = short.min(0xffff) as u16;
        for (loss, inner) in self.middle.iter_mut().zip(inner.middle) {
            *loss = (*loss).min(inner.saturating_add(less));
        }
        for (loss, inner) in self.far.iter_mut().zip(inner.far) {
            *loss = (*loss).min(inner + short as u32);
        }
    }

    /// The longest remainder for `order`, if that is 9 to [`MAX_ORDER`]; for order 0 the longest run; for other orders
    /// 0.
    #[inline]
    pub(super) fn longest(&self, order: u32) -> u64 {
        let loss = match order {
            0 => 0,
            9..=16 => self.middle[order as usize - 9].into(),
            17 | 18 => self.far[order as usize - 17].into(),
            _ => return 0,
        };
        self.longest.saturating_sub(loss)
    }
}
