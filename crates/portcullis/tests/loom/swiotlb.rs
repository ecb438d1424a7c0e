//! A caller that finds the pool full finds the free that comes, wherever it goes, and what other CPUs' magazines hold.

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::DmaMapError;
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, LocalCpu, Platform, PlatformEvents, Table};
use portcullis::sync::{AtomicU64, Ordering};

::loom::thread_local! {
    /// The CPU that a thread is, or none.
    static CPU: std::cell::Cell<Option<usize>> = std::cell::Cell::new(None);
}

/// Two CPUs with full fences, as the model checker knows no others, on which no time passes.
#[derive(Default)]
struct Cpus {
    /// How often the timer was asked for. Not the model checker's: it must order nothing.
    wakes: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

// SAFETY: each thread of the model is a CPU of its own, and has a number of its own; fences are full.
unsafe impl Platform for Cpus {
    fn cpus(&self) -> usize {
        2
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: each thread has a number of its own.
        f(CPU.with(|cpu| cpu.get()).map(|slot| unsafe { LocalCpu::new(slot) }).as_ref())
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {
        self.wakes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Frames, in which nothing is looked at: their addresses are the same in each execution, as the model checker needs, and
/// no memory is behind them.
#[derive(Default)]
struct Nothing {
    /// Not the model checker's: it must order nothing.
    taken: std::sync::atomic::AtomicU64,
}

/// The first of the frames, numbered by the bits of a word.
const FRAMES: u64 = 1 << 30;

// SAFETY: nobody reads or writes what is given out, and no frame is given out twice at once.
unsafe impl Frames for Nothing {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        assert_eq!(count, 1);
        let lowest = |taken: u64| Some(taken | 1 << taken.trailing_ones());
        let order = std::sync::atomic::Ordering::Relaxed;
        let taken = self.taken.fetch_update(order, order, lowest).ok()?;
        Some(PhysAddr::new(FRAMES + u64::from(taken.trailing_ones()) * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, _: usize) {
        let bit = 1 << ((first.get() - FRAMES) / FRAME_SIZE);
        assert!(self.taken.fetch_and(!bit, std::sync::atomic::Ordering::Relaxed) & bit != 0, "freed twice");
    }

    unsafe fn table(&self, _: PhysAddr) -> &Table {
        unreachable!("a pool has no tables")
    }
}

// SAFETY: what is copied is not looked at here.
unsafe impl CopyMemory for Nothing {
    unsafe fn copy(&self, _: PhysAddr, _: PhysAddr, _: u64) {}

    unsafe fn zero(&self, _: PhysAddr, _: u64) {}
}

/// Where drivers' buffers are.
const BUFFER: PhysAddr = PhysAddr::new(1 << 40);

type Pool<C = Nothing> = Swiotlb<Cpus, C>;

fn map<C: CopyMemory>(pool: &Pool<C>, len: u64) -> Result<Bounced, DmaMapError> {
    // SAFETY: nothing is copied, or words by atomics.
    unsafe { pool.map(PhysSegment { phys: BUFFER, len }, Direction::Bidirectional, &Constraints::new()) }
}

fn unmap<C: CopyMemory>(pool: &Pool<C>, mapped: Bounced) {
    // SAFETY: each mapping is ended once.
    unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
}

/// One area of one frame.
const SMALL: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 64,
    area_bytes: 4096,
    min_bytes: 4096,
    max_bytes: 4096,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 0,
};

/// One CPU frees the slot that the other wants: onto its list, while that is being emptied, or past it.
fn found(scarce: bool) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(move || {
        let config = SMALL;
        let pool = Arc::new(Swiotlb::new(Cpus::default(), Nothing::default(), &config).unwrap());
        CPU.with(|cpu| cpu.set(Some(0)));
        // The lists of this CPU are in use, and all that is free is two runs of half of the area.
        let halves = [2048, 2048].map(|len| map(&pool, len).unwrap());
        if scarce {
            assert!(map(&pool, 64).is_err());
        }
        let other = {
            let pool = pool.clone();
            thread::spawn(move || match map(&pool, 2048) {
                Ok(mapped) => {
                    unmap(&pool, mapped);
                    false
                }
                Err(DmaMapError::Pressure { .. }) => true,
                Err(error) => panic!("{error}"),
            })
        };
        unmap(&pool, halves[0]);
        if other.join().unwrap() {
            CPU.with(|cpu| cpu.set(Some(1)));
            unmap(&pool, map(&pool, 2048).unwrap());
        }
        unmap(&pool, halves[1]);
        assert_eq!(pool.usage().mapped, 0);
    });
}

#[test]
fn a_free_is_found_while_lists_are_in_use() {
    found(false);
}

#[test]
fn a_free_is_found_while_lists_are_not() {
    found(true);
}

/// All that is free is in a CPU's magazine, and two callers find the pool full at once: there is room for both.
#[test]
fn two_callers_at_once_find_what_magazines_hold() {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(move || {
        let pool = Arc::new(Swiotlb::new(Cpus::default(), Nothing::default(), &SMALL).unwrap());
        CPU.with(|cpu| cpu.set(Some(0)));
        let halves = [2048, 2048].map(|len| map(&pool, len).unwrap());
        unmap(&pool, halves[0]);
        CPU.with(|cpu| cpu.set(None));
        let other = {
            let pool = pool.clone();
            thread::spawn(move || map(&pool, 64).unwrap())
        };
        let mine = map(&pool, 64).unwrap();
        unmap(&pool, other.join().unwrap());
        unmap(&pool, mine);
        unmap(&pool, halves[1]);
        assert_eq!(pool.usage().mapped, 0);
    });
}

/// A pool that grows while the timer looks whether anything is idle is looked at again. With no more than half an area
/// mapped, the timer gives the new one back before it is used.
fn grows_under_the_timer(mapped: u64) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(move || {
        let wakes = std::sync::Arc::default();
        let cpus = Cpus { wakes: std::sync::Arc::clone(&wakes) };
        let asked = || wakes.load(std::sync::atomic::Ordering::Relaxed);
        let config = SwiotlbConfig { max_bytes: 2 * 4096, ..SMALL };
        let pool = Arc::new(Swiotlb::new(cpus, Nothing::default(), &config).unwrap());
        let first = map(&pool, mapped).unwrap();
        // Grown and shrunk again: the timer is to come.
        unmap(&pool, map(&pool, 4096).unwrap());
        assert_eq!((pool.trim(), asked() > 0), (4096, true));
        let before = asked();
        let timer = {
            let pool = pool.clone();
            thread::spawn(move || pool.timer())
        };
        let second = map(&pool, 4096);
        timer.join().unwrap();
        // Where an area went while this one was wanted, there is room to grow now.
        let second = second.unwrap_or_else(|error| match error {
            DmaMapError::Pressure { .. } => map(&pool, 4096).unwrap(),
            error => panic!("{error}"),
        });
        assert!(asked() > before, "an area that nobody will ever give back");
        unmap(&pool, first);
        unmap(&pool, second);
    });
}

#[test]
fn what_grows_under_the_timer_is_looked_at_later() {
    grows_under_the_timer(4096);
}

#[test]
fn who_grows_under_the_timer_finds_the_room_that_it_makes() {
    grows_under_the_timer(2048);
}

/// The driver's buffer and the mapping, a word each.
struct Words {
    frame: Nothing,
    buffer: Arc<AtomicU64>,
    mapping: Arc<AtomicU64>,
}

// SAFETY: as the frame's.
unsafe impl Frames for Words {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.frame.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.frame.free(first, count) }
    }

