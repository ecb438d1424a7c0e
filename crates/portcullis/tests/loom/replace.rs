//! A page of several entries is split while a device goes on using the rest of it, and other CPUs are at work beside it.

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{Attributes, Entry, Format, LeafSize, PageTable};
use portcullis::platform::Frames;
use portcullis::sync::{Mutex, Ordering};

use super::frames::{Cpu, LoomFrames, Tiny};

const MAIN: Cpu = Cpu(Some(0));
const OTHER: Cpu = Cpu(Some(1));
const PAGE: u64 = 16;
const FRAMES: usize = 5;
const RIGHTS: Permissions = Permissions::READ_WRITE;

/// [`Tiny`], in which the two entries of a lowest table may be one page: then they are the same.
#[derive(Debug, Clone, Copy)]
struct Pairs;

/// In a leaf: one of a pair.
const PAIR: u64 = 2;

static SIZES: [LeafSize; 2] = [LeafSize { level: 1, run: 0 }, LeafSize { level: 1, run: 1 }];

// SAFETY: that of `Tiny`, and nothing but the model's device reads the tables.
unsafe impl Format for Pairs {
    const GRANULE_SHIFT: u32 = Tiny::GRANULE_SHIFT;
    const MARK: u64 = Tiny::MARK;
    const SPLIT: u64 = Tiny::SPLIT;
    const PRESENT: u64 = Tiny::PRESENT;
    const KIND: u64 = Tiny::KIND;
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        "pairs"
    }

    fn levels(&self) -> u32 {
        Tiny.levels()
    }

    fn input_bits(&self) -> u32 {
        Tiny.input_bits()
    }

    fn last_phys(&self) -> PhysAddr {
        Tiny.last_phys()
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        &SIZES
    }

    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64 {
        Tiny.leaf(page, SIZES[0], attributes) | if size.run > 0 { PAIR } else { 0 }
    }

    fn stride(&self, size: LeafSize) -> u64 {
        if size.run > 0 { 0 } else { PAGE }
    }

    fn table(&self, table: PhysAddr, level: u32) -> u64 {
        Tiny.table(table, level)
    }

    fn decode(&self, entry: u64, level: u32) -> Entry {
        match Tiny.decode(entry, level) {
            Entry::Leaf { .. } if entry & PAIR != 0 => Entry::Leaf { run: 1 },
            other => other,
        }
    }

    fn page(&self, entry: u64, _: u32) -> PhysAddr {
        PhysAddr::new(entry & if entry & PAIR != 0 { !0x1f } else { !0xf })
    }

    fn attributes(&self, _: u64, _: u32) -> Attributes {
        RIGHTS.into()
    }
}

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::new(Iova::new(first * PAGE), count * PAGE).unwrap()
}

fn memory(number: u64) -> PhysAddr {
    PhysAddr::new(0x100 + number * PAGE)
}

/// A table whose lower half is one page of two entries, and the hardware that may remember where its table is.
struct Machine {
    table: PageTable<LoomFrames, Pairs>,
    frames: LoomFrames,
    /// Held while it walks: an invalidation is confirmed when the walks that began before are over.
    cached: Mutex<Option<PhysAddr>>,
}

impl Machine {
    fn new() -> Arc<Self> {
        let frames = LoomFrames::new(FRAMES, false);
        let table = PageTable::for_cpus(frames.clone(), Pairs, 2).unwrap();
        let machine = Self { table, frames, cached: Mutex::new(None) };
        machine.map(&MAIN, 0, 2);
        Arc::new(machine)
    }

    fn map(&self, cpu: &Cpu, first: u64, count: u64) {
        // SAFETY: nothing walks the tables but the model's device, which reads no memory.
        unsafe { self.table.map(cpu, pages(first, count), memory(first), RIGHTS) }.unwrap();
    }

    /// Bytes removed, and kept; `confirms` is the hardware.
    fn unmap(&self, cpu: &Cpu, first: u64, count: u64, confirms: bool) -> (u64, u64) {
        let mut forget = |_| {
            // At the worst it walks again at once.
            self.remember();
            confirms
        };
        // SAFETY: what plays the hardware reads words that stay, and panics where they are of a frame that is free.
        let unmapped = unsafe { self.table.unmap(cpu, pages(first, count), &mut forget) };
        (unmapped.bytes / PAGE, unmapped.kept / PAGE)
    }

    fn is_mapped(&self, cpu: &Cpu, number: u64) -> bool {
        let found = self.table.translate(cpu, pages(number, 1).start()).map(|(phys, _)| phys);
        assert!(found.is_none_or(|phys| phys == memory(number)), "page {number} leads to {found:?}");
        found.is_some()
    }

    fn lower(&self) -> Option<PhysAddr> {
        // SAFETY: the root is in use until the machine is gone.
        let root = unsafe { self.frames.table(self.table.root()) };
        match Pairs.decode(root[0].load(Ordering::Acquire), 2) {
            Entry::Table { table, .. } => Some(table),
            _ => None,
        }
    }

    fn remember(&self) {
        let mut cached = self.cached.lock();
        *cached = self.lower();
    }

