//! Units unlike QEMU's: with missing features, silent, stopped, or gone.

mod seen;

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, DomainId, Iova, PageSize, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{AmdV1, PageTable};

use super::layout::{capability, command, control, entry, event, feature, reg, status};
use super::{Config, Unit};
use crate::blocks::EVERYTHING;
use crate::fake::{FakeHost, Memory};
use crate::host::UnitError;
use crate::iommu::{Attachment, Iommu};
use crate::sync::Mutex;
use crate::{fake, fault::Reason};

/// How a unit deviates from the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Well,
    /// Registers read all ones; all zeros.
    Gone,
    Zeros,
    /// It never starts a ring.
    Idle,
    /// It never stops a ring.
    Busy,
    /// Its command buffer runs, and fetches nothing.
    Deaf,
}

#[derive(Debug)]
struct State {
    mood: Mood,
    registers: [u64; 8],
    rings: [u64; 5],
    /// Executed commands.
    done: Vec<[u64; 2]>,
    /// Writes of the control register.
    controls: Vec<u64>,
}

/// A unit that stops at device TLB commands, like one without device TLBs.
#[derive(Debug)]
struct FakeUnit {
    memory: Memory,
    state: Mutex<State>,
}

impl FakeUnit {
    fn feel(&self, mood: Mood) {
        self.state.lock().mood = mood;
    }

    fn done(&self) -> Vec<[u64; 2]> {
        core::mem::take(&mut self.state.lock().done)
    }

    fn register(&self, offset: usize) -> u64 {
        self.state.lock().registers[offset / 8]
    }

    fn set_status(&self, bits: u64) {
        self.state.lock().rings[4] |= bits;
    }

    fn log(&self, words: [u64; 2]) {
        let mut state = self.state.lock();
        let at = (state.registers[reg::EVENT_BASE / 8] & entry::ADDRESS) + state.rings[3];
        self.memory.word(at).store(words[0], Ordering::Release);
        self.memory.word(at + 8).store(words[1], Ordering::Release);
        state.rings[3] = (state.rings[3] + 16) % 4096;
    }
}

impl State {
    fn run(&mut self, memory: &Memory) {
        let mut base = self.registers[reg::COMMAND_BASE / 8];
        assert!(base >> 56 == 8 || base == 0);
        base &= entry::ADDRESS;
        while self.rings[4] & status::CMD_BUF_RUN != 0
            && self.mood != Mood::Deaf
            && self.rings[0] != self.rings[1]
        {
            let at = base + self.rings[0];
            let word = |at| memory.word(at).load(Ordering::Acquire);
            let command = [word(at), word(at + 8)];
            match command::opcode(command[0]) {
                1 if command[0] & 1 != 0 => {
                    memory
                        .word(command[0] & entry::ADDRESS | command[0] & 0xff8)
                        .store(command[1], Ordering::Release);
                }
                1 | 2 | 3 | 8 => self.done.push(command),
                _ => {
                    self.rings[4] &= !status::CMD_BUF_RUN;
                    return;
                }
            }
            self.rings[0] = (self.rings[0] + 16) % 4096;
        }
    }
}

impl fake::Unit for FakeUnit {
    fn read(&self, offset: usize, _: u32) -> u64 {
        let state = self.state.lock();
        match state.mood {
            Mood::Gone => u64::MAX,
            Mood::Zeros => 0,
            _ if offset < 0x40 => state.registers[offset / 8],
            _ => state.rings[(offset - 0x2000) / 8],
        }
    }

