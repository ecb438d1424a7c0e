//! The IOTLB: finished translations, by domain and page.
//!
//! Set-associative, the set chosen by the low bits of the page number as in hardware, with true LRU in a set.
//! A large page is one entry of its own size; a lookup tries each size that is present, the smallest first.
//! It forgets only by replacement and by being told to, and hands out every entry that leaves, because an
//! exposure may end with it.
//!
//! **What a range removes** is the least that the tables' architecture demands ([`Entry::by_part`]):
//! - Intel VT-d (architecture specification, "Invalidate Address Register", field AM, and the descriptors' field of the same
//!   name): software must state a mask of at least the page's size. So an entry goes only where the range covers all of it;
//! - AMD-Vi (publication 48882, INVALIDATE_IOMMU_PAGES): the command names the pages of a block, and nothing says that a
//!   page larger than the block goes with a part of it: as with VT-d;
//! - Arm (DDI 0487, TLB maintenance by address; IHI 0070, CMD_TLBI_NH_VA and CMD_TLBI_S2_IPA): what would be used to translate
//!   any address of the range goes, whatever its size;
//! - RISC-V (IOMMU specification, IOTINVAL; privileged architecture, SFENCE.VMA): the same.
//!
//! Devices' own TLBs are held to the first of these rules, whatever the tables: no driver relies on more from a device.
//!
//! Cost: a lookup is O(sizes present x ways); removing a range is O(min(pages x ways, capacity)).

use std::num::NonZeroU32;

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::sets::{Sets, bits};

/// The dimensions of an [`Iotlb`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IotlbConfig {
    /// How many translations it holds, rounded down to whole sets.
    pub entries: usize,
    /// How many of them share a set.
    pub ways: usize,
}

/// One cached translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The first address of the page.
    pub iova: Iova,
    /// Where the page is.
    pub phys: PhysAddr,
    /// Set where the mapping has ended and this entry still reaches the memory: the ledger's own number for
    /// what is open because of it. New entries have none.
    pub stale: Option<NonZeroU32>,
    /// Whose translation it is.
    pub domain: DomainId,
    /// The size of the page.
    pub size: PageSize,
    /// What it allows.
    pub permissions: Permissions,
    /// Whether an invalidation of a part of the page removes it. Otherwise one of all of it does.
    pub by_part: bool,
}

impl Entry {
    /// Where `iova`, an address in this page, is in memory.
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

    /// Whether a driver that asked for `asked` has named all of the page, or nothing: what it named a part of may stay although
    /// the hardware was told to act on more, as another driver would have told it to act on less.
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
    /// How many entries there are of each size, by the size's shift.
    of_size: [u32; u64::BITS as usize],
    /// Bit n: entries of 2^n bytes are present.
    sizes: u64,
}

impl Iotlb {
    /// An empty cache. It never allocates again.
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

    /// How many translations it can hold.
    pub fn capacity(&self) -> usize {
        self.sets.capacity()
    }

    /// How many it holds.
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.sets.len() == 0
    }

    /// The entries, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        self.sets.iter()
    }

    /// The translation of `iova`, which becomes the most recently used of its set.
    pub fn lookup(&mut self, domain: DomainId, iova: Iova) -> Option<Entry> {
        let slot = self.find(domain, iova, |_| true)?;
        self.sets.touch(slot);
        Some(self.sets.get(slot))
    }

    /// The translation of `iova`; the order of replacement stays as it is.
    pub fn peek(&self, domain: DomainId, iova: Iova) -> Option<Entry> {
        self.find(domain, iova, |_| true).map(|slot| self.sets.get(slot))
    }

    /// Puts a translation in. Returns the one it took the place of: an older one of the same page, or else the
    /// least recently used of a full set. The entry's address is cut down to its page.
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

    /// Removes the translations of `domain` in `block`, the addresses that the hardware was told to act on because a driver
    /// asked for `asked`. What `asked` covers a part of stays, although `block` covers it: it had to be asked for.
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

    /// The mark of the entry in a slot.
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
