//! A mapper's calls to a kernel, and a domain's to the mapper.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, Direction, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{CoherentMemory, DmaDomain, DmaMask, DomainBuilder, QueueConfig};
use portcullis::domain::{Domain, MapListError, Policy, Refused, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis::prelude::PoolConfig;
use portcullis::std_platform::StdPlatform;

use super::fake::{Fake, PAGE, Way};
use crate::heap::{Heap, HeapBuffer};
use crate::vfio::KernelMapper;
use crate::vfio::Machine;

const BOTH: Permissions = Permissions::READ_WRITE;
const ANYWHERE: Iova = Iova::new(u64::MAX);
const WAYS: [Way; 2] = [Way::Iommufd, Way::Type1];

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

/// Three pieces, of 2, 1 and 4 pages; the second lies behind the first in memory.
const LIST: [(PhysAddr, u64); 3] = [
    (PhysAddr::new(0x10_0000), 2 * PAGE),
    (PhysAddr::new(0x10_2000), PAGE),
    (PhysAddr::new(0x40_0000), 4 * PAGE),
];

fn map(mapper: &KernelMapper, range: IovaRange, list: &[(PhysAddr, u64)]) -> Result<(), MapError> {
    let mut gather = Gather::new();
    // SAFETY: no device reaches anything through a fake kernel.
    unsafe { mapper.map(&StdPlatform::new(), range, list.iter().copied(), BOTH.into(), &mut gather) }
}

fn unmap(mapper: &KernelMapper, range: IovaRange) -> (u64, u64) {
    let unmapped = mapper.unmap(&StdPlatform::new(), range, &mut Gather::new());
    (unmapped.bytes, unmapped.kept)
}

fn domain(fake: &Arc<Fake>) -> Shared<Domain<KernelMapper, StdPlatform>> {
    Domain::new(StdPlatform::new(), fake.mapper(), Policy::Strict).unwrap()
}

fn open(domain: &Domain<KernelMapper, StdPlatform>, list: &[PhysSegment]) -> Result<IovaRange, MapListError> {
    // SAFETY: as above.
    unsafe { domain.map(list, BOTH, ANYWHERE) }
}

#[test]
fn a_list_is_mapped_by_one_call_for_each_piece_and_unmapped_by_one() {
    for way in WAYS {
        let fake = Fake::new(way);
        let mapper = fake.mapper();
        map(&mapper, range(16, 7), &LIST).unwrap();
        assert_eq!(
            (fake.calls.load(Ordering::Relaxed), mapper.usage().mappings, mapper.usage().bytes),
            (2, 2, 7 * PAGE)
        );
        for (page, phys) in [(16, 0x10_0000), (18, 0x10_2000), (19, 0x40_0000), (22, 0x40_3000)] {
            assert_eq!(fake.reaches(page * PAGE), Some((phys, BOTH)), "{page}");
        }
        assert_eq!(unmap(&mapper, range(0, 64)), (7 * PAGE, 0));
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count(), mapper.usage().bytes), (3, 0, 0));
        assert_eq!(unmap(&mapper, range(0, 64)), (0, 0));
        assert_eq!(fake.calls.load(Ordering::Relaxed), 3, "there is nothing to ask for");
    }
}

#[test]
fn permissions_are_what_was_asked_for() {
    let fake = Fake::new(Way::Iommufd);
    let mapper = fake.mapper();
    for (page, permissions) in [(1, Permissions::READ), (2, Permissions::WRITE), (3, BOTH)] {
        let list = [(PhysAddr::new(0x10_0000), PAGE)];
        // SAFETY: as above.
        unsafe {
            mapper.map(&StdPlatform::new(), range(page, 1), list, permissions.into(), &mut Gather::new())
        }
        .unwrap();
        assert_eq!(fake.reaches(page * PAGE), Some((0x10_0000, permissions)));
    }
}

