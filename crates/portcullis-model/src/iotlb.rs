//! The IOTLB: translations, by domain and page.
//!
//! Set-associative, with the low bits of the page number as the set index, like hardware, and true LRU in a set. A large page is one entry
//! of its own size; a lookup tries each size that is present, the smallest first. Entries leave only by replacement and invalidation. The
//! cache returns each, because an exposure may end with it.
//!
//! **What a range removes** is the least that the tables' architecture demands ([`Entry::by_part`]):
//! - Intel VT-d (architecture specification, "Invalidate Address Register", field AM, and the descriptors' field of the same name):
//!   software must state a mask of at least the page's size. So an entry goes only if the range covers all of it;
//! - AMD-Vi (publication 48882, INVALIDATE_IOMMU_PAGES): the command names the pages of a block, and nothing says that a part of a larger
//!   page removes it: as with VT-d;
//! - Arm (DDI 0487, TLB maintenance by address; IHI 0070, CMD_TLBI_NH_VA and CMD_TLBI_S2_IPA): any entry that would translate an address of
//!   the range goes, whatever its size;
//! - RISC-V (IOMMU specification, IOTINVAL; privileged architecture, SFENCE.VMA): the same.
//!
//! Device TLBs follow the first of these rules, whatever the tables: no driver relies on more.
//!
//! Cost: a lookup is O(sizes present x ways); removing a range is O(min(pages x ways, capacity)).

use std::num::NonZeroU32;

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::sets::{Sets, bits};

/// The dimensions of an [`Iotlb`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IotlbConfig {
    /// Its entries, rounded down to whole sets.
    pub entries: usize,
    /// Its ways.
    pub ways: usize,
}

/// One cached translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The first address of the page.
    pub iova: Iova,
    /// The physical address of the page.
    pub phys: PhysAddr,
    /// Set if the mapping has ended and this entry still reaches the memory: the ledger's handle of what is open because of it. New entries
    /// have none.
    pub stale: Option<NonZeroU32>,
    /// The domain.
    pub domain: DomainId,
    /// The size of the page.
    pub size: PageSize,
    /// Its permissions.
    pub permissions: Permissions,
    /// Whether an invalidation of a part of the page removes it. Otherwise it takes one of all of it.
    pub by_part: bool,
}

impl Entry {
    /// The physical address of `iova`, which is in this page.
    pub fn translate(&self, iova: Iova) -> PhysAddr {
        PhysAddr::new(self.phys.get() | iova.page_offset(self.size))
    }

    fn is(&self, domain: DomainId, page: Iova, size: PageSize) -> bool {
        self.iova == page && self.domain == domain && self.size == size
    }

    fn number(&self) -> u64 {
        self.iova.get() >> self.size.shift()
    }

    fn last(&self) -> u64 {
        self.iova.get() | self.size.offset_mask()
    }

    fn overlaps(&self, range: IovaRange) -> bool {
        self.iova <= range.last() && range.start().get() <= self.last()
    }

    /// Whether all of the page lies in `range`.
    pub(crate) fn is_within(&self, range: IovaRange) -> bool {
        range.start() <= self.iova && self.last() <= range.last().get()
    }

    /// Whether a driver's request `asked` covers all of the page, or none: an entry that it covers in part may stay although the hardware
    /// was told to invalidate more, because another driver would have told it to invalidate less.
    pub(crate) fn is_meant_by(&self, asked: IovaRange) -> bool {
        self.by_part || self.is_within(asked) || !self.overlaps(asked)
    }

    /// Whether an invalidation of `block` removes it.
    fn goes_with(&self, block: IovaRange) -> bool {
        if self.by_part { self.overlaps(block) } else { self.is_within(block) }
    }
}

/// The translation cache.
#[derive(Debug)]
pub struct Iotlb {
    sets: Sets<Entry>,
    /// Entries of each size, by the size's shift.
    of_size: [u32; u64::BITS as usize],
    /// Bit n: entries of 2^n bytes are present.
    sizes: u64,
}

impl Iotlb {
    /// An empty cache, at its full allocation.
    pub fn new(config: IotlbConfig) -> Self {
        let placeholder = Entry {
            iova: Iova::new(0),
            phys: PhysAddr::new(0),
            stale: None,
            domain: DomainId(0),
            size: PageSize::SIZE_4K,
            permissions: Permissions::READ,
            by_part: false,
        };
        Self {
            sets: Sets::new(config.entries, config.ways, placeholder),
            of_size: [0; u64::BITS as usize],
            sizes: 0,
        }
    }

