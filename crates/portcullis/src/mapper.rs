//! [`Mapper`]: what changes translations, whatever the hardware.
//!
//! [`TableMapper`] is the one for an IOMMU that walks tables in memory and takes invalidations by a queue.

use alloc::vec::Vec;

use crate::addr::{IovaRange, PageSizes, Permissions, PhysAddr};
use crate::invalidation::{DomainId, Gather, InvalidationError, InvalidationQueue};
use crate::pgtable::{MapError, PageTable, Unmapped};
use crate::platform::Frames;

/// What an address space can hold.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// The addresses that can be translated.
    pub aperture: IovaRange,
    /// The page sizes of a translation; the smallest is the granule of every mapping.
    pub page_sizes: PageSizes,
    /// Ranges inside the aperture that never reach memory through a translation.
    pub reserved: Vec<IovaRange>,
}

/// Something that changes the translations of one address space.
///
/// All methods may be called on any number of CPUs at once for disjoint ranges. Addresses and lengths are
/// multiples of the granule.
pub trait Mapper: Send + Sync + 'static {
    /// What the address space can hold. It never changes.
    fn geometry(&self) -> &Geometry;

    /// Lets the device reach the memory at `phys` through `range`.
    ///
    /// # Errors
    /// [`MapError`]: the range is as it was before. What was entered and removed again meanwhile is added to
    /// `gather`, which the caller [syncs](Self::sync) before it uses the range again.
    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        permissions: Permissions,
        gather: &mut Gather,
    ) -> Result<(), MapError>;

    /// Removes the translations of `range`, holes or not, and adds what it removed to `gather`. A large page
    /// that sticks out of the range stays. Cannot fail, allocates nothing, does not wait.
    fn unmap(&self, range: IovaRange, gather: &mut Gather) -> Unmapped;

    /// Waits until no device can reach what is in `gather`. No lock or slot is held during the call.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError>;
}

/// A page table in memory and the queue of the IOMMU that walks it.
#[derive(Debug)]
pub struct TableMapper<F: Frames, Q: InvalidationQueue> {
    table: PageTable<F>,
    queue: Q,
    domain: DomainId,
    geometry: Geometry,
}

impl<F: Frames, Q: InvalidationQueue> TableMapper<F, Q> {
    /// Translations of `table`, which the hardware knows as `domain` and caches as `queue` is told.
    /// `reserved` is what the machine keeps from translation (on x86 the interrupt window).
    pub fn new(table: PageTable<F>, queue: Q, domain: DomainId, reserved: Vec<IovaRange>) -> Self {
        let geometry = Geometry { aperture: table.aperture(), page_sizes: table.page_sizes(), reserved };
        Self { table, queue, domain, geometry }
    }

    /// The page table.
    pub fn table(&self) -> &PageTable<F> {
        &self.table
    }
}

impl<F: Frames, Q: InvalidationQueue> Mapper for TableMapper<F, Q> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        permissions: Permissions,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let mut undone = None;
        let result = self.table.map(range, phys, permissions, &mut undone);
        if let Some(undone) = undone {
            gather.add(undone);
        }
        result
    }

    fn unmap(&self, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unmapped = self.table.unmap(range);
        if unmapped.bytes > 0 {
            gather.add(range);
        }
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        match gather.invalidation() {
            Some(invalidation) => self.queue.invalidate(self.domain, invalidation),
            None => Ok(()),
        }
    }
}
