//! A unit that executes commands in the doorbell, and drivers of it.

use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::pgtable::Arm;

use super::super::layout::{cr0, gbpa, gerror, idr0, idr1, reg};
use super::super::{Stage, Unit};
use crate::fake::{FakeHost, Memory, Unit as Registers};
use crate::host::UnitError;
use crate::iommu::{Attachment, Iommu};
use crate::sync::{Mutex, Ordering};

/// Both stages, AArch64, coherent, 16-bit ASIDs and VMIDs, two-level tables.
pub(super) const IDR0: u32 = 0x3 | idr0::TTF_AARCH64 | idr0::COHACC | idr0::ASID16 | idr0::VMID16 | 1 << 27;
/// 16 bits of streams, 2^7 events, 2^8 commands.
pub(super) const IDR1: u32 = 16 | 7 << 16 | 8 << 21 | idr1::ATTR_TYPES_OVR;
/// Ranges.
pub(super) const IDR3: u32 = 1 << 10;
/// 44 bits, all granules.
pub(super) const IDR5: u32 = 4 | 7 << 4;

/// A unit that executes commands in the doorbell.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) memory: Memory,
    pub(super) state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    /// Registers of page 0, and the event queue's two indices.
    pub(super) words: Vec<u32>,
    pub(super) indices: [u32; 2],
    /// Executed commands, each with the first word of the stream's entry that it invalidates.
    pub(super) done: Vec<([u64; 2], u64)>,
    /// Writes of CR0 and GBPA.
    pub(super) controls: Vec<(usize, u32)>,
    /// A register whose writes it ignores.
    pub(super) deaf: Option<usize>,
    /// It consumes no commands.
    pub(super) dead: bool,
    /// It refuses commands with this code.
    pub(super) refused: Option<u64>,
    /// CR0ACK takes these bits from CR0.
    pub(super) acknowledged: u32,
    /// CR0ACK always has these bits.
    pub(super) stuck: u32,
    /// How many reads of GBPA find the previous change outstanding.
    pub(super) updating: u32,
}

impl State {
    pub(super) fn word(&self, register: usize) -> u32 {
        self.words[register / 4]
    }

    pub(super) fn base(&self, register: usize) -> u64 {
        u64::from(self.word(register)) | u64::from(self.word(register + 4)) << 32
    }

    pub(super) fn entry(&self, memory: &Memory, stream: u32) -> u64 {
        let (base, shape) = (self.base(reg::STRTAB_BASE), self.word(reg::STRTAB_BASE_CFG));
        let load = |at: u64| memory.word(at).load(Ordering::Relaxed);
        if base == 0 {
            return 0;
        }
        if shape >> 16 == 0 {
            return load(base + u64::from(stream) * 64);
        }
        let split = shape >> 6 & 0x1f;
        let first = load(base + u64::from(stream >> split) * 8);
        if first & 0x1f != u64::from(split) + 1 {
            return 0;
        }
        load((first & !0x1f) + u64::from(stream & ((1 << split) - 1)) * 64)
    }

    pub(super) fn work(&mut self, memory: &Memory) {
        let on = self.word(reg::CR0) & cr0::CMDQEN != 0;
        let stopped = (self.word(reg::GERROR) ^ self.word(reg::GERRORN)) & gerror::CMDQ != 0;
        if !on || stopped || self.dead {
            return;
        }
        let base = self.base(reg::CMDQ_BASE);
        let size = 1_u32 << (base & 0x1f);
        let mut cons = self.word(reg::CMDQ_CONS) & 0xf_ffff;
        while cons != self.word(reg::CMDQ_PROD) {
            let at = (base & !0x1f) + u64::from(cons % size) * 16;
            let [low, high] = [at, at + 8].map(|at| memory.word(at).load(Ordering::Relaxed));
            if Some(low & 0xff) == self.refused {
                self.words[reg::CMDQ_CONS / 4] = cons | 1 << 24;
                self.words[reg::GERROR / 4] ^= gerror::CMDQ;
                return;
            }
            let entry = if low & 0xff == 3 { self.entry(memory, (low >> 32) as u32) } else { 0 };
            self.done.push(([low, high], entry));
            cons = (cons + 1) % (size * 2);
        }
        self.words[reg::CMDQ_CONS / 4] = cons;
    }
}