    fn write(&self, offset: usize, _: u32, value: u64) {
        let mut state = self.state.lock();
        if matches!(state.mood, Mood::Gone | Mood::Zeros) {
            return;
        }
        let mut was = 0;
        match offset {
            reg::STATUS => state.rings[4] &= !(value & 7),
            0x2000.. => state.rings[(offset - 0x2000) / 8] = value,
            reg::CONTROL => was = core::mem::replace(&mut state.registers[offset / 8], value),
            _ => state.registers[offset / 8] = value,
        }
        if offset == reg::CONTROL {
            state.controls.push(value);
            let is_on = |value: u64, bit: u64| value & control::IOMMU_EN != 0 && value & bit != 0;
            for (bit, run) in
                [(control::CMD_BUF_EN, status::CMD_BUF_RUN), (control::EVENT_LOG_EN, status::EVENT_LOG_RUN)]
            {
                match state.mood {
                    Mood::Idle => {}
                    Mood::Busy => state.rings[4] |= run,
                    // An overflowed log restarts when its bit is set, and not while it stays set.
                    _ if bit == control::EVENT_LOG_EN && is_on(value, bit) && is_on(was, bit) => {}
                    _ if is_on(value, bit) => state.rings[4] |= run,
                    _ => state.rings[4] &= !run,
                }
            }
        }
        state.run(&self.memory);
    }
}

/// Frames of memory: the device table has at most two here.
const FRAMES: usize = 8;

/// The header of an IOMMU's capability block, with an Extended Feature register.
const HEADER: u32 = capability::OF_AN_IOMMU | capability::EFR_SUP;

fn host(features: u64) -> (FakeHost<FakeUnit>, Memory) {
    host_with(Memory::new(FRAMES), features)
}

fn host_with(memory: Memory, features: u64) -> (FakeHost<FakeUnit>, Memory) {
    let mut registers = [0; 8];
    registers[reg::EXTENDED_FEATURE / 8] = features;
    let state = State { mood: Mood::Well, registers, rings: [0; 5], done: Vec::new(), controls: Vec::new() };
    (FakeHost::new(FakeUnit { memory: memory.clone(), state: Mutex::new(state) }, &memory), memory)
}

fn config() -> Config {
    Config { last_device: 0xff, capability: None }
}

fn started() -> (Unit<FakeHost<FakeUnit>>, Memory) {
    let (host, memory) = host(feature::IA_SUP);
    (Unit::start(host, config()).unwrap(), memory)
}

fn enabled() -> (Unit<FakeHost<FakeUnit>>, Memory) {
    let (unit, memory) = started();
    unit.enable().unwrap();
    assert_eq!(unit.host().unit().done(), [command::ALL]);
    (unit, memory)
}

fn table(domain: u16) -> Attachment<AmdV1> {
    Attachment::Table { domain: DomainId(domain), root: PhysAddr::new(0x7000), format: AmdV1::four_level() }
}

fn attach(unit: &Unit<FakeHost<FakeUnit>>, device: u32, to: Attachment<AmdV1>) -> Result<(), UnitError> {
    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DeviceId(device), to) }
}

const DEVICE: u32 = 0x28;

/// A device's entry, found from the registers.
fn entry_of(unit: &Unit<FakeHost<FakeUnit>>, memory: &Memory) -> [u64; 4] {
    let base = unit.host().unit().register(reg::DEVICE_TABLE_BASE);
    assert_eq!(base & 0x1ff, 1, "two frames");
    let word = |index: u64| memory.word((base & entry::ADDRESS) + u64::from(DEVICE) * 32 + index * 8);
    [0, 1, 2, 3].map(|index| word(index).load(Ordering::Acquire))
}

#[test]
fn what_is_no_unit_is_not_taken_for_one() {
    for mood in [Mood::Gone, Mood::Zeros] {
        let (host, _) = host(0);
        host.unit().feel(mood);
        assert!(matches!(Unit::start(host, config()), Err(UnitError::NotThere { .. })), "{mood:?}");
    }
    let (host, memory) = host(0);
    let config = Config { capability: Some(0x0012_0005), ..config() };
    assert!(matches!(Unit::start(host, config), Err(UnitError::NotThere { .. })));
    assert_eq!(memory.taken(), 0);
}

