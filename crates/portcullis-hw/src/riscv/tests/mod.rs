//! The driver on units unlike QEMU's: narrow, broken, silent.

mod model;
mod seen;

use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::pgtable::{Format, Riscv};

use super::layout::{FAULTS, cap, command, csr, ddtp, directory, reg};
use super::{Stage, Unit};
use crate::fake::{FakeHost, Memory};
use crate::host::{Host, UnitError};
use crate::iommu::{Attachment, Iommu};
use crate::queue::Command;
use model::{BOTH, Model, host};

type Fake = Unit<FakeHost<Model>>;

fn on(capabilities: u64) -> Fake {
    let unit = Unit::start(host(capabilities, ddtp::OFF, 16)).unwrap();
    unit.enable().unwrap();
    unit.host().unit().state(|state| state.done.clear());
    unit
}

fn model(unit: &Fake) -> &Model {
    unit.host().unit()
}

fn attach(unit: &Fake, device: u32, to: Attachment<Riscv>) -> Result<(), UnitError> {
    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DeviceId(device), to) }
}

fn table(format: Riscv, domain: u16, root: u64) -> Attachment<Riscv> {
    Attachment::Table { domain: DomainId(domain), root: PhysAddr::new(root), format }
}

fn done(unit: &Fake) -> Vec<Command> {
    model(unit).state(|state| state.done.drain(..).map(|(command, _)| command).collect())
}

/// All commands except the confirming fence.
fn asked(unit: &Fake) -> Vec<Command> {
    done(unit).into_iter().filter(|command| !command::is_fence(command[0])).collect()
}

const PAGE: Invalidation = Invalidation::Domain;

#[test]
fn what_is_no_unit_or_can_do_nothing_is_said_so() {
    for (capabilities, expected) in [
        (0, "no IOMMU answers"),
        (u64::MAX, "no IOMMU answers"),
        (BOTH & !0xff | 0x20, "lacks version 1"),
        (BOTH & !0xff, "lacks version 1"),
        (0x10 | 56 << 32, "lacks page tables"),
        // Only Sv32 and Sv57x4.
        (0x10 | 56 << 32 | 1 << 8 | 1 << 19, "lacks page tables"),
        (BOTH & !(0x3f << 32), "lacks physical addresses"),
    ] {
        let said = Unit::start(host(capabilities, ddtp::OFF, 16)).map(drop).unwrap_err();
        assert!(alloc::format!("{said}").contains(expected), "{capabilities:#x}: {said}");
    }
    for features in [1, 4] {
        let host = host(BOTH, ddtp::OFF, 16);
        host.unit().set32(reg::FCTL, features);
        assert!(matches!(Unit::start(host), Err(UnitError::Lacks { register: "fctl", .. })));
    }
    let small = host(BOTH, ddtp::OFF, 16);
    small.unit().state(|state| state.is_small = true);
    assert!(matches!(Unit::start(small), Err(UnitError::Lacks { register: "fqb", .. })));
}

#[test]
fn without_memory_nothing_is_kept() {
    for frames in 0..6 {
        let host = host(BOTH, ddtp::OFF, frames);
        let memory: Memory = host.frames().clone();
        assert_eq!(Unit::start(host).map(drop), Err(UnitError::OutOfMemory));
        assert_eq!(memory.taken(), 0, "of {frames}");
    }
    let unit = Unit::start(host(BOTH, ddtp::OFF, 6)).unwrap();
    // Tables exist for device 0 and its neighbours.
    assert_eq!(attach(&unit, 5, Attachment::PassThrough), Ok(()));
    assert_eq!(attach(&unit, 0x8000, Attachment::PassThrough), Err(UnitError::OutOfMemory));
    assert_eq!(attach(&unit, 6, Attachment::PassThrough), Ok(()));
}

#[test]
fn a_unit_that_does_not_get_ready_is_given_up() {
    for (register, when) in [(reg::FQCSR, "start"), (reg::CQCSR, "start"), (reg::DDTP, "enable")] {
        let host = host(BOTH, ddtp::OFF, 16);
        host.unit().state(|state| state.busy = Some(register));
        let result = Unit::start(host);
        let result = if when == "enable" { result.unwrap().enable() } else { result.map(|_| ()) };
        assert!(matches!(result, Err(UnitError::TimedOut { .. })), "{register:#x}: {result:?}");
    }
    // A unit that vanishes.
    let unit = on(BOTH);
    for register in [reg::DDTP, reg::CQB, reg::FQB] {
        model(&unit).set(register, u64::MAX);
    }
    for register in [reg::CQH, reg::CQT, reg::FQT, reg::CQCSR, reg::FQCSR] {
        model(&unit).set32(register, u32::MAX);
    }
    model(&unit).state(|state| state.is_dead = true);
    assert_eq!(unit.next_fault(), None);
    for _ in 0..300 {
        let result = unit.invalidate(DomainId(1), PAGE);
        assert!(matches!(result, Err(InvalidationError::TimedOut { .. })), "{result:?}");
    }
    assert!(matches!(unit.shut_down(), Err(UnitError::TimedOut { .. })));
}

