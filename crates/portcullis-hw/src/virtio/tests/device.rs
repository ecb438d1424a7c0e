//! Take-over, endpoints, faults.

use super::*;

#[test]
fn a_device_that_has_just_enough_is_taken() {
    let enough: [fn(&mut fake::Device); 2] = [
        |device| device.configure(config::DOMAIN_END, 4, 2),
        |device| device.configure(config::INPUT_END, 8, 0xfff),
    ];
    for change in enough {
        let fake = Fake::new();
        change(&mut fake.device());
        assert!(start(&fake).is_ok());
    }
}

#[test]
fn a_device_that_lacks_something_is_an_error_and_its_memory_is_given_back() {
    type Lacking = (&'static str, &'static str, fn(&mut fake::Device));
    let lacking: [Lacking; 12] = [
        ("", "device status", |device| device.absent = true),
        ("version 1 of virtio", "features", |device| device.features &= !feature::VERSION_1),
        ("requests to map and unmap", "features", |device| device.features &= !feature::MAP_UNMAP),
        ("a driver with other features", "features", |device| device.stuck_status = status::FEATURES_OK),
        ("pages", "page_size_mask", |device| device.configure(config::PAGE_SIZE_MASK, 8, 0)),
        ("addresses to translate", "input_range.end", |device| device.configure(config::INPUT_END, 8, 0xffe)),
        ("addresses to translate", "input_range.end", |device| {
            device.configure(config::INPUT_START, 8, 1 << 40)
        }),
        ("addresses to translate", "input_range.end", |device| {
            device.configure(config::INPUT_START, 8, u64::MAX)
        }),
        ("three numbers for domains", "domain_range.end", |device| {
            device.configure(config::DOMAIN_END, 4, 1)
        }),
        ("three numbers for domains", "domain_range.end", |device| {
            device.configure(config::DOMAIN_START, 4, 0x1_0000);
        }),
        ("a queue for requests", "queue size", |device| device.queue_sizes[0] = 2),
        ("a queue for events", "queue size", |device| device.queue_sizes[1] = 0),
    ];
    let told = |device: &fake::Device, register| match register {
        "features" => device.features,
        "page_size_mask" => device.get(STRUCTURES.device + config::PAGE_SIZE_MASK, 8),
        "input_range.end" => device.get(STRUCTURES.device + config::INPUT_END, 8),
        "domain_range.end" => device.get(STRUCTURES.device + config::DOMAIN_END, 4),
        "queue size" => device.queue_sizes.map(u64::from).into_iter().min().unwrap(),
        other => panic!("{other}"),
    };
    for (lacks, says, change) in lacking {
        let fake = Fake::new();
        change(&mut fake.device());
        match start(&fake).unwrap_err() {
            UnitError::Lacks { what, register, value } => {
                assert_eq!((what, register), (lacks, says));
                assert_eq!(value, told(&fake.device(), register), "{lacks}");
            }
            UnitError::NotThere { register, value: 0xff } => assert_eq!(("", register), (lacks, says)),
            error => panic!("{lacks}: {error}"),
        }
        assert_eq!(fake.memory.in_use(), 0, "{lacks}");
    }
    let fake = Fake::new();
    fake.device().stuck_status = 0x80;
    assert!(matches!(start(&fake), Err(UnitError::TimedOut { .. })));
    // A doorbell beyond the structure.
    let structures = crate::virtio::Structures { notify_bytes: 5, ..STRUCTURES };
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
        unsafe {
            mapper.map(&StdPlatform::new(), range(8, 200), list, Permissions::READ.into(), &mut gather)
        }
        .unwrap();
        assert_eq!(fake.device().mapped(1).len(), 200, "{size}");
        let _ = mapper.unmap(&StdPlatform::new(), range(8, 200), &mut gather);
        mapper.sync(&gather).unwrap();
        assert_eq!(fake.device().mapped(1).len(), 0);
    }
}

