//! Units unlike QEMU's, by their capabilities; and the exact words of scalable mode's structures.

extern crate std;

mod fake_unit;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use std::sync::Barrier;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{Format, X86FirstStage};
use portcullis::platform::Frames;

use self::fake_unit::*;
use super::layout::{cap, descriptor, ecap, entry, global};
use super::{FirstStage, Mode, Unit};
use crate::host::UnitError;
use crate::iommu::{Attachment, Iommu};

#[test]
fn the_mode_is_what_the_unit_has() {
    use Mode::{Legacy, Scalable};
    let second = ecap::SMTS | ecap::SSTS | ecap::SMPWC;
    let first = ecap::SMTS | ecap::FSTS | ecap::SMPWC;
    // The default mode, legacy mode, scalable mode.
    for (cap, ecap, modes) in [
        (CAP, 0, [Some(Legacy), Some(Legacy), None]),
        (CAP, second, [Some(Scalable), Some(Legacy), Some(Scalable)]),
        (CAP, BOTH, [Some(Scalable), Some(Legacy), Some(Scalable)]),
        // Without a second stage in scalable mode, legacy mode is the default.
        (CAP, first, [Some(Legacy), Some(Legacy), Some(Scalable)]),
        (NO_TABLES, first, [Some(Scalable), None, Some(Scalable)]),
        // Without scalable mode its other bits mean nothing, nor does it without a stage.
        (CAP, second & !ecap::SMTS, [Some(Legacy), Some(Legacy), None]),
        (CAP, first & !ecap::SMTS, [Some(Legacy), Some(Legacy), None]),
        (CAP, ecap::SMTS | ecap::SMPWC, [Some(Legacy), Some(Legacy), None]),
        (NO_TABLES, 0, [None; 3]),
        (NO_TABLES, second, [None; 3]),
        (NO_TABLES, ecap::SMTS, [None; 3]),
        // The walker is coherent only in legacy mode, in neither.
        (CAP, second & !ecap::SMPWC, [Some(Legacy), Some(Legacy), None]),
    ] {
        for (asked, expected) in [None, Some(Legacy), Some(Scalable)].into_iter().zip(modes) {
            let (host, memory) = host::<true>(cap, QUEUED | ecap::C | ecap);
            let started = match asked {
                Some(mode) => Unit::start_in(host, mode),
                None => Unit::start(host),
            };
            match (started, expected) {
                (Ok(unit), Some(mode)) => {
                    assert_eq!(unit.mode(), mode, "{cap:#x} {ecap:#x}");
                    let wide = ecap & ecap::SMTS != 0;
                    assert_eq!(fake(&unit).state.lock().queue & 0xfff, if wide { 0x801 } else { 0 });
                    assert_eq!(memory.taken(), if wide { 4 } else { 3 });
                    assert_eq!(unit.shut_down(), Ok(()));
                }
                (Err(UnitError::Lacks { register: "CAP", value, .. }), None) => assert_eq!(value, cap),
                (Err(UnitError::Lacks { register: "ECAP", value, .. }), None) => {
                    assert_eq!(value, QUEUED | ecap::C | ecap);
                }
                (other, _) => panic!("{cap:#x} {ecap:#x} {asked:?}: {:?}", other.map(|unit| unit.mode())),
            }
            assert_eq!(memory.taken(), 0);
        }
    }
    for ecap in [0, second, BOTH & !ecap::C] {
        let what = "a coherent walker, and Frames::COHERENT says that stores need no cleaning";
        let lacks = UnitError::Lacks { what, register: "ECAP", value: QUEUED | ecap };
        assert_eq!(Unit::start(host::<true>(CAP, QUEUED | ecap).0).unwrap_err(), lacks);
    }
    // With cleaned frames, no walker needs to be coherent.
    let (host, _) = host::<false>(CAP, QUEUED | ecap::SMTS | ecap::SSTS);
    assert_eq!(Unit::start(host).unwrap().mode(), Scalable);
}

