//! One physical page in a device's ledger: what is live in it, what is open, and its account.

use portcullis::platform::FRAME_SIZE;
use smallvec::SmallVec;

use super::Exposed;
use super::spans::{Span, covered};

/// Above this many ranges in one open translation, ranges that touch are joined and count as old as the oldest
/// of them. What is exact is the byte-nanoseconds; the longest time may then be too long, never too short.
const JOIN_ABOVE: usize = 64;

/// Bytes that are exposed at this moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates {
    pub(super) stale: u32,
    pub(super) neighbour: u32,
}

#[derive(Debug)]
struct Live {
    iova_page: u64,
    span: Span,
    neighbour: bool,
}

#[derive(Debug, Clone, Copy)]
struct Ended {
    span: Span,
    since: u64,
}

/// A translation that is still open after the end of mappings through it.
#[derive(Debug)]
struct Source {
    iova_page: u64,
    /// What was mapped through it and is no more; the ranges do not overlap.
    ended: SmallVec<[Ended; 1]>,
    neighbour: bool,
    links: Links,
}

/// Where it is noted that an open translation may end. One that the tables lead to may get into the IOTLB
/// later, so it can be in both.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Links {
    /// It hangs on the mark of an IOTLB entry.
    pub(super) marked: bool,
    /// It is in the list of those that the tables of a domain lead to.
    pub(super) listed: bool,
}

#[derive(Debug)]
pub(super) struct Page {
    settled: u64,
    rates: Rates,
    live: SmallVec<[Live; 2]>,
    sources: SmallVec<[Source; 1]>,
}

impl Page {
    pub(super) fn new(now: u64) -> Self {
        Self { settled: now, rates: Rates::default(), live: SmallVec::new(), sources: SmallVec::new() }
    }

    /// Whether nothing of it is live or open: it can be forgotten.
    pub(super) fn is_closed(&self) -> bool {
        self.live.is_empty() && self.sources.is_empty()
    }

    /// Adds what has been exposed since the last time to `exposed`.
    pub(super) fn settle(&mut self, now: u64, exposed: &mut Exposed) {
        self.account(now, exposed);
        self.settled = now;
    }

    /// The same without having it done: for a report.
    pub(super) fn account(&self, now: u64, exposed: &mut Exposed) {
        exposed.add(self.rates, now.saturating_sub(self.settled));
    }

    /// A mapping of `span` through `iova_page` begins. Returns how long the oldest of these bytes had been
    /// stale through the same translation.
    pub(super) fn begin(&mut self, iova_page: u64, span: Span, neighbour: bool, now: u64) -> u64 {
        let source = self.sources.iter_mut().find(|source| source.iova_page == iova_page);
        let longest = source.map_or(0, |source| source.cut(span, now));
        self.live.push(Live { iova_page, span, neighbour });
        self.recount();
        longest
    }

    /// The mapping of `span` through `iova_page` has ended, and the translation is `open` or not. Returns how
    /// long the oldest ended mapping through it had been open, where it is closed now.
    pub(super) fn end(&mut self, iova_page: u64, span: Span, now: u64, open: bool) -> u64 {
        let is_it = |live: &Live| live.iova_page == iova_page && live.span == span;
        let ended = self.live.iter().position(is_it).map(|at| self.live.swap_remove(at));
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
        // These bytes were live until now, so they are stale since now, whatever was noted of them before.
        source.cut(span, now);
        source.ended.push(Ended { span, since: now });
        source.join();
        self.recount();
        0
    }

    /// The translation through `iova_page` is closed. Returns how long its oldest ended mapping had been open.
    pub(super) fn close(&mut self, iova_page: u64, now: u64) -> u64 {
        let at = self.sources.iter().position(|source| source.iova_page == iova_page);
        let longest = at.map_or(0, |at| self.sources.swap_remove(at).age(now));
        self.recount();
        longest
    }

    /// How long the oldest ended mapping that is open now has been so.
    pub(super) fn longest_open(&self, now: u64) -> u64 {
        self.sources.iter().map(|source| source.age(now)).max().unwrap_or(0)
    }

    /// Where the open translation is noted; `None` where it is not open.
    pub(super) fn links(&mut self, iova_page: u64) -> Option<&mut Links> {
        self.sources.iter_mut().find(|source| source.iova_page == iova_page).map(|source| &mut source.links)
    }

    /// Forgets where it is noted what is open; returns all that is.
    pub(super) fn unlink_all(&mut self) -> impl Iterator<Item = u64> {
        self.sources.iter_mut().map(|source| {
            source.links = Links::default();
            source.iova_page
        })
    }

    fn recount(&mut self) {
        let live = || self.live.iter().map(|live| live.span);
        let ended = self.sources.iter().flat_map(|source| source.ended.iter().map(|ended| ended.span));
        let live_bytes = covered(live());
        let reached = if self.sources.is_empty() { live_bytes } else { covered(live().chain(ended)) };
        let neighbour = self.live.iter().any(|live| live.neighbour)
            || self.sources.iter().any(|source| source.neighbour && !source.ended.is_empty());
        self.rates = Rates {
            stale: reached - live_bytes,
            neighbour: if neighbour { FRAME_SIZE as u32 - reached } else { 0 },
        };
    }
}

impl Source {
    /// Takes `span` out of what has ended; returns the age of the oldest range it was in.
    fn cut(&mut self, span: Span, now: u64) -> u64 {
        let mut longest = 0;
        let touched = self.ended.iter().any(|ended| ended.span.overlaps(span));
        if touched {
            let mut kept = SmallVec::new();
            for ended in &self.ended {
                if ended.span.overlaps(span) {
                    longest = longest.max(now.saturating_sub(ended.since));
                }
                kept.extend(ended.span.without(span).map(|span| Ended { span, since: ended.since }));
            }
            self.ended = kept;
        }
        longest
    }

    fn age(&self, now: u64) -> u64 {
        self.ended.iter().map(|ended| now.saturating_sub(ended.since)).max().unwrap_or(0)
    }

    /// Joins ranges that touch, once there are many.
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
