//! The driver beside a device of its own, which does what QEMU's never does.

extern crate std;

mod fake;

use alloc::sync::Arc;
use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper;
use portcullis::pgtable::{MapError, Unmapped};
use portcullis::std_platform::StdPlatform;

use super::layout::{answer, config, fault, feature, status};
use super::{RequestMapper, Unit};
use crate::fault::Reason;
use crate::host::UnitError;
use fake::{ENDPOINT, Fake, KEPT, OTHER, STRUCTURES};

const PAGE: u64 = 4096;

fn start(fake: &Fake) -> Result<Unit<Fake>, UnitError> {
    Unit::start(fake.clone(), STRUCTURES, [DeviceId(ENDPOINT), DeviceId(OTHER), DeviceId(0x99)])
}

/// A device, its unit, and a domain that an endpoint is attached to.
struct Bench {
    fake: Fake,
    unit: Arc<Unit<Fake>>,
    mapper: RequestMapper<Fake>,
    platform: StdPlatform,
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

/// First and last address.
fn bounds(page: u64, pages: u64) -> (u64, u64) {
    (page * PAGE, (page + pages) * PAGE - 1)
}

impl Bench {
    fn detached() -> Self {
        let fake = Fake::new();
        let unit = Arc::new(start(&fake).unwrap());
        unit.enable().unwrap();
        let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
        let mapper = unit.mapper(DomainId(1), alloc::vec![kept]).unwrap();
        fake.device().requests.clear();
        Self { fake, unit, mapper, platform: StdPlatform::new() }
    }

    fn new() -> Self {
        let bench = Self::detached();
        bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
        let mut device = bench.fake.device();
        device.requests.clear();
        device.doorbells = 0;
        drop(device);
        bench
    }

    /// Maps pages of memory, each a number of its own, from `page` on.
    fn map_in(&self, page: u64, memory: &[u64], gather: &mut Gather) -> Result<(), MapError> {
        let list = memory.iter().map(|frame| (PhysAddr::new(frame * PAGE), PAGE));
        let range = range(page, memory.len() as u64);
        // SAFETY: there is no memory.
        unsafe { self.mapper.map(&self.platform, range, list, Permissions::READ_WRITE, gather) }
    }

    fn map(&self, page: u64, memory: &[u64]) {
        let mut gather = Gather::new();
        self.map_in(page, memory, &mut gather).unwrap();
        assert!(gather.is_empty());
    }

    fn unmap(&self, page: u64, pages: u64, gather: &mut Gather) -> Unmapped {
        self.mapper.unmap(&self.platform, range(page, pages), gather)
    }

    fn mapped(&self) -> Vec<(u64, u64)> {
        self.fake.device().mapped(1)
    }

