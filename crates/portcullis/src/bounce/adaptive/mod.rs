//! Copy or map, whichever is cheaper: decided per mapping, by costs measured on this machine and this mapper.
//!
//! A copy costs time by the byte, a mapping by the hardware's wait: where they cross depends on caches, on the IOMMU
//! and on what else goes on. So nothing about it is a constant. [`Adaptive::new`] times both ways for each size (powers
//! of two from 512 bytes to the pool's threshold) and direction on scratch memory; afterwards one mapping in 61 on each CPU
//! is timed, of which one in 64 goes the other way, so that its cost stays known. The choice changes where the other way
//! was cheaper by an eighth four times in a row: noise does not make it swing. [`Adaptive::explain`] says what was
//! measured and chosen.
//!
//! **Protection does not depend on the choice.** Where an untrusted device would reach what is not its own, the mapping
//! is copied whatever that costs; and what is mapped ends by the domain's policy, which is to be strict.
//!
//! **Cost.** Over the pool's own: some loads of lines that are written once in 61 mappings of a CPU, and two stores of
//! the CPU's own. Memory ordering: choices are hints, all loads and stores of them are relaxed. A stale one leads to the
//! dearer way, never to the wrong one. What is measured is kept under a lock, which only timed mappings take.

pub(crate) mod book;
pub(crate) mod measure;

pub use book::{Choice, Explained, WayCost};

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use self::book::{Cell, Half, TIMED, class_of, classes};
use super::pool::{
    Attributes, BounceDevice, BounceError, BounceMapError, BouncePool, DeviceProfile, PoolError, PoolMapping,
    Way,
};
use crate::addr::{Direction, Iova};
use crate::domain::{MapListError, PhysSegment};
use crate::mapper::Mapper;
use crate::percpu::{CachePadded, PerCpu};
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Timed mappings for which one that was to be timed to its end, and has not ended, keeps its place.
const OVERDUE: u32 = 8;

/// No mapping.
const NONE: u64 = u64::MAX;

/// Copies or maps, by measured cost: see the [module](self).
///
/// One for each pool, so for each domain, shared by its devices and CPUs. `K` is the clock that costs are measured by:
/// any count of nanoseconds; it is read four times for each mapping that is timed.
#[derive(Debug)]
pub struct Adaptive<M: Mapper, P: Platform, C: CopyMemory, K> {
    pool: Arc<BouncePool<M, P, C>>,
    clock: K,
    /// What two readings of the clock cost.
    clock_ns: u64,
    classes: Box<[CachePadded<Hints>]>,
    cpus: PerCpu<Cpu>,
    book: Mutex<Book>,
}

/// What every mapping of a size looks at.
#[derive(Debug)]
struct Hints {
    /// A bit for each direction: map.
    maps: AtomicU64,
    /// For each direction the address of the mapping whose end is to be timed, or [`NONE`].
    watched: [AtomicU64; 3],
}

/// Of each class and direction: how many went which way, one CPU's.
#[derive(Debug)]
struct Cpu {
    /// Mappings until one is timed.
    until: AtomicU64,
    counts: Box<[[[AtomicU64; 2]; 3]]>,
}

#[derive(Debug)]
struct Book {
    /// By class and direction.
    cells: Box<[[Cell; 3]]>,
    watched: Box<[[Option<Watched>; 3]]>,
}

