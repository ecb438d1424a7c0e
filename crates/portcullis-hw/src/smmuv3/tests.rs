//! The driver on units unlike QEMU's: narrow, broken, silent.

mod bounds;
mod model;
mod seen;
mod words;

use alloc::sync::Arc;
use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::pgtable::Arm;

use self::model::*;
use super::layout::{command, cr0, event, gbpa, gerror, idr0, idr1, reg, ste};
use super::{Stage, Unit};
use crate::fake::{FakeHost, Memory};
use crate::fault::Reason;
use crate::host::UnitError;
use crate::iommu::{Attachment, Iommu};
use crate::sync::Ordering;

#[test]
fn what_is_no_unit_or_lacks_something_is_said_so() {
    for (ids, expected) in [
        ([0; 4], "no IOMMU answers"),
        ([u32::MAX; 4], "no IOMMU answers"),
        ([IDR0 & !3, IDR1, IDR3, IDR5], "lacks the stage"),
        ([IDR0 & !idr0::TTF_AARCH64, IDR1, IDR3, IDR5], "lacks a walk of AArch64"),
        ([IDR0 | 3 << 21, IDR1, IDR3, IDR5], "lacks little-endian"),
        ([IDR0 | 2 << 24, IDR1, IDR3, IDR5], "without stalling"),
        ([IDR0 & !idr0::COHACC, IDR1, IDR3, IDR5], "lacks coherent access"),
        ([IDR0, IDR1 | idr1::TABLES_PRESET, IDR3, IDR5], "lacks a stream table"),
        ([IDR0, IDR1 | idr1::QUEUES_PRESET, IDR3, IDR5], "lacks queues"),
        ([IDR0, IDR1 & !(0x1f << 21), IDR3, IDR5], "lacks a queue of two"),
        ([IDR0, IDR1, IDR3, 4], "lacks pages of the size"),
    ] {
        let memory = Memory::new(64);
        let error = Fake::<12>::start(host_with(&memory, ids, |_| {})).unwrap_err();
        assert!(alloc::format!("{error}").contains(expected), "{ids:x?}: {error}");
        assert_eq!(memory.taken(), 0, "{error}");
    }
}

#[test]
fn a_unit_that_does_not_do_as_it_is_told_is_waited_for_once() {
    for deaf in [reg::CR0, reg::IRQ_CTRL] {
        let error = started(ALL, |state| {
            state.deaf = Some(deaf);
            state.words[reg::CR0ACK / 4] = 0;
            state.words[reg::IRQ_CTRLACK / 4] = 1;
        });
        assert!(matches!(error, Err(UnitError::TimedOut { .. })), "{deaf:#x}: {error:?}");
    }
    let unit = started(ALL, |state| {
        state.words[reg::CR0 / 4] = cr0::SMMUEN;
        state.words[reg::GBPA / 4] = gbpa::UPDATE;
        state.deaf = Some(reg::GBPA);
    });
    let unit = unit.unwrap();
    assert!(matches!(unit.enable(), Err(UnitError::TimedOut { .. })));
    assert_ne!(change(&unit, |state| state.word(reg::CR0)) & cr0::SMMUEN, 0, "it is still on");
    let unit = on(ALL);
    change(&unit, |state| state.deaf = Some(reg::CR0));
    assert!(matches!(unit.shut_down(), Err(UnitError::TimedOut { .. })));
}

#[test]
fn without_memory_there_is_no_unit_and_nothing_is_kept() {
    // Linear: the queues, 16 frames of entries, and as many of contexts.
    let linear = [IDR0 & !(3 << 27), IDR1 & !0x3f | 10, IDR3, IDR5];
    for (ids, needed) in [(ALL, 3), (linear, 48)] {
        for frames in 0..needed {
            let memory = Memory::new(frames);
            let error = Fake::<12>::start(host_with(&memory, ids, |_| {})).unwrap_err();
            assert_eq!((error, memory.taken()), (UnitError::OutOfMemory, 0), "{frames} frames");
        }
        let memory = Memory::new(needed);
        let unit = Fake::<12>::start(host_with(&memory, ids, |_| {})).unwrap();
        unit.enable().unwrap();
        unit.shut_down().unwrap();
        assert_eq!(memory.taken(), 0);
    }
    let memory = Memory::new(8);
    let unit = Fake::<12>::start(host_with(&memory, ALL, |_| {})).unwrap();
    assert_eq!(attach(&unit, 8, table(Stage::One, 1, 0)), Err(UnitError::OutOfMemory));
    assert_eq!(memory.taken(), 3);
}

