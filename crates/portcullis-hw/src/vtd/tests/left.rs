//! State left by firmware, or the previous system: an invalidation queue, a fault log, protected memory; and registers of no unit.

use super::*;
use crate::host::UnitError;

/// Of CAP: 16 bits of domains, four levels of 48 bits.
const CAP: u64 = 6 | 1 << 10 | 47 << 16;
/// Coherent, with a queue.
const ECAP: u64 = 3;
/// Protected memory, low.
const PLMR: u64 = 1 << 5;
const QIE: u32 = 1 << 26;
const EAFL: u32 = 1 << 28;
const PMEN_EPM: u64 = 1 << 31;
/// Offset of the fault records.
const RECORDS: usize = 0x200;
/// Invalidation queue error: the queue has stopped.
const IQE: u64 = 1 << 4;

#[derive(Debug, Default)]
pub(super) struct LeftState {
    pub version: u64,
    pub cap: u64,
    pub ecap: u64,
    pub status: u32,
    pub fsts: u64,
    pub iqercd: u64,
    pub records: Vec<[u64; 2]>,
    pub queue: u64,
    pub head: u64,
    pub tail: u64,
    /// The queue is this driver's.
    pub is_ours: bool,
    /// It never consumes firmware's descriptors.
    pub is_stuck: bool,
    pub pmen: u64,
    /// Polls until protected memory is open; never, at `u32::MAX`.
    pub opens_after: u32,
    /// Bytes of firmware's queue that were not consumed when it was turned off.
    pub lost: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Left {
    memory: Memory,
    pub state: Mutex<LeftState>,
}

impl Registers for Left {
    fn read(&self, offset: usize, _: u32) -> u64 {
        let mut state = self.state.lock();
        match offset {
            reg::VER => state.version,
            reg::CAP => state.cap,
            reg::ECAP => state.ecap,
            reg::GSTS => state.status.into(),
            reg::FSTS => {
                let is_recorded = state.records.iter().any(|[_, high]| high >> 63 != 0);
                state.fsts | u64::from(is_recorded) << 1
            }
            reg::IQERCD => state.iqercd,
            RECORDS.. => {
                let (index, word) = ((offset - RECORDS) / 16, (offset - RECORDS) / 8 % 2);
                assert!(index <= (state.cap >> 40 & 0xff) as usize, "{offset:#x} is of no record");
                state.records.get(index).map_or(0, |record| record[word])
            }
            reg::IQH => {
                let runs = state.status & QIE != 0 && state.fsts & IQE == 0 && !state.is_stuck;
                if !state.is_ours && runs && state.head != state.tail {
                    state.head += 16;
                }
                state.head
            }
            reg::IQT => state.tail,
            reg::PMEN if state.pmen & PMEN_EPM == 0 && state.opens_after == 0 => state.pmen & !1,
            reg::PMEN => {
                if state.pmen & PMEN_EPM == 0 && state.opens_after < u32::MAX {
                    state.opens_after -= 1;
                }
                state.pmen | 1
            }
            _ => 0,
        }
    }

