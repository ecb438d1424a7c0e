//! All that a unit sees of its driver, word by word, after firmware has left all its registers non-zero (version 1.0, chapters "Data
//! Structures", "In-memory queue interface", "Memory-mapped register interface").

use super::*;
use crate::fake::{Seen, entries, register, word};

/// The three-level directory, down to the contexts of the lowest devices; commands, and status words; fault records.
const UPPER: u64 = Memory::FIRST;
const MIDDLE: u64 = Memory::FIRST + 0x1000;
const CONTEXTS: u64 = Memory::FIRST + 0x2000;
const COMMANDS: u64 = Memory::FIRST + 0x3000;
const ANSWERS: u64 = Memory::FIRST + 0x4000;
const RECORDS: u64 = Memory::FIRST + 0x5000;

const FENCE: [u64; 2] = [2, 0];
const DIRECTORY: [u64; 2] = [3 | 1 << 33 | 0x28 << 40, 0];

/// Commands from the place `first` on, the fence behind them, which stores `number` and waits for reads and writes, and the doorbell.
fn submission(first: u64, commands: &[[u64; 2]], number: u64) -> Vec<Seen> {
    let fence = [2 | 1 << 10 | 1 << 12 | 1 << 13 | number << 32, ANSWERS >> 2];
    let mut seen = entries((COMMANDS, 16), first, commands.iter().chain([&fence]));
    seen.push(register(reg::CQT, first as u32 + commands.len() as u32 + 1));
    seen
}

/// `ddtp`, the high half first.
fn pointer(value: u64) -> [Seen; 2] {
    [register(reg::DDTP + 4, (value >> 32) as u32), register(reg::DDTP, value as u32)]
}

#[test]
fn a_unit_that_is_not_coherent_sees_each_word_in_this_order() {
    // Firmware's three-level directory, above 4 GiB; queues that are on, have advanced and have errors. The manual does not define bit 20
    // of each control.
    let host = host(BOTH | cap::ATS, ddtp::directory(3) | 0x1_2345_6789 << 10, 16);
    let kept = 1 << 20;
    for control in [reg::CQCSR, reg::FQCSR, reg::PQCSR] {
        host.unit().set32(control, kept | csr::ENABLE | csr::ON | csr::MEMORY_FAULT | 1 << 1);
    }
    for (index, value) in [(reg::CQH, 5), (reg::CQT, 9), (reg::FQH, 3), (reg::FQT, 7)] {
        host.unit().set32(index, value);
    }
    host.unit().state(|state| state.keeps = kept);
    let unit = Unit::start(host.uncached()).unwrap();
    let off = |control| register(control, kept);
    let mut wanted = alloc::vec![off(reg::CQCSR), off(reg::FQCSR), off(reg::PQCSR)];
    // Each table before the word that leads there.
    wanted.extend([Seen::Frame(UPPER), Seen::Frame(MIDDLE), word(UPPER, MIDDLE >> 2 | 1)]);
    wanted.extend([Seen::Frame(CONTEXTS), word(MIDDLE, CONTEXTS >> 2 | 1)]);
    wanted.extend([COMMANDS, ANSWERS, RECORDS].map(Seen::Frame));
    // 2^7 records, 2^8 commands.
    wanted.extend([Seen::Register(reg::FQB, 64, RECORDS >> 2 | 6), register(reg::FQH, 0)]);
    wanted.push(register(reg::FQCSR, kept | 1));
    wanted.extend([Seen::Register(reg::CQB, 64, COMMANDS >> 2 | 7), register(reg::CQT, 0)]);
    wanted.push(register(reg::CQCSR, kept | 1));
    assert_eq!(unit.host().seen(), wanted);

    unit.enable().unwrap();
    // Off, with firmware's page number; everything is invalidated; then the directory, after which outstanding accesses end.
    let mut wanted = pointer(0x1_2345_6789 << 10).to_vec();
    let everything = [[3, 0], [1, 0], [1 | 1 << 7, 0]];
    wanted.extend(submission(0, &everything, 1));
    wanted.extend(pointer(UPPER >> 2 | 4));
    wanted.extend(submission(4, &[], 2));
    assert_eq!(unit.host().seen(), wanted);

    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DeviceId(0x28), table(Riscv::sv48(), 7, 0x123_4000)) }.unwrap();
    let context = CONTEXTS + 0x28 * 32;
    // Not valid, but attached, until all else is stored and stale contents are invalidated.
    let mut wanted = alloc::vec![word(context, 2), word(context + 8, 0)];
    wanted.extend([word(context + 16, 7 << 12), word(context + 24, 9 << 60 | 0x1234)]);
    wanted.extend(submission(5, &[DIRECTORY], 3));
    wanted.push(word(context, 1));
    assert_eq!(unit.host().seen(), wanted);

    unit.detach(DeviceId(0x28)).unwrap();
    let mut wanted = alloc::vec![word(context, 2)];
    // The context, and after a fence its translations.
    let forgotten = [DIRECTORY, FENCE, [1 | 1 << 32 | 7 << 12, 0], FENCE];
    wanted.extend(submission(7, &forgotten, 4));
    wanted.extend([8, 16, 24].map(|at| word(context + at, 0)));
    wanted.push(word(context, 0));
    assert_eq!(unit.host().seen(), wanted);

    let log = alloc::sync::Arc::clone(unit.host().log());
    unit.shut_down().unwrap();
    // The pointer goes through Off, with its page number, to Bare. The driver waits for outstanding accesses, and turns both queues off.
    let mut wanted = pointer(UPPER >> 2).to_vec();
    wanted.extend(pointer(1));
    wanted.extend(submission(12, &[], 5));
    wanted.extend([off(reg::CQCSR), off(reg::FQCSR)]);
    assert_eq!(log.lock()[..], wanted);
}

