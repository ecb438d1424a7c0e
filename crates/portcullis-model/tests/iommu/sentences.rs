//! The text of faults.

use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis_model::{BadAddress, DeviceId, Fault, FaultReason};

use crate::said::{assert_said, pair};

#[test]
fn each_fault_says_why_and_where() {
    let fault = Fault {
        device: DeviceId(9),
        iova: Iova::new(0x7000),
        access: Permissions::WRITE,
        reason: FaultReason::NotPresent { level: 3 },
    };
    let said = [
        pair(FaultReason::NotPresent { level: 3 }, "the entry at level 3 is not present"),
        pair(FaultReason::Permission, "the translation does not allow it"),
        pair(FaultReason::ReservedBit, "an entry on the way has a reserved bit set"),
        pair(FaultReason::AccessFlag, "the entry's access flag is clear"),
        pair(FaultReason::AddressSize, "an entry on the way has an address that is too wide"),
        pair(FaultReason::InconsistentRun, "the entries of a contiguous run differ"),
        pair(FaultReason::BeyondWidth, "the address is wider than the tables"),
        pair(FaultReason::NoContext, "the device has no context"),
        pair(FaultReason::Blocked, "the device is blocked"),
        pair(FaultReason::BadContext, "the device's context is malformed"),
        pair(FaultReason::BadTable(PhysAddr::new(0x5000)), "the table at 0x5000 is not in the memory"),
        pair(FaultReason::NoMemory(PhysAddr::new(0x6000)), "there is no memory at 0x6000"),
        pair(fault, "device 9 may not access (-w) 0x7000: the entry at level 3 is not present"),
        pair(BadAddress { address: 0x1000, len: 0x20 }, "32 bytes at 0x1000 are not all inside the memory"),
    ];
    let sources = [include_str!("../../src/fault.rs"), include_str!("../../src/memory/mod.rs")];
    assert_said(&said, &sources);
}
