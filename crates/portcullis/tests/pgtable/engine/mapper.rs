//! What a mapper of tables tells the hardware: of all that it may hold, tables included, and in time.

use std::sync::Arc;

use portcullis::addr::{Direction, DomainId, Iova, IovaRange, PageSize, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, Ended, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Linked, Policy, Refused, UnmapError};
use portcullis::invalidation::Gather;
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::pgtable::{AmdV1, Arm, Format, PageTable, VtdSecondStage};
use portcullis::platform::{FRAME_SIZE, Frames, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{ArmTables, Context, Granule, Iommu, IommuConfig, Memory, TableFormat};

use crate::common::{Bench, DEVICE, PAGE, PLATFORM, vtd};
use crate::engine::support::range;

const BOTH: Direction = Direction::Bidirectional;

/// The page at the same place in each table, wherever the walk comes to.
const ANYWHERE: u64 = 0x1_2345_6000;

fn page(first: Iova, number: u64) -> Iova {
    Iova::new(first.get() + number * PAGE)
}

fn map(bench: &Bench, pages: u64) -> IovaRange {
    let memory = bench.memory.alloc(pages as usize).unwrap();
    // SAFETY: the memory is simulated, and stays.
    let first = unsafe { bench.device.map_single(memory, pages * PAGE, BOTH) }.unwrap();
    range(first.get(), pages * PAGE)
}

/// What was a table is somebody's memory after a reclaim: a device that finds entries there was not told to forget the
/// way to it. An invalidation of leaves alone leaves the way.
#[test]
fn hardware_forgets_the_way_to_a_table_before_it_is_freed() {
    let bench = Bench::new(Policy::Strict);
    let at_first = bench.memory.frames_in_use();
    let mapped = map(&bench, 1);
    assert!(bench.writes(mapped.start()));
    let tables = bench.memory.frames_in_use() - at_first - 1;
    bench.device.unmap_single(mapped.start(), PAGE).unwrap();
    assert!(!bench.writes(mapped.start()), "the translation is gone, the way to its table is cached");
    let walks = bench.iommu.stats().walks_into_freed_frames;
    assert_eq!(bench.domain.reclaim(), Ok((tables * FRAME_SIZE) as usize));
    // All that was freed is taken by somebody who writes what would be entries.
    let entries: Vec<u8> = (0..512_u64).flat_map(|_| (ANYWHERE | 3).to_le_bytes()).collect();
    let freed: Vec<_> = (0..64).map(|_| bench.memory.alloc(1).unwrap()).collect();
    freed.iter().for_each(|frame| bench.memory.write(*frame, &entries).unwrap());
    assert_eq!(bench.iommu.probe(DEVICE, mapped.start(), BOTH.permissions()), None);
    assert!(!bench.writes(mapped.start()));
    assert_eq!(bench.iommu.stats().walks_into_freed_frames, walks);
}

/// Somebody clears a part of a range without an invalidation; whoever ends the range has the device forget all of it.
fn cleared_by_another(bench: &Bench, part: IovaRange) {
    let unmapped = bench.domain.mapper().unmap(&*PLATFORM, part, &mut Gather::new());
    assert_eq!(unmapped.bytes, part.len());
}

#[test]
fn what_another_has_cleared_of_a_range_is_forgotten_with_it() {
    // None of it but a part, and all of it but a part.
    for gone in [1, 3, 4] {
        for way in 0..4 {
            let bench = Bench::new(Policy::Strict);
            let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(64, PAGE, 2)).unwrap();
            let mut descriptor = None;
            let whole = match way {
                0 | 1 => map(&bench, 4),
                _ => {
                    let memory = bench.memory.alloc(4).unwrap();
                    let list = [PhysSegment { phys: memory, len: 4 * PAGE }];
                    if way == 2 {
                        // SAFETY: the memory is simulated, and stays.
                        let mapping = unsafe { ring.map(&list, BOTH) }.unwrap();
                        descriptor.insert(mapping).range(PageSize::SIZE_4K).unwrap()
                    } else {
                        let reserved = bench.domain.reserve(4 * PAGE, Iova::new(u64::MAX)).unwrap();
                        // SAFETY: the memory is simulated, and stays.
                        let linked = unsafe { reserved.link(&list, BOTH.permissions(), &mut Gather::new()) };
                        linked.map_err(Refused::end).unwrap().into_range()
                    }
                }
            };
            let first = whole.start();
            assert!((0..4).all(|number| bench.writes(page(first, number))), "and it is cached");
            cleared_by_another(&bench, range(first.get() + (4 - gone) * PAGE, gone * PAGE));
            let left = (4 - gone) * PAGE;
            match way {
                0 => {
                    let expected = UnmapError::NotMapped { range: whole, unmapped: left };
                    assert_eq!(bench.device.unmap_single(first, 4 * PAGE), Err(expected));
                }
                1 => {
                    let mut batch = RawBatch::new(&bench.device, 4).unwrap();
                    let result = bench.device.unmap_single_in(&mut batch, first, 4 * PAGE);
                    assert!(matches!(result, Err(BatchError::Unmap(UnmapError::NotMapped { .. }))));
                    batch.commit().unwrap();
                }
                2 => {
                    assert_eq!(ring.unmap(descriptor.take().unwrap()).unwrap(), Ended::Pending);
                    ring.commit().unwrap();
                }
                _ => {
                    let mut gather = Gather::new();
                    let unlinked = Linked::from_range(&bench.domain, whole).unlink(&mut gather);
                    let unlinked = unlinked.map_err(|still| still.kept()).unwrap();
                    assert!(unlinked.is_lost());
                    bench.domain.confirm(&gather).unwrap();
                    unlinked.free();
                }
            }
            for number in 0..4 {
                assert!(
                    !bench.writes(page(first, number)),
                    "page {number} of which {gone} were cleared, way {way}"
                );
            }
        }
    }
}

