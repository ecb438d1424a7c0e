//! One address space: what its CPUs keep, and the backing structure behind them.

use super::CACHED_ORDERS;
use super::cached::Cached;
use super::config::{IovaError, SpaceConfig, SpaceUsage};
use super::tree::{HoleTree, MAX_ORDER, TreeError};
use super::word::{END_PAGE, EXACT, MOST_PAGES, NO_OWNER};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::platform::{LocalSlot, Platform};
use crate::sync::Mutex;

/// The free pages, and how few there ever were.
#[derive(Debug)]
pub(super) struct Backing {
    pub tree: HoleTree,
    pub total: u64,
    pub least_free: u64,
    /// Ranges that may come back one by one: the tree keeps memory for as many holes.
    pub ranges: usize,
    /// Holes there were in the beginning: so many more there can be.
    pub runs: usize,
}

impl Backing {
    /// The highest `pages` free pages that begin at a multiple of 2^`order` and end at or below `max_page`:
    /// a block of `count` ranges that may come back one by one.
    pub fn alloc(&mut self, pages: u64, order: u32, max_page: u64, count: usize) -> Result<u64, TreeError> {
        let ranges = self.ranges.saturating_add(count);
        self.tree.prepay(ranges.saturating_add(self.runs))?;
        let page = self.tree.alloc(pages, order.min(MAX_ORDER), max_page)?;
        self.ranges = ranges;
        self.least_free = self.least_free.min(self.tree.free_pages());
        Ok(page)
    }

    /// Takes back `count` ranges, `pages` pages from `page` on. Cannot fail for what `alloc` handed out.
    pub fn free(&mut self, page: u64, pages: u64, count: usize) {
        let freed = self.tree.free(page, pages);
        debug_assert!(freed.is_ok(), "{freed:?}");
        self.ranges = self.ranges.saturating_sub(count);
    }
}

/// What is asked for: so many pages, 2^`order` rounded up, none above `max_page`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub pages: u64,
    pub order: u32,
    pub max_page: u64,
}

impl Request {
    /// Pages that are handed out for it: a power of two where that is cached.
    pub fn pages_rounded(self) -> u64 {
        if self.order < CACHED_ORDERS { 1 << self.order } else { self.pages }
    }
}

