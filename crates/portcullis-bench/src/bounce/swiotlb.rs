//! The library's swiotlb pool.

use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb, SwiotlbConfig};
use portcullis::heap::Shared;
use portcullis::platform::CopyMemory;
use portcullis::std_platform::StdPlatform;

use super::memory::Buffers;
use super::subject::Subject;
use super::workload::{Case, SLOT};
use crate::lane::{Lane, put};
use crate::runner::Failure;

type Pool<C> = Swiotlb<StdPlatform, C>;

/// One pool for all threads.
pub(crate) struct Slots<C: CopyMemory> {
    pool: Shared<Pool<C>>,
    direction: Direction,
    buffers: usize,
}

impl<C: CopyMemory> Slots<C> {
    pub(crate) fn new(platform: &StdPlatform, memory: C, case: &Case) -> Result<Self, Failure> {
        let config =
            SwiotlbConfig { slot_bytes: SLOT, max_bytes: case.pool_bytes(), ..SwiotlbConfig::default() };
        let pool = Swiotlb::new(platform.clone(), memory, &config);
        let pool = pool.map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(Self { pool, direction: case.direction(), buffers: case.buffers() })
    }
}

impl<C: CopyMemory + Send + Sync + 'static> Subject for Slots<C> {
    fn lane(self: Arc<Self>, _: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let at = vec![0; self.buffers];
        let (pool, direction) = (self.pool.clone(), self.direction);
        Ok(Box::new(Slot { pool, constraints: Constraints::new(), direction, buffers, at }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.pool.holds(PhysAddr::new(address)).then_some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        let usage = self.pool.usage();
        let left = || Failure::Broken(format!("not everything was unmapped: {usage:?}"));
        if usage.mapped == 0 { Ok(()) } else { Err(left()) }
    }
}

struct Slot<C: CopyMemory> {
    pool: Shared<Pool<C>>,
    constraints: Constraints,
    direction: Direction,
    buffers: Arc<Buffers>,
    at: Vec<u64>,
}

impl<C: CopyMemory> Lane for Slot<C> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let original = PhysSegment { phys: PhysAddr::new(self.buffers.at(index)), len: self.buffers.bytes() };
        // SAFETY: the buffer is memory of this process and as long as it is said to be (`at` has as many places as there
        // are buffers); only this thread uses it, and not during a call.
        let mapped = unsafe { self.pool.map(original, self.direction, &self.constraints) };
        put(&mut self.at, index, mapped.ok().map(|mapped| mapped.phys.get()))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        // SAFETY: only this thread ends this mapping.
        unsafe { self.pool.unmap(PhysAddr::new(self.at[index]), self.buffers.bytes()) }.is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.at[index]
    }
}
