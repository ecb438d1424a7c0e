//! The page-table engine against a plain map, against the software IOMMU's own walker, and against the
//! entries that the VT-d manual's figures show.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{PAGE, PLATFORM, vtd};
use portcullis::SetupError;
use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes, Permissions, PhysAddr};
use portcullis::pgtable::{MapError, PageTable, Unmapped, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis_model::open::OpenTable;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};
use proptest::prelude::*;

type Vtd = PageTable<Arc<Memory>, VtdSecondStage>;

fn with_format(memory: &Arc<Memory>, format: VtdSecondStage) -> Vtd {
    PageTable::for_cpus(Arc::clone(memory), format, PLATFORM.cpus()).unwrap()
}

fn table(levels: u32) -> (Arc<Memory>, Vtd) {
    let memory = Memory::new(64 << 20);
    let table = with_format(&memory, vtd(levels));
    (memory, table)
}

fn unmap(table: &Vtd, range: IovaRange) -> Unmapped {
    table.close(&*PLATFORM, range, &mut |_| unreachable!("VT-d wants no break before make"))
}

fn translate(table: &Vtd, iova: Iova) -> Option<(PhysAddr, Permissions)> {
    let (phys, attributes) = table.translate(&*PLATFORM, iova)?;
    assert_eq!(attributes, attributes.permissions.into());
    Some((phys, attributes.permissions))
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), len).unwrap()
}

fn map(table: &Vtd, start: u64, len: u64, phys: u64, permissions: Permissions) -> Result<(), MapError> {
    table.open(&*PLATFORM, range(start, len), PhysAddr::new(phys), permissions).map_err(|(error, _)| error)
}

/// The entry that maps `iova` at `level`, read from memory as the hardware would.
fn entry(memory: &Memory, table: &Vtd, iova: u64, level: u32) -> u64 {
    let mut frame = table.root();
    let mut at = table.levels();
    loop {
        let shift = 12 + 9 * (at - 1);
        let cpu = (iova >> shift & 511) * 8;
        let value = memory.read_u64(frame.checked_add(cpu).unwrap()).unwrap();
        if at == level {
            return value;
        }
        assert_eq!(value & 3, 3, "a table's entry allows everything");
        frame = PhysAddr::new(value & 0x000f_ffff_ffff_f000);
        at -= 1;
    }
}

#[test]
fn entries_are_as_the_manual_draws_them() {
    let (memory, table) = table(4);
    // Bit 0 reads, bit 1 writes, bit 7 makes a large page; the address in its place.
    map(&table, 0x7000, PAGE, 0x1234_5000, Permissions::READ).unwrap();
    assert_eq!(entry(&memory, &table, 0x7000, 1), 0x1234_5001);
    map(&table, 0x8000, PAGE, 0xf_ffff_ffff_f000, Permissions::WRITE).unwrap();
    assert_eq!(entry(&memory, &table, 0x8000, 1), 0xf_ffff_ffff_f002);
    map(&table, 0x20_0000, 2 << 20, 0x4000_0000, Permissions::READ_WRITE).unwrap();
    assert_eq!(entry(&memory, &table, 0x20_0000, 2), 0x4000_0083);
    map(&table, 0x4000_0000, 1 << 30, 0x1_8000_0000, Permissions::READ_WRITE).unwrap();
    assert_eq!(entry(&memory, &table, 0x4000_0000, 3), 0x1_8000_0083);
}

#[test]
fn the_largest_page_that_fits_is_used() {
    let (_, table) = table(4);
    let before = table.table_bytes();
    // 1 GiB and 2 MiB and 4 KiB, aligned alike on both sides: one leaf of each.
    let len = (1 << 30) + (2 << 20) + PAGE;
    map(&table, 1 << 30, len, 1 << 30, Permissions::READ).unwrap();
    // A level-3 table for the 1 GiB leaf, one more for each of the two levels below.
    assert_eq!(table.table_bytes() - before, 3 * PAGE as usize);
    // Aligned to each other by 4 KiB only: no large page is possible.
    map(&table, 4 << 30, 4 << 20, PAGE, Permissions::READ).unwrap();
    let (phys, _) = translate(&table, Iova::new((4 << 30) + 0x123_456)).unwrap();
    assert_eq!(phys, PhysAddr::new(PAGE + 0x123_456));
    assert_eq!(unmap(&table, range(1 << 30, len)), Unmapped::of(range(1 << 30, len), len));
    assert_eq!(translate(&table, Iova::new(1 << 30)), None);
}

