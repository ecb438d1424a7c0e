//! Domains of units that walk page tables in memory.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;

use portcullis::addr::{DeviceId, DomainId, IovaRange};
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::Platform;

use super::{DomainError, UnitDomainBuilder, UnitMapper};
use crate::host::UnitError;
use crate::iommu::{Attachment, Iommu};

/// The queue of one domain of the unit `U`. While it exists, no other domain of the unit has its number.
#[derive(Debug)]
pub struct UnitQueue<X: Format, U: Iommu<X>> {
    unit: Arc<U>,
    number: DomainId,
    layout: PhantomData<X>,
}

/// The mapper of one domain of the unit `U`.
pub type UnitTables<X, U> = TableMapper<<U as Iommu<X>>::Frames, UnitQueue<X, U>, X>;

impl<X: Format, U: Iommu<X>> UnitQueue<X, U> {
    /// The domain's number.
    pub fn number(&self) -> DomainId {
        self.number
    }

    /// The unit.
    pub fn unit(&self) -> &Arc<U> {
        &self.unit
    }
}

impl<X: Format, U: Iommu<X>> Drop for UnitQueue<X, U> {
    fn drop(&mut self) {
        self.unit.numbers().give_back(self.number);
    }
}

// SAFETY: clauses 1 to 4 are the unit's: each method passes its call on.
unsafe impl<X: Format, U: Iommu<X>> InvalidationQueue for UnitQueue<X, U> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.unit.invalidate(domain, invalidation)
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.unit.submit(requests)
    }

    fn costs(&self) -> Costs {
        self.unit.costs()
    }

    fn caches_absent(&self) -> bool {
        self.unit.caches_absent()
    }
}

/// See [`Iommu::domain`].
pub(crate) fn builder<X: Format, U: Iommu<X>, P: Platform>(
    unit: &Arc<U>,
    number: DomainId,
) -> Result<UnitDomainBuilder<UnitTables<X, U>, P>, DomainError>
where
    U::Frames: Clone,
{
    unit.numbers().take(number, unit.domains())?;
    // From here on, its drop releases the number.
    let queue = UnitQueue { unit: Arc::clone(unit), number, layout: PhantomData };
    let table = PageTable::new(unit.frames().clone(), unit.layout()?)?;
    let mapper = TableMapper::new(table, queue, number, Vec::new());
    let builder = UnitDomainBuilder::new(mapper).last_iova(unit.last_iova());
    Ok(unit.reserved().iter().fold(builder, |builder, window| builder.without(*window)))
}

// SAFETY: 1 to 3: clauses 1 to 3 of `Iommu`, for `attach` and `detach`. Only `builder` makes a `UnitQueue`: with this table, which is of
// the unit's layout, under a number that is this table's alone, because the queue is dropped after the table.
unsafe impl<X: Format, U: Iommu<X>> UnitMapper for UnitTables<X, U> {
    unsafe fn attach_device(&self, device: DeviceId, _: &[IovaRange]) -> Result<(), UnitError> {
        let UnitQueue { unit, number, .. } = self.queue();
        let to = Attachment::table(*number, self.table());
        // SAFETY: 1: `builder` made the table of the unit's layout, the queue tells the unit its changes, and it exists as long as the
        // mapper, by the caller's clause 1. 2: the number is the queue's alone. 3: nothing passes through.
        unsafe { unit.attach(device, to) }
    }

    fn detach_device(&self, device: DeviceId) -> Result<(), UnitError> {
        self.queue().unit.detach(device)
    }
}
