//! The neighbours of live mappings, counted for each CPU.

use crate::exposure::{ByteTime, Bytes, Level};
use crate::percpu::{Counter, PerCpu};
use crate::platform::LocalSlot;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Changes of one CPU between two readings of the clock.
const SAMPLED: u64 = 64;

/// Bytes beside the buffers that are mapped, each CPU's by itself: one's may be below zero, where buffers are mapped
/// here and unmapped there; the sum is not. A change is a store or two, but for the clock at each 64th.
#[derive(Debug)]
pub(super) struct Neighbours {
    bytes: Counter,
    cpus: PerCpu<Cpu>,
}

#[derive(Debug, Default)]
struct Cpu {
    changes: AtomicU64,
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
        let changes = cpu.changes.load(Ordering::Relaxed);
        cpu.changes.store(changes.wrapping_add(1), Ordering::Relaxed);
        if changes.is_multiple_of(SAMPLED) {
            self.sample(slot, clock());
        }
        self.bytes.add(slot, bytes);
    }

    #[cold]
    fn sample(&self, slot: Option<&LocalSlot<'_>>, now_ns: u64) {
        let neighbour = self.bytes.of(slot);
        self.cpus.get(slot).level.lock().sample(now_ns, Bytes { used: 0, neighbour });
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
