//! QEMU's AMD-Vi: it caches translations, reads a device's entry whenever it has no translation of the address, and an invalidation of any
//! pages takes all of the domain.

use portcullis::addr::{DeviceId, DomainId, IovaRange};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::AmdV1;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::{Ivrs, Reserved};
use portcullis_hw::amdvi::{Config, Unit};
use portcullis_hw::{Fault, Iommu, Registers, UnitDomainBuilder, UnitTables};

use super::kind::{Careless, Kind, Tables, kind_with_tables, table};
use super::machine::{Machine, QemuHost, Result};

pub const REGISTERS: u64 = 0xfed8_0000;

/// The first word of the unit's capability block, as a kernel finds it: block 0x0f of the function of class 8, subclass 6.
fn capability(machine: &Machine) -> Option<u32> {
    let slot = (0..32).find(|slot| machine.configuration(*slot, 8) >> 16 == 0x0806)?;
    let mut at = machine.configuration(slot, 0x34) & 0xfc;
    // A list has at most 48 blocks.
    for _ in 0..48 {
        let header = machine.configuration(slot, at);
        match (at, header & 0xff) {
            (0, _) => return None,
            (_, 0x0f) => return Some(header),
            _ => at = header >> 8 & 0xfc,
        }
    }
    None
}

kind_with_tables!(Unit<QemuHost>, AmdV1, {
    // Without `pt=off`, QEMU 10 translates nothing at all.
    const UNITS: &[&str] = &[
        "amd-iommu,pt=off,intremap=off",
        "amd-iommu,pt=off,intremap=off,device-iotlb=on",
        "amd-iommu,pt=off,intremap=off,xtsup=on",
    ];

    const RECORDS: std::result::Result<(), &str> =
        Err("QEMU's event log gets no entry before version 11: it always takes the log to be full");

    const GAPS: &[(&str, &str)] = &[
        ("that an invalidation names the right pages", "QEMU forgets all of the domain"),
        ("that a device's entry is forgotten", "QEMU 10 reads it whenever it has no translation"),
        ("that a command is known", "QEMU goes on behind one that is not"),
    ];

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::pc(&[]))
    }

    /// By a memory block of one device: identity-mapped, readable, writable.
    fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
        let (start, len) = (range.start().get().to_le_bytes(), range.len().to_le_bytes());
        let number = (device.0 as u16).to_le_bytes();
        let parts = [&[0; 12][..], &[0x21, 0b111, 32, 0], &number, &[0; 10], &start, &len];
        let ivrs = Ivrs::parse(&table(*b"IVRS", &parts))?;
        let region = ivrs.reserved_for(0, device.0 as u16).next();
        Ok(region.ok_or("no region of this device")?)
    }

    fn start(machine: &Machine) -> Result<Self> {
        // QEMU reports caching mode, so each map ends with an invalidation, and that would hide one that an unmap omits: QEMU takes it for
        // all of the domain. The last configuration (XTSup) is for a host that cannot read the block.
        let can_read = machine.window(REGISTERS).read64(0x30) & 1 << 2 == 0;
        let config = Config { capability: capability(machine).filter(|_| can_read), ..Config::default() };
        Ok(Self::new(Unit::start(machine.host(REGISTERS), config)?))
    }
});