#[test]
fn what_is_carried_out_or_refused_late_leaves_an_endpoint_that_can_be_detached() {
    let bench = Bench::new();
    // The detach itself times out.
    bench.fake.device().holds = true;
    assert!(matches!(bench.unit.detach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
    bench.fake.catch_up();
    bench.fake.device().holds = false;
    assert!(bench.fake.device().endpoints.is_empty());
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    // Requests that are answered in time must succeed.
    bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
    bench.fake.device().endpoints.clear();
    let refused = bench.unit.detach(DeviceId(ENDPOINT)).unwrap_err();
    assert!(matches!(refused, UnitError::Refused { code: 4, .. }), "{refused}");
}

/// It was the domain's last endpoint, so the device has dropped the domain's mappings.
#[test]
fn what_is_mapped_is_entered_again_for_the_next_endpoint_after_a_late_detach() {
    for is_refused in [false, true] {
        let bench = Bench::new();
        bench.map(16, &[1, 3, 5]);
        bench.fake.device().holds = true;
        assert!(matches!(bench.unit.detach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
        bench.map(32, &[7]);
        assert!(matches!(bench.mapper.attach(DeviceId(OTHER)), Err(UnitError::TimedOut { .. })));
        // After the time-out the device carries it out, or refuses it for ever.
        bench.fake.device().refuses = is_refused.then_some((2, 0, 2));
        bench.fake.catch_up();
        bench.fake.device().holds = false;
        assert_eq!(bench.mapped().len(), if is_refused { 3 } else { 0 });
        bench.mapper.attach(DeviceId(OTHER)).unwrap();
        assert_eq!(bench.mapped(), [bounds(16, 1), bounds(17, 1), bounds(18, 1), bounds(32, 1)]);
        bench.fake.device().refuses = None;
        let detached = bench.unit.detach(DeviceId(ENDPOINT));
        let absent = Err(UnitError::NotAttached { device: ENDPOINT });
        assert_eq!(detached, if is_refused { Ok(()) } else { absent });
        bench.unit.detach(DeviceId(OTHER)).unwrap();
        assert_eq!(bench.mapped(), []);
    }
}

#[test]
fn an_attach_that_is_carried_out_late_can_be_undone() {
    let fake = Fake::new();
    // An attach is its first request.
    fake.device().features &= !feature::PROBE;
    let unit = Arc::new(start(&fake).unwrap());
    let mapper = unit.mapper(DomainId(1), Vec::new()).unwrap();
    fake.device().holds = true;
    assert!(matches!(mapper.attach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
    fake.catch_up();
    fake.device().holds = false;
    assert!(fake.device().endpoints.contains_key(&ENDPOINT));
    unit.detach(DeviceId(ENDPOINT)).unwrap();
    assert!(fake.device().endpoints.is_empty());
    mapper.attach(DeviceId(ENDPOINT)).unwrap();
}

#[test]
fn answers_that_make_no_sense_are_no_answers() {
    // Invalid answers to the outstanding request, which has the first slot: more answers than possible, one with its second descriptor, one
    // without a status.
    type Act = fn(&mut fake::Device, &fake::Memory);
    let at_doorbell: [(Act, bool); 3] = [
        (|device, memory| device.claim(memory, 0, 0x8000), true),
        (|device, memory| device.use_up(memory, 0, 1, 0), true),
        (|device, memory| device.use_up(memory, 0, 0, 0), false),
    ];
    for (act, times_out) in at_doorbell {
        let fake = Fake::new();
        fake.device().features &= !feature::PROBE;
        let unit = Arc::new(Unit::start(fake.clone(), STRUCTURES, []).unwrap());
        let mapper = unit.mapper(DomainId(1), Vec::new()).unwrap();
        fake.device().holds = true;
        fake.device().at_doorbell = Some(act);
        let error = mapper.attach(DeviceId(ENDPOINT)).unwrap_err();
        assert_eq!(matches!(error, UnitError::TimedOut { .. }), times_out, "{error}");
        assert_eq!(matches!(error, UnitError::Refused { code: 0xff, .. }), !times_out, "{error}");
    }
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
                // A free slot.
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
    let _ = bench.unmap(17, 1, &mut gather);
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped().len(), 199, "which reaches what is mapped");
    // Stale when the last endpoint is detached.
    let _ = bench.unmap(16, 1, &mut gather);
    bench.unit.detach(DeviceId(OTHER)).unwrap();
    bench.requests();
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.requests(), []);
    bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
    assert_eq!(bench.mapped().len(), 198);
    let missing = bench.unit.detach(DeviceId(OTHER));
    assert_eq!(missing, Err(UnitError::NotAttached { device: OTHER }));
}

#[test]
fn what_a_device_keeps_for_itself_its_domain_must_not_map() {
    let bench = Bench::detached();
    let regions = bench.unit.regions(DeviceId(OTHER)).unwrap();
    let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
    assert_eq!(regions, [crate::virtio::Region { range: kept, is_msi: true }]);
    assert_eq!(bench.unit.regions(DeviceId(ENDPOINT)).unwrap(), []);
    let none = bench.unit.regions(DeviceId(0x99)).unwrap_err();
    assert_eq!(none, UnitError::NoSuchDevice { device: 0x99, last: u32::MAX });
    let careless = bench.unit.mapper(DomainId(2), Vec::new()).unwrap();
    assert_eq!(careless.attach(DeviceId(OTHER)), Err(UnitError::Reserved { device: OTHER, range: kept }));
    // Two halves reserve as much as one range.
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
    // The endpoint is still attached.
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
    // A refused detach leaves the device attached.
    bench.fake.device().refuses = Some((3, 0, answer::NOMEM));
    let incomplete = bench.mapper.attach(DeviceId(ENDPOINT)).unwrap_err();
    assert_eq!(incomplete, UnitError::Incomplete { device: ENDPOINT, code: 8 });
    bench.fake.device().refuses = None;
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
}

/// If the next endpoint is refused, a domain with an endpoint stays as it is: the device gets its later map requests.
#[test]
fn an_attach_that_is_refused_leaves_the_domain_s_other_endpoint_as_it_was() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    bench.fake.device().refuses = Some((1, 0, answer::INVAL));
    let refused = bench.mapper.attach(DeviceId(OTHER)).unwrap_err();
    assert!(matches!(refused, UnitError::Refused { code: 4, .. }), "{refused}");
    bench.fake.device().refuses = None;
    bench.map(32, &[2]);
    assert_eq!(bench.mapped(), [bounds(16, 1), bounds(32, 1)]);
    // The first is detached, and all mappings are dropped: it was the last.
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    assert_eq!(bench.mapped(), []);
    bench.mapper.attach(DeviceId(OTHER)).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 1), bounds(32, 1)]);
}

