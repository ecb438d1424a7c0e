//! Registrations: held ranges are reached, and forgotten or evicted ones are not, whatever other CPUs do.

use std::sync::Mutex;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Direction, Iova, IovaRange, PageSize, PageSizes, PhysAddr, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis::sync::{AtomicU64, Ordering};
use portcullis_linux::registration::{
    AcquireError, ForgetError, Keep, Registration, RegistrationCache, RegistrationLimits,
    ReleaseRegistrationError, Released,
};

use super::frames::MACHINE;

const PAGE: u64 = 4096;
const PAGES: usize = 8;
const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

::loom::thread_local! {
    /// The CPU of a thread.
    static CPU: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

struct Cpus;

// SAFETY: each thread of the model is a CPU; fences are full.
unsafe impl Platform for Cpus {
    fn cpus(&self) -> usize {
        2
    }

    fn number(&self) -> PlatformNumber {
        *MACHINE
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: each thread has a number of its own.
        f(Some(&unsafe { LocalCpu::new(CPU.with(|cpu| cpu.get())) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

/// A table of a few pages, and a device with a cache. Only the cache and the domain share data without a lock; this marks where others may
/// interleave.
struct Hardware {
    geometry: Geometry,
    /// Each page's table entry and cached entry: physical addresses, 0 for none.
    pages: Mutex<[(u64, u64); PAGES]>,
    steps: AtomicU64,
    /// Invalidations that fail.
    fails: Mutex<u64>,
}

impl Hardware {
    fn new() -> Self {
        let aperture = IovaRange::new(Iova::new(0), PAGES as u64 * PAGE).unwrap();
        let page_sizes = PageSizes::EMPTY.with(PageSize::SIZE_4K);
        let geometry = Geometry { aperture, page_sizes, reserved: Vec::new() };
        Self {
            geometry,
            pages: Mutex::new([(0, 0); PAGES]),
            steps: AtomicU64::new(0),
            fails: Mutex::default(),
        }
    }

    /// Calls `f` with a page's table entry and cache. Others may run before.
    fn with<R>(&self, iova: Iova, f: impl FnOnce(&mut u64, &mut u64) -> R) -> R {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let (entry, cached) = &mut self.pages.lock().unwrap()[(iova.get() / PAGE) as usize];
        f(entry, cached)
    }

    /// What a device reaches.
    fn reached(&self, iova: Iova) -> u64 {
        self.with(iova, |entry, cached| {
            *cached = if *cached == 0 { *entry } else { *cached };
            *cached
        })
    }
}

// SAFETY: the test checks the fake hardware's clauses; no memory is behind it.
unsafe impl Mapper for Hardware {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        _: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        for (phys, _) in list {
            let before = self.with(range.start(), |entry, _| std::mem::replace(entry, phys.get()));
            assert_eq!(before, 0, "mapped twice");
        }
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let before = self.with(range.start(), |entry, _| std::mem::take(entry));
        assert_ne!(before, 0, "unmapped twice");
        gather.add(range);
        Unmapped::of(range, range.len())
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        // Others may run, and see that it is not confirmed yet.
        self.steps.fetch_add(1, Ordering::Relaxed);
        let mut fails = self.fails.lock().unwrap();
        if *fails > 0 {
            *fails -= 1;
            return Err(TIMED_OUT);
        }
        drop(fails);
        let by_range = gather.each_range(&Costs::BARE_METAL, |range| {
            // The device may refetch an invalidated entry at once.
            let pages = (range.start().get()..=range.last().get()).step_by(PAGE as usize);
            pages.for_each(|page| self.with(Iova::new(page), |entry, cached| *cached = *entry));
        });
        assert!(by_range, "few ranges");
        Ok(())
    }
}

type Cache = RegistrationCache<Hardware, Cpus>;

fn memory(number: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new((number + 1) << 20), len: PAGE }
}

fn reached(cache: &Cache, iova: Iova) -> u64 {
    cache.device().domain().mapper().reached(iova)
}

fn acquire(cache: &Cache, number: u64, keep: Keep) -> Result<Registration, AcquireError> {
    // SAFETY: no memory is behind the fake hardware.
    let held = unsafe { cache.acquire(memory(number), Direction::Bidirectional, keep) }?;
    // The IOVA reaches this memory, or nothing if another thread has forgotten it; never other memory.
    let phys = reached(cache, held.iova());
    assert!(phys == 0 || phys == memory(number).phys.get(), "another's memory");
    Ok(held)
}

/// Runs `first` and `second` on two CPUs; the first makes the cache.
fn model<T: 'static>(entries: usize, first: fn(&Cache) -> T, second: fn(&Cache), then: fn(&Cache, T)) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    // A waiting thread polls repeatedly.
    builder.max_branches = 100_000;
    builder.check(move || {
        CPU.with(|cpu| cpu.set(0));
        let domain = Domain::new(Cpus, Hardware::new(), Policy::Strict).unwrap();
        let limits = RegistrationLimits { entries, bytes: PAGES as u64 * PAGE };
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        let cache = Arc::new(RegistrationCache::new(device, limits).unwrap());
        let begun = first(&cache);
        let other = {
            let cache = Arc::clone(&cache);
            thread::spawn(move || {
                CPU.with(|cpu| cpu.set(1));
                second(&cache);
            })
        };
        then(&cache, begun);
        other.join().unwrap();
        let usage = cache.usage();
        assert_eq!((usage.entries, usage.forgotten_entries), (usage.idle_entries, 0));
        assert!(usage.peak_entries <= entries);
        cache.trim(0).unwrap();
        assert_eq!(cache.usage().bytes, 0);
        assert!((0..PAGES as u64).all(|page| reached(&cache, Iova::new(page * PAGE)) == 0));
        let domain = cache.device().domain();
        let stats = domain.stats();
        assert_eq!((stats.maps, stats.lost_iova_bytes), (stats.unmaps, 0));
        assert_eq!(stats.taken_iova_bytes, stats.cached_iova_bytes);
    });
}

fn kept(cache: &Cache) -> Iova {
    let held = acquire(cache, 0, Keep::UntilForgotten).unwrap();
    let iova = held.iova();
    assert_eq!(cache.release(held), Ok(Released::Open));
    iova
}

fn held_meanwhile(cache: &Cache) {
    let Ok(held) = acquire(cache, 0, Keep::WhileHeld) else { return };
    let iova = held.iova();
    if cache.release(held) == Ok(Released::Unmapped) {
        assert_ne!(reached(cache, iova), memory(0).phys.get());
    }
}

/// It is not reached, unless it is mapped again after the forget has begun; nor is a mapping that was in progress.
fn forget(cache: &Cache, iova: Iova) {
    let misses = cache.usage().misses;
    cache.forget(memory(0)).unwrap();
    let phys = reached(cache, iova);
    if cache.usage().misses == misses {
        assert_ne!(phys, memory(0).phys.get(), "forgotten, and reached");
    }
}

#[test]
fn what_is_forgotten_is_not_reached_though_somebody_comes_for_it() {
    model(4, kept, held_meanwhile, forget);
}

/// The other takes the only entry for another range.
#[test]
fn what_is_forgotten_while_it_is_evicted_is_not_reached() {
    let evict = |cache: &Cache| {
        let held = acquire(cache, 1, Keep::UntilForgotten).unwrap();
        assert_eq!(reached(cache, held.iova()), memory(1).phys.get(), "held");
        assert_eq!(cache.release(held), Ok(Released::Open));
    };
    model(1, kept, evict, |cache, iova| {
        cache.forget(memory(0)).unwrap();
        assert_ne!(reached(cache, iova), memory(0).phys.get(), "forgotten, and reached");
    });
}

/// Both acquire it for the first time, and each ends its own.
#[test]
fn whoever_holds_it_reaches_it_though_others_release_it() {
    let hold = |cache: &Cache| {
        let held = acquire(cache, 0, Keep::WhileHeld).unwrap();
        assert_eq!(reached(cache, held.iova()), memory(0).phys.get(), "held");
        assert!(matches!(cache.release(held), Ok(Released::Open | Released::Unmapped)));
    };
    model(
        2,
        |_| Iova::new(0),
        hold,
        |cache, _| {
            let held = acquire(cache, 0, Keep::WhileHeld).unwrap();
            assert_eq!(reached(cache, held.iova()), memory(0).phys.get(), "held");
            assert!(matches!(cache.release(held), Ok(Released::Open | Released::Unmapped)));
        },
    );
}

/// There is one entry, and both need it: one waits for the other's eviction, or gets an error.
#[test]
fn two_that_evict_share_what_there_is() {
    fn take(cache: &Cache, number: u64) {
        match acquire(cache, number, Keep::WhileHeld) {
            Ok(held) => {
                assert_eq!(reached(cache, held.iova()), memory(number).phys.get(), "held");
                assert_eq!(cache.release(held), Ok(Released::Unmapped));
            }
            Err(error) => assert_eq!(error, AcquireError::NoEntry { limit: 1 }),
        }
    }
    model(1, kept, |cache| take(cache, 1), |cache, _| take(cache, 2));
}

/// The other is entering it, or will.
#[test]
fn what_is_being_mapped_when_it_is_forgotten_is_not_reached() {
    let keep = |cache: &Cache| {
        let Ok(held) = acquire(cache, 0, Keep::UntilForgotten) else { return };
        assert!(matches!(cache.release(held), Ok(Released::Open | Released::Forgotten)));
    };
    // Addresses are allocated from the top.
    model(4, |_| Iova::new((PAGES as u64 - 1) * PAGE), keep, forget);
}

/// The last holder owns its memory again after the release, even if another CPU is forgetting it.
fn released(cache: &Cache, held: Registration) {
    let iova = held.iova();
    match cache.release(held) {
        Ok(Released::Open) => unreachable!("it was the last"),
        Ok(Released::Unmapped | Released::Forgotten) => {
            assert_eq!(reached(cache, iova), 0, "released, and reached")
        }
        Err(error) => assert_eq!(error, ReleaseRegistrationError::Unconfirmed { error: TIMED_OUT }),
    }
}

/// The device has used it, and caches the translation.
fn used(cache: &Cache) -> Registration {
    acquire(cache, 0, Keep::WhileHeld).unwrap()
}

#[test]
fn the_last_release_of_what_is_being_forgotten_says_when_it_is_out_of_reach() {
    model(4, used, |cache| assert!(cache.forget(memory(0)).is_ok()), released);
}

/// The first invalidation fails, of either thread: the other thread tries again.
#[test]
fn what_neither_a_release_nor_a_forget_confirms_is_said_to_be_reached() {
    let used = |cache: &Cache| {
        *cache.device().domain().mapper().fails.lock().unwrap() = 1;
        used(cache)
    };
    let forget = |cache: &Cache| match cache.forget(memory(0)) {
        Ok(_) => {}
        Err(error) => assert_eq!(error, ForgetError { entries: 1, error: TIMED_OUT }),
    };
    model(4, used, forget, released);
}
