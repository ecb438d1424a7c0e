//! Entries that were found absent, and are taken to be so until they are invalidated: *caching mode*.
//!
//! Intel VT-d lets hardware that says so (CAP.CM, architecture specification, "Caching Mode") cache what is not present, in all
//! of its caches, so every change of an entry must be followed by an invalidation, also one that makes it present. AMD-Vi has
//! the same for IOMMUs that a hypervisor emulates (NpCache, publication 48882). An absent entry above the lowest level may stand
//! for a table as well as for a page, so it is kept where an invalidation says that only leaves have changed.
//!
//! A device that finds one faults; one that asks what it *could* reach does not ask here, as hardware need not cache them.

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::iotlb::{Entry, Iotlb, IotlbConfig};
use crate::walker::TableFormat;

/// The absent entries: by the addresses that they would translate.
#[derive(Debug)]
pub(crate) struct AbsentCache {
    lowest: Iotlb,
    others: Iotlb,
}

impl AbsentCache {
    /// Room for as many as the IOTLB has for translations, of the lowest level and of all others.
    pub(crate) fn new(config: IotlbConfig) -> Self {
        Self { lowest: Iotlb::new(config), others: Iotlb::new(config) }
    }

    /// The level of an absent entry on the way to `iova`.
    pub(crate) fn lookup(&mut self, domain: DomainId, iova: Iova, format: TableFormat) -> Option<u32> {
        let entry = self.others.lookup(domain, iova).or_else(|| self.lowest.lookup(domain, iova))?;
        (1..=format.levels()).find(|level| format.geometry().shift(*level) == entry.size.shift())
    }

    /// The entry at `level` on the way to `iova` is absent.
    pub(crate) fn insert(&mut self, domain: DomainId, iova: Iova, format: TableFormat, level: u32) {
        let Some(size) = PageSize::from_shift(format.geometry().shift(level)) else { return };
        let (phys, permissions) = (PhysAddr::new(0), Permissions::READ);
        let entry = Entry { iova, phys, stale: None, domain, size, permissions, by_part: true };
        let cache = if level == 1 { &mut self.lowest } else { &mut self.others };
        cache.insert(entry);
    }

    /// Forgets what is on the way to a part of `block`; if `leaf_only`, only where no table can have been meant.
    pub(crate) fn forget_range(&mut self, domain: DomainId, block: IovaRange, leaf_only: bool) {
        self.lowest.invalidate_range(domain, block, block, |_| ());
        if !leaf_only {
            self.others.invalidate_range(domain, block, block, |_| ());
        }
    }

    /// Forgets everything of `domain`.
    pub(crate) fn forget_domain(&mut self, domain: DomainId) {
        self.lowest.invalidate_domain(domain, |_| ());
        self.others.invalidate_domain(domain, |_| ());
    }
}
