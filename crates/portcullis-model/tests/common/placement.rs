//! Receive rings on the software IOMMU under strict protection, with addresses placed in one of four ways. Its counts depend only on the
//! addresses, so they repeat exactly.
//!
//! Every ring has all its descriptors posted: mapped, and waiting for data. The device works through them in order. For each descriptor it
//! reads the ring's own memory once (16 bytes), writes every page of the buffer in 4 pieces of 1 KiB, and writes the ring's own memory once
//! more. Then the buffer is unmapped, with one leaf invalidation for each mapping, and a new one is mapped and posted. (An invalidation
//! covers an aligned block of 2^n pages, or all of the domain. A descriptor's mapping that crosses such a block's end takes two, submitted
//! together, with one wait: see [`Blocks`].) Between two accesses of one ring the other rings have theirs: one each, always in the same
//! order ([`Pace::InStep`]), or a random number ([`Pace::Uneven`]).
//!
//! The address space is aged: 32,768 ranges, every second of one page and the others of 1 to 64, replaced at random 200,000 times, half of
//! them freed. And others use it meanwhile: between an unmap and the next map, as many of them as the descriptor has pages are replaced, as
//! by a transmit side whose packets complete in any order. They take addresses but cause no traffic. All of that is on one CPU.

use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};
use portcullis::invalidation::{Gather, Invalidation, InvalidationQueue};
use portcullis::iova::{IovaSpace, RingArena, RingConfig, SpaceConfig};
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenMapper;
use portcullis_model::{Context, Descriptor, DeviceId, Iommu, IommuConfig, Memory, Queue, Stats};

const PAGE: u64 = 4096;
const NIC: DeviceId = DeviceId(1);
const DOMAIN: DomainId = DomainId(1);
const ANYWHERE: Iova = Iova::new(u64::MAX);
/// Pieces of a page write.
const PIECES: u64 = 4;
/// Descriptors of each ring.
const DESCRIPTORS: u32 = 512;
/// Bytes of one descriptor in the ring's own memory.
const DESCRIPTOR_BYTES: u64 = 16;

/// The allocation of buffers' addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// Each page individually from the space: a driver that maps page by page.
    Pages,
    /// Each descriptor's pages as one range from the space.
    Ranges,
    /// Each ring from an arena without a colour.
    Arenas,
    /// Each ring from an arena of its own colour.
    Coloured,
}

/// The order of the rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    InStep,
    Uneven,
}

/// The invalidation of a mapping that is not aligned to its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// By the smallest block around it: the domain, if that is over 2 MiB.
    One,
    /// By two if it crosses a multiple of its size.
    Two,
}

/// One experiment.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub rings: u32,
    /// Pages of each descriptor.
    pub pages: u64,
    pub pace: Pace,
    pub blocks: Blocks,
    pub iotlb_entries: usize,
    pub iotlb_ways: usize,
    /// Descriptors for each ring before and during counting.
    pub warm_up: u64,
    pub counted: u64,
}

/// Per access.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    pub iotlb: f64,
    /// Walks that missed in the table caches; the lowest level first.
    pub levels: [f64; 3],
}

struct Ring {
    arena: Option<RingArena>,
    /// The ring's own memory.
    own: IovaRange,
    /// The mappings of each posted descriptor, oldest first.
    posted: VecDeque<Vec<IovaRange>>,
    done: u64,
    /// Index of the next access to the oldest descriptor.
    at: u64,
}

/// Pages of a ring's own memory.
const OWN_PAGES: u64 = DESCRIPTORS as u64 * DESCRIPTOR_BYTES / PAGE;

struct Machine {
    iommu: Arc<Iommu>,
    mapper: TableMapper<Arc<Memory>, Queue>,
    space: IovaSpace,
    platform: StdPlatform,
    setup: Setup,
    others: Vec<IovaRange>,
    dice: u64,
}

