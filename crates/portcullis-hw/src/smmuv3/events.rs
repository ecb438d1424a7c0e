//! The event queue, decoded into [`Fault`]s.

use portcullis::addr::{DeviceId, Iova};
use portcullis::platform::Frames;

use super::layout::{BASE_ADDRESS, INDEX, OVERFLOW, event, reg};
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Registers, UnitError};

/// The most records, as a power of two: one frame of them.
const MOST: u32 = 7;

/// The event queue. One CPU reads it at a time.
#[derive(Debug)]
pub(super) struct Events {
    records: Words,
    bits: u32,
    /// Index of the next record, with the wrap bit.
    next: u32,
}

impl Events {
    /// A queue for a unit that supports at most 2^`most` records.
    pub fn new<F: Frames>(frames: &F, most: u32) -> Result<Self, UnitError> {
        Ok(Self { records: Words::new(frames, 1)?, bits: most.min(MOST), next: 0 })
    }

    /// Gives the queue to a unit whose event queue is off.
    pub fn tell(&self, registers: &impl Registers) {
        registers.write64(reg::EVENTQ_BASE, self.records.phys().get() & BASE_ADDRESS | u64::from(self.bits));
        registers.write32(reg::EVENTQ_PROD, 0);
        registers.write32(reg::EVENTQ_CONS, 0);
    }

    /// The next record, whose place the unit may use again.
    pub fn next<F: Frames>(&mut self, frames: &F, registers: &impl Registers) -> Option<Fault> {
        let produced = registers.read32(reg::EVENTQ_PROD);
        let both = (2_u32 << self.bits) - 1;
        let waiting = (produced & INDEX).wrapping_sub(self.next) & both;
        if produced == u32::MAX || produced & INDEX > both || waiting == 0 || waiting > 1 << self.bits {
            return None;
        }
        let at = (self.next & both >> 1) as usize * event::WORDS;
        let words = core::array::from_fn(|word| self.records.load_from_unit(frames, at + word));
        self.next = self.next.wrapping_add(1) & both;
        // Also acknowledges an overflow: there is room again.
        registers.write32(reg::EVENTQ_CONS, self.next | produced & OVERFLOW);
        Some(decode(words))
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit's event queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe { self.records.free(frames) };
    }
}

/// Decodes a record's four words.
fn decode(words: [u64; event::WORDS]) -> Fault {
    let code = event::code(words[0]);
    // Events about a stream, instead of an access, do not have these fields.
    let of_access = matches!(
        code,
        event::F_UUT
            | event::F_TRANSL_FORBIDDEN
            | event::F_WALK_EABT
            | event::F_TRANSLATION
            | event::F_ADDR_SIZE
            | event::F_ACCESS
            | event::F_PERMISSION
            | event::F_TLB_CONFLICT
    );
    // These are about pages: the low bits belong to other fields.
    let of_page = matches!(code, event::F_BAD_ATS_TREQ | event::E_PAGE_REQUEST);
    let access = match (words[1] & event::RNW != 0, words[1] & event::IND != 0) {
        (true, true) => Access::Execute,
        (true, false) => Access::Read,
        (false, _) => Access::Write,
    };
    Fault {
        device: DeviceId(event::stream(words[0])),
        pasid: (words[0] & event::SSV != 0).then(|| event::substream(words[0])),
        address: match (of_access, of_page) {
            (true, _) => Some(Iova::new(words[2])),
            (_, true) => Some(Iova::new(words[2] & !0xfff)),
            _ => None,
        },
        access: of_access.then_some(access),
        reason: reason_of(code),
        code: u32::from(code),
    }
}

