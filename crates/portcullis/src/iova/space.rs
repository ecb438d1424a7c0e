//! One address space: its CPUs' lists over a shared bitmap. A page is handed out to one caller, in one CPU's list or in
//! transit there, or free in the bitmap, and never in two of these places.

mod frees;

use core::mem::MaybeUninit;
use core::num::NonZeroU64;

use super::bitmap::{Bitmap, BitmapError, MAX_ORDER, Survey};
use super::cached::{Cached, Own};
use super::class::{Class, Request, order_of};
use super::config::{IovaError, SpaceConfig, SpaceUsage};
use super::word::{END_PAGE, EXACT, NO_OWNER, PAGES_END};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::heap::{Shared, place_of, write_fields};
use crate::percpu::{CachePadded, Marks, Turn};
use crate::platform::{LocalCpu, OnePlatform, Platform};
use crate::sync::{Mutex, unique};

/// An I/O virtual address space. A range belongs to one caller from its allocation until it is freed. All methods take
/// `&self`, and any number of CPUs may call them at the same time.
///
/// It has lists for the CPUs of *one* platform, the first that the space is used with. A call with any other, or with
/// one [that does not identify itself](Platform::number), is as safe, but takes the space's lock each time, and drains
/// no CPU's lists.
///
/// A range has whole granules. Up to 512 of them (2 MiB with granules of 4 KiB) are rounded up to a power of two,
/// unless only the exact size fits. Allocation is top-down. Above the low zone a CPU's refills first search below the
/// CPU's own home (`homes.rs`), so that ranges of two CPUs are rarely neighbours.
#[derive(Debug)]
pub struct IovaSpace {
    granule: PageSize,
    shift: u32,
    /// Unique; an arena recognises its space by it.
    number: u64,
    /// The platform for whose CPUs `cached` has lists. The space relies on no other platform's CPUs or barriers.
    platform: OnePlatform,
    cached: Cached,
    total: u64,
    /// On cache lines apart from the fields that every call reads.
    bitmap: CachePadded<Mutex<Bitmap>>,
}

impl IovaSpace {
    /// Makes a space of which nothing is handed out. Context: allocates the lists of each CPU and a few nodes of the
    /// bitmap; for set-up.
    ///
    /// # Errors
    /// [`IovaError::Empty`] if the aperture holds no whole granule that is not reserved, [`IovaError::OutOfMemory`].
    #[cfg(feature = "parts")]
    pub fn new(config: &SpaceConfig) -> Result<Self, IovaError> {
        let mut place = MaybeUninit::uninit();
        Self::make_in(&mut place, config, Shared::new(Marks::new(config.cpus)?)?)?;
        // SAFETY: `make_in` returned `Ok`, so the value is there.
        Ok(unsafe { place.assume_init() })
    }