/// A mapping that was timed when it was made.
#[derive(Debug, Clone, Copy)]
struct Watched {
    /// The class of its bytes. (It is found by that of its length for the device, holes included.)
    class: usize,
    choice: Choice,
    overdue: u32,
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> Adaptive<M, P, C, K> {
    /// Measures both ways on scratch memory of the pool's, of as many bytes as its threshold, and chooses by that.
    /// Allocates; makes and ends some 300 mappings, half of which wait for the hardware. Where memory for that is
    /// wanting, or the mapper fails, what is not measured by then is copied at first, and mapping tried soon. (Memory that
    /// the hardware does not confirm as unreachable, by a flush of the domain at the end, is leaked.)
    pub fn new(pool: Arc<BouncePool<M, P, C>>, clock: K) -> Arc<Self> {
        let classes = classes(pool.threshold());
        let each = || 0..classes;
        let hints = |_| {
            let watched = [NONE; 3].map(AtomicU64::new);
            CachePadded(Hints { maps: AtomicU64::new(0), watched })
        };
        let count = |_| [(); 3].map(|()| [(); 2].map(|()| AtomicU64::new(0)));
        let cpu = || Cpu { until: AtomicU64::new(TIMED - 1), counts: each().map(count).collect() };
        let book = Book {
            cells: each().map(|_| [Cell::default(); 3]).collect(),
            watched: each().map(|_| [None; 3]).collect(),
        };
        let clock_ns = measure::cost_of(&clock);
        let all = Self {
            clock,
            clock_ns,
            classes: each().map(hints).collect(),
            cpus: PerCpu::new(pool.domain().platform().slots(), cpu),
            book: Mutex::new(book),
            pool,
        };
        all.measure();
        Arc::new(all)
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<BouncePool<M, P, C>> {
        &self.pool
    }

    /// A device that is as `profile` says.
    ///
    /// # Errors
    /// As [`BounceDevice::new`].
    pub fn device(self: &Arc<Self>, profile: DeviceProfile) -> Result<AdaptiveDevice<M, P, C, K>, PoolError> {
        let device = BounceDevice::new(Arc::clone(&self.pool), profile)?;
        Ok(AdaptiveDevice { all: Arc::clone(self), device })
    }

    /// Ends a mapping: [`BouncePool::unmap`], timed now and then.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub unsafe fn unmap(&self, iova: Iova, len: u64) -> Result<(), BounceError> {
        if let Some(class) = self.class_of(len) {
            let watched = &self.classes[class].watched;
            for (direction, watched) in watched.iter().enumerate() {
                if watched.load(Ordering::Relaxed) == iova.get() {
                    // SAFETY: the caller's promise.
                    return unsafe { self.unmap_timed((class, direction), iova, len) };
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.pool.unmap(iova, len) }
    }

    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[cold]
    unsafe fn unmap_timed(&self, at: (usize, usize), iova: Iova, len: u64) -> Result<(), BounceError> {
        let (class, direction) = at;
        let watched = self.with_book(|book| {
            let hint = &self.classes[class].watched[direction];
            // Somebody else may have been faster, if the caller unmaps it twice.
            if hint.load(Ordering::Relaxed) != iova.get() {
                return None;
            }
            hint.store(NONE, Ordering::Relaxed);
            book.watched[class][direction].take()
        });
        let start = (self.clock)();
        // SAFETY: the caller's promise.
        let result = unsafe { self.pool.unmap(iova, len) };
        let ns = self.since(start);
        if let (Some(watched), Ok(())) = (watched, &result) {
            self.note((watched.class, direction), watched.choice, Half::Unmap, ns);
        }
        result
    }

    /// Every size and direction, smallest first. Takes the lock that timed mappings take. Allocates.
    pub fn explain(&self) -> Vec<Explained> {
        // Nothing is allocated under the lock.
        let mut cells = Vec::with_capacity(self.classes.len());
        let mut rows = Vec::with_capacity(self.classes.len() * Direction::ALL.len());
        self.with_book(|book| cells.extend_from_slice(&book.cells));
        for (class, cells) in cells.iter().enumerate() {
            for (index, (cell, direction)) in cells.iter().zip(Direction::ALL).enumerate() {
                let count = |choice: Choice| {
                    let counts = self.cpus.iter().map(|cpu| &cpu.counts[class][index][choice as usize]);
                    counts.fold(0, |sum: u64, count| sum.wrapping_add(count.load(Ordering::Relaxed)))
                };
                rows.push(cell.explain(class, direction, [count(Choice::Copy), count(Choice::Map)]));
            }
        }
        rows
    }

    #[inline]
    fn class_of(&self, len: u64) -> Option<usize> {
        class_of(len, self.classes.len())
    }

    /// Nanoseconds since `start`, less what the clock itself takes.
    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }

    fn with_book<R>(&self, f: impl FnOnce(&mut Book) -> R) -> R {
        self.pool.domain().platform().with_slot(|_| f(&mut self.book.lock()))
    }

    /// Keeps what half of a mapping took.
    fn note(&self, (class, direction): (usize, usize), choice: Choice, half: Half, ns: u64) {
        self.with_book(|book| {
            let choice = book.cells[class][direction].note(choice, half, ns);
            self.hint(class, direction, choice);
        });
    }

    /// Tells everybody. Under the book's lock, so that nobody else writes.
    fn hint(&self, class: usize, direction: usize, choice: Choice) {
        let maps = &self.classes[class].maps;
        let (was, bit) = (maps.load(Ordering::Relaxed), 1 << direction);
        let is = if choice == Choice::Map { was | bit } else { was & !bit };
        if is != was {
            maps.store(is, Ordering::Relaxed);
        }
    }
}

/// A device whose mappings are copied or mapped. Cheap to clone.
#[derive(Debug)]
pub struct AdaptiveDevice<M: Mapper, P: Platform, C: CopyMemory, K> {
    all: Arc<Adaptive<M, P, C, K>>,
    device: BounceDevice<M, P, C>,
}

impl<M: Mapper, P: Platform, C: CopyMemory, K> Clone for AdaptiveDevice<M, P, C, K> {
    fn clone(&self) -> Self {
        Self { all: Arc::clone(&self.all), device: self.device.clone() }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveDevice<M, P, C, K> {
    /// What decides for this device and the others of its domain.
    pub fn adaptive(&self) -> &Arc<Adaptive<M, P, C, K>> {
        &self.all
    }

    /// Lets the device reach the bytes of `list`, or a copy of them: [`BounceDevice::map`] with
    /// [`direct`](Attributes::direct) chosen by cost. What is larger than the pool's threshold, persistent or asked for
    /// directly goes there as it is. Ended by [`Adaptive::unmap`]; a sync is the pool's.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub unsafe fn map<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let all = &*self.all;
        // The pool checks the sum.
        let len = list.iter().fold(0, |sum: u64, piece| sum.wrapping_add(piece.len));
        let open = !attributes.persistent_streaming && !attributes.direct;
        let Some(class) = all.class_of(len).filter(|_| open) else {
            // SAFETY: the caller's promise.
            return unsafe { self.device.map(list, direction, attributes) };
        };
        let index = direction.index();
        let maps = all.classes[class].maps.load(Ordering::Relaxed) >> index & 1 != 0;
        let timed = all.pool.domain().platform().with_slot(|slot| {
            let cpu = all.cpus.get(slot);
            // Relaxed, and callers without a slot may lose each other's counts: no more than a figure hangs on them.
            // They wrap, as one CPU may count what another takes back.
            let add = |count: &AtomicU64| {
                count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            };
            add(&cpu.counts[class][index][usize::from(maps)]);
            let until = cpu.until.load(Ordering::Relaxed);
            cpu.until.store(until.checked_sub(1).unwrap_or(TIMED - 1), Ordering::Relaxed);
            until == 0
        });
        if timed {
            // SAFETY: the caller's promise.
            return unsafe { self.map_timed(list, direction, attributes, (class, maps)) };
        }
        // SAFETY: the caller's promise.
        let mapped = unsafe { self.map_by(maps, list, direction, attributes) };
        match &mapped {
            Ok((mapping, _)) if maps && mapping.way() != Way::Direct => {
                all.recount((class, index), Choice::Map, Some(Choice::Copy));
            }
            Err(_) => all.recount((class, index), counted(maps), None),
            Ok(_) => {}
        }
        mapped.map(|(mapping, _)| mapping)
    }

    /// Maps or copies; and copies where mapping fails: addresses and tables may be used up, and buffers not. But not
    /// where devices may still reach what was mapped half-way: somebody must be told. Whether mapping failed.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn map_by<'a>(
        &self,
        direct: bool,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Result<(PoolMapping<'a>, bool), BounceMapError> {
        // SAFETY: the caller's promise.
        match unsafe { self.device.map(list, direction, Attributes { direct, ..attributes }) } {
            Ok(mapping) => Ok((mapping, false)),
            Err(BounceMapError::List(MapListError::Unconfirmed { error })) => {
                Err(MapListError::Unconfirmed { error }.into())
            }
            Err(_) if direct => {
                // SAFETY: the caller's promise.
                let mapping = unsafe { self.device.map(list, direction, attributes) };
                mapping.map(|mapping| (mapping, true))
            }
            Err(error) => Err(error),
        }
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    unsafe fn map_timed<'a>(
        &self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
        (class, maps): (usize, bool),
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let (all, index) = (&*self.all, direction.index());
        let choice = all.with_book(|book| book.cells[class][index].turn());
        let start = (all.clock)();
        // SAFETY: the caller's promise.
        let mapped = unsafe { self.map_by(choice == Choice::Map, list, direction, attributes) };
        let ns = all.since(start);
        let before = counted(maps);
        let (mapping, failed) = mapped.inspect_err(|_| all.recount((class, index), before, None))?;
        let went = counted(mapping.way() == Way::Direct);
        if went != before {
            all.recount((class, index), before, Some(went));
        }
        // Where mapping fails, the attempt and the copy are what mapping costs.
        let way = if failed { Choice::Map } else { went };
        all.note((class, index), way, Half::Map, ns);
        if let Some(found_in) = all.class_of(mapping.len()) {
            all.watch((found_in, index), mapping.iova(), Watched { class, choice: way, overdue: 0 });
        }
        Ok(mapping)
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> Adaptive<M, P, C, K> {
    /// Has the end of a mapping timed, unless that of another is waited for.
    fn watch(&self, (class, direction): (usize, usize), iova: Iova, new: Watched) {
        self.with_book(|book| {
            let chosen = book.cells[new.class][direction].choice();
            let place = &mut book.watched[class][direction];
            if let Some(old) = place
                && old.overdue < OVERDUE
                && new.choice == chosen
            {
                old.overdue += 1;
                return;
            }
            *place = Some(new);
            self.classes[class].watched[direction].store(iova.get(), Ordering::Relaxed);
        });
    }

    /// A mapping was counted as `before`, and went the way `after`, or was not made.
    #[cold]
    fn recount(&self, (class, direction): (usize, usize), before: Choice, after: Option<Choice>) {
        self.pool.domain().platform().with_slot(|slot| {
            let counts = &self.cpus.get(slot).counts[class][direction];
            let change = |choice: Choice, by: u64| {
                let count = &counts[choice as usize];
                count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
            };
            change(before, u64::MAX);
            if let Some(after) = after {
                change(after, 1);
            }
        });
    }
}

/// As what a mapping is counted.
fn counted(maps: bool) -> Choice {
    if maps { Choice::Map } else { Choice::Copy }
}
