//! What fault records say, in the common form.

use portcullis::addr::{DeviceId, Iova};

use super::layout::record;
use crate::fault::{Access, Fault, Reason};

/// A fault record's two words.
pub(super) fn decode(low: u64, high: u64) -> Fault {
    let code = record::reason(high);
    let access = match (high & record::T1 != 0, high & record::T2 != 0) {
        (true, false) if high & record::EXE != 0 => Some(Access::Execute),
        (true, false) => Some(Access::Read),
        (false, false) => Some(Access::Write),
        (true, true) => Some(Access::Atomic),
        // A page request.
        (false, true) => None,
    };
    Fault {
        device: DeviceId(u32::from(record::source(high))),
        pasid: (high & record::PP != 0).then(|| record::pasid(high)),
        address: Some(Iova::new(low & !0xfff)),
        access,
        reason: reason(code),
        code: u32::from(code),
    }
}

/// Source: section 7.1.3 "Fault Conditions and Remapping Hardware Behavior for Various Requests", tables of fault reasons: up to
/// 0x0d legacy mode, from 0x30 on scalable mode, by the structure: root 0x3*n*, context 0x4*n*,
/// PASID directory 0x50 to 0x52, PASID table 0x58 to 0x5d, first stage 0x7*n* (0x74 to 0x77 of a
/// nested one, and 0x90), second stage from 0x78 on, the address 0x8*n*.
const fn reason(code: u8) -> Reason {
    match code {
        0x01 | 0x02 | 0x39 | 0x41 | 0x51 | 0x59 => Reason::NotAttached,
        // 0x31 and 0x32: what only scalable mode has, of a unit in legacy mode.
        0x03 | 0x0a | 0x0b | 0x0d | 0x31 | 0x32 | 0x3a | 0x42..=0x48 | 0x52 | 0x5a..=0x5d => {
            Reason::BadContext
        }
        0x04 | 0x74 | 0x80 | 0x83 | 0x84 => Reason::BeyondWidth,
        // The second stage has one code for an entry that allows nothing and one that forbids this.
        0x05 | 0x06 | 0x71 | 0x79 => Reason::NotMapped,
        0x75..=0x77 | 0x81 | 0x82 | 0x85 | 0x86 => Reason::Permission,
        0x0c | 0x72 | 0x7a | 0x7b | 0x7c => Reason::BadEntry,
        0x07..=0x09 | 0x30 | 0x38 | 0x40 | 0x50 | 0x58 | 0x70 | 0x73 | 0x78 => Reason::Unreadable,
        // Among others an address of interrupts (0x0e, 0x87), and accessed bits that are clear and
        // cannot be set (0x90).
        _ => Reason::Other,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refused_write_of_the_second_stage() {
        let fault = decode(0x80_0000, record::F | 5 << 32 | 0x28);
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0000))));
        assert_eq!((fault.access, fault.reason, fault.pasid), (Some(Access::Write), Reason::NotMapped, None));
    }

    #[test]
    fn refusals_of_scalable_mode() {
        for (code, reason) in [
            (0x30, Reason::Unreadable),
            (0x39, Reason::NotAttached),
            (0x41, Reason::NotAttached),
            (0x43, Reason::BadContext),
            (0x45, Reason::BadContext),
            (0x50, Reason::Unreadable),
            (0x51, Reason::NotAttached),
            (0x59, Reason::NotAttached),
            (0x5b, Reason::BadContext),
            (0x5d, Reason::BadContext),
            (0x71, Reason::NotMapped),
            (0x72, Reason::BadEntry),
            (0x79, Reason::NotMapped),
            (0x80, Reason::BeyondWidth),
            (0x81, Reason::Permission),
            (0x85, Reason::Permission),
            (0x86, Reason::Permission),
            (0x87, Reason::Other),
            (0x90, Reason::Other),
        ] {
            // A read by a request with PASID 5.
            let fault = decode(0x12_3000, record::F | record::T1 | record::PP | 5 << 40 | code << 32 | 0x1ff);
            assert_eq!((fault.reason, u64::from(fault.code)), (reason, code), "{code:#x}");
            assert_eq!((fault.access, fault.pasid), (Some(Access::Read), Some(5)));
            assert_eq!((fault.device, fault.address), (DeviceId(0x1ff), Some(Iova::new(0x12_3000))));
        }
    }

    #[test]
    fn every_record_is_decoded() {
        for code in 0..=255_u64 {
            for kind in 0..4_u64 {
                let high = code << 32 | kind << 61 | (kind & 1) << 28 | record::PP | 0x3_ffff << 40;
                assert_eq!(decode(u64::MAX, high).code, code as u32);
            }
        }
    }
}
