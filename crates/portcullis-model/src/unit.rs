//! The translating part of the unit: contexts in, physical addresses out, through the caches.
//!
//! It knows three ways to ask: [`translate`](Unit::translate) is a device's access and fills the caches and
//! counts; [`peek`](Unit::peek) is the same way without a trace; [`route`](Unit::route) asks whether one
//! address still leads to one place, and by what.

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

/// By what an address leads to memory.
#[derive(Debug)]
pub(crate) enum Route<'a> {
    /// The device is not translated.
    Passthrough,
    /// A translation cached by the device or the unit, whose mark this is.
    Cached(&'a mut Option<NonZeroU32>),
    /// The tables, found from the root or from a paging-structure cache.
    Tables,
}

/// Where one device's accesses are translated.
#[derive(Debug, Clone, Copy)]
struct Tables {
    domain: DomainId,
    root: PhysAddr,
    format: TableFormat,
}

/// What a context comes to for one address.
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
    /// In caching mode, entries that were found absent.
    pub(crate) absent: Option<AbsentCache>,
    pub(crate) stats: Stats,
    /// Marks of the stale entries that have left the IOTLB or a device's TLB; the ledger collects them.
    pub(crate) released: Vec<NonZeroU32>,
}

impl Unit {
    /// Where an access of the device of this number goes. Counts it, fills the caches and ages them.
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

    /// Where an access would go, and what it might do there. Changes nothing.
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

    /// By what `iova` leads the device to `phys` now, if it does. A cached translation is named before the tables,
    /// the device's own before the unit's.
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
        // Not only what a lookup would find first: of two entries for one address hardware may use either.
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

    /// Forgets the translations of `block`, which a driver named because it wants those of `asked` forgotten, and the tables
    /// that lead to it unless they are to be `kept`.
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

    /// Forgets everything of `domain`; but if a driver did not `ask` for that, no translation of which it asked for a part.
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

    /// Has a device forget what its own TLB holds of `range`, or all of it.
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
