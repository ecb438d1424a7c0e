//! QEMU's VT-d, and the software IOMMU with the same registers. QEMU's caches translations and contexts, has one fault record, and drops repeats while that is full.
//!
//! In scalable mode QEMU 10.0 has either stage, and says of a request without PASID that it had PASID 0. It takes the width of the
//! first stage's addresses from the second stage's AW, which the manual has ignored there.

use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::{VtdSecondStage, X86FirstStage};
use portcullis_hw::vtd::{FirstStage, Mode, Unit};
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
        "intel-iommu,intremap=off,aw-bits=48,x-scalable-mode=on",
        "intel-iommu,intremap=off,aw-bits=39,x-scalable-mode=on",
        "intel-iommu,intremap=off,aw-bits=48,x-scalable-mode=on,caching-mode=on",
    ];
    const GAPS: &[(&str, &str)] = &[PASID_CACHE];

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Result<Machine> {
        Machine::pc(&[])
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(machine.host(REGISTERS))?))
    }

    fn confuse(machine: &Machine) -> bool {
        confuse(machine)
    }
});

kind_with_tables!(FirstStage<QemuHost>, X86FirstStage, {
    const UNITS: &[&str] = &[
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on",
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on,fs1gp=off",
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on,caching-mode=on",
    ];
    const GAPS: &[(&str, &str)] = &[PASID_CACHE];
    const WRITE_ONLY: bool = false;

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Result<Machine> {
        Machine::pc(&[])
    }

    fn start(machine: &Machine) -> Result<Self> {
        let unit = Unit::start_in(machine.host(REGISTERS), Mode::Scalable)?;
        Ok(Self::new(FirstStage::of(Arc::new(unit))?))
    }

    fn confuse(machine: &Machine) -> bool {
        confuse(machine)
    }
});

const PASID_CACHE: (&str, &str) =
    ("an invalidation of the PASID cache", "QEMU 10.0 has none, and reads PASID tables each time");

/// Puts a descriptor that is none at the tail of the unit's queue.
fn confuse(machine: &Machine) -> bool {
    const TAIL: usize = 0x88;
    const BASE: usize = 0x90;
    let registers = machine.window(REGISTERS);
    let (tail, base) = (registers.read64(TAIL), registers.read64(BASE));
    // Zeros are no descriptor. 256 of them are in the queue.
    let (bytes, size) = if base >> 11 & 1 == 0 { (16, 4096) } else { (32, 8192) };
    machine.ram().write(PhysAddr::new((base & !0xfff) + tail), &vec![0; bytes]);
    registers.write64(TAIL, (tail + bytes as u64) % size);
    true
}

kind_with_tables!(Unit<SoftwareHost>, VtdSecondStage, {
    const UNITS: &[&str] = &["software", "software, caching mode"];

    fn machine(unit: &str, _: &[&str]) -> Result<Machine> {
        Machine::software(unit.ends_with("caching mode"))
    }

    fn machine_without() -> Result<Machine> {
        Err("the software IOMMU is there".into())
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(SoftwareHost(machine.host(REGISTERS)))?))
    }
});
