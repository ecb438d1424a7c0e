//! Linux's lazy mode, as its flush queue works (`drivers/iommu/dma-iommu.c`): an unmapped buffer stays open until all that waits is
//! flushed, which is when a CPU has 256 of them, or 10 ms after the first.

use rustc_hash::FxHashMap;

/// Unmaps of a CPU that fill its queue.
const FULL: u32 = 256;

/// The longest that one waits.
const LONGEST_NS: u64 = 10_000_000;

/// What waits to be flushed.
#[derive(Debug, Clone, Default)]
pub struct Flush {
    /// When each was unmapped, and how many bytes it had.
    waiting: Vec<(u64, u64)>,
    of_cpus: FxHashMap<u32, u32>,
    /// Of what was flushed: bytes times nanoseconds, and the longest wait.
    byte_ns: u128,
    longest_ns: u64,
}

impl Flush {
    /// A buffer of `bytes` was unmapped on `cpu`.
    pub fn unmap(&mut self, now_ns: u64, cpu: u32, bytes: u64) {
        self.until(now_ns);
        let of_cpu = self.of_cpus.entry(cpu).or_default();
        *of_cpu += 1;
        let is_full = *of_cpu > FULL;
        if is_full {
            self.flush(now_ns);
            self.of_cpus.insert(cpu, 1);
        }
        self.waiting.push((now_ns, bytes));
    }

    /// Time goes on to `now_ns`.
    pub fn until(&mut self, now_ns: u64) {
        if let Some(&(first_ns, _)) = self.waiting.first() {
            let due_ns = first_ns.saturating_add(LONGEST_NS);
            if due_ns <= now_ns {
                self.flush(due_ns);
            }
        }
    }

    fn flush(&mut self, now_ns: u64) {
        for (since_ns, bytes) in self.waiting.drain(..) {
            let open_ns = now_ns.saturating_sub(since_ns);
            self.byte_ns += u128::from(bytes) * u128::from(open_ns);
            self.longest_ns = self.longest_ns.max(open_ns);
        }
        self.of_cpus.clear();
    }

    /// Bytes times nanoseconds that were open since the last call, and the longest that a buffer was.
    pub fn take(&mut self) -> (u128, u64) {
        (std::mem::take(&mut self.byte_ns), std::mem::take(&mut self.longest_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_open_until_the_timer() {
        let mut flush = Flush::default();
        flush.unmap(1_000, 0, 10);
        flush.unmap(4_001_000, 1, 100);
        assert_eq!(flush.take(), (0, 0));
        flush.until(10_000_999);
        assert_eq!(flush.take(), (0, 0));
        flush.until(99_000_000);
        assert_eq!(flush.take(), (10 * 10_000_000 + 100 * 6_000_000, 10_000_000));
        assert_eq!(flush.take(), (0, 0));
    }

    #[test]
    fn a_cpu_that_has_256_flushes_those_of_all() {
        let mut flush = Flush::default();
        flush.unmap(0, 7, 5);
        (0..256).for_each(|at| flush.unmap(at, 1, 1));
        assert_eq!(flush.take(), (0, 0));
        flush.unmap(1_000, 1, 1);
        let ones: u128 = (0..256).map(|at| 1_000 - at).sum();
        assert_eq!(flush.take(), (5 * 1_000 + ones, 1_000));
        // The one that found it full waits by itself.
        flush.until(20_000_000);
        assert_eq!(flush.take(), (10_000_000, 10_000_000));
        // A flush empties the queues of other CPUs, too.
        (0..200).for_each(|at| flush.unmap(20_000_000 + at, 2, 1));
        (0..257).for_each(|at| flush.unmap(20_001_000 + at, 1, 1));
        flush.take();
        (0..200).for_each(|at| flush.unmap(20_002_000 + at, 2, 1));
        assert_eq!(flush.take(), (0, 0));
    }
}
