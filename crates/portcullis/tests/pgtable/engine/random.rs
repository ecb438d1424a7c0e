//! The engine against a plain map, with memory that runs out and hardware that does not answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis::pgtable::{
    AmdV1, Arm, Format, Layout, MapError, PageTable, Riscv, VtdSecondStage, X86FirstStage,
};
use portcullis::platform::{Frames, Platform};
use portcullis_model::Memory;
use portcullis_model::open::OpenTable;
use proptest::prelude::*;

use super::support::*;
use crate::common::{PAGE, PLATFORM, vtd};

/// Granules of the window that actions are in: around a boundary of the table of level 3.
const WINDOW: u64 = 4096;

#[derive(Debug, Clone)]
enum Action {
    /// Maps to one place in memory, or to several, so many pages each. The `fail`-th table is not to be had.
    Map {
        page: u64,
        pages: u64,
        phys: u64,
        piece: u64,
        fail: u64,
    },
    Unmap {
        page: u64,
        pages: u64,
        fail: u64,
        confirmed: bool,
    },
    /// The hardware answers so many times and then not any more.
    Reclaim {
        answers: u32,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let place = prop_oneof![
        (0..WINDOW - 64, 1..64u64),
        // Whole pages of 2 MiB.
        (0..7u64, 1..3u64).prop_map(|(large, count)| (large * 512, (count * 512).min(WINDOW - large * 512))),
    ];
    let fail = prop_oneof![3 => Just(0), 1 => 1..6u64];
    let map = (place.clone(), 0..1u64 << 20, 0..3u8, prop_oneof![Just(u64::MAX), 1..40u64], fail.clone());
    let map = map.prop_map(|((page, pages), phys, alike, piece, fail)| {
        let phys = if alike > 0 { phys / 512 * 512 + page % 512 } else { phys };
        Action::Map { page, pages, phys, piece, fail }
    });
    prop_oneof![
        4 => map,
        4 => (place, fail, any::<bool>())
            .prop_map(|((page, pages), fail, confirmed)| Action::Unmap { page, pages, fail, confirmed }),
        1 => (0..4u32).prop_map(|answers| Action::Reclaim { answers }),
    ]
}

/// A table, its memory and what should be in it: for each page the page behind and the permissions.
struct Machine<X: Format> {
    memory: Arc<Memory>,
    table: PageTable<Arc<Memory>, X>,
    plain: BTreeMap<u64, (u64, Permissions)>,
    base: u64,
}

impl<X: Format> Machine<X> {
    fn new(format: X) -> Self {
        let memory = Memory::new(64 << 20);
        let table = make(Arc::clone(&memory), format);
        let base = (1 << format.shift(4.min(format.levels()))) - WINDOW / 2 * PAGE;
        Self { memory, table, plain: BTreeMap::new(), base }
    }

    fn map(&mut self, (page, pages): (u64, u64), phys: u64, piece: u64, fail: u64) {
        let permissions = [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE][phys as usize % 3];
        // What the format keeps of them.
        let format = self.table.format();
        let kept = format.leaf(PhysAddr::new(0), format.leaf_sizes()[0], permissions.into());
        let kept = format.attributes(kept, 1).permissions;
        // Pieces with a gap between them.
        let memory = |n: u64| phys + n + if piece == u64::MAX { 0 } else { n / piece * 3 };
        let list = (0..pages).step_by(piece.min(pages) as usize).map(|first| {
            let len = piece.min(pages - first);
            (PhysAddr::new(memory(first) * PAGE), len * PAGE)
        });
        let whole = range(self.base + page * PAGE, pages * PAGE);
        self.memory.fail_after(fail);
        let result = self.table.open_list(&*PLATFORM, whole, list, permissions);
        self.memory.fail_after(0);
        let taken = self.plain.range(page..page + pages).next().map(|(at, _)| *at);
        let undone = result.err().and_then(|(_, undone)| undone);
        match (result.map_err(|(error, _)| error), taken) {
            (Ok(()), None) => {
                self.plain.extend((0..pages).map(|n| (page + n, (memory(n), kept))));
            }
            (Err(MapError::AlreadyMapped { at }), Some(taken)) => {
                let lowest = Iova::new(self.base + taken * PAGE);
                assert_eq!(at, lowest);
                assert!(
                    undone.is_none_or(|undone| undone.start() == whole.start() && undone.last() < lowest)
                );
            }
            (Err(MapError::OutOfMemory), _) => assert_ne!(fail, 0),
            other => panic!("{other:?}"),
        }
    }

