//! *Caching mode*: non-present entries are cached until they are invalidated.
//!
//! Intel VT-d lets hardware in caching mode (CAP.CM, architecture specification, "Caching Mode") cache non-present entries, in all of its
//! caches, so every change of an entry must be followed by an invalidation, also one that makes it present. AMD-Vi has the same for
//! emulated IOMMUs (NpCache, publication 48882). A non-present entry above the lowest level may stand for a table as well as for a page, so
//! an invalidation with the leaf-only hint keeps it.
//!
//! A device that finds one faults; a [probe](crate::Iommu::probe) ignores them, because hardware need not cache them.

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::iotlb::{Entry, Iotlb, IotlbConfig};
use crate::walker::TableFormat;

/// The cached non-present entries, by the addresses that they would translate.
#[derive(Debug)]
pub(crate) struct AbsentCache {
    lowest: Iotlb,
    others: Iotlb,
}

impl AbsentCache {
    /// As many as the IOTLB has translations, of the lowest level and of all others.
    pub(crate) fn new(config: IotlbConfig) -> Self {
        Self { lowest: Iotlb::new(config), others: Iotlb::new(config) }
    }

    /// The level of a cached non-present entry on the path to `iova`.
    pub(crate) fn lookup(&mut self, domain: DomainId, iova: Iova, format: TableFormat) -> Option<u32> {
        let entry = self.others.lookup(domain, iova).or_else(|| self.lowest.lookup(domain, iova))?;
        (1..=format.levels()).find(|level| format.geometry().shift(*level) == entry.size.shift())
    }

    /// Caches the non-present entry at `level` on the path to `iova`.
    pub(crate) fn insert(&mut self, domain: DomainId, iova: Iova, format: TableFormat, level: u32) {
        let Some(size) = PageSize::from_shift(format.geometry().shift(level)) else { return };
        let (phys, permissions) = (PhysAddr::new(0), Permissions::READ);
        let entry = Entry { iova, phys, stale: None, domain, size, permissions, by_part: true };
        let cache = if level == 1 { &mut self.lowest } else { &mut self.others };
        cache.insert(entry);
    }

    /// Invalidates entries on the path to a part of `block`; if `leaf_only`, only entries that cannot stand for a table.
    pub(crate) fn forget_range(&mut self, domain: DomainId, block: IovaRange, leaf_only: bool) {
        self.lowest.invalidate_range(domain, block, block, |_| ());
        if !leaf_only {
            self.others.invalidate_range(domain, block, block, |_| ());
        }
    }

    pub(crate) fn forget_domain(&mut self, domain: DomainId) {
        self.lowest.invalidate_domain(domain, |_| ());
        self.others.invalidate_domain(domain, |_| ());
    }
}