#[test]
fn a_call_that_fails_anywhere_leaves_nothing_of_a_list() {
    for way in WAYS {
        for (at, code) in (0..2)
            .flat_map(|at| [(at, libc::ENOMEM), (at, libc::EINVAL), (at, libc::EEXIST), (at, libc::ENOSPC)])
        {
            let fake = Fake::new(way);
            let mapper = fake.mapper();
            *fake.fails.lock().unwrap() = Some((at, code));
            let mut gather = Gather::new();
            // SAFETY: as above.
            let failed =
                unsafe { mapper.map(&StdPlatform::new(), range(16, 7), LIST, BOTH.into(), &mut gather) };
            let error = failed.unwrap_err();
            match code {
                libc::EEXIST => assert!(matches!(error, MapError::AlreadyMapped { .. }), "{error}"),
                libc::ENOSPC => assert!(matches!(error, MapError::Limit { .. }), "{error}"),
                libc::EINVAL => assert_eq!(error, MapError::Refused { code }),
                // This machine's limit decides which.
                _ => assert!(matches!(error, MapError::Limit { .. } | MapError::OutOfMemory), "{error}"),
            }
            assert_eq!((fake.count(), mapper.usage().mappings), (0, 0));
            assert_eq!(gather.is_empty(), at == 0, "what a device may have used is gathered");
            mapper.sync(&gather).unwrap();
            map(&mapper, range(16, 7), &LIST).unwrap();
        }
    }
}

#[test]
fn nothing_is_confirmed_while_a_failed_map_has_left_something() {
    let fake = Fake::new(Way::Type1);
    let mapper = fake.mapper();
    *fake.fails.lock().unwrap() = Some((1, libc::ENOMEM));
    fake.stuck.store(0, Ordering::Relaxed);
    assert!(map(&mapper, range(16, 7), &LIST).is_err());
    assert_eq!(fake.count(), 1);
    let refused = Err(InvalidationError::Rejected { code: libc::EBUSY as u32 });
    assert_eq!([mapper.sync(&Gather::everything()), mapper.sync(&Gather::new())], [refused; 2]);
    assert_eq!(
        map(&mapper, range(16, 1), &LIST[..1]),
        Err(MapError::Length { range: range(16, 1), list: 2 * PAGE })
    );
    assert!(matches!(map(&mapper, range(16, 2), &LIST[..1]), Err(MapError::AlreadyMapped { .. })));
    fake.stuck.store(usize::MAX, Ordering::Relaxed);
    mapper.sync(&Gather::new()).unwrap();
    assert_eq!((fake.count(), mapper.usage().mappings), (0, 0));
}

#[test]
fn a_domain_holds_memory_and_addresses_that_the_kernel_does_not_let_go() {
    let fake = Fake::new(Way::Iommufd);
    let domain = domain(&fake);
    let list = LIST.map(|(phys, len)| PhysSegment { phys, len });
    *fake.fails.lock().unwrap() = Some((1, libc::ENOMEM));
    fake.stuck.store(0, Ordering::Relaxed);
    assert!(matches!(open(&domain, &list), Err(MapListError::Unconfirmed { .. })));
    let stats = domain.stats();
    assert!(stats.taken_iova_bytes > stats.cached_iova_bytes);
    fake.stuck.store(usize::MAX, Ordering::Relaxed);
    domain.flush().unwrap();
    assert_eq!(fake.count(), 0);
    // And for a mapping in force.
    let range = open(&domain, &list).unwrap();
    fake.stuck.store(0, Ordering::Relaxed);
    assert_eq!(domain.unmap(range), Err(UnmapError::StillMapped { range, unmapped: 0, kept: 7 * PAGE }));
    assert_eq!(fake.count(), 2);
    fake.stuck.store(usize::MAX, Ordering::Relaxed);
    domain.unmap(range).unwrap();
    assert_eq!((fake.count(), domain.stats().lost_iova_bytes), (0, 0));
}