#[test]
fn whatever_registers_say_there_is_an_end() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as u32
    };
    let mut came_up = 0;
    for round in 0..4000 {
        // Half of them have what a driver needs, and only the rest at random.
        let ids = if round % 2 == 0 {
            [next(), next(), next(), next()]
        } else {
            let sizes = next() & 0x03ff_001f | 1 << 21;
            [IDR0 ^ next() & 0x1804_1003, sizes, next(), next() | 1 << 4]
        };
        let memory = Memory::new(1 << 6);
        let others = [next(), next(), next(), next()];
        let (dead, indices) = (next() % 4 == 0, [next(), next()]);
        let unit = Fake::<12>::start(host_with(&memory, ids, |state| {
            for (register, value) in [reg::CR0, reg::GBPA, reg::GERROR, reg::GERRORN].into_iter().zip(others)
            {
                state.words[register / 4] = value;
            }
            state.words[reg::GBPA / 4] &= !gbpa::UPDATE;
            state.dead = dead;
        }));
        let Ok(unit) = unit else { continue };
        came_up += 1;
        let layout = Iommu::layout(&unit);
        let _ = unit.enable();
        for device in [0, 0x28, u32::MAX] {
            let _ = attach(&unit, device, Attachment::PassThrough);
            if let Ok(format) = layout {
                let to = Attachment::Table { domain: DomainId(1), root: PhysAddr::new(0), format };
                let _ = attach(&unit, device + (device < 9) as u32, to);
            }
            let _ = unit.detach(DeviceId(device));
        }
        change(&unit, |state| state.indices = indices);
        for _ in 0..3 {
            let _ = unit.next_fault();
        }
        assert_eq!(unit.submit(&[page(1), page(300)]).is_ok(), !dead, "{ids:x?}");
        let _ = unit.shut_down();
    }
    assert!(came_up > 500, "{came_up} came up");
}

#[test]
fn an_entry_is_absent_until_the_unit_has_forgotten_the_one_before() {
    let unit = on(ALL);
    attach(&unit, 0x128, table(Stage::One, 7, 0x4000)).unwrap();
    attach(&unit, 0x129, table(Stage::Two, 7, 0x4000)).unwrap();
    attach(&unit, 0x12a, Attachment::PassThrough).unwrap();
    for (device, config) in [(0x128, ste::STAGE_1), (0x129, ste::STAGE_2), (0x12a, ste::BYPASS)] {
        let seen = change(&unit, |state| {
            let of = |(asked, _): &&([u64; 2], u64)| *asked == command::stream(device);
            state.done.iter().filter(of).map(|(_, entry)| *entry & 0xf).collect::<Vec<_>>()
        });
        assert_eq!(seen, [0, config | ste::V], "{device:#x}");
    }
    let _ = done(&unit);
    for (device, translations) in
        [(0x128, Some(command::tlbi_asid(7))), (0x129, Some(command::tlbi_vmid(7))), (0x12a, None)]
    {
        unit.detach(DeviceId(device)).unwrap();
        assert_eq!(change(&unit, |state| state.done[0].1), 0, "it was absent before that");
        let configuration = [command::stream(device), command::context(device), command::SYNC];
        let after = translations.into_iter().flat_map(|asked| [asked, command::SYNC]);
        assert_eq!(done(&unit), configuration.into_iter().chain(after).collect::<Vec<_>>());
        assert_eq!(unit.detach(DeviceId(device)), Err(UnitError::NotAttached { device }));
    }
}

