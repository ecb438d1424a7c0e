//! QEMU's RISC-V IOMMU: it caches translations by 4 KiB, also of larger pages, and device contexts; both survive changes of mode.

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::Riscv;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::riscv::Unit;
use portcullis_hw::{Access, Fault, Iommu, Registers, UnitDomainBuilder, UnitTables};

use super::kind::{Careless, Kind, Tables, kind_with_tables};
use super::machine::{Machine, QemuHost, Result};

/// The unit's slot on bus 0, if it is on PCI, and its registers otherwise.
const SLOT: u32 = 1;
const REGISTERS: u64 = 0x301_0000;

/// The answer of an empty slot.
const NO_DEVICE: u32 = u32::MAX;

pub fn registers(machine: &Machine) -> u64 {
    if machine.configuration(SLOT, 0) == NO_DEVICE { REGISTERS } else { machine.place(SLOT, 0x10) }
}

kind_with_tables!(Unit<QemuHost>, Riscv, {
    const UNITS: &[&str] = &[
        // Both stages (the driver takes the first); contexts of the extended format.
        "riscv-iommu-pci,addr=01.0",
        "riscv-iommu-pci,addr=01.0,intremap=off",
        "riscv-iommu-pci,addr=01.0,s-stage=off",
        "riscv-iommu-pci,addr=01.0,s-stage=off,intremap=off,ats=off",
        "riscv-iommu-pci,addr=01.0,g-stage=off,ats=off",
        // All accesses pass after a reset.
        "riscv-iommu-pci,addr=01.0,off=off",
        // Part of the machine, and no PCI device.
        ",iommu-sys=on",
    ];
    const GAPS: &[(&str, &str)] = &[
        ("an invalidation that spares entries of tables", "the model caches leaves alone"),
        ("a large page that is forgotten by one address", "the model forgets 4 KiB of it"),
        ("a context that is read while it changes", "the model reads it at once"),
        ("commands in another order than the queue's", "the model has none"),
        ("directories of one and two levels", "the model walks three, and the driver takes the most"),
    ];
    const WRITE_ONLY: bool = false;
    /// QEMU records a read for every access of a device without a context.
    const UNATTACHED_WRITE: Option<Access> = Some(Access::Read);

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        if unit.starts_with(',') {
            Machine::riscv(unit, devices)
        } else {
            Machine::riscv("", &[&[unit], devices].concat())
        }
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::riscv("", &[]))
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(machine.host(registers(machine)))?))
    }

    fn confuse(machine: &Machine) -> bool {
        const BASE: usize = 0x18;
        const TAIL: usize = 0x24;
        let registers = machine.window(registers(machine));
        let tail = registers.read32(TAIL);
        let command = (registers.read64(BASE) >> 10 << 12) + u64::from(tail) * 16;
        // Zeros are no command.
        machine.ram().write(PhysAddr::new(command), &[0; 16]);
        registers.write32(TAIL, (tail + 1) % 256);
        true
    }
});