    /// Requests since the last call.
    fn requests(&self) -> Vec<u8> {
        core::mem::take(&mut self.fake.device().requests)
    }
}

#[test]
fn a_device_that_lacks_something_is_an_error_and_its_memory_is_given_back() {
    let lacking: [(&str, fn(&mut fake::Device)); 12] = [
        ("all", |device| device.absent = true),
        ("version 1", |device| device.features &= !feature::VERSION_1),
        ("requests", |device| device.features &= !feature::MAP_UNMAP),
        ("agreement", |device| device.stuck_status = status::FEATURES_OK),
        ("pages", |device| device.configure(config::PAGE_SIZE_MASK, 8, 0)),
        ("addresses", |device| device.configure(config::INPUT_END, 8, 0xfff - 1)),
        ("addresses in order", |device| device.configure(config::INPUT_START, 8, 1 << 40)),
        ("addresses in pages", |device| device.configure(config::INPUT_START, 8, u64::MAX)),
        ("domains", |device| device.configure(config::DOMAIN_END, 4, 1)),
        ("domains in order", |device| device.configure(config::DOMAIN_START, 4, 0x1_0000)),
        ("a queue for requests", |device| device.queue_sizes[0] = 2),
        ("a queue for events", |device| device.queue_sizes[1] = 0),
    ];
    for (what, change) in lacking {
        let fake = Fake::new();
        change(&mut fake.device());
        let error = start(&fake).unwrap_err();
        let expected = matches!(error, UnitError::Lacks { .. } | UnitError::NotThere { .. });
        assert!(expected, "{what}: {error}");
        assert_eq!(fake.memory.in_use(), 0, "{what}");
    }
    let fake = Fake::new();
    fake.device().stuck_status = 0x80;
    assert!(matches!(start(&fake), Err(UnitError::TimedOut { .. })));
    // A doorbell beyond the structure.
    let structures = super::Structures { notify_bytes: 5, ..STRUCTURES };
    assert!(matches!(Unit::start(Fake::new(), structures, []), Err(UnitError::Lacks { .. })));
}

#[test]
fn memory_that_runs_out_is_an_error_and_none_is_lost() {
    for most in 0.. {
        let fake = Fake::new();
        fake.memory.most.store(most, core::sync::atomic::Ordering::Relaxed);
        match start(&fake) {
            Ok(unit) => {
                assert_eq!(most, 5);
                unit.shut_down().unwrap();
                assert_eq!(fake.memory.in_use(), 0);
                return;
            }
            Err(error) => assert_eq!(error, UnitError::OutOfMemory),
        }
        assert_eq!(fake.memory.in_use(), 0, "{most}");
    }
}

#[test]
fn odd_queue_sizes_and_small_ones_will_do() {
    for size in [4, 5, 7, 100, 255, 300, u16::MAX] {
        let fake = Fake::new();
        fake.device().queue_sizes = [size; 2];
        let unit = Arc::new(start(&fake).unwrap());
        let mapper = unit.mapper(DomainId(1), Vec::new()).unwrap();
        mapper.attach(DeviceId(ENDPOINT)).unwrap();
        let list: Vec<_> = (0..200).map(|page| (PhysAddr::new(page * 2 * PAGE), PAGE)).collect();
        let mut gather = Gather::new();
        // SAFETY: there is no memory.
        unsafe { mapper.map(&StdPlatform::new(), range(8, 200), list, Permissions::READ, &mut gather) }
            .unwrap();
        assert_eq!(fake.device().mapped(1).len(), 200, "{size}");
        let _ = mapper.unmap(&StdPlatform::new(), range(8, 200), &mut gather);
        mapper.sync(&gather).unwrap();
        assert_eq!(fake.device().mapped(1).len(), 0);
    }
}

#[test]
fn pieces_are_what_is_contiguous_and_go_with_one_doorbell() {
    let bench = Bench::new();
    bench.map(16, &[100, 101, 102, 200, 300, 301, 5]);
    assert_eq!(bench.mapped(), [bounds(16, 3), bounds(19, 1), bounds(20, 2), bounds(22, 1)]);
    assert_eq!((bench.requests(), bench.fake.device().doorbells), (alloc::vec![3; 4], 1));
    let mut gather = Gather::new();
    assert_eq!(bench.unmap(16, 7, &mut gather).bytes, 7 * PAGE);
    assert_eq!(bench.mapped().len(), 4, "an unmap sends nothing");
    bench.mapper.sync(&gather).unwrap();
    assert_eq!((bench.mapped(), bench.requests()), (Vec::new(), alloc::vec![4]));
    assert_eq!(bench.fake.device().doorbells, 2, "neighbours are one request");
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.requests(), [], "there is nothing more");
}

#[test]
fn a_flush_sends_together_what_unmaps_have_left_and_spares_what_is_mapped() {
    let bench = Bench::new();
    // A gather may cover what lies between its ranges.
    (0..100).for_each(|index| bench.map(16 + index * 2, &[index * 3]));
    bench.fake.device().doorbells = 0;
    let mut gather = Gather::new();
    (0..100).filter(|index| index % 2 == 0).for_each(|index| {
        assert_eq!(bench.unmap(16 + index * 2, 1, &mut gather).bytes, PAGE);
    });
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped().len(), 50);
    assert_eq!(bench.fake.device().doorbells, 1);
    (0..100).filter(|index| index % 2 == 1).for_each(|index| {
        let _ = bench.unmap(16 + index * 2, 1, &mut Gather::new());
    });
    bench.mapper.sync(&Gather::everything()).unwrap();
    assert_eq!((bench.mapped().len(), bench.fake.device().doorbells), (0, 2));
}

#[test]
fn what_is_stale_is_removed_before_its_addresses_are_mapped_again() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    let _ = bench.unmap(16, 1, &mut Gather::new());
    bench.map(16, &[2, 3]);
    assert_eq!((bench.mapped(), bench.requests()), (alloc::vec![bounds(16, 2)], alloc::vec![3, 4, 3]));
    // What is mapped is in use, also for a list that runs into it.
    let mut gather = Gather::new();
    let twice = bench.map_in(15, &[7, 9, 11], &mut gather);
    assert_eq!(twice, Err(MapError::AlreadyMapped { at: Iova::new(16 * PAGE) }));
    assert!(gather.is_empty());
}

