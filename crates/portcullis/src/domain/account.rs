//! The neighbours of live mappings, counted for each CPU.

use crate::exposure::{ByteTime, Bytes, Level};
use crate::percpu::{Counter, PerCpu};
use crate::platform::LocalSlot;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Bytes beside the buffers that are mapped, each CPU's by itself: one's may be below zero, where buffers are mapped
/// here and unmapped there; the sum is not. A change is two stores, but where the clock is read (see [`Level`]).
#[derive(Debug)]
pub(super) struct Neighbours {
    bytes: Counter,
    cpus: PerCpu<Cpu>,
}

#[derive(Debug, Default)]
struct Cpu {
    /// Changes until the clock is read again.
    until_sample: AtomicU64,
    level: Mutex<Level>,
}

impl Neighbours {
    pub(super) fn new(slots: usize) -> Self {
        Self { bytes: Counter::new(slots), cpus: PerCpu::new(slots, Cpu::default) }
    }

    /// `bytes` more (or, wrapped, fewer) can be reached.
    #[inline]
    pub(super) fn change(&self, slot: Option<&LocalSlot<'_>>, bytes: u64, clock: impl FnOnce() -> u64) {
        let cpu = self.cpus.get(slot);
        // Relaxed, and lost changes of callers that share a slot: the clock is then read a little later.
        let left = cpu.until_sample.load(Ordering::Relaxed);
        if left > 0 {
            cpu.until_sample.store(left - 1, Ordering::Relaxed);
            self.bytes.add(slot, bytes);
        } else {
            self.change_now(slot, bytes, clock);
        }
    }

    /// The same with the clock read. Where that panics, the bytes are counted, and the next change reads it.
    #[cold]
    fn change_now(&self, slot: Option<&LocalSlot<'_>>, bytes: u64, clock: impl FnOnce() -> u64) {
        let uncounted = Uncounted { counter: &self.bytes, slot, bytes };
        let now_ns = clock();
        core::mem::forget(uncounted);
        let next = self.jump(slot, bytes, ByteTime::default(), now_ns);
        self.cpus.get(slot).until_sample.store(next - 1, Ordering::Relaxed);
    }

    /// `opened` bytes more can be reached, which became so evenly from `since_ns` to `now_ns`, and `closed` bytes
    /// cannot any more.
    pub(super) fn settle(
        &self,
        slot: Option<&LocalSlot<'_>>,
        (opened, since_ns): (u64, u64),
        closed: u64,
        now_ns: u64,
    ) {
        let opening_ns = now_ns.saturating_sub(since_ns);
        let opening = ByteTime { used: 0, neighbour: i128::from(opened) * i128::from(opening_ns) / 2 };
        self.jump(slot, opened.wrapping_sub(closed), opening, now_ns);
    }

    /// Reads the level, adds what it does not show, and has it jump by `bytes`. After how many changes to read again.
    fn jump(&self, slot: Option<&LocalSlot<'_>>, bytes: u64, beside: ByteTime, now_ns: u64) -> u64 {
        let mut level = self.cpus.get(slot).level.lock();
        let now = |neighbour| Bytes { used: 0, neighbour };
        level.sample(now_ns, now(self.bytes.of(slot)));
        level.add(beside);
        self.bytes.add(slot, bytes);
        level.jump(now(self.bytes.of(slot)));
        level.next_sample()
    }

    /// Byte-nanoseconds up to now.
    pub(super) fn total(&self, now_ns: u64) -> ByteTime {
        let mut sum = ByteTime::default();
        for (cpu, neighbour) in self.cpus.iter().zip(self.bytes.each()) {
            sum += cpu.level.lock().total(now_ns, Bytes { used: 0, neighbour });
        }
        sum
    }
}

/// A change that is not counted yet. Dropped, it is.
struct Uncounted<'a> {
    counter: &'a Counter,
    slot: Option<&'a LocalSlot<'a>>,
    bytes: u64,
}

impl Drop for Uncounted<'_> {
    fn drop(&mut self) {
        self.counter.add(self.slot, self.bytes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What a ring says at its commit.
    #[test]
    fn bytes_that_were_opened_since_count_as_half_of_that_time_and_then_in_full() {
        let neighbours = Neighbours::new(1);
        neighbours.settle(None, (100, 1_000), 0, 3_000);
        assert_eq!(neighbours.total(3_000).neighbour, 100 * 2_000 / 2);
        assert_eq!(neighbours.total(3_500).neighbour, 100_000 + 100 * 500);
        // All of them are closed, and others were opened.
        neighbours.settle(None, (8, 3_400), 100, 3_500);
        assert_eq!(neighbours.total(3_600).neighbour, 150_000 + 8 * 100 / 2 + 8 * 100);
    }
}
