//! The paging-structure caches by themselves.

use portcullis::addr::{DomainId, Iova, IovaRange, PhysAddr};
use portcullis_model::walk_cache::WalkCache;
use portcullis_model::walker::{ArmTables, Granule, Rights, TableFormat, TablePointer};

const A: DomainId = DomainId(1);
const B: DomainId = DomainId(2);
const THREE: TableFormat = TableFormat::VtdSecondStage { levels: 3 };
const FOUR: TableFormat = TableFormat::VtdSecondStage { levels: 4 };

fn pointer(level: u32, table: u64) -> TablePointer {
    TablePointer { level, table: PhysAddr::new(table), rights: Rights::READ }
}

fn at(iova: u64) -> Iova {
    Iova::new(iova)
}

#[test]
fn the_lowest_table_below_the_root_is_found() {
    let mut cache = WalkCache::new(64);
    cache.insert(A, at(0x1234_5678), FOUR, pointer(3, 0x3000));
    assert_eq!(cache.lookup(A, at(0x1234_5678), FOUR), Some(pointer(3, 0x3000)));
    cache.insert(A, at(0x1234_5678), FOUR, pointer(1, 0x1000));
    assert_eq!(cache.lookup(A, at(0x1234_5678), FOUR), Some(pointer(1, 0x1000)));
    assert_eq!(cache.peek(A, at(0x123f_ffff), FOUR), Some(pointer(1, 0x1000)), "the same 2 MiB");
    assert_eq!(cache.peek(A, at(0x1240_0000), FOUR), Some(pointer(3, 0x3000)), "the next 2 MiB");
    assert_eq!(cache.peek(B, at(0x1234_5678), FOUR), None);
    assert_eq!(cache.peek(A, at(0x1240_0000), THREE), None, "level 3 is the root of three levels");
    // The root's level is never cached, nor is one that does not exist.
    cache.insert(A, at(0), FOUR, pointer(5, 0x5000));
    cache.insert(A, at(0), FOUR, pointer(0, 0x5000));
    assert_eq!((cache.len(0), cache.len(1), cache.len(3), cache.len(5)), (0, 1, 1, 0));
}

#[test]
fn it_replaces_the_least_recently_used_of_four() {
    let mut cache = WalkCache::new(8);
    // Two sets of four: the even 2 MiB blocks share one.
    let block = |n: u64| at(n << 21);
    for n in [0, 2, 4, 6] {
        cache.insert(A, block(n), FOUR, pointer(1, n << 12));
    }
    assert!(cache.lookup(A, block(0), FOUR).is_some());
    cache.insert(A, block(8), FOUR, pointer(1, 8 << 12));
    assert_eq!(cache.peek(A, block(2), FOUR), None);
    assert!([0, 4, 6, 8].iter().all(|&n| cache.peek(A, block(n), FOUR).is_some()));
}

#[test]
fn a_range_removes_the_tables_that_lead_to_it() {
    let mut cache = WalkCache::new(64);
    for n in 0..4_u64 {
        cache.insert(A, at(n << 21), FOUR, pointer(1, n << 12));
        cache.insert(B, at(n << 21), FOUR, pointer(1, n << 12));
    }
    cache.insert(A, at(0), FOUR, pointer(2, 0x2000));
    cache.insert(A, at(1 << 39), FOUR, pointer(2, 0x7000));
    cache.invalidate_range(A, IovaRange::new(at((1 << 21) + 0x1000), 1 << 21).unwrap());
    assert_eq!(cache.peek(A, at(0), FOUR), Some(pointer(1, 0)));
    assert_eq!(cache.peek(A, at(1 << 21), FOUR), None);
    assert_eq!(cache.peek(A, at(2 << 21), FOUR), None);
    assert_eq!(cache.peek(A, at(3 << 21), FOUR), Some(pointer(1, 0x3000)));
    assert_eq!(cache.peek(A, at(1 << 39), FOUR), Some(pointer(2, 0x7000)));
    assert_eq!(cache.len(1), 6, "the other domain keeps its own");
    cache.invalidate_domain(A);
    assert_eq!(cache.len(1), 4);
    cache.invalidate_range(B, IovaRange::new(at(0), u64::MAX).unwrap());
    assert!(cache.is_empty());
}

/// A table of one granule spans 2 MiB, one of the other 32 MiB, at the same level and with the same leading bits.
#[test]
fn granules_keep_apart() {
    let large = TableFormat::Arm(ArmTables::stage1(Granule::Size16K, 47));
    let mut cache = WalkCache::new(64);
    cache.insert(A, at(0), FOUR, pointer(1, 0x1000));
    assert_eq!(cache.peek(A, at(0), large), None);
    cache.insert(A, at(0), large, pointer(1, 0x8000));
    assert_eq!(cache.lookup(A, at(0), FOUR), Some(pointer(1, 0x1000)));
    assert_eq!(cache.lookup(A, at(0), large), Some(pointer(1, 0x8000)));
    // In the span of one of them.
    cache.invalidate_range(A, IovaRange::new(at(2 << 20), 0x1000).unwrap());
    assert_eq!((cache.peek(A, at(0), FOUR), cache.peek(A, at(0), large)), (Some(pointer(1, 0x1000)), None));
    cache.insert(A, at(0), large, pointer(1, 0x8000));
    cache.invalidate_range(A, IovaRange::new(at(0), 0x1000).unwrap());
    assert!(cache.is_empty());
}

/// No tables have more than six levels; all below the root are cached.
#[test]
fn every_level_forgets() {
    let six = TableFormat::AmdV1 { levels: 6 };
    let filled = || {
        let mut cache = WalkCache::new(64);
        (1..=6).for_each(|level| cache.insert(A, at(0), six, pointer(level, u64::from(level) << 12)));
        assert_eq!([1, 2, 3, 4, 5, 6].map(|level| cache.len(level)), [1, 1, 1, 1, 1, 0]);
        cache
    };
    let mut cache = filled();
    cache.invalidate_domain(B);
    assert_eq!(cache.lookup(A, at(0), six), Some(pointer(1, 0x1000)));
    for level in 1..=5 {
        // A table with another part of the address at that level, but not at the next, is not on the path.
        let beside = at(1 << (12 + 9 * level));
        let above = (level < 5).then(|| pointer(level + 1, u64::from(level + 1) << 12));
        assert_eq!(cache.peek(A, beside, six), above);
    }
    cache.invalidate_domain(A);
    assert!(cache.is_empty());
    let mut cache = filled();
    cache.invalidate_range(A, IovaRange::new(at(0), 0x1000).unwrap());
    assert!(cache.is_empty());
}