#[test]
fn a_list_that_is_refused_half_way_leaves_nothing_mapped() {
    let refused: [(u8, fn(MapError) -> bool); 6] = [
        (answer::NOMEM, |error| error == MapError::OutOfMemory),
        (answer::RANGE, |error| matches!(error, MapError::BeyondAperture { .. })),
        (answer::INVAL, |error| matches!(error, MapError::AlreadyMapped { .. })),
        (answer::NOENT, |error| error == MapError::Unconfirmed),
        (3, |error| error == MapError::Unconfirmed),
        (0xff, |error| error == MapError::Unconfirmed),
    ];
    for (status, expected) in refused {
        // The last of a batch, one in the second, and another's mapping behind the list.
        for (pages, after) in [(4_u64, 3), (100, 80)] {
            let bench = Bench::new();
            bench.map(16 + pages, &[1]);
            bench.fake.device().refuses = Some((3, after, status));
            let memory: Vec<_> = (0..pages).map(|page| 100 + page * 2).collect();
            let mut gather = Gather::new();
            let error = bench.map_in(16, &memory, &mut gather).unwrap_err();
            assert!(expected(error), "{error}");
            assert!(!gather.is_empty());
            bench.mapper.sync(&gather).unwrap();
            assert_eq!(bench.mapped(), [bounds(16 + pages, 1)], "{status} {pages}");
            bench.fake.device().refuses = None;
            bench.map(16, &memory);
        }
    }
}

#[test]
fn a_second_batch_that_meets_another_mapping_takes_back_the_first_and_not_that() {
    let bench = Bench::new();
    bench.map(16 + 90, &[1]);
    let memory: Vec<_> = (0..100_u64).map(|page| 100 + page * 2).collect();
    let mut gather = Gather::new();
    let error = bench.map_in(16, &memory, &mut gather).unwrap_err();
    assert_eq!(error, MapError::AlreadyMapped { at: Iova::new((16 + 90) * PAGE) });
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), [bounds(16 + 90, 1)]);
}

#[test]
fn malformed_lists_change_nothing() {
    let bench = Bench::new();
    let try_map = |range: IovaRange, list: &[(u64, u64)]| {
        let list = list.iter().map(|(phys, len)| (PhysAddr::new(*phys), *len));
        let mut gather = Gather::new();
        // SAFETY: there is no memory.
        let mapped =
            unsafe { bench.mapper.map(&bench.platform, range, list, Permissions::READ, &mut gather) };
        assert!(gather.is_empty());
        mapped.unwrap_err()
    };
    assert!(matches!(try_map(range(1, 2), &[(0, PAGE)]), MapError::Length { .. }));
    assert!(matches!(try_map(range(1, 1), &[]), MapError::Length { .. }));
    assert!(matches!(try_map(range(1, 1), &[(0, PAGE), (PAGE, PAGE)]), MapError::Length { .. }));
    assert!(matches!(try_map(range(1, 1), &[(0x800, PAGE)]), MapError::Misaligned { .. }));
    assert!(matches!(try_map(range(1, 1), &[(0, 0x800), (0, 0x800)]), MapError::Misaligned { .. }));
    let last = u64::MAX - (PAGE - 1);
    assert!(matches!(try_map(range(1, 2), &[(last, 2 * PAGE)]), MapError::BeyondPhysical { .. }));
    assert!(matches!(try_map(range((1 << 27) - 1, 2), &[]), MapError::BeyondAperture { .. }));
    assert_eq!((bench.mapped(), bench.requests()), (Vec::new(), Vec::new()));
    // Memory that ends with the last address, and a list whose neighbours would wrap.
    let mut gather = Gather::new();
    let list = [(PhysAddr::new(last), PAGE), (PhysAddr::new(0), PAGE)];
    // SAFETY: there is no memory.
    unsafe { bench.mapper.map(&bench.platform, range(1, 2), list, Permissions::READ, &mut gather) }.unwrap();
    assert_eq!(bench.mapped(), [bounds(1, 1), bounds(2, 1)]);
}