/// A unit may need time for each half of the pointer (writes while it is busy are unspecified).
#[test]
fn a_pointer_is_written_when_the_unit_is_ready_for_each_half() {
    let host = host(BOTH, ddtp::OFF, 16);
    host.unit().state(|state| state.slow = 3);
    let unit = Unit::start(host).unwrap();
    unit.enable().unwrap();
    assert_eq!(model(&unit).state(|state| state.modes.clone()), [0, 4]);
    unit.shut_down().unwrap();
}

/// Section "Command-queue CSR" and "Fault queue CSR": writing 1 clears errors, undefined bits stay, and the queue stays on.
#[test]
fn what_goes_on_after_an_error_is_written_whole() {
    let unit = on(BOTH);
    let kept = 1 << 20;
    model(&unit).state(|state| state.keeps = kept);
    for (control, errors) in [
        (reg::CQCSR, csr::COMMAND_ILLEGAL),
        (reg::CQCSR, csr::MEMORY_FAULT | csr::COMMAND_ILLEGAL),
        (reg::FQCSR, csr::FAULT_OVERFLOW),
        (reg::FQCSR, csr::MEMORY_FAULT),
    ] {
        model(&unit).set32(control, kept | csr::ENABLE | csr::ON | errors);
        unit.host().seen();
        let _ = unit.next_fault();
        let _ = unit.invalidate(DomainId(1), PAGE);
        let written = unit
            .host()
            .seen()
            .into_iter()
            .filter(|seen| matches!(seen, Seen::Register(at, ..) if *at == control));
        assert_eq!(
            written.collect::<Vec<_>>(),
            [register(control, kept | 1 | errors)],
            "{control:#x} {errors:#x}"
        );
    }
    // While busy, the fault queue takes no other write.
    model(&unit).set32(reg::FQCSR, csr::ENABLE | csr::ON | csr::FAULT_OVERFLOW | csr::BUSY);
    unit.host().seen();
    assert_eq!(unit.next_fault(), None);
    assert_eq!(unit.host().seen(), []);
}