#[test]
fn a_table_without_large_pages_has_none() {
    let memory = Memory::new(64 << 20);
    let small = VtdSecondStage::new(3, 1, 52).unwrap();
    let table = with_format(&memory, small);
    assert_eq!(table.page_sizes(), PageSizes::EMPTY.with(PageSize::SIZE_4K));
    map(&table, 2 << 20, 2 << 20, 2 << 20, Permissions::READ).unwrap();
    assert_eq!(entry(&memory, &table, (2 << 20) + 5 * PAGE, 1), (2 << 20) + 5 * PAGE + 1);
    // With those of 2 MiB: where a table stands in the way, small ones are used all the same.
    let table = with_format(&memory, VtdSecondStage::new(3, 2, 52).unwrap());
    map(&table, 0, PAGE, 0, Permissions::READ).unwrap();
    assert_eq!(unmap(&table, range(0, PAGE)).bytes, PAGE);
    map(&table, 0, 1 << 30, 0, Permissions::READ).unwrap();
    assert_eq!(entry(&memory, &table, 0, 1), 1);
    assert_eq!(entry(&memory, &table, 2 << 20, 2), (2 << 20) + 0x81);
    assert_eq!(unmap(&table, range(0, 1 << 30)).bytes, 1 << 30);
}

#[test]
fn a_large_page_can_take_the_place_of_unmapped_small_ones() {
    for levels in 3..=5 {
        let (_, table) = table(levels);
        map(&table, 0, PAGE, 0x5000, Permissions::READ).unwrap();
        assert_eq!(unmap(&table, range(0, PAGE)).bytes, PAGE);
        map(&table, 0, 3 << 30, 0, Permissions::READ_WRITE).unwrap();
        let at = Iova::new((2 << 30) + 0x12345);
        assert_eq!(translate(&table, at), Some((PhysAddr::new(at.get()), Permissions::READ_WRITE)));
        assert_eq!(unmap(&table, range(0, 3 << 30)).bytes, 3 << 30);
        assert_eq!(translate(&table, at), None);
    }
}

#[test]
fn what_cannot_be_mapped_says_why() {
    let (_, table) = table(3);
    let read = Permissions::READ;
    let misaligned = |start, len, phys| {
        assert!(matches!(
            map(&table, start, len, phys, read),
            Err(MapError::Misaligned { granule: 4096, .. })
        ));
    };
    misaligned(0x800, PAGE, 0);
    misaligned(0, 0x800, 0);
    misaligned(0, PAGE, 0x800);
    let last = Iova::new((1 << 39) - 1);
    assert_eq!(table.last_iova(), last);
    map(&table, (1 << 39) - PAGE, PAGE, 0, read).unwrap();
    let beyond = range((1 << 39) - PAGE, 2 * PAGE);
    assert_eq!(
        map(&table, (1 << 39) - PAGE, 2 * PAGE, 0, read),
        Err(MapError::BeyondAperture { range: beyond, last })
    );
    for phys in [1 << 52, (1 << 52) - PAGE, !(PAGE - 1)] {
        let expected = MapError::BeyondPhysical {
            phys: PhysAddr::new(phys),
            len: 2 * PAGE,
            last: PhysAddr::new((1 << 52) - 1),
        };
        assert_eq!(map(&table, 0, 2 * PAGE, phys, read), Err(expected));
    }
    for levels in [0, 2, 6] {
        let error = VtdSecondStage::new(levels, 1, 52).unwrap_err();
        assert_eq!(error, SetupError::Levels { levels, min: 3, max: 5 });
    }
    for levels in [0, 4] {
        let error = VtdSecondStage::new(4, levels, 52).unwrap_err();
        assert_eq!(error, SetupError::LeafLevels { levels, max: 3 });
    }
    for bits in [11, 53] {
        let error = VtdSecondStage::new(4, 1, bits).unwrap_err();
        assert_eq!(error, SetupError::AddressBits { bits, min: 12, max: 52 });
    }
}

