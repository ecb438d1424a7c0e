//! Parts of large pages: what is unmapped goes, the rest stays, whatever happens meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis::pgtable::{
    AmdV1, Arm, Entry, Format, Layout, LeafSize, MapError, PageTable, Riscv, X86FirstStage,
};
use portcullis::platform::Frames;
use portcullis_model::Memory;
use portcullis_model::open::{OpenTable, Simulated};

use super::support::*;
use crate::common::{PAGE, PLATFORM, vtd};

const LARGE: u64 = 2 << 20;
const HUGE: u64 = 1 << 30;

/// The largest page of the format is mapped, and each granule of a few unmapped, alone with it.
fn any_part_can_go<X: Format>(format: X) {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), format);
    let sizes: Vec<_> = format.leaf_sizes().iter().map(|size| format.page_size(*size).bytes()).collect();
    let (granule, largest) = (sizes[0], *sizes.last().unwrap());
    let middle = largest / 2;
    for at in [0, granule, middle - granule, middle, largest - granule] {
        map(&table, 0, largest).unwrap();
        assert_eq!(unmap(&table, at, granule), granule);
        let around =
            [0, at.saturating_sub(granule), at, (at + granule).min(largest - granule), largest - granule];
        for near in around {
            assert_eq!(is_mapped(&table, near), near != at, "{near:#x} after {at:#x} of {largest:#x}");
        }
        assert_eq!(unmap(&table, 0, largest), largest - granule);
        reclaim(&table);
        assert_accounted(&memory, &table);
    }
}

#[test]
fn any_part_of_a_large_page_can_go() {
    any_part_can_go(vtd(3));
    any_part_can_go(vtd(5));
    any_part_can_go(BreakFirst(vtd(4)));
    any_part_can_go(X86FirstStage::new(4, 3, 52).unwrap());
    any_part_can_go(AmdV1::new(4, 3, 52).unwrap());
    any_part_can_go(Riscv::sv48().within(3, 52).unwrap());
    [Arm::<12>::stage_1, Arm::stage_2].into_iter().for_each(|new| any_part_can_go(new(48, 48).unwrap()));
    [Arm::<14>::stage_1, Arm::stage_2].into_iter().for_each(|new| any_part_can_go(new(48, 48).unwrap()));
    [Arm::<16>::stage_1, Arm::stage_2].into_iter().for_each(|new| any_part_can_go(new(48, 48).unwrap()));
}

#[test]
fn less_than_the_smallest_page_cannot_go_and_does_not() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    map(&table, 0, PAGE).unwrap();
    map(&table, LARGE, LARGE).unwrap();
    assert_eq!(unmap(&table, 0x800, 0x10), 0);
    assert_eq!(unmap(&table, 0x800, PAGE), 0);
    // Nor at the ends of a range.
    assert_eq!(unmap(&table, LARGE + 0x800, 2 * PAGE), PAGE);
    assert!(is_mapped(&table, 0) && is_mapped(&table, LARGE) && is_mapped(&table, LARGE + 2 * PAGE));
    assert!(!is_mapped(&table, LARGE + PAGE));
    assert_accounted(&memory, &table);
}

#[test]
fn without_memory_the_page_stays() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    map(&table, HUGE, HUGE).unwrap();
    let before = table.table_bytes();
    // A 1 GiB page takes two tables: the first fails, then the second.
    memory.fail_after(1);
    assert_eq!(unmap(&table, HUGE + PAGE, PAGE), 0);
    assert_eq!(table.table_bytes(), before);
    assert!(is_mapped(&table, HUGE + PAGE));
    memory.fail_after(2);
    assert_eq!(unmap(&table, HUGE + PAGE, PAGE), 0);
    assert!(is_mapped(&table, HUGE + PAGE), "in pages of 2 MiB now");
    // What else the range covers goes all the same.
    memory.fail_after(1);
    assert_eq!(unmap(&table, HUGE + PAGE, 2 * LARGE), LARGE + PAGE);
    assert!(is_mapped(&table, HUGE + PAGE) && is_mapped(&table, HUGE + 2 * LARGE + PAGE));
    assert_eq!(unmap(&table, HUGE + PAGE, PAGE), PAGE);
    assert_accounted(&memory, &table);
    drop(table);
    assert_eq!(memory.frames_in_use(), 0);
}

