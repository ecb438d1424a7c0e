//! Strict protection for a queue, to the byte where it must be, by the cheaper of a copy and a ring's mapping.

mod book;
mod commits;
mod error;
mod mapping;
mod measure;

use alloc::boxed::Box;
use alloc::sync::Arc;

use self::book::{Cell, Half, TIMED, class_of, classes};
use self::commits::Commits;
use self::mapping::Course;
use self::measure::cost_of;
use super::{DmaDevice, RingError, RingMapping, RingUnmap, StrictRing, StrictRingConfig};
use crate::addr::{Direction, DmaSegment, PhysSegment};
use crate::bounce::error::DmaUnmapError;
use crate::bounce::pool::{Attributes, BounceDevice, BouncePool, Way};
use crate::domain::{MapListError, Policy};
use crate::iova::ArenaError;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::unique;

pub(crate) use book::Choice;
pub use book::Explained;
pub use error::{AdaptiveMapError, AdaptiveUnmapError, AdaptiveUnmapFailed};
pub use mapping::{AdaptiveMapping, AdaptiveUnmap};

/// A queue whose buffers are copied through the pool of its domain, or mapped in a [`StrictRing`], whichever is cheaper.
///
/// What shares a granule with other data is copied for an untrusted device whatever it costs, so that protection is to
/// the byte; whatever is mapped in the ring ends with its batch; whatever is copied, at once. Where the ring has no
/// room, or cannot map a buffer, that is copied too, so nothing has to wait for a commit. What is not for the ring, and
/// what the pool does not copy (larger than its threshold, or persistent), is mapped by itself, and ends at once, too.
/// All this is so whatever the domain's policy.
///
/// A copy costs time by the byte, a mapping by the hardware's wait: where they cross depends on caches, on the IOMMU
/// and on what else goes on. So nothing about it is a constant. [`new`](Self::new) times both ways for each size (powers
/// of two from 512 bytes to the pool's threshold) on scratch memory; afterwards one mapping in 61 is timed, of which one
/// in 64 goes the other way, so that its cost stays known. The choice changes where the other way was cheaper by an
/// eighth four times in a row: noise does not make it swing. [`explain`](Self::explain) says what was measured and
/// chosen. A commit is shared out among as many descriptors as end from one to the next: a full batch, or fewer for a
/// queue that often falls idle and [commits](Self::commit) then.
///
/// The queue belongs to one CPU at a time, so nothing here is shared, and the choice costs some
/// plain instructions. `K` is the clock: any count of nanoseconds.
#[derive(Debug)]
pub struct AdaptiveRing<M: Mapper, P: Platform, C: CopyMemory, K> {
    ring: StrictRing<M, P>,
    pool: BounceDevice<M, P, C>,
    /// Of the mapping that is being made.
    direction: Direction,
    /// Directions that were measured, or tried.
    met: [bool; Direction::ALL.len()],
    batch: usize,
    clock: K,
    /// What two readings of the clock cost.
    clock_ns: u64,
    /// Tells its mappings from another's.
    number: u64,
    /// How many classes of sizes there are.
    classes: usize,
    /// Those of each direction, one direction after the other.
    sizes: Box<[Size]>,
    /// Mappings until one is timed.
    until: u64,
    commits: Commits,
}

