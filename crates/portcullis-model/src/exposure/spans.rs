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

    /// Whether it has every byte of `other`, which may be empty.
    pub(super) fn contains(self, other: Self) -> bool {
        other.is_empty() || self.start <= other.start && other.end <= self.end
    }

    /// It without `other`, which overlaps it: the part before and the part after.
    pub(super) fn without(self, other: Self) -> impl Iterator<Item = Self> {
        let before = Self { start: self.start, end: other.start };
        let after = Self { start: other.end, end: self.end };
        [before, after].into_iter().filter(|part| part.start < part.end)
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The bytes of `spans`, as sorted spans that are not adjacent.
pub(super) fn joined(spans: impl Iterator<Item = Span>) -> SmallVec<[Span; 2]> {
    let mut spans: SmallVec<[Span; 8]> = spans.collect();
    spans.sort_unstable();
    let mut joined: SmallVec<[Span; 2]> = SmallVec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => joined.push(span),
        }
    }
    joined
}

pub(super) fn bytes(spans: impl Iterator<Item = Span>) -> u32 {
    spans.map(Span::len).sum()
}
