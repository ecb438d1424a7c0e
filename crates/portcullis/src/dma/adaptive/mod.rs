//! Strict protection for a queue, to the byte where it must be, by the cheaper of a copy and a ring's mapping.

mod error;
mod measure;

use alloc::boxed::Box;

use super::{DmaDevice, DmaSegment, RingError, RingMapping, RingUnmap, StrictRing, StrictRingConfig};
use crate::addr::{Direction, Iova};
use crate::bounce::adaptive::book::{Cell, Half, TIMED, class_of, classes};
use crate::bounce::adaptive::{Choice, Explained, measure::cost_of};
use crate::bounce::pool::{Attributes, BounceDevice, BounceError, PoolMapping, Way};
use crate::domain::{MapListError, PhysSegment};
use crate::iova::ArenaError;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

pub use error::{AdaptiveMapError, AdaptiveUnmapError, AdaptiveUnmapFailed};

/// A buffer that the device has, or a copy of it, until it is [unmapped](AdaptiveRing::unmap).
///
/// It cannot be copied: what is unmapped is unmapped once. Dropping it leaves it mapped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the buffer stays mapped until it is unmapped"]
pub struct AdaptiveMapping {
    course: Course,
    /// The class whose account its end belongs to, for one that was timed.
    timed: Option<usize>,
}

#[derive(Debug, PartialEq, Eq)]
enum Course {
    Pool { iova: Iova, len: u64, way: Way },
    Ring(RingMapping),
}

impl AdaptiveMapping {
    /// The address of the first byte of the list for the device.
    pub fn iova(&self) -> Iova {
        match &self.course {
            Course::Pool { iova, .. } => *iova,
            Course::Ring(mapping) => mapping.iova(),
        }
    }

    /// How the pool made it; `None` for a mapping in the ring.
    pub fn way(&self) -> Option<Way> {
        match &self.course {
            Course::Pool { way, .. } => Some(*way),
            Course::Ring(_) => None,
        }
    }
}

/// What an unmap has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what waits for a commit is the driver's again after it only"]
pub enum AdaptiveUnmap {
    /// The buffer is the driver's. (Those that wait go on waiting.)
    Done,
    /// It waits for its batch to become complete: **the device can still reach it**.
    Waiting,
    /// The batch is complete and committed: no device reaches the buffer, or any unmapped before it.
    Committed,
}

/// A queue whose buffers are copied through the pool of its domain, or mapped in a [`StrictRing`], whichever is cheaper.
///
/// What shares a granule with other data is copied for an untrusted device whatever it costs, so that protection is to
/// the byte; whatever is mapped ends with its batch, as in the ring; whatever is copied, at once. Where the ring has no
/// room, a buffer is copied too, so nothing has to wait for a commit.
///
/// Costs are measured as [`Adaptive`](crate::bounce::adaptive::Adaptive) measures them, a commit shared out
/// among a full batch. The queue belongs to one CPU at a time, so nothing here is shared, and the choice costs some
/// plain instructions. `K` is the clock: any count of nanoseconds.
#[derive(Debug)]
pub struct AdaptiveRing<M: Mapper, P: Platform, C: CopyMemory, K> {
    ring: StrictRing<M, P>,
    pool: BounceDevice<M, P, C>,
    direction: Direction,
    batch: usize,
    clock: K,
    /// What two readings of the clock cost.
    clock_ns: u64,
    sizes: Box<[Size]>,
    /// Mappings until one is timed.
    until: u64,
    /// What a commit took lately, in nanoseconds.
    commit_ns: u64,
}

