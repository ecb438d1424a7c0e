//! SMMUv3: both stages, stream tables of two levels, a command queue and an event queue.

use portcullis::platform::Frames;

use super::{Kind, Software, Watcher};
use crate::smmuv3::layout::{BASE_ADDRESS, INDEX, cr0, gbpa, gerror, idr0, idr1, reg};

/// CMDQ_CONS: an illegal command (CERROR_ILL).
const ILLEGAL: u32 = 1 << 24;

/// A unit of Arm's SMMUv3.
#[derive(Debug)]
pub struct SmmuV3;

impl Kind for SmmuV3 {
    const RESET: &'static [(usize, u32)] = &[
        (
            reg::IDR0,
            idr0::S1P | idr0::S2P | idr0::TTF_AARCH64 | idr0::COHACC | idr0::ASID16 | idr0::VMID16 | 1 << 27,
        ),
        // 16 bits of streams, 2^7 events, 2^8 commands.
        (reg::IDR1, 16 | 7 << 16 | 8 << 21 | idr1::ATTR_TYPES_OVR),
        (reg::IDR3, crate::smmuv3::layout::IDR3_RIL),
        // 48 bits, all granules.
        (reg::IDR5, 5 | 7 << 4),
    ];

    fn taken(offset: usize, old: u32, value: u32) -> u32 {
        match offset {
            reg::IDR0..=reg::IDR5 | reg::CR0ACK | reg::IRQ_CTRLACK | reg::GERROR => old,
            reg::GBPA => value & !gbpa::UPDATE,
            _ => value,
        }
    }

    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, _: u32, watcher: Option<&Watcher>) {
        match offset {
            reg::CR0 => unit.set(reg::CR0ACK, unit.get(reg::CR0)),
            reg::IRQ_CTRL => unit.set(reg::IRQ_CTRLACK, unit.get(reg::IRQ_CTRL)),
            reg::CMDQ_PROD | reg::GERRORN => {
                let stopped = (unit.get(reg::GERROR) ^ unit.get(reg::GERRORN)) & gerror::CMDQ != 0;
                if !stopped && unit.get(reg::CR0) & cr0::CMDQEN != 0 {
                    // A command is complete with those before it, so that the index alone confirms.
                    let tail = unit.get(reg::CMDQ_PROD) & INDEX;
                    if let Some(takes) = watcher {
                        let base = unit.get64(reg::CMDQ_BASE);
                        let size = 1_u32 << (base & 0x1f).min(19);
                        let mut head = unit.get(reg::CMDQ_CONS) & INDEX;
                        // An index that is none, as a test has set it, is where the unit was told to go.
                        while head != tail && head.max(tail) < size * 2 {
                            if !takes(unit.command(base & BASE_ADDRESS, head % size)) {
                                unit.set(reg::CMDQ_CONS, head | ILLEGAL);
                                return unit.set(reg::GERROR, unit.get(reg::GERROR) ^ gerror::CMDQ);
                            }
                            head = (head + 1) % (size * 2);
                        }
                    }
                    unit.set(reg::CMDQ_CONS, tail);
                }
            }
            _ => {}
        }
    }
}
