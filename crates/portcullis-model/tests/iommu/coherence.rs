//! Random histories of a correct driver: the caches agree with a walk without caches.

use std::sync::Arc;

use crate::common::{BOTH, DEVICE, DOMAIN, Mapper, PAGE, READ, WRITE, iova, rig_with, vtd};
use portcullis::addr::{IovaRange, Permissions};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::sync::Ordering;
use portcullis_model::Iommu;
use proptest::prelude::*;
use proptest::sample::select;

const LARGE: u64 = 2 << 20;
/// Addresses that share tables at every level, and sets of the small caches used here.
const BLOCKS: [u64; 5] = [0, 1 << 21, 5 << 21, 1 << 30, 1 << 39];

#[derive(Debug, Clone)]
enum Op {
    Map { at: u64, to: u64, permissions: Permissions },
    MapLarge { at: u64, to: u64 },
    Unmap { at: u64, pages: u64 },
    FreeTable { at: u64 },
    Access { at: u64, wanted: Permissions },
}

fn pages_of(block: u64) -> impl Iterator<Item = u64> {
    (0..6).map(move |page| block + page * PAGE)
}

fn op() -> impl Strategy<Value = Op> {
    let page = || (select(&BLOCKS[..]), 0_u64..6).prop_map(|(block, page)| block + page * PAGE);
    let some = || select(&[READ, WRITE, BOTH][..]);
    let map = |(at, to, permissions)| Op::Map { at, to: to * PAGE, permissions };
    prop_oneof![
        3 => (page(), 1_u64..1000, some()).prop_map(map),
        1 => (select(&BLOCKS[..]), 1_u64..100).prop_map(|(at, to)| Op::MapLarge { at, to: to << 21 }),
        2 => (page(), 1_u64..1030).prop_map(|(at, pages)| Op::Unmap { at, pages }),
        1 => select(&BLOCKS[..]).prop_map(|at| Op::FreeTable { at }),
        6 => (page(), some()).prop_map(|(at, wanted)| Op::Access { at, wanted }),
    ]
}

/// A driver that always invalidates its changes.
struct Driver {
    iommu: Arc<Iommu>,
    mapper: Mapper,
}

impl Driver {
    fn invalidate(&self, at: u64, len: u64, leaf_only: bool) {
        let range = IovaRange::new(iova(at), len).unwrap();
        self.iommu.queue().invalidate(DOMAIN, Invalidation::Range { range, leaf_only }).unwrap();
    }

    /// The level-2 entry for `at`: whether it is a 2 MiB leaf, a table, or (`None`) nothing.
    fn is_large(&self, at: u64) -> Option<bool> {
        let entry = self.mapper.entry(at, 2).load(Ordering::Relaxed);
        vtd::is_present(entry).then_some(vtd::is_leaf(entry, 2))
    }

    fn map(&self, at: u64, to: u64, permissions: Permissions) {
        if self.is_large(at) != Some(true) {
            self.mapper.map_at(at, to, permissions, 1);
            self.invalidate(at, PAGE, true);
        }
    }

    fn map_large(&self, at: u64, to: u64) {
        if self.is_large(at) != Some(false) {
            self.mapper.map_at(at, to, BOTH, 2);
            self.invalidate(at, LARGE, true);
        }
    }

    /// Unmaps all mappings that begin in the range, and the large pages that it cuts.
    fn unmap(&self, at: u64, end: u64) {
        for block in BLOCKS {
            match self.is_large(block) {
                Some(true) if block < end && at < block + LARGE => {
                    self.mapper.entry(block, 2).store(0, Ordering::Release);
                }
                Some(false) => {
                    pages_of(block)
                        .filter(|page| (at..end).contains(page))
                        .for_each(|page| self.mapper.unmap(page));
                }
                _ => {}
            }
        }
        let start = at & !(LARGE - 1);
        self.invalidate(start, (end - start).next_multiple_of(LARGE), true);
    }

    fn free_table(&self, at: u64) {
        if self.is_large(at) == Some(false) {
            let table = self.mapper.table(at, 1);
            self.mapper.entry(at, 2).store(0, Ordering::Release);
            self.invalidate(at, LARGE, false);
            self.mapper.memory.release(table, 1);
        }
    }

    fn access(&self, at: u64, wanted: Permissions) {
        let expected = self.mapper.walk(at, wanted);
        let mut reached = None;
        let answer =
            self.iommu.translate_each(DEVICE, iova(at), 1, wanted, |_, to, _| reached = Some(to.get()));
        assert_eq!((reached, answer.is_ok()), (expected, expected.is_some()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn properly_invalidated_caches_agree_with_the_tables(
        honours in any::<bool>(),
        max_mask in select(&[0_u32, 3, 9, 30][..]),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let (iommu, mapper) = rig_with(|config| {
            (config.iotlb_entries, config.iotlb_ways, config.walk_cache_entries) = (8, 2, 4);
            (config.honours_leaf_only, config.max_address_mask) = (honours, max_mask);
        });
        let driver = Driver { iommu, mapper };
        for op in ops {
            match op {
                Op::Map { at, to, permissions } => driver.map(at, to, permissions),
                Op::MapLarge { at, to } => driver.map_large(at, to),
                Op::Unmap { at, pages } => driver.unmap(at, at + pages * PAGE),
                Op::FreeTable { at } => driver.free_table(at),
                Op::Access { at, wanted } => driver.access(at, wanted),
            }
            for at in BLOCKS.into_iter().flat_map(pages_of) {
                let probed = driver.iommu.probe(DEVICE, iova(at), READ).map(|to| to.get());
                prop_assert_eq!(probed, driver.mapper.walk(at, READ));
            }
        }
        let memory = &driver.mapper.memory;
        prop_assert_eq!(driver.iommu.stats().walks_into_freed_frames, 0);
        prop_assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
    }
}