/// The misses of `setup` with addresses placed by `placed`.
pub fn run(setup: Setup, placed: Placed) -> Rates {
    let mut machine = Machine::new(setup);
    // Drivers allocate their rings' own memory when they start.
    let own: Vec<IovaRange> = (0..setup.rings).map(|_| machine.take(OWN_PAGES)).collect();
    machine.age();
    let mut rings: Vec<Ring> =
        (0..).zip(own).map(|(number, own)| machine.ring(number, own, placed)).collect();
    machine.turns(&mut rings, setup.warm_up);
    let before = machine.iommu.stats();
    machine.turns(&mut rings, setup.warm_up + setup.counted);
    let rates = rates(before, machine.iommu.stats());
    for ring in rings {
        machine.shut_down(ring);
    }
    rates
}

fn rates(before: Stats, after: Stats) -> Rates {
    let accesses = (after.accesses - before.accesses) as f64;
    let level =
        |level: usize| (after.misses_by_level[level] - before.misses_by_level[level]) as f64 / accesses;
    Rates {
        iotlb: (after.iotlb_misses - before.iotlb_misses) as f64 / accesses,
        levels: std::array::from_fn(level),
    }
}

/// The smallest block around `range`, or the domain.
fn one_block(range: IovaRange) -> Descriptor {
    let differing = (range.start().get() ^ range.last().get()) / PAGE;
    let address_mask = u64::BITS - differing.leading_zeros();
    if address_mask > 9 {
        return Descriptor::DomainSelective { domain: DOMAIN };
    }
    Descriptor::PageSelective { domain: DOMAIN, address: range.start(), address_mask, leaf_only: true }
}

impl Machine {
    fn new(setup: Setup) -> Self {
        let memory = Memory::new(1 << 30);
        let iommu = Iommu::new(IommuConfig {
            iotlb_entries: setup.iotlb_entries,
            iotlb_ways: setup.iotlb_ways,
            ..IommuConfig::new(Arc::clone(&memory))
        });
        let format = VtdSecondStage::new(4, 1, 52).unwrap();
        let table = PageTable::for_cpus(memory, format, 1).unwrap();
        let (root, levels) = (table.root(), table.levels());
        iommu.attach(NIC, Context::SecondStage { domain: DOMAIN, root, levels });
        let aperture = IovaRange::new(Iova::new(PAGE), (1 << 46) - PAGE).unwrap();
        let space = IovaSpace::new(&SpaceConfig::new(aperture, PageSize::SIZE_4K, 1)).unwrap();
        let mapper = TableMapper::new(table, iommu.queue(), DOMAIN, Vec::new());
        Self { iommu, mapper, space, platform: StdPlatform::with_cpus(1), setup, others: Vec::new(), dice: 1 }
    }

    /// Ages the address space.
    fn age(&mut self) {
        for _ in 0..32_768 {
            let range = self.other();
            self.others.push(range);
        }
        (0..200_000).for_each(|_| self.replace_another());
        for _ in 0..self.others.len() / 2 {
            let which = self.throw(self.others.len());
            let range = self.others.swap_remove(which);
            self.give_back(range);
        }
    }

    fn other(&mut self) -> IovaRange {
        let most = if self.throw(2) == 0 { 1 } else { 64 };
        let pages = 1 + self.throw(most) as u64;
        self.take(pages)
    }

    fn replace_another(&mut self) {
        let which = self.throw(self.others.len());
        let new = self.other();
        let old = std::mem::replace(&mut self.others[which], new);
        self.give_back(old);
    }

    /// A ring with all its descriptors posted.
    fn ring(&mut self, number: u32, own: IovaRange, placed: Placed) -> Ring {
        let config = RingConfig::new(DESCRIPTORS, self.setup.pages * PAGE, PageSize::SIZE_4K);
        let config = match placed {
            Placed::Pages | Placed::Ranges => None,
            Placed::Arenas => Some(config),
            Placed::Coloured => Some(RingConfig { colour: Some(number), ..config }),
        };
        let arena = config.map(|config| RingArena::new(&self.space, &self.platform, &config).unwrap());
        self.map(own);
        let mut ring = Ring { arena, own, posted: VecDeque::new(), done: 0, at: 0 };
        let pieces = if placed == Placed::Pages { self.setup.pages } else { 1 };
        (0..DESCRIPTORS).for_each(|_| self.post(&mut ring, pieces));
        ring
    }

