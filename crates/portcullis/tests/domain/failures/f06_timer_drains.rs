//! Failure 6, second half: the flush timer drains every CPU's queue into one CPU's cache. Here addresses wait
//! in the queue of the CPU that unmapped them, each of its unmaps takes one back, and it goes to the CPU that
//! it came from.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::chosen::{ANYWHERE, Chosen, PAGE};
use crate::common::Bench;
use crate::rig::{Clocked, LAZY_FOREVER, Rig, page};
use portcullis::addr::{Direction, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis::invalidation::{QUEUE_ENTRIES, SLICE};
use portcullis::platform::PlatformEvents;
use portcullis_model::open::OpenDomain;

const CPUS: usize = 4;

/// Some CPUs, played by one thread, and a domain whose timer the test calls itself.
struct Cpus {
    platform: Arc<Chosen>,
    bench: Bench,
}

impl Cpus {
    fn new() -> Self {
        let platform = Arc::new(Chosen::new(CPUS));
        let bench = Bench::on(Arc::clone(&platform), Policy::Lazy { window_ns: u64::MAX });
        Self { platform, bench }
    }

    fn map_below(&self, cpu: usize, limit: Iova) -> IovaRange {
        self.platform.be(cpu);
        let page = PhysSegment { phys: PhysAddr::new(0x1_0000_0000), len: PAGE };
        self.bench.domain.open(&[page], Direction::FromDevice.permissions(), limit).unwrap()
    }

    fn map(&self, cpu: usize) -> IovaRange {
        self.map_below(cpu, ANYWHERE)
    }

    fn unmap(&self, cpu: usize, range: IovaRange) {
        self.platform.be(cpu);
        self.bench.domain.unmap(range).unwrap();
    }

    /// Pages that are mapped or wait in a queue.
    fn out(&self) -> u64 {
        let usage = self.bench.domain.stats();
        (usage.taken_iova_bytes - usage.cached_iova_bytes) / PAGE
    }

    /// The window ends; somebody on `cpu` sees to it. How many ranges came back by that.
    fn timer(&self, cpu: usize) -> u64 {
        self.platform.be(cpu);
        let before = self.out();
        let flushes = self.bench.domain.stats().flushes;
        // Before the window ends nothing is flushed, whoever else's ends.
        PlatformEvents::timer(&*self.bench.domain);
        assert_eq!(self.bench.domain.stats().flushes, flushes);
        self.platform.at(u64::MAX);
        PlatformEvents::timer(&*self.bench.domain);
        self.platform.at(0);
        assert_eq!(self.bench.domain.stats().flushes, flushes + 1);
        before - self.out()
    }

    fn assert_nothing_lost(&self) {
        assert_eq!(self.bench.domain.stats().lost_iova_bytes, 0);
    }
}

fn addresses(ranges: &[IovaRange]) -> HashSet<Iova> {
    ranges.iter().map(|range| range.start()).collect()
}

#[test]
fn deferred_addresses_return_to_their_cpu_one_with_each_unmap() {
    const RANGES: usize = QUEUE_ENTRIES / 2;
    let cpus = Cpus::new();
    let mine: Vec<Vec<IovaRange>> =
        (0..CPUS).map(|cpu| (0..RANGES).map(|_| cpus.map(cpu)).collect()).collect();
    for (cpu, ranges) in mine.iter().enumerate() {
        ranges.iter().for_each(|range| cpus.unmap(cpu, *range));
    }
    assert_eq!(cpus.out(), (CPUS * RANGES) as u64, "all of it waits");
    // One CPU flushes for all of them and takes nothing of theirs, nor of its own.
    assert_eq!(cpus.timer(0), 0);
    let sets: Vec<HashSet<Iova>> = mine.iter().map(|ranges| addresses(ranges)).collect();
    for (cpu, own) in sets.iter().enumerate() {
        let mut back = 0;
        for _ in 0..RANGES {
            let range = cpus.map(cpu);
            back += usize::from(own.contains(&range.start()));
            let others = sets.iter().enumerate().filter(|(other, _)| *other != cpu);
            assert!(others.into_iter().all(|(_, set)| !set.contains(&range.start())));
            let before = cpus.out();
            cpus.unmap(cpu, range);
            // What is unmapped is still out; one that is safe came back instead.
            assert_eq!(before - cpus.out(), 1);
        }
        // The first ones come from what the CPU's list had left.
        assert!(back >= RANGES - 64, "only {back} of its own came back to CPU {cpu}");
    }
    cpus.assert_nothing_lost();
}

/// A window that ends when all that was deferred in it is covered costs no flush, whether the
/// queues have heard of that flush or not.
#[test]
fn a_timer_flushes_nothing_where_nothing_waits() {
    let cpus = Cpus::new();
    let flushes = || cpus.bench.domain.stats().flushes;
    for round in 1..=3 {
        for cpu in [0, 2] {
            cpus.unmap(cpu, cpus.map(cpu));
        }
        cpus.bench.domain.flush().unwrap();
        assert_eq!(flushes(), 2 * round - 1);
        cpus.platform.at(u64::MAX);
        PlatformEvents::timer(&*cpus.bench.domain);
        cpus.platform.at(0);
        assert_eq!(flushes(), 2 * round - 1, "nothing waits");
        // What comes next asks for a timer again.
        cpus.unmap(1, cpus.map(1));
        cpus.timer(0);
        assert_eq!(flushes(), 2 * round);
    }
    cpus.assert_nothing_lost();
}

/// A timer of somebody else's between two windows finds nothing due, as the first one is over.
#[test]
fn a_window_that_has_ended_says_nothing_of_the_next() {
    let platform = Arc::new(Chosen::new(CPUS));
    let bench = Bench::on(Arc::clone(&platform), Policy::Lazy { window_ns: 1000 });
    let cpus = Cpus { platform, bench };
    let flushes = || cpus.bench.domain.stats().flushes;
    for round in 0..4 {
        let begins = round * 2000;
        cpus.platform.at(begins);
        cpus.unmap(0, cpus.map(0));
        for (now, flushed) in [(0, 0), (999, 0), (1000, 1), (1500, 1)] {
            cpus.platform.at(begins + now);
            PlatformEvents::timer(&*cpus.bench.domain);
            assert_eq!(flushes(), round + flushed, "{round}, {now}");
        }
    }
    cpus.assert_nothing_lost();
}

/// One CPU maps, another unmaps, as with interrupts that are bound to one: what waits in the second one's
/// queue goes to the first one's lists, whoever flushes.
#[test]
fn what_another_cpu_defers_returns_to_the_owner() {
    let cpus = Cpus::new();
    let (owner, other) = (1, 2);
    let mut known = HashSet::new();
    let mut news = 0;
    for round in 0..40 {
        let ranges: Vec<IovaRange> = (0..QUEUE_ENTRIES / 2).map(|_| cpus.map(owner)).collect();
        let new = ranges.iter().filter(|range| known.insert(range.start())).count();
        news += if round < 4 { 0 } else { new };
        for range in ranges {
            let before = cpus.out();
            cpus.unmap(other, range);
            // One at the most, and none before the first flush.
            assert!(before - cpus.out() <= u64::from(round > 0), "round {round}");
        }
        assert_eq!(cpus.timer(round % CPUS), 0);
        // The CPU that unmaps keeps nothing of the owner's.
        if round % 8 == 7 {
            let own: Vec<IovaRange> = (0..4).map(|_| cpus.map(other)).collect();
            assert!(addresses(&own).is_disjoint(&known));
            own.into_iter().for_each(|range| cpus.unmap(other, range));
        }
    }
    // What the owner maps is what came back to it, not new addresses: 36 rounds of 128 need next to none.
    assert!(news <= 128, "{news} new addresses in a steady state");
    cpus.assert_nothing_lost();
}

/// No call of a map, an unmap or the timer handles more than one deferred range, but for the map that finds
/// the space exhausted: that one handles all of them, 256 for each CPU at the most.
#[test]
fn only_an_exhausted_space_takes_back_many_at_once() {
    let cpus = Cpus::new();
    // 255 pages below 1 MiB, in turn on all CPUs.
    let limit = Iova::new((1 << 20) - 1);
    let mut queued = 0_u64;
    let mut many = 0;
    for step in 0..4_000 {
        let cpu = step % CPUS;
        let before = cpus.out();
        let range = cpus.map_below(cpu, limit);
        let back = before + 1 - cpus.out();
        assert!(back <= queued && back <= ((CPUS + 1) * QUEUE_ENTRIES) as u64);
        assert!(back == 0 || queued >= 200, "{back} taken back with {queued} waiting: it was not exhausted");
        many += u64::from(back > 1);
        queued -= back;
        let before = cpus.out();
        cpus.unmap(cpu, range);
        let back = before - cpus.out();
        assert!(back <= 1, "{back} by one unmap");
        queued = queued + 1 - back;
    }
    assert!(many > 0 && many < 4_000 / 200, "{many} maps took back many");
    assert_eq!(cpus.out(), queued);
    cpus.assert_nothing_lost();
}

/// A CPU that is gone leaves nothing in its queue, and what it owned is anybody's.
#[test]
fn a_cpu_that_goes_leaves_nothing_behind() {
    let cpus = Cpus::new();
    let ranges: Vec<IovaRange> = (0..QUEUE_ENTRIES).map(|_| cpus.map(3)).collect();
    ranges.iter().for_each(|range| cpus.unmap(3, *range));
    assert_eq!(cpus.out(), QUEUE_ENTRIES as u64);
    cpus.platform.be(CPUS);
    PlatformEvents::cpu_released(&*cpus.bench.domain, 3);
    let usage = cpus.bench.domain.stats();
    assert_eq!((usage.taken_iova_bytes, usage.cached_iova_bytes), (0, 0));
    cpus.assert_nothing_lost();
}

/// Where one call takes back all that there is, because the space is exhausted or a CPU has gone, it does so in
/// slices: no turn of a CPU, so no lock that is held and no time for which a kernel keeps interrupts off, covers
/// more than one.
#[test]
fn no_turn_takes_back_more_than_a_slice() {
    let platform = Clocked::new(CPUS);
    let rig = Rig::new(Arc::clone(&platform), LAZY_FOREVER, |queue| queue);
    let limit = Iova::new((2048 << 12) - 1);
    let map = || rig.domain.open(&[page(0)], Direction::FromDevice.permissions(), limit);
    let (out, most, all) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let domain = Shared::downgrade(&rig.domain);
    platform.after_each_turn({
        let (most, all) = (Arc::clone(&most), Arc::clone(&all));
        move || {
            let usage = domain.upgrade().expect("it is in use").stats();
            let now = (usage.taken_iova_bytes - usage.cached_iova_bytes) / PAGE;
            let back = out.swap(now, Ordering::Relaxed).saturating_sub(now);
            most.fetch_max(back, Ordering::Relaxed);
            all.fetch_add(back, Ordering::Relaxed);
        }
    });
    let queued = |ranges: u64| {
        for cpu in 0..CPUS {
            platform.be(cpu);
            let ranges: Vec<_> = (0..ranges).map(|_| map().unwrap()).collect();
            ranges.into_iter().for_each(|range| rig.domain.unmap(range).unwrap());
        }
    };
    queued(QUEUE_ENTRIES as u64);
    let before = all.load(Ordering::Relaxed);
    // What is left below the limit, and one more.
    platform.be(0);
    let live: Vec<_> = (0..1024).map(|_| map().unwrap()).collect();
    assert!(all.load(Ordering::Relaxed) - before >= 1000, "one of these took back all that waited");
    live.into_iter().for_each(|range| rig.domain.unmap_strictly(range).unwrap());
    queued(100);
    let before = all.load(Ordering::Relaxed);
    platform.be(CPUS);
    PlatformEvents::cpu_released(&*rig.domain, 2);
    assert!(all.load(Ordering::Relaxed) - before >= 100, "all that the CPU has left behind");
    let most = most.load(Ordering::Relaxed);
    assert!(most > 1 && most <= 64 && SLICE == 64, "{most} taken back in one turn");
    assert_eq!(rig.domain.stats().lost_iova_bytes, 0);
}
