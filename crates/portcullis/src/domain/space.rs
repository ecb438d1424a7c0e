//! The [`Domain`] itself: it maps lists of segments and unmaps ranges by its policy. A list is
//! mapped as a whole or not at all, and no other caller gets its range until an unmap has given
//! that back.

mod at_once;
mod endings;
mod guards;
mod lifecycle;
mod live;
mod open;
mod steps;

pub(crate) use endings::Ending;
pub(crate) use guards::Changing;
pub(crate) use lifecycle::{Fate, LinkFailed};
pub use lifecycle::{Linked, Refused, Reserved, Unlinked};
pub(crate) use steps::Tally;

use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;

use self::at_once::AtOnce;
use super::account::Books;
use super::parts::{NoNote, Parts};
use super::policy::AtomicPolicy;
use super::{MapListError, Policy};
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr, PhysSegment};
use crate::broken::broken;
use crate::guard::Guard;
use crate::heap::{Shared, SharedPlace, place_of, write_fields};
use crate::invalidation::{Flush, FlushQueue, Gather, InvalidationError};
use crate::iova::{IovaError, IovaSpace, Own, SpaceConfig};
use crate::mapper::Mapper;
use crate::percpu::{Marks, Turn};
use crate::pgtable::Attributes;
use crate::platform::{LocalCpu, Platform, PlatformEvents, events_of};
use crate::setup::SetupError;
use crate::sync::AtomicU64;

/// Counts of a domain's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainStats {
    /// Bytes of addresses that could be handed out when the domain was made.
    pub iova_bytes: u64,
    /// Bytes of addresses that are not free for every CPU: handed out, or kept by one CPU.
    pub taken_iova_bytes: u64,
    /// Of those, bytes that CPUs keep, or have on their way to each other.
    pub cached_iova_bytes: u64,
    /// The most that was ever taken.
    pub peak_iova_bytes: u64,
    /// Bytes of memory that the account of addresses itself uses.
    pub iova_memory: usize,
    /// Lists (or single buffers) mapped.
    pub maps: u64,
    /// Ranges unmapped.
    pub unmaps: u64,
    /// Domain-wide flushes that the hardware confirmed.
    pub flushes: u64,
    /// Bytes of I/O virtual addresses that are never used again, after a caller's mistake, a failed
    /// invalidation, or a panic of a mapper, its queue or the platform. (Where the platform
    /// panicked, some of the bytes counted may be in use again.)
    pub lost_iova_bytes: u64,
}

/// One I/O address space, shared by the devices attached to it.
///
/// All methods take `&self` and may run on any number of CPUs at once. Dropping the domain drops its mapper;
/// its devices must be detached before.
pub struct Domain<M: Mapper, P: Platform> {
    platform: P,
    mapper: M,
    /// A domain always has a policy.
    policy: AtomicPolicy,
    translated: bool,
    granule: PageSize,
    space: IovaSpace,
    flush_queue: FlushQueue,
    books: Books,
    /// The earliest time at which the timer was asked for; `u64::MAX` where it was not.
    due_ns: AtomicU64,
    /// Rings made so far: the colour of the next one.
    rings: AtomicU64,
    /// Addresses that are handed out to nobody.
    reserved: Vec<IovaRange>,
    /// Mappings that are partly unmapped.
    parts: Parts,
    /// Whether maps wait for nothing that another caller does, and what they have left to do.
    at_once: AtOnce,
}

