//! The exposure of one queue's entries: bytes times time, by a clock that is read now and then. It is an upper bound on devices' exposure;
//! it misses at most what happened between two clock readings that are at most 131 us apart.
//!
//! The queue counts bytes exactly. The clock is read for the first range of a segment, then as [`Level`] says, and when a flush is
//! confirmed. Between two readings the deferred bytes are taken to have grown evenly, or, where the readings are far apart, at once. So a
//! push costs two additions, and the total is off by at most half of the bytes that came between two readings, for the time between them;
//! where these are far apart it is too high. Covered entries count up to the last flush that is confirmed when the queue [learns of
//! it](super::FlushQueue::confirm_flush): longer than devices reached them if there was another flush in between, never shorter.

use arrayvec::ArrayVec;

use super::Flush;
use crate::exposure::{ByteTime, Bytes, Level};

/// The most deferred segments of a queue that are told apart.
pub(super) const SEGMENTS: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Closed {
    /// Flushes with a higher number, and flush-alls of a higher generation, cover it.
    stamp: u64,
    generation: u64,
    /// All entries that were queued before it was closed, and their bytes.
    end: u64,
    queued: Bytes,
    oldest_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Account {
    covered: Bytes,
    closed: ArrayVec<Closed, SEGMENTS>,
    oldest_ns: Option<u64>,
    level: Level,
    longest_ns: u64,
}

impl Account {
    /// Samples the clock at `now_ns`: `queued` is all that was ever queued, and `bytes` come now. Returns the number of entries until the
    /// next sample, at least 1.
    #[cold]
    pub(super) fn sample(&mut self, now_ns: u64, queued: Bytes, bytes: Bytes) -> u64 {
        self.oldest_ns.get_or_insert(now_ns);
        self.level.sample(now_ns, queued - self.covered, queued);
        let mut waiting = queued - self.covered;
        waiting += bytes;
        let mut came = queued;
        came += bytes;
        self.level.jump(waiting, came);
        self.level.next_sample()
    }

    /// Closes the open segment before entry number `end`; all `queued` bytes are in it or before. Flushes above `stamp`, and flush-alls
    /// above `generation`, cover it. Neither number decreases from segment to segment.
    #[cold]
    pub(super) fn close(&mut self, stamp: u64, generation: u64, end: u64, queued: Bytes) {
        // The segment has an entry, and the clock was read for its first.
        let oldest_ns = self.oldest_ns.take().unwrap_or(0);
        let segment = Closed { stamp, generation, end, queued, oldest_ns };
        if let Err(full) = self.closed.try_push(segment)
            && let Some(last) = self.closed.last_mut()
        {
            // Flushes fail, or are slow. The last two segments become one, which is covered with the later one.
            *last = Closed { oldest_ns: last.oldest_ns, ..full.element() };
        }
    }

    /// Records that these flushes are confirmed, the last at `now_ns`. Returns the end of the covered entries, if it has moved.
    #[cold]
    pub(super) fn confirm(&mut self, confirmed: Flush, now_ns: u64, queued: Bytes) -> Option<u64> {
        let covered =
            |segment: &&Closed| segment.stamp < confirmed.number || segment.generation < confirmed.generation;
        let over = self.closed.iter().take_while(covered).count();
        let mut safe = None;
        for segment in self.closed.drain(..over) {
            self.level.fell(now_ns, queued - self.covered, queued, segment.queued - self.covered);
            (self.covered, safe) = (segment.queued, Some(segment.end));
            self.longest_ns = self.longest_ns.max(now_ns.saturating_sub(segment.oldest_ns));
        }
        safe
    }

    /// Byte-nanoseconds up to now, and the longest deferral in nanoseconds, past or present.
    pub(super) fn total(&self, now_ns: u64, queued: Bytes) -> (ByteTime, u64) {
        let first = self.closed.first().map(|segment| segment.oldest_ns).or(self.oldest_ns);
        let open_ns = first.map_or(0, |first| now_ns.saturating_sub(first));
        (self.level.total(now_ns, queued - self.covered, queued), self.longest_ns.max(open_ns))
    }
}

#[cfg(test)]
#[path = "../../../tests/inside/invalidation/flush_queue/account.rs"]
mod tests;
