//! The translation part of the unit: contexts in, physical addresses out, through the caches.
//!
//! It has three lookups: [`translate`](Unit::translate) is a device's access, fills the caches and counts; [`peek`](Unit::peek) is the same
//! without side effects; [`route`](Unit::route) returns whether one address still leads to one place, and through what.

use std::num::NonZeroU32;
use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr};

use crate::absent::AbsentCache;
use crate::device_tlbs::DeviceTlbs;
use crate::fault::FaultReason;
use crate::iommu::Context;
use crate::iotlb::{Entry, Iotlb};
use crate::memory::{Memory, PHYS_END};
use crate::stats::Stats;
use crate::walk_cache::WalkCache;
use crate::walker::{TableFormat, TablePointer, Walk, find_leaf, walk};

/// The way from an address to memory.
#[derive(Debug)]
pub(crate) enum Route<'a> {
    /// The device is not translated.
    Passthrough,
    /// A translation cached by the device or the unit, with this mark.
    Cached(&'a mut Option<NonZeroU32>),
    /// The tables, found from the root or from a paging-structure cache.
    Tables,
}

/// The tables of one device.
#[derive(Debug, Clone, Copy)]
struct Tables {
    domain: DomainId,
    root: PhysAddr,
    format: TableFormat,
}

/// A context's treatment of one address.
enum Way {
    Identity,
    Through(Tables),
}

#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) memory: Arc<Memory>,
    pub(crate) device_tlbs: DeviceTlbs,
    pub(crate) iotlb: Iotlb,
    pub(crate) walk_cache: WalkCache,
    /// In caching mode, cached non-present entries.
    pub(crate) absent: Option<AbsentCache>,
    pub(crate) stats: Stats,
    /// Marks of evicted stale entries of the IOTLB or a device TLB; the ledger collects them.
    pub(crate) released: Vec<NonZeroU32>,
}

impl Unit {
    /// Translates an access of a device. Counts it, and fills and ages the caches.
    pub(crate) fn translate(
        &mut self,
        device: usize,
        context: Option<Context>,
        iova: Iova,
        access: Permissions,
    ) -> Result<PhysAddr, FaultReason> {
        self.stats.accesses += 1;
        let tables = match way(context, iova)? {
            Way::Identity => return Ok(PhysAddr::new(iova.get())),
            Way::Through(tables) => tables,
        };
        if let Some(entry) = self.device_tlbs.lookup(device, tables.domain, iova) {
            self.stats.device_tlb_hits += 1;
            return grant(entry.permissions, access, entry.translate(iova));
        }
        if let Some(entry) = self.iotlb.lookup(tables.domain, iova) {
            let phys = grant(entry.permissions, access, entry.translate(iova))?;
            self.released.extend(self.device_tlbs.keep(device, entry));
            return Ok(phys);
        }
        self.stats.iotlb_misses += 1;
        let (domain, format) = (tables.domain, tables.format);
        if let Some(level) = self.absent.as_mut().and_then(|absent| absent.lookup(domain, iova, format)) {
            return Err(FaultReason::NotPresent { level });
        }
        let start = self.walk_cache.lookup(tables.domain, iova, tables.format);
        let walk = walk(&self.memory, iova, tables.format, start.unwrap_or(tables.root()));
        self.account(&walk);
        for &pointer in &walk.tables {
            self.walk_cache.insert(tables.domain, iova, tables.format, pointer);
        }
        if let (Err(FaultReason::NotPresent { level }), Some(absent)) = (walk.result, &mut self.absent) {
            absent.insert(domain, iova, format, level);
        }
        let leaf = walk.result?;
        let permissions = leaf.allowed().ok_or(FaultReason::Permission)?;
        let entry = Entry {
            iova: iova.align_down(leaf.size),
            phys: leaf.page,
            stale: None,
            domain,
            size: leaf.size,
            permissions,
            by_part: format.forgets_by_part(),
        };
        // A walk that does not allow the access ends in a fault, and faults are not cached.
        let phys = grant(permissions, access, entry.translate(iova))?;
        let replaced = self.iotlb.insert(entry);
        self.released.extend(replaced.and_then(|old| old.stale));
        self.released.extend(self.device_tlbs.keep(device, entry));
        Ok(phys)
    }

    /// The target of an access, and its permissions. Changes nothing.
    pub(crate) fn peek(
        &self,
        device: usize,
        context: Option<Context>,
        iova: Iova,
    ) -> Option<(PhysAddr, Permissions)> {
        let tables = match way(context, iova).ok()? {
            Way::Identity => return Some((PhysAddr::new(iova.get()), Permissions::READ_WRITE)),
            Way::Through(tables) => tables,
        };
        let held = self.device_tlbs.of(device).and_then(|tlb| tlb.peek(tables.domain, iova));
        if let Some(entry) = held.or_else(|| self.iotlb.peek(tables.domain, iova)) {
            return Some((entry.translate(iova), entry.permissions));
        }
        self.peek_tables(tables, iova)
    }