    /// Its capacity.
    pub fn capacity(&self) -> usize {
        self.sets.capacity()
    }

    /// Its entries.
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.sets.len() == 0
    }

    /// The entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        self.sets.iter()
    }

    /// The translation of `iova`, which becomes the most recently used of its set.
    pub fn lookup(&mut self, domain: DomainId, iova: Iova) -> Option<Entry> {
        let slot = self.find(domain, iova, |_| true)?;
        self.sets.touch(slot);
        Some(self.sets.get(slot))
    }

    /// The translation of `iova`, without effect on the LRU order.
    pub fn peek(&self, domain: DomainId, iova: Iova) -> Option<Entry> {
        self.find(domain, iova, |_| true).map(|slot| self.sets.get(slot))
    }

    /// Inserts a translation. Returns the replaced one: an older one of the same page, or else the least recently used of a full set.
    /// Aligns the entry's address to its page.
    pub fn insert(&mut self, entry: Entry) -> Option<Entry> {
        let iova = entry.iova.align_down(entry.size);
        let entry = Entry { iova, phys: entry.phys.align_down(entry.size), ..entry };
        let (domain, size) = (entry.domain, entry.size);
        let old = self.sets.insert(entry.number(), entry, |other| other.is(domain, iova, size));
        count_in(&mut self.of_size, &mut self.sizes, size);
        if let Some(old) = old {
            count_out(&mut self.of_size, &mut self.sizes, old.size);
        }
        old
    }

    /// Removes the translations of `domain` in `block`, which the hardware was told to invalidate for a driver's request `asked`. An entry
    /// that `asked` covers in part stays, although `block` covers it: the driver had to ask for it.
    pub fn invalidate_range(
        &mut self,
        domain: DomainId,
        block: IovaRange,
        asked: IovaRange,
        mut removed: impl FnMut(Entry),
    ) {
        let Self { sets, of_size, sizes } = self;
        for shift in bits(*sizes) {
            let numbers = block.start().get() >> shift..=block.last().get() >> shift;
            let gone = |entry: &Entry| {
                entry.domain == domain
                    && entry.size.shift() == shift
                    && entry.goes_with(block)
                    && entry.is_meant_by(asked)
            };
            sets.remove_numbers(numbers, gone, |entry| {
                count_out(of_size, sizes, entry.size);
                removed(entry);
            });
        }
    }

    /// Removes every translation of `domain`.
    pub fn invalidate_domain(&mut self, domain: DomainId, removed: impl FnMut(Entry)) {
        self.invalidate_if(|entry| entry.domain == domain, removed);
    }

    /// Removes every translation for which `gone` holds.
    pub fn invalidate_if(&mut self, gone: impl Fn(&Entry) -> bool, mut removed: impl FnMut(Entry)) {
        let Self { sets, of_size, sizes } = self;
        sets.remove(gone, |entry| {
            count_out(of_size, sizes, entry.size);
            removed(entry);
        });
    }

    /// The slot of an entry through which `iova` reaches `phys`, whichever a lookup would find first.
    pub(crate) fn slot_reaching(&self, domain: DomainId, iova: Iova, phys: PhysAddr) -> Option<usize> {
        self.find(domain, iova, |entry| entry.translate(iova) == phys)
    }

    pub(crate) fn mark(&mut self, slot: usize) -> &mut Option<NonZeroU32> {
        &mut self.sets.get_mut(slot).stale
    }

    fn find(&self, domain: DomainId, iova: Iova, wanted: impl Fn(&Entry) -> bool) -> Option<usize> {
        bits(self.sizes).find_map(|shift| {
            let size = PageSize::from_shift(shift)?;
            let page = iova.align_down(size);
            self.sets.find(iova.get() >> shift, |entry| entry.is(domain, page, size) && wanted(entry))
        })
    }
}

fn count_in(of_size: &mut [u32; 64], sizes: &mut u64, size: PageSize) {
    of_size[size.shift() as usize] += 1;
    *sizes |= size.bytes();
}

fn count_out(of_size: &mut [u32; 64], sizes: &mut u64, size: PageSize) {
    let count = &mut of_size[size.shift() as usize];
    *count -= 1;
    if *count == 0 {
        *sizes &= !size.bytes();
    }
}