/// The meaning of an event code, as in a record or in a kernel's log.
///
/// Source: section 7.3, "Event records".
pub const fn reason_of(code: u8) -> Reason {
    match code {
        // The driver's entries are absent, or of a form that the unit supports.
        event::C_BAD_STREAMID | event::C_BAD_STE => Reason::NotAttached,
        event::C_BAD_CD | event::F_CFG_CONFLICT => Reason::BadContext,
        // A translation request, one with a substream (a PASID) or without, or an already translated address.
        event::F_BAD_ATS_TREQ
        | event::F_STREAM_DISABLED
        | event::F_TRANSL_FORBIDDEN
        | event::C_BAD_SUBSTREAMID => Reason::BadRequest,
        event::F_TRANSLATION => Reason::NotMapped,
        event::F_PERMISSION | event::F_ACCESS => Reason::Permission,
        // An input address, or one in a table entry.
        event::F_ADDR_SIZE => Reason::BeyondWidth,
        event::F_STE_FETCH | event::F_CD_FETCH | event::F_WALK_EABT | event::F_VMS_FETCH => {
            Reason::Unreadable
        }
        _ => Reason::Other,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refused_read_and_a_stream_that_leads_nowhere() {
        let fault = decode([0x28_0000_0010, event::RNW, 0x80_0123, 0]);
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0123))));
        assert_eq!((fault.access, fault.reason, fault.pasid), (Some(Access::Read), Reason::NotMapped, None));
        let fault = decode([0x30_0000_0002, 0, 0x80_0123, 0]);
        assert_eq!((fault.device, fault.address), (DeviceId(0x30), None));
        assert_eq!((fault.access, fault.reason), (None, Reason::NotAttached));
    }

    /// The address fields of a record.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Has {
        Nothing,
        Page,
        Address,
    }

    /// Section 7.3 (IHI 0070, issue F.b), in order: each event's code, and the address in its record.
    const EVENTS: [(u8, &str, Reason, Has); 19] = [
        (0x01, "F_UUT", Reason::Other, Has::Address),
        (0x02, "C_BAD_STREAMID", Reason::NotAttached, Has::Nothing),
        (0x03, "F_STE_FETCH", Reason::Unreadable, Has::Nothing),
        (0x04, "C_BAD_STE", Reason::NotAttached, Has::Nothing),
        (0x05, "F_BAD_ATS_TREQ", Reason::BadRequest, Has::Page),
        (0x06, "F_STREAM_DISABLED", Reason::BadRequest, Has::Nothing),
        (0x07, "F_TRANSL_FORBIDDEN", Reason::BadRequest, Has::Address),
        (0x08, "C_BAD_SUBSTREAMID", Reason::BadRequest, Has::Nothing),
        (0x09, "F_CD_FETCH", Reason::Unreadable, Has::Nothing),
        (0x0a, "C_BAD_CD", Reason::BadContext, Has::Nothing),
        (0x0b, "F_WALK_EABT", Reason::Unreadable, Has::Address),
        (0x10, "F_TRANSLATION", Reason::NotMapped, Has::Address),
        (0x11, "F_ADDR_SIZE", Reason::BeyondWidth, Has::Address),
        (0x12, "F_ACCESS", Reason::Permission, Has::Address),
        (0x13, "F_PERMISSION", Reason::Permission, Has::Address),
        (0x20, "F_TLB_CONFLICT", Reason::Other, Has::Address),
        (0x21, "F_CFG_CONFLICT", Reason::BadContext, Has::Nothing),
        (0x24, "E_PAGE_REQUEST", Reason::Other, Has::Page),
        (0x25, "F_VMS_FETCH", Reason::Unreadable, Has::Nothing),
    ];

    #[test]
    fn each_code_has_its_reason_and_its_address() {
        for code in 0..=0xff_u8 {
            let listed = EVENTS.iter().find(|listed| listed.0 == code);
            let (name, reason, has) = listed
                .map_or(("reserved", Reason::Other, Has::Nothing), |listed| (listed.1, listed.2, listed.3));
            // An MSI doorbell, which is not page-aligned.
            let fault = decode([9 << 32 | u64::from(code), event::RNW, 0x1234_5678_e040, 0x5000]);
            let address = match has {
                Has::Nothing => None,
                Has::Page => Some(Iova::new(0x1234_5678_e000)),
                Has::Address => Some(Iova::new(0x1234_5678_e040)),
            };
            assert_eq!((fault.reason, fault.address), (reason, address), "{code:#x}: {name}");
            assert_eq!((fault.device, fault.code), (DeviceId(9), code.into()), "{code:#x}: {name}");
            assert_eq!(fault.access, (has == Has::Address).then_some(Access::Read), "{code:#x}: {name}");
        }
    }

    /// Records made by hand after the exact output of Linux, with other streams: a write to a doorbell (event
    /// 0x10), and a stream beyond the table (0x02).
    #[test]
    fn what_linux_prints_is_what_we_say() {
        for (words, said) in [
            (
                [0x0000_0181_0000_0010, 0x0000_0201_0000_0000, 0xffff_e040, 0xffff_e000],
                "device 0x181 could not write 0xffffe040: nothing is mapped there for this (code 0x10)",
            ),
            (
                [0x0000_0901_0000_0002, 0, 0, 0],
                "device 0x901 could not access memory: the device is attached to nothing (code 0x2)",
            ),
        ] {
            assert_eq!(alloc::format!("{}", decode(words)), said);
        }
    }

    #[test]
    fn every_record_is_decoded() {
        for code in 0..=255_u64 {
            for others in [0, u64::MAX] {
                let fault = decode([code | event::SSV | 0x5_4321 << 12 | 9 << 32, others, others, others]);
                assert_eq!(
                    (fault.code, fault.pasid, fault.device),
                    (code as u32, Some(0x5_4321), DeviceId(9))
                );
            }
        }
    }
}