#[test]
fn what_was_cached_before_is_forgotten_before_the_unit_is_on() {
    for (idr0, also) in [(IDR0, None), (IDR0 | idr0::HYP, Some(command::TLBI_EL2))] {
        let unit = started([idr0, IDR1, IDR3, IDR5], |_| {}).unwrap();
        assert_eq!(done(&unit), [[0; 2]; 0]);
        unit.enable().unwrap();
        let all = [command::CFGI_ALL, command::SYNC, command::TLBI_ALL];
        let rest = also.into_iter().chain([command::SYNC]);
        assert_eq!(done(&unit), all.into_iter().chain(rest).collect::<Vec<_>>());
        // Events of streams beyond the table are recorded, and CPUs' broadcasts ignored.
        assert_eq!(change(&unit, |state| state.word(reg::CR2)), 6);
    }
}

#[test]
fn a_unit_without_the_first_stage_is_told_of_no_context() {
    // It refuses such commands.
    let unit = on([IDR0 & !idr0::S1P, IDR1, IDR3, IDR5]);
    change(&unit, |state| state.refused = Some(0x05));
    attach(&unit, 8, table(Stage::Two, 7, 0)).unwrap();
    unit.detach(DeviceId(8)).unwrap();
    assert!(matches!(attach(&unit, 8, table(Stage::One, 7, 0)), Err(UnitError::Lacks { .. })));
}

#[test]
fn invalidations_go_to_the_stages_that_are_used() {
    let unit = on(ALL);
    unit.submit(&[page(7)]).unwrap();
    assert_eq!(done(&unit), [command::SYNC], "no device was ever attached");
    attach(&unit, 8, table(Stage::Two, 7, 0x4000)).unwrap();
    let _ = done(&unit);
    let second = command::tlbi_vmid_address(7, 0x5000, true);
    unit.submit(&[page(7)]).unwrap();
    assert_eq!(done(&unit), [second, command::SYNC]);
    attach(&unit, 9, table(Stage::One, 8, 0x4000)).unwrap();
    let _ = done(&unit);
    unit.submit(&[page(7)]).unwrap();
    let first = command::tlbi_asid_address(7, 0x5000, true);
    assert_eq!(done(&unit), [first, second, command::SYNC]);
    let device = Invalidation::DeviceTlb { device: DeviceId(9), range: None };
    unit.invalidate(DomainId(8), device).unwrap();
    assert_eq!(done(&unit), [command::SYNC], "no device has a TLB");
}

/// The start level of the second stage follows from the physical address width: at the top, up to 16 concatenated tables replace one level
/// (DDI 0487, section D8.2, tables of the initial lookup level).
#[test]
fn walks_start_where_the_units_addresses_begin() {
    fn start<const GRANULE: u32>(code: u32) -> (u32, u32) {
        let idr5 = IDR5 & !7 | code;
        let unit = Fake::<GRANULE>::start(host_with(&Memory::new(64), [IDR0, IDR1, IDR3, idr5], |_| {}));
        let layout = unit.unwrap().capabilities().layout::<GRANULE>(Stage::Two).unwrap();
        (64 - layout.t0sz(), layout.sl0().unwrap())
    }
    for (code, bits, sl0) in [
        (0, 32, [0, 1, 0]),
        (1, 36, [1, 1, 1]),
        (2, 40, [1, 1, 1]),
        (3, 42, [1, 2, 1]),
        (4, 44, [2, 2, 1]),
        (5, 48, [2, 2, 2]),
    ] {
        assert_eq!([start::<12>(code), start::<14>(code), start::<16>(code)], sl0.map(|sl0| (bits, sl0)));
    }
}

