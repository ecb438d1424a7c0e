//! The limit: the lowest calls of the library, one after the other, with nothing around them.

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::invalidation::{Gather, Invalidation, InvalidationQueue};
use portcullis::iova::{IovaSpace, SpaceConfig};
use portcullis::mapper::Mapper;
use portcullis::platform::{FRAME_SIZE, Platform};
use portcullis::std_platform::StdPlatform;

use super::machine::{list, phys, refused};
use super::subject::Subject;
use super::workload::{Case, Kind};
use crate::invalidation::parts::{FramesInUse, Tables, settled, tables};
use crate::lane::{Lane, put};
use crate::runner::Failure;

/// An address space and a page table.
pub(crate) struct Parts<Q: InvalidationQueue> {
    space: IovaSpace,
    tables: Tables<Q>,
    frames: FramesInUse,
    queue: Q,
    platform: StdPlatform,
}

impl<Q: InvalidationQueue + Clone> Parts<Q> {
    pub(crate) fn new(platform: &StdPlatform, queue: Q) -> Result<Self, Failure> {
        let (tables, frames) = tables(platform, queue.clone())?;
        let geometry = tables.geometry();
        let granule = geometry.page_sizes.smallest().ok_or(Failure::Broken("no page size".into()))?;
        let mut config = SpaceConfig::new(geometry.aperture, granule, platform.cpus());
        config.reserved.extend(IovaRange::new(Iova::new(0), FRAME_SIZE));
        let space = IovaSpace::new(&config).map_err(refused)?;
        Ok(Self { space, tables, frames, queue, platform: platform.clone() })
    }
}

impl<Q: InvalidationQueue> Subject for Parts<Q> {
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let ranges = vec![None; case.live];
        let invalidates = case.workload.kind != Kind::Lazy;
        let is_list = case.workload.kind == Kind::Sg;
        let pieces = |index| list(case, thread, index).map(|PhysSegment { phys, len }| (phys, len)).collect();
        let lists = (0..case.live).filter(|_| is_list).map(pieces).collect();
        Ok(Box::new(Calls { parts: self, case: *case, thread, ranges, lists, invalidates }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.tables.table().iova_to_phys(&self.platform, Iova::new(address)).map(PhysAddr::get)
    }

    fn settle(&self) -> Result<(), Failure> {
        self.tables.sync(&Gather::everything()).map_err(refused)?;
        let usage = self.space.usage();
        settled(&self.tables, &self.frames, &self.platform, usage.taken.saturating_sub(usage.cached))
    }
}

struct Calls<Q: InvalidationQueue> {
    parts: Arc<Parts<Q>>,
    case: Case,
    thread: usize,
    ranges: Vec<Option<IovaRange>>,
    /// The pieces of each mapping; none where a mapping is one.
    lists: Vec<Vec<(PhysAddr, u64)>>,
    /// Each unmap: lazy ones are invalidated by somebody else, and freed later.
    invalidates: bool,
}

impl<Q: InvalidationQueue> Lane for Calls<Q> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let Parts { space, tables, platform, .. } = &*self.parts;
        let len = self.case.workload.bytes();
        let Ok(range) = space.alloc(platform, len, Iova::new(u64::MAX)) else {
            return false;
        };
        let (table, permissions) = (tables.table(), Permissions::READ_WRITE);
        let mapped = match self.lists.get(index) {
            // SAFETY: no device is behind these tables.
            Some(list) => unsafe { table.map_list(platform, range, list.iter().copied(), permissions) },
            None => {
                let at = PhysAddr::new(phys(&self.case, self.thread, index));
                // SAFETY: as above.
                unsafe { table.map(platform, range, at, permissions) }
            }
        };
        put(&mut self.ranges, index, mapped.ok().map(|()| Some(range)))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let Parts { space, tables, platform, queue, .. } = &*self.parts;
        let Some(range) = self.ranges[index] else {
            return false;
        };
        // SAFETY: no device is behind these tables.
        let unmapped = unsafe { tables.table().unmap(platform, range, &mut |_| true) }.bytes == range.len();
        let invalidation = Invalidation::Range { range, leaf_only: true };
        unmapped
            && (!self.invalidates || queue.invalidate(DomainId(1), invalidation).is_ok())
            && space.free(platform, range).is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.ranges[index].map_or(0, |range| range.start().get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use portcullis::invalidation::InvalidationError;

    use super::*;
    use crate::path::workload::workloads;

    #[derive(Default)]
    struct Counting(AtomicU64);

    // SAFETY: nothing is cached by anything, so there is nothing to forget.
    unsafe impl InvalidationQueue for Counting {
        fn invalidate(&self, _: DomainId, _: Invalidation) -> Result<(), InvalidationError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    /// What is measured beside lazy protection waits for nothing, and beside strict for each unmap.
    #[test]
    fn an_unmap_is_invalidated_where_the_workload_is_strict() {
        let platform = StdPlatform::new();
        for (name, expected) in [("raw-1", 5), ("lazy-1", 0)] {
            let workload = *workloads().iter().find(|workload| workload.name == name).unwrap();
            let queue = Arc::new(Counting::default());
            let parts = Arc::new(Parts::new(&platform, Arc::clone(&queue)).unwrap());
            let case = Case { workload, threads: 1, live: 1, own_domains: false, crowded: false };
            let mut lane = Arc::clone(&parts).lane(&case, 0).unwrap();
            assert!(lane.pairs(5));
            assert_eq!(queue.0.load(Ordering::Relaxed), expected, "{name}");
            parts.settle().unwrap();
        }
    }
}
