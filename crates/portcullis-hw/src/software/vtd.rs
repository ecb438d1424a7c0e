//! VT-d: legacy mode, queued invalidation by descriptors of either width, one fault record.

use portcullis::platform::Frames;

use super::{Kind, Software, Watcher};
use crate::vtd::layout::{
    IQA_WIDE, NARROW_SHIFT, WIDE_SHIFT, cap, descriptor, fsts, global, queue_index, reg,
};

/// Offset of its fault record.
const RECORD: u32 = 0x220;

/// A unit of Intel VT-d.
#[derive(Debug)]
pub struct VtD;

impl Kind for VtD {
    // 16 bits of domains; tables of four levels, 48 bits; pages of 2 MiB and 1 GiB; page-selective
    // invalidation of up to 2^9 pages; drains. Coherent, queued invalidation, pass-through.
    const RESET: &'static [(usize, u32)] = &[
        (reg::VER, 0x10),
        (reg::CAP, 6 | 1 << 10 | 47 << 16 | (RECORD / 16) << 24),
        (
            reg::CAP + 4,
            (RECORD >> 12) | ((cap::PAGES_2M | cap::PAGES_1G | cap::PSI) >> 32) as u32 | 9 << 16 | 3 << 22,
        ),
        (reg::ECAP, 1 | 1 << 1 | 1 << 6),
    ];

    fn taken<F: Frames>(_: &Software<Self, F>, offset: usize, old: u32, value: u32) -> u32 {
        match offset {
            reg::GCMD | reg::IQT => value,
            // Write 1 to clear.
            reg::FSTS => old & !value,
            offset if offset == RECORD as usize + 12 => old & !(value & 1 << 31),
            _ if offset >= RECORD as usize => old,
            reg::VER | reg::GSTS | reg::IQH => old,
            _ if offset < reg::GCMD => old,
            _ => value,
        }
    }

    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, _: u32, watcher: Option<&Watcher>) {
        match offset {
            reg::GCMD => {
                let command = unit.get(reg::GCMD);
                // The root stays taken. The write buffer flush completes at once.
                let taken = (unit.get(reg::GSTS) | command) & global::SRTP;
                if command & !unit.get(reg::GSTS) & global::QIE != 0 {
                    unit.set64(reg::IQH, 0);
                }
                unit.set(reg::GSTS, command & (global::TE | global::QIE) | taken);
            }
            reg::IQT => {
                let stopped = unit.get(reg::FSTS) & fsts::IQE != 0;
                if stopped || unit.get(reg::GSTS) & global::QIE == 0 {
                    return;
                }
                let queue = unit.get64(reg::IQA);
                let is_wide = queue & IQA_WIDE == IQA_WIDE;
                let shift = if is_wide { WIDE_SHIFT } else { NARROW_SHIFT };
                let index = |register| queue_index(unit.get64(register), shift) as u32 % 256;
                let (mut head, tail) = (index(reg::IQH), index(reg::IQT));
                while head != tail {
                    // The unit's descriptors are the lower half of a wide place.
                    let [low, high] = unit.command(queue & !0xfff, head << u32::from(is_wide));
                    if watcher.is_some_and(|takes| !takes([low, high])) {
                        return unit.set(reg::FSTS, unit.get(reg::FSTS) | fsts::IQE);
                    }
                    if low as u32 == descriptor::wait(0, 0)[0] as u32 {
                        unit.confirm((low >> 32) as u32, high);
                    }
                    head = (head + 1) % 256;
                    unit.set(reg::IQH, head << shift);
                }
            }
            _ => {}
        }
    }
}
