//! A driver that maps page by page, with addresses as Linux allocates them.
//!
//! Written from publications (Bonwick and Adams, "Magazines and Vmem", 2001; Peleg et al., "Utilizing the IOMMU scalably", 2015): each CPU
//! frees to two magazines of 128 pages, a depot of 32 full ones serves all CPUs, and behind them an allocator returns the highest address
//! that fits (there a tree, here a bitmap with the same results).

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, Permissions};
use portcullis::invalidation::Gather;
use portcullis::iova::Bitmap;
use portcullis::mapper::{Mapper, TableMapper};
use portcullis_model::open::OpenMapper;
use portcullis_model::{Descriptor, Iommu, Memory, Queue};

use super::driver::{CPUS, Cpus, DOMAIN, Driver, MEMORY, Mapped, NIC, PAGE, Purpose, table};

/// Pages that a magazine holds.
const MAGAZINE: usize = 128;
/// Magazines that the depot holds.
const DEPOT: usize = 32;
/// Pages of 48 bits of addresses.
const SPACE: u64 = 1 << 36;

/// The magazines of one CPU.
#[derive(Default)]
struct Local {
    loaded: Vec<u64>,
    previous: Vec<u64>,
}

struct Magazines {
    cpus: Vec<Local>,
    depot: Vec<Vec<u64>>,
    behind: Bitmap,
}

impl Magazines {
    fn new() -> Self {
        let mut behind = Bitmap::new();
        behind.add(1, SPACE - 1).unwrap();
        Self { cpus: (0..CPUS).map(|_| Local::default()).collect(), depot: Vec::new(), behind }
    }

    fn take(&mut self, cpu: usize) -> u64 {
        let Local { loaded, previous } = &mut self.cpus[cpu];
        if loaded.is_empty() {
            std::mem::swap(loaded, previous);
        }
        if loaded.is_empty()
            && let Some(full) = self.depot.pop()
        {
            *loaded = full;
        }
        loaded.pop().unwrap_or_else(|| self.behind.alloc(1, 0, SPACE).unwrap())
    }

    fn give(&mut self, cpu: usize, page: u64) {
        let Local { loaded, previous } = &mut self.cpus[cpu];
        if loaded.len() == MAGAZINE {
            std::mem::swap(loaded, previous);
        }
        if loaded.len() == MAGAZINE {
            let full = std::mem::take(loaded);
            if self.depot.len() < DEPOT {
                self.depot.push(full);
            } else {
                full.iter().for_each(|&page| self.behind.free(page, 1).unwrap());
            }
        }
        loaded.push(page);
    }
}

/// Maps page by page, with an invalidation for each page.
pub struct Linux {
    iommu: Arc<Iommu>,
    mapper: TableMapper<Arc<Memory>, Queue>,
    platform: Cpus,
    addresses: Magazines,
    /// Whether invalidations have the leaf-only hint.
    leaf_only: bool,
}

impl Linux {
    pub fn new(iommu: &Arc<Iommu>, leaf_only: bool) -> Self {
        let mapper = TableMapper::new(table(iommu), iommu.queue(), DOMAIN, Vec::new());
        let (iommu, platform) = (Arc::clone(iommu), Cpus::default());
        Self { iommu, mapper, platform, addresses: Magazines::new(), leaf_only }
    }

    fn enter(&self, first: u64, pages: u64) -> IovaRange {
        let range = IovaRange::new(Iova::new(first * PAGE), pages * PAGE).unwrap();
        let list = [(MEMORY, range.len())];
        self.mapper.open(&self.platform, range, list, Permissions::READ_WRITE, &mut Gather::new()).unwrap();
        range
    }
}

impl Driver for Linux {
    fn map(&mut self, cpu: usize, _: Purpose, pages: u64) -> Mapped {
        let mut one = || {
            let page = self.addresses.take(cpu);
            self.enter(page, 1).start()
        };
        Mapped::pages((0..pages).map(|_| one()).collect())
    }

    fn unmap(&mut self, cpu: usize, _: Purpose, mapped: Mapped) {
        for iova in mapped.pages {
            let range = IovaRange::new(iova, PAGE).unwrap();
            let unmapped = self.mapper.unmap(&self.platform, range, &mut Gather::new()).bytes;
            assert_eq!(unmapped, PAGE);
            let leaf_only = self.leaf_only;
            let page =
                Descriptor::PageSelective { domain: DOMAIN, address: iova, address_mask: 0, leaf_only };
            self.iommu.queue().submit(&[page, Descriptor::Wait]).unwrap();
            assert_eq!(self.iommu.probe(NIC, iova, Permissions::READ), None, "strict");
            self.addresses.give(cpu, iova.get() / PAGE);
        }
    }

    fn own(&mut self, bytes: u64) -> Iova {
        let pages = bytes / PAGE;
        let order = pages.next_power_of_two().trailing_zeros();
        let first = self.addresses.behind.alloc(pages, order, SPACE - 1).unwrap();
        self.enter(first, pages).start()
    }
}