/// A part of a large page: what the device has cached of the page as a whole is gone after it.
fn a_part_is_forgotten<X: Format>(format: X, walker: TableFormat) {
    const LARGE: u64 = 2 << 20;
    let memory = Memory::new(64 << 20);
    let table = PageTable::for_cpus(Arc::clone(&memory), format, PLATFORM.cpus()).unwrap();
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    iommu.attach(DEVICE, Context::Translated { domain: DomainId(1), root: table.root(), format: walker });
    let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
    let (buffer, at) = (memory.alloc(512).unwrap(), range(64 * LARGE, LARGE));
    assert!(buffer.get().is_multiple_of(LARGE));
    let mut gather = Gather::new();
    // SAFETY: the memory is simulated, and stays.
    unsafe { mapper.map(&*PLATFORM, at, [(buffer, LARGE)], BOTH.permissions().into(), &mut gather) }.unwrap();
    let writes = |number| iommu.dma_write(DEVICE, page(at.start(), number), &[1]).is_ok();
    for number in [7, 9, 300] {
        assert!(writes(number), "cached, with as large a page as there is");
        let part = range(at.start().get() + number * PAGE, PAGE);
        assert_eq!(mapper.unmap(&*PLATFORM, part, &mut gather).bytes, PAGE);
        mapper.sync(&gather).unwrap();
        gather.clear();
        assert!(!writes(number), "{format:?}: page {number}");
        let next = iommu.probe(DEVICE, page(at.start(), number + 1), BOTH.permissions());
        assert_eq!(next, Some(PhysAddr::new(buffer.get() + (number + 1) * PAGE)));
    }
}

#[test]
fn a_part_of_a_large_page_is_forgotten_and_the_rest_is_not_lost() {
    a_part_is_forgotten(vtd(4), TableFormat::VtdSecondStage { levels: 4 });
    a_part_is_forgotten(AmdV1::new(4, 1, 48).unwrap(), TableFormat::AmdV1 { levels: 4 });
    // Broken before it is made smaller, by an invalidation of its own.
    let arm = Arm::<12>::stage_2(48, 48).unwrap();
    a_part_is_forgotten(arm, TableFormat::Arm(ArmTables::stage2(Granule::Size4K, 48, 4)));
}

/// Pages of a map that failed were there for a moment, and a device may have met them.
#[test]
fn what_a_failed_map_had_entered_is_forgotten() {
    let bench = Bench::new(Policy::Strict);
    let (mapper, at) = (bench.domain.mapper(), range(64 * PAGE, 4 * PAGE));
    let memory = bench.memory.alloc(4).unwrap();
    let map = |at: IovaRange, gather: &mut Gather| {
        let list = (0..at.len() / PAGE).map(|number| (PhysAddr::new(memory.get() + number * PAGE), PAGE));
        // SAFETY: the memory is simulated, and stays.
        unsafe { mapper.map(&*PLATFORM, at, list, BOTH.permissions().into(), gather) }
    };
    map(at, &mut Gather::new()).unwrap();
    assert!(
        (0..4).all(|number| bench.writes(page(at.start(), number))),
        "cached, as if it had met them just then"
    );
    cleared_by_another(&bench, range(64 * PAGE, 3 * PAGE));
    let mut gather = Gather::new();
    assert!(map(at, &mut gather).is_err(), "the last page is in use");
    mapper.sync(&gather).unwrap();
    assert!((0..3).all(|number| !bench.writes(page(at.start(), number))));
    assert!(bench.writes(page(at.start(), 3)));
}

/// Who makes the domain need not say how many CPUs there are: the domain knows its platform.
#[test]
fn a_domain_s_table_is_for_the_cpus_of_its_platform() {
    let cpus_of = |table: PageTable<Arc<Memory>, VtdSecondStage>, cpus: usize| {
        let (platform, iommu) =
            (StdPlatform::with_cpus(cpus), Iommu::new(IommuConfig::new(Memory::new(1 << 20))));
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(platform.clone(), mapper, Policy::Strict).unwrap();
        domain.mapper().table().marks_for(&platform).unwrap().cpus()
    };
    let memory = || Memory::new(1 << 20);
    let format = VtdSecondStage::four_level();
    assert_eq!(cpus_of(PageTable::new(memory(), format).unwrap(), 3), 3);
    assert_eq!(cpus_of(PageTable::new(memory(), format).unwrap(), 0), 0);
    // A table that was made for some keeps to that.
    assert_eq!(cpus_of(PageTable::for_cpus(memory(), format, 2).unwrap(), 3), 2);
}
