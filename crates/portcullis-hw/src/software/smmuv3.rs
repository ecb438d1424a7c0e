//! SMMUv3: both stages, two-level stream tables, a command queue and an event queue. It may have ECMDQs: see [`Software::with_own_queues`].

use portcullis::platform::Frames;

use super::{Kind, Software, TWO_PAGES, Watcher, words};
use crate::smmuv3::layout::{BASE_ADDRESS, INDEX, cr0, ecmdq, gbpa, gerror, idr0, idr1, reg};
use crate::sync::Ordering;

/// CMDQ_CONS, ECMDQ_CONS: an illegal command (CERROR_ILL).
const ILLEGAL: u32 = 1 << 24;

/// GERROR: an ECMDQ has stopped (CMDQP_ERR).
const OWN_STOPPED: u32 = 1 << 9;

/// CONTROL_PAGE_BASE: a page of 64 KiB (CMDQGS).
const GRANULE: u64 = 1 << 1;

/// The most pages, as a power of two, and the end of the registers that describe them.
const MOST_PAGES: u32 = 1;
const TOLD_END: usize = reg::CONTROL_PAGE + (ecmdq::TOLD << MOST_PAGES);

/// Words of an ECMDQ, padded to keep it out of the cache lines of the next.
const OWN_WORDS: usize = 32;

/// The pages' own registers, and all possible queues.
const MORE_WORDS: usize = (1 << MOST_PAGES) * (ecmdq::TOLD / 4 + (1 << ecmdq::MOST) * OWN_WORDS);

/// A unit of Arm's SMMUv3.
#[derive(Debug)]
pub struct SmmuV3;

impl Kind for SmmuV3 {
    const RESET: &'static [(usize, u32)] = &[
        (
            reg::IDR0,
            idr0::S1P | idr0::S2P | idr0::TTF_AARCH64 | idr0::COHACC | idr0::ASID16 | idr0::VMID16 | 1 << 27,
        ),
        // 16 bits of stream IDs, 2^7 events, 2^8 commands.
        (reg::IDR1, 16 | 7 << 16 | 8 << 21 | idr1::ATTR_TYPES_OVR),
        (reg::IDR3, crate::smmuv3::layout::IDR3_RIL),
        // 48 bits, all granules.
        (reg::IDR5, 5 | 7 << 4),
    ];

    /// Appends the registers of pages of queues, and of the queues.
    fn word(offset: usize) -> Option<usize> {
        match offset {
            reg::CONTROL_PAGE..TOLD_END => Some(TWO_PAGES + (offset - reg::CONTROL_PAGE) / 4),
            ecmdq::FIRST_PAGE.. => {
                let (at, register) = own(offset)?;
                let first = TWO_PAGES + (TOLD_END - reg::CONTROL_PAGE) / 4;
                Some(first + (at - ecmdq::FIRST_PAGE) / 0x100 * OWN_WORDS + register / 4)
            }
            _ => super::of_two_pages(offset),
        }
    }

    fn taken<F: Frames>(unit: &Software<Self, F>, offset: usize, old: u32, value: u32) -> u32 {
        if let Some((at, register)) = own(offset) {
            let (is_on, acts) = (unit.get(at + ecmdq::PROD), unit.get(at + ecmdq::CONS));
            let (is_on, acts) = (is_on & ecmdq::EN != 0, acts & ecmdq::EN != 0);
            // Between two states nothing is writable; CONS and the base are writable only while the queue is off.
            let may = is_on == acts && (register == ecmdq::PROD || !is_on);
            return if may { value } else { old };
        }
        match offset {
            reg::IDR0..=reg::IDR5 | reg::IDR6 | reg::CR0ACK | reg::IRQ_CTRLACK | reg::GERROR => old,
            reg::GBPA => value & !gbpa::UPDATE,
            reg::CONTROL_PAGE..TOLD_END => old,
            _ => value,
        }
    }

    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, _: u32, watcher: Option<&Watcher>) {
        if let Some((at, ecmdq::PROD)) = own(offset) {
            return unit.act(at, watcher);
        }
        match offset {
            reg::CR0 => unit.set(reg::CR0ACK, unit.get(reg::CR0)),
            reg::IRQ_CTRL => unit.set(reg::IRQ_CTRLACK, unit.get(reg::IRQ_CTRL)),
            reg::CMDQ_PROD | reg::GERRORN => {
                let stopped = (unit.get(reg::GERROR) ^ unit.get(reg::GERRORN)) & gerror::CMDQ != 0;
                if !stopped && unit.get(reg::CR0) & cr0::CMDQEN != 0 {
                    let (head, tail) = (unit.get(reg::CMDQ_CONS), unit.get(reg::CMDQ_PROD));
                    match unit.consume(unit.get64(reg::CMDQ_BASE), head & INDEX, tail & INDEX, watcher) {
                        Ok(head) => unit.set(reg::CMDQ_CONS, head),
                        Err(head) => {
                            unit.set(reg::CMDQ_CONS, head | ILLEGAL);
                            unit.set(reg::GERROR, unit.get(reg::GERROR) ^ gerror::CMDQ);
                        }
                    }
                }
            }
            _ => {}
        }
    }
}

