//! Mapping by the short way, mostly next to what was mapped last.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis::pgtable::{Arm, Format, PageTable};
use portcullis::std_platform::StdPlatform;
use portcullis_model::Memory;
use portcullis_model::open::OpenTable;

use super::support::*;
use crate::common::{PAGE, PLATFORM, vtd};

const LARGE: u64 = 2 << 20;

type Table<X> = PageTable<Arc<Memory>, X>;

/// As [`map`], by the short way alone.
fn near<X: Format>(table: &Table<X>, start: u64, len: u64) -> bool {
    let phys = PhysAddr::new(ELSEWHERE + start);
    table.open_fast(&*PLATFORM, range(start, len), phys, Permissions::READ_WRITE)
}

#[test]
fn neighbours_are_mapped_where_there_are_tables_and_room() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    assert!(!near(&table, LARGE, PAGE), "no table is there");
    map(&table, LARGE, PAGE).unwrap();
    assert!(near(&table, LARGE + PAGE, PAGE));
    assert!(near(&table, LARGE + 2 * PAGE, 509 * PAGE));
    assert!(!near(&table, LARGE + 510 * PAGE, PAGE), "somebody's page is there");
    assert!(!near(&table, LARGE + 510 * PAGE, 2 * PAGE), "and there");
    assert!(!near(&table, LARGE + 511 * PAGE, 2 * PAGE), "the next table is another");
    assert!(near(&table, LARGE + 511 * PAGE, PAGE));
    // Beside others and back again.
    map(&table, 3 * LARGE, PAGE).unwrap();
    assert!(near(&table, 3 * LARGE + PAGE, PAGE));
    assert_eq!(unmap(&table, LARGE + 7 * PAGE, PAGE), PAGE);
    assert!(near(&table, LARGE + 7 * PAGE, PAGE));
    assert!((0..512).all(|page| is_mapped(&table, LARGE + page * PAGE)));
    assert!((0..512).all(|page| is_mapped(&table, 3 * LARGE + page * PAGE) == (page < 2)));
    assert!((0..512).all(|page| !is_mapped(&table, 2 * LARGE + page * PAGE)));
    assert_accounted(&memory, &table);
}

#[test]
fn without_a_cpu_the_short_ways_do_nothing() {
    let none = StdPlatform::with_cpus(0);
    let table = make(Memory::new(64 << 20), vtd(4));
    let open =
        |start| table.open(&none, range(start, PAGE), PhysAddr::new(ELSEWHERE + start), Permissions::READ);
    open(LARGE).unwrap();
    let phys = PhysAddr::new(ELSEWHERE + LARGE + PAGE);
    assert!(!table.open_fast(&none, range(LARGE + PAGE, PAGE), phys, Permissions::READ));
    let page = |at| table.translate(&none, Iova::new(at)).is_some();
    assert!(page(LARGE) && !page(LARGE + PAGE));
    assert!(!table.close_fast(&none, range(LARGE, PAGE)));
    assert!(page(LARGE));
}

