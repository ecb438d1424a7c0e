//! A unit that reads its registers and memory to the letter of the manual, and panics at "UNSPECIFIED". Tests break it in ways that QEMU's
//! never shows.

use alloc::vec::Vec;

use super::super::layout::{FAULTS, cap, command, csr, ddtp, directory, record, reg};
use crate::fake::{FakeHost, Memory, Unit};
use crate::queue::Command;
use crate::sync::{Mutex, Ordering};

/// Version 1, Sv39 and Sv48 of both stages, 56 bits of addresses.
pub const BOTH: u64 = 0x10 | cap::SV39 | cap::SV48 | cap::SV39X4 | cap::SV48X4 | 56 << 32;

#[derive(Debug)]
pub struct Model {
    memory: Memory,
    state: Mutex<State>,
}

#[derive(Debug)]
pub struct State {
    words: Vec<u32>,
    /// Supported directory levels.
    pub levels: Vec<u32>,
    /// It replaces an unsupported mode by the next lower one, instead of keeping its own.
    pub takes_another: bool,
    /// Its modes so far.
    pub modes: Vec<u32>,
    /// Executed commands, each with the watched context at that time.
    pub done: Vec<(Command, Option<[u64; 4]>)>,
    /// The device whose context it watches.
    pub watched: Option<u32>,
    /// It fetches no commands.
    pub is_dead: bool,
    /// This register stays busy after a write.
    pub busy: Option<usize>,
    /// Devices do not answer.
    pub is_deaf: bool,
    /// Undefined bits that its queue controls keep.
    pub keeps: u32,
    /// How many reads of its pointer it stays busy after a write of either half.
    pub slow: u32,
    busy_for: u32,
    /// It supports queues of at most 2 entries.
    pub is_small: bool,
    awaited: bool,
}

/// A host with a unit of these capabilities in `mode`, and this many frames.
pub fn host(capabilities: u64, mode: u64, frames: usize) -> FakeHost<Model> {
    let memory = Memory::new(frames);
    let state = State {
        words: alloc::vec![0; 0x400 / 4],
        levels: alloc::vec![1, 2, 3],
        takes_another: false,
        modes: Vec::new(),
        done: Vec::new(),
        watched: None,
        is_dead: false,
        busy: None,
        is_deaf: false,
        keeps: 0,
        slow: 0,
        busy_for: 0,
        is_small: false,
        awaited: false,
    };
    let model = Model { memory: memory.clone(), state: Mutex::new(state) };
    model.set(reg::CAPABILITIES, capabilities);
    model.set(reg::DDTP, mode);
    FakeHost::new(model, &memory)
}

impl Model {
    pub fn state<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.lock())
    }

    /// Sets a 64-bit register, bypassing the rules of writes.
    pub fn set(&self, offset: usize, value: u64) {
        let mut state = self.state.lock();
        state.words[offset / 4] = value as u32;
        state.words[offset / 4 + 1] = (value >> 32) as u32;
    }

    /// The same for 32 bits.
    pub fn set32(&self, offset: usize, value: u32) {
        self.state.lock().words[offset / 4] = value;
    }

    pub fn get(&self, offset: usize) -> u32 {
        self.state.lock().words[offset / 4]
    }

    /// A device's context, if it is valid.
    pub fn context(&self, device: u32) -> Option<[u64; 4]> {
        let words = self.state.lock().context(&self.memory, device)?;
        (words[0] & 1 != 0).then_some(words)
    }

    /// Records a fault, if there is room.
    pub fn fault(&self, header: u64, address: u64) {
        let mut state = self.state.lock();
        let (tail, head) = (state.words[reg::FQT / 4], state.words[reg::FQH / 4]);
        let control = state.words[reg::FQCSR / 4];
        if control & csr::ON == 0 || control & csr::FAULT_ERRORS != 0 {
            return;
        }
        if (tail + 1) % FAULTS == head {
            state.words[reg::FQCSR / 4] |= csr::FAULT_OVERFLOW;
            return;
        }
        let at = address_of(state.wide(reg::FQB)) + u64::from(tail) * 32;
        self.memory.word(at).store(header, Ordering::Relaxed);
        self.memory.word(at + record::ADDRESS as u64 * 8).store(address, Ordering::Relaxed);
        state.words[reg::FQT / 4] = (tail + 1) % FAULTS;
    }
}

fn address_of(value: u64) -> u64 {
    (value & 0x003f_ffff_ffff_fc00) << 2
}

impl State {
    fn wide(&self, offset: usize) -> u64 {
        u64::from(self.words[offset / 4]) | u64::from(self.words[offset / 4 + 1]) << 32
    }

    fn context(&self, memory: &Memory, device: u32) -> Option<[u64; 4]> {
        let is_extended = self.wide(reg::CAPABILITIES) & cap::MSI_FLAT != 0;
        let pointer = self.wide(reg::DDTP);
        let levels = (pointer & ddtp::MODE).checked_sub(1).filter(|levels| (1..=3).contains(levels))?;
        let bits = directory::context_bits(is_extended);
        let mut table = address_of(pointer);
        let mut rest = device;
        for level in (1..levels as u32).rev() {
            let shift = bits + 9 * (level - 1);
            let entry = memory.word(table + u64::from(rest >> shift) * 8).load(Ordering::Relaxed);
            assert_eq!(entry & !0x003f_ffff_ffff_fc01, 0, "reserved bits");
            table = address_of(entry);
            rest %= 1 << shift;
            if entry & directory::VALID == 0 {
                return None;
            }
        }
        assert!(rest < 1 << bits, "a device beyond the width");
        let first = table + u64::from(rest) * directory::context_words(is_extended) as u64 * 8;
        Some(core::array::from_fn(|word| memory.word(first + word as u64 * 8).load(Ordering::Relaxed)))
    }

