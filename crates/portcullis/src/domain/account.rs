//! Per-CPU counters of a domain: maps, unmaps, flushes, leaked addresses, and the neighbours of live mappings. A sum over all CPUs misses
//! no change; a sum that is read during changes may mix slightly different times.

use core::mem::MaybeUninit;

use crate::exposure::{ByteTime, Bytes, Level, came_during};
use crate::guard::Guard;
use crate::heap::{OutOfMemory, place_of};
use crate::percpu::{Counter, PerCpu};
use crate::platform::LocalCpu;
use crate::sync::{AtomicU64, Mutex, Ordering};

#[derive(Debug)]
pub(super) struct Books(PerCpu<Book>);

/// The counters of one CPU, or of all callers without a CPU.
#[derive(Debug, Default)]
pub(super) struct Book {
    /// Maps, and how many of these failed after they were counted.
    pub maps: Counter,
    pub refused: Counter,
    pub unmaps: Counter,
    pub flushes: Counter,
    pub lost: Counter,
    /// Bytes beside live buffers. It is negative if buffers are mapped on another CPU and unmapped on this one; the sum over all CPUs is
    /// not.
    neighbours: Counter,
    opened: Counter,
    /// Changes of `neighbours` until the clock is read again: see [`Level`].
    until_sample: AtomicU64,
    level: Mutex<Level>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct CpuBook<'a> {
    book: &'a Book,
    alone: bool,
}

/// What a ring has counted, and its domain does not know yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub maps: u64,
    pub unmaps: u64,
    /// Bytes of neighbours that were mapped, and the time of the first, in nanoseconds.
    pub opened: u64,
    pub since_ns: u64,
    /// Bytes of neighbours whose unmap is confirmed.
    pub closed: u64,
}

impl Tally {
    pub(super) fn has_neighbours(&self) -> bool {
        self.opened > 0 || self.closed > 0
    }
}

impl Books {
    /// Makes the books of `cpus` CPUs in `place`. After an error `place` is uninitialised.
    #[inline(never)]
    pub(super) fn make_in(place: &mut MaybeUninit<Self>, cpus: usize) -> Result<&mut Self, OutOfMemory> {
        // SAFETY: the field lies in the caller's place, which nothing else uses meanwhile.
        let inner = unsafe { place_of(&raw mut (*place.as_mut_ptr()).0) };
        PerCpu::make_in(inner, cpus, Book::default)?;
        // SAFETY: the only field is initialised.
        Ok(unsafe { place.assume_init_mut() })
    }

    #[inline]
    pub(super) fn of(&self, cpu: Option<&LocalCpu<'_>>) -> CpuBook<'_> {
        let (book, alone) = self.0.get(cpu.map(LocalCpu::index));
        CpuBook { book, alone }
    }

    /// Calls `f` with the book of `cpu`. Code for a book of the CPU's own is separate, and needs no atomic read-modify-write.
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

    pub(super) fn sum(&self, count: impl Fn(&Book) -> &Counter) -> u64 {
        self.0.iter().map(|book| count(book).get()).fold(0, u64::wrapping_add)
    }

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
    #[inline]
    pub(super) fn add(self, count: impl FnOnce(&Book) -> &Counter, n: u64) {
        count(self.book).add(self.alone, n);
    }

    /// Counts `bytes` more neighbours; wrapped, fewer. With a CPU this takes two stores, unless the clock is due.
    #[inline]
    pub(super) fn change(self, bytes: u64, clock: impl FnOnce() -> u64) {
        let until_sample = &self.book.until_sample;
        // Relaxed: callers without a CPU may miss a change here, and then read the clock a little later.
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

    /// As [`change`](Self::change), and reads the clock. If that panics, the bytes are counted, and the next change reads the clock.
    #[cold]
    pub(super) fn change_now(self, bytes: u64, clock: impl FnOnce() -> u64) {
        let uncounted = Guard::new(|| self.count(bytes));
        let now_ns = clock();
        uncounted.done();
        let next = self.jump(bytes, ByteTime::default(), now_ns);
        self.book.until_sample.store(next - 1, Ordering::Relaxed);
    }

    /// Adds a tally at the time `now_ns`, which is read only if it has neighbours.
    pub(super) fn add_tally(self, tally: Tally, now_ns: u64) {
        let Tally { maps, unmaps, opened, since_ns, closed } = tally;
        self.add(|book| &book.maps, maps);
        self.add(|book| &book.unmaps, unmaps);
        if tally.has_neighbours() {
            let opening = came_during(opened, now_ns.saturating_sub(since_ns));
            self.jump(opened.wrapping_sub(closed), ByteTime { used: 0, neighbour: opening }, now_ns);
        }
    }

    /// Samples the level, adds `beside` (byte-time that samples miss), and lets the level jump by `bytes`. Returns the number of changes
    /// until the next sample.
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

    #[test]
    fn bytes_that_were_opened_since_count_as_half_of_that_time_and_then_in_full() {
        let mut place = MaybeUninit::uninit();
        let neighbours = Books::make_in(&mut place, 1).unwrap();
        let add = |opened, since_ns, closed, now_ns| {
            neighbours.of(None).add_tally(Tally { opened, since_ns, closed, ..Tally::default() }, now_ns);
        };
        add(100, 1_000, 0, 3_000);
        assert_eq!(neighbours.total(3_000).neighbour, 100 * 2_000 / 2);
        assert_eq!(neighbours.total(3_500).neighbour, 100_000 + 100 * 500);
        // All of them are closed, and others were opened.
        add(8, 3_400, 100, 3_500);
        assert_eq!(neighbours.total(3_600).neighbour, 150_000 + 8 * 100 / 2 + 8 * 100);
        // After a pause the times of the changes are unknown.
        add(10, 3_600, 8, 1_000_003_600);
        let paused = (8 + 10) * 1_000_000_000;
        assert_eq!(neighbours.total(1_000_003_600).neighbour, 150_000 + 8 * 100 / 2 + 8 * 100 + paused);
    }
}