    fn post(&mut self, ring: &mut Ring, pieces: u64) {
        let pages = self.setup.pages / pieces;
        let mut mappings = Vec::new();
        for _ in 0..pieces {
            let range = match &mut ring.arena {
                Some(arena) => arena.reserve(pages * PAGE).unwrap(),
                None => self.take(pages),
            };
            self.map(range);
            mappings.push(range);
        }
        ring.posted.push_back(mappings);
    }

    /// Runs every ring until `until` of its descriptors are done, or a few more.
    fn turns(&mut self, rings: &mut [Ring], until: u64) {
        while rings.iter().any(|ring| ring.done < until) {
            for next in 0..rings.len() {
                let next = match self.setup.pace {
                    Pace::InStep => next,
                    Pace::Uneven => self.throw(rings.len()),
                };
                self.access(&mut rings[next]);
            }
        }
    }

    /// One access of the device, and the driver's work after a descriptor's last.
    fn access(&mut self, ring: &mut Ring) {
        let last = self.setup.pages * PIECES + 1;
        let pieces = &ring.posted[0];
        let (iova, len, access) = if ring.at == 0 || ring.at == last {
            let offset = ring.done % u64::from(DESCRIPTORS) * DESCRIPTOR_BYTES;
            let access = if ring.at == 0 { Permissions::READ } else { Permissions::WRITE };
            (ring.own.start().checked_add(offset), DESCRIPTOR_BYTES, access)
        } else {
            let (page, piece) = ((ring.at - 1) / PIECES, (ring.at - 1) % PIECES);
            let each = pieces[0].len() / PAGE;
            let start = pieces[(page / each) as usize].start();
            let offset = page % each * PAGE + piece * (PAGE / PIECES);
            (start.checked_add(offset), PAGE / PIECES, Permissions::WRITE)
        };
        self.iommu.access(NIC, iova.unwrap(), len, access).unwrap();
        ring.at += 1;
        if ring.at > last {
            ring.at = 0;
            ring.done += 1;
            let pieces = self.retire(ring);
            (0..self.setup.pages).for_each(|_| self.replace_another());
            self.post(ring, pieces);
        }
    }

    /// Unmaps the oldest descriptor strictly, and frees its addresses. Returns its number of mappings.
    fn retire(&mut self, ring: &mut Ring) -> u64 {
        let mappings = ring.posted.pop_front().unwrap();
        for range in &mappings {
            self.unmap(*range);
            match &mut ring.arena {
                Some(arena) => arena.free(*range).unwrap(),
                None => self.give_back(*range),
            }
        }
        mappings.len() as u64
    }

    fn shut_down(&mut self, mut ring: Ring) {
        while !ring.posted.is_empty() {
            self.retire(&mut ring);
        }
        self.unmap(ring.own);
        self.give_back(ring.own);
        if let Some(arena) = ring.arena {
            arena.release(&self.space, &self.platform).unwrap();
        }
    }

    fn map(&self, range: IovaRange) {
        // Any address: no access checks the memory behind it.
        let phys = PhysAddr::new(1 << 40);
        let list = [(phys, range.len())];
        let mut gather = Gather::new();
        self.mapper.open(&self.platform, range, list, Permissions::READ_WRITE, &mut gather).unwrap();
    }

    fn unmap(&self, range: IovaRange) {
        assert_eq!(self.mapper.unmap(&self.platform, range, &mut Gather::new()).bytes, range.len());
        match self.setup.blocks {
            // As the software IOMMU's driver does.
            Blocks::Two => {
                let request = Invalidation::Range { range, leaf_only: true };
                self.iommu.queue().invalidate(DOMAIN, request).unwrap();
            }
            Blocks::One => self.iommu.queue().submit(&[one_block(range), Descriptor::Wait]).unwrap(),
        }
        assert_eq!(self.iommu.probe(NIC, range.start(), Permissions::WRITE), None, "strict");
    }

    fn take(&self, pages: u64) -> IovaRange {
        self.space.alloc(&self.platform, pages * PAGE, ANYWHERE).unwrap()
    }

    fn give_back(&self, range: IovaRange) {
        self.space.free(&self.platform, range).unwrap();
    }

    fn throw(&mut self, sides: usize) -> usize {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        ((self.dice >> 32) as usize * sides) >> 32
    }
}