#[test]
fn firmware_s_queues_go_off_and_its_directory_goes_through_off() {
    for (mode, modes) in [(ddtp::OFF, &[0, 4][..]), (ddtp::BARE, &[4]), (ddtp::directory(3), &[0, 4])] {
        let host = host(BOTH | cap::ATS, mode | 0x1234 << 10, 16);
        let memory: Memory = host.frames().clone();
        for register in [reg::CQCSR, reg::FQCSR, reg::PQCSR] {
            host.unit().set32(register, csr::ENABLE | csr::ON | csr::MEMORY_FAULT);
        }
        let unit = Unit::start(host).unwrap();
        assert_eq!(model(&unit).get(reg::PQCSR) & (csr::ENABLE | csr::ON), 0);
        assert_eq!(model(&unit).state(|state| core::mem::take(&mut state.modes)), [], "start changes none");
        unit.enable().unwrap();
        assert_eq!(model(&unit).state(|state| core::mem::take(&mut state.modes)), modes);
        assert_eq!(asked(&unit), [command::DIRECTORY_ALL, command::VMA_ALL, command::GVMA_ALL]);
        unit.enable().unwrap();
        unit.shut_down().unwrap();
        assert_eq!(memory.taken(), 0);
    }
    // A unit without a second stage may not know its command.
    let unit = Unit::start(host(BOTH & !cap::SECOND_STAGE, ddtp::OFF, 16)).unwrap();
    unit.enable().unwrap();
    assert_eq!(asked(&unit), [command::DIRECTORY_ALL, command::VMA_ALL]);
}

#[test]
fn a_directory_is_as_deep_as_the_unit_walks_it() {
    for extended in [0, cap::MSI_FLAT] {
        let bits = directory::context_bits(extended != 0);
        for (levels, last) in [(1, (1 << bits) - 1), (2, (1 << (bits + 9)) - 1), (3, 0xff_ffff)] {
            let unit = Unit::start(host(BOTH | extended, ddtp::OFF, 32)).unwrap();
            model(&unit).state(|state| state.levels = alloc::vec![levels]);
            unit.enable().unwrap();
            // Other values that it may read back after an unsupported mode.
            model(&unit).state(|state| state.takes_another = true);
            unit.enable().unwrap();
            for device in [0, 5, last] {
                assert_eq!(model(&unit).context(device), None);
                attach(&unit, device, Attachment::PassThrough).unwrap();
                assert_eq!(model(&unit).context(device), Some([1, 0, 0, 0]), "{device:#x}");
            }
            let beyond = UnitError::NoSuchDevice { device: last + 1, last };
            assert_eq!(attach(&unit, last + 1, Attachment::PassThrough), Err(beyond));
            let _ = done(&unit);
            unit.detach(DeviceId(last)).unwrap();
            assert_eq!(model(&unit).context(last), None);
            assert_eq!(asked(&unit)[0], command::directory(last), "the last is walked, too");
            assert!(model(&unit).context(5).is_some());
        }
    }
    let unit = Unit::start(host(BOTH, ddtp::OFF, 16)).unwrap();
    model(&unit).state(|state| state.levels.clear());
    assert!(matches!(unit.enable(), Err(UnitError::Lacks { register: "ddtp", .. })));
}

#[test]
fn a_device_beyond_the_width_that_was_attached_too_early_is_named() {
    let unit = Unit::start(host(BOTH, ddtp::OFF, 16)).unwrap();
    model(&unit).state(|state| state.levels = alloc::vec![1, 2]);
    for device in [0x1_0003, 0xffff] {
        attach(&unit, device, Attachment::PassThrough).unwrap();
    }
    let beyond = UnitError::NoSuchDevice { device: 0x1_0003, last: 0xffff };
    assert_eq!(unit.enable(), Err(beyond));
    unit.detach(DeviceId(0x1_0003)).unwrap();
    // There is room for the other, which is the last.
    assert_eq!(unit.enable(), Ok(()));
    // No command names its ID.
    assert!(asked(&unit).iter().all(|command| *command != super::layout::command::directory(0x1_0003)));
}