#[test]
fn capabilities() {
    for (features, header, levels) in [
        (0, None, Some(4)),
        (1 << 10, None, Some(5)),
        (2 << 10, Some(HEADER), Some(6)),
        (3 << 10, Some(HEADER), None),
        // No Extended Feature register: its offset may have another register.
        (3 << 10, Some(capability::OF_AN_IOMMU), Some(4)),
    ] {
        let (host, memory) = host(features);
        match (Unit::start(host, Config { capability: header, ..config() }), levels) {
            (Ok(unit), Some(levels)) => {
                assert_eq!((unit.capabilities().levels(), unit.caches_absent()), (levels, false));
                let last = if levels == 6 { u64::MAX } else { (1 << (12 + 9 * levels)) - 1 };
                assert_eq!(unit.last_iova(), Iova::new(last));
                let five = Attachment::Table {
                    domain: DomainId(1),
                    root: PhysAddr::new(0x7000),
                    format: AmdV1::five_level(),
                };
                let refused = Err(UnitError::NoSuchTables { levels: 5 });
                assert_eq!(attach(&unit, DEVICE, five), if levels > 4 { Ok(()) } else { refused });
            }
            (Err(error), None) => {
                let (what, register) = ("page tables for host translation", "Extended Feature");
                assert_eq!(error, UnitError::Lacks { what, register, value: features });
                assert_eq!(memory.taken(), 0);
            }
            (other, _) => panic!("{features:#x} {header:?}: {:?}", other.map(|_| ())),
        }
    }
}

/// Hardware has a bug with them (see `AmdV1`), however many levels it walks.
#[test]
fn domains_get_no_pages_of_512_gib() {
    for levels in [0, 1 << 10, 2 << 10] {
        let (host, memory) = host(levels);
        let unit = Unit::start(host, config()).unwrap();
        let sizes = PageTable::new(memory, unit.layout().unwrap()).unwrap().page_sizes();
        assert!(sizes.contains(PageSize::SIZE_1G));
        let larger = (39..64).filter_map(PageSize::from_shift).find(|size| sizes.contains(*size));
        assert_eq!(larger, None);
    }
}

#[test]
fn what_is_no_memory_is_kept_out_of_use() {
    let (host, _) = host(0);
    let unit = Unit::start(host, config()).unwrap();
    let said: Vec<_> = unit.reserved().iter().map(|range| (range.start().get(), range.len())).collect();
    assert_eq!(said, [(0xfee0_0000, 1 << 20), (1012 << 30, 12 << 30)]);
}

/// Section 2.2.2: a frame has the entries of 128 devices, and the register has the number of frames minus one.
#[test]
fn the_device_table_has_an_entry_for_each_device_and_no_more_frames() {
    for (last_device, frames) in
        [(0, 1), (0x28, 1), (127, 1), (128, 2), (129, 2), (255, 2), (256, 3), (0x3ff, 8)]
    {
        let (host, memory) = host_with(Memory::new(16), feature::IA_SUP);
        let unit = Unit::start(host, Config { last_device, ..config() }).unwrap();
        assert_eq!(memory.taken(), frames + 3, "the command buffer, what it confirms, and the log");
        unit.enable().unwrap();
        let base = unit.host().unit().register(reg::DEVICE_TABLE_BASE);
        assert_eq!(base & 0x1ff, frames as u64 - 1, "{last_device}");
        let entry = |device: u64| {
            let at = (base & entry::ADDRESS) + device * 32;
            [0, 8, 16, 24].map(|word| memory.word(at + word).load(Ordering::Acquire))
        };
        for device in 0..frames as u64 * 128 {
            assert_eq!(entry(device), [entry::BLOCKED, 0, 0, 0], "{device}");
        }
        attach(&unit, last_device.into(), table(7)).unwrap();
        assert_eq!(entry(last_device.into())[1], 7);
        let (device, last) = (u32::from(last_device) + 1, u32::from(last_device));
        assert_eq!(attach(&unit, device, table(8)), Err(UnitError::NoSuchDevice { device, last }));
    }
}

