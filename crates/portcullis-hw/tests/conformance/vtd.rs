//! QEMU's VT-d, and the software IOMMU with the same registers. QEMU's caches translations and contexts, has one fault record, and drops repeats while that is full.

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::VtdSecondStage;
use portcullis_hw::vtd::Unit;
use portcullis_hw::{Fault, Iommu, Registers};

use super::kind::{Kind, Tables, TablesMapper, kind_with_tables};
use super::machine::{Machine, QemuHost, Ram, Result, SoftwareHost};

/// Where `q35` has the unit's registers.
pub const REGISTERS: u64 = 0xfed9_0000;

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

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(SoftwareHost(machine.host(REGISTERS)))?))
    }
});