#[test]
fn mapping_over_a_mapping_names_it_and_leaves_everything_as_it_was() {
    let (_, table) = table(4);
    map(&table, 5 * PAGE, PAGE, 0xa000, Permissions::READ).unwrap();
    let over = table.open(&*PLATFORM, range(2 * PAGE, 8 * PAGE), PhysAddr::new(0), Permissions::WRITE);
    // What a device may have cached meanwhile.
    let undone = Some(range(2 * PAGE, 3 * PAGE));
    assert_eq!(over, Err((MapError::AlreadyMapped { at: Iova::new(5 * PAGE) }, undone)));
    for page in 0..16 {
        let expected = (page == 5).then_some((PhysAddr::new(0xa000), Permissions::READ));
        assert_eq!(translate(&table, Iova::new(page * PAGE)), expected);
    }
    // Over a large page, and a large page over a small one.
    map(&table, 2 << 20, 2 << 20, 0, Permissions::READ).unwrap();
    let at = Iova::new((2 << 20) + PAGE);
    let over = map(&table, at.get(), PAGE, 0, Permissions::READ);
    assert_eq!(over, Err(MapError::AlreadyMapped { at }));
    let over = map(&table, 0, 2 << 20, 0, Permissions::READ);
    assert_eq!(over, Err(MapError::AlreadyMapped { at: Iova::new(5 * PAGE) }));
}

#[test]
fn an_unmap_removes_exactly_what_it_is_told() {
    let (_, table) = table(4);
    map(&table, 0, 4 * PAGE, 0, Permissions::READ).unwrap();
    assert_eq!(unmap(&table, range(2 * PAGE, 4 * PAGE)), Unmapped::of(range(2 * PAGE, 4 * PAGE), 2 * PAGE));
    assert_eq!(unmap(&table, range(2 * PAGE, PAGE)), Unmapped::of(range(2 * PAGE, PAGE), 0));
    assert_eq!(unmap(&table, range(0, 2 * PAGE)), Unmapped::of(range(0, 2 * PAGE), 2 * PAGE));
    // Holes of a page, of a table and of whole levels are passed over.
    for at in [PAGE, 5 * PAGE, (2 << 20) + PAGE, 3 << 30, 5 << 39] {
        map(&table, at, PAGE, 0, Permissions::READ).unwrap();
    }
    assert_eq!(unmap(&table, range(0, 1 << 48)), Unmapped::of(range(0, 1 << 48), 5 * PAGE));
    // A part of a large page goes, the rest stays. (At addresses where no table for small pages is left.)
    let large = 32 << 20;
    map(&table, large, 4 << 20, 0, Permissions::READ).unwrap();
    assert_eq!(
        unmap(&table, range(large + PAGE, PAGE)),
        Unmapped { stale: range(large, 2 << 20), ..Unmapped::of(range(0, 1), PAGE) }
    );
    let (below, above) = (Iova::new(large), Iova::new(large + 2 * PAGE));
    assert_eq!(translate(&table, below), Some((PhysAddr::new(0), Permissions::READ)));
    assert_eq!(translate(&table, Iova::new(large + PAGE)), None);
    assert_eq!(translate(&table, above), Some((PhysAddr::new(2 * PAGE), Permissions::READ)));
    assert_eq!(
        unmap(&table, range(large, (2 << 20) + PAGE)),
        Unmapped { stale: range(large, 4 << 20), ..Unmapped::of(range(0, 1), 2 << 20) }
    );
    assert_eq!(unmap(&table, range(0, 1 << 30)), Unmapped::of(range(0, 1 << 30), (2 << 20) - PAGE));
    // Beyond the aperture, and at the very end of 64 bits.
    assert_eq!(unmap(&table, range(1 << 48, PAGE)), Unmapped::of(range(1 << 48, PAGE), 0));
    assert_eq!(unmap(&table, range(!(PAGE - 1), PAGE)), Unmapped::of(range(!(PAGE - 1), PAGE), 0));
    map(&table, (1 << 48) - PAGE, PAGE, 0, Permissions::READ).unwrap();
    assert_eq!(unmap(&table, range(PAGE, u64::MAX - PAGE)), Unmapped::of(range(PAGE, u64::MAX - PAGE), PAGE));
    assert_eq!(translate(&table, Iova::new(u64::MAX)), None);
}