#[test]
fn a_unit_that_translates_stays_in_its_mode_unless_another_is_asked_for() {
    for left in [Mode::Legacy, Mode::Scalable] {
        for on in [false, true] {
            let taken = |asked| {
                let (host, _) = host::<true>(CAP, BOTH);
                let mut state = host.host.unit().state.lock();
                state.root = 0x5000 | if left == Mode::Scalable { 1 << 10 } else { 0 };
                (state.taken, state.status) = (state.root, if on { global::TE } else { 0 });
                drop(state);
                let unit = match asked {
                    Some(mode) => Unit::start_in(host, mode),
                    None => Unit::start(host),
                };
                let unit = unit.unwrap();
                unit.enable().unwrap();
                let stops = fake(&unit).state.lock().stops;
                (unit.mode(), stops)
            };
            assert_eq!(taken(None), (if on { left } else { Mode::Scalable }, 0));
            for mode in [Mode::Legacy, Mode::Scalable] {
                // A change of mode turns it off for a moment.
                assert_eq!(taken(Some(mode)), (mode, u32::from(on && mode != left)));
            }
        }
    }
}

/// Such a unit takes tables of another mode while it translates; so also after firmware left it refusing everything (RTADDR.TTM is 3).
#[test]
fn a_unit_that_takes_any_root_while_it_is_on_never_stops() {
    for (left, asked) in [(0, Some(Mode::Scalable)), (1, Some(Mode::Legacy)), (3, None)] {
        let (host, _) = host::<true>(CAP | cap::ESRTPS, BOTH);
        let mut state = host.host.unit().state.lock();
        state.root = 0x5000 | left << 10;
        (state.taken, state.status) = (state.root, global::TE);
        drop(state);
        let unit = match asked {
            Some(mode) => Unit::start_in(host, mode),
            None => Unit::start(host),
        };
        let unit = unit.unwrap();
        unit.enable().unwrap();
        let state = fake(&unit).state.lock();
        assert_eq!((state.stops, state.status & global::TE), (0, global::TE), "left in {left}");
    }
}

/// A unit decodes descriptors in the mode of its root, and some accept none about contexts without one.
#[test]
fn nothing_is_submitted_before_a_root_is_taken() {
    for (cap, status) in [(CAP, 0), (CAP, global::TE), (CAP | cap::CM, 0), (CAP | cap::CM, global::TE)] {
        let (host, _) = host::<true>(cap, BOTH);
        // Firmware's tables are of legacy mode.
        host.host.unit().state.lock().status = status;
        let unit = Arc::new(Unit::start_in(host, Mode::Scalable).unwrap());
        let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
        assert_eq!(attach(&stage, 0x28, first(7)), Ok(()));
        for device in [0x30, 0x38] {
            assert_eq!(attach(&*unit, device, second(8)), Ok(()));
        }
        assert_eq!(unit.detach(DeviceId(0x38)), Ok(()));
        let forgotten = || {
            [
                stage.invalidate(DomainId(7), Invalidation::Domain),
                unit.invalidate(DomainId(8), Invalidation::Domain),
            ]
        };
        assert_eq!(forgotten(), [Ok(()); 2]);
        assert_eq!((fake(&unit).done(), fake(&unit).state.lock().tail), (Vec::new(), 0));

        // The root is outstanding: invalidations wait for it.
        fake(&unit).state.lock().rootless = true;
        assert!(matches!(unit.enable(), Err(UnitError::TimedOut { .. })));
        assert!(forgotten().iter().all(|result| matches!(result, Err(InvalidationError::TimedOut { .. }))));
        assert!(matches!(unit.detach(DeviceId(0x30)), Err(UnitError::TimedOut { .. })));
        assert_eq!((fake(&unit).done(), fake(&unit).state.lock().tail), (Vec::new(), 0));

        fake(&unit).state.lock().rootless = false;
        assert_eq!(unit.enable(), Ok(()));
        assert_eq!(unit.detach(DeviceId(0x30)), Ok(()));
        assert_eq!(forgotten(), [Ok(()); 2]);
        let all = [descriptor::CONTEXT_ALL, descriptor::PASIDS_ALL, descriptor::iotlb_all(3 << 6)];
        let domain = descriptor::iotlb_domain(3 << 6, 8);
        let detached = [descriptor::context_of(0, 0x30), descriptor::pasids_of(8), domain];
        let invalidated = [descriptor::first_stage_all(7), domain];
        assert_eq!(fake(&unit).done(), [&all[..], &detached, &invalidated].concat());
    }
}