    fn unmap(&mut self, (page, pages): (u64, u64), fail: u64, confirmed: bool) {
        self.memory.fail_after(fail);
        let whole = range(self.base + page * PAGE, pages * PAGE);
        let mut refused = false;
        let bytes = unmap_telling(&self.table, whole, |broken| {
            assert!(broken.start() < whole.start() || broken.last() > whole.last(), "no need to break it");
            refused |= !confirmed;
            confirmed
        });
        self.memory.fail_after(0);
        let there: Vec<_> = self.plain.range(page..page + pages).map(|(page, _)| *page).collect();
        let mut gone = 0;
        for page in there {
            if self.found(page).is_none() {
                self.plain.remove(&page);
                gone += 1;
            } else {
                assert!(fail > 0 || refused, "page {page} stayed");
            }
        }
        assert_eq!(bytes.bytes, gone * PAGE);
    }

    fn reclaim(&self, mut answers: u32) {
        let before = self.table.table_bytes();
        let freed = self.table.shrink(&*PLATFORM, || {
            answers = answers.checked_sub(1).ok_or(())?;
            Ok::<_, ()>(())
        });
        let gone = before - self.table.table_bytes();
        // A call that fails in the end may have freed something before.
        assert!(freed.is_err() || freed == Ok(gone));
    }

    fn found(&self, page: u64) -> Option<(u64, Permissions)> {
        let (phys, attributes) =
            self.table.translate(&*PLATFORM, Iova::new(self.base + page * PAGE + 0x123))?;
        assert_eq!(phys.get() % PAGE, 0x123);
        Some((phys.get() / PAGE, attributes.permissions))
    }

    fn check(&self) {
        for page in 0..WINDOW {
            assert_eq!(self.found(page), self.plain.get(&page).copied(), "page {page}");
        }
        // The same as a whole.
        let mut visited = BTreeMap::new();
        self.table.entries(&*PLATFORM, self.table.aperture()).for_each(|mapping| {
            assert!(mapping.range.len().is_power_of_two());
            let first = (mapping.range.start().get() - self.base) / PAGE;
            for n in 0..mapping.range.len() / PAGE {
                let before = visited
                    .insert(first + n, (mapping.phys.get() / PAGE + n, mapping.attributes.permissions));
                assert_eq!(before, None, "a page is visited once");
            }
        });
        assert_eq!(visited, self.plain);
        assert_accounted(&self.memory, &self.table);
    }
}

fn run<X: Format>(format: X, actions: &[Action]) {
    let mut machine = Machine::new(format);
    let empty = machine.table.table_bytes();
    for action in actions {
        match *action {
            Action::Map { page, pages, phys, piece, fail } => machine.map((page, pages), phys, piece, fail),
            Action::Unmap { page, pages, fail, confirmed } => machine.unmap((page, pages), fail, confirmed),
            Action::Reclaim { answers } => machine.reclaim(answers),
        }
        machine.check();
    }
    machine.unmap((0, WINDOW), 0, true);
    assert!(machine.plain.is_empty());
    reclaim(&machine.table);
    assert_eq!(machine.table.table_bytes(), empty);
    let Machine { memory, table, .. } = machine;
    assert_accounted(&memory, &table);
    drop(table);
    assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn agrees_with_a_plain_map(levels in 3u32..=5, actions in proptest::collection::vec(action(), 1..40)) {
        run(vtd(levels), &actions);
    }

    #[test]
    fn agrees_with_a_plain_map_when_pages_must_be_broken(
        actions in proptest::collection::vec(action(), 1..40),
    ) {
        run(BreakFirst(vtd(4)), &actions);
        run(Arm::<12>::stage_2(48, 48).unwrap(), &actions);
    }

    #[test]
    fn agrees_with_a_plain_map_in_other_formats(actions in proptest::collection::vec(action(), 1..40)) {
        run(X86FirstStage::new(5, 3, 52).unwrap(), &actions);
        run(AmdV1::new(4, 3, 52).unwrap(), &actions);
        run(Riscv::sv39x4().within(3, 52).unwrap(), &actions);
    }
}

#[test]
fn a_list_must_be_as_long_as_its_range() {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), vtd(4));
    let whole = range(0x10000, 4 * PAGE);
    let map = |list: &[(u64, u64)]| {
        let list = list.iter().map(|(phys, len)| (PhysAddr::new(*phys), *len));
        table.open_list(&*PLATFORM, whole, list, Permissions::READ).map_err(|(error, _)| error)
    };
    let wrong = |list| Err(MapError::Length { range: whole, list });
    assert_eq!(map(&[]), wrong(0));
    assert_eq!(map(&[(0, PAGE), (0, 2 * PAGE)]), wrong(3 * PAGE));
    assert_eq!(map(&[(0, PAGE), (0, 4 * PAGE)]), wrong(5 * PAGE));
    assert_eq!(map(&[(0, 4 * PAGE), (0, PAGE)]), wrong(5 * PAGE));
    assert!(matches!(map(&[(0, PAGE), (0x800, 3 * PAGE)]), Err(MapError::Misaligned { .. })));
    assert!(matches!(map(&[(0, PAGE), (1 << 52, 3 * PAGE)]), Err(MapError::BeyondPhysical { .. })));
    let mapped = table.entries(&*PLATFORM, table.aperture()).count();
    assert_eq!(mapped, 0, "nothing of them stays");
    // Pieces of no length are nothing, wherever they are.
    assert_eq!(map(&[(0, 0), (PAGE, PAGE), (0, 0), (0, 3 * PAGE), (0, 0)]), Ok(()));
    assert_eq!(reached(&table, 0x10000), Some(PAGE));
    assert_accounted(&memory, &table);
}