/// Mappings of one size and direction.
#[derive(Debug, Default)]
struct Size {
    cell: Cell,
    /// How many went which way.
    counts: [u64; 2],
}

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// A queue of `device` for data of one direction: a ring as `config` says, and the pool that `pool` is a device of,
    /// which is the same device. Measures both ways, on scratch memory of the pool's: some hundred mappings, half of which
    /// wait for the hardware. Where memory for that is wanting, or something fails, what is not measured by then is copied
    /// at first, and the ring tried soon. (Memory that the hardware does not confirm as unreachable is leaked.) Allocates.
    ///
    /// # Errors
    /// As [`StrictRing::new`]; [`RingError::Untranslated`] for a device whose addresses are not translated;
    /// [`RingError::OtherDomain`].
    pub fn new(
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        direction: Direction,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<Self, RingError> {
        if !device.is_translated() {
            return Err(RingError::Untranslated);
        }
        if !Arc::ptr_eq(device.domain(), pool.pool().domain()) {
            return Err(RingError::OtherDomain);
        }
        let classes = classes(pool.pool().threshold());
        let mut queue = Self {
            ring: StrictRing::new(device, config)?,
            direction,
            met: [false; Direction::ALL.len()],
            batch: config.batch,
            clock_ns: cost_of(&clock),
            clock,
            number: unique(),
            classes,
            sizes: (0..Direction::ALL.len() * classes).map(|_| Size::default()).collect(),
            until: TIMED - 1,
            commits: Commits::new(config.batch),
            pool,
        };
        queue.measure_toward(direction);
        Ok(queue)
    }

    /// Measures both ways for data of another direction, too, as [`new`](Self::new) does.
    pub(super) fn measure_toward(&mut self, direction: Direction) {
        self.direction = direction;
        self.met[direction.index()] = true;
        self.measure();
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
    ) -> Result<(AdaptiveMapping, usize), AdaptiveMapError> {
        self.direction = direction;
        if !self.met[direction.index()] {
            self.begin();
        }
        // SAFETY: the caller's promise.
        unsafe { self.map(list, attributes, out) }
    }

    /// The direction is met for the first time.
    #[cold]
    fn begin(&mut self) {
        self.met[self.direction.index()] = true;
        let first = self.size_of(0);
        self.sizes[first..first + self.classes].iter_mut().for_each(|size| _ = size.cell.begin());
    }

    /// Where sizes of `class` are kept, in the direction of the moment.
    #[inline]
    fn size_of(&self, class: usize) -> usize {
        self.direction.index() * self.classes + class
    }

    /// Lets the device reach the bytes of `list`, or a copy of them, and writes to `out` what it is to be given. Returns
    /// how many segments that are, `list.len()` at the most.
    ///
    /// As [`BounceDevice::map`], or as [`StrictRing::map_sg`].
    ///
    /// # Errors
    /// [`AdaptiveMapError`]: the list is mapped as a whole or not at all.
    ///
    /// # Safety
    /// As [`BounceDevice::map`], until the unmap has returned; and until then:
    ///
    /// - Two syncs of the same bytes of the mapping do not run at the same time. That is the caller's to promise here,
    ///   who alone gets the [`AdaptiveMapping`], and so the syncs and the unmap themselves are safe.
    /// - Nothing else calls the pool for the mapping's address, as
    ///   [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap) demands of who does.
    #[inline]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(AdaptiveMapping, usize), AdaptiveMapError> {
        // The pool and the ring check the sum.
        let len = list.iter().fold(0, |sum: u64, piece| sum.wrapping_add(piece.len));
        let class = class_of(len, self.classes).map(|class| self.size_of(class));
        let choice = class.map_or(Choice::Map, |class| self.sizes[class].cell.choice());
        let timed = self.until == 0;
        self.until = self.until.checked_sub(1).unwrap_or(TIMED - 1);
        if timed && let Some(class) = class {
            // SAFETY: the caller's promise.
            return unsafe { self.map_timed(class, list, attributes, out) };
        }
        // SAFETY: the caller's promise.
        let (course, used, _) = unsafe { self.map_by(choice, list, attributes, out) }?;
        if let Some(class) = class {
            self.sizes[class].counts[course.choice() as usize] += 1;
        }
        Ok((AdaptiveMapping { course, ring: self.number, timed: None }, used))
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    unsafe fn map_timed(
        &mut self,
        class: usize,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(AdaptiveMapping, usize), AdaptiveMapError> {
        let choice = self.sizes[class].cell.turn();
        let start = (self.clock)();
        // SAFETY: the caller's promise.
        let (course, used, failed) = unsafe { self.map_by(choice, list, attributes, out) }?;
        let ns = self.since(start);
        let size = &mut self.sizes[class];
        size.counts[course.choice() as usize] += 1;
        // What the pool maps says nothing of the ring. Where that fails, the attempt and the copy are what it costs.
        let timed = (course.way() != Some(Way::Direct)).then(|| {
            let way = if failed { Choice::Map } else { course.choice() };
            size.cell.note(way, Half::Map, ns);
            (class, way)
        });
        Ok((AdaptiveMapping { course, ring: self.number, timed }, used))
    }

    /// Maps by the way that was chosen, as far as that is possible. How, how many segments of `out` that is, and whether
    /// the ring has failed.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn map_by(
        &mut self,
        choice: Choice,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(Course, usize, bool), AdaptiveMapError> {
        let mut failed = false;
        if choice == Choice::Map && !attributes.persistent_streaming && self.pool.may_reach(list) {
            // SAFETY: the caller's promise.
            match unsafe { self.ring.map_sg(list, self.direction, out) } {
                Ok((mapping, used)) => return Ok((Course::Ring(mapping), used, false)),
                // It has no room, or its tables have none, or cannot point to the buffer: the pool's may.
                Err(
                    RingError::Arena(ArenaError::Full { .. } | ArenaError::Oversize { .. })
                    | RingError::Map(MapListError::Map(_)),
                ) => failed = true,
                // Also where devices may still reach what was entered half-way: the caller must be told.
                Err(error) => return Err(error.into()),
            }
        }
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.pool.map(list, self.direction, attributes) }?;
        let used = mapping.write_segments(out);
        let course = Course::Pool { iova: mapping.iova(), len: mapping.len(), way: mapping.way() };
        Ok((course, used, failed))
    }

    /// A mapping of this ring, out of what [it was taken apart into](AdaptiveMapping::into_parts).
    #[inline]
    pub(super) fn mapping_of(
        &self,
        mapping: RingMapping,
        way: Option<Way>,
        timed: Option<(usize, Choice)>,
    ) -> AdaptiveMapping {
        let course = match way {
            Some(way) => Course::Pool { iova: mapping.first, len: mapping.neighbours, way },
            None => Course::Ring(RingMapping { ring: self.ring.number(), ..mapping }),
        };
        AdaptiveMapping { course, ring: self.number, timed }
    }

    /// Ends a mapping: at once if it was copied; with its batch if it was mapped.
    ///
    /// As [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), or as [`StrictRing::unmap`].
    ///
    /// # Errors
    /// [`AdaptiveUnmapFailed`]; a mapping of another ring comes back with it, and is untouched.
    #[inline]
    pub fn unmap(&mut self, mapping: AdaptiveMapping) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        if mapping.ring != self.number {
            return Err(AdaptiveUnmapFailed::foreign(mapping, self.ring.device().domain().granule()));
        }
        self.commits.count();
        let commits = mapping.course.is_in_ring() && self.ring.waiting() + 1 >= self.batch;
        if commits || mapping.timed.is_some() {
            return self.unmap_timed(mapping);
        }
        self.end(mapping.course)
    }

    #[inline]
    fn end(&mut self, course: Course) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        match course {
            Course::Pool { iova, len, .. } => {
                // SAFETY: this had the only token of the mapping, which exists once: no other unmap and, as they borrow it, no
                // sync runs now or later. Its original is as its maker promised until the unmap.
                match unsafe { self.pool.pool().unmap_by(Some(Policy::Strict), iova, len) } {
                    Ok(()) => Ok(AdaptiveUnmap::Done),
                    Err(error) => Err(AdaptiveUnmapFailed { mapping: None, error: error.into() }),
                }
            }
            Course::Ring(mapping) => match self.ring.unmap(mapping) {
                Ok(RingUnmap::Waiting) => Ok(AdaptiveUnmap::Waiting),
                Ok(RingUnmap::Committed) => Ok(AdaptiveUnmap::Committed),
                Err(failed) => {
                    let again = |mapping| AdaptiveMapping {
                        course: Course::Ring(mapping),
                        ring: self.number,
                        timed: None,
                    };
                    let mapping = failed.mapping.map(again);
                    Err(AdaptiveUnmapFailed { mapping, error: failed.error.into() })
                }
            },
        }
    }

    /// One whose time is wanted: its own, or that of the commit which it may lead to.
    #[cold]
    fn unmap_timed(&mut self, mapping: AdaptiveMapping) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        let (timed, in_ring) = (mapping.timed, mapping.course.is_in_ring());
        let start = (self.clock)();
        let result = self.end(mapping.course);
        let mut ns = self.since(start);
        if matches!(result, Ok(AdaptiveUnmap::Committed)) {
            self.commits.note(ns);
            // Its share of the commit is all that is known of its own.
            ns = 0;
        }
        if let (Some((class, way)), Ok(_)) = (timed, &result) {
            let share = if in_ring { self.commits.share() } else { 0 };
            self.sizes[class].cell.note(way, Half::Unmap, ns.saturating_add(share));
        }
        result
    }

    /// Ends all that waits, with one wait for the hardware: for a queue that falls idle. How many descriptors. To be called
    /// then also where nothing waits, so that it is known how full commits would be.
    ///
    /// # Errors
    /// As [`StrictRing::commit`].
    pub fn commit(&mut self) -> Result<usize, RingError> {
        self.commits.idle();
        let start = (self.clock)();
        let committed = self.ring.commit()?;
        let ns = self.since(start);
        if committed > 0 {
            self.commits.note(ns);
        }
        Ok(committed)
    }

    /// How many descriptors are unmapped and wait for a commit.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.ring.waiting()
    }

    /// Before the CPU looks at `len` bytes from `offset` on of a mapping that has not ended: copies what the device has
    /// written, where there is a copy. O(len).
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_cpu`](crate::bounce::pool::BouncePool::sync_for_cpu).
    pub fn sync_for_cpu(
        &self,
        mapping: &AdaptiveMapping,
        offset: u64,
        len: u64,
    ) -> Result<(), DmaUnmapError> {
        match mapping.course {
            _ if mapping.ring != self.number => Err(DmaUnmapError::NotMapped { iova: mapping.iova() }),
            // SAFETY: its token is borrowed, so it does not end meanwhile; its maker promised that syncs of the same bytes do
            // not meet, and what its original is.
            Course::Pool { iova, .. } => unsafe { self.pool.pool().sync_for_cpu(iova, offset, len) },
            Course::Ring(_) => {
                self.ring.device().sync_for_cpu();
                Ok(())
            }
        }
    }

    /// After the CPU has changed `len` bytes from `offset` on: the other way round.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_device`](crate::bounce::pool::BouncePool::sync_for_device).
    pub fn sync_for_device(
        &self,
        mapping: &AdaptiveMapping,
        offset: u64,
        len: u64,
    ) -> Result<(), DmaUnmapError> {
        match mapping.course {
            _ if mapping.ring != self.number => Err(DmaUnmapError::NotMapped { iova: mapping.iova() }),
            // SAFETY: as for `sync_for_cpu`.
            Course::Pool { iova, .. } => unsafe { self.pool.pool().sync_for_device(iova, offset, len) },
            Course::Ring(_) => {
                self.ring.device().sync_for_device();
                Ok(())
            }
        }
    }

    /// The pool that copies.
    pub(super) fn pool(&self) -> &BouncePool<M, P, C> {
        self.pool.pool()
    }

    /// What was chosen for each size of each direction that was met, smallest first, and why.
    pub fn explain(&self) -> impl Iterator<Item = Explained> {
        let met = Direction::ALL.into_iter().filter(|direction| self.met[direction.index()]);
        met.flat_map(move |direction| {
            let first = direction.index() * self.classes;
            let each = self.sizes[first..first + self.classes].iter().enumerate();
            each.map(move |(class, size)| size.cell.explain(class, direction, size.counts))
        })
    }

    /// Nanoseconds since `start`, less what the clock itself takes.
    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }
}
