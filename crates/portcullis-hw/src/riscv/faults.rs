//! The fault queue, decoded into [`Fault`]s.

use portcullis::addr::{DeviceId, Iova};
use portcullis::platform::Frames;

use super::layout::{FAULTS, csr, record, reg};
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Registers, UnitError};

#[derive(Debug)]
pub(super) struct FaultQueue {
    records: Words,
    /// Index of the next record.
    head: u32,
}

impl FaultQueue {
    /// A queue of one frame, at index 0. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Ok(Self { records: Words::new(frames, 1)?, head: 0 })
    }

    pub fn address(&self) -> u64 {
        self.records.phys().get()
    }

    /// Frees the frame.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe { self.records.free(frames) };
    }

    /// The next fault. If there is none, and the queue has overflowed, lets the unit record again.
    pub fn next<R: Registers, F: Frames>(&mut self, registers: &R, frames: &F) -> Option<Fault> {
        let tail = registers.read32(reg::FQT);
        if tail >= FAULTS {
            // No valid index: the unit does not answer.
            return None;
        }
        if tail == self.head {
            let control = registers.read32(reg::FQCSR);
            let errors = control & csr::FAULT_ERRORS;
            if control != u32::MAX && control & csr::BUSY == 0 && errors != 0 {
                registers.write32(reg::FQCSR, control & csr::KEPT | csr::ENABLE | errors);
            }
            return None;
        }
        let first = self.head as usize * record::WORDS;
        let word = |index| self.records.load_from_unit(frames, first + index);
        let fault = decode(word(0), word(record::ADDRESS));
        self.head = (self.head + 1) % FAULTS;
        registers.write32(reg::FQH, self.head);
        Some(fault)
    }
}

fn decode(header: u64, address: u64) -> Fault {
    let cause = record::cause(header);
    let transaction = record::transaction(header);
    Fault {
        device: DeviceId(record::device(header)),
        pasid: (header & record::PROCESS_VALID != 0).then(|| record::process(header)),
        // 1 to 8 are accesses and translation requests.
        address: (1..=8).contains(&transaction).then(|| Iova::new(address)),
        access: access_of(cause).or_else(|| access_of_transaction(transaction)),
        reason: reason_of(cause),
        code: cause,
    }
}

/// The access that a cause tells, as in a record or in a kernel's log. Access and page faults have a cause for each kind of access. (QEMU 10
/// gives a write as the transaction of all of them.)
pub const fn access_of(cause: u32) -> Option<Access> {
    match cause {
        1 | 12 | 20 => Some(Access::Execute),
        4 | 5 | 13 | 21 => Some(Access::Read),
        // Atomic operations count as writes.
        6 | 7 | 15 | 23 => Some(Access::Write),
        _ => None,
    }
}

const fn access_of_transaction(transaction: u32) -> Option<Access> {
    match transaction {
        1 | 5 => Some(Access::Execute),
        2 | 6 => Some(Access::Read),
        3 | 7 => Some(Access::Write),
        _ => None,
    }
}