    /// Whether the device gets through to a page of the lower half, by the table that it remembers or finds.
    fn access(&self, number: u64) -> bool {
        let cached = self.cached.lock();
        let Some(table) = cached.or_else(|| self.lower()) else { return false };
        // SAFETY: that it is in use is what the test checks: the frames panic if not.
        let words = unsafe { self.frames.table(table) };
        let entry = words[number as usize].load(Ordering::Relaxed);
        if entry & Pairs::PRESENT == 0 {
            return false;
        }
        if entry & PAIR != 0 {
            let other = words[number as usize ^ 1].load(Ordering::Relaxed);
            assert_eq!(entry, other, "the entries of one page are not the same");
        }
        let page = Pairs.page(entry, 1).get() + if entry & PAIR != 0 { number % 2 * PAGE } else { 0 };
        assert_eq!(page, memory(number).get());
        true
    }

    fn reclaim(&self, cpu: &Cpu) {
        let forget = || {
            self.remember();
            Ok::<_, ()>(())
        };
        // SAFETY: as in `unmap`.
        unsafe { self.table.reclaim(cpu, forget) }.unwrap();
    }

    /// In the end everything can be freed, and the device reaches nothing.
    fn finish(&self) {
        self.unmap(&MAIN, 0, 4, true);
        assert!(!self.access(0) && !self.access(1));
        self.reclaim(&MAIN);
        assert_eq!(self.frames.free_frames(), FRAMES - 1);
        assert_eq!(self.table.table_bytes(), 4096);
    }
}

fn race(preemptions: usize, other: fn(&Machine), main: fn(&Machine), after: fn(&Machine)) {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let machine = Machine::new();
        machine.remember();
        let beside = Arc::clone(&machine);
        let beside = thread::spawn(move || other(&beside));
        main(&machine);
        beside.join().unwrap();
        after(&machine);
        machine.finish();
    });
}

fn split(machine: &Machine) {
    assert_eq!(machine.unmap(&MAIN, 0, 1, true), (1, 0));
}

#[test]
fn a_device_always_gets_through_to_what_stays() {
    let access = |machine: &Machine| {
        assert!(machine.access(1));
        assert!(machine.access(1));
    };
    race(4, access, split, |machine| assert!(machine.access(1) && !machine.is_mapped(&MAIN, 0)));
}

#[test]
fn a_look_beside_it_finds_the_page() {
    let look = |machine: &Machine| {
        assert!(machine.is_mapped(&OTHER, 1));
        machine.is_mapped(&OTHER, 0);
    };
    race(3, look, split, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}

#[test]
fn an_unmap_of_another_part_is_done_when_it_returns() {
    let unmap = |machine: &Machine| {
        assert_eq!(machine.unmap(&OTHER, 1, 1, true), (1, 0));
        assert!(!machine.access(1), "unmapped and reached by what the device remembers");
    };
    race(2, unmap, split, |machine| assert!(!machine.is_mapped(&MAIN, 0) && !machine.is_mapped(&MAIN, 1)));
}

#[test]
fn a_map_beside_it_is_reached() {
    let remap = |machine: &Machine| {
        // All of it goes, and one comes back.
        machine.unmap(&OTHER, 1, 1, true);
        machine.map(&OTHER, 1, 1);
        assert!(machine.access(1), "mapped and not reached");
    };
    race(2, remap, split, |machine| assert!(machine.access(1)));
}

#[test]
fn what_is_unmapped_after_a_split_that_was_not_confirmed_is_not_reached() {
    let fail = |machine: &Machine| {
        assert_eq!(machine.unmap(&MAIN, 0, 1, false), (0, 1));
        assert!(machine.is_mapped(&MAIN, 0) && machine.is_mapped(&MAIN, 1));
        // The device forgets translations, not tables.
        assert_eq!(machine.unmap(&MAIN, 0, 2, false), (2, 0));
        assert!(!machine.access(0) && !machine.access(1));
    };
    race(2, |_| (), fail, |_| ());
}

#[test]
fn a_reclaim_beside_it_frees_nothing_in_use() {
    let reclaim = |machine: &Machine| machine.reclaim(&OTHER);
    race(2, reclaim, split, |machine| assert!(machine.access(1)));
}

#[test]
fn two_splits_and_a_reclaim_are_done_one_after_the_other() {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(2);
    model.check(|| {
        let machine = Machine::new();
        machine.map(&MAIN, 2, 2);
        machine.remember();
        let beside = |work: fn(&Machine)| {
            let machine = Arc::clone(&machine);
            thread::spawn(move || work(&machine))
        };
        let upper = beside(|machine| assert_eq!(machine.unmap(&OTHER, 2, 1, true), (1, 0)));
        // On no CPU of its own.
        let reclaim = beside(|machine| machine.reclaim(&Cpu(None)));
        split(&machine);
        upper.join().unwrap();
        reclaim.join().unwrap();
        assert!(machine.access(1));
        assert_eq!([0, 1, 2, 3].map(|number| machine.is_mapped(&MAIN, number)), [false, true, false, true]);
        // A split that is confirmed leaves no second table.
        assert_eq!(machine.frames.free_frames(), FRAMES - 3);
        machine.finish();
    });
}