#[test]
fn what_a_unit_cannot_lead_to_is_refused() {
    // 8 bits of ASIDs, 8 of streams, 40 of addresses.
    let unit = on([IDR0 & !idr0::ASID16, IDR1 & !0x3f | 8, IDR3, 2 | 7 << 4]);
    let format = Arm::stage_1(48, 44).unwrap();
    let wide = Attachment::Table { domain: DomainId(1), root: PhysAddr::new(0), format };
    let levels = 4;
    assert_eq!(attach(&unit, 8, wide), Err(UnitError::NoSuchTables { levels }));
    let number = UnitError::NoSuchDomain { domain: 256, first: 1, last: 255 };
    assert_eq!(attach(&unit, 8, table(Stage::One, 256, 0)), Err(number));
    assert!(matches!(
        attach(&unit, 8, table(Stage::Two, 0, 0)),
        Err(UnitError::NoSuchDomain { domain: 0, first: 1, last: 65535 })
    ));
    assert!(matches!(attach(&unit, 8, table(Stage::One, 1, 0x800)), Err(UnitError::BadRoot { .. })));
    // Two concatenated tables, with a root that is aligned for one.
    assert!(matches!(attach(&unit, 8, table(Stage::Two, 1, 0x1000)), Err(UnitError::BadRoot { .. })));
    assert!(matches!(attach(&unit, 8, table(Stage::One, 1, 1 << 40)), Err(UnitError::BadRoot { .. })));
    let device = UnitError::NoSuchDevice { device: 256, last: 255 };
    assert_eq!(attach(&unit, 256, Attachment::PassThrough), Err(device));
    assert_eq!(unit.detach(DeviceId(256)), Err(device));
    assert_eq!(done(&unit), [[0; 2]; 0], "the unit was told nothing");
    attach(&unit, 8, table(Stage::Two, 300, 0x2000)).unwrap();
    assert_eq!(attach(&unit, 8, Attachment::PassThrough), Err(UnitError::Attached { device: 8 }));
    let narrow = on([IDR0 & !idr0::S2P, IDR1, IDR3, IDR5]);
    assert!(matches!(attach(&narrow, 8, table(Stage::Two, 1, 0)), Err(UnitError::Lacks { .. })));
}

#[test]
fn a_command_that_is_refused_is_skipped_and_reported() {
    let unit = on(ALL);
    attach(&unit, 8, table(Stage::One, 7, 0)).unwrap();
    let _ = done(&unit);
    change(&unit, |state| state.refused = Some(0x12));
    for _ in 0..600 {
        let rejected = Err(InvalidationError::Rejected { code: 1 });
        assert_eq!(unit.submit(&[page(7)]), rejected);
    }
    assert_eq!(done(&unit), [command::SYNC; 1200], "in its place");
    unit.invalidate(DomainId(7), Invalidation::Domain).unwrap();
    assert_eq!(done(&unit), [command::tlbi_asid(7), command::SYNC]);
}

/// The unit refuses each command of a range separately, all of them while their own submission is outstanding.
#[test]
fn what_is_refused_of_one_submission_fails_no_later_one() {
    let unit = on([IDR0, IDR1, 0, IDR5]);
    attach(&unit, 8, table(Stage::One, 7, 0)).unwrap();
    change(&unit, |state| state.refused = Some(0x12));
    let range = IovaRange::new(Iova::new(0x5000), 8 << 12).unwrap();
    let rejected = Err(InvalidationError::Rejected { code: 1 });
    assert_eq!(unit.invalidate(DomainId(7), Invalidation::Range { range, leaf_only: true }), rejected);
    for _ in 0..8 {
        unit.invalidate(DomainId(8), Invalidation::Domain).unwrap();
    }
}

/// An aborted write of the event queue is acknowledged, and fails no submission.
#[test]
fn an_event_that_could_not_be_written_fails_nothing() {
    let unit = on(ALL);
    attach(&unit, 8, table(Stage::One, 7, 0)).unwrap();
    let aborted = 1 << 2;
    change(&unit, |state| state.words[reg::GERROR / 4] ^= aborted);
    assert_eq!(unit.next_fault(), None);
    change(&unit, |state| assert_eq!(state.word(reg::GERRORN) & aborted, aborted));
    unit.submit(&[page(7)]).unwrap();
}

#[test]
fn a_queue_that_stops_is_an_error_and_so_is_one_that_is_full_of_what_it_was_asked() {
    let unit = on(ALL);
    attach(&unit, 8, table(Stage::One, 7, 0)).unwrap();
    change(&unit, |state| state.dead = true);
    for _ in 0..300 {
        assert!(matches!(unit.submit(&[page(7)]), Err(InvalidationError::TimedOut { .. })));
    }
    assert!(matches!(unit.detach(DeviceId(8)), Err(UnitError::Unconfirmed(_))));
    let attached = UnitError::Attached { device: 8 };
    assert_eq!(attach(&unit, 8, Attachment::PassThrough), Err(attached), "until another detach");
    change(&unit, |state| {
        state.dead = false;
        state.work(&unit.host().unit().memory);
    });
    unit.detach(DeviceId(8)).unwrap();
    unit.submit(&[page(7)]).unwrap();
}