#[test]
fn a_page_is_broken_before_it_is_split() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), BreakFirst(vtd(4)));
    map(&table, LARGE, LARGE).unwrap();
    let mut told = Vec::new();
    let removed = unmap_telling(&table, range(LARGE + PAGE, PAGE), |range| {
        assert!(!is_mapped(&table, LARGE), "broken meanwhile");
        assert!(
            matches!(map(&table, LARGE, LARGE), Err(MapError::AlreadyMapped { .. })),
            "not free meanwhile"
        );
        told.push(range);
        true
    });
    assert_eq!((removed.bytes, told), (PAGE, vec![range(LARGE, LARGE)]));
    assert!(is_mapped(&table, LARGE) && !is_mapped(&table, LARGE + PAGE));
    assert_accounted(&memory, &table);
}

#[test]
fn a_page_that_is_not_confirmed_to_be_broken_comes_back() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), BreakFirst(vtd(4)));
    map(&table, HUGE, HUGE).unwrap();
    let before = table.table_bytes();
    assert_eq!(unmap_telling(&table, range(HUGE + PAGE, PAGE), |_| false).bytes, 0);
    assert!(is_mapped(&table, HUGE) && is_mapped(&table, HUGE + PAGE));
    assert_eq!(table.table_bytes(), before);
    // One level goes, the next does not.
    let mut answers = [true, false].into_iter();
    assert_eq!(unmap_telling(&table, range(HUGE + PAGE, PAGE), |_| answers.next().unwrap()).bytes, 0);
    assert!(is_mapped(&table, HUGE) && is_mapped(&table, HUGE + PAGE));
    assert_eq!(unmap(&table, HUGE, HUGE), HUGE);
    reclaim(&table);
    assert_accounted(&memory, &table);
}

/// Another CPU splits the page just before this one would, and takes its own part out.
#[test]
fn two_cpus_unmap_parts_of_one_large_page() {
    let frames = Hooked::<true>::new();
    let table = Arc::new(make(Arc::clone(&frames), vtd(4)));
    map(&table, LARGE, LARGE).unwrap();
    let other = Arc::clone(&table);
    frames.once(move || {
        let other = Arc::clone(&other);
        let unmapping = std::thread::spawn(move || unmap(&other, LARGE + 5 * PAGE, PAGE));
        assert_eq!(unmapping.join().unwrap(), PAGE);
    });
    assert_eq!(unmap(&table, LARGE + 9 * PAGE, PAGE), PAGE);
    let gone: Vec<_> = (0..512).filter(|page| !is_mapped(&table, LARGE + page * PAGE)).collect();
    assert_eq!(gone, [5, 9]);
    assert_accounted(&frames.memory, &table);
    // The hook's table goes with the hook.
    assert_eq!(Arc::strong_count(&table), 1);
}

/// Another CPU wants a part of the page while it is broken: it gets it when the page is back.
#[test]
fn two_cpus_unmap_parts_of_one_page_that_is_broken() {
    for confirmed in [true, false] {
        let memory = Memory::new(64 << 20);
        let table = Arc::new(make(Arc::clone(&memory), BreakFirst(vtd(4))));
        map(&table, LARGE, LARGE).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let mut unmapping = None;
        let removed = unmap_telling(&table, range(LARGE + 9 * PAGE, PAGE), |_| {
            let (other, over) = (Arc::clone(&table), Arc::clone(&over));
            unmapping = Some(std::thread::spawn(move || {
                let bytes = unmap(&other, LARGE + 5 * PAGE, PAGE);
                over.store(true, Ordering::Release);
                bytes
            }));
            // Long enough for it to be done, if it did not wait.
            std::thread::sleep(Duration::from_millis(20));
            confirmed
        });
        assert_eq!(removed.bytes, if confirmed { PAGE } else { 0 });
        assert_eq!(unmapping.unwrap().join().unwrap(), PAGE);
        let gone: Vec<_> = (0..512).filter(|page| !is_mapped(&table, LARGE + page * PAGE)).collect();
        assert_eq!(gone, if confirmed { vec![5, 9] } else { vec![5] });
        assert_accounted(&memory, &table);
    }
}