/// Its policy, and the addresses that are handed out to nobody. The lists of all CPUs would be megabytes of text.
impl<M: Mapper, P: Platform> fmt::Debug for Domain<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("policy", &self.policy())
            .field("reserved", &self.reserved)
            .finish_non_exhaustive()
    }
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Makes a domain without mappings. Registers it with the platform for timers and released
    /// CPUs. Allocates the lists, queues and counts of all CPUs; waits for nothing.
    ///
    /// # Errors
    /// [`SetupError`]: the mapper's geometry leaves nothing to allocate, or there is no memory to
    /// keep account of it.
    pub fn new(platform: P, mapper: M, policy: Policy) -> Result<Shared<Self>, SetupError> {
        Self::within(platform, mapper, policy, Vec::new(), Iova::new(u64::MAX))
    }

    /// As [`new`](Self::new), with addresses up to `last` alone, and none of `reserved`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[inline(never)]
    pub(crate) fn within(
        platform: P,
        mut mapper: M,
        policy: Policy,
        mut reserved: Vec<IovaRange>,
        last: Iova,
    ) -> Result<Shared<Self>, SetupError> {
        let cpus = platform.cpus();
        mapper.set_cpus(cpus)?;
        let geometry = mapper.geometry();
        let granule = geometry.page_sizes.smallest().ok_or(SetupError::NoPageSize)?;
        let last = geometry.aperture.last().min(last);
        let aperture =
            IovaRange::from_bounds(geometry.aperture.start(), last).map_err(|_| IovaError::Empty)?;
        reserved.try_reserve(geometry.reserved.len() + 1).map_err(|_| SetupError::OutOfMemory)?;
        reserved.extend_from_slice(&geometry.reserved);
        // Address 0 means "no address" to too many drivers and devices.
        reserved.extend(IovaRange::new(Iova::new(0), granule.bytes()));
        let config = SpaceConfig { reserved, ..SpaceConfig::new(aperture, granule, cpus) };
        // The addresses, their translations (where the mapper has marks), and the flush queue share
        // turns.
        let marks = match mapper.marks(&platform) {
            Some(marks) => marks.clone(),
            None => Shared::new(Marks::new(cpus)?)?,
        };
        let translated = policy.is_translated();
        let mut place = SharedPlace::<Self>::new()?;
        let at = place.as_mut_ptr();
        // In its place from the beginning, field by field: it is larger than a kernel's stack has room for.
        // SAFETY: each write is to a field in the place, and the three places are of fields, each used in no other way. Where the second
        // fails, what the first has made is dropped; after these nothing fails, and all fields are there.
        let domain = unsafe {
            let (space, flush_queue) = (place_of(&raw mut (*at).space), place_of(&raw mut (*at).flush_queue));
            let books = place_of(&raw mut (*at).books);
            IovaSpace::make_in(space, &config, marks.clone())?;
            let marks = (!mapper.costs().shares_one_queue()).then_some(marks);
            if let Err(error) = FlushQueue::make_for(flush_queue, marks, cpus).map(drop).and_then(|()| {
                Books::make_in(books, cpus).map(drop).inspect_err(|_| flush_queue.assume_init_drop())
            }) {
                space.assume_init_drop();
                return Err(error.into());
            }
            write_fields!(
                at,
                made [space, flush_queue, books],
                policy: AtomicPolicy::new(Some(policy)),
                translated: translated,
                due_ns: AtomicU64::new(u64::MAX),
                rings: AtomicU64::new(0),
                reserved: config.reserved,
                at_once: AtOnce::default(),
                parts: Parts::default(),
                platform: platform,
                mapper: mapper,
                granule: granule,
            );
            place.filled()
        };
        domain.platform.register(events_of(&domain))?;
        Ok(domain)
    }

    /// The policy now.
    #[inline]
    pub fn policy(&self) -> Policy {
        self.policy.get().unwrap_or_else(|| broken("a domain has a policy"))
    }

    /// Whether devices get addresses that are translated: under every policy but passthrough.
    #[inline]
    pub fn is_translated(&self) -> bool {
        self.translated
    }

    /// The mapper, which changes the domain's translations: for callers that look at it, or tell it
    /// of devices' TLBs. To unmap a mapping of the domain through it does not end the mapping: that
    /// is the domain's still. Its owner's unmap returns
    /// [`UnmapError::NotMapped`](super::UnmapError::NotMapped), and invalidates it; its addresses
    /// are never used again, and not counted as lost.
    pub fn mapper(&self) -> &M {
        &self.mapper
    }

    /// What lends the domain its CPUs.
    #[inline]
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// The smallest page, the unit in which memory is opened to a device.
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    /// Maps the pages that `list` touches, one segment after another, into one range of addresses at or
    /// below `limit`.
    ///
    /// Costs one allocation, one walk for each leaf table, and one store for each entry; may
    /// allocate page tables. Waits for hardware only where the address space or the memory for
    /// tables is exhausted, where a failed call must be undone, and where the mapper waits for each
    /// map (as for hardware that [caches what is
    /// absent](crate::invalidation::InvalidationQueue::caches_absent)). The caller holds no lock
    /// and no CPU.
    ///
    /// # Errors
    /// [`MapListError`]: nothing is mapped. No addresses are lost either, but for those at which
    /// another caller's mapping was met.
    ///
    /// # Safety
    /// **The memory is the caller's to open to every device of the domain, for as long as it is mapped**: until an
    /// [`unmap`](Self::unmap) of it has returned `Ok`, and, under a lazy policy, the flush that covers it is confirmed. Devices
    /// may access it at any time, as the permissions say, and with it all of the granules that it touches. Until then
    /// it is not given to others, nor used in a way that relies on its contents: there are no references to it but to
    /// atomics (and, where devices only read, shared ones to what is not written).
    ///
    /// After an error this holds only for [`MapListError::Unconfirmed`], until a
    /// [`flush`](Self::flush) has returned `Ok`.
    pub unsafe fn map(
        &self,
        list: &[PhysSegment],
        attributes: impl Into<Attributes>,
        limit: Iova,
    ) -> Result<IovaRange, MapListError> {
        let (len, attributes) = (self.pages_of(list)?, attributes.into());
        if let [PhysSegment { phys, .. }] = list {
            // Whole pages, so that nothing counts as beside the segment.
            let pages = PhysSegment { phys: phys.align_down(self.granule), len };
            // SAFETY: the caller's promise.
            if let Some(range) = unsafe { self.map_fast(pages, attributes, limit, |_| ()) } {
                return Ok(range);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.open::<false>(list, (len, len), attributes, limit, |_, _| ()) }
    }

    /// Maps the pages of one segment, if that is quickly done: it takes addresses out of the CPU's
    /// list, and needs a walk and some stores, all in one turn of its CPU. Otherwise returns `None`
    /// with nothing changed, and [`map`](Self::map) maps them, or says why not. The bytes beside
    /// the segment in its pages [count](Self::count_neighbours). Calls `counted` with the CPU where it did.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline]
    pub(crate) unsafe fn map_fast(
        &self,
        segment: PhysSegment,
        attributes: Attributes,
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        if !M::IS_QUICK {
            return None;
        }
        let PhysSegment { phys, len: used } = segment;
        let pages = IovaRange::of_pages(Iova::new(phys.get()), used, self.granule)?;
        let (phys, len) = (PhysAddr::new(pages.start().get()), pages.len());
        let enter = |turn: &Turn<'_>, range| {
            // SAFETY: the caller's promise, for all of the granules that the memory touches.
            unsafe { self.mapper.map_fast(turn, range, phys, attributes) }
        };
        self.take_and(enter, (len, len - used), limit, counted)
    }

    /// Takes `len` bytes of addresses out of the CPU's list, and has `enter` map them in the same turn, if that is quickly done; else
    /// nothing is changed. `neighbours` bytes of them are beside the segments. Calls `counted` with the CPU where it did.
    #[inline(always)]
    fn take_and(
        &self,
        enter: impl FnOnce(&Turn<'_>, IovaRange) -> bool,
        (len, neighbours): (u64, u64),
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |turn, own| {
                let own = own?;
                let changing = self.changing(self.space.take(own, len, limit)?);
                let range = changing.range();
                if !enter(turn, range) {
                    self.give_back(Some(cpu), Some(own), changing.done());
                    return None;
                }
                self.books.with(cpu, |page| {
                    page.add(|book| &book.maps, 1);
                    self.change_in(page, neighbours);
                });
                counted(cpu);
                Some(changing)
            })?
        };
        Some(self.platform.with_cpu_fast(fast)??.done())
    }

    /// Whether all addresses of `range` are in one of those that the domain hands out to nobody: reserved by its
    /// [builder](crate::dma::DomainBuilder::reserve), or by its mapper.
    pub(crate) fn is_reserved(&self, range: IovaRange) -> bool {
        let is_whole = range.start().is_aligned(self.granule);
        is_whole && self.reserved.iter().any(|reserved| reserved.contains_range(range))
    }

    /// Waits until no device reaches anything that was unmapped before the call. One domain-wide
    /// invalidation; every CPU gets its deferred addresses back with its next unmaps. Before that,
    /// one barrier of all CPUs ([`Platform::fence_all`]), and a wait for what CPUs that ever
    /// deferred are doing with the domain just then: O(1) for each. [`exposure`](Self::exposure) may
    /// count what a CPU had deferred for longer than devices reached it, see there. The caller holds
    /// no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach what they could before.
    pub fn flush(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush_of_all(&self.platform))
    }

    /// As [`flush`](Self::flush), but it covers only the segments that CPUs have closed in their
    /// queues, and waits for no other CPU: for a queue that is full, and for a CPU that is gone.
    pub(super) fn flush_closed(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush())
    }

    // By itself, as what it gathers takes most of the stack.
    #[inline(never)]
    fn finish(&self, flush: Flush) -> Result<(), InvalidationError> {
        self.mapper.sync(Gather::EVERYTHING)?;
        self.flush_queue.confirm_flush(flush, self.platform.now_ns());
        self.platform.with_cpu(|cpu| self.books.of(cpu).add(|book| &book.flushes, 1));
        Ok(())
    }

    /// Frees page tables that have become empty, for a caller that is short of memory, say. Returns
    /// how many bytes it freed. `map` does the same before it fails for want of table memory, unless another
    /// call is at it.
    ///
    /// Waits for hardware and for other CPUs, for those first that called this before; and looks at
    /// all tables: see [`PageTable::reclaim`](crate::pgtable::PageTable::reclaim). The caller holds
    /// no CPU, and is no interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: the tables stay until a later call.
    pub fn reclaim(&self) -> Result<usize, InvalidationError> {
        self.mapper.reclaim(&self.platform)
    }

    /// How full the address space is, and what the domain has done so far. O(CPUs), with a CPU lent
    /// while it looks at the address space.
    pub fn stats(&self) -> DomainStats {
        let space = self.platform.with_cpu(|_| self.space.usage());
        // What ended before what was made, so that what goes on meanwhile makes neither fewer maps than unmaps nor fewer than none.
        let unmaps = self.books.sum(|book| &book.unmaps);
        let refused = self.books.sum(|book| &book.refused);
        DomainStats {
            iova_bytes: space.total,
            taken_iova_bytes: space.taken,
            cached_iova_bytes: space.cached,
            peak_iova_bytes: space.peak_taken,
            iova_memory: space.memory,
            maps: self.books.sum(|book| &book.maps).wrapping_sub(refused),
            unmaps,
            flushes: self.books.sum(|book| &book.flushes),
            lost_iova_bytes: self.books.sum(|book| &book.lost),
        }
    }

    /// Bytes of the pages that `list` touches: that many bytes of addresses it needs. O(segments).
    ///
    /// # Errors
    /// [`MapListError`]: an empty list or segment, or one that runs past the end of the address space. Every sum that
    /// mapping the list will need is checked here.
    pub fn pages_of(&self, list: &[PhysSegment]) -> Result<u64, MapListError> {
        // Where no number has more than 48 bits, and there are fewer than 2^12 pieces, no sum wraps, and no piece need be looked at by itself.
        let (mut bits, mut has_empty, mut total) = (self.granule.offset_mask(), false, 0_u64);
        for piece in list {
            bits |= piece.phys.get() | piece.len;
            has_empty |= piece.len == 0;
            total = total.wrapping_add(piece.bytes_of_granules(self.granule));
        }
        let is_plain = bits >> 48 == 0 && list.len() < 1 << 12 && !has_empty && total > 0;
        if is_plain { Ok(total) } else { self.pages_of_any(list) }
    }

    /// As [`pages_of`](Self::pages_of), piece by piece.
    #[cold]
    #[inline(never)]
    fn pages_of_any(&self, list: &[PhysSegment]) -> Result<u64, MapListError> {
        let mut total: u64 = 0;
        for (index, segment) in list.iter().enumerate() {
            let PhysSegment { phys, len } = *segment;
            if len == 0 {
                return Err(MapListError::EmptySegment { index, phys });
            }
            total = self
                .rounded(segment)
                .and_then(|bytes| total.checked_add(bytes))
                .ok_or(MapListError::Wraps { index, phys, len })?;
        }
        if total == 0 { Err(MapListError::EmptyList) } else { Ok(total) }
    }

    /// Bytes of the pages that `segment` touches; `None` where its end has no address.
    fn rounded(&self, segment: &PhysSegment) -> Option<u64> {
        segment.phys.checked_add(segment.len - 1)?;
        self.granule.round_up(segment.phys.page_offset(self.granule).checked_add(segment.len)?)
    }

    /// Takes addresses for `len` bytes, and returns what `guarded` makes of them on the CPU that they are taken on, which guards them from
    /// then on. Where there are none, flushes and takes back everything that is deferred, once.
    #[inline(always)]
    fn alloc<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T + Copy,
    ) -> Result<T, IovaError> {
        match self.space.alloc_fast(&self.platform, (len, limit), guarded) {
            Some(taken) => Ok(taken),
            None => self.alloc_slowly(len, limit, guarded),
        }
    }

    #[cold]
    #[inline(never)]
    fn alloc_slowly<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Result<T, IovaError> {
        let alloc = || self.space.alloc_guarded(&self.platform, (len, limit), !self.is_at_once(), &guarded);
        match alloc() {
            Err(exhausted @ IovaError::Exhausted { .. }) if self.is_at_once() => {
                self.want_maintenance();
                Err(exhausted)
            }
            Err(IovaError::Exhausted { .. }) if self.is_pending() && self.flush().is_ok() => {
                self.reclaim_deferred(None);
                alloc()
            }
            Err(exhausted @ IovaError::Exhausted { .. }) => {
                // Ranges whose flush is long over may sit in other CPUs' queues.
                self.reclaim_deferred(None);
                alloc().map_err(|_| exhausted)
            }
            result => result,
        }
    }

    /// Takes back every range whose flush is confirmed, from every queue, or from that of CPU
    /// `only`. A range goes back to the CPU that it came from.
    fn reclaim_deferred(&self, only: Option<usize>) {
        self.flush_queue.reclaim(&self.platform, only, |cpu, safe| {
            self.space.with_own(cpu, |_, own| self.give_back(cpu, own, safe));
        });
    }

    fn is_pending(&self) -> bool {
        self.flush_queue.is_pending(&self.platform)
    }

    /// Calls `f` with a CPU, if there is one, and with that CPU's lists, in a turn, if they can be
    /// had.
    fn with_turn<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>, Option<Own<'_>>) -> R) -> R {
        self.platform.with_cpu(|cpu| self.space.with_own(cpu, |_, own| f(cpu, own)))
    }

    #[inline]
    fn give_back(&self, cpu: Option<&LocalCpu<'_>>, own: Option<Own<'_>>, range: IovaRange) {
        if !own.is_some_and(|own| self.space.put(own, range)) {
            self.give_back_any(cpu, own, range);
        }
    }

    /// As [`give_back`](Self::give_back), for what the short way does not take: a part of a mapping, among others, which comes back
    /// with the rest of it.
    #[cold]
    #[inline(never)]
    fn give_back_any(&self, cpu: Option<&LocalCpu<'_>>, own: Option<Own<'_>>, range: IovaRange) {
        self.parts.forget(range);
        if self.space.free_local(own, range) {
            return;
        }
        match self.parts.gone(&self.space, range) {
            Ok(None) => {}
            Ok(Some(whole)) if self.space.free_local(own, whole) => {}
            Ok(Some(whole)) => self.books.of(cpu).add(|book| &book.lost, whole.len()),
            Err(NoNote) => self.books.of(cpu).add(|book| &book.lost, range.len()),
        }
    }

    /// Counts `bytes` of `range` as lost, and, if that is a mapping, what was gone of it before: it does not come back. All of
    /// that is counted where the platform panics, too, on whose way out no CPU is taken.
    #[cold]
    #[inline(never)]
    pub(crate) fn lose_rest(&self, range: IovaRange, bytes: u64) {
        self.lose(bytes);
        if !self.parts.is_empty() {
            let gone = Cell::new(0);
            let losing = Guard::new(|| self.lose(gone.get().max(self.parts.forget(range))));
            self.platform.with_cpu(|_| gone.set(self.parts.forget(range)));
            losing.done();
            self.lose(gone.get());
        }
    }

    /// Counts addresses that are never used again. It takes no CPU from the platform, which might
    /// panic and keep the caller from its own error; that is slower, but rare.
    #[cold]
    #[inline(never)]
    pub(crate) fn lose(&self, bytes: u64) {
        self.books.of(None).add(|book| &book.lost, bytes);
    }
}