#[test]
fn a_unit_that_answers_nothing_has_refused_nothing() {
    for gone in [reg::GERROR, reg::GERRORN] {
        let unit = on(ALL);
        let was = change(&unit, |state| {
            state.dead = true;
            [reg::CMDQ_CONS, gone].map(|at| core::mem::replace(&mut state.words[at / 4], u32::MAX))
        });
        assert!(matches!(unit.submit(&[page(7)]), Err(InvalidationError::TimedOut { .. })), "{gone:#x}");
        change(&unit, |state| {
            assert_eq!(state.word(gone), u32::MAX, "no error is acknowledged");
            state.dead = false;
            [state.words[reg::CMDQ_CONS / 4], state.words[gone / 4]] = was;
            state.work(&unit.host().unit().memory);
        });
        unit.submit(&[page(7)]).unwrap();
    }
}

#[test]
fn a_queue_of_two_commands_is_enough() {
    let unit = on([IDR0, IDR1 & !(0x1f << 21) | 1 << 21, 0, IDR5]);
    attach(&unit, 8, table(Stage::One, 7, 0)).unwrap();
    let _ = done(&unit);
    let range = IovaRange::new(Iova::new(0x5000), 0x3000).unwrap();
    unit.invalidate(DomainId(7), Invalidation::Range { range, leaf_only: false }).unwrap();
    let at = |page: u64| command::tlbi_asid_address(7, page << 12, false);
    assert_eq!(done(&unit), [at(5), command::SYNC, at(6), command::SYNC, at(7), command::SYNC]);
}

#[test]
fn firmwares_translation_ends_with_no_moment_without_any() {
    let unit = started(ALL, |state| {
        state.words[reg::CR0 / 4] = cr0::SMMUEN | cr0::CMDQEN;
        state.words[reg::GERROR / 4] = gerror::CMDQ;
        state.words[reg::CMDQ_CONS / 4] = 1 << 24 | 5;
        state.words[reg::CMDQ_PROD / 4] = 9;
    });
    let unit = unit.unwrap();
    assert_eq!(
        change(&unit, |state| [reg::CMDQ_PROD, reg::CMDQ_CONS].map(|index| state.word(index))),
        [0, 0]
    );
    unit.enable().unwrap();
    let (mut aborts, mut is_on) = (false, true);
    for (register, value) in change(&unit, |state| state.controls.clone()) {
        match register {
            reg::CR0 => is_on = value & cr0::SMMUEN != 0,
            _ => aborts = value & gbpa::ABORT != 0,
        }
        assert!(aborts || is_on, "{register:#x}: {value:#x}");
    }
    assert!(aborts && is_on);
    // A unit that is off needs no abort: devices go on until their entries are there.
    assert!(change(&on(ALL), |state| state.controls.iter().all(|(register, _)| *register == reg::CR0)));
}

#[test]
fn events_come_in_order_around_the_queue_and_losses_are_acknowledged() {
    let unit = on(ALL);
    let mut produced = 0_u32;
    for round in 0..300_u32 {
        change(&unit, |state| {
            let base = state.base(reg::EVENTQ_BASE) & !0x1f;
            let at = base + u64::from(produced % 128) * 32;
            let word = u64::from(round) << 32 | u64::from(event::F_TRANSLATION);
            unit.host().unit().memory.word(at).store(word, Ordering::Relaxed);
            produced = (produced + 1) % 256;
            let lost = if round >= 100 { 1 << 31 } else { 0 };
            state.indices[0] = produced | lost;
        });
        let fault = unit.next_fault().unwrap();
        assert_eq!((fault.device, fault.reason), (DeviceId(round), Reason::NotMapped));
        assert_eq!(unit.next_fault(), None);
        change(&unit, |state| assert_eq!(state.indices[0], state.indices[1], "round {round}"));
    }
    for nonsense in [u32::MAX, 0xf_ffff, 256, (produced + 129) & 0xff] {
        change(&unit, |state| state.indices[0] = nonsense);
        assert_eq!(unit.next_fault(), None, "{nonsense:#x}");
    }
}