#[test]
fn the_marks_and_the_sizes_fit() {
    fn check<X: Format>(format: X) {
        assert_eq!(format.leaf_sizes()[0], LeafSize { level: 1, run: 0 });
        let table = format.table(portcullis::addr::PhysAddr::new(0x1_0000), 1);
        assert_eq!(table & X::PRESENT, X::PRESENT, "a table can be set aside and put back");
        // And is told from a page that is broken.
        assert!(!X::BREAK_BEFORE_MAKE || format.table(portcullis::addr::PhysAddr::new(0), 1) != X::PRESENT);
        assert_eq!(table & (X::MARK | X::SPLIT), 0);
        assert_eq!((X::SPLIT == 0, X::SPLIT & X::MARK), (X::BREAK_BEFORE_MAKE, 0));
        assert_eq!(format.decode(table | X::MARK | X::SPLIT, 2), format.decode(table, 2));
        assert_eq!(format.decode(table & !X::PRESENT | X::MARK | X::SPLIT, 2), Entry::Absent);
    }
    check(vtd(4));
    check(X86FirstStage::new(4, 3, 52).unwrap());
    check(AmdV1::new(4, 3, 52).unwrap());
    check(Riscv::sv48x4().within(3, 52).unwrap());
    check(Arm::<12>::stage_1(48, 48).unwrap());
    check(Arm::<16>::stage_2(48, 48).unwrap());
}

/// What an unmap of `len` bytes at `start` says must be invalidated.
fn stale<F: Frames + Simulated, X: Format>(table: &PageTable<F, X>, start: u64, len: u64) -> (u64, u64) {
    let unmapped = unmap_telling(table, range(start, len), |_| true);
    assert_eq!((unmapped.bytes, unmapped.kept), (len, 0));
    (unmapped.stale.start().get(), unmapped.stale.len())
}

#[test]
fn what_is_unmapped_of_a_large_page_is_stale_as_a_whole_until_its_table_is_gone() {
    fn check<X: Format>(format: X) {
        let memory = Memory::new(64 << 20);
        let table = make(Arc::clone(&memory), format);
        map(&table, 0, 3 * LARGE).unwrap();
        assert_eq!(stale(&table, LARGE + PAGE, PAGE), (LARGE, LARGE));
        // Whoever has split it: hardware may not have confirmed yet that it has forgotten the page.
        assert_eq!(stale(&table, LARGE + 7 * PAGE, 2 * PAGE), (LARGE, LARGE));
        // At both ends of a range, and at one.
        assert_eq!(stale(&table, LARGE - PAGE, 2 * PAGE), (0, 2 * LARGE));
        assert_eq!(stale(&table, 2 * LARGE, PAGE), (2 * LARGE, LARGE));
        // What is mapped in its place is no less affected, by the short way too.
        map(&table, LARGE + PAGE, PAGE).unwrap();
        assert_eq!(stale(&table, LARGE + PAGE, PAGE), (LARGE, LARGE));
        // Holes there may have been left by another CPU.
        let hole = unmap_telling(&table, range(LARGE, PAGE), |_| true);
        assert_eq!((hole.bytes, hole.stale), (0, range(LARGE, LARGE)));
        unmap(&table, 0, HUGE);
        // The table was set aside, and is used again: it is none that hardware has confirmed to have forgotten.
        assert!(table.shrink(&*PLATFORM, || Err(())).is_err());
        map(&table, LARGE, PAGE).unwrap();
        assert_eq!(stale(&table, LARGE, PAGE), (LARGE, LARGE));
        reclaim(&table);
        map(&table, LARGE, PAGE).unwrap();
        assert_eq!(stale(&table, LARGE, PAGE), (LARGE, PAGE));
        assert_accounted(&memory, &table);
    }
    check(vtd(4));
    check(X86FirstStage::new(4, 3, 52).unwrap());
    check(AmdV1::new(4, 3, 52).unwrap());
    check(Riscv::sv48().within(3, 52).unwrap());
}