#[test]
fn a_context_becomes_valid_when_the_unit_has_forgotten_what_was_there_before() {
    for (stage, format, words) in [
        (Stage::First, Riscv::sv48(), [1, 0, 7 << 12, 9 << 60 | 0x1234]),
        (Stage::First, Riscv::sv39(), [1, 0, 7 << 12, 8 << 60 | 0x1234]),
        (Stage::Second, Riscv::sv48x4(), [1, 9 << 60 | 7 << 44 | 0x1234, 0, 0]),
        (Stage::Second, Riscv::sv39x4(), [1, 8 << 60 | 7 << 44 | 0x1234, 0, 0]),
    ] {
        let unit = Unit::start_in(host(BOTH, ddtp::OFF, 16), stage).unwrap();
        unit.enable().unwrap();
        model(&unit).state(|state| {
            state.done.clear();
            state.watched = Some(0x28);
        });
        attach(&unit, 0x28, table(format, 7, 0x123_4000)).unwrap();
        let (first, seen) = model(&unit).state(|state| state.done[0]);
        assert_eq!(first, command::directory(0x28));
        let [control, rest @ ..] = seen.unwrap();
        assert_eq!((control & 1, &rest), (0, words.last_chunk::<3>().unwrap()), "not valid, and complete");
        assert_eq!(model(&unit).context(0x28), Some(words));
        assert_eq!(unit.layout().unwrap().levels(), 4);
        done(&unit);

        // The context is cleared and invalidated before its translations.
        unit.detach(DeviceId(0x28)).unwrap();
        let (_, seen) = model(&unit).state(|state| state.done[0]);
        assert_eq!(seen.unwrap()[0] & 1, 0);
        let rest: &[Command] = match stage {
            Stage::First => &[command::vma(7)],
            Stage::Second => &[command::vma_of_guest(7), command::gvma(7)],
        };
        assert_eq!(asked(&unit), [&[command::directory(0x28)], rest].concat());
        assert_eq!(unit.detach(DeviceId(0x28)), Err(UnitError::NotAttached { device: 0x28 }));
    }
}

#[test]
fn tables_that_the_unit_does_not_walk_are_refused() {
    let unit = on(BOTH);
    let refused = |format, root, error| {
        assert_eq!(attach(&unit, 5, table(format, 1, root)), Err(error));
        assert_eq!(attach(&unit, 5, Attachment::PassThrough), Ok(()), "nothing had changed");
        unit.detach(DeviceId(5)).unwrap();
    };
    refused(Riscv::sv57(), 0x1000, UnitError::NoSuchTables { levels: 5 });
    refused(Riscv::sv39x4(), 0x1000, UnitError::NoSuchTables { levels: 3 });
    for root in [0x1008, 1 << 56] {
        refused(Riscv::sv48(), root, UnitError::BadRoot { root: PhysAddr::new(root) });
    }
    let unit = Unit::start_in(host(BOTH, ddtp::OFF, 16), Stage::Second).unwrap();
    let root = PhysAddr::new(0x5000);
    let result = attach(&unit, 5, table(Riscv::sv39x4(), 1, 0x5000));
    assert_eq!(result, Err(UnitError::BadRoot { root }), "four frames, aligned to their size");
    assert_eq!(unit.detach(DeviceId(u32::MAX)).unwrap_err(), {
        UnitError::NoSuchDevice { device: u32::MAX, last: 0xff_ffff }
    });
}

#[test]
fn what_is_not_confirmed_is_attached_until_it_is() {
    let unit = on(BOTH);
    attach(&unit, 5, Attachment::PassThrough).unwrap();
    model(&unit).state(|state| state.is_dead = true);
    assert!(matches!(unit.detach(DeviceId(5)), Err(UnitError::Unconfirmed(_))));
    assert_eq!(attach(&unit, 5, Attachment::PassThrough), Err(UnitError::Attached { device: 5 }));
    assert!(matches!(attach(&unit, 6, Attachment::PassThrough), Err(UnitError::Unconfirmed(_))));
    assert_eq!(model(&unit).context(6), None, "it is refused");
    assert_eq!(attach(&unit, 6, Attachment::PassThrough), Err(UnitError::Attached { device: 6 }));
    model(&unit).state(|state| state.is_dead = false);
    for device in [5, 6] {
        assert_eq!(unit.detach(DeviceId(device)), Ok(()));
        assert_eq!(attach(&unit, device, Attachment::PassThrough), Ok(()));
    }
}