    /// As `new`, in `place`, with lists for exclusive sections of `marks`. After an error `place` is empty.
    #[inline(never)]
    pub(crate) fn make_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        config: &SpaceConfig,
        marks: Shared<Marks>,
    ) -> Result<&'a mut Self, IovaError> {
        let mut bitmap = Bitmap::new();
        let bounds = fill(&mut bitmap, config)?;
        let total = bitmap.free_pages();
        if total == 0 {
            return Err(IovaError::Empty);
        }
        let at = place.as_mut_ptr();
        // SAFETY: `place_of`, 1: the field lies in `place`, which is borrowed exclusively, and nothing else uses it
        // during this call.
        Cached::make_in(unsafe { place_of(&raw mut (*at).cached) }, marks, config, bounds)?;
        // SAFETY: each write is to a field of `place`, where `cached` is built already; `write_fields` covers all
        // fields. Nothing fails after `cached` is built.
        unsafe {
            write_fields!(
                at,
                made [cached],
                granule: config.granule,
                shift: config.granule.shift(),
                number: unique(),
                platform: OnePlatform::default(),
                total: total,
                bitmap: CachePadded(Mutex::new(bitmap)),
            );
            Ok(place.assume_init_mut())
        }
    }

    /// Allocates `len` bytes, rounded up to whole granules, all at or below `limit`.
    ///
    /// O(1) from the CPU's lists, without an atomic read-modify-write; else O(log n) under the space's lock, for a
    /// block of ranges at once. More than 512 granules come from the bitmap, which first catches up with the deferred
    /// work of earlier calls ([`Bitmap::alloc`]). When the space is exhausted, it drains every CPU's lists and searches
    /// again, once, for the rounded and then for the exact size.
    ///
    /// Context: may allocate memory; never waits for hardware. When the space is exhausted it waits for other CPUs, as
    /// [`drain_all`](Self::drain_all) does.
    ///
    /// # Errors
    /// [`IovaError::Empty`], [`IovaError::Exhausted`], [`IovaError::OutOfMemory`]. No range is handed out then. For the
    /// figures of `Exhausted` it looks at all of the space up to `limit`, under the lock for at most 32 of the bitmap's
    /// nodes and leaves at a time.
    #[cfg(feature = "parts")]
    #[inline]
    pub fn alloc<P: Platform>(&self, platform: &P, len: u64, limit: Iova) -> Result<IovaRange, IovaError> {
        self.alloc_guarded(platform, (len, limit), true, |_, range| range)
    }

    /// As `alloc`, and makes a `guard` of the range with the CPU still lent: if the platform panics afterwards, the
    /// guard is dropped. Drains other CPUs' lists, and waits for them, only if it `may_wait`.
    #[inline]
    pub(crate) fn alloc_guarded<P: Platform, T>(
        &self,
        platform: &P,
        (len, limit): (u64, Iova),
        may_wait: bool,
        guard: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Result<T, IovaError> {
        match self.alloc_fast(platform, (len, limit), &guard) {
            Some(guarded) => Ok(guarded),
            None => self.alloc_slowly(platform, (len, limit), may_wait, guard),
        }
    }

    #[inline(always)]
    pub(crate) fn alloc_fast<P: Platform, T>(
        &self,
        platform: &P,
        (len, limit): (u64, Iova),
        guard: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Option<T> {
        self.platform.with_cpu_fast(platform, move |cpu| {
            self.in_turn(cpu, move |_, own| Some(guard(Some(cpu), self.take(own?, len, limit)?)))?
        })?
    }

    #[cold]
    #[inline(never)]
    fn alloc_slowly<P: Platform, T>(
        &self,
        platform: &P,
        (len, limit): (u64, Iova),
        may_wait: bool,
        guard: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Result<T, IovaError> {
        let request = self.request(len, limit)?;
        let guarded = |cpu: Option<&LocalCpu<'_>>, page| guard(cpu, self.range(page, request.pages));
        let once = |cpu: Option<&LocalCpu<'_>>| self.alloc_once(cpu, request).map(|page| guarded(cpu, page));
        let mut tried = self.platform.with_cpu(platform, once);
        // An impossible request drains no CPU's lists.
        let impossible = request.pages > request.end_page.min(self.total);
        if tried.as_ref().is_err_and(|error| *error == BitmapError::NoFit) && !impossible {
            if may_wait {
                self.drain_all(platform);
            }
            tried = platform.with_cpu(|cpu| self.last_resort(request).map(|page| guarded(cpu, page)));
        }
        tried.map_err(|error| match error {
            BitmapError::OutOfMemory => IovaError::OutOfMemory,
            _ => self.exhausted(platform, len, limit),
        })
    }

    /// Calls `f` in an exclusive section of `cpu`, with the CPU's lists if it has any. Returns `None`, without a call,
    /// if the section cannot begin. The CPU is one of the platform that the space is for.
    #[inline(always)]
    pub(crate) fn in_turn<R>(
        &self,
        cpu: &LocalCpu<'_>,
        f: impl FnOnce(&Turn<'_>, Option<Own<'_>>) -> R,
    ) -> Option<R> {
        self.cached.in_turn(cpu, f)
    }

    /// As [`in_turn`](Self::in_turn), but always calls `f`.
    pub(crate) fn with_own<R>(
        &self,
        cpu: Option<&LocalCpu<'_>>,
        f: impl FnOnce(Option<&Turn<'_>>, Option<Own<'_>>) -> R,
    ) -> R {
        self.cached.with_own(cpu, f)
    }

    #[inline]
    pub(crate) fn take(&self, own: Own<'_>, len: u64, limit: Iova) -> Option<IovaRange> {
        let (pages, class) = self.small_class(len)?;
        let zone = self.cached.zone_for(limit.get())?;
        let page = self.cached.take(own, zone, class, pages)?;
        Some(self.range(page, pages))
    }

    /// Drains every CPU's lists into the bitmap. Costs one barrier of all CPUs, and O(log n) for each range. Does
    /// nothing for a platform other than that of the lists.
    ///
    /// Context: waits for other CPUs' exclusive sections; never allocates. No interrupt handler, and no CPU lent.
    #[inline(never)]
    pub fn drain_all<P: Platform>(&self, platform: &P) {
        self.drain(platform, None);
    }

    /// As [`drain_all`](Self::drain_all), for CPU `index`, which was released.
    pub fn drain_cpu<P: Platform>(&self, platform: &P, index: usize) {
        self.drain(platform, Some(index));
    }

    fn drain<P: Platform>(&self, platform: &P, only: Option<usize>) {
        if self.platform.is(platform) {
            self.cached.drain(platform, only, &self.bitmap);
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn granule(&self) -> PageSize {
        self.granule
    }

    /// Returns the space's figures. While other CPUs go on, they are of slightly different times. Costs a few loads for
    /// each list of each CPU. Context: takes the space's lock; never allocates.
    pub fn usage(&self) -> SpaceUsage {
        let shift = self.shift;
        let cached = self.cached.pages();
        let bitmap = self.bitmap.lock();
        let taken = self.total.saturating_sub(bitmap.free_pages());
        SpaceUsage {
            total: self.total << shift,
            taken: taken << shift,
            // Another CPU may be between the changes of two of its counts.
            cached: cached.min(taken) << shift,
            peak_taken: (self.total - bitmap.least_free()) << shift,
            memory: bitmap.memory_bytes() + self.cached.bytes(),
        }
    }

    fn request(&self, len: u64, limit: Iova) -> Result<Request, IovaError> {
        let (pages, order) = self.class(len)?;
        // A word has no room for more pages: nothing fits such a request.
        let end_page = if pages < PAGES_END { self.end_page(limit) } else { 0 };
        Ok(Request { pages, order, end_page })
    }

    /// The page after the last one that lies at or below `limit` as a whole.
    #[inline]
    fn end_page(&self, limit: Iova) -> u64 {
        let mask = self.granule.offset_mask();
        (limit.get() >> self.shift).saturating_add(u64::from(limit.get() & mask == mask))
    }

    #[inline(never)]
    fn alloc_once(&self, cpu: Option<&LocalCpu<'_>>, request: Request) -> Result<u64, BitmapError> {
        match self.with_own(cpu, |_, own| self.cached.alloc(own, &self.bitmap, request))? {
            Some(page) => Ok(page),
            None => self.direct(request.pages_rounded(), request, NO_OWNER),
        }
    }

    #[cold]
    #[inline(never)]
    fn last_resort(&self, request: Request) -> Result<u64, BitmapError> {
        let rounded = self.direct(request.pages_rounded(), request, NO_OWNER);
        rounded.or_else(|_| self.direct(request.pages, request, EXACT))
    }

    #[inline]
    fn range(&self, page: u64, pages: u64) -> IovaRange {
        let shift = self.shift;
        // Pages of the space lie inside its aperture, which is a range. `pages` is never 0; a panic here would make the
        // fast path keep its section in memory.
        let len = NonZeroU64::new(pages << shift).unwrap_or(NonZeroU64::MIN);
        IovaRange::inside(Iova::new(page << shift), len)
    }

    fn direct(&self, pages: u64, request: Request, owner: u64) -> Result<u64, BitmapError> {
        let page = self.bitmap.lock().alloc(pages, request.order.min(MAX_ORDER), request.end_page)?;
        if self.cached.hand_out(page, request.pages, request.order, owner).is_err() {
            self.bitmap.lock().free_all([page], pages);
            return Err(BitmapError::OutOfMemory);
        }
        Ok(page)
    }

    /// Makes the error for `len` bytes up to `limit`: O(nodes and bits up to there), under the lock for 32 at a time.
    #[cold]
    #[inline(never)]
    fn exhausted<P: Platform>(&self, platform: &P, len: u64, limit: Iova) -> IovaError {
        let cached = platform.with_cpu(|_| self.usage().cached);
        let mut survey = Survey::new(self.end_page(limit));
        while !platform.with_cpu(|_| self.bitmap.lock().survey(&mut survey)) {}
        let (free, largest) = (survey.free << self.shift, survey.largest << self.shift);
        IovaError::Exhausted { len, limit, free, cached, largest }
    }

    fn class(&self, len: u64) -> Result<(u64, u32), IovaError> {
        // A shift, as a division would take longer than all the rest.
        let last = len.checked_sub(1).ok_or(IovaError::Empty)?;
        let pages = (last >> self.shift) + 1;
        Ok((pages, order_of(pages)))
    }

    #[inline]
    fn small_class(&self, len: u64) -> Option<(u64, Class)> {
        // For 0 bytes the index wraps: no class has as many pages, or, with granules of 2^55 bytes or more, no space.
        let index = len.wrapping_sub(1) >> self.shift;
        let class = Class::of_pages(index)?;
        Some((index + 1, class))
    }
}

/// Adds the space's pages to its bitmap, all free but the reserved ones. Returns the first page, and the one after the
/// last.
#[inline(never)]
fn fill(bitmap: &mut Bitmap, config: &SpaceConfig) -> Result<(u64, u64), IovaError> {
    let shift = config.granule.shift();
    let first = config.granule.round_up(config.aperture.start().get()).ok_or(IovaError::Empty)? >> shift;
    let last = config.aperture.last().get();
    let last_is_whole = last & config.granule.offset_mask() == config.granule.offset_mask();
    let end = (last >> shift).saturating_add(u64::from(last_is_whole)).min(END_PAGE);
    let pages = end.checked_sub(first).filter(|pages| *pages > 0).ok_or(IovaError::Empty)?;
    let memory = |_: BitmapError| IovaError::OutOfMemory;
    bitmap.add(first, pages).map_err(memory)?;
    for range in &config.reserved {
        let from = (range.start().get() >> shift).max(first);
        let last = (range.last().get() >> shift).min(end - 1);
        if from <= last {
            bitmap.reserve(from, last - from + 1).map_err(memory)?;
        }
    }
    Ok((first, end))
}
