//! Tables that are given back: when they are empty, when everybody has let go of them, and not before.

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis_model::open::OpenTable;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};

use super::support::*;
use crate::common::{DEVICE, PAGE, PLATFORM, vtd};

const LARGE: u64 = 2 << 20;
const DOMAIN: DomainId = DomainId(1);

/// More tables than are marked at a time, of all levels.
#[test]
fn everything_that_is_empty_goes_and_nothing_else() {
    let memory = Memory::new(64 << 20);
    for levels in 3..=5 {
        let table = make(Arc::clone(&memory), vtd(levels));
        let empty = table.table_bytes();
        // Three hundred lowest tables below three of the next level.
        let place = |n: u64| n % 3 * (1 << 30) + n / 3 * LARGE;
        (0..300).for_each(|n| map(&table, place(n) + n * PAGE, PAGE).unwrap());
        assert_eq!(reclaim(&table), 0, "all of them in use");
        (0..300).filter(|n| n % 10 != 0).for_each(|n| assert_eq!(unmap(&table, place(n), LARGE), PAGE));
        let before = table.table_bytes();
        assert_eq!(reclaim(&table), 270 * 4096);
        assert_eq!(before - table.table_bytes(), 270 * 4096);
        assert!((0..300).all(|n| is_mapped(&table, place(n) + n * PAGE) == (n % 10 == 0)));
        assert_accounted(&memory, &table);
        unmap(&table, 0, 1 << 38);
        reclaim(&table);
        assert_eq!(table.table_bytes(), empty);
        assert_accounted(&memory, &table);
        drop(table);
    }
    assert_eq!(memory.frames_in_use(), 0);
}

#[test]
fn tables_that_the_hardware_may_walk_are_kept_until_it_answers() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    let empty = table.table_bytes();
    (0..100).for_each(|n| map(&table, n * LARGE, PAGE).unwrap());
    unmap(&table, 0, 1 << 30);
    let before = table.table_bytes();
    for _ in 0..3 {
        assert_eq!(table.shrink(&*PLATFORM, || Err("no answer")), Err("no answer"));
        assert_eq!(table.table_bytes(), before, "nothing is freed");
        assert_accounted(&memory, &table);
    }
    // What is mapped meanwhile is there, and its tables are not freed.
    map(&table, 5 * LARGE, PAGE).unwrap();
    assert!(is_mapped(&table, 5 * LARGE));
    // The first batch goes, the second does not.
    let mut answers = [Ok(()), Err("no answer")].into_iter();
    assert_eq!(table.shrink(&*PLATFORM, || answers.next().unwrap()), Ok(16 * 4096), "what went is counted");
    assert_eq!(table.table_bytes(), before - 16 * 4096);
    assert!(is_mapped(&table, 5 * LARGE));
    assert_accounted(&memory, &table);
    assert_eq!(unmap(&table, 0, 1 << 30), PAGE);
    reclaim(&table);
    assert_eq!(table.table_bytes(), empty);
    assert_accounted(&memory, &table);
}

/// Others wait for its end.
#[test]
fn a_reclaim_ends_however_many_tables_are_made_and_emptied_beside_it() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    (0..100).for_each(|n| map(&table, n * LARGE, PAGE).unwrap());
    unmap(&table, 0, 1 << 30);
    let mut rounds = 0;
    let others = || {
        rounds += 1;
        let place = (100 + rounds) * LARGE;
        map(&table, place, PAGE).unwrap();
        unmap(&table, place, PAGE);
        Ok::<_, ()>(())
    };
    assert!(table.shrink(&*PLATFORM, others).unwrap() >= 100 * 4096);
    // Seven batches of 16, and one more for each of the four levels and for what is not full.
    assert!((7..=12).contains(&rounds), "{rounds}");
    reclaim(&table);
    assert_accounted(&memory, &table);
}

#[test]
fn a_table_dropped_after_a_failed_reclaim_leaves_nothing() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    (0..100).for_each(|n| map(&table, n * LARGE, PAGE).unwrap());
    unmap(&table, 0, 1 << 30);
    assert!(table.shrink(&*PLATFORM, || Err(())).is_err());
    drop(table);
    assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
}