#[test]
fn a_part_of_a_piece_is_kept_and_still_there() {
    let bench = Bench::new();
    bench.map(16, &[1, 2, 3, 4]);
    bench.map(20, &[9]);
    let mut gather = Gather::new();
    let unmapped = bench.unmap(18, 3, &mut gather);
    assert_eq!((unmapped.bytes, unmapped.kept), (PAGE, 2 * PAGE));
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 4)]);
    assert_eq!(bench.unmap(16, 5, &mut gather), Unmapped::of(range(16, 5), 4 * PAGE));
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn an_unmap_that_is_refused_stays_unconfirmed_until_it_is_not() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    bench.fake.device().refuses = Some((4, 0, 3));
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    for _ in 0..2 {
        assert_eq!(bench.mapper.sync(&gather), Err(InvalidationError::Rejected { code: 3 }));
        assert_eq!(bench.map_in(16, &[2], &mut Gather::new()), Err(MapError::Unconfirmed));
    }
    bench.fake.device().refuses = None;
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn a_device_that_does_not_answer_is_an_error_and_late_answers_make_it_good() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    bench.requests();
    bench.fake.device().holds = true;
    // A map that may still happen.
    let mut late = Gather::new();
    assert_eq!(bench.map_in(32, &[2, 4], &mut late), Err(MapError::Unconfirmed));
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    for gather in [&gather, &late, &Gather::everything()] {
        assert!(matches!(bench.mapper.sync(gather), Err(InvalidationError::TimedOut { .. })));
    }
    assert!(matches!(bench.unit.detach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
    assert!(matches!(bench.mapper.attach(DeviceId(OTHER)), Err(UnitError::TimedOut { .. })));
    // Nothing was sent that the late map could follow.
    assert_eq!(bench.requests(), []);
    bench.fake.catch_up();
    assert_eq!((bench.requests(), bench.mapped().len()), (alloc::vec![3, 3], 3));
    bench.fake.device().holds = false;
    bench.mapper.sync(&late).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn a_late_unmap_takes_nothing_that_was_mapped_after_it() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    bench.fake.device().holds = true;
    assert!(matches!(bench.mapper.sync(&gather), Err(InvalidationError::TimedOut { .. })));
    bench.fake.device().holds = false;
    // The doorbell of the next request would have the device carry out both, in whatever order.
    assert!(matches!(bench.mapper.sync(&gather), Err(InvalidationError::TimedOut { .. })));
    bench.fake.catch_up();
    bench.mapper.sync(&gather).unwrap();
    bench.map(16, &[2]);
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
}

#[test]
fn answers_that_make_no_sense_are_no_answers() {
    for nonsense in 0..5_u32 {
        let bench = Bench::new();
        bench.fake.device().holds = true;
        {
            let mut device = bench.fake.device();
            match nonsense {
                0 => device.claim(&bench.fake.memory, 0, 0x8000),
                1 => device.use_up(&bench.fake.memory, 0, 1, 0),
                2 => device.use_up(&bench.fake.memory, 0, u32::MAX, 0),
                3 => device.use_up(&bench.fake.memory, 0, 254, 0),
                // A slot that is free.
                _ => device.use_up(&bench.fake.memory, 0, 8, 0),
            }
        }
        assert_eq!(bench.map_in(16, &[1], &mut Gather::new()), Err(MapError::Unconfirmed));
        assert!(matches!(bench.mapper.sync(&Gather::everything()), Err(InvalidationError::TimedOut { .. })));
    }
}

#[test]
fn a_domain_is_entered_with_its_first_endpoint_and_recorded_again_after_its_last() {
    let bench = Bench::detached();
    let memory: Vec<_> = (0..200_u64).map(|page| page * 2).collect();
    bench.map(16, &memory);
    bench.map(8, &[7]);
    let mut gather = Gather::new();
    assert_eq!(bench.unmap(8, 1, &mut gather).bytes, PAGE);
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.requests(), [], "the device has no such domain");
    for endpoint in [ENDPOINT, OTHER] {
        bench.mapper.attach(DeviceId(endpoint)).unwrap();
        assert_eq!(bench.mapped().len(), 200);
        assert_eq!(bench.mapper.attach(DeviceId(endpoint)), Err(UnitError::Attached { device: endpoint }));
        if endpoint == OTHER {
            bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
            assert_eq!(bench.mapped().len(), 200, "one is left");
        }
    }
    // Stale, when the last one goes.
    let _ = bench.unmap(16, 1, &mut gather);
    bench.unit.detach(DeviceId(OTHER)).unwrap();
    bench.requests();
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.requests(), []);
    bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
    assert_eq!(bench.mapped().len(), 199);
    let missing = bench.unit.detach(DeviceId(OTHER));
    assert_eq!(missing, Err(UnitError::NotAttached { device: OTHER }));
}