#[test]
fn tables_beyond_what_an_entry_holds_are_refused() {
    // Memory from 4 GiB on, addresses of 32 bits and one page more.
    let memory = Memory::new(64 << 20);
    let format = VtdSecondStage::new(4, 3, 32).unwrap();
    let last = PhysAddr::new(u32::MAX.into());
    let error = PageTable::for_cpus(Arc::clone(&memory), format, PLATFORM.cpus()).unwrap_err();
    assert_eq!(error, SetupError::TableBeyondPhysical { table: memory.base(), last });
    assert_eq!(memory.frames_in_use(), 0);
    // Three frames below the limit: the root and two more. (Single frames come 64 at a time.)
    let memory = Memory::with_base(PhysAddr::new((1 << 32) - 64 * PAGE), 64 << 20);
    let others: Vec<_> = (0..61).map(|_| memory.alloc(1).unwrap()).collect();
    let table = make(Arc::clone(&memory), format);
    let mapping = table.open(&*PLATFORM, range(0, PAGE), PhysAddr::new(0), Permissions::READ);
    let (error, undone) = mapping.unwrap_err();
    assert!(
        matches!(error, MapError::TableBeyondPhysical { table, last: end } if end == last && table > last)
    );
    assert_eq!(undone, None);
    assert_eq!(reached(&table, 0), None);
    // A large page can still be mapped, but not split.
    let large = range(0, 2 << 20);
    table.open(&*PLATFORM, large, PhysAddr::new(0), Permissions::READ).unwrap();
    assert_eq!(unmap(&table, PAGE, PAGE), 0);
    assert_eq!(reached(&table, PAGE), Some(PAGE));
    others.into_iter().for_each(|frame| memory.release(frame, 1));
    assert_accounted(&memory, &table);
}

/// The sizes of the leaves from `start` on, with how many there are of each, and the addresses in the tables.
fn leaves<X: Format>(format: X, start: u64, len: u64, phys: u64) -> Vec<(u64, usize)> {
    let table = make(Memory::new(64 << 20), format);
    let rights = Permissions::READ_WRITE;
    table.open(&*PLATFORM, range(start, len), PhysAddr::new(phys), rights).unwrap();
    let (mut sizes, mut next): (Vec<(u64, usize)>, _) = (Vec::new(), start);
    table.entries(&*PLATFORM, table.aperture()).for_each(|mapping| {
        let size = mapping.range.len();
        assert_eq!((mapping.range.start().get(), mapping.phys.get()), (next, next - start + phys));
        next += size;
        match sizes.last_mut() {
            Some((last, count)) if *last == size => *count += 1,
            _ => sizes.push((size, 1)),
        }
    });
    assert_eq!(next, start + len);
    sizes
}

#[test]
fn each_address_is_mapped_by_the_largest_page_that_fits_there() {
    let amd = AmdV1::new(4, 3, 52).unwrap();
    // 4 KiB, 8, .. 1 MiB.
    let doubling: Vec<_> = (12..=20).map(|shift| (1 << shift, 1)).collect();
    assert_eq!(leaves(amd, 0x1000, 0x1f_f000, 1 << 40 | 0x1000), doubling);
    // Down again, and none larger where the two are not aligned alike.
    let halving: Vec<_> = doubling.iter().rev().copied().collect();
    assert_eq!(leaves(amd, 0, 0x1f_f000, 1 << 40), halving);
    assert_eq!(leaves(amd, 0x1000, 0x1f_f000, 1 << 40 | 0x2000), [(0x1000, 511)]);
    assert_eq!(leaves(amd, 0x2000, 0x8000, 1 << 40 | 0x6000), [(0x2000, 1), (0x4000, 1), (0x2000, 1)]);
    let arm = Arm::<12>::stage_1(48, 48).unwrap();
    let runs = [(0x1000, 15), (0x1_0000, 31)];
    assert_eq!(leaves(arm, 0x1000, 0x1f_f000, 1 << 40 | 0x1000), runs);
    // Not for the last bytes, which are fewer.
    assert_eq!(leaves(arm, 0x1000, 0x1_e000, 1 << 40 | 0x1000), [(0x1000, 30)]);
    // From level to level.
    let sizes = [(0x1000, 15), (0x1_0000, 31), (0x20_0000, 15), (0x200_0000, 1), (0x1000, 1)];
    assert_eq!(leaves(arm, 0x1000, 0x400_0000, 1 << 40 | 0x1000), sizes);
}