#[test]
fn the_second_stage_in_scalable_mode() {
    let (unit, memory) = scalable(CAP);
    for device in [0x28, 0x7f, 0x80, 0xff, 0x2fff] {
        assert_eq!(attach(&*unit, device, second(7)), Ok(()));
        assert_eq!(attach(&*unit, device, second(7)), Err(UnitError::Attached { device }));
        let (context, pasid) = entries(&unit, device.into());
        assert_eq!((context[0] & 0xfff, context[1..].iter().sum::<u64>()), (1, 0), "{device:#x}");
        // Present, four levels, second stage; domain 7, walks snoop.
        assert_eq!(pasid, [0x7000 | 1 | 2 << 2 | 2 << 6, 7 | 1 << 23, 0, 0, 0, 0, 0, 0]);
        assert_eq!(fake(&unit).done(), [[0; 2]; 0]);
        assert_eq!(unit.detach(DeviceId(device)), Ok(()));
        assert_eq!(entries(&unit, device.into()).0[0], 0);
        let source = device as u16;
        let forget = [
            descriptor::context_of(0, source),
            [7 | 1 << 4 | 7 << 16, 0],
            descriptor::iotlb_domain(3 << 6, 7),
        ];
        assert_eq!(fake(&unit).done(), forget, "{device:#x}");
        assert_eq!(unit.detach(DeviceId(device)), Err(UnitError::NotAttached { device }));
    }
    // Root, queue (2), answers; three context tables; two for each device.
    assert_eq!(memory.taken(), 4 + 3 + 5 * 2);
    assert_eq!(Arc::into_inner(unit).unwrap().shut_down(), Ok(()));
    assert_eq!(memory.taken(), 0);
}

/// Entries of the second stage have a bit of their own for it.
#[test]
fn the_first_stage_snoops_where_the_unit_can() {
    let (host, _) = host::<true>(CAP, BOTH | ecap::SC);
    let unit = Arc::new(Unit::start_in(host, Mode::Scalable).unwrap());
    unit.enable().unwrap();
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    assert_eq!(attach(&stage, 0x28, first(7)), Ok(()));
    assert_eq!(entries(&unit, 0x28).1[1], 7 | 1 << 23 | 1 << 24);
    assert_eq!(attach(&*unit, 0x30, second(8)), Ok(()));
    assert_eq!(entries(&unit, 0x30).1[1], 8 | 1 << 23);
}