#[test]
fn what_a_device_keeps_for_itself_its_domain_must_not_map() {
    let bench = Bench::detached();
    let regions = bench.unit.regions(DeviceId(OTHER)).unwrap();
    let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
    assert_eq!(regions, [super::Region { range: kept, is_msi: true }]);
    assert_eq!(bench.unit.regions(DeviceId(ENDPOINT)).unwrap(), []);
    let none = bench.unit.regions(DeviceId(0x99)).unwrap_err();
    assert_eq!(none, UnitError::NoSuchDevice { device: 0x99, last: u32::MAX });
    let careless = bench.unit.mapper(DomainId(2), Vec::new()).unwrap();
    assert_eq!(careless.attach(DeviceId(OTHER)), Err(UnitError::Reserved { device: OTHER, range: kept }));
    // Two halves keep it as well as one range.
    let half = kept.len() / 2;
    let halves = [kept.start(), kept.start().checked_add(half).unwrap()];
    let reserved = halves.map(|start| IovaRange::new(start, half).unwrap()).to_vec();
    let mapper = bench.unit.mapper(DomainId(3), reserved).unwrap();
    mapper.attach(DeviceId(OTHER)).unwrap();
}

#[test]
fn a_number_has_one_mapper_at_a_time() {
    let bench = Bench::new();
    let taken = |number| bench.unit.mapper(DomainId(number), Vec::new()).map(drop).unwrap_err();
    assert_eq!(taken(1), UnitError::DomainInUse { domain: 1 });
    let (first, last) = bench.unit.domains();
    assert_eq!((first, last), (DomainId(0), DomainId(u16::MAX - 2)));
    assert!(matches!(taken(last.0 + 1), UnitError::NoSuchDomain { .. }));
    let Bench { unit, mapper, .. } = bench;
    drop(mapper);
    // The endpoint is attached still.
    assert!(unit.mapper(DomainId(1), Vec::new()).is_err());
    unit.detach(DeviceId(ENDPOINT)).unwrap();
    unit.mapper(DomainId(1), Vec::new()).unwrap();
}

#[test]
fn endpoints_that_a_driver_left_attached_are_released() {
    let fake = Fake::new();
    {
        let mut device = fake.device();
        device.endpoints = [(ENDPOINT, (1, false)), (OTHER, (1, false))].into();
        device.domains.entry(1).or_default().insert(0, (0xfff, 0, 3));
    }
    let _unit = start(&fake).unwrap();
    assert!(fake.device().endpoints.is_empty());
    assert!(fake.device().domains.is_empty());
}

#[test]
fn an_attach_that_is_refused_leaves_nothing_attached() {
    let bench = Bench::detached();
    let missing = bench.mapper.attach(DeviceId(0x99)).unwrap_err();
    assert_eq!(missing, UnitError::NoSuchDevice { device: 0x99, last: u32::MAX });
    bench.fake.device().refuses = Some((1, 0, answer::INVAL));
    let refused = bench.mapper.attach(DeviceId(ENDPOINT)).unwrap_err();
    assert!(matches!(refused, UnitError::Refused { code: 4, .. }), "{refused}");
    // SAFETY: there is no memory.
    let refused = unsafe { bench.unit.pass_through(DeviceId(ENDPOINT)) }.unwrap_err();
    assert!(matches!(refused, UnitError::Refused { code: 4, .. }), "{refused}");
    bench.fake.device().refuses = None;
    bench.map(16, &[1]);
    assert_eq!(bench.mapped(), [], "recorded");
    // What is refused of it leaves the device attached.
    bench.fake.device().refuses = Some((3, 0, answer::NOMEM));
    let incomplete = bench.mapper.attach(DeviceId(ENDPOINT)).unwrap_err();
    assert_eq!(incomplete, UnitError::Incomplete { device: ENDPOINT, code: 8 });
    bench.fake.device().refuses = None;
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
}