#[test]
fn a_panic_in_the_driver_loses_no_table() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    let empty = table.table_bytes();
    map(&table, 0, PAGE).unwrap();
    unmap(&table, 0, PAGE);
    let panicking = std::panic::AssertUnwindSafe(|| {
        table.shrink(&*PLATFORM, || -> Result<(), ()> { panic!("as the test wants") })
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    map(&table, PAGE, PAGE).unwrap();
    assert!(is_mapped(&table, PAGE));
    unmap(&table, 0, LARGE);
    reclaim(&table);
    assert_eq!(table.table_bytes(), empty);
    assert_accounted(&memory, &table);
}

/// The hardware remembers where the tables are for as long as it has not been told to forget. What is mapped
/// meanwhile must be where it looks.
#[test]
fn a_page_mapped_before_the_hardware_forgets_is_reached() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    iommu.attach(DEVICE, Context::SecondStage { domain: DOMAIN, root: table.root(), levels: 4 });
    let access = |at: u64| {
        let outcome = iommu.access_checked(
            DEVICE,
            Iova::new(at),
            PhysAddr::new(ELSEWHERE + at),
            PAGE,
            Permissions::READ_WRITE,
        );
        (outcome.faults, outcome.wrong)
    };
    map(&table, 0, PAGE).unwrap();
    assert_eq!(access(0), (0, 0));
    unmap(&table, 0, PAGE);
    let pages = Invalidation::Range { range: range(0, PAGE), leaf_only: true };
    iommu.queue().invalidate(DOMAIN, pages).unwrap();
    let mut calls = 0;
    let freed = table.shrink(&*PLATFORM, || {
        calls += 1;
        if calls == 1 {
            map(&table, 7 * PAGE, PAGE).unwrap();
            assert_eq!(access(7 * PAGE), (0, 0), "before the invalidation");
        }
        let result = iommu.queue().invalidate(DOMAIN, Invalidation::Domain);
        assert_eq!(access(7 * PAGE), (0, 0), "after it");
        result
    });
    assert!(freed.is_ok());
    assert_eq!(access(7 * PAGE), (0, 0));
    assert!(is_mapped(&table, 7 * PAGE));
    assert_eq!(iommu.stats().walks_into_freed_frames, 0);
    unmap(&table, 0, LARGE);
    reclaim(&table);
    assert_accounted(&memory, &table);
    let _: DeviceId = DEVICE;
}

/// A list of memory to map that looks up something itself, inside the walk: the walk's tables stay until it is over.
#[test]
fn a_walk_inside_a_walk_does_not_end_the_outer_one() {
    let memory = Memory::new(64 << 20);
    let table = Arc::new(make(Arc::clone(&memory), vtd(4)));
    map(&table, 0, PAGE).unwrap();
    map(&table, LARGE, PAGE).unwrap();
    let mut reclaiming = None;
    let list = (0..2).map(|number| {
        assert!(is_mapped(&table, 0) || number > 0);
        if reclaiming.is_none() {
            let other = Arc::clone(&table);
            reclaiming = Some(std::thread::spawn(move || {
                unmap(&other, 0, LARGE);
                reclaim(&other)
            }));
            // Long enough for it to be done, if it did not wait.
            let pause = || std::thread::sleep(std::time::Duration::from_millis(20));
            pause();
            for _ in 0..3 {
                assert!(is_mapped(&table, LARGE));
                pause();
            }
            assert!(!reclaiming.as_ref().unwrap().is_finished(), "a table was freed under a walk");
        }
        (PhysAddr::new(ELSEWHERE + number * PAGE), PAGE)
    });
    let beside = range(LARGE + PAGE, 2 * PAGE);
    table.open_list(&*PLATFORM, beside, list, Permissions::READ).unwrap();
    assert_eq!(reclaiming.unwrap().join().unwrap(), 4096);
    assert_accounted(&memory, &table);
}
