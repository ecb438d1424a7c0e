//! Random acquisitions, releases, forgets and trims, some with failing hardware, against a plain model of all entries; and a device that
//! tries every address it was ever given after each step.

use std::collections::BTreeSet;

use portcullis::addr::{Direction, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis_linux::registration::{AcquireError, Keep, Registration, ReleaseRegistrationError, Released};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::open::OpenCache;
use crate::rig::{DEVICE, PAGE};
use crate::support::{Bench, TIMEOUT, bytes};

const ENTRIES: usize = 5;
const PAGES: u64 = 12;

#[derive(Debug, Clone)]
enum Op {
    Acquire { memory: (u64, u64), direction: usize, kept: bool },
    Release { which: usize },
    Forget { memory: (u64, u64) },
    Trim { keep: u64 },
}

fn op() -> impl Strategy<Value = (Op, bool)> {
    // Few places and lengths, so that ranges repeat, overlap, and contain each other.
    let place = prop_oneof![3 => (0..6_u64).prop_map(|page| page * PAGE), 1 => 0..6 * PAGE];
    let len = prop_oneof![
        3 => Just(PAGE), 2 => Just(3 * PAGE), 1 => 1..PAGE, 1 => 1..6 * PAGE, 1 => Just(14 * PAGE)
    ];
    let memory = move || (place.clone(), len.clone());
    let direction = prop_oneof![4 => Just(2_usize), 1 => 0..2_usize];
    let op = prop_oneof![
        8 => (memory(), direction, any::<bool>())
            .prop_map(|(memory, direction, kept)| Op::Acquire { memory, direction, kept }),
        7 => any::<usize>().prop_map(|which| Op::Release { which }),
        2 => memory().prop_map(|memory| Op::Forget { memory }),
        1 => (0..8_u64).prop_map(|pages| Op::Trim { keep: pages * PAGE }),
    ];
    (op, prop::bool::weighted(0.1))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Is {
    Live,
    Unconfirmed,
    Gone,
}

#[derive(Debug)]
struct Entry {
    memory: PhysSegment,
    direction: Direction,
    kept: bool,
    held: Vec<Registration>,
    is: Is,
    /// When it became idle.
    since: u64,
    /// The IOVA of its first page.
    iova: u64,
}

fn end(memory: PhysSegment) -> u64 {
    memory.phys.get() + memory.len
}

impl Entry {
    fn first_page(&self) -> u64 {
        self.memory.phys.get() & !(PAGE - 1)
    }

    fn bytes(&self) -> u64 {
        end(self.memory).next_multiple_of(PAGE) - self.first_page()
    }

    fn is_idle(&self) -> bool {
        self.is == Is::Live && self.held.is_empty()
    }

    fn covers(&self, memory: PhysSegment) -> bool {
        self.memory.phys <= memory.phys && end(self.memory) >= end(memory)
    }

    fn overlaps(&self, memory: PhysSegment) -> bool {
        self.is != Is::Gone && self.memory.phys.get() < end(memory) && end(self.memory) > memory.phys.get()
    }
}

struct World {
    bench: Bench,
    entries: Vec<Entry>,
    now: u64,
    /// Every page that the device was ever given.
    known: BTreeSet<u64>,
    fails: bool,
    hits: u64,
}

impl World {
    fn new() -> Self {
        let bench = Bench::new(ENTRIES, PAGES);
        Self { bench, entries: Vec::new(), now: 0, known: BTreeSet::new(), fails: false, hits: 0 }
    }

    fn used(&self) -> u64 {
        self.entries.iter().filter(|entry| entry.is != Is::Gone).map(Entry::bytes).sum()
    }

    /// Ends entries by the hardware's result; entries without a holder are removed.
    fn end(&mut self, doomed: impl Fn(&Entry) -> bool) {
        let is = if self.fails { Is::Unconfirmed } else { Is::Gone };
        self.entries.iter_mut().filter(|entry| doomed(entry)).for_each(|entry| entry.is = is);
        self.entries.retain(|entry| entry.is != Is::Gone || !entry.held.is_empty());
    }

    /// The addresses of entries to evict: all unconfirmed ones, and idle ones in LRU order, while `more` is needed.
    fn victims(&self, mut more: impl FnMut(usize, u64, &Entry) -> bool) -> Vec<u64> {
        let mut idle: Vec<_> = self.entries.iter().filter(|entry| entry.is_idle()).collect();
        idle.sort_by_key(|entry| entry.since);
        let unconfirmed = || self.entries.iter().filter(|entry| entry.is == Is::Unconfirmed);
        let (mut count, mut bytes) = (unconfirmed().count(), unconfirmed().map(Entry::bytes).sum());
        let mut victims: Vec<u64> = unconfirmed().map(|entry| entry.iova).collect();
        for entry in idle {
            if !more(count, bytes, entry) {
                break;
            }
            victims.push(entry.iova);
            count += 1;
            bytes += entry.bytes();
        }
        victims
    }

    fn acquire(&mut self, memory: PhysSegment, direction: Direction, keep: Keep) {
        let result = self.bench.cache.open(memory, direction, keep);
        let kept = keep == Keep::UntilForgotten;
        let live = |entry: &Entry| entry.is == Is::Live && entry.direction == direction;
        let exact = self.entries.iter().position(|entry| live(entry) && entry.memory == memory);
        if let Some(at) = exact {
            self.entries[at].kept |= kept;
            return self.hit(at, memory, result.unwrap());
        }
        let mut covering = (0..self.entries.len())
            .filter(|at| {
                live(&self.entries[*at]) && self.entries[*at].kept && self.entries[*at].covers(memory)
            })
            .peekable();
        if covering.peek().is_some() {
            // Any of them will do: the address identifies it.
            let held = result.unwrap();
            let distance = |entry: &Entry| memory.phys.get() - entry.first_page();
            let at = covering
                .find(|at| self.entries[*at].iova + distance(&self.entries[*at]) == held.iova().get())
                .expect("lent from an entry that covers it");
            return self.hit(at, memory, held);
        }
        let entry = Entry { memory, direction, kept, held: Vec::new(), is: Is::Live, since: 0, iova: 0 };
        self.miss(entry, result);
    }

    fn hit(&mut self, at: usize, memory: PhysSegment, held: Registration) {
        self.hits += 1;
        let entry = &mut self.entries[at];
        assert_eq!(held.iova().get() - entry.iova, memory.phys.get() - entry.first_page());
        entry.held.push(held);
    }

    fn miss(&mut self, mut entry: Entry, result: Result<Registration, AcquireError>) {
        let bytes = entry.bytes();
        if bytes > PAGES * PAGE {
            assert_eq!(result.unwrap_err(), AcquireError::TooLarge { bytes, limit: PAGES * PAGE });
            return;
        }
        loop {
            let entries = usize::from(self.entries.len() >= ENTRIES);
            let missing = (self.used() + bytes).saturating_sub(PAGES * PAGE);
            if entries == 0 && missing == 0 {
                break;
            }
            let all = self.victims(|_, _, _| true);
            if entries > 0 && all.is_empty() {
                return assert_eq!(result.unwrap_err(), AcquireError::NoEntry { limit: ENTRIES });
            }
            let of = |entry: &&Entry| entry.is != Is::Gone && all.contains(&entry.iova);
            let room: u64 = self.entries.iter().filter(of).map(Entry::bytes).sum();
            if room < missing {
                let held = self.used() - room;
                let error = AcquireError::NoBytes { wanted: bytes, limit: PAGES * PAGE, held };
                return assert_eq!(result.unwrap_err(), error);
            }
            let victims = self.victims(|count, bytes, _| count < entries || bytes < missing);
            self.end(|entry| entry.is != Is::Gone && victims.contains(&entry.iova));
            if self.fails {
                return assert_eq!(result.unwrap_err(), AcquireError::Eviction { error: TIMEOUT });
            }
        }
        let held = result.unwrap();
        entry.iova = held.iova().get() & !(PAGE - 1);
        assert_eq!(held.iova().get() - entry.iova, entry.memory.phys.get() % PAGE);
        let pages = (0..bytes).step_by(PAGE as usize).map(|offset| entry.iova + offset);
        for page in pages {
            let of = |other: &&Entry| (other.iova..other.iova + other.bytes()).contains(&page);
            assert!(self.entries.iter().find(of).is_none(), "addresses of two");
            self.known.insert(page);
        }
        entry.held.push(held);
        self.entries.push(entry);
    }

    fn release(&mut self, which: usize) {
        let held: usize = self.entries.iter().map(|entry| entry.held.len()).sum();
        if held == 0 {
            return;
        }
        let mut which = which % held;
        let at = self
            .entries
            .iter()
            .position(|entry| match which.checked_sub(entry.held.len()) {
                Some(rest) => {
                    which = rest;
                    false
                }
                None => true,
            })
            .unwrap();
        let registration = self.entries[at].held.swap_remove(which);
        let result = self.bench.cache.release(registration);
        let entry = &mut self.entries[at];
        let (last, kept) = (entry.held.is_empty(), entry.kept);
        let expected = match entry.is {
            // The last holder retries an unconfirmed forget.
            is @ (Is::Live | Is::Unconfirmed) if last && !kept => {
                let iova = entry.iova;
                self.end(|entry| entry.is == is && entry.iova == iova);
                match self.fails {
                    true => Err(ReleaseRegistrationError::Unconfirmed { error: TIMEOUT }),
                    false if is == Is::Live => Ok(Released::Unmapped),
                    false => Ok(Released::Forgotten),
                }
            }
            Is::Live => {
                entry.since = self.now;
                Ok(Released::Open)
            }
            _ => Ok(Released::Forgotten),
        };
        self.entries.retain(|entry| entry.is != Is::Gone || !entry.held.is_empty());
        assert_eq!(result, expected);
    }

    fn forget(&mut self, memory: PhysSegment) {
        let result = self.bench.cache.forget(memory);
        let doomed: Vec<_> = self.entries.iter().filter(|entry| entry.overlaps(memory)).collect();
        let entries = doomed.len();
        match result {
            Ok(forgotten) => {
                assert!(!self.fails || entries == 0);
                let held = doomed.iter().filter(|entry| !entry.held.is_empty()).count();
                let bytes = doomed.iter().map(|entry| entry.bytes()).sum();
                assert_eq!((forgotten.entries, forgotten.bytes, forgotten.held), (entries, bytes, held));
            }
            Err(error) => assert_eq!((self.fails, error.entries, error.error), (true, entries, TIMEOUT)),
        }
        self.end(|entry| entry.overlaps(memory));
    }

    fn trim(&mut self, keep: u64) {
        let result = self.bench.cache.trim(keep);
        let mut idle: u64 = self.entries.iter().filter(|entry| entry.is_idle()).map(Entry::bytes).sum();
        let doomed = self.victims(|_, _, entry| {
            let more = idle > keep;
            idle -= entry.bytes();
            more
        });
        let of = |entry: &&Entry| entry.is != Is::Gone && doomed.contains(&entry.iova);
        let bytes = self.entries.iter().filter(of).map(Entry::bytes).sum();
        let expected = if self.fails && !doomed.is_empty() { Err(TIMEOUT) } else { Ok(bytes) };
        assert_eq!(result, expected);
        self.end(|entry| entry.is != Is::Gone && doomed.contains(&entry.iova));
    }

    /// The cache agrees with the model, and the device reaches exactly what it must.
    fn check(&self) {
        let usage = self.bench.cache.usage();
        let count = |is: Is| self.entries.iter().filter(|entry| entry.is == is).count();
        assert_eq!((usage.entries, usage.bytes, usage.hits), (self.entries.len(), self.used(), self.hits));
        assert_eq!(usage.idle_entries, self.entries.iter().filter(|entry| entry.is_idle()).count());
        assert_eq!(
            (usage.unconfirmed_entries, usage.forgotten_entries),
            (count(Is::Unconfirmed), count(Is::Gone))
        );
        assert!(usage.peak_entries <= ENTRIES && usage.peak_bytes <= PAGES * PAGE);
        let iommu = &self.bench.rig.iommu;
        for page in &self.known {
            let of = |entry: &&Entry| (entry.iova..entry.iova + entry.bytes()).contains(page);
            let entry = self.entries.iter().find(of);
            for access in [Permissions::READ, Permissions::WRITE] {
                let reached = iommu.probe(DEVICE, Iova::new(*page), access);
                let meant = entry.map(|entry| PhysAddr::new(entry.first_page() + page - entry.iova));
                let allowed = entry.is_some_and(|entry| entry.direction.permissions().allows(access));
                match entry.map(|entry| entry.is) {
                    Some(Is::Live) if allowed => assert_eq!(reached, meant, "not reached"),
                    Some(Is::Unconfirmed) if allowed => assert!(reached.is_none() || reached == meant),
                    _ => assert_eq!(reached, None, "reached at {page:#x}"),
                }
                // The device caches translations.
                let _ = iommu.access(DEVICE, Iova::new(*page), 1, access);
            }
        }
    }
}

fn step(world: &mut World, op: Op) {
    world.now += 1;
    match op {
        Op::Acquire { memory: (at, len), direction, kept } => {
            let keep = if kept { Keep::UntilForgotten } else { Keep::WhileHeld };
            world.acquire(bytes(at, len), Direction::ALL[direction], keep);
        }
        Op::Release { which } => world.release(which),
        Op::Forget { memory: (at, len) } => world.forget(bytes(at, len)),
        Op::Trim { keep } => world.trim(keep),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_device_reaches_what_a_plain_model_says(ops in vec(op(), 1..80)) {
        let mut world = World::new();
        for (op, fails) in ops {
            world.fails = fails;
            world.bench.fail(fails);
            step(&mut world, op);
            world.bench.fail(false);
            world.fails = false;
            world.check();
        }
        while world.entries.iter().any(|entry| !entry.held.is_empty()) {
            step(&mut world, Op::Release { which: 0 });
            world.check();
        }
        step(&mut world, Op::Trim { keep: 0 });
        world.check();
        assert_eq!(world.bench.cache.usage().entries, 0);
        world.bench.finish();
    }
}
