//! The pool's counters. Reading them stops no CPU.

use super::Swiotlb;
use super::cpu::Cpu;
use crate::platform::{CopyMemory, Platform};

/// A pool's counters, in bytes. While other CPUs map and unmap, each was true at some time, give or take the calls under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwiotlbUsage {
    /// Bytes of slots that are mapped.
    pub mapped: u64,
    /// Bytes of free slots in CPUs' magazines.
    pub kept: u64,
    /// The peak of mapped and kept bytes together.
    pub most: u64,
    /// Bytes of the pool at its present size.
    pub capacity: u64,
    /// The size that the pool shrinks to.
    pub least: u64,
    /// The size that the pool may grow to.
    pub limit: u64,
    /// Bytes of metadata, of the directory, and of CPUs' magazines, beside the pool.
    pub overhead: u64,
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Reads the counters. O(CPUs + areas).
    pub fn usage(&self) -> SwiotlbUsage {
        let (areas, shift) = (&self.areas, self.areas.slot_shift);
        let kept = self.cpus.peek().map(Cpu::kept).sum::<u64>();
        let (taken, most) = areas.taken();
        SwiotlbUsage {
            mapped: taken.saturating_sub(kept) << shift,
            kept: kept << shift,
            most: most << shift,
            capacity: areas.capacity() << shift,
            least: areas.min as u64 * areas.area_bytes(),
            limit: areas.max() as u64 * areas.area_bytes(),
            overhead: (areas.metadata_bytes() + self.cpus.bytes()) as u64,
        }
    }
}
