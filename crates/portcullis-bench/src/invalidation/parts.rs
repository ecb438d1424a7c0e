//! What all subjects are made of: the same page table, in memory that is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use portcullis::addr::{DomainId, PhysAddr};
use portcullis::invalidation::InvalidationQueue;
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{Frames, Platform, Table};

use crate::pgtable::memory::Memory;
use crate::runner::Failure;

/// Memory for tables that knows how many frames are in use.
#[derive(Debug, Clone)]
pub(crate) struct Counted {
    memory: Memory<true>,
    frames: Arc<AtomicI64>,
}

// SAFETY: everything is passed on to `Memory`, which promises the same.
unsafe impl Frames for Counted {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.memory.alloc(count)?;
        self.frames.fetch_add(count as i64, Ordering::Relaxed);
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        self.frames.fetch_sub(count as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { self.memory.free(first, count) }
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { self.memory.table(frame) }
    }
}

/// A page table, a queue, and how many frames the table takes when it is empty.
pub(crate) type Tables<Q> = TableMapper<Counted, Q>;

/// An empty page table whose invalidations go to `queue`, and the number of frames in use, now and later.
pub(crate) fn tables<Q: InvalidationQueue>(
    platform: &impl Platform,
    queue: Q,
) -> Result<(Tables<Q>, FramesInUse), Failure> {
    let frames = Arc::new(AtomicI64::new(0));
    let memory = Counted { memory: Memory, frames: Arc::clone(&frames) };
    let refused = |error: &dyn std::error::Error| Failure::Refused(error.to_string());
    let format = VtdSecondStage::new(4, 3, 48).map_err(|error| refused(&error))?;
    let table = PageTable::for_cpus(memory, format, platform.cpus()).map_err(|error| refused(&error))?;
    let empty = frames.load(Ordering::Relaxed);
    Ok((TableMapper::new(table, queue, DomainId(1), Vec::new()), FramesInUse { frames, empty }))
}

/// How many frames a page table takes.
#[derive(Debug)]
pub(crate) struct FramesInUse {
    frames: Arc<AtomicI64>,
    empty: i64,
}

impl FramesInUse {
    /// Has empty tables freed, level by level. Fails where some are left: they lead to what is still mapped.
    pub(crate) fn only_the_root<Q: InvalidationQueue>(
        &self,
        tables: &Tables<Q>,
        platform: &impl Platform,
    ) -> Result<(), Failure> {
        while tables.reclaim(platform).map_err(|error| Failure::Refused(error.to_string()))? > 0 {}
        let left = self.frames.load(Ordering::Relaxed) - self.empty;
        if left == 0 { Ok(()) } else { Err(Failure::Broken(format!("{left} page tables are not empty"))) }
    }
}

/// Fails unless nothing is mapped and all addresses are free or kept by CPUs: none are `handed_out`, in bytes.
pub(crate) fn settled<Q: InvalidationQueue>(
    tables: &Tables<Q>,
    frames: &FramesInUse,
    platform: &impl Platform,
    handed_out: u64,
) -> Result<(), Failure> {
    if handed_out > 0 {
        return Err(Failure::Broken(format!("{handed_out} bytes of addresses did not come back")));
    }
    frames.only_the_root(tables, platform)
}