/// An I/O virtual address space. All methods take `&self`; a range belongs to one caller until it is freed.
///
/// Lengths are rounded up to whole granules, and up to 512 of them (2 MiB) to a power of two, unless the
/// space has room for nothing but the exact size. Blocks of ranges are placed as high as possible.
#[derive(Debug)]
pub struct IovaSpace {
    granule: PageSize,
    cached: Cached,
    /// Pages in all.
    total: u64,
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
        let end = (last >> shift).saturating_add(u64::from(last_is_whole)).min(END_PAGE);
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
        let low_end = config.low_end.get() >> shift;
        let cached = Cached::new(config.slots, first, pages, low_end, config.cache_bytes >> shift)?;
        let backing = Mutex::new(Backing { runs: tree.holes(), tree, total, least_free: total, ranges: 0 });
        Ok(Self { granule: config.granule, cached, total, backing })
    }

    /// Allocates `len` bytes, all at or below `limit`.
    ///
    /// O(1) from the CPU's lists, without an atomic read-modify-write; else O(log n) under the space's lock,
    /// for a block of ranges at once. When the space is exhausted, what every CPU keeps is taken back and the
    /// search repeated, once: that waits for other CPUs, so a caller that must not wait uses
    /// [`try_alloc`](Self::try_alloc). May allocate memory; never waits for hardware.
    ///
    /// # Errors
    /// [`IovaError`], with nothing changed.
    #[inline]
    pub fn alloc<P: Platform>(&self, platform: &P, len: u64, limit: Iova) -> Result<IovaRange, IovaError> {
        let Some(request) = self.request(len, limit)? else {
            return platform.with_slot(|_| Err(self.exhausted(len, limit)));
        };
        match platform.with_slot(|slot| self.cached.take(slot, request)) {
            Some(page) => Ok(self.range(page, request.pages)),
            None => self.alloc_slowly(platform, request, len, limit),
        }
    }

    #[cold]
    fn alloc_slowly<P: Platform>(
        &self,
        platform: &P,
        request: Request,
        len: u64,
        limit: Iova,
    ) -> Result<IovaRange, IovaError> {
        let tried = platform.with_slot(|slot| self.try_slowly(slot, request, len, limit));
        // A request that no flush could satisfy costs nobody a cache.
        let impossible = request.pages - 1 > request.max_page || request.pages > self.total;
        if impossible || !matches!(tried, Err(IovaError::Exhausted { .. })) {
            return tried;
        }
        self.flush_caches(platform);
        platform.with_slot(|_| self.last_resort(request, len, limit))
    }

    /// The same without taking anything back from other CPUs: for callers that must not wait.
    ///
    /// # Errors
    /// [`IovaError`], with nothing changed. After [`IovaError::Exhausted`] there may be room in what CPUs keep.
    #[inline]
    pub fn try_alloc(
        &self,
        slot: Option<&LocalSlot<'_>>,
        len: u64,
        limit: Iova,
    ) -> Result<IovaRange, IovaError> {
        let Some(request) = self.request(len, limit)? else {
            return Err(self.exhausted(len, limit));
        };
        match self.cached.take(slot, request) {
            Some(page) => Ok(self.range(page, request.pages)),
            None => self.try_slowly(slot, request, len, limit),
        }
    }

    /// Takes back a range, as it was handed out.
    ///
    /// Never allocates and never fails for such a range. O(1), onto the CPU's list, or a chain for the CPU
    /// that it came from; where the CPU keeps its share already, half of a list goes to the backing
    /// structure, O(log n) for each range.
    ///
    /// # Errors
    /// [`IovaError::NotAllocated`] for anything but a whole range that is handed out: a part of one, one that
    /// was freed before. Nothing is changed then. (Two CPUs that free one range at once may both get away
    /// with it.)
    #[inline]
    pub fn free(&self, slot: Option<&LocalSlot<'_>>, range: IovaRange) -> Result<(), IovaError> {
        let wrong = IovaError::NotAllocated { range };
        if !range.start().is_aligned(self.granule) {
            return Err(wrong);
        }
        let (pages, order) = self.class(range.len())?;
        let page = range.start().get() >> self.granule.shift();
        if self.cached.put(slot, page, pages, order) {
            return Ok(());
        }
        self.cached.free(slot, &self.backing, page, pages, order).map_err(|()| wrong)
    }

    /// Takes back what every CPU keeps. Waits for other CPUs' turns to end: not for interrupt handlers, and
    /// not with a slot lent. Never allocates.
    pub fn flush_caches<P: Platform>(&self, platform: &P) {
        self.cached.drain(platform, None, &self.backing);
    }

    /// Takes back what is kept for slot `index`: its CPU is gone. As [`flush_caches`](Self::flush_caches).
    pub fn drain_slot<P: Platform>(&self, platform: &P, index: usize) {
        self.cached.drain(platform, Some(index), &self.backing);
    }

    /// How full the space is. The figures are of slightly different times while other CPUs go on.
    pub fn usage(&self) -> SpaceUsage {
        let shift = self.granule.shift();
        let cached = self.cached.pages();
        let backing = self.backing.lock();
        let taken = backing.total.saturating_sub(backing.tree.free_pages());
        SpaceUsage {
            total: backing.total << shift,
            taken: taken << shift,
            // Another CPU may be between its two counts.
            cached: cached.min(taken) << shift,
            peak_taken: (backing.total - backing.least_free) << shift,
            memory: backing.tree.memory_bytes() + self.cached.bytes(),
        }
    }

    #[inline]
    /// What is asked for; `None` where no space has that.
    fn request(&self, len: u64, limit: Iova) -> Result<Option<Request>, IovaError> {
        let (pages, order) = self.class(len)?;
        let shift = self.granule.shift();
        let max_page = match limit.get().checked_add(1) {
            Some(end) => (end >> shift).checked_sub(1),
            None => Some(u64::MAX >> shift),
        };
        let max_page = max_page.filter(|_| pages < MOST_PAGES);
        Ok(max_page.map(|max_page| Request { pages, order, max_page }))
    }

    /// After the CPU's own list had nothing.
    #[cold]
    fn try_slowly(
        &self,
        slot: Option<&LocalSlot<'_>>,
        request: Request,
        len: u64,
        limit: Iova,
    ) -> Result<IovaRange, IovaError> {
        let page = match self.cached.alloc(slot, &self.backing, request) {
            Ok(Some(page)) => Ok(page),
            Ok(None) => self.direct(request.pages_rounded(), request, NO_OWNER),
            Err(error) => Err(error),
        };
        self.answer(page, request, len, limit)
    }

    /// After every CPU's lists were taken back: the rounded size, and then the exact one.
    fn last_resort(&self, request: Request, len: u64, limit: Iova) -> Result<IovaRange, IovaError> {
        let rounded = self.direct(request.pages_rounded(), request, NO_OWNER);
        let page = rounded.or_else(|_| self.direct(request.pages, request, EXACT));
        self.answer(page, request, len, limit)
    }

    #[inline]
    fn answer(
        &self,
        page: Result<u64, TreeError>,
        request: Request,
        len: u64,
        limit: Iova,
    ) -> Result<IovaRange, IovaError> {
        match page {
            Ok(page) => Ok(self.range(page, request.pages)),
            Err(TreeError::OutOfMemory { .. }) => Err(IovaError::OutOfMemory),
            Err(_) => Err(self.exhausted(len, limit)),
        }
    }

    #[inline]
    fn range(&self, page: u64, pages: u64) -> IovaRange {
        let shift = self.granule.shift();
        // Pages of the space lie inside its aperture, which is a range.
        IovaRange::new(Iova::new(page << shift), pages << shift).expect("the aperture does not wrap")
    }

    /// `pages` pages for the request that belong to no CPU's lists.
    fn direct(&self, pages: u64, request: Request, owner: u64) -> Result<u64, TreeError> {
        let page = self.backing.lock().alloc(pages, request.order, request.max_page, 1)?;
        if self.cached.hand_out(page, request.pages, request.order, owner).is_err() {
            self.backing.lock().free(page, pages, 1);
            return Err(TreeError::OutOfMemory { nodes: 0, node_bytes: 0 });
        }
        Ok(page)
    }

    fn exhausted(&self, len: u64, limit: Iova) -> IovaError {
        let usage = self.usage();
        let largest = self.backing.lock().tree.largest_hole() << self.granule.shift();
        IovaError::Exhausted { len, limit, free: usage.total - usage.taken, cached: usage.cached, largest }
    }

    /// Pages that `len` bytes take, and the order of their alignment.
    #[inline]
    fn class(&self, len: u64) -> Result<(u64, u32), IovaError> {
        // A shift, since a division would take longer than all the rest.
        let Some(last) = len.checked_sub(1) else {
            return Err(IovaError::Empty);
        };
        let pages = (last >> self.granule.shift()) + 1;
        // Past 2^63 pages no power of two is left; no space holds so many, whatever the alignment.
        let order = pages.checked_next_power_of_two().map_or(u64::BITS - 1, u64::trailing_zeros);
        Ok((pages, order))
    }
}
