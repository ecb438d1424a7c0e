//! Byte ranges inside one page.

use smallvec::SmallVec;

/// Bytes `start..end` of a page; `end` is at most its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Span {
    pub(super) const EMPTY: Self = Self { start: 0, end: 0 };

    pub(super) fn len(self) -> u32 {
        self.end - self.start
    }

    pub(super) fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether every byte of `other` is in it; there may be none.
    pub(super) fn contains(self, other: Self) -> bool {
        other.is_empty() || self.start <= other.start && other.end <= self.end
    }

    /// What is left of it without `other`, which overlaps it: the part before and the part after.
    pub(super) fn without(self, other: Self) -> impl Iterator<Item = Self> {
        let before = Self { start: self.start, end: other.start };
        let after = Self { start: other.end, end: self.end };
        [before, after].into_iter().filter(|part| part.start < part.end)
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// How many bytes at least one of `spans` covers.
pub(super) fn covered(spans: impl Iterator<Item = Span>) -> u32 {
    let mut spans: SmallVec<[Span; 8]> = spans.collect();
    spans.sort_unstable();
    let mut total = 0;
    let mut reached = 0;
    for span in spans {
        if span.end > reached {
            total += span.end - span.start.max(reached);
            reached = span.end;
        }
    }
    total
}
