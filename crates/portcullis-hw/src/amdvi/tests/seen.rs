//! All that a unit sees of its driver, word by word, after firmware has left all its registers non-zero (publication 48882, Rev. 3.10,
//! sections 2.2.2 "Device Table", 2.4 "Commands", 3.4 "IOMMU MMIO Registers").

use super::*;
use crate::fake::{Seen, entries, word};

/// The device table, of two frames; the command buffer; the status words; the event log.
const DEVICES: u64 = Memory::FIRST;
const COMMANDS: u64 = Memory::FIRST + 0x2000;
const ANSWERS: u64 = Memory::FIRST + 0x3000;
const EVENTS: u64 = Memory::FIRST + 0x4000;

/// Firmware's settings, which the driver keeps: the link, and the interrupt filter.
const FIRMWARES: u64 = 0x0140_0b02;
/// Interrupts and page requests, which the driver turns off.
const OTHERS: u64 = 1 << 3 | 1 << 4 | 1 << 13;

const DEVTAB: [u64; 2] = [2 << 60 | DEVICE as u64, 0];
const BARRIER: [u64; 2] = [1 << 60 | 1 << 2, 0];
const ALL_PAGES: [u64; 2] = [3 << 60 | 7 << 32, 0x7fff_ffff_ffff_f003];

/// On, with rings that have advanced, an overflowed log, pending interrupts, and an exclusion range for all devices.
fn left(state: &mut State) {
    state.registers[reg::DEVICE_TABLE_BASE / 8] = 0xdead_0001;
    state.registers[reg::COMMAND_BASE / 8] = 0xdead_2000 | 8 << 56;
    state.registers[reg::EVENT_BASE / 8] = 0xdead_3000 | 8 << 56;
    state.registers[reg::CONTROL / 8] = FIRMWARES | OTHERS | 0x1005;
    state.registers[reg::EXCLUSION_BASE / 8] = 0x8000_0003;
    state.rings = [0x50, 0x90, 0x30, 0x70, 0x1f];
}

fn register(at: usize, value: u64) -> Seen {
    Seen::Register(at, 64, value)
}

/// Commands from the place `first` on, the wait behind them, which stores `number`, and the doorbell. With this host's clock each
/// submission gets the first status word.
fn submission(first: u64, commands: &[[u64; 2]], number: u64) -> Vec<Seen> {
    let wait = [1 << 60 | ANSWERS | 1, number];
    let mut seen = entries((COMMANDS, 16), first, commands.iter().chain([&wait]));
    seen.push(register(reg::COMMAND_TAIL, (first + commands.len() as u64 + 1) * 16));
    seen
}

#[test]
fn a_unit_that_is_not_coherent_sees_each_word_in_this_order() {
    let (host, _) = host(feature::IA_SUP);
    left(&mut host.unit().state.lock());
    let unit = Unit::start(host.uncached(), config()).unwrap();
    let mut wanted = alloc::vec![Seen::Frame(DEVICES), Seen::Frame(DEVICES + 0x1000)];
    // Each device's entry is valid, and blocks all accesses.
    wanted.extend((0..0x100).map(|device| word(DEVICES + device * 32, 3)));
    wanted.extend([COMMANDS, ANSWERS, EVENTS].map(Seen::Frame));
    wanted.extend([
        register(reg::CONTROL, FIRMWARES | OTHERS | 1),
        register(reg::STATUS, 7),
        register(reg::COMMAND_BASE, COMMANDS | 8 << 56),
        register(reg::EVENT_BASE, EVENTS | 8 << 56),
        register(reg::COMMAND_HEAD, 0),
        register(reg::COMMAND_TAIL, 0),
        register(reg::EVENT_HEAD, 0),
        register(reg::EVENT_TAIL, 0),
    ]);
    assert_eq!(unit.host().seen(), wanted);

    unit.enable().unwrap();
    let mut wanted = alloc::vec![
        register(reg::EXCLUSION_BASE, 0),
        // Before translation is on; two frames.
        register(reg::DEVICE_TABLE_BASE, DEVICES | 1),
        register(reg::CONTROL, FIRMWARES | 0x1405),
    ];
    wanted.extend(submission(0, &[[8 << 60, 0]], 1));
    assert_eq!(unit.host().seen(), wanted);

    let attached = DEVICES + u64::from(DEVICE) * 32;
    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DeviceId(DEVICE), table(7)) }.unwrap();
    // The domain, before the entry takes effect.
    let entry = [word(attached + 8, 7), word(attached, 0x6000_0000_0000_7803)];
    let mut wanted = entry.to_vec();
    wanted.extend(submission(2, &[DEVTAB], 2));
    assert_eq!(unit.host().seen(), wanted);

    unit.detach(DeviceId(DEVICE)).unwrap();
    let mut wanted = alloc::vec![word(attached, 3)];
    wanted.extend(submission(4, &[DEVTAB, BARRIER, ALL_PAGES], 3));
    // It counts as attached until the unit confirms the invalidation.
    wanted.push(word(attached + 8, 0));
    assert_eq!(unit.host().seen(), wanted);

    let log = alloc::sync::Arc::clone(unit.host().log());
    unit.shut_down().unwrap();
    // Waits for outstanding commands; then turns all three off, and keeps firmware's settings.
    let mut wanted = submission(8, &[], 4);
    wanted.push(register(reg::CONTROL, FIRMWARES | 0x400));
    assert_eq!(log.lock()[..], wanted);
}

#[test]
fn a_unit_that_caches_what_is_absent_forgets_the_entry_before_what_it_leads_to() {
    let (host, _) = host(feature::IA_SUP);
    let unit =
        Unit::start(host, Config { capability: Some(HEADER | capability::NP_CACHE), ..config() }).unwrap();
    unit.enable().unwrap();
    unit.host().unit().done();
    attach(&unit, DEVICE, table(7)).unwrap();
    assert_eq!(unit.host().unit().done(), [DEVTAB, BARRIER, ALL_PAGES]);
}

/// Exclusion Range Base (section 3.4.6): bit 0 opens the range to devices whose entries say so, bit 1 to all.
#[test]
fn a_range_that_firmware_has_opened_is_closed() {
    for (left, right) in [(0x8000_0001, 0), (0x8000_0002, 0), (0x8000_0003, 0), (0x8000_0000, 0x8000_0000)] {
        let (unit, _) = started();
        unit.host().unit().state.lock().registers[reg::EXCLUSION_BASE / 8] = left;
        unit.enable().unwrap();
        assert_eq!(unit.host().unit().register(reg::EXCLUSION_BASE), right, "{left:#x}");
    }
}

/// Section 2.4: the command buffer restarts when CmdBufEn changes from 0 to 1.
#[test]
fn a_unit_that_has_stopped_is_turned_off_and_on() {
    let (unit, _) = enabled();
    let fake = unit.host().unit();
    let on = fake.register(reg::CONTROL);
    fake.state.lock().controls.clear();
    let device = Invalidation::DeviceTlb { device: DeviceId(DEVICE), range: None };
    assert_eq!(unit.invalidate(DomainId(7), device), Err(InvalidationError::Rejected { code: 4 }));
    assert_eq!(fake.state.lock().controls, [on & !0x1000, on]);
}
