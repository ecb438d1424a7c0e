//! Tables of every format, built by hand in simulated memory from the manuals' constants, and walked.

mod amd;
mod arm;
mod arm_runs;
mod caches;
mod riscv;
mod vtd;
mod x86;

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::platform::Frames;
use portcullis_model::walker::{Leaf, Rights, TablePointer, Walk, walk};
use portcullis_model::{Context, DeviceId, FaultReason, Iommu, IommuConfig, Memory, TableFormat};

const DEVICE: DeviceId = DeviceId(1);
const DOMAIN: DomainId = DomainId(5);
const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;
const ALL: Rights = Rights::ALL;

/// A unit with one device behind tables of one format.
struct Rig {
    iommu: Arc<Iommu>,
    memory: Arc<Memory>,
    format: TableFormat,
    root: u64,
}

impl Rig {
    /// With a root of `frames` times 4 KiB.
    fn new(format: TableFormat, frames: usize) -> Self {
        let memory = Memory::with_base(PhysAddr::new(1 << 30), 64 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let root = memory.alloc(frames).unwrap().get();
        let rig = Self { iommu, memory, format, root };
        rig.attach(format, root);
        rig
    }

    fn attach(&self, format: TableFormat, root: u64) {
        let root = PhysAddr::new(root);
        self.iommu.attach(DEVICE, Context::Translated { domain: DOMAIN, root, format });
    }

    /// A table of `frames` times 4 KiB, empty.
    fn table(&self, frames: usize) -> u64 {
        self.memory.alloc(frames).unwrap().get()
    }

    fn set(&self, table: u64, index: u64, entry: u64) {
        self.memory.write(PhysAddr::new(table + 8 * index), &entry.to_le_bytes()).unwrap();
    }

    /// A walk from the root, with no cache in between.
    fn walk(&self, iova: u64) -> Walk {
        let start = TablePointer::root(PhysAddr::new(self.root), self.format.levels());
        walk(&self.memory, Iova::new(iova), self.format, start)
    }

    fn leaf(&self, iova: u64) -> Result<Leaf, FaultReason> {
        self.walk(iova).result
    }

    /// The page at `iova`: its address, the binary logarithm of its size and its rights.
    fn page(&self, iova: u64) -> Result<(u64, u32, Rights), FaultReason> {
        self.leaf(iova).map(|leaf| (leaf.page.get(), leaf.size.shift(), leaf.rights))
    }

    fn reason(&self, iova: u64) -> Option<FaultReason> {
        self.leaf(iova).err()
    }

    /// The target of a device's access, through the caches.
    fn go(&self, iova: u64, access: Permissions) -> Result<u64, FaultReason> {
        let mut reached = 0;
        self.iommu
            .translate_each(DEVICE, Iova::new(iova), 1, access, |_, to, _| reached = to.get())
            .map_err(|fault| fault.reason)?;
        assert_eq!(self.probe(iova), Some(reached), "a probe sees the same");
        Ok(reached)
    }

    fn probe(&self, iova: u64) -> Option<u64> {
        let anything = |access| self.iommu.probe(DEVICE, Iova::new(iova), access);
        anything(R).or_else(|| anything(W)).map(|to| to.get())
    }

    fn invalidate(&self, iova: u64, len: u64, leaf_only: bool) {
        let range = IovaRange::new(Iova::new(iova), len).unwrap();
        self.iommu.queue().invalidate(DOMAIN, Invalidation::Range { range, leaf_only }).unwrap();
    }
}

/// A fault of a non-present entry.
fn missing(level: u32) -> Option<FaultReason> {
    Some(FaultReason::NotPresent { level })
}

fn without(taken: Rights) -> Rights {
    ALL.without(taken)
}
