//! A page with any number of live and open ranges: the general case of [`Page`](super::page::Page).

use smallvec::SmallVec;

use super::page::{Links, Rates};
use super::spans::{Span, bytes, joined};

/// Above this number of ranges in one open translation, adjacent ranges are joined and count as old as the oldest of them. The
/// byte-nanoseconds stay exact; the longest time may then be too long, never too short.
const JOIN_ABOVE: usize = 64;

#[derive(Debug)]
pub(super) struct Live {
    pub(super) iova_page: u64,
    pub(super) span: Span,
    pub(super) neighbour: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) span: Span,
    pub(super) since: u64,
}

/// A translation that is still open after the end of mappings through it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) iova_page: u64,
    /// Ranges of ended mappings through it, without overlaps.
    pub(super) ended: SmallVec<[Ended; 1]>,
    pub(super) neighbour: bool,
    pub(super) links: Links,
}

#[derive(Debug)]
pub(super) struct Ranges {
    pub(super) settled: u64,
    pub(super) rates: Rates,
    pub(super) live: SmallVec<[Live; 2]>,
    /// The live bytes, joined: few spans even for thousands of mappings that share bytes.
    pub(super) union: SmallVec<[Span; 2]>,
    pub(super) sources: SmallVec<[Source; 1]>,
}

impl Ranges {
    /// Whether nothing is live or open, so that it can be dropped.
    pub(super) fn is_closed(&self) -> bool {
        self.live.is_empty() && self.sources.is_empty()
    }

    /// Begins a mapping of `span` through `iova_page`. Returns how long the oldest of these bytes had been stale through the same
    /// translation.
    pub(super) fn begin(&mut self, iova_page: u64, span: Span, neighbour: bool, now: u64) -> u64 {
        let source = self.sources.iter_mut().find(|source| source.iova_page == iova_page);
        let longest = source.map_or(0, |source| source.cut(span, now));
        self.live.push(Live { iova_page, span, neighbour });
        self.union = joined(self.union.iter().copied().chain([span]));
        self.recount();
        longest
    }

    /// Ends the mapping of `span` through `iova_page`, whose translation is `open` or not. If it is closed now, returns how long the oldest
    /// ended mapping through it had been open.
    pub(super) fn end(&mut self, iova_page: u64, span: Span, now: u64, open: bool) -> u64 {
        let is_it = |live: &Live| live.iova_page == iova_page && live.span == span;
        let ended = self.live.iter().position(is_it).map(|at| self.live.swap_remove(at));
        if ended.is_some() && !self.live.iter().any(|live| live.span.contains(span)) {
            self.union = joined(self.live.iter().map(|live| live.span));
        }
        if !open {
            return self.close(iova_page, now);
        }
        let at = self.sources.iter().position(|source| source.iova_page == iova_page).unwrap_or_else(|| {
            let ended = SmallVec::new();
            self.sources.push(Source { iova_page, ended, neighbour: false, links: Links::default() });
            self.sources.len() - 1
        });
        let source = &mut self.sources[at];
        source.neighbour |= ended.is_some_and(|live| live.neighbour);
        // These bytes were live until now, so they are stale since now, whatever was recorded of them before.
        source.cut(span, now);
        source.ended.push(Ended { span, since: now });
        source.join();
        self.recount();
        0
    }

    /// Closes the translation through `iova_page`. Returns how long its oldest ended mapping had been open.
    pub(super) fn close(&mut self, iova_page: u64, now: u64) -> u64 {
        let at = self.sources.iter().position(|source| source.iova_page == iova_page);
        let longest = at.map_or(0, |at| self.sources.swap_remove(at).age(now));
        self.recount();
        longest
    }

    /// The age of the oldest ended mapping that is open now.
    pub(super) fn longest_open(&self, now: u64) -> u64 {
        self.sources.iter().map(|source| source.age(now)).max().unwrap_or(0)
    }

    /// The links of the open translation; `None` if it is not open.
    pub(super) fn links(&mut self, iova_page: u64) -> Option<&mut Links> {
        self.sources.iter_mut().find(|source| source.iova_page == iova_page).map(|source| &mut source.links)
    }

    /// Clears all links; returns all open translations.
    pub(super) fn unlink_all(&mut self) -> impl Iterator<Item = u64> {
        self.sources.iter_mut().map(|source| {
            source.links = Links::default();
            source.iova_page
        })
    }

    fn recount(&mut self) {
        let live = || self.union.iter().copied();
        let ended = self.sources.iter().flat_map(|source| source.ended.iter().map(|ended| ended.span));
        let live_bytes = bytes(live());
        let reached =
            if self.sources.is_empty() { live_bytes } else { bytes(joined(live().chain(ended)).into_iter()) };
        let neighbour = self.live.iter().any(|live| live.neighbour)
            || self.sources.iter().any(|source| source.neighbour && !source.ended.is_empty());
        self.rates = Rates::of(reached - live_bytes, reached, neighbour);
    }
}

impl Source {
    /// Removes `span` from the ended ranges; returns the age of the oldest one that it overlapped.
    fn cut(&mut self, span: Span, now: u64) -> u64 {
        let mut longest = 0;
        let mut at = 0;
        while let Some(&Ended { span: old, since }) = self.ended.get(at) {
            if !old.overlaps(span) {
                at += 1;
                continue;
            }
            longest = longest.max(now.saturating_sub(since));
            self.ended.swap_remove(at);
            // The remainder does not overlap `span`: the loop skips it.
            for span in old.without(span) {
                self.ended.push(Ended { span, since });
            }
        }
        longest
    }

    fn age(&self, now: u64) -> u64 {
        self.ended.iter().map(|ended| now.saturating_sub(ended.since)).max().unwrap_or(0)
    }

    /// Joins adjacent ranges, once there are many.
    fn join(&mut self) {
        if self.ended.len() <= JOIN_ABOVE {
            return;
        }
        self.ended.sort_unstable_by_key(|ended| ended.span);
        let mut joined: SmallVec<[Ended; 1]> = SmallVec::new();
        for ended in &self.ended {
            match joined.last_mut() {
                Some(last) if last.span.end == ended.span.start => {
                    last.span.end = ended.span.end;
                    last.since = last.since.min(ended.since);
                }
                _ => joined.push(*ended),
            }
        }
        self.ended = joined;
    }
}
