//! Accesses through tables that are built by hand.

use crate::common::{BOTH, DEVICE, DOMAIN, Mapper, PAGE, READ, WRITE, iova, phys, rig, rig_with, vtd};
use portcullis::addr::{DomainId, Permissions};
use portcullis::sync::Ordering;
use portcullis_model::{Context, DeviceId, Fault, FaultReason, Iommu, IommuConfig, Memory};

fn reason(iommu: &Iommu, at: u64, access: Permissions) -> Option<FaultReason> {
    iommu.access(DEVICE, iova(at), 1, access).err().map(|fault| fault.reason)
}

#[test]
fn every_leaf_size_at_every_depth() {
    for levels in 3..=5 {
        let memory = Memory::new(1 << 20);
        let iommu = Iommu::new(IommuConfig::new(memory.clone()));
        let mapper = Mapper::new(&memory, levels);
        iommu.attach(DEVICE, mapper.context(DOMAIN));
        // The last gibibytes of the levels, so that every level's index matters.
        let top = 1_u64 << (12 + 9 * levels);
        for (level, at) in [(1, top - (3 << 30)), (2, top - (2 << 30)), (3, top - (1 << 30))] {
            let size = vtd::page_size(level).bytes();
            let target = 0xa_0000_0000 & !(size - 1);
            mapper.map_at(at, target, BOTH, level);
            let reads = iommu.stats().table_reads;
            let offset = size - 5;
            assert_eq!(iommu.probe(DEVICE, iova(at + offset), READ), Some(phys(target + offset)));
            assert_eq!(iommu.stats().table_reads, reads, "a probe counts nothing");
            let mut seen = Vec::new();
            iommu
                .translate_each(DEVICE, iova(at + offset), 5, WRITE, |at, to, len| seen.push((at, to, len)))
                .unwrap();
            assert_eq!(seen, [(iova(at + offset), phys(target + offset), 5)]);
            // The three pages lie in the same table of level 4 and share the path to it.
            let first = if level == 1 { levels } else { levels.min(3) };
            assert_eq!(iommu.stats().table_reads - reads, u64::from(first - level + 1));
        }
        let misses = iommu.stats().iotlb_misses;
        iommu.access(DEVICE, iova(top - (2 << 30)), 2 << 20, READ).unwrap();
        assert_eq!(iommu.stats().iotlb_misses, misses, "one entry serves all of a large page");
        assert_eq!(reason(&iommu, top, READ), Some(FaultReason::BeyondWidth));
        assert_eq!(reason(&iommu, u64::MAX, READ), Some(FaultReason::BeyondWidth));
    }
}

#[test]
fn permissions_are_those_that_every_level_gives() {
    let (iommu, mapper) = rig();
    mapper.map_at(0x1000, 0x9000, BOTH, 1);
    let upper = mapper.entry(0x1000, 3);
    upper.store(upper.load(Ordering::Relaxed) & !vtd::WRITE, Ordering::Relaxed);
    assert_eq!(reason(&iommu, 0x1000, WRITE), Some(FaultReason::Permission));
    assert_eq!(iommu.stats().iotlb_misses, 1);
    assert_eq!(reason(&iommu, 0x1000, READ), None);
    assert_eq!(iommu.stats().iotlb_misses, 2, "a refused walk is not cached");
    assert_eq!(reason(&iommu, 0x1000, WRITE), Some(FaultReason::Permission), "from the IOTLB now");
    assert_eq!(iommu.stats().iotlb_misses, 2);
    assert_eq!(iommu.probe(DEVICE, iova(0x1000), WRITE), None);
    assert_eq!(reason(&iommu, 0x2000, READ), Some(FaultReason::NotPresent { level: 1 }));

    // Read above and write below leave nothing, and the paging-structure cache has the rights from above.
    mapper.map_at(0x3000, 0x9000, WRITE, 1);
    assert_eq!(reason(&iommu, 0x3000, WRITE), Some(FaultReason::Permission));
    assert_eq!(reason(&iommu, 0x3000, READ), Some(FaultReason::Permission));
}

#[test]
fn malformed_tables_fault() {
    let (iommu, mapper) = rig();
    mapper.map(0, 0x9000);
    let set = |level, entry| mapper.entry(0x80_0000_0000, level).store(entry, Ordering::Relaxed);
    set(4, vtd::leaf_entry(phys(0), BOTH, 4));
    assert_eq!(reason(&iommu, 0x80_0000_0000, READ), Some(FaultReason::ReservedBit));
    set(4, 0);
    assert_eq!(reason(&iommu, 0x80_0000_0000, READ), Some(FaultReason::NotPresent { level: 4 }));
    set(2, vtd::leaf_entry(phys(0x1000), BOTH, 2));
    assert_eq!(reason(&iommu, 0x80_0000_0000, READ), Some(FaultReason::ReservedBit), "2 MiB at 4 KiB");
    set(2, vtd::table_entry(phys(0x5000)));
    assert_eq!(reason(&iommu, 0x80_0000_0000, READ), Some(FaultReason::BadTable(phys(0x5000))));

    for levels in [0, 1, 2, 6, u32::MAX] {
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(9), root: mapper.root, levels });
        assert_eq!(reason(&iommu, 0, READ), Some(FaultReason::BadContext));
    }
    let root = phys(u64::MAX - 4095);
    iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(9), root, levels: 3 });
    assert_eq!(reason(&iommu, 0x7f_ffff_ffff, READ), Some(FaultReason::BadTable(root)));
}

