//! What event records say, in the common form; and the queue that they come by.

use portcullis::addr::{DeviceId, Iova};
use portcullis::platform::Frames;

use super::layout::{BASE_ADDRESS, INDEX, OVERFLOW, event, reg};
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Registers, UnitError};

/// The most records, as a power of two: one frame of them.
const MOST: u32 = 7;

/// The event queue, which one CPU at a time reads.
#[derive(Debug)]
pub(super) struct Events {
    records: Words,
    bits: u32,
    /// The index of the next record, with the wrap bit.
    next: u32,
}

impl Events {
    /// The memory of a queue, for a unit that has 2^`most` records at most.
    pub fn new<F: Frames>(frames: &F, most: u32) -> Result<Self, UnitError> {
        Ok(Self { records: Words::new(frames, 1)?, bits: most.min(MOST), next: 0 })
    }

    /// Tells a unit whose event queue is off of this one.
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
        let words = core::array::from_fn(|word| self.records.load(frames, at + word));
        self.next = self.next.wrapping_add(1) & both;
        // With the acknowledgement that events were lost, if some were: there is room again.
        registers.write32(reg::EVENTQ_CONS, self.next | produced & OVERFLOW);
        Some(decode(words))
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is of `frames`, and the unit's event queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: the caller's promise.
        unsafe { self.records.free(frames) };
    }
}

/// An event record's four words.
fn decode(words: [u64; event::WORDS]) -> Fault {
    let code = event::code(words[0]);
    // Records of what is wrong with a stream, and not with an access, leave these fields out.
    let of_access = matches!(
        code,
        event::F_TRANSL_FORBIDDEN | event::F_WALK_EABT
            ..=event::F_PERMISSION | event::F_TLB_CONFLICT | event::F_UUT
    );
    let access = match (words[1] & event::RNW != 0, words[1] & event::IND != 0) {
        (true, true) => Access::Execute,
        (true, false) => Access::Read,
        (false, _) => Access::Write,
    };
    Fault {
        device: DeviceId(event::stream(words[0])),
        pasid: (words[0] & event::SSV != 0).then(|| event::substream(words[0])),
        address: of_access.then(|| Iova::new(words[2] & !0xfff)),
        access: of_access.then_some(access),
        reason: reason(code),
        code: u32::from(code),
    }
}

/// Source: section 7.3, "Event records".
const fn reason(code: u8) -> Reason {
    match code {
        // Entries of the driver's are absent, or as the unit has said that it takes them.
        event::C_BAD_STREAMID | event::C_BAD_STE => Reason::NotAttached,
        event::F_BAD_ATS_TREQ
        | event::F_STREAM_DISABLED
        | event::F_TRANSL_FORBIDDEN
        | event::C_BAD_SUBSTREAMID
        | event::C_BAD_CD
        | event::F_CFG_CONFLICT => Reason::BadContext,
        event::F_TRANSLATION => Reason::NotMapped,
        event::F_PERMISSION | event::F_ACCESS => Reason::Permission,
        // Of an address that the device used, or of one that an entry of a table holds.
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
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0000))));
        assert_eq!((fault.access, fault.reason, fault.pasid), (Some(Access::Read), Reason::NotMapped, None));
        let fault = decode([0x30_0000_0002, 0, 0x80_0123, 0]);
        assert_eq!((fault.device, fault.address), (DeviceId(0x30), None));
        assert_eq!((fault.access, fault.reason), (None, Reason::NotAttached));
    }

    #[test]
    fn every_record_is_decoded() {
        for code in 0..=255_u64 {
            let fault = decode([code | event::SSV | 0xf_ffff << 12 | 9 << 32, u64::MAX, u64::MAX, u64::MAX]);
            assert_eq!((fault.code, fault.pasid, fault.device), (code as u32, Some(0xf_ffff), DeviceId(9)));
        }
    }
}
