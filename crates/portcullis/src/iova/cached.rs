//! Per-CPU free lists in front of the bitmap. A free range is on one CPU's list, in a remote batch or remote-free
//! queue, or in the bitmap. A range is freed only if its word says that it is handed out.

mod refill;
mod whole;

use alloc::boxed::Box;
use core::mem::MaybeUninit;

use super::bitmap::{Bitmap, BitmapError};
use super::class::{CACHED_ORDERS, Class, Request};
use super::config::SpaceConfig;
use super::cpu::{Cpu, ZONES};
use super::homes::Homes;
use super::meta::RangeMeta;
use super::remote::{RemoteQueue, Returned};
use super::word::{END_PAGE, EXACT, NO_WORD, handed_out, owner_and_pages};
use crate::guard::Guard;
use crate::heap::{OutOfMemory, Shared, SharedPlace, slice};
use crate::percpu::{CachePadded, Marks, Turn, TurnLocal};
use crate::platform::{LocalCpu, Platform};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// A CPU's lists, in an exclusive section of that CPU, and its number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own<'a> {
    index: u64,
    cpu: &'a Cpu,
}

#[derive(Debug)]
pub(super) struct Cached {
    meta: Shared<RangeMeta>,
    cpus: TurnLocal<Cpu>,
    remote_queues: Box<[CachePadded<RemoteQueue>]>,
    low_end: u64,
    /// The space's last address, and the low zone's.
    last: u64,
    low_last: u64,
    /// The highest zone that has pages.
    top: usize,
    budget: [u64; ZONES],
    homes: Homes,
}

