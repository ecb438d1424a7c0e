//! One address space: the tree of holes, with a cache for each CPU in front of it.

use alloc::vec::Vec;

use super::cache::{CACHED_ORDERS, Cache};
use super::tree::{HoleTree, MAX_ORDER, TreeError};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::percpu::PerCpu;
use crate::platform::LocalSlot;
use crate::sync::Mutex;

/// What an address space is made of.
#[derive(Debug, Clone)]
pub struct SpaceConfig {
    /// The addresses that may be handed out.
    pub aperture: IovaRange,
    /// The unit of allocation: the mapper's smallest page.
    pub granule: PageSize,
    /// Ranges inside the aperture that must never be handed out (interrupt windows, for one).
    pub reserved: Vec<IovaRange>,
    /// How many CPUs get a cache.
    pub slots: usize,
}

/// A range that could not be allocated, or was not allocated when it was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IovaError {
    /// Nobody can use 0 bytes.
    #[error("an I/O virtual range of 0 bytes")]
    Empty,
    /// No hole is large enough at the alignment needed, even with every cache emptied.
    #[error(
        "no room for {len:#x} bytes of I/O virtual addresses up to {limit}: {free:#x} bytes are free, \
         the largest hole has {largest:#x}"
    )]
    Exhausted {
        /// Bytes asked for.
        len: u64,
        /// The highest address allowed.
        limit: Iova,
        /// Bytes free anywhere in the space.
        free: u64,
        /// Bytes in the largest hole anywhere in the space.
        largest: u64,
    },
    /// The range, or part of it, is not allocated: it was freed before, or never handed out.
    #[error("{range} is freed, but it is not allocated")]
    NotAllocated {
        /// What was to be freed.
        range: IovaRange,
    },
    /// No memory for the allocator's own book-keeping.
    #[error("no memory to keep account of I/O virtual addresses")]
    OutOfMemory,
}

/// How full a space is. A snapshot: other CPUs go on meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Bytes that could be handed out when the space was empty.
    pub total: u64,
    /// Bytes taken out of the tree: handed out, or kept in a CPU's cache.
    pub taken: u64,
    /// Of those, bytes in caches.
    pub cached: u64,
    /// The most that was ever taken.
    pub peak_taken: u64,
    /// Bytes of memory that the space itself uses.
    pub memory: usize,
}

#[derive(Debug)]
struct Backing {
    tree: HoleTree,
    total: u64,
    least_free: u64,
}

/// An I/O virtual address space. All methods take `&self`; a range belongs to one caller until it is freed.
///
/// A length is rounded up to whole granules. Sizes of 1, 2, 4, .. 512 granules are cached per CPU. Ranges are
/// placed as high as possible.
#[derive(Debug)]
pub struct IovaSpace {
    granule: PageSize,
    caches: PerCpu<Mutex<Cache>>,
    backing: Mutex<Backing>,
}

impl IovaSpace {
    /// An empty space.
    ///
    /// # Errors
    /// [`IovaError::Empty`] where the aperture holds no whole granule that is not reserved,
    /// [`IovaError::OutOfMemory`].
    pub fn new(config: &SpaceConfig) -> Result<Self, IovaError> {
        let shift = config.granule.shift();
        let mut tree = HoleTree::new();
        // Only granules that lie inside as a whole count.
        let first = config.granule.round_up(config.aperture.start().get()).ok_or(IovaError::Empty)? >> shift;
        let last = config.aperture.last().get();
        let last_is_whole = last & config.granule.offset_mask() == config.granule.offset_mask();
        let end = (last >> shift).checked_add(u64::from(last_is_whole)).ok_or(IovaError::Empty)?;
        let pages = end.checked_sub(first).filter(|pages| *pages > 0).ok_or(IovaError::Empty)?;
        let memory = |_: TreeError| IovaError::OutOfMemory;
        tree.add(first, pages).map_err(memory)?;
        for range in &config.reserved {
            // Any granule that a reserved byte lies in is out of bounds.
            let first = range.start().get() >> shift;
            let pages = (range.last().get() >> shift) - first + 1;
            tree.reserve(first, pages).map_err(memory)?;
        }
        let total = tree.free_pages();
        if total == 0 {
            return Err(IovaError::Empty);
        }
        Ok(Self {
            granule: config.granule,
            caches: PerCpu::new(config.slots, || Mutex::new(Cache::new())),
            backing: Mutex::new(Backing { tree, total, least_free: total }),
        })
    }

