//! What is done: the workloads by name, and who does them.

/// How pages are unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One by one; the hardware forgets them later.
    Lazy,
    /// One by one, with a wait for each.
    Strict,
    /// Into a batch of so many, which is committed when it is full.
    Batch(usize),
    /// Descriptors of one page out of a ring, so many of which become unreachable together.
    Ring(usize),
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name, as in reports.
    pub name: &'static str,
    /// How pages are unmapped.
    pub shape: Shape,
}

/// All workloads, in the order in which they are reported. An operation is the unmap of one page of 4 KiB.
pub const WORKLOADS: [Workload; 6] = [
    Workload { name: "lazy-unmap", shape: Shape::Lazy },
    Workload { name: "strict-unmap", shape: Shape::Strict },
    Workload { name: "strict-batch-8", shape: Shape::Batch(8) },
    Workload { name: "strict-batch-32", shape: Shape::Batch(32) },
    Workload { name: "strict-batch-64", shape: Shape::Batch(64) },
    Workload { name: "strict-ring-64", shape: Shape::Ring(64) },
];

/// The numbers of threads that are measured without being named: the last is more than most machines have cores, to
/// show whether waiting collapses.
pub const THREADS: [usize; 3] = [1, 2, 8];

/// The most threads that can be measured: no more than the platform has CPUs, its own timer's included.
pub const MOST_THREADS: usize = 48;

/// Pages that are unmapped between two readings of the clock.
pub(crate) const BLOCK: usize = 64;

/// Pages that a thread maps, and then unmaps, in a turn: as many as a CPU's flush queue holds.
pub(crate) const TURN: usize = 256;

/// The size of a page in bytes.
pub(crate) const PAGE: u64 = 4096;

/// The memory behind page `index` of a thread's turn. Threads have memory of their own.
pub(crate) fn phys(thread: usize, index: usize) -> u64 {
    (1 << 40) + ((thread as u64) << 24) + index as u64 * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_consist_of_whole_blocks_and_blocks_of_whole_batches() {
        assert_eq!(TURN % BLOCK, 0);
        for workload in WORKLOADS {
            if let Shape::Batch(most) | Shape::Ring(most) = workload.shape {
                assert_eq!(BLOCK % most, 0, "{}", workload.name);
                assert!(workload.name.ends_with(&format!("-{most}")));
            }
        }
    }

    #[test]
    fn no_two_threads_have_the_same_memory() {
        assert!(phys(0, TURN - 1) < phys(1, 0));
        assert!(phys(MOST_THREADS, 0) < 1 << 48);
    }
}
