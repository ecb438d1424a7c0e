//! QEMU's VT-d, and the software IOMMU with the same registers. QEMU's caches translations and contexts, has one fault record, and drops repeats while that is full.

use portcullis::addr::{DeviceId, DomainId, IovaRange, PhysAddr};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::VtdSecondStage;
use portcullis_hw::acpi::{Dmar, Reserved};
use portcullis_hw::vtd::Unit;
use portcullis_hw::{Fault, Iommu, Registers};

use super::kind::{Kind, Tables, TablesMapper, kind_with_tables, table};
use super::machine::{Machine, QemuHost, Ram, Result, SoftwareHost};

/// Where `q35` has the unit's registers.
pub const REGISTERS: u64 = 0xfed9_0000;

/// A reserved memory region structure, and what is read of it.
fn reserved_region(device: DeviceId, range: IovaRange) -> Result<Reserved> {
    let (first, last) = (range.start().get().to_le_bytes(), range.last().get().to_le_bytes());
    let scope = [1, 8, 0, 0, 0, 0, (device.0 >> 3) as u8, (device.0 & 7) as u8];
    let parts = [&[47, 0][..], &[0; 10], &[1, 0, 32, 0, 0, 0, 0, 0], &first, &last, &scope];
    let said = Dmar::parse(&table(*b"DMAR", &parts))?.reserved;
    let mut regions =
        said.iter().filter(|(_, scope, _)| scope.device(|_| None).map(u32::from) == Some(device.0));
    Ok(regions.next().ok_or("no region of this device")?.2)
}

kind_with_tables!(Unit<QemuHost>, VtdSecondStage, {
    const UNITS: &[&str] = &[
        "intel-iommu,intremap=off,aw-bits=48",
        "intel-iommu,intremap=off,aw-bits=39",
        "intel-iommu,intremap=off,aw-bits=48,caching-mode=on",
        "intel-iommu,intremap=off,aw-bits=48,snoop-control=on",
    ];

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::pc(&[]))
    }

    fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
        reserved_region(device, range)
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(machine.host(REGISTERS))?))
    }

    fn confuse(machine: &Machine) -> bool {
        const TAIL: usize = 0x88;
        const BASE: usize = 0x90;
        let registers = machine.window(REGISTERS);
        let tail = registers.read64(TAIL);
        // Zeros are no descriptor.
        machine.ram().write(PhysAddr::new((registers.read64(BASE) & !0xfff) + tail), &[0; 16]);
        registers.write64(TAIL, (tail + 16) % 4096);
        true
    }
});

kind_with_tables!(Unit<SoftwareHost>, VtdSecondStage, {
    const UNITS: &[&str] = &["software", "software, caching mode"];
    const CACHES_ABSENT: std::result::Result<(), &str> = Ok(());

    fn machine(unit: &str, _: &[&str]) -> Result<Machine> {
        Machine::software(unit.ends_with("caching mode"))
    }

    fn machine_without() -> Option<Result<Machine>> {
        None
    }

    fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
        reserved_region(device, range)
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(SoftwareHost(machine.host(REGISTERS)))?))
    }
});