/// A register that reads all ones does not exist, and must not be written back.
#[test]
fn a_unit_that_is_gone_is_not_told_what_it_seems_to_say() {
    let (unit, _) = enabled();
    let log = unit.host().log().clone();
    log.lock().clear();
    unit.host().unit().feel(Mood::Gone);
    let ended = unit.shut_down();
    assert!(matches!(ended, Err(UnitError::TimedOut { .. } | UnitError::Unconfirmed(_))), "{ended:?}");
    let told: Vec<_> =
        log.lock().iter().filter(|seen| matches!(seen, fake::Seen::Register(0x18, ..))).copied().collect();
    assert_eq!(told, []);
}

#[test]
fn memory_that_runs_out_is_given_back() {
    for frames in 0..5 {
        let (host, memory) = host(0);
        let kept: Vec<_> =
            (0..FRAMES - frames).map(|_| portcullis::platform::Frames::alloc(&memory, 1).unwrap()).collect();
        assert_eq!(Unit::start(host, config()).map(|_| ()), Err(UnitError::OutOfMemory), "{frames}");
        assert_eq!(memory.taken(), kept.len());
    }
}

#[test]
fn a_life() {
    let (unit, memory) = started();
    let fake = || unit.host().unit();
    // Left by firmware.
    fake().state.lock().registers[reg::EXCLUSION_BASE / 8] = 0x8000_0003;
    fake().state.lock().registers[reg::CONTROL / 8] = control::FIRMWARES | 1 << 3 | 1 << 16;
    assert_eq!(attach(&unit, DEVICE, Attachment::PassThrough), Ok(()));
    assert_eq!(unit.detach(DeviceId(DEVICE)), Ok(()));
    assert_eq!(attach(&unit, DEVICE, table(7)), Ok(()));
    assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
    assert_eq!(fake().done(), [[0; 2]; 0], "a unit that is off reads no commands");
    unit.enable().unwrap();
    assert_eq!(fake().register(reg::EXCLUSION_BASE), 0);
    let on = control::IOMMU_EN | control::CMD_BUF_EN | control::EVENT_LOG_EN | control::COHERENT;
    assert_eq!(fake().register(reg::CONTROL), control::FIRMWARES | on);
    let root = 0x6000_0000_0000_7803;
    assert_eq!(entry_of(&unit, &memory), [root, 7, 0, 0], "V, TV, mode 4, IR, IW");
    assert_eq!(attach(&unit, DEVICE, table(8)), Err(UnitError::Attached { device: DEVICE }));
    fake().done();
    let devtab = command::devtab_entry(DEVICE as u16);
    let pages = |domain| command::pages(domain, 0, EVERYTHING, false);
    unit.detach(DeviceId(DEVICE)).unwrap();
    assert_eq!(fake().done(), [devtab, command::BARRIER, pages(7)]);
    assert_eq!(entry_of(&unit, &memory), [3, 0, 0, 0]);
    let absent = UnitError::NotAttached { device: DEVICE };
    assert_eq!(unit.detach(DeviceId(DEVICE)), Err(absent));
    assert_eq!(attach(&unit, DEVICE, Attachment::PassThrough), Ok(()));
    assert_eq!(entry_of(&unit, &memory)[0], 0x6000_0000_0000_0003);
    assert_eq!(fake().done(), [devtab], "the entry that refused was valid");
    unit.invalidate(DomainId(9), Invalidation::Domain).unwrap();
    assert_eq!(fake().done(), [pages(9)]);

    let (first, last) = unit.domains();
    assert_eq!(attach(&unit, 1, table(last.0)), Ok(()));
    for none in [first.0 - 1, last.0 + 1] {
        assert!(matches!(attach(&unit, 2, table(none)), Err(UnitError::NoSuchDomain { .. })));
    }
    for device in [0x100, 0x1_0000, u32::MAX] {
        assert_eq!(attach(&unit, device, table(7)), Err(UnitError::NoSuchDevice { device, last: 0xff }));
        assert_eq!(unit.detach(DeviceId(device)), Err(UnitError::NoSuchDevice { device, last: 0xff }));
    }
    for root in [0x7001, 1 << 52] {
        let to =
            Attachment::Table { domain: DomainId(7), root: PhysAddr::new(root), format: AmdV1::four_level() };
        assert_eq!(attach(&unit, 3, to), Err(UnitError::BadRoot { root: PhysAddr::new(root) }));
    }
    assert_eq!(memory.taken(), 5);
    unit.shut_down().unwrap();
    assert_eq!(memory.taken(), 0);
}

