//! QEMU's `edu`: a device that copies between memory and a buffer of its own (`docs/specs/edu.rst`).

use std::sync::{Arc, Mutex, PoisonError};

use portcullis::addr::Iova;
use portcullis_hw::Registers;
use portcullis_hw::model::SoftwareVtd;

use super::Window;

/// Address of its 4 KiB buffer, in its own address space.
const BUFFER: u64 = 0x4_0000;

/// Registers: source, destination, count, command.
const SOURCE: usize = 0x80;
const TARGET: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;

const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;

/// The device, or a similar one in front of the software IOMMU.
pub enum Edu {
    Qemu(Window),
    Software { unit: Arc<SoftwareVtd>, source: u16, buffer: Mutex<Vec<u8>> },
}

impl Edu {
    pub fn software(unit: Arc<SoftwareVtd>, source: u16) -> Self {
        Self::Software { unit, source, buffer: Mutex::new(vec![0; 4096]) }
    }

    fn copy(registers: &Window, (source, target): (u64, u64), count: u64, command: u64) {
        for (register, value) in
            [(SOURCE, source), (TARGET, target), (COUNT, count), (COMMAND, command | RUN)]
        {
            registers.write64(register, value);
        }
        while registers.read64(COMMAND) & RUN != 0 {
            std::thread::yield_now();
        }
    }

    /// Reads `count` bytes of memory from `from` on into its buffer, at `offset`. A refused read leaves zeros, or the old contents.
    pub fn fetch(&self, from: Iova, offset: u64, count: u64) {
        match self {
            Self::Qemu(registers) => Self::copy(registers, (from.get(), BUFFER + offset), count, 0),
            Self::Software { unit, source, buffer } => {
                let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                let bytes = &mut buffer[offset as usize..(offset + count) as usize];
                bytes.fill(0);
                unit.read(*source, from, bytes);
            }
        }
    }

    /// Writes `count` bytes of its buffer, from `offset` on, to memory.
    pub fn store(&self, offset: u64, to: Iova, count: u64) {
        match self {
            Self::Qemu(registers) => Self::copy(registers, (BUFFER + offset, to.get()), count, TO_MEMORY),
            Self::Software { unit, source, buffer } => {
                let buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                unit.write(*source, to, &buffer[offset as usize..(offset + count) as usize]);
            }
        }
    }
}