#[test]
fn parts_are_kept_until_the_last() {
    for way in WAYS {
        let fake = Fake::new(way);
        let domain = domain(&fake);
        for _ in 0..100 {
            let list = [PhysSegment { phys: PhysAddr::new(0x10_0000), len: 4 * PAGE }];
            let whole = open(&domain, &list).unwrap();
            let part = |page, pages| {
                IovaRange::new(whole.start().checked_add(page * PAGE).unwrap(), pages * PAGE).unwrap()
            };
            for kept in [part(1, 1), part(3, 1), part(0, 1)] {
                assert_eq!(
                    domain.unmap(kept),
                    Err(UnmapError::StillMapped { range: kept, unmapped: 0, kept: PAGE })
                );
                assert_eq!(fake.count(), 1);
            }
            domain.unmap(part(2, 1)).unwrap();
            assert_eq!(fake.count(), 0);
        }
        assert!(open(&domain, &[PhysSegment { phys: PhysAddr::new(0), len: 1 << 50 }]).is_err());
        let stats = domain.stats();
        assert_eq!((stats.taken_iova_bytes - stats.cached_iova_bytes, stats.lost_iova_bytes), (0, 0));
    }
}

#[test]
fn what_another_has_unmapped_behind_its_back_is_told() {
    let fake = Fake::new(Way::Type1);
    let mapper = fake.mapper();
    map(&mapper, range(16, 7), &LIST).unwrap();
    fake.mappings.lock().unwrap().remove(&(16 * PAGE));
    assert_eq!(unmap(&mapper, range(16, 7)), (4 * PAGE, 0), "as the kernel says");
    // And its mapping there is not taken for this process's.
    map(&mapper, range(16, 1), &LIST[1..2]).unwrap();
    let other = fake.mapper();
    assert_eq!(
        map(&other, range(16, 1), &LIST[1..2]),
        Err(MapError::AlreadyMapped { at: range(16, 1).start() })
    );
    assert_eq!(unmap(&mapper, range(16, 1)), (PAGE, 0));
}

#[test]
fn a_limit_of_mappings_is_met_before_the_kernel_is_asked() {
    let mut fake = Fake::new(Way::Type1);
    Arc::get_mut(&mut fake).unwrap().most = 3;
    let mapper = fake.mapper();
    map(&mapper, range(16, 7), &LIST).unwrap();
    let calls = fake.calls.load(Ordering::Relaxed);
    let error = map(&mapper, range(32, 7), &LIST).unwrap_err();
    assert!(matches!(error, MapError::Limit { used: 2, wanted: 2, most: 3, .. }), "{error}");
    assert!(error.to_string().contains("dma_entry_limit"), "{error}");
    assert_eq!(fake.calls.load(Ordering::Relaxed), calls);
    // In one piece there is room for it.
    map(&mapper, range(32, 4), &LIST[2..]).unwrap();
    assert_eq!(mapper.usage().mappings, 3);
}