    /// Allocates at least `len` bytes, all at or below `limit`.
    ///
    /// O(1) from the CPU's cache; else O(log n) under the space's lock; when the space is exhausted, every
    /// cache is emptied once and the search repeated. May allocate memory; never waits for hardware.
    ///
    /// # Errors
    /// [`IovaError`], with nothing changed.
    pub fn alloc(&self, slot: Option<&LocalSlot<'_>>, len: u64, limit: Iova) -> Result<IovaRange, IovaError> {
        let shift = self.granule.shift();
        let (pages, order) = self.class(len)?;
        let exhausted = IovaError::Exhausted { len, limit, free: 0, largest: 0 };
        let max_page = match limit.get().checked_add(1) {
            Some(end) => (end >> shift).checked_sub(1).ok_or(exhausted)?,
            None => u64::MAX >> shift,
        };
        if is_cached(pages, order)
            && let Some(page) = self.caches.get(slot).lock().pop(order, max_page)
        {
            return Ok(self.range(page, pages));
        }
        // 1 GiB with granules of 4 KiB: no page is larger.
        let align = order.min(MAX_ORDER);
        let mut found = self.alloc_from_tree(pages, align, max_page);
        // A request that no flush could satisfy costs nobody a cache.
        if matches!(found, Err(TreeError::NoFit { .. })) && pages <= max_page {
            self.flush_caches();
            found = self.alloc_from_tree(pages, align, max_page);
        }
        match found {
            Ok(page) => Ok(self.range(page, pages)),
            Err(TreeError::OutOfMemory { .. }) => Err(IovaError::OutOfMemory),
            Err(_) => {
                let backing = self.backing.lock();
                let (free, largest) =
                    (backing.tree.free_pages() << shift, backing.tree.largest_hole() << shift);
                Err(IovaError::Exhausted { len, limit, free, largest })
            }
        }
    }

    /// Takes back a range, as it was handed out.
    ///
    /// Never allocates. O(1) into the CPU's cache; a full magazine returns half of its ranges to the tree,
    /// O(log n) each.
    ///
    /// # Errors
    /// [`IovaError::NotAllocated`] for a range that the tree knows to be free. A range that sits in a cache
    /// is not recognised: whoever frees raw ranges must know that they are allocated, as
    /// [`Domain`](crate::domain::Domain) does from its page table.
    pub fn free(&self, slot: Option<&LocalSlot<'_>>, range: IovaRange) -> Result<(), IovaError> {
        let (pages, order) = self.class(range.len())?;
        if !range.start().is_aligned(self.granule) {
            return Err(IovaError::NotAllocated { range });
        }
        let first = range.start().get() >> self.granule.shift();
        if is_cached(pages, order) && first & (pages - 1) == 0 {
            let mut lost = None;
            let mut cache = self.caches.get(slot).lock();
            cache.push(order, first, |page| {
                lost = lost.or(self.free_to_tree(page, pages, range).err());
            });
            return lost.map_or(Ok(()), Err);
        }
        self.free_to_tree(first, pages, range)
    }

    /// Returns every cached range of every CPU to the tree. O(slots x cache size), never allocates.
    pub fn flush_caches(&self) {
        self.caches.iter().for_each(|cache| self.flush_cache(cache));
    }

    /// Returns the ranges cached for slot `index` to the tree: its CPU is gone.
    pub fn drain_slot(&self, index: usize) {
        if let Some(cache) = self.caches.at(index) {
            self.flush_cache(cache);
        }
    }

    /// How full the space is. Takes every cache's lock in turn.
    pub fn usage(&self) -> SpaceUsage {
        let shift = self.granule.shift();
        let cached: u64 = self.caches.iter().map(|cache| cache.lock().pages()).sum();
        let backing = self.backing.lock();
        let taken = backing.total.saturating_sub(backing.tree.free_pages());
        SpaceUsage {
            total: backing.total << shift,
            taken: taken << shift,
            cached: cached << shift,
            peak_taken: (backing.total - backing.least_free) << shift,
            memory: backing.tree.memory_bytes() + self.caches.iter().count() * size_of::<Mutex<Cache>>(),
        }
    }

    /// Pages that `len` bytes take, and the order of their alignment.
    fn class(&self, len: u64) -> Result<(u64, u32), IovaError> {
        let pages = len.div_ceil(self.granule.bytes());
        if pages == 0 {
            return Err(IovaError::Empty);
        }
        // Past 2^63 pages no power of two is left; no tree holds so many, whatever the alignment.
        let order = pages.checked_next_power_of_two().map_or(u64::BITS - 1, u64::trailing_zeros);
        Ok((pages, order))
    }

    fn range(&self, page: u64, pages: u64) -> IovaRange {
        let shift = self.granule.shift();
        IovaRange::new(Iova::new(page << shift), pages << shift)
            .expect("pages of the tree lie inside the aperture, which is a range")
    }

    fn alloc_from_tree(&self, pages: u64, align: u32, max_page: u64) -> Result<u64, TreeError> {
        let mut backing = self.backing.lock();
        let page = backing.tree.alloc(pages, align, max_page)?;
        backing.least_free = backing.least_free.min(backing.tree.free_pages());
        Ok(page)
    }

    /// Gives pages back to the tree; `range` is what the caller freed, for the error.
    fn free_to_tree(&self, first: u64, pages: u64, range: IovaRange) -> Result<(), IovaError> {
        self.backing.lock().tree.free(first, pages).map_err(|error| match error {
            TreeError::OutOfMemory { .. } => IovaError::OutOfMemory,
            _ => IovaError::NotAllocated { range },
        })
    }

    fn flush_cache(&self, cache: &Mutex<Cache>) {
        cache.lock().drain(|order, page| {
            // Fails only where the caller has freed a range twice, or in odd pieces: then it stays out of use.
            let _ = self.backing.lock().tree.free(page, 1 << order);
        });
    }
}

/// Whether ranges of so many pages, whose size rounded up is 2^`order`, are cached.
fn is_cached(pages: u64, order: u32) -> bool {
    order < CACHED_ORDERS && pages.is_power_of_two()
}
