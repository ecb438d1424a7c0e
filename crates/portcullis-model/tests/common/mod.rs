//! Shared by tests: a small mapper that sets entries by hand, and a unit in front of it.
#![allow(dead_code)] // Each test uses its own part.

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr};
use portcullis::platform::Frames;
use portcullis::sync::{AtomicU64, Ordering};
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Segment};

pub const DEVICE: DeviceId = DeviceId(7);
pub const DOMAIN: DomainId = DomainId(3);
pub const PAGE: u64 = 4096;
pub const READ: Permissions = Permissions::READ;
pub const WRITE: Permissions = Permissions::WRITE;
pub const BOTH: Permissions = Permissions::READ_WRITE;

/// VT-d second-stage entries, as far as these tests need them.
pub mod vtd {
    use portcullis::addr::{PageSize, Permissions, PhysAddr};

    pub const READ: u64 = 1 << 0;
    pub const WRITE: u64 = 1 << 1;
    const PAGE_SIZE: u64 = 1 << 7;

    pub fn index(iova: u64, level: u32) -> usize {
        (iova >> (3 + 9 * level)) as usize % 512
    }

    pub fn page_size(level: u32) -> PageSize {
        PageSize::from_shift(3 + 9 * level).unwrap()
    }

    pub fn table_entry(table: PhysAddr) -> u64 {
        table.get() | READ | WRITE
    }

    pub fn leaf_entry(page: PhysAddr, permissions: Permissions, level: u32) -> u64 {
        let read = if permissions.allows(Permissions::READ) { READ } else { 0 };
        let write = if permissions.allows(Permissions::WRITE) { WRITE } else { 0 };
        page.get() | read | write | if level > 1 { PAGE_SIZE } else { 0 }
    }

    pub fn is_present(entry: u64) -> bool {
        entry & (READ | WRITE) != 0
    }

    pub fn is_leaf(entry: u64, level: u32) -> bool {
        level == 1 || entry & PAGE_SIZE != 0
    }

    pub fn target(entry: u64) -> PhysAddr {
        PhysAddr::new(entry & 0x000f_ffff_ffff_f000)
    }

    pub fn permissions(entry: u64) -> Option<Permissions> {
        match entry & 3 {
            0 => None,
            1 => Some(Permissions::READ),
            2 => Some(Permissions::WRITE),
            _ => Some(Permissions::READ_WRITE),
        }
    }
}

pub struct Mapper {
    pub memory: Arc<Memory>,
    pub root: PhysAddr,
    pub levels: u32,
}

impl Mapper {
    pub fn new(memory: &Arc<Memory>, levels: u32) -> Self {
        Self { memory: Arc::clone(memory), root: memory.alloc(1).unwrap(), levels }
    }

    pub fn context(&self, domain: DomainId) -> Context {
        Context::SecondStage { domain, root: self.root, levels: self.levels }
    }

    /// The table at `level` on the path to `iova`; makes missing ones.
    pub fn table(&self, iova: u64, level: u32) -> PhysAddr {
        let mut table = self.root;
        for above in (level + 1..=self.levels).rev() {
            let entry = &self.memory.table_at(table)[vtd::index(iova, above)];
            if !vtd::is_present(entry.load(Ordering::Relaxed)) {
                let below = self.memory.alloc(1).unwrap();
                entry.store(vtd::table_entry(below), Ordering::Release);
            }
            table = vtd::target(entry.load(Ordering::Relaxed));
        }
        table
    }

    pub fn entry(&self, iova: u64, level: u32) -> &AtomicU64 {
        &self.memory.table_at(self.table(iova, level))[vtd::index(iova, level)]
    }

    pub fn map_at(&self, iova: u64, phys: u64, permissions: Permissions, level: u32) {
        let leaf = vtd::leaf_entry(PhysAddr::new(phys), permissions, level);
        self.entry(iova, level).store(leaf, Ordering::Release);
    }

    /// Maps one 4 KiB page for reading and writing.
    pub fn map(&self, iova: u64, phys: u64) {
        self.map_at(iova, phys, BOTH, 1);
    }

    /// The target of `at` by the current tables: a walk independent of the unit's.
    pub fn walk(&self, at: u64, wanted: Permissions) -> Option<u64> {
        let mut table = self.root;
        for level in (1..=self.levels).rev() {
            let entry = self.memory.table_at(table)[vtd::index(at, level)].load(Ordering::Relaxed);
            if !vtd::permissions(entry)?.allows(wanted) {
                return None;
            }
            if vtd::is_leaf(entry, level) {
                return Some(vtd::target(entry).get() + (at & vtd::page_size(level).offset_mask()));
            }
            table = vtd::target(entry);
        }
        None
    }

    pub fn unmap(&self, iova: u64) {
        self.entry(iova, 1).store(0, Ordering::Release);
    }
}

/// A unit with one device behind tables of 4 levels.
pub fn rig() -> (Arc<Iommu>, Mapper) {
    rig_with(|_| ())
}

pub fn rig_with(change: impl FnOnce(&mut IommuConfig)) -> (Arc<Iommu>, Mapper) {
    let memory = Memory::new(64 << 20);
    let mut config = IommuConfig::new(Arc::clone(&memory));
    change(&mut config);
    let iommu = Iommu::new(config);
    let mapper = Mapper::new(&memory, 4);
    iommu.attach(DEVICE, mapper.context(DOMAIN));
    (iommu, mapper)
}

pub fn iova(at: u64) -> Iova {
    Iova::new(at)
}

pub fn phys(at: u64) -> PhysAddr {
    PhysAddr::new(at)
}

pub fn segment(at: u64, to: u64, len: u64) -> Segment {
    Segment { iova: iova(at), phys: phys(to), len }
}