#[test]
fn a_device_passes_through_and_does_not_without_the_feature() {
    let bench = Bench::detached();
    // SAFETY: there is no memory.
    unsafe { bench.unit.pass_through(DeviceId(ENDPOINT)) }.unwrap();
    assert!(bench.fake.device().endpoints.get(&ENDPOINT).is_some_and(|(_, bypass)| *bypass));
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    assert!(bench.fake.device().endpoints.is_empty());
    let fake = Fake::new();
    fake.device().features &= !feature::BYPASS_CONFIG;
    let unit = start(&fake).unwrap();
    unit.enable().unwrap();
    // SAFETY: there is no memory.
    let lacks = unsafe { unit.pass_through(DeviceId(ENDPOINT)) }.unwrap_err();
    assert!(matches!(lacks, UnitError::Lacks { .. }));
}

#[test]
fn shutting_down_detaches_everything_and_lets_devices_pass() {
    let Bench { fake, unit, mapper, .. } = Bench::new();
    drop(mapper);
    Arc::into_inner(unit).unwrap().shut_down().unwrap();
    let device = fake.device();
    assert!(device.endpoints.is_empty());
    assert_eq!(device.bytes[STRUCTURES.device + config::BYPASS], 1);
    drop(device);
    assert_eq!(fake.memory.in_use(), 0);
}

#[test]
fn faults_come_in_order_and_their_buffers_are_used_again() {
    let bench = Bench::new();
    assert_eq!(bench.unit.next_fault(), None);
    let mut reported = 0_u64;
    for round in 0..30 {
        for _ in 0..=round % 16 {
            let words = [u64::from(fault::MAPPING) | 0x102 << 32, u64::from(ENDPOINT), reported];
            assert!(bench.fake.device().report(&bench.fake.memory, words));
            reported += 1;
        }
        for address in reported - (round % 16 + 1)..reported {
            let fault = bench.unit.next_fault().unwrap();
            assert_eq!((fault.address, fault.reason), (Some(Iova::new(address)), Reason::NotMapped));
        }
        assert_eq!(bench.unit.next_fault(), None);
    }
    // All buffers are full: the rest is lost.
    let full = (0..20).filter(|_| bench.fake.device().report(&bench.fake.memory, [0; 3])).count();
    assert_eq!(full, 16);
    assert_eq!(core::iter::from_fn(|| bench.unit.next_fault()).count(), 16);
    bench.fake.device().claim(&bench.fake.memory, 1, 0x4000);
    assert_eq!(bench.unit.next_fault(), None, "more than there are buffers");
    bench.fake.device().use_up(&bench.fake.memory, 1, 16, 24);
    assert_eq!(bench.unit.next_fault(), None, "a buffer that there is not");
}

/// Four CPUs map, unmap and flush, and the device answers in any order: after each sync nothing of its range is mapped, and all that
/// is mapped is.
#[test]
fn cpus_share_the_queue_and_no_mapping_is_lost_or_left() {
    let bench = Arc::new(Bench::new());
    bench.fake.device().backwards = true;
    let rounds = if cfg!(debug_assertions) || cfg!(miri) { 40 } else { 400 };
    let work = |number: u64| {
        let bench = Arc::clone(&bench);
        let work = move || {
            let platform = StdPlatform::new();
            for round in 0..rounds {
                let (page, pages) = (1000 * (number + 1) + round % 7 * 100, 1 + (round * 13 + number) % 90);
                let list = (0..pages).map(|frame| (PhysAddr::new(frame * 2 * PAGE), PAGE));
                let mut gather = Gather::new();
                let range = range(page, pages);
                // SAFETY: there is no memory.
                unsafe { bench.mapper.map(&platform, range, list, Permissions::READ, &mut gather) }.unwrap();
                let inside = || {
                    let inside = |(first, last): &(u64, u64)| {
                        range.contains(Iova::new(*first)) && range.contains(Iova::new(*last))
                    };
                    bench.mapped().iter().filter(|mapping| inside(mapping)).count() as u64
                };
                assert_eq!(inside(), pages);
                assert_eq!(bench.mapper.unmap(&platform, range, &mut gather).bytes, pages * PAGE);
                let everything = Gather::everything();
                bench.mapper.sync(if round % 3 == 0 { &everything } else { &gather }).unwrap();
                assert_eq!(inside(), 0);
            }
        };
        std::thread::Builder::new().name("patient".into()).spawn(work).unwrap()
    };
    let threads: Vec<_> = (0..4).map(work).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(bench.mapped(), []);
}