impl Registers for Model {
    fn read(&self, offset: usize, bits: u32) -> u64 {
        let mut state = self.state.lock();
        match offset {
            reg::GBPA if state.updating > 0 => {
                state.updating -= 1;
                let value = state.word(offset);
                state.words[offset / 4] &= if state.updating > 0 { u32::MAX } else { !gbpa::UPDATE };
                value.into()
            }
            reg::EVENTQ_PROD => u64::from(state.indices[0]),
            reg::EVENTQ_CONS => u64::from(state.indices[1]),
            // It claims to have ECMDQs, and has none.
            _ if offset / 4 >= state.words.len() => u64::MAX,
            _ if bits == 64 => state.base(offset),
            _ => u64::from(state.word(offset)),
        }
    }

    fn write(&self, offset: usize, bits: u32, value: u64) {
        let mut state = self.state.lock();
        if matches!(offset, reg::CR0 | reg::GBPA) {
            state.controls.push((offset, value as u32));
        }
        assert!(offset != reg::GBPA || state.updating == 0, "written while a change is under way");
        if state.deaf == Some(offset) {
            return;
        }
        match offset {
            reg::EVENTQ_PROD => state.indices[0] = value as u32,
            reg::EVENTQ_CONS => state.indices[1] = value as u32,
            _ if offset / 4 >= state.words.len() => panic!("nothing is at {offset:#x}"),
            _ => {
                state.words[offset / 4] = value as u32;
                if bits == 64 {
                    state.words[offset / 4 + 1] = (value >> 32) as u32;
                }
            }
        }
        match offset {
            reg::CR0 => state.words[reg::CR0ACK / 4] = value as u32 & state.acknowledged | state.stuck,
            reg::IRQ_CTRL => state.words[reg::IRQ_CTRLACK / 4] = value as u32,
            reg::GBPA => state.words[reg::GBPA / 4] &= !gbpa::UPDATE,
            _ => {}
        }
        state.work(&self.memory);
    }
}

pub(super) type Fake<const GRANULE: u32 = 12> = Unit<FakeHost<Model>, GRANULE>;

pub(super) fn host_with(memory: &Memory, ids: [u32; 4], change: impl FnOnce(&mut State)) -> FakeHost<Model> {
    let mut words = alloc::vec![0; 64];
    for (register, id) in [reg::IDR0, reg::IDR1, reg::IDR3, reg::IDR5].into_iter().zip(ids) {
        words[register / 4] = id;
    }
    let mut state = State {
        words,
        indices: [0; 2],
        done: Vec::new(),
        controls: Vec::new(),
        deaf: None,
        dead: false,
        refused: None,
        acknowledged: u32::MAX,
        stuck: 0,
        updating: 0,
    };
    change(&mut state);
    FakeHost::new(Model { memory: memory.clone(), state: Mutex::new(state) }, memory)
}

pub(super) fn started(ids: [u32; 4], change: impl FnOnce(&mut State)) -> Result<Fake, UnitError> {
    Unit::start(host_with(&Memory::new(64), ids, change))
}

pub(super) const ALL: [u32; 4] = [IDR0, IDR1, IDR3, IDR5];

pub(super) fn on(ids: [u32; 4]) -> Fake {
    let unit = started(ids, |_| {}).unwrap();
    unit.enable().unwrap();
    change(&unit, |state| state.done.clear());
    unit
}

pub(super) fn change<R, const GRANULE: u32>(unit: &Fake<GRANULE>, f: impl FnOnce(&mut State) -> R) -> R {
    f(&mut unit.host().unit().state.lock())
}

pub(super) fn done(unit: &Fake) -> Vec<[u64; 2]> {
    change(unit, |state| state.done.drain(..).map(|(command, _)| command).collect())
}

pub(super) fn attach(unit: &Fake, device: u32, to: Attachment<Arm<12>>) -> Result<(), UnitError> {
    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DeviceId(device), to) }
}

pub(super) fn table(stage: Stage, domain: u16, root: u64) -> Attachment<Arm<12>> {
    let format = match stage {
        Stage::One => Arm::stage_1(40, 40).unwrap(),
        Stage::Two => Arm::stage_2(40, 40).unwrap(),
    };
    Attachment::Table { domain: DomainId(domain), root: PhysAddr::new(root), format }
}

pub(super) fn page(domain: u16) -> Request {
    let range = IovaRange::new(Iova::new(0x5000), 0x1000).unwrap();
    Request { domain: DomainId(domain), invalidation: Invalidation::Range { range, leaf_only: true } }
}
