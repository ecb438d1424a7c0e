//! What waits in one queue and for how long: bytes times time, by a clock that is read now and then.
//!
//! Bytes are counted exactly. The clock is read when the first range is queued after a flush began, now and then after
//! it (as [`Level`] says), and when a flush is confirmed; in between, what waits is taken to have grown evenly. So a
//! push costs two additions, and the total is wrong by half of what came between two readings, for the time between
//! them, at the most.

use arrayvec::ArrayVec;

use crate::exposure::{ByteTime, Bytes, Level};

/// Flushes of one queue that may be under way at once, and be told apart.
const MARKS: usize = 4;

/// A flush that began, and what it covers.
#[derive(Debug, Clone, Copy)]
struct Mark {
    number: u64,
    /// All that had been queued, ever.
    queued: Bytes,
    /// When the first of it that no flush before covers was queued.
    oldest_ns: u64,
}

/// The account of one queue.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// All that was ever queued, and of it what flushes have covered.
    queued: Bytes,
    covered: Bytes,
    marks: ArrayVec<Mark, MARKS>,
    /// When the first was queued that no flush covers.
    oldest_ns: Option<u64>,
    until_sample: u64,
    level: Level,
    longest_ns: u64,
}

impl Account {
    /// A range has been queued.
    #[inline]
    pub(super) fn queued(&mut self, bytes: Bytes, clock: impl FnOnce() -> u64) {
        if self.until_sample > 0 {
            self.until_sample -= 1;
            self.queued += bytes;
        } else {
            self.sampled(bytes, clock());
        }
    }

    #[cold]
    fn sampled(&mut self, bytes: Bytes, now_ns: u64) {
        self.oldest_ns.get_or_insert(now_ns);
        self.level.sample(now_ns, self.waiting());
        self.queued += bytes;
        self.level.jump(self.waiting());
        self.until_sample = self.level.next_sample() - 1;
    }

    /// The flush `number` begins and covers all that was queued.
    pub(super) fn begin(&mut self, number: u64) {
        let Some(oldest_ns) = self.oldest_ns.take() else {
            return;
        };
        // The next one's time is wanted.
        self.until_sample = 0;
        // A flush that began later may have come here first. What was queued in between is not covered by that one,
        // and carries its number: so it waits for the next.
        let number = self.marks.last().map_or(number, |last| number.max(last.number + 1));
        let mark = Mark { number, queued: self.queued, oldest_ns };
        if let Err(full) = self.marks.try_push(mark)
            && let Some(last) = self.marks.last_mut()
        {
            // Flushes that all fail. The two are covered when the later one is.
            *last = Mark { oldest_ns: last.oldest_ns, ..full.element() };
        }
    }

    /// The flush `number` is confirmed.
    pub(super) fn confirm(&mut self, number: u64, now_ns: u64) {
        self.level.sample(now_ns, self.waiting());
        let over = self.marks.iter().take_while(|mark| mark.number <= number).count();
        for mark in self.marks.drain(..over) {
            self.covered = mark.queued;
            self.longest_ns = self.longest_ns.max(now_ns.saturating_sub(mark.oldest_ns));
        }
        self.level.jump(self.waiting());
    }

    /// Byte-nanoseconds up to now, and the longest that anything waited or waits.
    pub(super) fn total(&self, now_ns: u64) -> (ByteTime, u64) {
        let first = self.marks.first().map(|mark| mark.oldest_ns).or(self.oldest_ns);
        let open_ns = first.map_or(0, |first| now_ns.saturating_sub(first));
        (self.level.total(now_ns, self.waiting()), self.longest_ns.max(open_ns))
    }

    fn waiting(&self) -> Bytes {
        self.queued - self.covered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_queued_between_two_flushes_that_come_in_the_wrong_order_waits_for_the_next() {
        let bytes = Bytes { used: 1, neighbour: 0 };
        let mut account = Account::default();
        account.queued(bytes, || 0);
        account.begin(2);
        account.queued(bytes, || 0);
        account.begin(1);
        account.confirm(2, 10);
        assert_eq!(account.waiting(), bytes);
        account.begin(3);
        account.confirm(3, 20);
        assert_eq!(account.waiting(), Bytes::default());
        assert_eq!(account.total(100).1, 20);
    }

    /// More flushes are under way than can be told apart: the last two are one, since the earlier of them.
    #[test]
    fn flushes_that_are_too_many_to_be_told_apart_count_from_the_earlier() {
        let bytes = Bytes { used: 1, neighbour: 0 };
        let mut account = Account::default();
        for number in 1..=MARKS as u64 + 1 {
            account.queued(bytes, || number * 10);
            account.begin(number);
        }
        account.confirm(MARKS as u64 - 1, 35);
        assert_eq!((account.waiting().used, account.total(35).1), (2, 25));
        account.confirm(MARKS as u64, 36);
        assert_eq!(account.waiting().used, 2, "the two are covered when the later is");
        account.confirm(MARKS as u64 + 1, 1_040);
        assert_eq!((account.waiting().used, account.total(2_000).1), (0, 1_000));
    }
}
