//! The account of what waits in one queue and for how long: bytes times time, by a clock that is
//! read now and then. It is never less than devices' exposure, but for what came between two
//! readings that are at most 131 us apart.
//!
//! Bytes are counted exactly, by the queue. The clock is read when the first range of a segment is
//! queued, now and then after it (as [`Level`] says), and when a flush is confirmed; in between,
//! what waits is taken to have grown evenly, or, where they are far apart, at once. So a push costs
//! two additions, and the total is wrong by half of what came between two readings, for the time
//! between them, at the most, and too much where they are far apart. A queue hears
//! of flushes when it closes a segment (the first entry after a flush of all queues has asked
//! closes one), when it is full, and when it is visited. What they cover has waited up to the last
//! flush that is confirmed by then: for longer than devices reached it where there was another in
//! between, and never for less.

use arrayvec::ArrayVec;

use super::Flush;
use crate::exposure::{ByteTime, Bytes, Level};

/// The number of segments of one queue that may wait at once and be told apart.
pub(super) const SEGMENTS: usize = 4;

/// A segment that is closed, and waits.
#[derive(Debug, Clone, Copy)]
struct Closed {
    /// Flushes with a higher number cover it, and flushes of all queues that asked with a higher
    /// one.
    stamp: u64,
    asked: u64,
    /// How many entries had ever been queued when it was closed, and their bytes.
    end: u64,
    queued: Bytes,
    /// When its first entry was queued.
    oldest_ns: u64,
}

/// The account of one queue.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// What flushes have covered of all that was ever queued.
    covered: Bytes,
    closed: ArrayVec<Closed, SEGMENTS>,
    /// When the first entry of the open segment was queued.
    oldest_ns: Option<u64>,
    level: Level,
    longest_ns: u64,
}

impl Account {
    /// Takes a reading of the clock, `now_ns`: `queued` is all that was ever queued, and `bytes`
    /// are queued now. Returns after how many entries the clock is to be read again, at least 1.
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

    /// Ends the open segment before the entry number `end`; all that was `queued` is in it or
    /// before. Flushes above `stamp` cover it, and those of all queues that asked with a number
    /// above `asked`. Neither number decreases from segment to segment.
    #[cold]
    pub(super) fn close(&mut self, stamp: u64, asked: u64, end: u64, queued: Bytes) {
        // There is an entry in the segment, and the clock was read for its first.
        let oldest_ns = self.oldest_ns.take().unwrap_or(0);
        let segment = Closed { stamp, asked, end, queued, oldest_ns };
        if let Err(full) = self.closed.try_push(segment)
            && let Some(last) = self.closed.last_mut()
        {
            // More segments wait than are told apart: flushes fail, or are slow. The last two
            // become one, which is covered when the later one is.
            *last = Closed { oldest_ns: last.oldest_ns, ..full.element() };
        }
    }

    /// Records that these flushes are confirmed, the last of them at `now_ns`. Returns the end of
    /// what they cover, if that is more than before.
    #[cold]
    pub(super) fn confirm(&mut self, confirmed: Flush, now_ns: u64, queued: Bytes) -> Option<u64> {
        let covered = |segment: &&Closed| segment.stamp < confirmed.number || segment.asked < confirmed.asked;
        let over = self.closed.iter().take_while(covered).count();
        let mut safe = None;
        for segment in self.closed.drain(..over) {
            self.level.fell(now_ns, queued - self.covered, queued, segment.queued - self.covered);
            (self.covered, safe) = (segment.queued, Some(segment.end));
            self.longest_ns = self.longest_ns.max(now_ns.saturating_sub(segment.oldest_ns));
        }
        safe
    }

    /// Byte-nanoseconds up to now, and the longest time in nanoseconds that anything waited or
    /// waits.
    pub(super) fn total(&self, now_ns: u64, queued: Bytes) -> (ByteTime, u64) {
        let first = self.closed.first().map(|segment| segment.oldest_ns).or(self.oldest_ns);
        let open_ns = first.map_or(0, |first| now_ns.saturating_sub(first));
        (self.level.total(now_ns, queued - self.covered, queued), self.longest_ns.max(open_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn bytes(used: u64) -> Bytes {
        Bytes { used, neighbour: 0 }
    }

    const fn flush(number: u64) -> Flush {
        Flush { number, asked: 0 }
    }

    #[test]
    fn what_flushes_do_not_cover_waits_for_the_next() {
        let mut account = Account::default();
        account.sample(0, bytes(0), bytes(1));
        account.close(1, 0, 1, bytes(1));
        account.sample(5, bytes(1), bytes(1));
        account.close(2, 0, 2, bytes(2));
        // The flush that had begun before the first was closed.
        assert_eq!(account.confirm(flush(1), 8, bytes(2)), None);
        assert_eq!(account.confirm(flush(2), 10, bytes(2)), Some(1));
        assert_eq!(account.total(20, bytes(2)).1, 15, "the second waits");
        assert_eq!(account.confirm(flush(3), 25, bytes(2)), Some(2));
        assert_eq!(account.total(100, bytes(2)).1, 20);
    }

    #[test]
    fn more_segments_than_can_be_told_apart_are_covered_with_the_last() {
        let mut account = Account::default();
        for count in 1..=SEGMENTS as u64 + 2 {
            account.sample(count, bytes(count - 1), bytes(1));
            account.close(count, 0, count, bytes(count));
        }
        let (all, last) = (bytes(SEGMENTS as u64 + 2), SEGMENTS as u64 + 2);
        assert_eq!(account.confirm(flush(last), 50, all), Some(SEGMENTS as u64 - 1));
        assert_eq!(account.confirm(flush(last + 1), 60, all), Some(last));
        assert_eq!(account.total(100, all).1, 60 - SEGMENTS as u64);
    }

    /// Flushes of all queues are told by the numbers with which they asked, whatever the others'
    /// are.
    #[test]
    fn a_flush_of_all_queues_covers_what_was_queued_before_it_asked() {
        let mut account = Account::default();
        account.sample(0, bytes(0), bytes(1));
        account.close(7, 1, 1, bytes(1));
        account.sample(5, bytes(1), bytes(1));
        account.close(7, 2, 2, bytes(2));
        let all = |asked| Flush { number: 3, asked };
        assert_eq!(account.confirm(all(1), 8, bytes(2)), None);
        assert_eq!(account.confirm(all(2), 10, bytes(2)), Some(1));
        assert_eq!(account.confirm(all(3), 25, bytes(2)), Some(2));
        assert_eq!(account.total(100, bytes(2)).1, 20);
    }
}