#[test]
fn running_out_of_table_memory_leaves_nothing_mapped_and_nothing_leaked() {
    // Two regions under different level-4 entries: the second needs three tables of its own.
    for nth in 1..=6 {
        let (memory, table) = table(4);
        let start = (1 << 39) - 2 * PAGE;
        memory.fail_after(nth);
        let result = map(&table, start, 4 * PAGE, 0, Permissions::READ);
        assert_eq!(result, Err(MapError::OutOfMemory), "allocation {nth} fails");
        for page in 0..4 {
            assert_eq!(translate(&table, Iova::new(start + page * PAGE)), None);
        }
        map(&table, start, 4 * PAGE, 0, Permissions::READ).unwrap();
        drop(table);
        assert_eq!(memory.frames_in_use(), 0);
        assert_eq!(memory.bad_frees(), 0);
    }
}

#[derive(Debug, Clone)]
enum Action {
    Map { page: u64, pages: u64, phys: u64, permissions: Permissions },
    Unmap { page: u64, pages: u64 },
}

fn action() -> impl Strategy<Value = Action> {
    // A window of 8 MiB around a 1 GiB boundary, where all page sizes meet; often whole 2 MiB pages.
    let place = prop_oneof![
        (0..2048u64, 1..40u64),
        (0..4u64, 1..3u64).prop_map(|(large, count)| (large * 512, count * 512)),
    ];
    let permissions =
        prop_oneof![Just(Permissions::READ), Just(Permissions::WRITE), Just(Permissions::READ_WRITE)];
    prop_oneof![
        (place.clone(), 0..8192u64, any::<bool>(), permissions).prop_map(
            |((page, pages), phys, alike, permissions)| {
                let phys = if alike { phys / 512 * 512 + page % 512 } else { phys };
                Action::Map { page, pages, phys, permissions }
            }
        ),
        place.prop_map(|(page, pages)| Action::Unmap { page, pages }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Every page of the window, after every action: the engine, the model's walker over the same memory and
    /// a plain map agree.
    #[test]
    fn agrees_with_a_plain_map_and_with_the_hardware_model(
        levels in 3u32..=5,
        actions in proptest::collection::vec(action(), 1..60),
    ) {
        let base = (1u64 << 30) - (4 << 20);
        let (memory, table) = table(levels);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let domain = portcullis::addr::DomainId(3);
        iommu.attach(DeviceId(1), Context::SecondStage { domain, root: table.root(), levels });
        let mut plain: BTreeMap<u64, (u64, Permissions)> = BTreeMap::new();
        for action in actions {
            match action {
                Action::Map { page, pages, phys, permissions } => {
                    let result = map(&table, base + page * PAGE, pages * PAGE, phys * PAGE, permissions);
                    match plain.range(page..page + pages).next() {
                        Some((taken, _)) => {
                            let at = Iova::new(base + taken * PAGE);
                            prop_assert_eq!(result, Err(MapError::AlreadyMapped { at }));
                        }
                        None => {
                            prop_assert_eq!(result, Ok(()));
                            plain.extend((0..pages).map(|n| (page + n, (phys + n, permissions))));
                        }
                    }
                }
                Action::Unmap { page, pages } => {
                    let there = (page..page + pages).filter(|page| plain.contains_key(page)).count() as u64;
                    let bytes = unmap(&table, range(base + page * PAGE, pages * PAGE)).bytes;
                    plain.retain(|mapped, _| !(page..page + pages).contains(mapped));
                    prop_assert_eq!(bytes, there * PAGE);
                }
            }
            for page in 0..4096u64 {
                let iova = Iova::new(base + page * PAGE + 0x123);
                let expected = plain.get(&page).map(|(phys, permissions)| {
                    (PhysAddr::new(phys * PAGE + 0x123), *permissions)
                });
                prop_assert_eq!(translate(&table, iova), expected, "page {}", page);
            }
        }
        for (page, (phys, permissions)) in &plain {
            let iova = Iova::new(base + page * PAGE);
            let phys = Some(PhysAddr::new(phys * PAGE));
            let reached = |access| iommu.probe(DeviceId(1), iova, access);
            prop_assert_eq!(reached(*permissions), phys);
            prop_assert_eq!(reached(Permissions::READ_WRITE).is_some(), *permissions == Permissions::READ_WRITE);
        }
        drop(table);
        prop_assert_eq!(memory.frames_in_use(), 0);
    }
}
