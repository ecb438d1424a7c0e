//! The first stage of a unit in scalable mode, for domains whose tables are those of x86-64.

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

/// The same unit for domains with tables of the first stage: devices are attached to these by it,
/// and it is the [`InvalidationQueue`] of these. Domains of both stages may be there at once, each
/// with a number of its own.
///
/// The unit translates requests without PASID, and takes them for a user's: it refuses them pages that
/// are mapped as privileged. A page that a device may write it may read, too. Addresses are the lower
/// half of the canonical ones.
#[derive(Debug)]
pub struct FirstStage<H: Host>(Arc<Unit<H>>);

impl<H: Host> FirstStage<H> {
    /// The first stage of `unit`, which was started in scalable mode.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: it was not, or has none.
    pub fn of(unit: Arc<Unit<H>>) -> Result<Self, UnitError> {
        unit.capabilities().first_stage(unit.mode())?;
        Ok(Self(unit))
    }
}

// SAFETY: as the unit's, whose numbers it has, and whose structures lead to tables of either stage.
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

    /// No more than the second stage translates (MGAW), although the manual limits the first stage by
    /// its levels alone (section 3.6.1): units are reported that refuse more.
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

    /// Shuts the unit down, where this is the last that has it: [`UnitError::Shared`] else.
    fn shut_down(self) -> Result<(), UnitError> {
        self.0.shut_down()
    }
}

// SAFETY: as the unit's. What it has cached of the first stage under a domain's number it forgets
// by descriptors of that stage (section 6.5.2.4), which wait for accesses unasked, and `attach`
// leads only to PASID 0, which they name.
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