#[test]
fn a_unit_without_a_command_for_everything_is_told_one_by_one() {
    let (host, _) = host(0);
    let unit = Unit::start(host, config()).unwrap();
    unit.enable().unwrap();
    let done = unit.host().unit().done();
    // Of all devices, because firmware's table may have had more than 0x100.
    let devices = (0..=u16::MAX).map(command::devtab_entry);
    let pages = |domain| command::pages(domain, 0, EVERYTHING, false);
    assert!(done.into_iter().eq(devices.chain((0..=u16::MAX).map(pages))));
}

#[test]
fn a_unit_that_caches_what_is_absent_is_told_of_what_is_there() {
    let (host, _) = host(feature::IA_SUP);
    let config = Config { capability: Some(HEADER | capability::NP_CACHE), ..config() };
    let unit = Unit::start(host, config).unwrap();
    assert!(unit.caches_absent());
    unit.enable().unwrap();
    unit.host().unit().done();
    attach(&unit, DEVICE, table(7)).unwrap();
    let done = unit.host().unit().done();
    assert_eq!(done[0], command::devtab_entry(DEVICE as u16));
    assert_eq!(done[2], command::pages(7, 0, EVERYTHING, false));
}

#[test]
fn a_unit_that_does_not_answer_is_an_error() {
    let (unit, _) = started();
    unit.host().unit().feel(Mood::Idle);
    // Only CMD_BUF_RUN counts.
    unit.host().unit().set_status(!status::CMD_BUF_RUN & 0x7f_ffff);
    let said = unit.enable().unwrap_err();
    assert!(matches!(said, UnitError::TimedOut { what: "turn its command buffer on", .. }), "{said}");
    unit.host().unit().state.lock().rings[4] = 0;
    unit.host().unit().feel(Mood::Well);
    assert_eq!(unit.enable(), Ok(()), "another call");
    attach(&unit, DEVICE, table(7)).unwrap();

    for mood in [Mood::Deaf, Mood::Gone] {
        unit.host().unit().feel(mood);
        let timed_out = |result| matches!(result, Err(InvalidationError::TimedOut { .. }));
        // First with room in the ring, then without.
        for _ in 0..300 {
            assert!(timed_out(unit.invalidate(DomainId(7), Invalidation::Domain)), "{mood:?}");
        }
        assert!(matches!(unit.enable(), Err(UnitError::Unconfirmed(_) | UnitError::TimedOut { .. })));
        assert!(matches!(unit.detach(DeviceId(DEVICE)), Err(UnitError::Unconfirmed(_))), "{mood:?}");
        for _ in 0..300 {
            assert_eq!(unit.next_fault(), None);
        }
    }
    unit.host().unit().feel(Mood::Zeros);
    assert!(unit.invalidate(DomainId(7), Invalidation::Domain).is_err());
    unit.host().unit().feel(Mood::Well);
    assert_eq!(unit.detach(DeviceId(DEVICE)), Ok(()), "it was attached until now");
    // However long nothing answered, no log entry was skipped.
    unit.host().unit().log([2 << 60 | u64::from(DEVICE), 0]);
    assert_eq!(unit.next_fault().map(|fault| fault.device), Some(DeviceId(DEVICE)));

    for mood in [Mood::Gone, Mood::Busy] {
        let (unit, memory) = enabled();
        unit.host().unit().feel(mood);
        assert!(matches!(unit.shut_down(), Err(UnitError::TimedOut { .. })), "{mood:?}");
        assert_eq!(memory.taken(), 5, "the unit may go on");
    }
    // Firmware's rings, which do not stop.
    let (host, memory) = host(0);
    host.unit().feel(Mood::Busy);
    assert!(matches!(Unit::start(host, config()), Err(UnitError::TimedOut { .. })));
    assert_eq!(memory.taken(), 5, "as above");
}

