//! QEMU's VT-d: it caches translations and contexts, has one fault record, and drops repeats while that is full.

use portcullis::addr::{DeviceId, DomainId};
use portcullis::invalidation::{InvalidationQueue, Request};
use portcullis::pgtable::VtdSecondStage;
use portcullis_hw::vtd::Unit;
use portcullis_hw::{Fault, Iommu};

use super::kind::{Kind, Tables, TablesMapper, kind_with_tables};
use super::machine::{Machine, QemuHost, Ram, Result};

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

    fn machine_without() -> Result<Machine> {
        Machine::pc(&[])
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(machine.host(REGISTERS))?))
    }
});
