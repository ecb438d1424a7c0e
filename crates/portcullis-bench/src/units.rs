//! The drivers of IOMMUs, each over a unit of software. The unit carries out its commands within the
//! write of the doorbell and takes no time of its own, so that a bench measures the driver alone.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::invalidation::InvalidationQueue;
use portcullis::pgtable::Format;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, SoftwareHost, VtD};
use portcullis_hw::{Attachment, Iommu, UnitError, amdvi, riscv, smmuv3, vtd};

pub use crate::pgtable::memory::Memory;

/// The longest that a driver waits: threads may have to take turns on a core.
const PATIENCE_NS: u64 = 10_000_000_000;

/// The drivers that submit commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// Intel's.
    VtD,
    /// AMD's.
    AmdVi,
    /// RISC-V's.
    RiscV,
    /// Arm's.
    SmmuV3,
}

fn now() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    // No truncation within five centuries.
    BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The number of the CPU that calls, for sharing waits: of the thread, as each has a core.
fn cpu() -> Option<usize> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static CPU: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    Some(CPU.with(|cpu| *cpu))
}

/// `cpus` share their waits.
fn host<K: Kind>(relax: fn(), cpus: usize) -> SoftwareHost<K, Memory<true>> {
    // SAFETY: the driver's host has the same frames.
    let unit = unsafe { Software::new(Memory) };
    SoftwareHost { unit, now, relax, patience: PATIENCE_NS, cpus, cpu }
}

/// A unit that is on, with a device in domain 1, whose invalidations it is told of.
///
/// # Errors
/// What the driver says of the unit.
pub fn ready<X: Format + Copy, U: Iommu<X>>(unit: U) -> Result<U, UnitError> {
    unit.enable()?;
    let (domain, root) = (DomainId(1), PhysAddr::new(1 << 20));
    let to = Attachment::Table { domain, root, format: unit.layout()? };
    // SAFETY: the unit walks no tables, and leads no device.
    unsafe { unit.attach(DeviceId(8), to) }?;
    Ok(unit)
}

impl Driver {
    /// A unit with its driver. `relax` is what a thread does that waits; `cpus` share their waits, or 0.
    ///
    /// # Errors
    /// What the driver says of the unit.
    pub fn queue(self, relax: fn(), cpus: usize) -> Result<Arc<dyn InvalidationQueue>, UnitError> {
        Ok(match self {
            Self::VtD => Arc::new(ready(vtd::Unit::start(host::<VtD>(relax, cpus))?)?),
            Self::AmdVi => {
                let config = amdvi::Config { last_device: 0xff, capability: None };
                Arc::new(ready(amdvi::Unit::start(host::<AmdVi>(relax, cpus), config)?)?)
            }
            Self::RiscV => Arc::new(ready(riscv::Unit::start(host::<RiscV>(relax, cpus))?)?),
            Self::SmmuV3 => Arc::new(ready(smmuv3::Unit::<_, 12>::start(host::<SmmuV3>(relax, cpus))?)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leads_its_device<X: Format + Copy, U: Iommu<X>>(unit: Result<U, UnitError>) {
        let unit = ready(unit.unwrap()).unwrap();
        unit.detach(DeviceId(8)).unwrap();
        assert!(matches!(unit.detach(DeviceId(8)), Err(UnitError::NotAttached { .. })));
    }

    #[test]
    fn a_unit_that_is_ready_leads_its_device() {
        let relax = std::thread::yield_now;
        leads_its_device(vtd::Unit::start(host::<VtD>(relax, 0)));
        let config = amdvi::Config { last_device: 0xff, capability: None };
        leads_its_device(amdvi::Unit::start(host::<AmdVi>(relax, 0), config));
        leads_its_device(riscv::Unit::start(host::<RiscV>(relax, 0)));
        leads_its_device(smmuv3::Unit::<_, 12>::start(host::<SmmuV3>(relax, 0)));
    }
}
