//! One page of a CPU's ring buffer: its events, and the loss before them.
//!
//! The layout is that of `struct buffer_data_page` and `struct ring_buffer_event` (Linux's `kernel/trace/ring_buffer.c` and
//! `include/linux/ring_buffer.h`): a time, a length, and events with their nanoseconds after the previous one.

use super::format::Formats;

/// Events were lost before this page.
const MISSED: u64 = 1 << 31;
/// Their number follows the page's events.
const MISSED_STORED: u64 = 1 << 30;

/// Types of entries without data.
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;

/// Time bits of an entry's header.
const TIME_BITS: u32 = 27;

/// The layout of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) time: usize,
    pub(super) commit: usize,
    pub(super) commit_size: usize,
    pub(super) data: usize,
}

/// An event's bytes, and its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Nanoseconds on the chosen clock.
    pub time_ns: u64,
    /// The event's own bytes.
    pub data: &'a [u8],
}

/// The contents of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Page {
    /// Events.
    pub events: u64,
    /// Events that the kernel lost before them, at least; one if it does not say how many.
    pub lost: u64,
    /// The page is truncated: the rest cannot be read.
    pub damaged: bool,
    /// The time of the last event, on the events' clock; 0 without one.
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

/// An entry's type, and its time since the previous one.
fn kind_and_time(head: u32) -> (u32, u64) {
    if cfg!(target_endian = "big") {
        (head >> TIME_BITS, u64::from(head & ((1 << TIME_BITS) - 1)))
    } else {
        (head & 31, u64::from(head >> (32 - TIME_BITS)))
    }
}

impl Formats {
    /// Events lost before `page`, without its events.
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

    /// `page` up to its last event.
    pub fn used<'a>(&self, page: &'a [u8]) -> &'a [u8] {
        let Some(commit) = number(page, self.head.commit, self.head.commit_size) else { return page };
        let stored = if commit & MISSED_STORED == 0 { 0 } else { self.head.commit_size };
        let end = self.head.data.saturating_add(length(commit)).saturating_add(stored);
        page.get(..end).unwrap_or(page)
    }

    /// The result of [`events`](Self::events), without the events themselves.
    pub fn count(&self, page: &[u8]) -> Page {
        self.events(page, |_| ())
    }

    /// Passes the events of `page` to `visit`, in order.
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
                // A discarded event has a time, which is 1 if it had none.
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

/// Bytes of all events.
fn length(commit: u64) -> usize {
    (commit & (MISSED_STORED - 1)) as usize
}

/// An entry, and the rest.
struct Step<'a> {
    kind: u32,
    /// Nanoseconds since the previous one; for a time stamp, since the clock began.
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
