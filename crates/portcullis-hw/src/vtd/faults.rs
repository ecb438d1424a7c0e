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
/// 0x0d legacy mode, from 0x30 on scalable mode.
const fn reason(code: u8) -> Reason {
    match code {
        0x01 | 0x02 | 0x0d | 0x39 | 0x41 | 0x51 | 0x59 => Reason::NotAttached,
        0x03 | 0x0a | 0x0b | 0x3a | 0x42..=0x48 | 0x52 | 0x5a..=0x5d => Reason::BadContext,
        0x04 | 0x80 | 0x83 | 0x84 => Reason::BeyondWidth,
        // The second stage has one code for an entry that allows nothing and one that forbids this.
        0x05 | 0x06 | 0x71 | 0x79 => Reason::NotMapped,
        0x81 | 0x82 | 0x85 | 0x86 => Reason::Permission,
        0x0c | 0x72 | 0x7a | 0x7b | 0x7c => Reason::BadEntry,
        0x07..=0x09 | 0x30 | 0x38 | 0x40 | 0x50 | 0x58 | 0x70 | 0x73 | 0x78 => Reason::Unreadable,
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
    fn every_record_is_decoded() {
        for code in 0..=255_u64 {
            for kind in 0..4_u64 {
                let high = code << 32 | kind << 61 | (kind & 1) << 28 | record::PP | 0x3_ffff << 40;
                assert_eq!(decode(u64::MAX, high).code, code as u32);
            }
        }
    }
}
