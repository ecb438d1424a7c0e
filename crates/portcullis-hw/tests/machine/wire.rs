//! QEMU's qtest protocol: one line for a request, one for its answer.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use portcullis_hw::Registers;
use portcullis_hw::model::SoftwareVtd;
use portcullis_hw::virtio::NarrowRegisters;

use super::Result;

pub struct Wire(Mutex<BufReader<UnixStream>>);

impl Wire {
    pub fn new(socket: UnixStream) -> Result<Self> {
        socket.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self(Mutex::new(BufReader::new(socket))))
    }

    /// Sends `line` and returns the words after `OK`.
    ///
    /// # Panics
    /// If QEMU has exited.
    fn ask(&self, line: fmt::Arguments<'_>) -> String {
        let mut wire = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = format!("{line}\n");
        wire.get_mut().write_all(asked.as_bytes()).expect("QEMU takes a line");
        loop {
            let mut answer = String::new();
            let length = wire.read_line(&mut answer).expect("QEMU answers");
            assert_ne!(length, 0, "QEMU has ended");
            if answer.starts_with("IRQ") {
                continue;
            }
            let words = answer.trim().strip_prefix("OK");
            return words.unwrap_or_else(|| panic!("{asked:?}: {answer:?}")).trim().to_owned();
        }
    }

    fn number(&self, line: fmt::Arguments<'_>) -> u64 {
        let answer = self.ask(line);
        let digits = answer.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("{answer:?} is no number"))
    }

    /// Writes 32 bits to an I/O port.
    pub fn write_port(&self, port: u16, value: u32) {
        self.ask(format_args!("outl {port:#x} {value:#x}"));
    }

    /// Reads 32 bits from an I/O port.
    pub fn read_port(&self, port: u16) -> u32 {
        self.number(format_args!("inl {port:#x}")) as u32
    }
}

/// Registers: QEMU's, at an address, or the software IOMMU's.
#[derive(Clone)]
pub enum Window {
    Qemu { wire: Arc<Wire>, base: u64 },
    Software(Arc<SoftwareVtd>),
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu { base, .. } => write!(f, "registers at {base:#x}"),
            Self::Software(unit) => unit.fmt(f),
        }
    }
}

impl Window {
    /// QEMU's socket, and the address: the software IOMMU has no narrow registers.
    fn of_qemu(&self) -> (&Wire, u64) {
        match self {
            Self::Qemu { wire, base } => (wire, *base),
            Self::Software(_) => panic!("the software IOMMU has no registers of 8 and 16 bits"),
        }
    }
}

// SAFETY: 1 to 6: QEMU executes each line before it answers, and each call waits for the answer; its threads share this memory coherently.
// The software IOMMU has its own clauses. 7: QEMU's bus. 8: one driver at a time.
unsafe impl Registers for Window {
    fn read32(&self, offset: usize) -> u32 {
        match self {
            Self::Qemu { wire, base } => {
                wire.number(format_args!("readl {:#x}", base + offset as u64)) as u32
            }
            Self::Software(unit) => unit.read32(offset),
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        match self {
            Self::Qemu { wire, base } => {
                wire.ask(format_args!("writel {:#x} {value:#x}", base + offset as u64));
            }
            Self::Software(unit) => unit.write32(offset, value),
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        match self {
            Self::Qemu { wire, base } => wire.number(format_args!("readq {:#x}", base + offset as u64)),
            Self::Software(unit) => unit.read64(offset),
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        match self {
            Self::Qemu { wire, base } => {
                wire.ask(format_args!("writeq {:#x} {value:#x}", base + offset as u64));
            }
            Self::Software(unit) => unit.write64(offset, value),
        }
    }
}

// SAFETY: as above, at these widths.
unsafe impl NarrowRegisters for Window {
    fn read8(&self, offset: usize) -> u8 {
        let (wire, base) = self.of_qemu();
        wire.number(format_args!("readb {:#x}", base + offset as u64)) as u8
    }

    fn write8(&self, offset: usize, value: u8) {
        let (wire, base) = self.of_qemu();
        wire.ask(format_args!("writeb {:#x} {value:#x}", base + offset as u64));
    }

    fn read16(&self, offset: usize) -> u16 {
        let (wire, base) = self.of_qemu();
        wire.number(format_args!("readw {:#x}", base + offset as u64)) as u16
    }

    fn write16(&self, offset: usize, value: u16) {
        let (wire, base) = self.of_qemu();
        wire.ask(format_args!("writew {:#x} {value:#x}", base + offset as u64));
    }
}