    /// The way by which `iova` leads the device to `phys` now, if it does. A cached translation comes before the tables, the device's own
    /// before the unit's.
    pub(crate) fn route(
        &mut self,
        device: usize,
        context: Option<Context>,
        iova: Iova,
        phys: PhysAddr,
    ) -> Option<Route<'_>> {
        let tables = match way(context, iova).ok()? {
            Way::Identity => return (iova.get() == phys.get()).then_some(Route::Passthrough),
            Way::Through(tables) => tables,
        };
        // Not only a lookup's first result: of two entries for one address hardware may use either.
        let own = self.device_tlbs.of(device).and_then(|tlb| tlb.slot_reaching(tables.domain, iova, phys));
        if let Some(slot) = own {
            return self.device_tlbs.of_mut(device).map(|tlb| Route::Cached(tlb.mark(slot)));
        }
        if let Some(slot) = self.iotlb.slot_reaching(tables.domain, iova, phys) {
            return Some(Route::Cached(self.iotlb.mark(slot)));
        }
        let (reached, _) = self.peek_tables(tables, iova)?;
        (reached == phys).then_some(Route::Tables)
    }

    /// Invalidates the translations of `block`, which a driver named for its request `asked`, and the tables on the path unless they are to
    /// be `kept`.
    pub(crate) fn forget_range(&mut self, domain: DomainId, block: IovaRange, asked: IovaRange, kept: bool) {
        let released = &mut self.released;
        self.iotlb.invalidate_range(domain, block, asked, |entry| released.extend(entry.stale));
        if !kept {
            self.walk_cache.invalidate_range(domain, block);
        }
        if let Some(absent) = &mut self.absent {
            absent.forget_range(domain, block, kept);
        }
    }

    /// Invalidates everything of `domain`; but if a driver requested only `asked`, not a translation that it covers in part.
    pub(crate) fn forget_domain(&mut self, domain: DomainId, asked: Option<IovaRange>) {
        let released = &mut self.released;
        let gone =
            |entry: &Entry| entry.domain == domain && asked.is_none_or(|asked| entry.is_meant_by(asked));
        self.iotlb.invalidate_if(gone, |entry| released.extend(entry.stale));
        self.walk_cache.invalidate_domain(domain);
        if let Some(absent) = &mut self.absent {
            absent.forget_domain(domain);
        }
    }

    /// Invalidates `range` in a device TLB, or all of it.
    pub(crate) fn forget_of_device(&mut self, device: usize, range: Option<IovaRange>) {
        let released = &mut self.released;
        self.device_tlbs.invalidate(device, range, |entry| released.extend(entry.stale));
    }

    fn peek_tables(&self, tables: Tables, iova: Iova) -> Option<(PhysAddr, Permissions)> {
        let start = self.walk_cache.peek(tables.domain, iova, tables.format).unwrap_or(tables.root());
        let leaf = find_leaf(&self.memory, iova, tables.format, start).ok()?;
        Some((PhysAddr::new(leaf.page.get() | iova.page_offset(leaf.size)), leaf.allowed()?))
    }

    fn account(&mut self, walk: &Walk) {
        let stats = &mut self.stats;
        stats.table_reads += u64::from(walk.table_reads);
        stats.walks_into_freed_frames += u64::from(walk.freed_reads);
        stats.walk_cache_misses += u64::from(walk.table_reads > 1);
        for pointer in &walk.tables {
            if let Some(misses) = stats.misses_by_level.get_mut(pointer.level as usize - 1) {
                *misses += 1;
            }
        }
    }
}

impl Tables {
    fn root(self) -> TablePointer {
        TablePointer::root(self.root, self.format.levels())
    }
}

fn way(context: Option<Context>, iova: Iova) -> Result<Way, FaultReason> {
    let tables = match context.ok_or(FaultReason::NoContext)? {
        Context::Blocked => return Err(FaultReason::Blocked),
        Context::Passthrough if iova.get() >= PHYS_END => return Err(FaultReason::BeyondWidth),
        Context::Passthrough => return Ok(Way::Identity),
        Context::SecondStage { domain, root, levels } => {
            Tables { domain, root, format: TableFormat::VtdSecondStage { levels } }
        }
        Context::Translated { domain, root, format } => Tables { domain, root, format },
    };
    let Tables { format, root, .. } = tables;
    let geometry = format.geometry();
    if !format.is_valid() || !geometry.is_root(root) {
        return Err(FaultReason::BadContext);
    }
    if !geometry.fits(iova) {
        return Err(FaultReason::BeyondWidth);
    }
    Ok(Way::Through(tables))
}

fn grant(allowed: Permissions, wanted: Permissions, phys: PhysAddr) -> Result<PhysAddr, FaultReason> {
    if allowed.allows(wanted) { Ok(phys) } else { Err(FaultReason::Permission) }
}