/// 1 GiB in buffers of a page, every third after its neighbours, for a kernel that takes 64 mappings.
#[test]
fn buffers_noted_one_by_one_are_one_mapping_of_the_kernels_for_each_run_of_neighbours() {
    const BUFFERS: u64 = 262_144;
    for way in WAYS {
        let mut fake = Fake::new(way);
        Arc::get_mut(&mut fake).unwrap().most = 64;
        let domain = domain(&fake);
        let reserved = domain.reserve(BUFFERS * PAGE, ANYWHERE).unwrap();
        let (start, mut pieces) = (reserved.range().start().get(), reserved.pieces());
        // In memory 64 runs of 16 MiB, a page apart.
        let address = |number: u64| PhysAddr::new(0x10_0000_0000 + (number + number / 4096) * PAGE);
        for first in 0..3 {
            for number in (first..BUFFERS).step_by(3) {
                let iova =
                    pieces.add(number * PAGE, PhysSegment { phys: address(number), len: PAGE }).unwrap();
                assert_eq!(iova.get(), start + number * PAGE);
            }
        }
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count()), (0, 0), "nothing is mapped yet");
        let list = pieces.list().unwrap();
        // SAFETY: as above.
        let linked = unsafe { reserved.link(&list, BOTH, &mut Gather::new()) }.map_err(Refused::end).unwrap();
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count()), (64, 64));
        for number in (0..BUFFERS).step_by(997).chain([4095, 4096, BUFFERS - 1]) {
            assert_eq!(fake.reaches(start + number * PAGE), Some((address(number).get(), BOTH)));
        }
        // Parts end by themselves, but the kernel's mappings go with the last.
        let range = linked.into_range();
        let part = |number: u64| {
            IovaRange::new(range.start().checked_add(number * 256 * PAGE).unwrap(), 256 * PAGE).unwrap()
        };
        for number in 0..1023 {
            let kept = Err(UnmapError::StillMapped { range: part(number), unmapped: 0, kept: 256 * PAGE });
            assert_eq!(domain.unmap(part(number)), kept);
        }
        assert_eq!(fake.count(), 64);
        domain.unmap(part(1023)).unwrap();
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count()), (65, 0), "one call for all of it");
        assert_eq!(domain.stats().lost_iova_bytes, 0);
    }
}

/// A piece too many for the kernel is refused without a call, and mapped when there is room.
#[test]
fn pieces_beyond_the_limit_of_mappings_are_refused_and_stay_noted() {
    let mut fake = Fake::new(Way::Type1);
    Arc::get_mut(&mut fake).unwrap().most = 2;
    let domain = domain(&fake);
    let other = open(&domain, &[PhysSegment { phys: PhysAddr::new(0x90_0000), len: PAGE }]).unwrap();
    let reserved = domain.reserve(2 * PAGE, ANYWHERE).unwrap();
    let mut pieces = reserved.pieces();
    for (offset, phys) in [(PAGE, 0x10_0000), (0, 0x20_0000)] {
        pieces.add(offset, PhysSegment { phys: PhysAddr::new(phys), len: PAGE }).unwrap();
    }
    let calls = fake.calls.load(Ordering::Relaxed);
    let list = pieces.list().unwrap();
    // SAFETY: as above.
    let refused = unsafe { reserved.link(&list, BOTH, &mut Gather::new()) }.unwrap_err();
    assert!(matches!(refused.error, MapListError::Map(MapError::Limit { used: 1, wanted: 2, most: 2, .. })));
    assert_eq!(fake.calls.load(Ordering::Relaxed), calls);
    let _ = refused.end();
    domain.unmap(other).unwrap();
    let reserved = domain.reserve(2 * PAGE, ANYWHERE).unwrap();
    // SAFETY: as above.
    let linked = unsafe { reserved.link(&pieces.list().unwrap(), BOTH, &mut Gather::new()) };
    domain.unmap(linked.map_err(Refused::end).map(|linked| linked.into_range()).unwrap()).unwrap();
    assert_eq!((fake.count(), domain.stats().lost_iova_bytes), (0, 0));
}

#[test]
fn what_cannot_be_mapped_is_refused_by_name() {
    let fake = Fake::new(Way::Iommufd);
    let mapper = fake.mapper();
    let one = |phys, len| map(&mapper, range(16, 2), &[(PhysAddr::new(phys), len)]);
    assert!(matches!(one(0x10_0001, 2 * PAGE), Err(MapError::Misaligned { granule: PAGE, .. })));
    assert!(matches!(one(0x10_0000, 0), Err(MapError::Misaligned { .. })));
    assert!(matches!(one(0x10_0000, PAGE), Err(MapError::Length { .. })));
    assert!(matches!(one(0x10_0000, 3 * PAGE), Err(MapError::Length { .. })));
    assert!(matches!(one(u64::MAX - PAGE + 1, PAGE), Err(MapError::Length { .. })));
    let beyond = IovaRange::new(Iova::new(1 << 39), PAGE).unwrap();
    assert!(matches!(map(&mapper, beyond, &LIST[1..2]), Err(MapError::BeyondAperture { .. })));
    let interrupts = IovaRange::new(Iova::new(0xfee0_0000), PAGE).unwrap();
    assert_eq!(map(&mapper, interrupts, &LIST[1..2]), Err(MapError::Refused { code: libc::EADDRINUSE }));
    assert_eq!((fake.count(), mapper.usage().mappings), (0, 0));
}

