//! One page of a CPU's ring buffer: its events, and how many were lost before them.
//!
//! The layout is that of `struct buffer_data_page` and `struct ring_buffer_event` (Linux's `kernel/trace/ring_buffer.c` and
//! `include/linux/ring_buffer.h`): a time, a length, and events that tell how many nanoseconds after the one before they happened.

use super::format::Formats;

/// Events were lost before this page.
const MISSED: u64 = 1 << 31;
/// Their number stands behind the page's events.
const MISSED_STORED: u64 = 1 << 30;

/// Kinds of entries that are no data.
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;

/// Bits of time in an entry's head.
const TIME_BITS: u32 = 27;

/// Where in a page what is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) time: usize,
    pub(super) commit: usize,
    pub(super) commit_size: usize,
    pub(super) data: usize,
}

/// An event's bytes, and when it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Nanoseconds on the clock that was chosen.
    pub time_ns: u64,
    /// The event's own bytes.
    pub data: &'a [u8],
}

/// What a page held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Page {
    /// Events.
    pub events: u64,
    /// Events that the kernel lost before them, at least; one where it says that some were, and not how many.
    pub lost: u64,
    /// The page does not end as it says: what is behind this cannot be read.
    pub damaged: bool,
    /// When the last event happened, on the events' clock; 0 without one.
    pub last_ns: u64,
}

/// The number of `size` bytes at `at`.
pub(super) fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(match size {
        1 => u64::from(*bytes.first()?),
        2 => u64::from(u16::from_ne_bytes(bytes.try_into().ok()?)),
        4 => u64::from(u32::from_ne_bytes(bytes.try_into().ok()?)),
        8 => u64::from_ne_bytes(bytes.try_into().ok()?),
        _ => return None,
    })
}

/// An entry's kind, and its time since the one before.
fn kind_and_time(head: u32) -> (u32, u64) {
    if cfg!(target_endian = "big") {
        (head >> TIME_BITS, u64::from(head & ((1 << TIME_BITS) - 1)))
    } else {
        (head & 31, u64::from(head >> (32 - TIME_BITS)))
    }
}

impl Formats {
    /// How many events were lost before `page`, without its events.
    pub fn lost_before(&self, page: &[u8]) -> u64 {
        let Some(commit) = number(page, self.head.commit, self.head.commit_size) else { return 0 };
        if commit & MISSED == 0 {
            return 0;
        }
        let end = self.head.data.saturating_add(length(commit));
        let stored =
            (commit & MISSED_STORED != 0).then(|| number(page, end, self.head.commit_size)).flatten();
        stored.unwrap_or(1).max(1)
    }

    /// Whether `page` has no events.
    pub fn is_empty(&self, page: &[u8]) -> bool {
        number(page, self.head.commit, self.head.commit_size).is_none_or(|commit| length(commit) == 0)
    }

    /// `page` without what follows its last event.
    pub fn used<'a>(&self, page: &'a [u8]) -> &'a [u8] {
        let Some(commit) = number(page, self.head.commit, self.head.commit_size) else { return page };
        let stored = if commit & MISSED_STORED == 0 { 0 } else { self.head.commit_size };
        let end = self.head.data.saturating_add(length(commit)).saturating_add(stored);
        page.get(..end).unwrap_or(page)
    }

    /// What [`events`](Self::events) returns, without a look at the events themselves.
    pub fn count(&self, page: &[u8]) -> Page {
        self.events(page, |_| ())
    }

    /// Shows `visit` the events of `page`, in their order.
    pub fn events<'a>(&self, page: &'a [u8], mut visit: impl FnMut(Entry<'a>)) -> Page {
        let mut read = Page { lost: self.lost_before(page), ..Page::default() };
        let head = (number(page, self.head.time, 8), number(page, self.head.commit, self.head.commit_size));
        let (Some(mut time_ns), Some(commit)) = head else {
            read.damaged = true;
            return read;
        };
        let end = self.head.data.saturating_add(length(commit));
        let Some(mut rest) = page.get(self.head.data..end) else {
            read.damaged = true;
            return read;
        };
        while !rest.is_empty() {
            let Some(Step { kind, since, data, after }) = step(rest) else {
                read.damaged = true;
                break;
            };
            rest = after;
            match kind {
                // One that was thrown away has a time, which is 1 where it had none.
                PADDING if since == 0 => break,
                PADDING => time_ns = time_ns.wrapping_add(if since == 1 { 0 } else { since }),
                TIME_STAMP => time_ns = since,
                TIME_EXTEND => time_ns = time_ns.wrapping_add(since),
                _ => {
                    time_ns = time_ns.wrapping_add(since);
                    read.events += 1;
                    read.last_ns = time_ns;
                    visit(Entry { time_ns, data });
                }
            }
        }
        read
    }
}

/// How many bytes of events there are.
fn length(commit: u64) -> usize {
    (commit & (MISSED_STORED - 1)) as usize
}

/// An entry, and what follows it.
struct Step<'a> {
    kind: u32,
    /// Nanoseconds since the one before; of a time stamp, since the clock began.
    since: u64,
    data: &'a [u8],
    after: &'a [u8],
}

fn step(bytes: &[u8]) -> Option<Step<'_>> {
    let (kind, since) = kind_and_time(number(bytes, 0, 4)? as u32);
    let rest = bytes.get(4..)?;
    let word = number(rest, 0, 4);
    let (data, after, since) = match kind {
        PADDING if since == 0 => (&[][..], &[][..], 0),
        PADDING => (&[][..], rest.get(word? as usize..)?, since),
        TIME_EXTEND | TIME_STAMP => (&[][..], rest.get(4..)?, word? << TIME_BITS | since),
        0 => {
            let len = (word? as usize).next_multiple_of(4);
            let data = rest.get(4..len)?;
            (data, rest.get(len..)?, since)
        }
        words => {
            let (data, after) = rest.split_at_checked(words as usize * 4)?;
            (data, after, since)
        }
    };
    Some(Step { kind, since, data, after })
}
