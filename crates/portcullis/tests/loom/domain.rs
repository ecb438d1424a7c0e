//! A domain whose CPUs unmap lazily, flush, change the policy and use addresses again: what is used again is forgotten before,
//! and what a change promises holds when it has returned.

use core::ops::Range;

use ::loom::sync::{Arc, Mutex};
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis::sync::{AtomicU64, Ordering};

use super::frames::MACHINE;

const PAGE: u64 = 4096;
/// Page 0 is nobody's.
const PAGES: usize = 3;
const WINDOW_NS: u64 = 10;
const LAZY: Policy = Policy::Lazy { window_ns: WINDOW_NS };
const NEVER: u64 = u64::MAX;

::loom::thread_local! {
    /// The CPU that a thread is.
    static CPU: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

/// When the platform is to come back.
#[derive(Clone)]
struct Cpus(std::sync::Arc<AtomicU64>);

// SAFETY: each thread of the model is a CPU of its own; fences are full.
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
        WINDOW_NS
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.0.fetch_min(deadline_ns, Ordering::Relaxed);
    }
}

/// A table of a few pages and what hardware has cached of it. No lock of its own orders a CPU that only maps and unmaps.
struct Hardware {
    geometry: Geometry,
    entries: [AtomicU64; PAGES],
    cached: [AtomicU64; PAGES],
    /// One invalidation after the other.
    order: Mutex<()>,
}

impl Hardware {
    fn new() -> Self {
        let aperture = IovaRange::new(Iova::new(0), PAGES as u64 * PAGE).unwrap();
        let page_sizes = PageSizes::EMPTY.with(PageSize::SIZE_4K);
        let geometry = Geometry { aperture, page_sizes, reserved: Vec::new() };
        let words = || [0; PAGES].map(AtomicU64::new);
        Self { geometry, entries: words(), cached: words(), order: Mutex::new(()) }
    }

    /// What the device reaches by what is cached: 0 for nothing.
    fn cached(&self, range: IovaRange) -> u64 {
        self.cached[index(range)].load(Ordering::Relaxed)
    }
}

fn index(range: IovaRange) -> usize {
    (range.start().get() / PAGE) as usize
}

// SAFETY: what stands in for hardware keeps its promises, or the tests fail; no memory is behind it.
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
        let (phys, _) = list.into_iter().next().unwrap();
        assert_eq!(self.cached(range), 0, "used again before it is forgotten");
        self.entries[index(range)].store(phys.get(), Ordering::Relaxed);
        // The device is there at once.
        self.cached[index(range)].store(phys.get(), Ordering::Relaxed);
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        self.entries[index(range)].store(0, Ordering::Relaxed);
        gather.add(range);
        Unmapped::of(range, range.len())
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let forget = |pages: Range<usize>| {
            let _order = self.order.lock().unwrap();
            for page in pages {
                // What it forgets it may fetch again at once.
                let entry = self.entries[page].load(Ordering::Relaxed);
                self.cached[page].store(entry, Ordering::Relaxed);
            }
        };
        if !gather.each_range(&Costs::BARE_METAL, |range| forget(index(range)..index(range) + 1)) {
            forget(0..PAGES);
        }
        Ok(())
    }
}

type Dom = Domain<Hardware, Cpus>;

fn map(domain: &Dom, number: u64) -> Option<IovaRange> {
    let list = [PhysSegment { phys: PhysAddr::new(number << 20), len: PAGE }];
    // SAFETY: no memory is behind it.
    unsafe { domain.map(&list, Permissions::READ_WRITE, Iova::new(u64::MAX)) }.ok()
}

fn be(cpu: usize) {
    CPU.with(|this| this.set(cpu));
}

/// CPU 0 makes a lazy domain with one mapping, which CPU 1 unmaps while CPU 0 does something else.
fn beside_an_unmap(then: impl Fn(&Dom, &AtomicU64, IovaRange) + Send + Sync + Copy + 'static) {
    race(map_one, then);
    race(used_before, then);
}