#[test]
fn what_map_refuses_or_does_better_is_left_to_it() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    let to = |start, len, phys| {
        table.open_fast(&*PLATFORM, range(start, len), PhysAddr::new(phys), Permissions::READ)
    };
    map(&table, 0, PAGE).unwrap();
    assert!(!to(PAGE + 1, PAGE, 0) && !to(PAGE, PAGE - 1, 0) && !to(PAGE, PAGE, 1), "whole granules");
    assert!(!to(1 << 48, PAGE, 0), "beyond the aperture");
    assert!(!to(PAGE, PAGE, 1 << 52), "beyond the memory that an entry can name");
    assert!(!to(PAGE, PAGE, u64::MAX - 4095) && !to(PAGE, 2 * PAGE, (1 << 52) - PAGE));
    assert!(!to(LARGE, 2 * LARGE, 0), "more than one large page");
    assert!(to(LARGE, LARGE, 0) && !to(LARGE, PAGE, 0));
    assert!(table.close_fast(&*PLATFORM, range(LARGE, LARGE)));
    assert!((1..1024).all(|page| !is_mapped(&table, page * PAGE)));
    assert!(to(PAGE, PAGE, (1 << 52) - PAGE));
    // Two granules are a page of their own in this format.
    let amd = make(Memory::new(64 << 20), portcullis::pgtable::AmdV1::new(4, 3, 52).unwrap());
    map(&amd, 0, PAGE).unwrap();
    assert!(near(&amd, PAGE, PAGE) && !near(&amd, 2 * PAGE, 2 * PAGE));
    let list = |pieces: &[u64]| {
        let pieces = pieces.iter().scan(ELSEWHERE + 2 * PAGE, |end, len| {
            *end += len;
            Some((PhysAddr::new(*end - len), *len))
        });
        amd.open_list_fast(
            &*PLATFORM,
            range(2 * PAGE, 2 * PAGE),
            pieces.collect::<Vec<_>>().into_iter(),
            Permissions::READ,
        )
    };
    assert!(!list(&[2 * PAGE]), "a page of its own");
    assert!(!list(&[PAGE]) && !list(&[PAGE; 3]) && !list(&[]), "as long as the range");
    assert!(!list(&[PAGE, PAGE / 2, PAGE / 2]), "whole granules");
    assert!(!list(&[PAGE, 0, PAGE]) && !list(&[PAGE, PAGE, 0]), "more pieces than granules");
    assert!(!is_mapped(&amd, 2 * PAGE) && list(&[PAGE, PAGE]) && is_mapped(&amd, 3 * PAGE));
}

#[test]
fn no_table_is_remembered_once_it_was_reclaimed() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    map(&table, LARGE, PAGE).unwrap();
    assert!(near(&table, LARGE + PAGE, PAGE));
    assert_eq!(unmap(&table, LARGE, LARGE), 2 * PAGE);
    let before = table.table_bytes();
    assert!(reclaim(&table) > 0);
    assert!(!near(&table, LARGE + PAGE, PAGE), "its table is gone");
    // Another may be where it was.
    map(&table, 5 * LARGE, PAGE).unwrap();
    assert_eq!(table.table_bytes(), before);
    assert!(!near(&table, LARGE + PAGE, PAGE));
    assert!((1..512).all(|page| !is_mapped(&table, 5 * LARGE + page * PAGE)));
    assert!(near(&table, 5 * LARGE + PAGE, PAGE));
    assert_accounted(&memory, &table);
}

/// What is mapped while hardware forgets the old table must be in the new one.
#[test]
fn no_table_is_remembered_once_a_copy_took_its_place() {
    let table = make(Memory::new(64 << 20), portcullis::pgtable::AmdV1::new(4, 3, 52).unwrap());
    map(&table, 0, 2 * PAGE).unwrap();
    assert!(near(&table, 5 * PAGE, PAGE));
    let mut beside = Vec::new();
    let unmapped = table.close(&*PLATFORM, range(0, PAGE), &mut |_| {
        beside.push(near(&table, 6 * PAGE, PAGE));
        beside.push(table.close_fast(&*PLATFORM, range(5 * PAGE, PAGE)));
        true
    });
    assert_eq!((unmapped.bytes, beside), (PAGE, vec![false, false]));
    assert!(near(&table, 6 * PAGE, PAGE) && table.close_fast(&*PLATFORM, range(5 * PAGE, PAGE)));
    assert_eq!([0, 1, 5, 6].map(|page| is_mapped(&table, page * PAGE)), [false, true, false, true]);
}

#[test]
fn each_page_table_remembers_its_own() {
    // Memories alike: what is a table in the one is another, or none, at the same place in the other.
    let memories = [Memory::new(64 << 20), Memory::new(64 << 20)];
    let tables = memories.each_ref().map(|memory| make(Arc::clone(memory), vtd(4)));
    map(&tables[0], LARGE, PAGE).unwrap();
    map(&tables[1], 9 * LARGE, PAGE).unwrap();
    assert!(near(&tables[0], LARGE + PAGE, PAGE));
    assert!(!near(&tables[1], LARGE + 2 * PAGE, PAGE), "it has no table there");
    assert!(near(&tables[0], LARGE + 2 * PAGE, PAGE));
    assert!(near(&tables[1], 9 * LARGE + 2 * PAGE, PAGE));
    assert!((0..512).all(|page| is_mapped(&tables[1], 9 * LARGE + page * PAGE) == [0, 2].contains(&page)));
    assert!((0..512).all(|page| is_mapped(&tables[0], LARGE + page * PAGE) == (page < 3)));
    // One that is made where another was is no more its own.
    let [first, second] = tables;
    drop(first);
    let third = make(Arc::clone(&memories[0]), vtd(4));
    map(&third, 7 * LARGE, PAGE).unwrap();
    assert!(!near(&third, 9 * LARGE + 3 * PAGE, PAGE));
    assert!(memories.iter().all(|memory| memory.stray_tables() == 0));
    drop((second, third));
}

