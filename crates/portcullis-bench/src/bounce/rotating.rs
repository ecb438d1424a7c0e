//! The design before system 2: an index that goes round hands out the slots that were not used for the longest time.
//!
//! In everything else it is as good as can be, so that what is told apart is the order: areas with a lock of their own
//! for each core, as Linux has had since 2022; slots of the same size; page alignment for a page or more; a search for
//! free neighbours that is a step or two unless the area is nearly full.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, FRAME_SIZE};

use super::memory::{Block, Buffers, Ram};
use super::subject::Subject;
use super::workload::{Case, SLOT};
use crate::lane::{Lane, put};
use crate::runner::Failure;

/// The slots of an area.
#[derive(Debug)]
pub(crate) struct Index {
    /// Whether each is taken.
    taken: Vec<bool>,
    /// Where to look next.
    next: usize,
}

impl Index {
    pub(crate) fn new(slots: usize) -> Self {
        Self { taken: vec![false; slots], next: 0 }
    }

    /// Takes `count` neighbours, the first of which is a multiple of `step`, at the index or behind it, and moves it on.
    /// O(slots) at the worst.
    #[inline]
    pub(crate) fn take(&mut self, count: usize, step: usize) -> Option<usize> {
        let slots = self.taken.len();
        let mut first = self.next.next_multiple_of(step);
        // Once round, wherever it began.
        for _ in 0..=slots / step {
            if first + count > slots {
                first = 0;
            }
            let run = self.taken.get_mut(first..first + count)?;
            if run.iter().all(|taken| !taken) {
                run.fill(true);
                self.next = first + count;
                return Some(first);
            }
            first += step;
        }
        None
    }

    /// Whether no slot is taken. O(slots).
    pub(crate) fn is_free(&self) -> bool {
        self.taken.iter().all(|taken| !taken)
    }

    #[inline]
    pub(crate) fn give(&mut self, first: usize, count: usize) {
        self.taken[first..first + count].fill(false);
    }
}

/// Areas of slots, one for each core.
pub(crate) struct Rotating {
    memory: Block,
    areas: Vec<Area>,
    area_bytes: u64,
    case: Case,
}

/// On lines of its own.
#[repr(align(128))]
struct Area(Mutex<Index>);