    fn write(&self, offset: usize, _: u32, value: u64) {
        let mut state = self.state.lock();
        match offset {
            reg::GCMD => {
                let value = value as u32;
                if state.status & !value & QIE != 0 && !state.is_ours {
                    state.lost = Some(state.tail - state.head);
                }
                // Root and interrupt table pointers stay taken.
                state.status = value & 0x96ff_ffff | (state.status | value) & 0x4100_0000;
            }
            RECORDS.. if offset % 16 == 12 => {
                if let Some(record) = state.records.get_mut((offset - RECORDS) / 16) {
                    record[1] &= !(value << 32);
                }
            }
            reg::FSTS => state.fsts &= !value,
            reg::PMEN => state.pmen = value & !1,
            reg::IQA => {
                assert_eq!(state.status & QIE, 0, "the queue moves while the unit reads it");
                (state.queue, state.head, state.is_ours) = (value, 0, true);
            }
            reg::IQT => {
                state.tail = value;
                let size = if state.queue & 1 << 11 != 0 { 32 } else { 16 };
                while state.is_ours && state.status & QIE != 0 && state.head != value {
                    let word = |at: u64| self.memory.word(at).load(Ordering::Acquire);
                    let at = (state.queue & !0xfff) + state.head;
                    if let [low, address] = [word(at), word(at + 8)]
                        && low & 0xf == 5
                    {
                        self.memory.word(address).store(low >> 32, Ordering::Release);
                    }
                    state.head = (state.head + size) % (size * 256);
                }
            }
            _ => {}
        }
    }
}

pub(super) fn host(change: impl FnOnce(&mut LeftState)) -> FakeHost<Left> {
    let memory = Memory::new(FRAMES as usize);
    let mut state =
        LeftState { version: 0x10, cap: CAP | cap::DWD | cap::DRD, ecap: ECAP, ..LeftState::default() };
    change(&mut state);
    FakeHost::new(Left { memory: memory.clone(), state: Mutex::new(state) }, &memory)
}

pub(super) fn state<R>(unit: &Unit<FakeHost<Left>>, f: impl FnOnce(&mut LeftState) -> R) -> R {
    f(&mut unit.host().unit().state.lock())
}

/// It may have stopped at a descriptor; and it may never resume.
#[test]
fn a_queue_that_firmware_has_left_on_is_worked_off_and_turned_off() {
    for (fsts, is_stuck) in [(0, false), (IQE, false), (0, true)] {
        let unit = Unit::start(host(|state| {
            (state.status, state.fsts, state.is_stuck) = (QIE, fsts, is_stuck);
            (state.head, state.tail) = (0x40, 0x120);
        }))
        .unwrap();
        let (lost, status) = state(&unit, |state| (state.lost, state.status));
        assert_eq!(lost, Some(if is_stuck { 0xe0 } else { 0 }));
        assert_eq!(status & QIE, QIE, "its own queue is on");
        unit.enable().unwrap();
        unit.invalidate(DomainId(7), Invalidation::Domain).unwrap();
    }
    // A queue that is off needs no wait.
    let unit = Unit::start(host(|state| state.tail = 0x120)).unwrap();
    assert_eq!(state(&unit, |state| (state.lost, state.status & QIE)), (None, QIE));
}

#[test]
fn a_log_of_faults_in_firmwares_memory_is_turned_off_and_no_other() {
    for left in [EAFL, EAFL | QIE, 0] {
        let unit = Unit::start(host(|state| state.status = left)).unwrap();
        assert_eq!(state(&unit, |state| state.status), QIE, "{left:#x}");
    }
}

#[test]
fn memory_that_firmware_protects_is_opened_where_there_is_such() {
    let enabled = |cap, opens_after| {
        let unit = Unit::start(host(|state| {
            state.cap |= cap;
            (state.pmen, state.opens_after) = (PMEN_EPM | 6, opens_after);
        }))
        .unwrap();
        let result = unit.enable();
        (result, state(&unit, |state| (state.pmen, state.opens_after)))
    };
    for cap in [PLMR, PLMR << 1] {
        assert_eq!(enabled(cap, 5), (Ok(()), (6, 0)), "it returns when the memory is open");
        assert!(matches!(enabled(cap, u32::MAX), (Err(UnitError::TimedOut { .. }), (6, _))));
    }
    // Without protected memory the register does not exist.
    assert_eq!(enabled(0, u32::MAX), (Ok(()), (PMEN_EPM | 6, u32::MAX)));
}

#[test]
fn what_is_no_unit_or_does_not_wait_for_accesses_is_not_taken() {
    type Change = fn(&mut LeftState);
    let none: [(Change, &str); 4] = [
        (|state| state.version = 0, "VER"),
        (|state| state.version = 0xffff_ffff, "VER"),
        (|state| state.cap = u64::MAX, "CAP"),
        (|state| state.ecap = u64::MAX, "ECAP"),
    ];
    for (change, wanted) in none {
        let said = Unit::start(host(change)).map(drop).unwrap_err();
        assert!(matches!(said, UnitError::NotThere { register, .. } if register == wanted), "{said:?}");
    }
    for (version, can, is_one) in [
        (0x10, cap::DWD | cap::DRD, true),
        (0x10, cap::DWD, false),
        (0x10, cap::DRD, false),
        (0x10, 0, false),
        // From version 2 on all drain, asked or not.
        (0x20, 0, true),
        (0x30, cap::DRD, true),
    ] {
        let result = Unit::start(host(|state| (state.version, state.cap) = (version, CAP | can)));
        match result {
            Ok(_) => assert!(is_one, "{version:#x} {can:#x}"),
            Err(error) => {
                assert!(!is_one && matches!(error, UnitError::Lacks { register: "CAP", .. }), "{error:?}");
            }
        }
    }
}

#[test]
fn pages_are_as_large_as_the_unit_has_them() {
    let (two, one) = (cap::PAGES_2M, cap::PAGES_1G);
    for (pages, largest) in [
        (0, PageSize::SIZE_4K),
        (two, PageSize::SIZE_2M),
        (two | one, PageSize::SIZE_1G),
        (one, PageSize::SIZE_4K),
    ] {
        let unit = Unit::start(host(|state| state.cap |= pages)).unwrap();
        let format: VtdSecondStage = unit.layout().unwrap();
        let table = PageTable::new(Memory::new(2), format).unwrap();
        let sizes = table.page_sizes();
        let found = [PageSize::SIZE_1G, PageSize::SIZE_2M, PageSize::SIZE_4K]
            .into_iter()
            .find(|size| sizes.contains(*size));
        assert_eq!(found, Some(largest), "{pages:#x}");
    }
}
