//! RISC-V: one directory of any levels, a command queue and a fault queue.

use portcullis::platform::Frames;

use super::{Kind, Software, Watcher};
use crate::riscv::layout::{NUMBER, cap, command, csr, ddtp, reg};

/// A unit of the RISC-V IOMMU architecture.
#[derive(Debug)]
pub struct RiscV;

impl Kind for RiscV {
    const RESET: &'static [(usize, u32)] = &[
        (reg::CAPABILITIES, 0x10 | (cap::SV39 | cap::SV48 | cap::SV39X4 | cap::SV48X4) as u32),
        (reg::CAPABILITIES + 4, 56),
    ];

    fn taken<F: Frames>(_: &Software<Self, F>, offset: usize, old: u32, value: u32) -> u32 {
        match offset {
            reg::CAPABILITIES | reg::CQH | reg::FQT => old,
            offset if offset == reg::CAPABILITIES + 4 => old,
            reg::DDTP => value & !ddtp::BUSY,
            reg::CQCSR | reg::FQCSR => {
                let is_new = value & !old & csr::ENABLE != 0;
                let errors = if is_new { 0 } else { old & csr::COMMAND_ERRORS & !value };
                value & csr::ENABLE | errors | if value & csr::ENABLE != 0 { csr::ON } else { 0 }
            }
            // No page requests.
            reg::PQCSR => 0,
            _ => value,
        }
    }

    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, _: u32, watcher: Option<&Watcher>) {
        let control = unit.get(reg::CQCSR);
        match offset {
            // The indices stay where they are while the ring is off, and are 0 when it is on again.
            reg::CQCSR if control & csr::ENABLE == 0 => unit.set(reg::CQH, 0),
            reg::FQCSR if unit.get(reg::FQCSR) & csr::ENABLE == 0 => unit.set(reg::FQT, 0),
            reg::CQT if control & csr::ON != 0 && control & csr::COMMAND_ERRORS == 0 => {
                let base = unit.get64(reg::CQB);
                // LOG2SZ-1 is at most 30 here, because indices have 32 bits.
                let (address, size) = ((base & NUMBER) << 2, 2_u32 << (base & 0x1f).min(30));
                let tail = unit.get(reg::CQT) & (size - 1);
                let mut head = unit.get(reg::CQH) & (size - 1);
                while head != tail {
                    let [first, second] = unit.command(address, head);
                    if watcher.is_some_and(|takes| !takes([first, second])) {
                        return unit.set(reg::CQCSR, control | csr::COMMAND_ILLEGAL);
                    }
                    if first as u32 == command::fence(0, 0)[0] as u32 {
                        unit.confirm((first >> 32) as u32, second << 2);
                    }
                    head = (head + 1) & (size - 1);
                    unit.set(reg::CQH, head);
                }
            }
            _ => {}
        }
    }
}