    fn write(&mut self, memory: &Memory, offset: usize, value: u32) {
        let old = self.words[offset / 4];
        let pointer_mode = self.words[reg::DDTP / 4] & 0xf;
        match offset {
            reg::DDTP => {
                assert_eq!(old & ddtp::BUSY, 0, "written while it was busy");
                let mode = value & 0xf;
                if pointer_mode > 1 {
                    assert_eq!(mode, 0, "from a directory there is no way but through Off");
                    assert_eq!((value ^ old) & !0x1f, 0, "the page number stays");
                }
                let has = |mode: &u32| *mode <= 1 || self.levels.contains(&(mode - 1));
                let taken =
                    if self.takes_another { (0..=mode).rev().find(has) } else { Some(mode).filter(has) };
                if let Some(mode) = taken {
                    self.words[offset / 4] = value & !(0xf | ddtp::BUSY) | mode;
                    self.modes.push(mode);
                }
            }
            0x14 => {
                assert_eq!(self.words[reg::DDTP / 4] & ddtp::BUSY, 0, "written while it was busy");
                assert!(pointer_mode <= 1 || value == old, "the page number stays");
                self.words[offset / 4] = value;
            }
            reg::CQB | reg::FQB => {
                assert_eq!(
                    self.words[(if offset == reg::CQB { reg::CQCSR } else { reg::FQCSR }) / 4] & csr::ON,
                    0
                );
                self.words[offset / 4] = if self.is_small { value & !0x1f } else { value };
            }
            reg::CQCSR | reg::FQCSR | reg::PQCSR => {
                assert_eq!(old & csr::BUSY, 0, "written while it was busy");
                let is_new = value & !old & csr::ENABLE != 0;
                let errors = if is_new { 0 } else { old & 0xf00 & !value };
                let on = if value & csr::ENABLE != 0 { csr::ON } else { 0 };
                self.words[offset / 4] = value & (3 | self.keeps) | errors | on;
                if is_new {
                    let index = if offset == reg::CQCSR { reg::CQH } else { reg::FQT };
                    self.words[index / 4] = 0;
                }
            }
            reg::CQT | reg::FQH | 0x1c | 0x2c => self.words[offset / 4] = value,
            _ => panic!("a write of {value:#x} at {offset:#x}"),
        }
        if matches!(offset, reg::DDTP | 0x14) && self.slow > 0 {
            self.busy_for = self.slow;
            self.words[reg::DDTP / 4] |= ddtp::BUSY;
        }
        if self.busy == Some(offset) {
            self.words[offset / 4] |= if offset == reg::DDTP { ddtp::BUSY } else { csr::BUSY };
        }
        self.run(memory);
    }

    fn run(&mut self, memory: &Memory) {
        let ready = |state: &Self| {
            let control = state.words[reg::CQCSR / 4];
            control & csr::ON != 0 && control & csr::COMMAND_ERRORS == 0 && !state.is_dead
        };
        let size = 2 << (self.words[reg::CQB / 4] & 0x1f);
        while ready(self) && self.words[reg::CQH / 4] != self.words[reg::CQT / 4] {
            let head = self.words[reg::CQH / 4];
            let at = address_of(self.wide(reg::CQB)) + u64::from(head) * 16;
            let done: Command = [at, at + 8].map(|at| memory.word(at).load(Ordering::Relaxed));
            let has_ats = self.wide(reg::CAPABILITIES) & cap::ATS != 0;
            match done[0] & 0x3ff {
                1 | 3 => {}
                0x81 if done[0] >> 32 & 1 == 0 => {}
                2 if self.awaited => {
                    self.awaited = false;
                    self.words[reg::CQCSR / 4] |= csr::COMMAND_TIMED_OUT;
                    return;
                }
                2 if done[0] >> 10 & 1 != 0 => {
                    memory.word(done[1] << 2).store(done[0] >> 32, Ordering::Relaxed);
                }
                2 => {}
                4 if has_ats => self.awaited = self.is_deaf,
                _ => {
                    self.words[reg::CQCSR / 4] |= csr::COMMAND_ILLEGAL;
                    return;
                }
            }
            if done != command::NOTHING {
                let context = self.watched.and_then(|device| self.context(memory, device));
                self.done.push((done, context));
            }
            self.words[reg::CQH / 4] = (head + 1) % size;
        }
    }
}

impl Unit for Model {
    fn read(&self, offset: usize, bits: u32) -> u64 {
        let mut state = self.state.lock();
        if offset == reg::DDTP && state.busy_for > 0 {
            state.busy_for -= 1;
            if state.busy_for == 0 {
                state.words[offset / 4] &= !ddtp::BUSY;
            }
        }
        if bits == 64 { state.wide(offset) } else { state.words[offset / 4].into() }
    }

    fn write(&self, offset: usize, bits: u32, value: u64) {
        let mut state = self.state.lock();
        state.write(&self.memory, offset, value as u32);
        if bits == 64 {
            state.write(&self.memory, offset + 4, (value >> 32) as u32);
        }
    }
}