std::thread_local! {
    /// The CPU of a thread that shares waits.
    static CPU: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A descriptor names a stage, and a request does not: so CPUs share waits only within a stage.
#[test]
fn what_cpus_ask_for_together_is_forgotten_by_its_own_stage() {
    let (mut host, _) = host::<true>(CAP, BOTH);
    (host.cpus, host.cpu) = (4, || CPU.get());
    let unit = Arc::new(Unit::start_in(host, Mode::Scalable).unwrap());
    unit.enable().unwrap();
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    const EACH: u64 = if cfg!(watched) { 10 } else { 500 };
    // Which CPUs invalidate the first stage: some of them, none, all.
    for asks_first in [[false, true, false, true], [false; 4], [true; 4]] {
        // A busy machine may run the four threads one after the other: then they ask again.
        let shared = (0..200).any(|_| {
            fake(&unit).done();
            let before = fake(&unit).state.lock().waits;
            let barrier = Barrier::new(4);
            std::thread::scope(|scope| {
                for (cpu, asks_first) in asks_first.into_iter().enumerate() {
                    let (unit, stage, barrier) = (&unit, &stage, &barrier);
                    scope.spawn(move || {
                        CPU.set(Some(cpu));
                        barrier.wait();
                        let domain = DomainId(cpu as u16);
                        for page in 0..EACH {
                            let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
                            let requests = [Request {
                                domain,
                                invalidation: Invalidation::Range { range, leaf_only: true },
                            }];
                            if asks_first { stage.submit(&requests) } else { unit.submit(&requests) }
                                .unwrap();
                        }
                    });
                }
            });
            let (done, waits) = (fake(&unit).done(), fake(&unit).state.lock().waits - before);
            assert_eq!(done.len() as u64, 4 * EACH, "each has a domain of its own");
            // Descriptors of the second stage's IOTLB, and by PASID.
            let is_first = |low: u64| low & 0xf == 6;
            let by_stage = |domain: u64| *asks_first.get(domain as usize).unwrap();
            assert!(done.iter().all(|[low, _]| is_first(*low) == by_stage(low >> 16 & 0xffff)));
            cfg!(watched) || waits < 4 * EACH
        });
        assert!(shared, "{asks_first:?}: no two CPUs were in one submission");
    }
}

/// Units built for 39 or 46 bits walk tables of four levels: the first stage, too, uses only MGAW.
#[test]
fn both_stages_end_where_the_unit_does() {
    for (bits, first) in [(39, 39), (46, 46), (48, 47), (57, 47)] {
        let cap = CAP & !(0x3f << 16) | (bits - 1) << 16;
        let (unit, _) = scalable(cap);
        let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
        let last = |bits: u64| Iova::new((1 << bits) - 1);
        assert_eq!((unit.last_iova(), stage.last_iova()), (last(bits), last(first)));
        assert_eq!(unit.layout().unwrap().levels(), 4);
    }
}

#[test]
fn the_first_stage_and_pass_through() {
    let (unit, memory) = scalable(CAP | cap::FS1GP);
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    assert_eq!(stage.layout(), Ok(X86FirstStage::four_level()));
    assert_eq!(stage.last_iova(), Iova::new((1 << 47) - 1));
    assert_eq!(attach(&stage, 0x28, first(7)), Ok(()));
    // Present, first stage, and the widest AW; four levels, bit 63 forbids execution.
    let (context, pasid) = entries(&unit, 0x28);
    assert_eq!((context[0] & 0xfff, &context[1..]), (1, &[0; 3][..]));
    assert_eq!(pasid, [1 | 2 << 2 | 1 << 6, 7 | 1 << 23, 0x7000 | 1 << 5, 0, 0, 0, 0, 0]);
    let five = Attachment::Table { domain: DomainId(8), root: ROOT, format: X86FirstStage::five_level() };
    assert_eq!(attach(&stage, 0x30, five), Err(UnitError::NoSuchTables { levels: 5 }));

    let range = IovaRange::new(Iova::new(0x5000), 4096).unwrap();
    assert_eq!(stage.invalidate(DomainId(7), Invalidation::Range { range, leaf_only: false }), Ok(()));
    assert_eq!(stage.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
    assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
    let (pages, all) = ([6 | 3 << 4 | 7 << 16, 0x5000], [6 | 2 << 4 | 7 << 16, 0]);
    assert_eq!(fake(&unit).done(), [pages, all, descriptor::iotlb_domain(3 << 6, 7)]);
    assert_eq!(stage.detach(DeviceId(0x28)), Ok(()));
    assert_eq!(fake(&unit).done(), [descriptor::context_of(0, 0x28), descriptor::pasids_of(7), all]);

    assert_eq!(attach(&stage, 0x28, Attachment::PassThrough), Ok(()));
    assert_eq!(entries(&unit, 0x28).1, [1 | 2 << 2 | 4 << 6, 63 | 1 << 23, 0, 0, 0, 0, 0, 0]);
    assert_eq!(unit.detach(DeviceId(0x28)), Ok(()));
    let forget =
        [descriptor::context_of(0, 0x28), descriptor::pasids_of(63), descriptor::first_stage_all(63)];
    assert_eq!(fake(&unit).done(), forget);

    drop(unit);
    assert_eq!(stage.shut_down(), Ok(()));
    assert_eq!(memory.taken(), 0);
}

#[test]
fn a_first_stage_of_five_levels() {
    let (unit, _) = scalable(CAP | cap::FS5LP);
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    let no_gib = X86FirstStage::four_level().up_to(portcullis::addr::PageSize::SIZE_2M);
    assert_eq!(stage.layout(), Ok(no_gib));
    let five = Attachment::Table { domain: DomainId(8), root: ROOT, format: X86FirstStage::five_level() };
    assert_eq!(attach(&stage, 0x28, five), Ok(()));
    assert_eq!(entries(&unit, 0x28).1[2], 0x7000 | 1 << 2 | 1 << 5);
}

#[test]
fn stages_that_are_not_there_are_refused() {
    // Only a first stage, and no second-stage tables.
    let (host, _) = host::<true>(NO_TABLES, BOTH & !ecap::SSTS);
    let unit = Arc::new(Unit::start(host).unwrap());
    assert!(matches!(unit.layout(), Err(UnitError::Lacks { .. })));
    assert_eq!(attach(&*unit, 0x28, second(1)), Err(UnitError::NoSuchTables { levels: 4 }));
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    assert_eq!(
        attach(&stage, 0x28, first(64)),
        Err(UnitError::NoSuchDomain { domain: 64, first: 1, last: 62 })
    );
    let odd = Attachment::Table {
        domain: DomainId(1),
        root: PhysAddr::new(0x7800),
        format: stage.layout().unwrap(),
    };
    assert_eq!(attach(&stage, 0x28, odd), Err(UnitError::BadRoot { root: PhysAddr::new(0x7800) }));
    assert_eq!(attach(&stage, 0x28, first(1)), Ok(()));
    // AW is 0: there is none.
    unit.enable().unwrap();
    assert_eq!(entries(&unit, 0x28).1[0], 1 | 1 << 6);
    assert_eq!(stage.shut_down(), Err(UnitError::Shared));

    // Not even if legacy mode would support them.
    let unit = Unit::start_in(self::host::<true>(CAP, BOTH & !ecap::SSTS).0, Mode::Scalable).unwrap();
    assert!(matches!(unit.layout(), Err(UnitError::Lacks { .. })));
    assert_eq!(attach(&unit, 0x28, second(1)), Err(UnitError::NoSuchTables { levels: 4 }));
    for (ecap, mode) in [(BOTH & !ecap::FSTS, Mode::Scalable), (BOTH, Mode::Legacy)] {
        let unit = Unit::start_in(self::host::<true>(CAP, ecap).0, mode).unwrap();
        assert!(matches!(FirstStage::of(Arc::new(unit)), Err(UnitError::Lacks { .. })), "{mode:?}");
    }
}

#[test]
fn what_caches_what_is_absent_is_told_of_an_attachment() {
    let (unit, _) = scalable(CAP | cap::CM);
    assert_eq!(attach(&*unit, 0x28, second(7)), Ok(()));
    let forget = |translations| [descriptor::context_of(0, 0x28), descriptor::PASIDS_ALL, translations];
    assert_eq!(fake(&unit).done(), forget(descriptor::iotlb_domain(3 << 6, 7)));
    unit.detach(DeviceId(0x28)).unwrap();
    let _ = fake(&unit).done();
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    assert!(stage.caches_absent());
    assert_eq!(attach(&stage, 0x28, first(9)), Ok(()));
    assert_eq!(fake(&unit).done(), forget(descriptor::first_stage_all(9)));
}

#[test]
fn a_detachment_that_is_not_confirmed_is_tried_again() {
    let (unit, _) = scalable(CAP);
    assert_eq!(attach(&*unit, 0x28, second(7)), Ok(()));
    let directory = entries(&unit, 0x28).0[0] & entry::ADDRESS;
    let pasid = || fake(&unit).word(fake(&unit).word(directory) & entry::ADDRESS);
    assert_eq!(pasid() & 1, 1);
    fake(&unit).state.lock().deaf = true;
    let timed_out = unit.detach(DeviceId(0x28));
    assert!(matches!(timed_out, Err(UnitError::Unconfirmed(InvalidationError::TimedOut { .. }))));
    assert_eq!((entries(&unit, 0x28).0[0], pasid() & 1), (0, 0), "it is led nowhere");
    assert_eq!(attach(&*unit, 0x28, second(8)), Err(UnitError::Attached { device: 0x28 }));
    fake(&unit).state.lock().deaf = false;
    assert_eq!(unit.detach(DeviceId(0x28)), Ok(()));
    let done = fake(&unit).done();
    assert_eq!(
        done[3..],
        [descriptor::context_of(0, 0x28), descriptor::pasids_of(7), descriptor::iotlb_domain(3 << 6, 7)]
    );
    assert_eq!(attach(&*unit, 0x28, second(8)), Ok(()));
    assert_eq!(entries(&unit, 0x28).1[1], 8 | 1 << 23);
}

#[test]
fn what_the_unit_does_not_know_is_taken_out_of_a_queue_of_either_width() {
    for extended in [QUEUED | ecap::C | ecap::DT, BOTH | ecap::DT] {
        let (host, _) = host::<true>(CAP, extended);
        let unit = Unit::start(host).unwrap();
        unit.enable().unwrap();
        let _ = fake(&unit).done();
        // Device TLB descriptors.
        fake(&unit).state.lock().unknown = Some(3);
        let tlb = Invalidation::DeviceTlb { device: DeviceId(0x28), range: None };
        let domain = descriptor::iotlb_domain(3 << 6, 7);
        for _ in 0..200 {
            assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
            let rejected = unit.invalidate(DomainId(7), tlb);
            assert_eq!(rejected, Err(InvalidationError::Rejected { code: 3 }));
            assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
            assert_eq!(fake(&unit).done(), [domain, descriptor::NOTHING, domain]);
        }
    }
}

#[test]
fn memory_that_runs_out_is_given_back_or_kept_for_later() {
    for frames in 0..4 {
        let (host, memory) = host::<true>(CAP, BOTH);
        let kept = (frames..FRAMES).filter_map(|_| memory.alloc(1)).count();
        assert_eq!(Unit::start(host).map(|_| ()), Err(UnitError::OutOfMemory), "{frames}");
        assert_eq!(memory.taken(), kept);
    }
    // A context table, a directory, a table.
    for frames in 0..4 {
        let (unit, memory) = scalable(CAP);
        let free = FRAMES - memory.taken();
        assert_eq!((frames..free).filter_map(|_| memory.alloc(1)).count(), free - frames);
        let expected = if frames < 3 { Err(UnitError::OutOfMemory) } else { Ok(()) };
        assert_eq!(attach(&*unit, 0x28, second(7)), expected, "{frames}");
        let absent = UnitError::NotAttached { device: 0x28 };
        assert_eq!(unit.detach(DeviceId(0x28)), expected.map_err(|_| absent));
        assert_eq!(memory.taken(), FRAMES - usize::from(frames == 2));
    }
}