/// CPU 1 has a queue that flushes know of: its next unmap is ordered by that queue's lock alone.
fn used_before(domain: &Dom) -> IovaRange {
    be(1);
    let range = map(domain, 9).unwrap();
    domain.unmap(range).unwrap();
    domain.flush().unwrap();
    domain.cpu_released(1);
    be(0);
    map_one(domain)
}

fn map_one(domain: &Dom) -> IovaRange {
    map(domain, 1).unwrap()
}

fn race(
    before: impl Fn(&Dom) -> IovaRange + Send + Sync + Copy + 'static,
    then: impl Fn(&Dom, &AtomicU64, IovaRange) + Send + Sync + Copy + 'static,
) {
    race_then(before, then, then_over);
}

fn race_then(
    before: impl Fn(&Dom) -> IovaRange + Send + Sync + Copy + 'static,
    then: impl Fn(&Dom, &AtomicU64, IovaRange) + Send + Sync + Copy + 'static,
    after: impl Fn(&Dom, &AtomicU64, IovaRange) + Send + Sync + Copy + 'static,
) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 100_000;
    builder.check(move || {
        be(0);
        let cpus = Cpus(std::sync::Arc::new(AtomicU64::new(NEVER)));
        let domain = Arc::new(Ours(Domain::new(cpus.clone(), Hardware::new(), LAZY).unwrap()));
        let range = before(&domain.0);
        let other = {
            let domain = domain.clone();
            thread::spawn(move || {
                be(1);
                domain.0.unmap(range).unwrap();
            })
        };
        then(&domain.0, &cpus.0, range);
        other.join().unwrap();
        after(&domain.0, &cpus.0, range);
    });
}

/// Whatever happened: what is still reached is waited for, and a flush ends it.
fn then_over(domain: &Dom, wake_ns: &AtomicU64, range: IovaRange) {
    let hardware = domain.mapper();
    let is_stale = || hardware.cached(range) == 1 << 20;
    assert!(!is_stale() || wake_ns.load(Ordering::Relaxed) != NEVER, "reached, and nobody comes");
    domain.flush().unwrap();
    assert!(!is_stale(), "flushed, and reached");
}

struct Ours(Shared<Dom>);

/// The only other address is taken: the next one to be had is that of the page that is being unmapped.
#[test]
fn an_address_is_used_again_only_after_a_flush_that_saw_it_cleared() {
    beside_an_unmap(|domain, _, _| {
        domain.flush().unwrap();
        map(domain, 2).unwrap();
        map(domain, 3);
    });
}

/// The same by the flush that an exhausted space brings.
#[test]
fn nor_does_it_come_back_by_the_flush_of_an_exhausted_space() {
    beside_an_unmap(|domain, _, _| {
        map(domain, 2).unwrap();
        map(domain, 3);
    });
}

#[test]
fn what_was_unmapped_when_a_change_to_strict_has_returned_is_not_reached() {
    for before in [map_one, used_before] {
        race_then(
            before,
            |domain, _, _| domain.set_policy(Policy::Strict).unwrap(),
            |domain, _, range| assert_eq!(domain.mapper().cached(range), 0, "by a policy that is no more"),
        );
    }
}

/// A window ends while an unmap begins another: somebody comes back for that.
#[test]
fn a_timer_beside_an_unmap_covers_it_or_comes_again() {
    let before = |domain: &Dom| {
        let (first, second) = (map(domain, 2).unwrap(), map_one(domain));
        // Its window is over: the platform's clock stands at its end.
        domain.set_policy(Policy::Lazy { window_ns: 0 }).unwrap();
        domain.unmap(first).unwrap();
        domain.set_policy(LAZY).unwrap();
        second
    };
    race(before, |domain, wake_ns, _| {
        wake_ns.store(NEVER, Ordering::Relaxed);
        domain.timer();
    });
}

/// A CPU goes, and takes back what it has, while another unmaps.
#[test]
fn what_a_cpu_leaves_is_used_again_only_when_it_is_forgotten() {
    beside_an_unmap(|domain, _, _| {
        domain.cpu_released(1);
        map(domain, 2).unwrap();
        map(domain, 3);
    });
}