/// Mappings of one size.
#[derive(Debug, Default)]
struct Size {
    cell: Cell,
    /// How many went which way.
    counts: [u64; 2],
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// A queue of `device` for data of one direction: a ring as `config` says, and the pool that `pool` is a device of,
    /// which is the same device. Measures both ways, on scratch memory of the pool's: some hundred mappings, and a wait
    /// for the hardware for each size. Where memory for that is wanting, or something fails, all is copied at first, and
    /// the ring tried soon. Allocates.
    ///
    /// # Errors
    /// As [`StrictRing::new`]; [`RingError::Untranslated`] for a device whose addresses are not translated.
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
        let mut queue = Self {
            ring: StrictRing::new(device, config)?,
            direction,
            batch: config.batch,
            clock_ns: cost_of(&clock),
            clock,
            sizes: (0..classes(pool.pool().threshold())).map(|_| Size::default()).collect(),
            until: TIMED - 1,
            commit_ns: 0,
            pool,
        };
        queue.measure();
        Ok(queue)
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
    /// As [`BounceDevice::map`], until the unmap has returned.
    #[inline]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(AdaptiveMapping, usize), AdaptiveMapError> {
        // The pool and the ring check the sum.
        let len = list.iter().fold(0, |sum: u64, piece| sum.wrapping_add(piece.len));
        let class = class_of(len, self.sizes.len());
        let choice = class.map_or(Choice::Map, |class| self.sizes[class].cell.choice());
        let timed = self.until == 0;
        self.until = self.until.checked_sub(1).unwrap_or(TIMED - 1);
        if timed && let Some(class) = class {
            // SAFETY: the caller's promise.
            return unsafe { self.map_timed(class, list, attributes, out) };
        }
        // SAFETY: the caller's promise.
        let (mapping, used) = unsafe { self.map_by(choice, list, attributes, out) }?;
        if let Some(class) = class {
            self.sizes[class].counts[went(&mapping) as usize] += 1;
        }
        Ok((mapping, used))
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
        let (mapping, used) = unsafe { self.map_by(choice, list, attributes, out) }?;
        let ns = self.since(start);
        let size = &mut self.sizes[class];
        size.counts[went(&mapping) as usize] += 1;
        size.cell.note(went(&mapping), Half::Map, ns);
        Ok((AdaptiveMapping { timed: Some(class), ..mapping }, used))
    }

    /// Maps by the way that was chosen, as far as that is possible.
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
    ) -> Result<(AdaptiveMapping, usize), AdaptiveMapError> {
        if choice == Choice::Map && !attributes.persistent_streaming && self.pool.may_reach(list) {
            match self.ring.map_sg(list, self.direction, out) {
                Ok((mapping, used)) => {
                    return Ok((AdaptiveMapping { course: Course::Ring(mapping), timed: None }, used));
                }
                Err(RingError::Arena(ArenaError::Full { .. } | ArenaError::Oversize { .. })) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.pool.map(list, self.direction, attributes) }?;
        let mut used = 0;
        for (room, segment) in out.iter_mut().zip(mapping.segments()) {
            *room = segment;
            used += 1;
        }
        Ok((copied(&mapping), used))
    }

    /// Ends a mapping: at once if it was copied; with its batch if it was mapped.
    ///
    /// As [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), or as [`StrictRing::unmap`].
    ///
    /// # Errors
    /// [`AdaptiveUnmapFailed`].
    #[inline]
    pub fn unmap(&mut self, mapping: AdaptiveMapping) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        let commits = matches!(mapping.course, Course::Ring(_)) && self.ring.waiting() + 1 >= self.batch;
        if commits || mapping.timed.is_some() {
            return self.unmap_timed(mapping);
        }
        self.end(mapping.course)
    }

    #[inline]
    fn end(&mut self, course: Course) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        match course {
            Course::Pool { iova, len, .. } => match self.pool.pool().unmap(iova, len) {
                Ok(()) => Ok(AdaptiveUnmap::Done),
                Err(error) => Err(AdaptiveUnmapFailed { mapping: None, error: error.into() }),
            },
            Course::Ring(mapping) => match self.ring.unmap(mapping) {
                Ok(RingUnmap::Waiting) => Ok(AdaptiveUnmap::Waiting),
                Ok(RingUnmap::Committed) => Ok(AdaptiveUnmap::Committed),
                Err(failed) => {
                    let mapping = failed.mapping;
                    let mapping =
                        mapping.map(|mapping| AdaptiveMapping { course: Course::Ring(mapping), timed: None });
                    Err(AdaptiveUnmapFailed { mapping, error: failed.error.into() })
                }
            },
        }
    }

    /// One whose time is wanted: its own, or that of the commit which it may lead to.
    #[cold]
    fn unmap_timed(&mut self, mapping: AdaptiveMapping) -> Result<AdaptiveUnmap, AdaptiveUnmapFailed> {
        let (timed, way) = (mapping.timed, went(&mapping));
        let start = (self.clock)();
        let result = self.end(mapping.course);
        let ns = self.since(start);
        if let Ok(AdaptiveUnmap::Committed) = result {
            self.note_commit(ns);
        } else if let (Some(class), Ok(_)) = (timed, &result) {
            let ns = ns.saturating_add(self.share(way));
            self.sizes[class].cell.note(way, Half::Unmap, ns);
        }
        result
    }

    /// Ends all that waits, with one wait for the hardware: for a queue that falls idle. How many descriptors.
    ///
    /// # Errors
    /// As [`StrictRing::commit`].
    pub fn commit(&mut self) -> Result<usize, RingError> {
        let start = (self.clock)();
        let committed = self.ring.commit()?;
        let ns = self.since(start);
        if committed > 0 {
            self.note_commit(ns);
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
    pub fn sync_for_cpu(&self, mapping: &AdaptiveMapping, offset: u64, len: u64) -> Result<(), BounceError> {
        match mapping.course {
            Course::Pool { iova, .. } => self.pool.pool().sync_for_cpu(iova, offset, len),
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
    ) -> Result<(), BounceError> {
        match mapping.course {
            Course::Pool { iova, .. } => self.pool.pool().sync_for_device(iova, offset, len),
            Course::Ring(_) => {
                self.ring.device().sync_for_device();
                Ok(())
            }
        }
    }

    /// What was chosen for each size, smallest first, and why.
    pub fn explain(&self) -> impl Iterator<Item = Explained> {
        let each = self.sizes.iter().enumerate();
        each.map(|(class, size)| size.cell.explain(class, self.direction, size.counts))
    }

    /// A commit took `ns`. They are rare where little is mapped, so the latest two count for most.
    fn note_commit(&mut self, ns: u64) {
        let before = self.commit_ns;
        self.commit_ns = if before == 0 { ns } else { before / 2 + ns.min(before.saturating_mul(8)) / 2 };
    }

    /// What one mapping's part of a commit takes, in nanoseconds.
    fn share(&self, way: Choice) -> u64 {
        // As in a batch that is full: a queue that commits fewer falls idle, and has the time.
        if way == Choice::Map { self.commit_ns / self.batch.max(1) as u64 } else { 0 }
    }

    /// Nanoseconds since `start`, less what the clock itself takes.
    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }
}

/// Which way a mapping went.
fn went(mapping: &AdaptiveMapping) -> Choice {
    match mapping.course {
        Course::Ring(_) | Course::Pool { way: Way::Direct, .. } => Choice::Map,
        Course::Pool { .. } => Choice::Copy,
    }
}

fn copied(mapping: &PoolMapping<'_>) -> AdaptiveMapping {
    let course = Course::Pool { iova: mapping.iova(), len: mapping.len(), way: mapping.way() };
    AdaptiveMapping { course, timed: None }
}
