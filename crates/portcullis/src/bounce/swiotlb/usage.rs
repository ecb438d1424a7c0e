//! What a pool says about itself.

use super::Swiotlb;
use super::cpu::Cpu;
use crate::platform::{CopyMemory, Platform};

/// How full a pool is, in bytes. While others map and unmap, what was true at some time, give or take what is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwiotlbUsage {
    /// Of slots that are mapped.
    pub mapped: u64,
    /// Of free slots that CPUs keep in their lists.
    pub kept: u64,
    /// The most that was mapped or kept at once, ever: the high-water mark.
    pub most: u64,
    /// Of the pool as it is.
    pub capacity: u64,
    /// What it shrinks to, and may grow to.
    pub least: u64,
    /// See there.
    pub limit: u64,
    /// Of metadata, and what CPUs' lists take, beside the pool.
    pub overhead: u64,
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// How full it is. Sums over all CPUs, and disturbs none. O(CPUs + areas).
    pub fn usage(&self) -> SwiotlbUsage {
        let (areas, shift) = (&self.areas, self.areas.slot_shift());
        let kept = self.cpus.peek().map(Cpu::kept).sum::<u64>();
        let (taken, most) = areas.taken();
        SwiotlbUsage {
            mapped: taken.saturating_sub(kept) << shift,
            kept: kept << shift,
            most: most << shift,
            capacity: areas.capacity() << shift,
            least: areas.min() as u64 * areas.area_bytes(),
            limit: areas.max() as u64 * areas.area_bytes(),
            overhead: (areas.metadata_bytes() + self.cpus.bytes()) as u64,
        }
    }
}