/// [`Arm::stage_1`] or [`Arm::stage_2`].
type MakeArm<const GRANULE: u32> = fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>;

/// All granules of the table's aperture whose number `pages` gives are mapped by lists, singly and by the short way, and
/// lead where they should; no others do.
fn one_level<const GRANULE: u32>(make_format: MakeArm<GRANULE>, input_bits: u32) {
    let granule = 1_u64 << GRANULE;
    let format = make_format(input_bits, 48).unwrap();
    assert_eq!(format.levels(), 1);
    let memory = Memory::new(64 << 20);
    let pages = 1_u64 << (input_bits - GRANULE);
    // The first two and the last two of each table that the root is made of, and of the frames of one.
    let chosen: Vec<_> =
        (0..pages).step_by(512).flat_map(|first| [first, first + 1, first + 510, first + 511]).collect();
    let check = |table: &Table<Arm<GRANULE>>| {
        let mapped: Vec<_> = (0..pages).filter(|page| is_mapped(table, page * granule)).collect();
        assert_eq!(mapped, chosen, "{format:?}");
        for page in &chosen {
            assert_eq!(unmap(table, page * granule, granule), granule);
            assert!(!is_mapped(table, page * granule));
        }
        assert_eq!(unmap(table, 0, 1 << input_bits), 0);
    };
    let table = make(Arc::clone(&memory), format);
    for page in &chosen {
        assert!(near(&table, page * granule, granule), "{page:#x}");
    }
    check(&table);
    for pair in chosen.chunks(2) {
        let piece = |page: &u64| (PhysAddr::new(ELSEWHERE + page * granule), granule);
        let range = range(pair[0] * granule, 2 * granule);
        let list = pair.iter().map(piece);
        table.open_list(&*PLATFORM, range, list, Permissions::READ_WRITE).unwrap();
    }
    check(&table);
    // The table is remembered, and what lies beyond the aperture would be in the same table, were it as large as others.
    assert!(near(&table, 0, granule));
    assert!(!near(&table, 1 << input_bits, granule));
    assert!(!near(&table, (1 << input_bits) - granule, 2 * granule));
    assert_eq!(unmap(&table, 0, 1 << input_bits), granule);
    assert_accounted(&memory, &table);
}

#[test]
fn a_root_that_is_the_lowest_table_is_as_large_as_it_is() {
    for input_bits in [25, 28, 29] {
        one_level(Arm::<16>::stage_1, input_bits);
        one_level(Arm::<16>::stage_2, input_bits);
    }
    one_level(Arm::<14>::stage_1, 25);
    // Several tables, one after the other, are the root.
    for input_bits in 30..=33 {
        one_level(Arm::<16>::stage_2, input_bits);
    }
    for input_bits in 26..=29 {
        one_level(Arm::<14>::stage_2, input_bits);
    }
}

#[test]
fn neighbours_whose_addresses_differ_in_bits_that_entries_hold_elsewhere() {
    const GRANULE: u64 = 1 << 16;
    let table = make(Memory::new(64 << 20), Arm::<16>::stage_1(48, 52).unwrap());
    let to = |start, len, phys| {
        table.open_fast(&*PLATFORM, range(start, len), PhysAddr::new(phys), Permissions::READ)
    };
    map(&table, 0, GRANULE).unwrap();
    for high in [1, 2, 15] {
        let at = (high << 48) - GRANULE;
        assert!(!to(GRANULE, 2 * GRANULE, at), "left to map");
        assert!(to(GRANULE, GRANULE, at) && to(2 * GRANULE, GRANULE, at + GRANULE));
        assert_eq!([1, 2].map(|page| reached(&table, page * GRANULE)), [Some(at), Some(at + GRANULE)]);
        assert_eq!(unmap(&table, GRANULE, 2 * GRANULE), 2 * GRANULE);
    }
}
