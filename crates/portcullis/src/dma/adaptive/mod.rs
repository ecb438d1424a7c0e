//! A queue that copies each buffer or maps it in a ring, whichever is cheaper. Whatever the choice
//! and the domain's policy, protection is strict, and for an untrusted device to the byte: what
//! shares a granule with other data is copied.

mod book;
mod commits;
mod ends;
mod measure;
mod short;

use alloc::boxed::Box;
use core::mem::MaybeUninit;

use self::book::{FIRST_TIMED, most_bytes};
use self::commits::Commits;
use self::ends::Ends;
use self::measure::cost_of;
use super::mapping::{Choice, Kind};
use super::told::Told;
use super::{DmaDevice, Ended, NotUnmapped, RawMapping, StrictRing, StrictRingConfig};
use crate::addr::{Direction, DmaSegment, Iova, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::{Attributes, BounceDevice, PoolMapping, Rule, Way};
use crate::domain::MapListError;
use crate::heap::{OutOfMemory, Shared, made, slice, write_fields};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;

pub use book::Explained;
pub(crate) use book::{Cell, Half, class_of, classes, pause_after};

/// A queue whose buffers are copied through the pool of its domain, or mapped in a [`StrictRing`], whichever is cheaper.
///
/// An untrusted device is never given a granule that holds other data, so protection is to the
/// byte. Of a buffer that shares its first or last granule, the bytes there are copied, through
/// slots of the pool that stand in for them in the ring, and the granules between them are mapped;
/// or all of it is copied. (Where the pool's [`split`](crate::bounce::PoolConfig::split) is off, all
/// of it always is.) What is mapped in the ring ends with its batch; what is copied as a whole ends
/// at once.
///
/// Where the ring has no room for a buffer that is to be mapped, [`map`](Self::map) fails as long as
/// others wait for a commit, which makes room, as in the ring itself. If none does, the buffer is
/// mapped by itself, which ends at once, with a wait; or copied, where that was measured to be
/// cheaper, where there are no addresses or tables for a mapping, or where only its middle may be
/// mapped. What is not for the ring, and not for a copy either (larger than the pool's threshold, or
/// persistent), is mapped by itself. All this is so whatever the domain's policy.
///
/// A copy costs time by the byte, a mapping costs a share of the wait for the hardware. Where the
/// two cross depends on caches, on the IOMMU and on what else goes on, so nothing about it is a
/// constant. [`new`](Self::new) times both ways for each size (powers of two from 512 bytes to the
/// pool's threshold), with shared ends and without, on scratch memory. Afterwards one mapping in 61
/// of each size is timed (of the first 244 more: about 15), and at most one in 64 of these goes the other way, so that the other way's cost stays
/// known. Such probes take no more than 1/128 of the time that mappings of the size take, besides
/// one probe. The choice changes where the other way was cheaper by an eighth four times in a row:
/// noise does not make it swing. [`explain`](Self::explain) says what was measured and chosen. A commit is shared out among as
/// many descriptors as end from one commit to the next: a full batch, or fewer for a queue that
/// often falls idle and [commits](Self::commit) then.
///
/// The queue belongs to one CPU at a time, so nothing here is shared, and the choice costs some
/// plain instructions. `K` is the clock: it returns a count of nanoseconds, from any beginning.
#[derive(Debug)]
pub struct AdaptiveRing<M: Mapper, P: Platform, C: CopyMemory, K> {
    ring: StrictRing<M, P>,
    pool: BounceDevice<M, P, C>,
    ends: Ends<M, P, C>,
    /// The direction of the mapping that is being made.
    direction: Direction,
    /// Directions that were measured, or tried.
    met: [bool; Direction::ALL.len()],
    batch: usize,
    clock: K,
    /// What two readings of the clock cost.
    clock_ns: u64,
    /// How many classes of sizes there are.
    classes: usize,
    /// The sizes of each direction, one direction after the other; of each, those without shared ends first.
    sizes: Box<[Size]>,
    commits: Commits,
}

/// Mappings of one size, direction and shape.
// What every mapping touches stands first, in one line of the cache.
#[derive(Debug)]
#[repr(C, align(64))]
struct Size {
    /// How many went each way, by the number of the [`Choice`].
    counts: [u64; 2],
    /// Mappings until one is timed.
    until: u64,
    cell: Cell,
}

impl Default for Size {
    fn default() -> Self {
        Self { counts: [0; 2], until: FIRST_TIMED - 1, cell: Cell::default() }
    }
}

impl Size {
    /// How many mappings were made.
    fn made(&self) -> u64 {
        self.counts[0].saturating_add(self.counts[1])
    }
}

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// Makes a queue of `device` for data of one direction, with a ring as `config` says. `pool` is
    /// the same device, as the pool of its domain has it. Measures both ways, on scratch memory of
    /// the pool's: twelve mappings of each size, and as many with shared ends where the device is
    /// untrusted; half of them may wait for the hardware. Where
    /// there is no memory for that, or something fails, what is not measured by then is copied at
    /// first, and the ring tried soon. (Memory that the hardware does not confirm as unreachable is
    /// leaked.) Allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::new`]; [`SetupError::NotTranslated`] for a device whose addresses are not translated;
    /// [`SetupError::OtherDomain`].
    pub fn new(
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        direction: Direction,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<Self, SetupError> {
        let mut queue: Self = made(|place| Self::unmeasured_in(place, device, pool, config, clock))?;
        queue.measure_toward(direction)?;
        Ok(queue)
    }

    /// Makes a queue in `place`, for data of no direction yet.
    ///
    /// # Errors
    /// As [`new`](Self::new), with nothing in the place.
    #[inline(never)]
    pub(super) fn unmeasured_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<&'a mut Self, SetupError> {
        if !device.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        if !Shared::ptr_eq(device.domain(), pool.pool().domain()) {
            return Err(SetupError::OtherDomain);
        }
        let (classes, clock_ns) = (classes(pool.pool().threshold()), cost_of(&clock));
        let sizes = slice(2 * Direction::ALL.len() * classes, |_| Ok(Size::default()))?;
        // The last step that may fail, so that nothing is dropped in the place.
        let ring = StrictRing::new(device, config)?;
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field in the place; then all of them are there.
        Ok(unsafe {
            write_fields!(
                at,
                made [],
                ring: ring,
                direction: Direction::ALL[0],
                met: [false; Direction::ALL.len()],
                batch: config.batch,
                clock_ns: clock_ns,
                clock: clock,
                classes: classes,
                sizes: sizes,
                ends: Ends::new(&pool),
                commits: Commits::new(config.batch),
                pool: pool,
            );
            place.assume_init_mut()
        })
    }

    /// Measures both ways for data of one more direction, as [`new`](Self::new) does.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the ring is not to be used.
    pub(super) fn measure_toward(&mut self, direction: Direction) -> Result<(), OutOfMemory> {
        self.direction = direction;
        self.met[direction.index()] = true;
        self.measure()
    }

    /// [`map`](Self::map), for data of any direction. One that was not measured is copied at first.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    pub(super) unsafe fn map_toward(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        self.direction = direction;
        if !self.met[direction.index()] {
            self.begin();
        }
        // SAFETY: the caller's promise.
        unsafe { self.map(list, attributes, out) }
    }

    /// Notes that the direction was met, and takes the cheaper way for each of its sizes, as far as
    /// costs are known: copying, where they are not.
    #[cold]
    fn begin(&mut self) {
        self.met[self.direction.index()] = true;
        let first = self.size_of(0, false);
        self.sizes[first..first + 2 * self.classes].iter_mut().for_each(|size| _ = size.cell.begin());
    }

    /// Returns the index in `sizes` of `class`, in the direction of the mapping that is being made,
    /// of lists whose ends are `shared` or not.
    #[inline]
    fn size_of(&self, class: usize, shared: bool) -> usize {
        self.place(self.direction, class, shared)
    }

    /// Returns the index in `sizes` of `class`, in any direction.
    #[inline]
    fn place(&self, direction: Direction, class: usize, shared: bool) -> usize {
        (2 * direction.index() + usize::from(shared)) * self.classes + class
    }

    /// Lets the device reach the bytes of `list`, or a copy of them, and writes to `out` what it is
    /// to be given. Returns how many segments it wrote, `list.len()` at the most.
    ///
    /// Cost and context are those of [`BounceDevice::map`] or of [`StrictRing::map_sg`], of both
    /// where the ring has no room.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all. [`DmaMapError::Full`] while others wait for a commit: commit,
    /// and map again. After [`MapListError::Unconfirmed`] devices may reach what was entered of it.
    ///
    /// # Safety
    /// As [`BounceDevice::map`], until the unmap has returned; and until then:
    ///
    /// - Two syncs of the same bytes of the mapping do not run at the same time. That is the
    ///   caller's to promise here: it alone gets the [`RawMapping`], and so the syncs and the
    ///   unmap themselves are safe.
    /// - Nothing else calls the pool for the mapping's address, as
    ///   [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap) demands of its callers.
    #[inline]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // The pool and the ring check the sum.
        let (len, whole) = self.pool.look_at(list);
        let shared = !whole;
        let class = class_of(len, self.classes).map(|class| self.size_of(class, shared));
        let choice = class.map_or(Choice::Map, |class| self.sizes[class].cell.choice());
        if let Some(class) = class
            && self.sizes[class].until == 0
        {
            // SAFETY: the caller's promise.
            return unsafe { self.map_timed((class, shared), list, attributes, out) };
        }
        // SAFETY: the caller's promise.
        let (mapping, used, _) = unsafe { self.map_by(choice, (class, shared), list, attributes, out) }?;
        if let Some(class) = class {
            let size = &mut self.sizes[class];
            size.until -= 1;
            size.counts[mapping.kind().choice() as usize] += 1;
        }
        Ok((mapping, used))
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    unsafe fn map_timed(
        &mut self,
        (class, shared): (usize, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        let size = &mut self.sizes[class];
        let pause = pause_after(size.made());
        size.until = pause - 1;
        let choice = size.cell.turn(pause);
        let start = (self.clock)();
        // SAFETY: the caller's promise.
        let mapped = unsafe { self.map_by(choice, (Some(class), shared), list, attributes, out) };
        let (mapping, used, failed) = mapped?;
        let ns = self.since(start);
        let (size, kind) = (&mut self.sizes[class], mapping.kind());
        size.counts[kind.choice() as usize] += 1;
        // What the pool maps says nothing of the ring. Where the ring fails, mapping costs both:
        // the attempt, and the copy after it.
        let timed = (kind != Kind::Pool(Way::Direct)).then(|| {
            let way = if failed { Choice::Map } else { kind.choice() };
            size.cell.note(way, Half::Map, ns);
            // There are at most 252.
            (class as u8, way)
        });
        Ok((mapping.with_timed(timed), used))
    }

    /// Maps by the way that was chosen, as far as that is possible, a list of a class (unless it is
    /// longer than all of them) whose ends are `shared` or not. Returns how it was mapped, how many
    /// segments of `out` that takes, and whether the ring was tried and failed.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    // In line: else what it returns is written to memory in parts, and read again in larger ones before they have left the store
    // buffer, which costs as much as the rest of the call.
    #[inline(always)]
    unsafe fn map_by(
        &mut self,
        choice: Choice,
        (class, shared): (Option<usize>, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize, bool), DmaMapError> {
        let mut failed = false;
        if choice == Choice::Map && !attributes.persistent_streaming {
            let refused = if shared {
                // SAFETY: the caller's promise.
                match unsafe { self.map_cut(list, attributes, out) } {
                    Ok(Some(mapping)) => return Ok((mapping, 1, false)),
                    Ok(None) => None,
                    Err(error) => Some(error),
                }
            } else {
                // SAFETY: the caller's promise.
                match unsafe { self.ring.map_sg(list, self.direction, out) } {
                    Ok((mapping, used)) => return Ok((mapping, used, false)),
                    Err(error) => Some(error),
                }
            };
            if let Some(error) = refused {
                failed = true;
                if self.falls_back_to_mapping(error, class)?
                    && !shared
                    // SAFETY: the caller's promise.
                    && let Some((mapping, used)) = unsafe { self.map_alone(list, attributes, out) }?
                {
                    return Ok((mapping, used, true));
                }
            }
        }
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.pool.map(list, self.direction, attributes) }?;
        let (mapping, used) = self.of_pool(&mapping, out);
        Ok((mapping, used, failed))
    }

    /// Maps by itself a list that the ring has refused, for which `out` has room. `None` where there
    /// are no addresses or tables for that: slots have theirs already.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    #[inline(never)]
    unsafe fn map_alone(
        &self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<Option<(RawMapping, usize)>, DmaMapError> {
        // What is persistent is mapped by itself.
        let attributes = Attributes { persistent_streaming: true, ..attributes };
        // SAFETY: the caller's promise.
        match unsafe { self.pool.map(list, self.direction, attributes) } {
            Ok(mapping) => Ok(Some(self.of_pool(&mapping, out))),
            // The caller must be told.
            Err(error) if error.may_be_reached() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Maps in the ring the middle of a list whose ends share a granule, with slots in the place of
    /// the ends. `None` where that cannot be.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn map_cut(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<Option<RawMapping>, DmaMapError> {
        let ([first, ..], true) = (list, list.len() <= out.len()) else { return Ok(None) };
        // SAFETY: the caller's promise.
        let Some(taken) = (unsafe { self.ends.take(list, self.direction, attributes) }) else {
            return Ok(None);
        };
        // SAFETY: between the ends the caller's promise; they are slots' memory, which nothing but the pool's copies uses before
        // they are given back, after a commit.
        match unsafe { self.ring.map(self.ends.linked(), self.direction) } {
            Ok(mapping) => {
                let offset = first.phys.page_offset(self.ring.device().domain().granule());
                // The mapping begins with a granule.
                let mapping = RawMapping { iova: Iova::new(mapping.iova.get() | offset), ..mapping };
                out[0] = DmaSegment { iova: mapping.iova, len: taken.len() };
                Ok(Some(mapping.cut(self.ends.keep(taken))))
            }
            Err(error) => {
                self.ends.refuse(taken, error.may_be_reached());
                Err(error)
            }
        }
    }

    /// Decides what becomes of a list of `class` that the ring has refused: whether it is rather
    /// mapped by itself than copied, or the error is the caller's.
    #[cold]
    fn falls_back_to_mapping(&self, error: DmaMapError, class: Option<usize>) -> Result<bool, DmaMapError> {
        match error {
            // What waits makes room, by a commit.
            DmaMapError::Full if self.ring.waiting() > 0 => Err(error),
            DmaMapError::Full | DmaMapError::TooLong { .. } => {
                let cell = class.map(|class| &self.sizes[class].cell);
                Ok(!cell.is_some_and(|cell| cell.copies_rather_than_wait(self.commits.ns())))
            }
            // The tables have no room, or cannot point to the buffer.
            DmaMapError::List(MapListError::Map(_)) => Ok(false),
            // Also where devices may still reach what was entered half-way: the caller must be told.
            error => Err(error),
        }
    }

    /// Makes a mapping of what the pool has mapped, and writes what the device is to be given. Returns how many segments that is.
    #[inline]
    fn of_pool(&self, mapping: &PoolMapping<'_>, out: &mut [DmaSegment]) -> (RawMapping, usize) {
        (RawMapping::of_pool(mapping, self.number()), mapping.write_segments(out))
    }

    /// The number by which its mappings are told from another queue's.
    #[inline]
    pub(super) fn number(&self) -> u64 {
        self.ring.number()
    }

    /// Ends a mapping: at once if it was copied; with its batch if it was mapped.
    ///
    /// Cost and context are those of [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap),
    /// by a strict policy, or of [`StrictRing::unmap`].
    ///
    /// # Errors
    /// [`NotUnmapped`]; a mapping of another ring comes back with it, and is untouched.
    #[inline]
    pub fn unmap(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        if mapping.queue() != self.number() {
            return Err(NotUnmapped::foreign(mapping));
        }
        self.commits.count();
        let commits = mapping.kind().is_in_ring() && self.ring.waiting() + 1 >= self.batch;
        if commits || mapping.timed().is_some() {
            return self.unmap_timed(mapping);
        }
        self.end(mapping)
    }

    /// Ends a mapping of this ring that [is not timed](RawMapping::with_timed).
    #[inline]
    fn end(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let ended = match mapping.kind() {
            Kind::Ring => self.ring.unmap(mapping),
            Kind::Cut => self.end_cut(mapping),
            _ => {
                // SAFETY: this had the only token of the mapping, which exists once: no other unmap and, as they borrow it, no
                // sync runs now or later. Its original is as its maker promised until the unmap.
                return match unsafe { self.pool.pool().unmap_by(Rule::Strictly, mapping.iova, mapping.word) }
                {
                    Ok(()) => Ok(Ended::Done(())),
                    // No commit of the ring is its end.
                    Err(error) => Err(NotUnmapped { mapping: None, waits: false, error }),
                };
            }
        };
        if matches!(ended, Ok(Ended::Flushed(()))) {
            self.ends.committed();
        }
        ended
    }

    /// Ends a mapping in the ring whose ends are in slots.
    fn end_cut(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let number = mapping.list();
        self.ends.wait(number);
        let mut ended = self.ring.unmap(mapping.uncut());
        if let Err(NotUnmapped { mapping: back @ Some(_), .. }) = &mut ended {
            *back = back.take().map(|mapping| mapping.cut(number));
            self.ends.stay(number);
        } else {
            // SAFETY: as for the pool; no commit that ends the mapping has been told of yet.
            unsafe { self.ends.end(number) };
        }
        ended
    }

    /// Ends a mapping whose time is wanted: its own, or that of the commit which it may lead to.
    #[cold]
    fn unmap_timed(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let (timed, in_ring) = (mapping.timed(), mapping.kind().is_in_ring());
        let start = (self.clock)();
        let result = self.end(mapping.with_timed(None));
        let mut ns = self.since(start);
        if matches!(result, Ok(Ended::Flushed(()))) {
            self.commits.note(ns);
            // Its own time is a part of the commit's: only its share of that counts for it.
            ns = 0;
        }
        if let (Some((class, way)), Ok(_)) = (timed, &result) {
            let share = if in_ring { self.commits.share() } else { 0 };
            self.sizes[usize::from(class)].cell.note(way, Half::Unmap, ns.saturating_add(share));
        }
        result
    }

    /// Ends all that waits, with one wait for the hardware: for a queue that falls idle. Returns
    /// how many descriptors have ended. A queue that falls idle calls this also where nothing
    /// waits, as the ring counts from these calls how many descriptors a commit has. The caller
    /// holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::commit`].
    pub fn commit(&mut self) -> Result<usize, DmaUnmapError> {
        self.commits.idle();
        let start = (self.clock)();
        let committed = match self.commit_ring() {
            // What a measurement has left is no caller's; a later commit tries it again.
            Err(_) if !self.ring.has_unconfirmed() => self.ring.told().commit(0),
            result => result?,
        };
        let ns = self.since(start);
        if committed > 0 {
            self.commits.note(ns);
        }
        Ok(committed)
    }

    fn commit_ring(&mut self) -> Result<usize, DmaUnmapError> {
        let committed = self.ring.commit()?;
        self.ends.committed();
        Ok(committed)
    }

    /// What commits have ended, for a caller that cannot say so.
    pub(super) fn told(&mut self) -> &mut Told {
        self.ring.told()
    }

    /// How many descriptors are unmapped and wait for a commit.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.ring.waiting()
    }

    /// Lets the CPU see what the device has written of `len` bytes, from `offset` on, of a mapping
    /// that has not ended: copies it, where there is a copy. O(len) then; otherwise a fence.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_cpu`](crate::bounce::pool::BouncePool::sync_for_cpu).
    pub fn sync_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number() {
            return Err(DmaUnmapError::OtherQueue);
        }
        match mapping.kind() {
            // SAFETY: its token is borrowed, so it does not end meanwhile; its maker promised that syncs of the same bytes do
            // not meet, and what its original is.
            Kind::Pool(_) => unsafe { self.pool.pool().sync_for_cpu(mapping.iova, offset, len) },
            Kind::Cut => {
                self.ring.device().sync_for_cpu();
                // SAFETY: as above.
                unsafe { self.ends.sync(mapping.list(), mapping.iova, (offset, len), true) }
            }
            _ => {
                self.ring.device().sync_for_cpu();
                Ok(())
            }
        }
    }

    /// Lets the device see what the CPU has written of `len` bytes, from `offset` on, of a mapping
    /// that has not ended: copies it, where there is a copy. O(len) then; otherwise a fence.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_device`](crate::bounce::pool::BouncePool::sync_for_device).
    pub fn sync_for_device(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number() {
            return Err(DmaUnmapError::OtherQueue);
        }
        match mapping.kind() {
            // SAFETY: as for `sync_for_cpu`.
            Kind::Pool(_) => unsafe { self.pool.pool().sync_for_device(mapping.iova, offset, len) },
            Kind::Cut => {
                // SAFETY: as for `sync_for_cpu`.
                let synced = unsafe { self.ends.sync(mapping.list(), mapping.iova, (offset, len), false) };
                self.ring.device().sync_for_device();
                synced
            }
            _ => {
                self.ring.device().sync_for_device();
                Ok(())
            }
        }
    }

    /// Returns what was chosen for each size of each direction that was met, smallest first, and
    /// why.
    pub fn explain(&self) -> impl Iterator<Item = Explained> {
        let met = Direction::ALL.into_iter().filter(|direction| self.met[direction.index()]);
        let (untrusted, granule) = (self.pool.is_untrusted(), self.pool.pool().domain().granule().bytes());
        met.flat_map(move |direction| {
            let shapes = (0..self.classes).flat_map(|class| [(class, false), (class, true)]);
            // To a trusted device nothing is shared, to another all that is less than a granule.
            let occurs = move |class, shared| {
                if shared { untrusted } else { !untrusted || most_bytes(class) >= granule }
            };
            shapes.filter(move |(class, shared)| occurs(*class, *shared)).map(move |(class, shared)| {
                let size = &self.sizes[self.place(direction, class, shared)];
                size.cell.explain(class, (direction, shared), size.counts)
            })
        })
    }

    /// Nanoseconds since `start`, less what the clock itself takes.
    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }
}

/// Commits. What is still mapped stays so; the slots that are a part of it are then never used again.
impl<M: Mapper, P: Platform, C: CopyMemory, K> Drop for AdaptiveRing<M, P, C, K> {
    fn drop(&mut self) {
        if !self.ends.is_empty() && self.ring.commit().is_ok() {
            self.ends.committed();
        }
    }
}
