//! QEMU's `edu`: a device that copies between memory and a buffer of its own (`docs/specs/edu.rst`).

use portcullis::addr::Iova;
use portcullis_hw::Registers;

use super::Window;

/// Where its buffer of 4 KiB begins, in addresses of its own.
const BUFFER: u64 = 0x4_0000;

/// Registers: from where, to where, how many bytes, and the command.
const SOURCE: usize = 0x80;
const TARGET: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;

const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;

/// The device.
pub struct Edu(Window);

impl Edu {
    pub fn new(registers: Window) -> Self {
        Self(registers)
    }

    fn copy(&self, (source, target): (u64, u64), count: u64, command: u64) {
        for (register, value) in
            [(SOURCE, source), (TARGET, target), (COUNT, count), (COMMAND, command | RUN)]
        {
            self.0.write64(register, value);
        }
        while self.0.read64(COMMAND) & RUN != 0 {
            std::thread::yield_now();
        }
    }

    /// Reads `count` bytes of memory from `from` on into its buffer, at `offset`. A refused read leaves zeros, or what was there.
    pub fn fetch(&self, from: Iova, offset: u64, count: u64) {
        self.copy((from.get(), BUFFER + offset), count, 0);
    }

    /// Writes `count` bytes of its buffer, from `offset` on, to memory.
    pub fn store(&self, offset: u64, to: Iova, count: u64) {
        self.copy((BUFFER + offset, to.get()), count, TO_MEMORY);
    }
}
