//! Fault records, decoded into [`Fault`]s.

use portcullis::addr::{DeviceId, Iova};

use super::layout::record;
use crate::fault::{Access, Fault, Reason};

/// Decodes a fault record's two words.
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
        // For an interrupt the field has the index of its table entry.
        address: (!is_interrupt(code)).then(|| Iova::new(low & !0xfff)),
        access,
        reason: reason_of(code),
        code: u32::from(code),
    }
}

/// Whether a code concerns interrupt remapping, which this driver does not touch (section 7.1.2).
const fn is_interrupt(code: u8) -> bool {
    code >> 4 == 2
}

/// The meaning of a fault reason, as in a record or in a kernel's log.
///
/// Source: section 7.1.3, the tables of fault reasons: up to 0x0e legacy mode, from 0x30 on scalable mode, by the structure: root table
/// 0x3*n*, context 0x4*n*, PASID directory 0x50 to 0x52, PASID table 0x58 to 0x5d, first stage 0x70 to 0x77, 0x90 and 0x91, second stage
/// 0x78 to 0x7d, the address 0x8*n*.
pub const fn reason_of(code: u8) -> Reason {
    match code {
        0x01 | 0x02 | 0x39 | 0x41 | 0x51 | 0x59 => Reason::NotAttached,
        // 0x7c and 0x90: accessed and dirty bits must be set, and walks by the PASID's entry do not snoop.
        0x03 | 0x0a | 0x0b | 0x30 | 0x3a | 0x42 | 0x43 | 0x48 | 0x52 | 0x5a | 0x5b | 0x7c | 0x90 => {
            Reason::BadContext
        }
        // Translation requests and translated requests (0x0d, 0x44), with a PASID (0x31, 0x45, 0x46), page requests (0x32, 0x47), execute
        // (0x5c) and privileged ones (0x5d).
        0x0d | 0x31 | 0x32 | 0x44..=0x47 | 0x5c | 0x5d => Reason::BadRequest,
        0x04 | 0x74 | 0x80 | 0x83 | 0x84 => Reason::BeyondWidth,
        // The second stage has one code for an entry without permissions and for a missing permission.
        0x05 | 0x06 | 0x71 | 0x79 => Reason::NotMapped,
        0x75..=0x77 | 0x81 | 0x82 | 0x85 | 0x86 => Reason::Permission,
        0x0c | 0x72 | 0x7a => Reason::BadEntry,
        0x07..=0x09 | 0x38 | 0x40 | 0x50 | 0x58 | 0x70 | 0x73 | 0x78 | 0x7b | 0x7d | 0x91 => {
            Reason::Unreadable
        }
        // Others include interrupt addresses (0x0e, 0x87), and interrupts (0x2n).
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

    /// The tables of fault reasons of section 7.1.3 (Rev. 4.1) and of interrupts in section 7.1.2, in the order of their codes.
    const REASONS: &[(u8, &str, Reason)] = &[
        (0x01, "root entry not present", Reason::NotAttached),
        (0x02, "context entry not present", Reason::NotAttached),
        (0x03, "context entry invalid", Reason::BadContext),
        (0x04, "address beyond MGAW", Reason::BeyondWidth),
        (0x05, "write not allowed", Reason::NotMapped),
        (0x06, "read not allowed", Reason::NotMapped),
        (0x07, "paging entry: access error", Reason::Unreadable),
        (0x08, "root entry: access error", Reason::Unreadable),
        (0x09, "context entry: access error", Reason::Unreadable),
        (0x0a, "root entry: reserved bits", Reason::BadContext),
        (0x0b, "context entry: reserved bits", Reason::BadContext),
        (0x0c, "paging entry: reserved bits", Reason::BadEntry),
        (0x0d, "TT blocks translation requests and translated requests", Reason::BadRequest),
        (0x0e, "output in the range of interrupts", Reason::Other),
        (0x20, "interrupt request: reserved bits", Reason::Other),
        (0x21, "interrupt index beyond the table", Reason::Other),
        (0x22, "IRTE not present", Reason::Other),
        (0x23, "IRTE: access error", Reason::Other),
        (0x24, "IRTE: reserved bits", Reason::Other),
        (0x25, "interrupt of compatibility format", Reason::Other),
        (0x26, "interrupt from another source", Reason::Other),
        (0x30, "RTADDR invalid", Reason::BadContext),
        (0x31, "TTM is legacy mode, request with PASID", Reason::BadRequest),
        (0x32, "TTM is legacy mode, page request", Reason::BadRequest),
        (0x38, "root entry: access error", Reason::Unreadable),
        (0x39, "root entry not present", Reason::NotAttached),
        (0x3a, "root entry: reserved bits", Reason::BadContext),
        (0x40, "context entry: access error", Reason::Unreadable),
        (0x41, "context entry not present", Reason::NotAttached),
        (0x42, "context entry: reserved bits", Reason::BadContext),
        (0x43, "context entry invalid", Reason::BadContext),
        (0x44, "DTE is clear, translation request or translated request", Reason::BadRequest),
        (0x45, "PASIDE is clear, request with PASID", Reason::BadRequest),
        (0x46, "PASID beyond the directory", Reason::BadRequest),
        (0x47, "PRE is clear, page request", Reason::BadRequest),
        (0x48, "RID_PASID invalid", Reason::BadContext),
        (0x50, "PASID directory entry: access error", Reason::Unreadable),
        (0x51, "PASID directory entry not present", Reason::NotAttached),
        (0x52, "PASID directory entry: reserved bits", Reason::BadContext),
        (0x58, "PASID table entry: access error", Reason::Unreadable),
        (0x59, "PASID table entry not present", Reason::NotAttached),
        (0x5a, "PASID table entry: reserved bits", Reason::BadContext),
        (0x5b, "PASID table entry invalid", Reason::BadContext),
        (0x5c, "ERE is clear, request to execute", Reason::BadRequest),
        (0x5d, "SRE is clear, privileged request", Reason::BadRequest),
        (0x70, "first-stage entry: access error", Reason::Unreadable),
        (0x71, "first-stage entry not present", Reason::NotMapped),
        (0x72, "first-stage entry: reserved bits", Reason::BadEntry),
        (0x73, "first-stage root: access error", Reason::Unreadable),
        (0x74, "first-stage table beyond the second stage's width", Reason::BeyondWidth),
        (0x75, "first-stage root: no second-stage read", Reason::Permission),
        (0x76, "first-stage entry: no second-stage read", Reason::Permission),
        (0x77, "first-stage entry: no second-stage write", Reason::Permission),
        (0x78, "second-stage entry: access error", Reason::Unreadable),
        (0x79, "second-stage entry allows nothing", Reason::NotMapped),
        (0x7a, "second-stage entry: reserved bits", Reason::BadEntry),
        (0x7b, "second-stage root: access error", Reason::Unreadable),
        (0x7c, "A/D bit of the second stage, and walks do not snoop", Reason::BadContext),
        (0x7d, "A/D bit of the second stage: update failed", Reason::Unreadable),
        (0x80, "address not canonical", Reason::BeyondWidth),
        (0x81, "user request, supervisor page", Reason::Permission),
        (0x82, "no execute", Reason::Permission),
        (0x83, "address beyond HAW", Reason::BeyondWidth),
        (0x84, "second-stage input beyond its width", Reason::BeyondWidth),
        (0x85, "no write", Reason::Permission),
        (0x86, "no read", Reason::Permission),
        (0x87, "address in the range of interrupts", Reason::Other),
        (0x90, "A/D bit of the first stage, and walks do not snoop", Reason::BadContext),
        (0x91, "A/D bit of the first stage: update failed", Reason::Unreadable),
    ];

    #[test]
    fn each_code_has_its_reason_and_all_others_none() {
        for code in 0..=0xff_u8 {
            let listed = REASONS.iter().find(|listed| listed.0 == code);
            let (what, reason) = listed.map_or(("reserved", Reason::Other), |listed| (listed.1, listed.2));
            // A read with PASID 5.
            let high = record::F | record::T1 | record::PP | 5 << 40 | u64::from(code) << 32 | 0x1ff;
            let fault = decode(0x12_3000, high);
            assert_eq!((fault.reason, fault.code), (reason, code.into()), "{code:#x}: {what}");
            assert_eq!((fault.access, fault.pasid), (Some(Access::Read), Some(5)));
            let address = (code >> 4 != 2).then_some(Iova::new(0x12_3000));
            assert_eq!((fault.device, fault.address), (DeviceId(0x1ff), address), "{code:#x}: {what}");
        }
    }

    /// Records made by hand after lines that Linux prints, with other devices and addresses: "[DMA Read] Request device
    /// [00:16.7] .. [fault reason 0x06]", a write with 0x05, a write with 0x07, a write with PASID and 0x71.
    #[test]
    fn what_linux_prints_is_what_we_say() {
        let record = |device: u64, code: u64, rest: u64| record::F | code << 32 | device | rest;
        for (words, said) in [
            (
                (0xdcef_f000, record(0x00b7, 0x06, record::T1)),
                "device 0xb7 could not read 0xdceff000: nothing is mapped there for this (code 0x6)",
            ),
            (
                (0x6997_4000, record(0x0500, 0x05, 0)),
                "device 0x500 could not write 0x69974000: nothing is mapped there for this (code 0x5)",
            ),
            (
                (0xf0af_c000, record(0x0010, 0x07, 0)),
                "device 0x10 could not write 0xf0afc000: the unit could not read its structures (code 0x7)",
            ),
            (
                (0x7f00_0000_1000, record(0x0800, 0x71, record::PP | 3 << 40)),
                "device 0x800 could not write 0x7f0000001000 with PASID 3: nothing is mapped there for \
                 this (code 0x71)",
            ),
            (
                (0x21 << 48, record(0x00f8, 0x22, 0)),
                "device 0xf8 could not write memory: the code says why (code 0x22)",
            ),
        ] {
            assert_eq!(alloc::format!("{}", decode(words.0, words.1)), said);
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