#[test]
fn a_domain_hands_out_no_address_that_the_kernel_refuses() {
    let fake = Fake::new(Way::Type1);
    let domain = domain(&fake);
    let list = [PhysSegment { phys: PhysAddr::new(0x1000_0000), len: 16 << 20 }];
    // All 32-bit addresses except a MiB that the kernel reserves.
    let mut mapped = 0;
    // SAFETY: as above.
    while let Ok(range) = unsafe { domain.map(&list, BOTH, Iova::new(u32::MAX.into())) } {
        assert!(range.last() < Iova::new(0xfee0_0000) || range.start() >= Iova::new(0xfef0_0000));
        mapped += 1;
    }
    // One fewer for address 0, and one for the interrupts.
    assert_eq!(mapped, 256 - 1 - 1);
}

#[test]
fn queues_and_pools_stand_on_it() {
    let fake = Fake::new(Way::Iommufd);
    let domain = DmaDomain::<Machine>::over(domain(&fake), Some(Heap)).unwrap();
    let device = domain.attach(portcullis::addr::DeviceId(8), DmaMask::BITS_64).unwrap();
    for config in [
        QueueConfig::direct(),
        QueueConfig::batched(4),
        QueueConfig::ring(16, PAGE).batch(4),
        QueueConfig::bounce(),
    ] {
        let mut queue = device.queue(config).unwrap();
        for round in 0..20 {
            let buffer = HeapBuffer::new(3000).unwrap();
            buffer.write(0, b"what the device gets").unwrap();
            let mapping = queue.map(buffer, Direction::ToDevice).unwrap();
            let (address, permissions) = fake.reaches(mapping.iova().get()).unwrap();
            assert!(permissions.allows(Permissions::READ));
            // SAFETY: the heap's memory, as long as it is mapped.
            let seen = unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address as usize), 20)
            };
            assert_eq!(seen, b"what the device gets", "{config:?}, {round}");
            queue.unmap(mapping).unwrap().for_each(drop);
        }
        drop(queue.commit());
    }
    drop((device, domain));
}

/// Slots of all sizes, rings and coherent memory: on reserved huge pages (ht), or advised ones (hg).
#[test]
#[cfg(not(any(miri, watched)))]
fn slots_and_rings_lie_on_huge_pages() {
    use crate::heap::large::tests::smaps;
    let fake = Fake::new(Way::Iommufd);
    let domain = DomainBuilder::new(fake.mapper()).bounce(Heap, PoolConfig::default());
    let domain = domain.build(StdPlatform::new()).unwrap();
    let device = domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap();
    let mut queue = device.queue(QueueConfig::bounce()).unwrap();
    let mut held = Vec::new();
    let is_huge = |iova: Iova| {
        let (at, _) = fake.reaches(iova.get()).unwrap();
        smaps(at as usize, "VmFlags").is_some_and(|flags| flags.contains("ht") || flags.contains("hg"))
    };
    for len in [4096, 16 << 10, 64 << 10, 128 << 10] {
        for _ in 0..4 {
            let mapping = queue.map(HeapBuffer::new(len).unwrap(), Direction::FromDevice).unwrap();
            assert!(is_huge(mapping.iova()), "{len}");
            held.push(mapping);
        }
    }
    let ring = CoherentMemory::new(device.dma(), Heap, 4096).unwrap();
    assert!(is_huge(ring.iova()));
    held.into_iter().for_each(|mapping| queue.unmap(mapping).unwrap().for_each(drop));
}
