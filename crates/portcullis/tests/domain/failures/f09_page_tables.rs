//! Failure 9: page tables are never freed, so that they grow with the addresses ever used; or they are freed while
//! the hardware's paging-structure caches still lead to them, and whoever gets their memory next decides what the
//! device reaches.
//!
//! (The steps of reclaim one by one are in `pgtable/engine/reclaim.rs`, and in the model checker.)

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{MapListError, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{InvalidationError, InvalidationQueue};
use portcullis::pgtable::MapError;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenDomain;
use portcullis_model::{Buffer, Queue};

use crate::rig::{self, ANYWHERE, DEVICE, Hooked, PAGE, page};

type Rig = rig::Rig<StdPlatform, Queue>;

/// 2 MiB: what one lowest table maps.
const TABLE: u64 = 512 * PAGE;

/// Maps ranges so large that each has a lowest table of its own, has the device use them, and unmaps them.
/// Addresses at which tables were.
fn churn<Q: InvalidationQueue>(rig: &rig::Rig<StdPlatform, Q>, ranges: usize) -> Vec<Iova> {
    let list: Vec<_> = (0..512).map(|number| page(2 * number)).collect();
    let map = |_| rig.domain.open(&list, Direction::Bidirectional.permissions(), ANYWHERE).unwrap();
    let live: Vec<IovaRange> = (0..ranges).map(map).collect();
    live.iter().for_each(|range| assert!(rig.reaches(range.start())));
    live.iter().for_each(|range| rig.domain.unmap(*range).unwrap());
    live.iter().map(|range| range.start()).collect()
}

/// All free memory, as tables that lead to a secret wherever one looks.
fn traps(rig: &Rig) -> Vec<Buffer> {
    let secret = rig.memory.buffer(PAGE).unwrap();
    // A readable and writable entry of VT-d's second stage.
    let entry = (secret.phys().get() | 3).to_le_bytes();
    let traps = (0..256).map(|_| {
        let trap = rig.memory.buffer(PAGE).unwrap();
        (0..512).for_each(|word| trap.write(word * 8, &entry).unwrap());
        trap
    });
    traps.chain([secret]).collect()
}

#[test]
fn tables_come_back_and_the_hardware_walks_none_that_is_gone() {
    let rig = Rig::new(StdPlatform::with_cpus(1), Policy::Strict, |queue| queue);
    let bytes = || rig.domain.mapper().table().table_bytes();
    let (empty, ranges) = (bytes(), 40);
    let old = churn(&rig, ranges);
    let full = bytes();
    assert!(full >= empty + ranges * PAGE as usize, "each has a table of its own: {full}");
    assert!(rig.domain.reclaim().unwrap() >= ranges * PAGE as usize);
    assert_eq!(bytes(), empty, "nothing is mapped");
    // Whatever the device tries, and whatever is where the tables were, it gets nowhere.
    let traps = traps(&rig);
    for iova in &old {
        for offset in [0, PAGE, TABLE - PAGE] {
            assert_eq!(rig.iommu.probe(DEVICE, iova.checked_add(offset).unwrap(), Permissions::READ), None);
        }
        assert!(!rig.reaches(*iova));
    }
    assert_eq!(rig.iommu.stats().walks_into_freed_frames, 0);
    drop(traps);
    // Over and over, they do not grow.
    for _ in 0..3 {
        churn(&rig, ranges);
        assert!(bytes() <= full);
        rig.domain.reclaim().unwrap();
        assert_eq!(bytes(), empty);
    }
    assert_eq!((rig.memory.bad_frees(), rig.memory.stray_tables()), (0, 0));
}

#[test]
fn memory_that_runs_out_brings_tables_back_by_itself() {
    let rig = Rig::new(StdPlatform::with_cpus(1), Policy::Strict, |queue| queue);
    churn(&rig, 40);
    // All the rest is taken.
    let all: Vec<Buffer> = std::iter::from_fn(|| rig.memory.buffer(PAGE)).collect();
    // A gigabyte further on there is no table yet.
    let far = vec![page(0); 1 << 18];
    let range = rig.domain.open(&far[..], Direction::Bidirectional.permissions(), ANYWHERE);
    assert!(range.is_err(), "512 tables do not fit in the 40 that were freed");
    let near: Vec<_> = (0..8 * 512).map(|number| page(2 * number)).collect();
    let range = rig.domain.open(&near, Direction::Bidirectional.permissions(), ANYWHERE).unwrap();
    assert!(rig.reaches(range.start()));
    rig.domain.unmap(range).unwrap();
    assert_eq!(rig.iommu.stats().walks_into_freed_frames, 0);
    drop(all);
}

/// A map that finds no memory for tables while another call frees some fails at once, as it may have interrupted that; afterwards
/// there is room.
#[test]
fn a_map_without_memory_does_not_wait_for_a_reclaim() {
    let rig = rig::Rig::new(StdPlatform::new(), Policy::Strict, Hooked::new);
    let ranges = 40;
    churn(&rig, ranges);
    let all: Vec<Buffer> = std::iter::from_fn(|| rig.memory.buffer(PAGE)).collect();
    // Most of the tables that are freed, and at addresses that have none.
    let list: Vec<_> = (0..32 * 512).map(|number| page(2 * number)).collect();
    let permissions = Direction::Bidirectional.permissions();
    let (domain, queue) = (Shared::downgrade(&rig.domain), Arc::downgrade(&rig.queue));
    let (tells, told) = channel();
    let pages = list.clone();
    rig.queue.set(move || {
        queue.upgrade().unwrap().clear();
        // As an interrupt handler of the CPU that reclaims.
        tells.send(domain.upgrade().unwrap().open(&pages, permissions, ANYWHERE)).unwrap();
    });
    assert!(rig.domain.reclaim().unwrap() >= ranges * PAGE as usize);
    assert_eq!(told.recv().unwrap(), Err(MapListError::Map(MapError::OutOfMemory)));
    let range = rig.domain.open(&list, permissions, ANYWHERE).unwrap();
    assert!(rig.reaches(range.start()));
    rig.domain.unmap(range).unwrap();
    assert_eq!(rig.iommu.stats().walks_into_freed_frames, 0);
    drop(all);
}

/// What an attempt has mapped, and removed for want of a table, hardware may have cached: it forgets that before the next attempt, which may map
/// the same addresses in other pieces.
#[test]
fn what_an_attempt_without_memory_had_mapped_is_forgotten_before_the_next() {
    let rig = rig::Rig::new(StdPlatform::with_cpus(1), Policy::Strict, Hooked::new);
    let permissions = Direction::Bidirectional.permissions();
    // Tables of the upper levels are there, so that a large page needs none of its own.
    let large = PhysSegment { phys: PhysAddr::new(0x9_0000_0000), len: TABLE };
    let _beside = rig.domain.open(&[large], permissions, ANYWHERE).unwrap();
    let all = Mutex::new(std::iter::from_fn(|| rig.memory.buffer(PAGE)).collect::<Vec<Buffer>>());
    assert!(!all.lock().unwrap().is_empty());
    let asked = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&asked);
    // Somebody else gives memory back meanwhile: so the next attempt succeeds.
    rig.queue.set(move || {
        counts.fetch_add(1, Ordering::Relaxed);
        all.lock().unwrap().clear();
    });
    let range = rig.domain.open(&[large, page(0)], permissions, ANYWHERE).unwrap();
    assert!(rig.reaches(range.start()) && rig.reaches(range.last()));
    assert!(asked.load(Ordering::Relaxed) > 0);
}

#[test]
fn tables_that_the_hardware_has_not_forgotten_are_kept() {
    let rig = Rig::new(StdPlatform::with_cpus(1), Policy::Strict, |queue| queue);
    let old = churn(&rig, 40);
    let full = rig.domain.mapper().table().table_bytes();
    rig.iommu.queue().fail_next(1, InvalidationError::TimedOut { waited_ns: 1 });
    rig.domain.reclaim().unwrap_err();
    assert_eq!(rig.domain.mapper().table().table_bytes(), full);
    let traps = traps(&rig);
    assert!(old.iter().all(|iova| !rig.reaches(*iova)));
    assert_eq!(rig.iommu.stats().walks_into_freed_frames, 0);
    drop(traps);
    // A driver whose invalidation is lost is found out here: the walk caches lead to memory that is free.
    rig.iommu.queue().drop_next(u64::MAX);
    rig.domain.reclaim().unwrap();
    let traps: Vec<Buffer> = self::traps(&rig);
    let reached = old.iter().any(|iova| rig.reaches(*iova));
    assert!(reached || rig.iommu.stats().walks_into_freed_frames > 0, "this test sees nothing");
    drop(traps);
}