    unsafe fn table(&self, _: PhysAddr) -> &Table {
        unreachable!("a pool has no tables")
    }
}

// SAFETY: the words stand for all that is copied.
unsafe impl CopyMemory for Words {
    unsafe fn copy(&self, from: PhysAddr, _: PhysAddr, _: u64) {
        let words = [&self.buffer, &self.mapping];
        let [from, to] = if from == BUFFER { words } else { [words[1], words[0]] };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    unsafe fn zero(&self, _: PhysAddr, _: u64) {}
}

/// A device that is rung after a map sees what was mapped, and a driver that is told by the device sees, after an unmap or
/// a sync, what the device wrote: the pool's copies are ordered by the pool.
#[test]
fn a_doorbell_and_a_completion_order_the_copies() {
    for sync in [false, true] {
        ::loom::model(move || {
            let word = || Arc::new(AtomicU64::new(0));
            let (buffer, mapping, doorbell, completion) = (word(), word(), word(), word());
            let memory = Words {
                frame: Nothing::default(),
                buffer: Arc::clone(&buffer),
                mapping: Arc::clone(&mapping),
            };
            let pool = Swiotlb::new(Cpus::default(), memory, &SMALL).unwrap();
            let device = {
                let (mapping, doorbell, completion) =
                    (Arc::clone(&mapping), Arc::clone(&doorbell), Arc::clone(&completion));
                thread::spawn(move || {
                    if doorbell.load(Ordering::Acquire) == 1 {
                        assert_eq!(mapping.load(Ordering::Relaxed), 5, "the device came too early");
                        mapping.store(6, Ordering::Relaxed);
                        completion.store(1, Ordering::Release);
                    }
                })
            };
            buffer.store(if sync { 4 } else { 5 }, Ordering::Relaxed);
            let mapped = map(&pool, 64).unwrap();
            if sync {
                buffer.store(5, Ordering::Relaxed);
                // SAFETY: nobody else knows the mapping.
                unsafe { pool.sync_for_device(mapped.phys, 64) }.unwrap();
            }
            // What rings is no atomic of the library's.
            doorbell.store(1, Ordering::Relaxed);
            if completion.load(Ordering::Relaxed) == 1 {
                if sync {
                    // SAFETY: as above.
                    unsafe { pool.sync_for_cpu(mapped.phys, 64) }.unwrap();
                } else {
                    unmap(&pool, mapped);
                }
                assert_eq!(buffer.load(Ordering::Relaxed), 6, "the driver came too early");
            } else {
                unmap(&pool, mapped);
            }
            device.join().unwrap();
            if sync && pool.usage().mapped > 0 {
                unmap(&pool, mapped);
            }
        });
    }
}