#[test]
fn of_pages_that_were_split_one_inside_the_other_the_largest_is_stale() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    map(&table, HUGE, HUGE).unwrap();
    assert_eq!(stale(&table, HUGE + 5 * LARGE + PAGE, PAGE), (HUGE, HUGE));
    assert_eq!(stale(&table, HUGE + 6 * LARGE, LARGE), (HUGE, HUGE));
    assert_eq!(stale(&table, HUGE + 9 * LARGE, PAGE), (HUGE, HUGE));
    // Both were split before, by whichever call, and by the short way too.
    assert_eq!(stale(&table, HUGE + 5 * LARGE + 2 * PAGE, PAGE), (HUGE, HUGE));
    map(&table, HUGE + 5 * LARGE + PAGE, PAGE).unwrap();
    assert_eq!(stale(&table, HUGE + 5 * LARGE + PAGE, PAGE), (HUGE, HUGE));
    // A page that was broken first is forgotten as a whole by then.
    let broken = make(Memory::new(64 << 20), BreakFirst(vtd(4)));
    map(&broken, HUGE, HUGE).unwrap();
    let mut told = Vec::new();
    let unmapped = unmap_telling(&broken, range(HUGE + PAGE, PAGE), |range| {
        told.push(range);
        true
    });
    assert_eq!(
        (unmapped.stale, told),
        (range(HUGE + PAGE, PAGE), vec![range(HUGE, HUGE), range(HUGE, LARGE)])
    );
}

#[test]
fn what_cannot_be_split_is_counted_as_still_mapped() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    map(&table, 0, 3 * LARGE).unwrap();
    let kept = |start, len, failing| {
        memory.fail_after(failing);
        let unmapped = unmap_telling(&table, range(start, len), |_| true);
        (unmapped.bytes, unmapped.kept)
    };
    assert_eq!(kept(LARGE + PAGE, 3 * PAGE, 1), (0, 3 * PAGE));
    // At both ends, with a whole page between.
    assert_eq!(kept(PAGE, 2 * LARGE, 1), (LARGE + PAGE, LARGE - PAGE));
    assert!(is_mapped(&table, PAGE) && !is_mapped(&table, LARGE) && !is_mapped(&table, 2 * LARGE));
    assert_eq!(kept(0, PAGE / 2, 9), (0, PAGE / 2), "no part of a granule can go");
    memory.fail_after(u64::MAX);
    let broken = make(Memory::new(64 << 20), BreakFirst(vtd(4)));
    map(&broken, 0, LARGE).unwrap();
    let unmapped = unmap_telling(&broken, range(PAGE, 2 * PAGE), |_| false);
    assert_eq!((unmapped.bytes, unmapped.kept), (0, 2 * PAGE));
    assert!(is_mapped(&broken, PAGE));
}

/// A page of several entries is refused for the first of them that is in use, and leaves none of its own.
#[test]
fn a_page_of_several_entries_says_which_of_them_is_mapped() {
    for taken in 0..16 {
        let table = make(Memory::new(64 << 20), AmdV1::new(4, 3, 52).unwrap());
        let at = LARGE + taken * PAGE;
        map(&table, at, PAGE).unwrap();
        assert_eq!(map(&table, LARGE, 16 * PAGE), Err(MapError::AlreadyMapped { at: Iova::new(at) }));
        let mapped: Vec<u64> = (0..16).filter(|page| is_mapped(&table, LARGE + page * PAGE)).collect();
        assert_eq!(mapped, [taken]);
    }
}

