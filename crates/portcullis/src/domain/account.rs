//! What each CPU counts of a domain, on cache lines of its own: maps, unmaps, flushes, addresses
//! that are lost, and the neighbours of live mappings. No change is lost from a sum over all CPUs;
//! a sum that is read during changes may be of slightly different times.

use core::mem::MaybeUninit;

use crate::exposure::{ByteTime, Bytes, Level, came_during};
use crate::guard::Guard;
use crate::heap::{OutOfMemory, place_of};
use crate::percpu::{Counter, PerCpu};
use crate::platform::LocalCpu;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// The books of all CPUs, each on lines of its own.
#[derive(Debug)]
pub(super) struct Books(PerCpu<Book>);

/// What one CPU counts, or all callers without a CPU.
#[derive(Debug, Default)]
pub(super) struct Book {
    /// Maps, and of these the ones that failed after they had been counted.
    pub maps: Counter,
    pub refused: Counter,
    pub unmaps: Counter,
    pub flushes: Counter,
    /// Bytes of addresses that are never used again.
    pub lost: Counter,
    /// Bytes beside the buffers that are mapped. It is below zero where buffers are mapped on
    /// another CPU and unmapped on this one; the sum over all CPUs is not.
    neighbours: Counter,
    /// All bytes that were ever added to them.
    opened: Counter,
    /// Changes of these until the clock is read again: see [`Level`].
    until_sample: AtomicU64,
    level: Mutex<Level>,
}

/// A book and whether it is the caller's alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuBook<'a> {
    book: &'a Book,
    alone: bool,
}

impl Books {
    /// Makes the books of `cpus` CPUs in `place`, where nothing is after an error.
    #[inline(never)]
    pub(super) fn make_in(place: &mut MaybeUninit<Self>, cpus: usize) -> Result<&mut Self, OutOfMemory> {
        // SAFETY: the place of the only field lies within the caller's.
        let inner = unsafe { place_of(&raw mut (*place.as_mut_ptr()).0) };
        PerCpu::make_in(inner, cpus, Book::default)?;
        // SAFETY: the field is there, and there is no other.
        Ok(unsafe { place.assume_init_mut() })
    }

    /// Returns the book of `cpu`, or the one that callers without a CPU share.
    #[inline]
    pub(super) fn of(&self, cpu: Option<&LocalCpu<'_>>) -> CpuBook<'_> {
        let (book, alone) = self.0.get(cpu.map(LocalCpu::index));
        CpuBook { book, alone }
    }

    /// Calls `f` with the book of `cpu`. A book that is the CPU's alone has a way of its own
    /// through the code.
    #[inline]
    pub(super) fn with(&self, cpu: &LocalCpu<'_>, f: impl Fn(CpuBook<'_>)) {
        match self.0.own(cpu.index()) {
            Some(book) => f(CpuBook { book, alone: true }),
            None => self.with_shared(f),
        }
    }

    #[cold]
    #[inline(never)]
    fn with_shared(&self, f: impl Fn(CpuBook<'_>)) {
        f(self.of(None));
    }

    /// The sum of a count over all CPUs.
    pub(super) fn sum(&self, count: impl Fn(&Book) -> &Counter) -> u64 {
        self.0.iter().map(|book| count(book).get()).fold(0, u64::wrapping_add)
    }

    /// Byte-nanoseconds of neighbours up to now.
    pub(super) fn total(&self, now_ns: u64) -> ByteTime {
        let mut sum = ByteTime::default();
        for book in self.0.iter() {
            let level = book.level.lock();
            sum += level.total(now_ns, book.neighbour_bytes(), book.opened_bytes());
        }
        sum
    }
}

impl Book {
    fn neighbour_bytes(&self) -> Bytes {
        Bytes { used: 0, neighbour: self.neighbours.get() }
    }

    fn opened_bytes(&self) -> Bytes {
        Bytes { used: 0, neighbour: self.opened.get() }
    }
}

impl CpuBook<'_> {
    /// Adds `n` to a count.
    #[inline]
    pub(super) fn add(self, count: impl FnOnce(&Book) -> &Counter, n: u64) {
        count(self.book).add(self.alone, n);
    }

    /// Counts `bytes` more neighbours (or, wrapped, fewer) that can be reached. With a CPU this
    /// takes two stores, unless the clock is to be read.
    #[inline]
    pub(super) fn change(self, bytes: u64, clock: impl FnOnce() -> u64) {
        let until_sample = &self.book.until_sample;
        // Relaxed. Callers that share a book may lose changes of this number: the clock is then
        // read a little later.
        let left = until_sample.load(Ordering::Relaxed);
        if left > 0 {
            until_sample.store(left - 1, Ordering::Relaxed);
            self.count(bytes);
        } else {
            self.change_now(bytes, clock);
        }
    }

    #[inline]
    fn count(self, bytes: u64) {
        self.book.neighbours.add(self.alone, bytes);
        if bytes.cast_signed() > 0 {
            self.book.opened.add(self.alone, bytes);
        }
    }

    /// As [`change`](Self::change), with the clock read. Where that panics, the bytes are counted,
    /// and the next change reads the clock.
    #[cold]
    pub(super) fn change_now(self, bytes: u64, clock: impl FnOnce() -> u64) {
        let uncounted = Guard::new(|| self.count(bytes));
        let now_ns = clock();
        uncounted.done();
        let next = self.jump(bytes, ByteTime::default(), now_ns);
        self.book.until_sample.store(next - 1, Ordering::Relaxed);
    }

    /// Counts `opened` more bytes that can be reached, and became so from `since_ns` to `now_ns`,
    /// and `closed` bytes that no longer can.
    pub(super) fn settle(self, (opened, since_ns): (u64, u64), closed: u64, now_ns: u64) {
        let opening = came_during(opened, now_ns.saturating_sub(since_ns));
        self.jump(opened.wrapping_sub(closed), ByteTime { used: 0, neighbour: opening }, now_ns);
    }

    /// Takes a reading of the level, adds to it what readings do not show, and has it jump by
    /// `bytes`. Returns after how many changes the clock is to be read again.
    fn jump(self, bytes: u64, beside: ByteTime, now_ns: u64) -> u64 {
        let mut level = self.book.level.lock();
        level.sample(now_ns, self.book.neighbour_bytes(), self.book.opened_bytes());
        level.add(beside);
        self.count(bytes);
        level.jump(self.book.neighbour_bytes(), self.book.opened_bytes());
        level.next_sample()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What a ring says at its commit.
    #[test]
    fn bytes_that_were_opened_since_count_as_half_of_that_time_and_then_in_full() {
        let mut place = MaybeUninit::uninit();
        let neighbours = Books::make_in(&mut place, 1).unwrap();
        neighbours.of(None).settle((100, 1_000), 0, 3_000);
        assert_eq!(neighbours.total(3_000).neighbour, 100 * 2_000 / 2);
        assert_eq!(neighbours.total(3_500).neighbour, 100_000 + 100 * 500);
        // All of them are closed, and others were opened.
        neighbours.of(None).settle((8, 3_400), 100, 3_500);
        assert_eq!(neighbours.total(3_600).neighbour, 150_000 + 8 * 100 / 2 + 8 * 100);
        // After a pause it is not known when they were.
        neighbours.of(None).settle((10, 3_600), 8, 1_000_003_600);
        let paused = (8 + 10) * 1_000_000_000;
        assert_eq!(neighbours.total(1_000_003_600).neighbour, 150_000 + 8 * 100 / 2 + 8 * 100 + paused);
    }
}
