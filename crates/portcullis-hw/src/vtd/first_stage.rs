//! The first stage of a unit in scalable mode, with x86-64 page tables.

use alloc::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{Format, Layout, X86FirstStage};

use super::queue::Stage;
use super::tables::Lead;
use super::unit::Unit;
use crate::fault::Fault;
use crate::host::{Host, UnitError};
use crate::iommu::{Attachment, Iommu};
use crate::numbers::Numbers;

/// The same unit for domains with first-stage tables: it attaches devices to these, and is their [`InvalidationQueue`]. A unit may have
/// domains of both stages, with different numbers.
///
/// The unit translates requests without PASID, as user accesses: it refuses them pages that are mapped as privileged. A writable page is
/// readable. Addresses are the lower half of the canonical ones.
#[derive(Debug)]
pub struct FirstStage<H: Host>(Arc<Unit<H>>);

impl<H: Host> FirstStage<H> {
    /// The first stage of `unit`, which was started in scalable mode.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: it was not, or has no first stage.
    pub fn of(unit: Arc<Unit<H>>) -> Result<Self, UnitError> {
        unit.capabilities().first_stage(unit.mode())?;
        Ok(Self(unit))
    }
}

// SAFETY: clauses 1 to 5 are the unit's, whose numbers it has, and whose structures lead to tables of either stage.
unsafe impl<H: Host> Iommu<X86FirstStage> for FirstStage<H> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.0.frames()
    }

    fn numbers(&self) -> &Numbers {
        self.0.numbers()
    }

    fn layout(&self) -> Result<X86FirstStage, UnitError> {
        self.0.capabilities().first_stage(self.0.mode())
    }

    fn domains(&self) -> (DomainId, DomainId) {
        self.0.domains()
    }

    fn reserved(&self) -> &'static [IovaRange] {
        self.0.reserved()
    }

    /// At most the second stage's width (MGAW), although in the manual only its levels limit the first stage (section 3.6.1): some units
    /// are reported to refuse more.
    fn last_iova(&self) -> Iova {
        let unit = self.0.capabilities().last_iova();
        self.layout().map_or(Iova::new(0), |layout| layout.last_iova().min(unit))
    }

    fn enable(&self) -> Result<(), UnitError> {
        self.0.enable()
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<X86FirstStage>) -> Result<(), UnitError> {
        match to {
            Attachment::Table { domain, root, format } => {
                let levels = format.levels();
                if !self.0.capabilities().walks_first_stage(&format) {
                    return Err(UnitError::NoSuchTables { levels });
                }
                self.0.attach_to(device, Some(domain), Lead::FirstStage { root, levels, fspm: format.fspm() })
            }
            Attachment::PassThrough => self.0.attach_to(device, None, Lead::PassThrough),
        }
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        self.0.detach(device)
    }

    fn next_fault(&self) -> Option<Fault> {
        self.0.next_fault()
    }

    /// Shuts down the unit if this is its last `Arc`: [`UnitError::Shared`] otherwise.
    fn shut_down(self) -> Result<(), UnitError> {
        self.0.shut_down()
    }
}

// SAFETY: clauses 1 to 4 are the unit's. First-stage translations under a domain's number are invalidated by descriptors of that stage
// (section 6.5.2.4), which always drain, and name PASID 0, the only one that `attach` uses.
unsafe impl<H: Host> InvalidationQueue for FirstStage<H> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.0.carry_out(requests, Stage::First)
    }

    fn caches_absent(&self) -> bool {
        self.0.caches_absent()
    }
}