/// The first register of the ECMDQ that has `offset`, and which register that is.
fn own(offset: usize) -> Option<(usize, usize)> {
    let at = offset.checked_sub(ecmdq::FIRST_PAGE)?;
    (at < ecmdq::PAGE << MOST_PAGES && at % 0x100 < 0x10).then_some((offset - at % 0x100, at % 0x100))
}

impl<F: Frames> Software<SmmuV3, F> {
    /// Adds ECMDQs to a unit that no driver has seen yet: 2^`pages` pages, at most two, of 2^`each` queues, at most 256. Each is consumed
    /// when its own doorbell rings, and stops by itself.
    #[must_use]
    pub fn with_own_queues(self, pages: u32, each: u32) -> Self {
        let (pages, each) = (pages.min(MOST_PAGES), each.min(ecmdq::MOST));
        let more = words(TWO_PAGES + MORE_WORDS);
        for (old, new) in self.words.iter().zip(&more) {
            new.store(old.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        let unit = Self { words: more, ..self };
        unit.set(reg::IDR1, unit.get(reg::IDR1) | idr1::ECMDQ);
        unit.set(reg::IDR6, pages << 24 | each << 16);
        for page in 0..1 << pages {
            let registers = reg::CONTROL_PAGE + ecmdq::TOLD * page;
            let at = (ecmdq::FIRST_PAGE + ecmdq::PAGE * page) as u64;
            unit.set64(registers, at | GRANULE | ecmdq::PRESET);
            // CFG, and STATUS: on.
            unit.set64(registers + 8, 1 | 1 << 32);
        }
        unit
    }

    /// Executes the commands from `head` to `tail` of the queue at `base`, both with the wrap bit, and returns the new head, as an error if
    /// the watcher rejects a command. A command completes together with all earlier ones, so the index alone confirms.
    fn consume(&self, base: u64, mut head: u32, tail: u32, watcher: Option<&Watcher>) -> Result<u32, u32> {
        let Some(takes) = watcher else { return Ok(tail) };
        let size = 1_u32 << (base & 0x1f).min(19);
        // An invalid index, as a test may set it, ends the walk.
        while head != tail && head.max(tail) < size * 2 {
            if !takes(self.command(base & BASE_ADDRESS, head % size)) {
                return Err(head);
            }
            head = (head + 1) % (size * 2);
        }
        Ok(tail)
    }

    /// The unit's reaction to a register write of the ECMDQ at `at`.
    fn act(&self, at: usize, watcher: Option<&Watcher>) {
        let (prod, cons) = (self.get(at + ecmdq::PROD), self.get(at + ecmdq::CONS));
        let on = prod & ecmdq::EN;
        let cons = cons & !ecmdq::EN | on;
        let has_stopped = (prod ^ cons) & ecmdq::ERR != 0;
        if on == 0 || has_stopped {
            return self.set(at + ecmdq::CONS, cons);
        }
        let same = on | cons & ecmdq::ERR;
        match self.consume(self.get64(at + ecmdq::BASE), cons & INDEX, prod & INDEX, watcher) {
            Ok(head) => self.set(at + ecmdq::CONS, same | head),
            Err(head) => {
                self.set(at + ecmdq::CONS, (same ^ ecmdq::ERR) | ILLEGAL | head);
                let (errors, known) = (self.get(reg::GERROR), self.get(reg::GERRORN));
                if (errors ^ known) & OWN_STOPPED == 0 {
                    self.set(reg::GERROR, errors ^ OWN_STOPPED);
                }
            }
        }
    }
}