#[test]
fn contexts_take_effect_at_once() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    assert_eq!(reason(&iommu, 0x1000, READ), None);
    iommu.attach(DEVICE, Context::Blocked);
    assert_eq!(reason(&iommu, 0x1000, READ), Some(FaultReason::Blocked));
    iommu.attach(DEVICE, Context::Passthrough);
    assert_eq!(iommu.probe(DEVICE, iova(0x1234), BOTH), Some(phys(0x1234)));
    assert_eq!(reason(&iommu, 1 << 52, READ), Some(FaultReason::BeyondWidth));
    iommu.detach(DEVICE);
    assert_eq!(reason(&iommu, 0x1000, READ), Some(FaultReason::NoContext));
    let stranger = DeviceId(8);
    assert_eq!(iommu.access(stranger, iova(0), 1, READ).unwrap_err().reason, FaultReason::NoContext);
    assert_eq!(iommu.probe(stranger, iova(0), READ), None);
}

#[test]
fn data_moves_page_by_page() {
    let (iommu, mapper) = rig();
    let memory = iommu.memory();
    // Two contiguous device pages, apart and in reverse order in memory.
    let (low, high) = (memory.buffer(PAGE).unwrap(), memory.buffer(PAGE).unwrap());
    mapper.map(0x1_0000, high.phys().get());
    mapper.map(0x1_1000, low.phys().get());
    iommu.dma_write(DEVICE, iova(0x1_0ffd), b"abcdef").unwrap();
    let mut bytes = [0; 3];
    high.read(PAGE - 3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"abc");
    low.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"def");
    let mut read = [0; 6];
    iommu.dma_read(DEVICE, iova(0x1_0ffd), &mut read).unwrap();
    assert_eq!(&read, b"abcdef");
    assert_eq!(iommu.stats().accesses, 4);

    // Up to the page that is missing, and no byte of it.
    let fault = iommu.dma_write(DEVICE, iova(0x1_1ffe), &[1, 2, 3]).unwrap_err();
    let expected = Fault {
        device: DEVICE,
        iova: iova(0x1_2000),
        access: WRITE,
        reason: FaultReason::NotPresent { level: 1 },
    };
    assert_eq!(fault, expected);
    low.read(PAGE - 3, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 1, 2]);
    assert_eq!(iommu.take_faults(), [expected]);
    assert_eq!(iommu.take_faults(), []);

    mapper.map(0x2_0000, 0x9000);
    let fault = iommu.dma_read(DEVICE, iova(0x2_0008), &mut read).unwrap_err();
    assert_eq!(fault.reason, FaultReason::NoMemory(phys(0x9008)));
    iommu.dma_read(DEVICE, iova(u64::MAX), &mut []).unwrap();
}

#[test]
fn a_checked_access_tells_wrong_places_from_faults() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0xf000);
    let outcome = iommu.access_checked(DEVICE, iova(0x1800), phys(0x9800), 3 * PAGE, READ);
    assert_eq!((outcome.wrong, outcome.faults), (1, 2));
    let outcome = iommu.access_checked(DEVICE, iova(0x1000), phys(0x9000), PAGE, READ);
    assert_eq!((outcome.wrong, outcome.faults), (0, 0));
    iommu.attach(DEVICE, Context::Passthrough);
    let outcome = iommu.access_checked(DEVICE, iova(u64::MAX), phys(u64::MAX), 2, READ);
    assert_eq!((outcome.wrong, outcome.faults), (0, 2));
}

#[test]
fn the_fault_log_is_bounded() {
    let (iommu, _) = rig_with(|config| config.fault_log_entries = 2);
    for at in 0..5 {
        assert!(iommu.access(DEVICE, iova(at), 1, READ).is_err());
    }
    assert_eq!(iommu.faults().iter().map(|fault| fault.iova.get()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!((iommu.fault_count(), iommu.faults_lost()), (5, 3));
}

#[test]
fn misses_are_counted_as_published_counters_do() {
    let (iommu, mapper) = rig();
    for page in 0..3 {
        mapper.map(page * PAGE, 0x9000);
    }
    mapper.map(1 << 21, 0x9000);
    iommu.access(DEVICE, iova(0), 3 * PAGE, READ).unwrap();
    let stats = iommu.stats();
    // The first walk reads four entries, the others the leaf's alone.
    assert_eq!((stats.accesses, stats.iotlb_misses, stats.walk_cache_misses), (3, 3, 1));
    assert_eq!((stats.table_reads, stats.misses_by_level), (6, [1, 1, 1, 0]));
    iommu.access(DEVICE, iova(1 << 21), 1, READ).unwrap();
    let stats = iommu.stats();
    assert_eq!((stats.walk_cache_misses, stats.table_reads, stats.misses_by_level), (2, 8, [2, 1, 1, 0]));
}
