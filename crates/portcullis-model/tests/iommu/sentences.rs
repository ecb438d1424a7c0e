//! What faults say, word for word.

use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis_model::{BadAddress, DeviceId, Fault, FaultReason};

#[test]
fn each_fault_says_why_and_where() {
    let fault = Fault {
        device: DeviceId(9),
        iova: Iova::new(0x7000),
        access: Permissions::WRITE,
        reason: FaultReason::NotPresent { level: 3 },
    };
    let said = [
        (FaultReason::NotPresent { level: 3 }.to_string(), "the entry at level 3 is not present"),
        (FaultReason::Permission.to_string(), "the translation does not allow it"),
        (FaultReason::ReservedBit.to_string(), "an entry on the way has a reserved bit set"),
        (FaultReason::AccessFlag.to_string(), "the entry's access flag is clear"),
        (FaultReason::AddressSize.to_string(), "an entry on the way has an address that is too wide"),
        (FaultReason::InconsistentRun.to_string(), "the entries of a contiguous run differ"),
        (FaultReason::BeyondWidth.to_string(), "the address is wider than the tables"),
        (FaultReason::NoContext.to_string(), "the device has no context"),
        (FaultReason::Blocked.to_string(), "the device is blocked"),
        (FaultReason::BadContext.to_string(), "the device's context is malformed"),
        (
            FaultReason::BadTable(PhysAddr::new(0x5000)).to_string(),
            "the table at 0x5000 is not in the memory",
        ),
        (FaultReason::NoMemory(PhysAddr::new(0x6000)).to_string(), "there is no memory at 0x6000"),
        (fault.to_string(), "device 9 may not access (-w) 0x7000: the entry at level 3 is not present"),
        (
            BadAddress { address: 0x1000, len: 0x20 }.to_string(),
            "0x20 bytes at 0x1000 are not all inside the memory",
        ),
    ];
    for (said, expected) in &said {
        assert_eq!(said, expected);
    }
    let sources = [include_str!("../../src/fault.rs"), include_str!("../../src/memory/mod.rs")];
    let sentences: usize = sources.iter().map(|source| source.matches("#[error(").count()).sum();
    assert_eq!(said.len(), sentences);
}