#[test]
fn a_device_passes_through_and_does_not_without_the_feature() {
    let bench = Bench::detached();
    // SAFETY: there is no memory.
    unsafe { bench.unit.pass_through(DeviceId(ENDPOINT)) }.unwrap();
    assert!(bench.fake.device().endpoints.get(&ENDPOINT).is_some_and(|(_, bypass)| *bypass));
    // It stays attached until it is detached.
    let twice = Err(UnitError::Attached { device: ENDPOINT });
    assert_eq!(bench.mapper.attach(DeviceId(ENDPOINT)), twice);
    // SAFETY: there is no memory.
    assert_eq!(unsafe { bench.unit.pass_through(DeviceId(ENDPOINT)) }, twice);
    bench.mapper.attach(DeviceId(OTHER)).unwrap();
    // SAFETY: there is no memory.
    let translated = unsafe { bench.unit.pass_through(DeviceId(OTHER)) };
    assert_eq!(translated, Err(UnitError::Attached { device: OTHER }));
    bench.unit.detach(DeviceId(OTHER)).unwrap();
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    assert!(bench.fake.device().endpoints.is_empty());
    let fake = Fake::new();
    fake.device().features &= !feature::BYPASS_CONFIG;
    let unit = start(&fake).unwrap();
    unit.enable().unwrap();
    // SAFETY: there is no memory.
    let lacks = unsafe { unit.pass_through(DeviceId(ENDPOINT)) }.unwrap_err();
    assert!(matches!(lacks, UnitError::Lacks { what: "pass-through", register: "features", .. }), "{lacks}");
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
        let told = bench.fake.device().event_doorbells;
        assert_eq!(
            told,
            1 + reported,
            "the device is told of its buffers at the start, and of each that it has back"
        );
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

#[test]
fn a_device_that_was_unplugged_can_be_detached() {
    let bench = Bench::new();
    {
        let mut device = bench.fake.device();
        device.endpoints.clear();
        device.domains.clear();
        device.unplugged = Some(ENDPOINT);
    }
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
    let gone = bench.mapper.attach(DeviceId(ENDPOINT)).unwrap_err();
    assert_eq!(gone, UnitError::NoSuchDevice { device: ENDPOINT, last: u32::MAX });
}