/// The meaning of a cause, as in a record or in a kernel's log.
///
/// Source: section "Fault/Event-Queue", table of the encodings of `CAUSE`.
pub const fn reason_of(cause: u32) -> Reason {
    match cause {
        // All accesses are refused; or the context, an entry on the path to it, or the process context is not valid.
        256 | 258 | 266 => Reason::NotAttached,
        // A malformed device or process context.
        259 | 267 => Reason::BadContext,
        260 => Reason::BadRequest,
        // Page faults of both stages: not present, no permission, reserved bits, or an address beyond the width. And an MSI's entry.
        12 | 13 | 15 | 20 | 21 | 23 | 262 => Reason::NotMapped,
        263 => Reason::BadEntry,
        // An access fault, or corrupted data.
        1 | 5 | 7 | 257 | 261 | 264 | 265 | 268..=271 | 274 => Reason::Unreadable,
        // Misalignment; an internal error, or an error of the unit's own MSI.
        _ => Reason::Other,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refused_write_and_a_device_that_is_attached_to_nothing() {
        let fault = decode(0x28 << 40 | 3 << 34 | 15, 0x80_0123);
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0123))));
        assert_eq!((fault.access, fault.reason, fault.pasid), (Some(Access::Write), Reason::NotMapped, None));

        let fault = decode(0xff_ffff << 40 | 2 << 34 | 1 << 32 | 7 << 12 | 258, 0);
        assert_eq!((fault.device, fault.pasid), (DeviceId(0xff_ffff), Some(7)));
        assert_eq!((fault.access, fault.reason), (Some(Access::Read), Reason::NotAttached));
    }

    #[test]
    fn the_cause_of_a_page_fault_tells_the_access_whatever_the_transaction() {
        for (cause, access) in [(12, Access::Execute), (13, Access::Read), (15, Access::Write)] {
            for transaction in [1_u64, 2, 3] {
                assert_eq!(decode(transaction << 34 | cause, 0).access, Some(access));
            }
        }
    }

    /// Section "Fault/Event-Queue" (version 1.0), table of the encodings of `CAUSE`.
    const CAUSES: [(u32, &str, Reason, Option<Access>); 32] = [
        (1, "instruction access fault", Reason::Unreadable, Some(Access::Execute)),
        (4, "read address misaligned", Reason::Other, Some(Access::Read)),
        (5, "read access fault", Reason::Unreadable, Some(Access::Read)),
        (6, "write/AMO address misaligned", Reason::Other, Some(Access::Write)),
        (7, "write/AMO access fault", Reason::Unreadable, Some(Access::Write)),
        (12, "instruction page fault", Reason::NotMapped, Some(Access::Execute)),
        (13, "read page fault", Reason::NotMapped, Some(Access::Read)),
        (15, "write/AMO page fault", Reason::NotMapped, Some(Access::Write)),
        (20, "instruction guest page fault", Reason::NotMapped, Some(Access::Execute)),
        (21, "read guest page fault", Reason::NotMapped, Some(Access::Read)),
        (23, "write/AMO guest page fault", Reason::NotMapped, Some(Access::Write)),
        (256, "all inbound transactions disallowed", Reason::NotAttached, None),
        (257, "DDT entry load access fault", Reason::Unreadable, None),
        (258, "DDT entry not valid", Reason::NotAttached, None),
        (259, "DDT entry misconfigured", Reason::BadContext, None),
        (260, "transaction type disallowed", Reason::BadRequest, None),
        (261, "MSI PTE load access fault", Reason::Unreadable, None),
        (262, "MSI PTE not valid", Reason::NotMapped, None),
        (263, "MSI PTE misconfigured", Reason::BadEntry, None),
        (264, "MRIF access fault", Reason::Unreadable, None),
        (265, "PDT entry load access fault", Reason::Unreadable, None),
        (266, "PDT entry not valid", Reason::NotAttached, None),
        (267, "PDT entry misconfigured", Reason::BadContext, None),
        (268, "DDT data corruption", Reason::Unreadable, None),
        (269, "PDT data corruption", Reason::Unreadable, None),
        (270, "MSI PT data corruption", Reason::Unreadable, None),
        (271, "MSI MRIF data corruption", Reason::Unreadable, None),
        (272, "internal data path error", Reason::Other, None),
        (273, "IOMMU MSI write access fault", Reason::Other, None),
        (274, "page table data corruption", Reason::Unreadable, None),
        // Reserved, and implementation-defined.
        (275, "reserved", Reason::Other, None),
        (2048, "custom", Reason::Other, None),
    ];

    #[test]
    fn each_cause_has_its_reason_and_all_others_none() {
        for cause in 0..=0xfff_u32 {
            let listed = CAUSES.iter().find(|listed| listed.0 == cause);
            let (what, reason, access) =
                listed.map_or(("reserved", Reason::Other, None), |listed| (listed.1, listed.2, listed.3));
            // A read: TTYP is 2.
            let fault = decode(0x28 << 40 | 2 << 34 | u64::from(cause), 0x80_0123);
            assert_eq!((fault.reason, fault.code), (reason, cause), "{cause}: {what}");
            assert_eq!(fault.access, access.or(Some(Access::Read)), "{cause}: {what}");
            assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0123))));
        }
    }

    #[test]
    fn what_was_accessed_for_is_told_of_each_cause_and_transaction() {
        let of = |all: [(&[u32], Access); 3], number: u32| {
            all.iter().find(|(numbers, _)| numbers.contains(&number)).map(|(_, access)| *access)
        };
        let causes: [(&[u32], Access); 3] = [
            (&[1, 12, 20], Access::Execute),
            (&[4, 5, 13, 21], Access::Read),
            (&[6, 7, 15, 23], Access::Write),
        ];
        let transactions: [(&[u32], Access); 3] =
            [(&[1, 5], Access::Execute), (&[2, 6], Access::Read), (&[3, 7], Access::Write)];
        for number in 0..=0xfff {
            assert_eq!(access_of(number), of(causes, number), "{number}");
            assert_eq!(access_of_transaction(number), of(transactions, number), "{number}");
        }
    }

    #[test]
    fn every_record_is_decoded() {
        for cause in 0..=0xfff_u64 {
            for transaction in 0..64 {
                let fault = decode(cause | transaction << 34 | 0xffff_ff03_ffff_f000, u64::MAX);
                assert_eq!(fault.code, cause as u32);
                assert_eq!(fault.address.is_some(), (1..=8).contains(&transaction));
            }
        }
    }
}
