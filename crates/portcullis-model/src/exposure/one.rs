//! A page with one translation, at most one live range and one open one: the common case.
//!
//! Its operations are those of [`Ranges`]; one whose result does not fit changes nothing and returns `None`.

use super::page::{Links, Rates};
use super::ranges::{Ended, Live, Ranges, Source};
use super::spans::Span;

/// The open state of a translation after the end of its mapping.
#[derive(Debug, Clone, Copy)]
struct Open {
    neighbour: bool,
    links: Links,
}

#[derive(Debug)]
pub(super) struct One {
    pub(super) settled: u64,
    /// The translation of the live or open range.
    iova_page: u64,
    /// Since when `ended` is stale.
    since: u64,
    /// The live range; may be empty.
    live: Span,
    /// The stale range, apart from `live`; empty unless the translation is open.
    ended: Span,
    /// Of `live`.
    neighbour: bool,
    open: Option<Open>,
}

impl One {
    pub(super) fn new(now: u64) -> Self {
        Self {
            settled: now,
            iova_page: 0,
            since: 0,
            live: Span::EMPTY,
            ended: Span::EMPTY,
            neighbour: false,
            open: None,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.live.is_empty() && self.open.is_none()
    }

    pub(super) fn rates(&self) -> Rates {
        let stale = self.ended.len();
        let neighbour = !self.live.is_empty() && self.neighbour
            || stale > 0 && self.open.is_some_and(|open| open.neighbour);
        Rates::of(stale, stale + self.live.len(), neighbour)
    }

    pub(super) fn begin(&mut self, iova_page: u64, span: Span, neighbour: bool, now: u64) -> Option<u64> {
        if !self.live.is_empty() || !self.is_through(iova_page) {
            return None;
        }
        let mut longest = 0;
        if self.ended.overlaps(span) {
            let mut rest = self.ended.without(span);
            let left = rest.next().unwrap_or(Span::EMPTY);
            if rest.next().is_some() {
                return None;
            }
            longest = self.age(now);
            self.ended = left;
        }
        (self.iova_page, self.live, self.neighbour) = (iova_page, span, neighbour);
        Some(longest)
    }

    pub(super) fn end(&mut self, iova_page: u64, span: Span, now: u64, open: bool) -> Option<u64> {
        let others = !self.live.is_empty() && self.live != span;
        if others || !self.is_through(iova_page) {
            return None;
        }
        if !open {
            self.live = Span::EMPTY;
            return Some(self.close(iova_page, now));
        }
        if !span.contains(self.ended) {
            return None;
        }
        let neighbour = !self.live.is_empty() && self.neighbour;
        self.live = Span::EMPTY;
        (self.iova_page, self.ended, self.since) = (iova_page, span, now);
        let open = self.open.get_or_insert(Open { neighbour: false, links: Links::default() });
        open.neighbour |= neighbour;
        Some(0)
    }

    pub(super) fn close(&mut self, iova_page: u64, now: u64) -> u64 {
        if self.iova_page != iova_page {
            return 0;
        }
        let longest = self.age(now);
        (self.ended, self.open) = (Span::EMPTY, None);
        longest
    }

    /// How long the ended range has been open.
    pub(super) fn age(&self, now: u64) -> u64 {
        if self.ended.is_empty() { 0 } else { now.saturating_sub(self.since) }
    }

    pub(super) fn links(&mut self, iova_page: u64) -> Option<&mut Links> {
        let open = self.open.as_mut().filter(|_| self.iova_page == iova_page)?;
        Some(&mut open.links)
    }

    /// Clears the links of the open translation, and returns it.
    pub(super) fn unlink(&mut self) -> Option<u64> {
        self.open.as_mut()?.links = Links::default();
        Some(self.iova_page)
    }

    pub(super) fn to_ranges(&self) -> Ranges {
        let &Self { settled, iova_page, since, live, ended, neighbour, open } = self;
        let live = (!live.is_empty()).then_some(Live { iova_page, span: live, neighbour });
        let ended = (!ended.is_empty()).then_some(Ended { span: ended, since });
        let source = open.map(|Open { neighbour, links }| Source {
            iova_page,
            ended: ended.into_iter().collect(),
            neighbour,
            links,
        });
        Ranges {
            settled,
            rates: self.rates(),
            union: live.iter().map(|live| live.span).collect(),
            live: live.into_iter().collect(),
            sources: source.into_iter().collect(),
        }
    }

    fn is_through(&self, iova_page: u64) -> bool {
        self.iova_page == iova_page || self.is_closed()
    }
}