impl Cached {
    /// Makes empty lists in `place` for the CPUs of `config` that have `marks`, and for pages from `first` to below
    /// `end`. After an error `place` is empty.
    #[inline(never)]
    pub fn make_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        marks: Shared<Marks>,
        config: &SpaceConfig,
        (first, end): (u64, u64),
    ) -> Result<&'a mut Self, OutOfMemory> {
        let granule = config.granule;
        let cpus = config.cpus.min(marks.cpus()).min(EXACT as usize);
        let low_end = (config.low_end.get() >> granule.shift()).clamp(first, end);
        // `end` is 0 only for an empty low zone, whose lists stay empty.
        let last_before = |end: u64| (end.saturating_sub(1) << granule.shift()) | granule.offset_mask();
        let (last, low_last) = (last_before(end), last_before(low_end));
        let zone_pages = [low_end - first, end - low_end];
        let cache_pages = config.cache_bytes >> granule.shift();
        let budget = zone_pages.map(|zone| cache_pages.min(zone / 8 / cpus.max(1) as u64));
        let meta = SharedPlace::new()?.fill(RangeMeta::new(end));
        Ok(place.write(Self {
            cpus: TurnLocal::new_in(marks, cpus, |owner, place| {
                Ok(Cpu::make_in(place, owner as u64, meta.clone()))
            })?,
            meta,
            remote_queues: slice(cpus, |_| Ok(CachePadded(RemoteQueue::new())))?,
            // Without a high zone every request is for the low one.
            low_end: if zone_pages[1] == 0 { u64::MAX } else { low_end },
            last,
            low_last,
            top: usize::from(zone_pages[1] > 0),
            budget,
            homes: Homes::new((low_end, end), cpus, budget[1]),
        }))
    }

    /// As [`IovaSpace::in_turn`](super::IovaSpace::in_turn).
    #[inline(always)]
    pub fn in_turn<R>(
        &self,
        cpu: &LocalCpu<'_>,
        f: impl FnOnce(&Turn<'_>, Option<Own<'_>>) -> R,
    ) -> Option<R> {
        self.cpus.in_turn(cpu, |turn, cpu| f(turn, cpu.map(|cpu| Own { index: turn.index() as u64, cpu })))
    }

    /// As [`in_turn`](Self::in_turn), but always calls `f`.
    pub fn with_own<R>(
        &self,
        cpu: Option<&LocalCpu<'_>>,
        f: impl FnOnce(Option<&Turn<'_>>, Option<Own<'_>>) -> R,
    ) -> R {
        let turn = cpu.and_then(|cpu| self.cpus.turn(cpu));
        let turn = turn.as_ref();
        f(turn, turn.and_then(|turn| Some(Own { index: turn.index() as u64, cpu: self.cpus.get(turn)? })))
    }

    #[inline]
    pub fn take(&self, own: Own<'_>, zone: usize, class: Class, asked: u64) -> Option<u64> {
        own.cpu.take(zone, class, asked)
    }

    /// Allocates for `request` from the caller's lists, which it refills if they are empty. Returns `Ok(None)` if the
    /// caller must allocate from the bitmap directly.
    pub fn alloc(
        &self,
        own: Option<Own<'_>>,
        bitmap: &Mutex<Bitmap>,
        request: Request,
    ) -> Result<Option<u64>, BitmapError> {
        let Request { pages, order, end_page } = request;
        let Some(own) = own.filter(|_| order < CACHED_ORDERS) else { return Ok(None) };
        let Own { index: owner, cpu } = own;
        let class = Class::of(order);
        let remote_queue = &self.remote_queues[owner as usize];
        for zone in (0..=self.zone_below(end_page)).rev() {
            let take = || {
                let newest = cpu.newest(zone, order).filter(|page| page + (1 << order) <= end_page)?;
                cpu.find(newest, class)?;
                cpu.take(zone, class, pages)
            };
            if let Some(page) = take() {
                return Ok(Some(page));
            }
            // Adopts at most 64 arrived ranges; later calls adopt the rest.
            let is_in_zone = |page| self.zone(page) == zone;
            if cpu.newest(zone, order).is_none()
                && cpu.adopt(remote_queue, zone, class, is_in_zone)
                && let Some(page) = take()
            {
                return Ok(Some(page));
            }
            let keep = |word: &_, page, order| self.keep(cpu, bitmap, word, page, order);
            if cpu.receive(remote_queue, keep)
                && let Some(page) = take()
            {
                return Ok(Some(page));
            }
            if cpu.newest(zone, order).is_some() {
                // The newest range lies above the caller's limit: bypass the lists.
                return Ok(None);
            }
            if self.refill(own, zone, order, end_page, bitmap)? {
                return Ok(take());
            }
        }
        Err(BitmapError::NoFit)
    }

    #[inline]
    pub fn put(&self, own: Own<'_>, page: u64, asked: u64, class: Class) -> bool {
        own.cpu.put(self.zone(page), class, (page, asked))
    }

    #[inline]
    pub fn post(&self, own: Own<'_>, page: u64, asked: u64, class: Class) -> bool {
        own.cpu.post_fast(self.zone(page), class, (page, asked))
    }

    /// Frees the range of `pages` pages at `page`, whichever CPU handed it out. Returns `false`, with nothing changed,
    /// if no such range is handed out.
    #[inline]
    pub fn free(
        &self,
        own: Option<Own<'_>>,
        bitmap: &Mutex<Bitmap>,
        page: u64,
        pages: u64,
        order: u32,
    ) -> bool {
        if page >= END_PAGE {
            return false;
        }
        let word = match own {
            Some(own) => own.cpu.find(page, Class::of(order)),
            None => self.meta.word(page, order),
        };
        let Some(word) = word else { return false };
        let owner = match owner_and_pages(word.load(Ordering::Relaxed)) {
            Some((owner, asked)) if asked == pages => owner,
            _ => return false,
        };
        if owner < EXACT
            && let Some(Own { index, cpu }) = own
        {
            if index == owner {
                self.keep(cpu, bitmap, word, page, order);
            } else {
                let zone = self.zone(page);
                let range = Returned { word, page, order, zone };
                if !cpu.post(&self.remote_queues, owner, range, self.budget[zone]) {
                    self.give_back(bitmap, page, 1 << order, order);
                }
            }
            return true;
        }
        let size = if owner == EXACT || order >= CACHED_ORDERS { pages } else { 1 << order };
        self.give_back(bitmap, page, size, order);
        true
    }

    #[inline]
    fn keep(&self, cpu: &Cpu, bitmap: &Mutex<Bitmap>, word: &AtomicU64, page: u64, order: u32) {
        if !cpu.push(self.zone(page), word, page, order) {
            self.keep_in_full(cpu, bitmap, word, page, order);
        }
    }

    #[cold]
    fn keep_in_full(&self, cpu: &Cpu, bitmap: &Mutex<Bitmap>, word: &AtomicU64, page: u64, order: u32) {
        let zone = self.zone(page);
        self.make_room(cpu, zone, order, self.most_at_once(zone, order), bitmap);
        if !cpu.push(zone, word, page, order) {
            self.give_back(bitmap, page, 1 << order, order);
        }
    }

    pub fn hand_out(&self, page: u64, asked: u64, order: u32, owner: u64) -> Result<(), OutOfMemory> {
        self.meta.make(page, order, handed_out(owner, asked))
    }

    /// Empties the lists of every CPU, or of the CPU `only`, into the bitmap. Waits for the CPUs' exclusive sections.
    pub fn drain<P: Platform>(&self, platform: &P, only: Option<usize>, bitmap: &Mutex<Bitmap>) {
        self.cpus.with_others(platform, only, |index, cpu| {
            cpu.drain(&self.remote_queues[index], |page, order| {
                // Frees the range even if the platform panics instead of lending a CPU. Borrow a CPU for each range
                // anew, so that no loan lasts long.
                let spilled = Guard::new(|| self.give_back(bitmap, page, 1 << order, order));
                platform.with_cpu(|_| drop(spilled));
            });
        });
    }

    pub fn pages(&self) -> u64 {
        self.cpus
            .peek()
            .fold(0, |sum: u64, cpu| sum.wrapping_add(cpu.cached()).wrapping_add(cpu.on_their_way()))
    }

    pub fn bytes(&self) -> usize {
        self.meta.bytes() + self.cpus.bytes() + size_of_val(&*self.remote_queues)
    }

    #[cold]
    #[inline(never)]
    fn give_back(&self, bitmap: &Mutex<Bitmap>, page: u64, pages: u64, order: u32) {
        // Clear the word first: after the free another CPU may allocate the range and write its own word.
        self.meta.write(page, order, NO_WORD);
        bitmap.lock().free_all([page], pages);
    }

    /// Returns the zone whose lists serve `limit` without a check of each range: the top zone for a limit at or beyond
    /// the space's last address, the low zone for its own last address; `None` for any other limit.
    #[inline]
    pub fn zone_for(&self, limit: u64) -> Option<usize> {
        if limit >= self.last {
            Some(self.top)
        } else if limit == self.low_last {
            Some(0)
        } else {
            None
        }
    }

    #[inline]
    fn zone(&self, page: u64) -> usize {
        usize::from(page >= self.low_end)
    }

    #[inline]
    fn zone_below(&self, end: u64) -> usize {
        usize::from(end > self.low_end)
    }
}