impl Area {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rotating {
    pub(crate) fn new(case: &Case, cores: usize) -> Result<Self, Failure> {
        let areas = case.threads.min(cores).max(1);
        let area_bytes = case.pool_bytes() / areas.next_power_of_two() as u64;
        let area = |_| Area(Mutex::new(Index::new((area_bytes / SLOT) as usize)));
        let memory = Block::new(area_bytes * areas as u64)?;
        Ok(Self { memory, areas: (0..areas).map(area).collect(), area_bytes, case: *case })
    }
}

impl Subject for Rotating {
    fn lane(self: Arc<Self>, thread: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let bytes = buffers.bytes();
        let slots = bytes.div_ceil(SLOT) as usize;
        let step = if bytes >= FRAME_SIZE { (FRAME_SIZE / SLOT) as usize } else { 1 };
        let (copies_in, copies_out) = (self.case.copies_in(), self.case.copies_out());
        let (area, at) = (thread % self.areas.len(), vec![0; self.case.buffers()]);
        Ok(Box::new(Turning { pool: self, area, slots, step, copies_in, copies_out, buffers, at }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        let inside = address.checked_sub(self.memory.start())? < self.area_bytes * self.areas.len() as u64;
        inside.then_some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        let free = |area: &Area| area.lock().is_free();
        let left = || Failure::Broken("not everything was unmapped".into());
        if self.areas.iter().all(free) { Ok(()) } else { Err(left()) }
    }
}

struct Turning {
    pool: Arc<Rotating>,
    area: usize,
    /// Of each buffer.
    slots: usize,
    step: usize,
    copies_in: bool,
    copies_out: bool,
    buffers: Arc<Buffers>,
    at: Vec<u64>,
}

impl Turning {
    fn start(&self) -> u64 {
        self.pool.memory.start() + self.pool.area_bytes * self.area as u64
    }
}

impl Lane for Turning {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let first = self.pool.areas[self.area].lock().take(self.slots, self.step);
        let at = first.map(|first| self.start() + first as u64 * SLOT);
        if let Some(at) = at
            && self.copies_in
        {
            let (original, at) = (PhysAddr::new(self.buffers.at(index)), PhysAddr::new(at));
            // SAFETY: the buffer is this thread's, the slots were just taken, and hold as much.
            unsafe { Ram::<true>.copy(original, at, self.buffers.bytes()) };
        }
        put(&mut self.at, index, at)
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let at = self.at[index];
        if self.copies_out {
            // SAFETY: as in `map`.
            unsafe {
                Ram::<true>.copy(
                    PhysAddr::new(at),
                    PhysAddr::new(self.buffers.at(index)),
                    self.buffers.bytes(),
                )
            };
        }
        let first = ((at - self.start()) / SLOT) as usize;
        self.pool.areas[self.area].lock().give(first, self.slots);
        true
    }

    fn address(&self, index: usize) -> u64 {
        self.at[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounce::workload::{Shape, Way};

    #[test]
    fn the_index_goes_round_and_skips_what_is_taken() {
        let mut index = Index::new(8);
        assert_eq!(index.take(2, 2), Some(0));
        index.give(0, 2);
        assert_eq!(index.take(2, 2), Some(2), "the oldest, not the newest");
        assert_eq!(index.take(1, 1), Some(4));
        assert_eq!(index.take(2, 2), Some(6), "aligned");
        assert_eq!(index.take(2, 2), Some(0), "and round again");
        assert_eq!(index.take(2, 2), None, "slot 5 is alone");
        assert_eq!(index.take(1, 1), Some(5));
        assert_eq!(index.take(1, 1), None);
    }

    #[test]
    fn the_last_slots_are_found_from_wherever_the_search_begins() {
        for begins in 1..8 {
            let mut index = Index::new(8);
            assert_eq!(index.take(begins, 1), Some(0));
            index.give(0, 1);
            (begins..8).for_each(|slot| assert_eq!(index.take(1, 1), Some(slot)));
            assert_eq!(index.take(1, 1), Some(0), "once round, to just before where it began");
        }
        let mut index = Index::new(8);
        assert_eq!([index.take(6, 2), index.take(2, 2)], [Some(0), Some(6)], "up to the end");
    }

    /// The pool as a whole is as large however many areas it has, and a thread keeps to its area.
    #[test]
    fn there_is_an_area_for_each_thread_that_has_a_core() {
        for (threads, cores, areas, of_all) in [(1, 8, 1, 1), (3, 8, 3, 4), (8, 2, 2, 2)] {
            let case = Case {
                shape: Shape::Swiotlb(3 << 10),
                way: Some(Way::Both),
                threads,
                depth: 1,
                crowded: false,
            };
            let pool = Arc::new(Rotating::new(&case, cores).unwrap());
            assert_eq!(pool.areas.len(), areas);
            assert_eq!(pool.area_bytes, case.pool_bytes() / of_all);
            let (start, all) = (pool.memory.start(), pool.area_bytes * areas as u64);
            let reached = [start - 1, start, start + all - 1, start + all].map(|at| pool.reach(at).is_some());
            assert_eq!(reached, [false, true, true, false], "{threads} threads");
            for thread in 0..threads {
                let buffers = Arc::new(Buffers::new(4, 3 << 10).unwrap());
                let mut lane = Arc::clone(&pool).lane(thread, buffers).unwrap();
                assert!(lane.map(0) && lane.map(1));
                let area = (lane.address(0) - start) / pool.area_bytes;
                assert_eq!(area, (thread % areas) as u64);
                assert_eq!(lane.address(1) - lane.address(0), 2 * SLOT, "3 KiB take two slots");
                assert!(lane.unmap(1) && pool.settle().is_err(), "thread {thread} has one still");
                assert!(lane.unmap(0));
                assert_eq!(pool.settle(), Ok(()));
            }
        }
    }

    #[test]
    fn what_has_a_page_or_more_begins_with_one() {
        for (bytes, step) in [(2 << 10, 2 << 10), (4 << 10, 4 << 10), (6 << 10, 8 << 10)] {
            let case = Case {
                shape: Shape::Swiotlb(bytes),
                way: Some(Way::To),
                threads: 1,
                depth: 1,
                crowded: false,
            };
            let pool = Arc::new(Rotating::new(&case, 1).unwrap());
            let buffers = Arc::new(Buffers::new(4, bytes).unwrap());
            let mut lane = Arc::clone(&pool).lane(0, buffers).unwrap();
            assert_eq!(pool.areas[0].lock().take(1, 1), Some(0));
            assert!(lane.map(0) && lane.map(1));
            let first = if bytes < FRAME_SIZE { SLOT } else { FRAME_SIZE };
            assert_eq!(lane.address(0), pool.memory.start() + first);
            assert_eq!(lane.address(1) - lane.address(0), step);
        }
    }
}
