//! One physical page in a device's ledger: its live and open ranges, and its account.
//!
//! Nearly every page has one range at a time, through one translation: that is [`One`], of 48 bytes without lists. A page that does not fit
//! it becomes [`Ranges`] until it is closed.

use super::Exposed;
use super::one::One;
use super::ranges::Ranges;
use super::spans::Span;

/// Bytes that are exposed at this moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates {
    pub(super) stale: u32,
    /// Live or stale bytes, if their neighbours can be reached, too.
    pub(super) beside: Option<u32>,
}

impl Rates {
    /// Of a page with `stale` bytes, and `reached` live or stale ones.
    pub(super) fn of(stale: u32, reached: u32, neighbour: bool) -> Self {
        Self { stale, beside: neighbour.then_some(reached) }
    }
}

/// What an open translation depends on. One that the tables lead to may get into the IOTLB later, so it can depend on both.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Links {
    /// It is in the list of an entry of the IOTLB or of the device TLB.
    pub(super) marked: bool,
    /// It is in the list of a domain's tables.
    pub(super) listed: bool,
}

#[derive(Debug)]
pub(super) enum Page {
    One(One),
    Many(Box<Ranges>),
}

impl Page {
    pub(super) fn new(now: u64) -> Self {
        Self::One(One::new(now))
    }

    /// Whether nothing is live or open, so that it can be dropped.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::One(one) => one.is_closed(),
            Self::Many(ranges) => ranges.is_closed(),
        }
    }

    /// Adds the exposure since the last time to `exposed`.
    pub(super) fn settle(&mut self, now: u64, page_bytes: u64, exposed: &mut Exposed) {
        self.account(now, page_bytes, exposed);
        match self {
            Self::One(one) => one.settled = now,
            Self::Many(ranges) => ranges.settled = now,
        }
    }

    /// The same without recording it: for a report.
    pub(super) fn account(&self, now: u64, page_bytes: u64, exposed: &mut Exposed) {
        let (rates, settled) = match self {
            Self::One(one) => (one.rates(), one.settled),
            Self::Many(ranges) => (ranges.rates, ranges.settled),
        };
        exposed.add(rates, page_bytes, now.saturating_sub(settled));
    }

    /// Begins a mapping of `span` through `iova_page`. Returns how long the oldest of these bytes had been stale through the same
    /// translation.
    pub(super) fn begin(&mut self, iova_page: u64, span: Span, neighbour: bool, now: u64) -> u64 {
        if let Self::One(one) = self
            && let Some(longest) = one.begin(iova_page, span, neighbour, now)
        {
            return longest;
        }
        self.ranges().begin(iova_page, span, neighbour, now)
    }

    /// Ends the mapping of `span` through `iova_page`, whose translation is `open` or not. If it is closed now, returns how long the oldest
    /// ended mapping through it had been open.
    pub(super) fn end(&mut self, iova_page: u64, span: Span, now: u64, open: bool) -> u64 {
        if let Self::One(one) = self
            && let Some(longest) = one.end(iova_page, span, now, open)
        {
            return longest;
        }
        self.ranges().end(iova_page, span, now, open)
    }

    /// Closes the translation through `iova_page`. Returns how long its oldest ended mapping had been open.
    pub(super) fn close(&mut self, iova_page: u64, now: u64) -> u64 {
        match self {
            Self::One(one) => one.close(iova_page, now),
            Self::Many(ranges) => ranges.close(iova_page, now),
        }
    }

    /// The age of the oldest ended mapping that is open now.
    pub(super) fn longest_open(&self, now: u64) -> u64 {
        match self {
            Self::One(one) => one.age(now),
            Self::Many(ranges) => ranges.longest_open(now),
        }
    }

    /// The links of the open translation; `None` if it is not open.
    pub(super) fn links(&mut self, iova_page: u64) -> Option<&mut Links> {
        match self {
            Self::One(one) => one.links(iova_page),
            Self::Many(ranges) => ranges.links(iova_page),
        }
    }

    /// Clears all links; passes each open translation to `each`.
    pub(super) fn unlink_all(&mut self, mut each: impl FnMut(u64)) {
        match self {
            Self::One(one) => one.unlink().into_iter().for_each(each),
            Self::Many(ranges) => ranges.unlink_all().for_each(&mut each),
        }
    }

    fn ranges(&mut self) -> &mut Ranges {
        if let Self::One(one) = self {
            *self = Self::Many(Box::new(one.to_ranges()));
        }
        match self {
            Self::Many(ranges) => ranges,
            Self::One(_) => unreachable!("it was replaced just now"),
        }
    }
}
