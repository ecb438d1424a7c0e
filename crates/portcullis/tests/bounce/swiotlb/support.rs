//! Machines with pools, and shorthands.

use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::heap::Shared;
use portcullis::platform::{CopyMemory, Platform};
use portcullis_model::Memory;

pub use crate::manual::{Manual, NONE};

pub type Pool = Shared<Swiotlb<Manual, Arc<Memory>>>;

pub const AREA: u64 = 512 << 10;

/// Areas of 512 KiB, one to four of them.
pub fn config() -> SwiotlbConfig {
    SwiotlbConfig { area_bytes: AREA, min_bytes: AREA, max_bytes: 4 * AREA, ..SwiotlbConfig::default() }
}

/// Memory of 16 MiB and a pool in it.
pub fn machine(config: &SwiotlbConfig) -> (Manual, Arc<Memory>, Pool) {
    let (platform, memory) = (Manual::default(), Memory::new(16 << 20));
    let pool = Swiotlb::new(platform.clone(), Arc::clone(&memory), config).unwrap();
    (platform, memory, pool)
}

pub fn map<P: Platform, C: CopyMemory>(
    pool: &Swiotlb<P, C>,
    phys: PhysAddr,
    len: u64,
    direction: Direction,
    constraints: &Constraints,
) -> Result<Bounced, DmaMapError> {
    // SAFETY: what the model's memory does not have is counted, not touched; all access to it is by atomics.
    unsafe { pool.map(PhysSegment { phys, len }, direction, constraints) }
}

pub fn unmap<P: Platform, C: CopyMemory>(
    pool: &Swiotlb<P, C>,
    phys: PhysAddr,
    len: u64,
) -> Result<(), DmaUnmapError> {
    // SAFETY: each test ends a mapping by one thread.
    unsafe { pool.unmap(phys, len) }
}

pub fn bytes(memory: &Memory, at: PhysAddr, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    memory.read(at, &mut bytes).unwrap();
    bytes
}