#[test]
fn a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out() {
    let unit = on(BOTH);
    for (error, code) in [(csr::COMMAND_ILLEGAL, 0x400), (csr::MEMORY_FAULT, 0x100)] {
        let control = model(&unit).get(reg::CQCSR);
        model(&unit).set32(reg::CQCSR, control | error);
        let result = unit.invalidate(DomainId(1), PAGE);
        assert_eq!(result, Err(InvalidationError::Rejected { code }));
        assert_eq!(model(&unit).get(reg::CQCSR), control, "it is cleared, and the queue is on");
        // The command at the head was not executed again: it may be the bad one.
        assert!(asked(&unit).is_empty());
        assert_eq!(unit.invalidate(DomainId(2), PAGE), Ok(()));
        assert_eq!(asked(&unit), [command::vma(2)]);
    }
}

#[test]
fn a_device_that_does_not_answer_is_named() {
    let unit = on(BOTH | cap::ATS);
    let range = IovaRange::new(Iova::new(0x5000), 0x4000).ok();
    let ask =
        |device| unit.invalidate(DomainId(1), Invalidation::DeviceTlb { device: DeviceId(device), range });
    assert_eq!(ask(0x28), Ok(()));
    model(&unit).state(|state| state.is_deaf = true);
    assert!(matches!(ask(0x28), Err(InvalidationError::DeviceTimedOut { device: 0x28, .. })));
    model(&unit).state(|state| state.is_deaf = false);
    assert_eq!(ask(0x1_0028), Ok(()));
    // 0x5000 to 0x8fff are 16 KiB, and a page behind them.
    let payloads = [0x5000 | 1 << 11, 0x8000];
    assert_eq!(asked(&unit)[4..6], payloads.map(|payload| [4 | 1 << 33 | 0x1_0028 << 40, payload]));
}

#[test]
fn faults_are_read_in_order_and_after_an_overflow() {
    let unit = on(BOTH);
    let fault = |address| model(&unit).fault(0x28 << 40 | 3 << 34 | 15, address);
    let read = || unit.next_fault().and_then(|fault| fault.address).map(Iova::get);
    for round in 0..5_u64 {
        for at in 0..100 {
            fault(round << 20 | at << 12);
        }
        assert_eq!(core::iter::from_fn(read).count(), 100);
    }
    (0..200).for_each(|at| fault(at << 12));
    assert!(core::iter::from_fn(read).eq((0..u64::from(FAULTS) - 1).map(|at| at << 12)));
    fault(0x5000);
    assert_eq!(read(), Some(0x5000), "it records again");
    for nonsense in [FAULTS, u32::MAX] {
        model(&unit).set32(reg::FQT, nonsense);
        assert_eq!(read(), None);
    }
}

#[test]
fn the_widest_tables_bound_addresses() {
    let last = |capabilities| on(capabilities).last_iova().get();
    assert_eq!(last(BOTH), (1 << 47) - 1);
    assert_eq!(last(BOTH | cap::SV57), (1 << 56) - 1);
    assert_eq!(last(BOTH & !cap::SV48), (1 << 38) - 1);
    let second = BOTH & !(cap::SV39 | cap::SV48);
    assert_eq!((on(second).stage(), last(second)), (Stage::Second, (1 << 50) - 1));
    assert_eq!(on(BOTH | cap::SV57).layout().unwrap().levels(), 4);
}

#[test]
fn a_queue_that_is_busy_or_gone_has_not_stopped() {
    use super::queue::Bell;
    use crate::queue::Port;

    let host = host(BOTH, ddtp::OFF, 16);
    host.unit().set32(reg::CQH, 77);
    let failure = |status| {
        host.unit().set32(reg::CQCSR, status);
        Bell(&host).failure(&|_| 0).map(|said| (said.error, said.bad, said.drops_waits, said.status))
    };
    let (running, fault, illegal) = (csr::ENABLE | csr::ON, 1 << 8, csr::COMMAND_ILLEGAL);
    for status in [0, running, running | csr::BUSY, running | fault | csr::BUSY, u32::MAX, 1 << 11] {
        assert_eq!(failure(status), None, "{status:#x}");
    }
    let rejected = |code, drops_waits| {
        Some((Some(InvalidationError::Rejected { code }), Some(77), drops_waits, running | code))
    };
    let late = csr::COMMAND_TIMED_OUT;
    assert_eq!(failure(running | fault), rejected(fault, false));
    assert_eq!(failure(running | illegal), rejected(illegal, false));
    assert_eq!(failure(running | illegal | late), rejected(illegal | late, true));
    // A fence that timed out is no bad command.
    let waited_ns = host.patience_ns();
    let timed_out = InvalidationError::TimedOut { waited_ns };
    assert_eq!(failure(running | late), Some((Some(timed_out), None, true, running | late)));
}
