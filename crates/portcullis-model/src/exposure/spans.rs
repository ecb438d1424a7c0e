//! Byte ranges inside one page.

use smallvec::SmallVec;

/// Bytes `start..end` of a page; `end` is at most 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) start: u16,
    pub(super) end: u16,
}

impl Span {
    pub(super) fn len(self) -> u64 {
        u64::from(self.end - self.start)
    }

    /// What is left of it without `other`: the part before and the part after.
    pub(super) fn without(self, other: Self) -> impl Iterator<Item = Self> {
        let before = Self { start: self.start, end: self.end.min(other.start) };
        let after = Self { start: self.start.max(other.end), end: self.end };
        let parts = if self.overlaps(other) { [Some(before), Some(after)] } else { [Some(self), None] };
        parts.into_iter().flatten().filter(|part| part.start < part.end)
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// How many bytes at least one of `spans` covers.
pub(super) fn covered(spans: impl Iterator<Item = Span>) -> u32 {
    let mut spans: SmallVec<[Span; 8]> = spans.collect();
    if let [only] = spans[..] {
        return u32::from(only.end - only.start);
    }
    spans.sort_unstable();
    let mut total = 0;
    let mut reached = 0;
    for span in spans {
        if span.end > reached {
            total += u32::from(span.end - span.start.max(reached));
            reached = span.end;
        }
    }
    total
}
