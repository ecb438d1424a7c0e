//! QEMU's device `edu` (`docs/specs/edu.rst` of QEMU): it copies up to 4 KiB between memory and a buffer of its own, as it is told.

use std::time::{Duration, Instant};

use portcullis::addr::Iova;
use portcullis_linux::vfio::{Device, Registers};

use crate::Result;

const IDENTIFICATION: usize = 0x00;
const RAISE: usize = 0x60;
const ACKNOWLEDGE: usize = 0x64;
const SOURCE: usize = 0x80;
const TARGET: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;
/// Where the device's buffer is for its own copies.
const BUFFER: u64 = 0x40000;

const START: u64 = 1 << 0;
const TO_MEMORY: u64 = 1 << 1;

pub struct Edu {
    registers: Registers,
}

impl Edu {
    pub fn new(device: &Device) -> Result<Self> {
        device.set_bus_master(true)?;
        let registers = device.bar(0)?;
        let number = registers.read32(IDENTIFICATION).ok_or("no register")?;
        if number & 0xffff != 0xed {
            return Err(format!("{number:#x} is no edu").into());
        }
        Ok(Self { registers })
    }

    /// Has the device raise an interrupt, which lasts until it is acknowledged.
    pub fn raise(&self) -> Result<()> {
        Ok(self.registers.write32(RAISE, 1).ok_or("no register")?)
    }

    pub fn acknowledge(&self) -> Result<()> {
        Ok(self.registers.write32(ACKNOWLEDGE, 1).ok_or("no register")?)
    }

    fn copy(&self, source: u64, target: u64, count: u64, command: u64) -> Result<()> {
        for (register, value) in
            [(SOURCE, source), (TARGET, target), (COUNT, count), (COMMAND, START | command)]
        {
            self.registers.write64(register, value).ok_or("no register")?;
        }
        let end = Instant::now() + Duration::from_secs(20);
        while self.registers.read64(COMMAND).ok_or("no register")? & START != 0 {
            if Instant::now() > end {
                return Err("edu does not end".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Has the device read memory.
    pub fn read(&self, from: Iova, count: u64) -> Result<()> {
        self.copy(from.get(), BUFFER, count, 0)
    }

    /// Has the device write what it has read.
    pub fn write(&self, to: Iova, count: u64) -> Result<()> {
        self.copy(BUFFER, to.get(), count, TO_MEMORY)
    }
}