impl<M: Mapper, P: Platform> PlatformEvents for Domain<M, P> {
    fn timer(&self) {
        if !self.is_due() {
            return;
        }
        // A flush that fails is tried again below.
        let _ = self.maintain();
        // Where this fails or panics, devices may still reach what waits: it is tried again later,
        // as no caller is here to be told.
        let again = Guard::new(|| self.set_timer(self.retry_ns()));
        self.flush_queue.end_timers();
        // Only then: what is queued later asks for a timer again.
        if !self.flush_queue.is_pending(&self.platform) {
            again.done();
        } else if self.flush().is_ok() {
            again.done();
            // So that what has waited on CPUs that defer nothing any more is counted for no longer
            // than it did.
            self.flush_queue.tell(&self.platform);
        }
    }

    fn cpu_released(&self, index: usize) {
        // Where a flush fails, what is deferred stays out of use until another flush succeeds;
        // nothing becomes unsafe. Nothing is taken back here from a queue that all CPUs share: the
        // others do that as they go on.
        if self.flush_queue.has_queue(index) {
            let due = self.flush_queue.close_of(&self.platform, index);
            if !due || self.flush_closed().is_ok() {
                self.reclaim_deferred(Some(index));
            }
        }
        self.space.drain_cpu(&self.platform, index);
    }
}

/// Returns the highest address of a list, for devices that get no translation.
pub(crate) fn last_byte(list: &[PhysSegment]) -> Result<PhysAddr, MapListError> {
    let mut highest = None;
    for (index, segment) in list.iter().enumerate() {
        highest = highest.max(Some(MapListError::check(*segment, index)?));
    }
    highest.ok_or(MapListError::EmptyList)
}