#[test]
fn a_page_of_several_entries_is_split_in_a_copy_of_its_table() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), AmdV1::new(4, 3, 52).unwrap());
    let empty = table.table_bytes();
    let run = 64 << 10;
    map(&table, LARGE, run).unwrap();
    map(&table, LARGE + run, run).unwrap();
    let before = table.table_bytes();
    let mapped = |unmapped: &[u64]| {
        let page = |page| is_mapped(&table, LARGE + page * PAGE);
        assert!((0..32).all(|number| page(number) != unmapped.contains(&number)), "{unmapped:?}");
    };
    // The short way never waits: it maps beside the page once no mark keeps others out, which the other ways would wait for.
    let is_open = |page| {
        let (at, phys) = (range(LARGE + page * PAGE, PAGE), PhysAddr::new(ELSEWHERE + LARGE + page * PAGE));
        let is_mapped = table.open_fast(&*PLATFORM, at, phys, Permissions::READ_WRITE);
        assert!(is_mapped, "a split that failed has left its marks: the next would wait for ever");
        assert!(table.close_fast(&*PLATFORM, at));
    };
    // Whatever the hardware knows of the table must go.
    let mut told = Vec::new();
    let removed = unmap_telling(&table, range(LARGE + 3 * PAGE, 2 * PAGE), |range| {
        mapped(&[]);
        told.push(range);
        true
    });
    assert_eq!((removed.bytes, removed.stale), (2 * PAGE, range(LARGE + 3 * PAGE, 2 * PAGE)));
    assert_eq!(told, [range(LARGE, LARGE)]);
    mapped(&[3, 4]);
    assert_eq!(table.table_bytes(), before);
    assert_accounted(&memory, &table);
    // Without memory, or an answer, or with a driver that panics: as it was, and the copies are kept.
    memory.fail_after(1);
    let removed = unmap_telling(&table, range(LARGE + 17 * PAGE, PAGE), |_| unreachable!());
    assert_eq!((removed.bytes, removed.kept), (0, PAGE));
    is_open(32);
    for copies in 1..=2 {
        let removed = unmap_telling(&table, range(LARGE + 17 * PAGE, PAGE), |_| false);
        assert_eq!((removed.bytes, removed.kept), (0, PAGE));
        is_open(32 + copies as u64);
        mapped(&[3, 4]);
        assert_eq!(table.table_bytes(), before + copies * 4096);
    }
    let panicking = std::panic::AssertUnwindSafe(|| {
        unmap_telling(&table, range(LARGE + 17 * PAGE, PAGE), |_| panic!("as the test wants"))
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    mapped(&[3, 4]);
    assert!(table.shrink(&*PLATFORM, || Err(())).is_err());
    assert_eq!(table.table_bytes(), before + 3 * 4096, "until the hardware has forgotten them");
    assert_eq!(reclaim(&table), 3 * 4096);
    assert_eq!(unmap(&table, LARGE + 17 * PAGE, PAGE), PAGE);
    mapped(&[3, 4, 17]);
    assert_accounted(&memory, &table);
    assert_eq!(unmap(&table, LARGE, 2 * run), 2 * run - 3 * PAGE);
    reclaim(&table);
    assert_eq!(table.table_bytes(), empty);
    // Copies that are kept go with the table.
    map(&table, LARGE, run).unwrap();
    assert_eq!(unmap_telling(&table, range(LARGE, PAGE), |_| false).bytes, 0);
    drop(table);
    assert_eq!((memory.frames_in_use(), memory.bad_frees()), (0, 0));
}

/// What cleans the new way to the table panics, once the hardware has confirmed: the copy is what it walks, with all that is mapped.
#[test]
fn a_page_of_several_entries_whose_copy_is_in_use_stays_mapped() {
    let frames = Hooked::<false>::new();
    let table = make(Arc::clone(&frames), AmdV1::new(4, 3, 52).unwrap());
    map(&table, LARGE, 16 * PAGE).unwrap();
    let panicking = std::panic::AssertUnwindSafe(|| {
        unmap_telling(&table, range(LARGE, PAGE), |_| {
            frames.once(|| std::panic::resume_unwind(Box::new("as the test wants")));
            true
        })
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    assert!((0..16).all(|page| is_mapped(&table, LARGE + page * PAGE)));
    assert_eq!(unmap(&table, LARGE, 16 * PAGE), 16 * PAGE);
    reclaim(&table);
    assert_accounted(&frames.memory, &table);
}

#[test]
fn amd_s_topmost_table_has_no_pages_of_several_entries() {
    for levels in 1..=6 {
        for large in 1..=levels.min(3) {
            let format = AmdV1::new(levels, large, 52).unwrap();
            let sizes = format.leaf_sizes();
            assert!(sizes.iter().all(|size| size.run == 0 || size.level < levels));
            assert!(sizes.iter().all(|size| size.level <= large));
            assert_eq!(sizes.len() as u32, if large == levels { 9 * large - 8 } else { 9 * large });
        }
        // Hardware has a bug with pages of 512 GiB.
        assert!(AmdV1::new(levels, 4, 52).is_err());
    }
}