#[test]
fn a_unit_that_stops_is_reported_and_goes_on() {
    let (unit, _) = enabled();
    let device = Invalidation::DeviceTlb { device: DeviceId(DEVICE), range: None };
    let requests =
        [Invalidation::Domain, device].map(|invalidation| Request { domain: DomainId(7), invalidation });
    for _ in 0..300 {
        assert_eq!(unit.submit(&requests), Err(InvalidationError::Rejected { code: 4 }));
        assert_eq!(unit.invalidate(DomainId(8), Invalidation::Domain), Ok(()));
    }
    let done = unit.host().unit().done();
    let of = |domain| command::pages(domain, 0, EVERYTHING, false);
    assert_eq!(done.iter().filter(|command| **command == of(8)).count(), 300);
}

#[test]
fn events_are_read_once_and_in_order() {
    let (unit, memory) = enabled();
    let fake = || unit.host().unit();
    assert_eq!(unit.next_fault(), None);
    let fault = |device: u64| [2 << 60 | 7 << 32 | device, device << 12];
    for lap in 0..5 {
        for index in 0..200 {
            fake().log(fault(lap * 200 + index));
        }
        fake().log([5 << 60, 0x1000]);
        for index in 0..200 {
            let read = unit.next_fault().unwrap();
            let device = lap * 200 + index;
            assert_eq!(read.device, DeviceId(device as u32));
            assert_eq!((read.address, read.reason), (Some(Iova::new(device << 12)), Reason::NotMapped));
        }
        assert_eq!(unit.next_fault(), None);
        let state = fake().state.lock();
        assert_eq!(state.rings[2], state.rings[3], "the unit may write there again");
    }
    let base = fake().register(reg::EVENT_BASE) & entry::ADDRESS;
    assert!((0..512).all(|word| memory.word(base + word * 8).load(Ordering::Acquire) == 0));
}

#[test]
fn a_log_that_was_full_goes_on() {
    let (unit, _) = enabled();
    let fake = || unit.host().unit();
    fake().log([2 << 60 | event::PR, 0]);
    fake().set_status(status::EVENT_OVERFLOW);
    fake().state.lock().rings[4] &= !status::EVENT_LOG_RUN;
    assert_eq!(unit.next_fault().map(|fault| fault.reason), Some(Reason::NotAttached));
    assert_eq!(unit.next_fault(), None);
    let status = fake().state.lock().rings[4];
    assert_eq!(status & (status::EVENT_OVERFLOW | status::EVENT_LOG_RUN), status::EVENT_LOG_RUN);
    assert_eq!(unit.invalidate(DomainId(8), Invalidation::Domain), Ok(()), "its commands were left alone");
    // A log that has not overflowed is not stopped: events of that moment would be lost.
    fake().state.lock().controls.clear();
    fake().log([2 << 60 | event::PR, 0]);
    assert!(unit.next_fault().is_some() && unit.next_fault().is_none());
    assert!(fake().state.lock().controls.is_empty());
}

#[test]
fn an_entry_that_cannot_be_seen_yet_is_waited_for_and_not_for_ever() {
    let (unit, _) = enabled();
    let fake = || unit.host().unit();
    // Each of them, however long the previous wait took.
    for _ in 0..3 {
        fake().log([0, 0]);
        fake().log([2 << 60 | DEVICE as u64, 0]);
        assert_eq!(unit.next_fault(), None);
        let looks = (1..1000).find(|_| unit.next_fault().is_some()).unwrap();
        assert!((50..200).contains(&looks), "{looks}: the host's patience");
    }
}
