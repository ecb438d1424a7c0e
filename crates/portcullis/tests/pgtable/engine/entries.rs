//! What a table says that it holds: every leaf of a range, once, in order, also while others change the tables.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{AmdV1, Arm, Format, Leaf, PageTable, Riscv, VtdSecondStage};
use portcullis_model::Memory;
use portcullis_model::open::OpenTable;

use super::support::{ELSEWHERE, make, map, range, reclaim, unmap};
use crate::common::PLATFORM;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn entries<X: Format>(table: &PageTable<Arc<Memory>, X>, range: IovaRange) -> Vec<Leaf> {
    table.entries(&*PLATFORM, range).collect()
}

/// Where the leaves of `range` begin, and how long they are. Each leads where [`map`] has it lead.
fn places<X: Format>(table: &PageTable<Arc<Memory>, X>, range: IovaRange) -> Vec<(u64, u64)> {
    let place = |leaf: Leaf| {
        let (start, len) = (leaf.range.start().get(), leaf.range.len());
        assert_eq!(leaf.phys.get(), ELSEWHERE + start);
        assert_eq!(leaf.attributes.permissions, Permissions::READ_WRITE);
        (start, len)
    };
    entries(table, range).into_iter().map(place).collect()
}

#[test]
fn each_leaf_of_a_range_is_an_item() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), VtdSecondStage::four_level());
    assert_eq!(entries(&table, table.aperture()), []);
    // Pages of three sizes, with a hole between each two.
    let all =
        [(8 * KIB, 4 * KIB), (16 * KIB, 4 * KIB), (4 * MIB, 2 * MIB), (3 * GIB, GIB), ((1 << 47), 4 * KIB)];
    all.iter().for_each(|(start, len)| map(&table, *start, *len).unwrap());
    assert_eq!(places(&table, table.aperture()), all);
    assert_eq!(places(&table, range(0, u64::MAX)), all, "addresses beyond the tables hold nothing");
    for beyond in [1 << 48, 1 << 60] {
        assert_eq!(places(&table, range(beyond, 1 << 48)), []);
    }
    assert_eq!(memory.stray_tables(), 0, "and nothing is looked for behind the root");
    // Both ends are inside of a leaf, at its first byte, at its last, and beside it.
    assert_eq!(places(&table, range(5 * MIB, 3 * GIB)), &all[2..4]);
    assert_eq!(places(&table, range(20 * KIB - 1, 4 * MIB - 20 * KIB + 2)), &all[1..3]);
    assert_eq!(places(&table, range(20 * KIB, 4 * MIB - 20 * KIB)), []);
    assert_eq!(places(&table, range(8 * KIB, 1)), &all[..1]);
    assert_eq!(places(&table, range(12 * KIB - 1, 4 * KIB + 1)), &all[..1]);
    // What is unmapped is gone, and what is split is there in parts.
    assert_eq!(unmap(&table, 16 * KIB, 4 * KIB), 4 * KIB);
    assert_eq!(unmap(&table, 4 * MIB + 4 * KIB, 2 * MIB - 8 * KIB), 2 * MIB - 8 * KIB);
    let parts = [all[0], (4 * MIB, 4 * KIB), (6 * MIB - 4 * KIB, 4 * KIB)];
    assert_eq!(places(&table, range(0, 3 * GIB)), parts);
}

#[test]
fn rights_and_memory_are_the_leaf_s() {
    let table = make(Memory::new(64 << 20), VtdSecondStage::four_level());
    let phys = PhysAddr::new(0x1234_5000);
    table.open(&*PLATFORM, range(0x7000, 0x1000), phys, Permissions::WRITE).unwrap();
    let leaf = Leaf { range: range(0x7000, 0x1000), phys, attributes: Permissions::WRITE.into() };
    assert_eq!(entries(&table, table.aperture()), [leaf]);
}

/// A leaf of several entries is one item, wherever in it a range begins or ends.
fn runs<X: Format>(format: X, run: u64) {
    let table = make(Memory::new(64 << 20), format);
    let granule = table.granule().bytes();
    map(&table, run, run).unwrap();
    for start in [run - granule, run, run + granule, 2 * run - granule] {
        assert_eq!(places(&table, range(start, 2 * granule)), [(run, run)], "{format:?} at {start:#x}");
    }
    assert_eq!(places(&table, range(2 * run, run)), []);
    assert_eq!(places(&table, table.aperture()), [(run, run)]);
}

#[test]
fn a_leaf_of_several_entries_is_one_item() {
    runs(AmdV1::four_level(), 32 * KIB);
    runs(AmdV1::four_level(), 8 * MIB);
    runs(Arm::<12>::stage_1(48, 48).unwrap(), 64 * KIB);
    runs(Arm::<14>::stage_2(40, 48).unwrap(), 2 * MIB);
    runs(Arm::<16>::stage_1(48, 48).unwrap(), 2 * MIB);
    // A root of four frames.
    let table = make(Memory::new(64 << 20), Riscv::sv48x4());
    let high = [(1 << 48, 4 * KIB), (3 << 48, 4 * KIB)];
    high.iter().for_each(|(start, len)| map(&table, *start, *len).unwrap());
    assert_eq!(places(&table, table.aperture()), high);
}

/// While another thread maps, splits, unmaps and reclaims between them, the leaves that stay are all there, each once and in order;
/// and no other leads anywhere but where its address was mapped to.
#[test]
fn what_stays_is_read_while_the_rest_changes() {
    let table = make(Memory::new(64 << 20), VtdSecondStage::four_level());
    // In tables of their own, and beside what comes and goes.
    let stays: Vec<_> = (0..200).map(|n| n * 4 * MIB + 12 * KIB).collect();
    stays.iter().for_each(|start| map(&table, *start, 4 * KIB).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for n in 0..200 {
                    let start = n * 4 * MIB;
                    map(&table, start, 12 * KIB).unwrap();
                    map(&table, start + 2 * MIB, 2 * MIB).unwrap();
                    // A part of a large page, then the rest.
                    assert_eq!(unmap(&table, start + 2 * MIB, MIB), MIB);
                    assert_eq!(unmap(&table, start + 3 * MIB, MIB), MIB);
                    assert_eq!(unmap(&table, start, 12 * KIB), 12 * KIB);
                }
                reclaim(&table);
            }
        });
        let mut changing = 0;
        for _ in 0..if cfg!(debug_assertions) { 20 } else { 200 } {
            let found = places(&table, table.aperture());
            assert!(found.is_sorted_by(|left, right| left.0 + left.1 <= right.0), "in order, once each");
            let kept: Vec<_> =
                found.iter().map(|place| place.0).filter(|start| stays.contains(start)).collect();
            assert_eq!(kept, stays);
            changing += found.len() - stays.len();
        }
        is_over.store(true, Ordering::Relaxed);
        changes.join().unwrap();
        println!("{changing} leaves that came and went");
    });
    assert_eq!(places(&table, table.aperture()).len(), stays.len());
    assert_eq!(
        table.translate(&*PLATFORM, Iova::new(stays[7])).map(|(phys, _)| phys.get()),
        Some(ELSEWHERE + stays[7])
    );
}
