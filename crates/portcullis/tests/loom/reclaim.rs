//! Tables are reclaimed while other CPUs walk them: nothing is lost, and nobody is in a table that is freed.

use std::sync::Mutex;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::percpu::Turn;
use portcullis::pgtable::{Entry, Format, PageTable};
use portcullis::platform::{Frames, Platform};
use portcullis::sync::Ordering;

use super::frames::{Cpu, LoomFrames, Tiny};

const MAIN: Cpu = Cpu(Some(0));
const OTHER: Cpu = Cpu(Some(1));
const PAGE: u64 = 16;
/// The root, a table for each half, and one more.
const FRAMES: usize = 4;

fn page(number: u64) -> IovaRange {
    IovaRange::new(Iova::new(number * PAGE), PAGE).unwrap()
}

fn memory(number: u64) -> PhysAddr {
    PhysAddr::new(0x100 + number * PAGE)
}

/// Runs `f` in an exclusive section of the CPU; `false` without one.
fn in_turn(table: &PageTable<LoomFrames, Tiny>, cpu: &Cpu, f: impl FnOnce(&Turn<'_>) -> bool) -> bool {
    cpu.with_cpu(|lent| {
        // SAFETY: the CPU was just lent, and the section flags are for its platform.
        let turn = lent.zip(table.marks_for(cpu)).and_then(|(lent, marks)| unsafe { marks.turn(lent) });
        turn.is_some_and(|turn| f(&turn))
    })
}

/// Maps a page by the short way; `false` where that is not done.
fn map_fast(table: &PageTable<LoomFrames, Tiny>, cpu: &Cpu, number: u64) -> bool {
    let rights = Permissions::READ_WRITE.into();
    // SAFETY: what plays the hardware reads the table, and no memory.
    in_turn(table, cpu, |turn| unsafe { table.map_in(turn, page(number), memory(number), rights) })
}

/// A table, and the hardware that has cached where the table of the lower half is.
struct Machine {
    table: PageTable<LoomFrames, Tiny>,
    frames: LoomFrames,
    /// A plain lock, never held where the model checker may switch.
    cached: Mutex<Option<PhysAddr>>,
}

impl Machine {
    /// Pages `mapped` are mapped; the table of the lower half is there in any case.
    fn new(mapped: &[u64]) -> Arc<Self> {
        let frames = LoomFrames::new(FRAMES, true);
        let table = PageTable::for_cpus(frames.clone(), Tiny, 2).unwrap();
        let machine = Self { table, frames, cached: Mutex::new(None) };
        machine.map(&MAIN, 0);
        mapped.iter().filter(|number| **number != 0).for_each(|number| machine.map(&MAIN, *number));
        let lower = machine.lower();
        *machine.cached.lock().unwrap() = lower;
        if !mapped.contains(&0) {
            assert!(machine.unmap(&MAIN, 0));
        }
        Arc::new(machine)
    }

    fn map(&self, cpu: &Cpu, number: u64) {
        let rights = Permissions::READ_WRITE;
        // SAFETY: what plays the hardware reads the table, and no memory.
        unsafe { self.table.map(cpu, page(number), memory(number), rights) }.unwrap();
        assert!(self.is_mapped(cpu, number), "mapped and not found");
    }

    /// As `map`, by the short way where that does it.
    fn map_near(&self, cpu: &Cpu, number: u64) {
        if !map_fast(&self.table, cpu, number) {
            self.map(cpu, number);
        }
    }

    /// Unmaps a page that is mapped, by the short way where that does it.
    fn unmap_near(&self, cpu: &Cpu, number: u64) {
        let is_unmapped = in_turn(&self.table, cpu, |turn| self.table.unmap_in(turn, page(number)));
        assert!(is_unmapped || self.unmap(cpu, number));
    }

    /// Has the other CPU remember the table of the lower half, in which nothing is mapped.
    fn remember(&self) {
        assert!(map_fast(&self.table, &OTHER, 0));
        self.unmap_near(&OTHER, 0);
    }

    fn unmap(&self, cpu: &Cpu, number: u64) -> bool {
        // SAFETY: nothing is said to be forgotten.
        unsafe { self.table.unmap(cpu, page(number), &mut |_| false) }.bytes == PAGE
    }

    fn is_mapped(&self, cpu: &Cpu, number: u64) -> bool {
        let found = self.table.translate(cpu, page(number).start()).map(|(phys, _)| phys);
        assert!(found.is_none_or(|phys| phys == memory(number)), "page {number} leads to {found:?}");
        found.is_some()
    }

    /// Where the tables say that the one of the lower half is.
    fn lower(&self) -> Option<PhysAddr> {
        // SAFETY: the root is in use until the machine is gone.
        let root = unsafe { self.frames.table(self.table.root()) };
        match Tiny.decode(root[0].load(Ordering::Acquire), 2) {
            Entry::Table { table, .. } => Some(table),
            _ => None,
        }
    }

    /// An access of a device to a page of the lower half. Once found, the table is remembered.
    fn access(&self, number: u64) -> bool {
        let cached = *self.cached.lock().unwrap();
        let Some(table) = cached.or_else(|| self.lower()) else {
            return false;
        };
        // SAFETY: that it is in use is what the test checks: the frames panic if not.
        let words = unsafe { self.frames.table(table) };
        words[number as usize].load(Ordering::Relaxed)
            == Tiny.leaf(memory(number), Tiny.leaf_sizes()[0], Permissions::READ_WRITE.into())
    }

    fn invalidate(&self) {
        // The worst it can do: to walk again at once.
        let lower = self.lower();
        *self.cached.lock().unwrap() = lower;
    }

    fn reclaim(&self, cpu: &Cpu) -> usize {
        let forget = || {
            self.invalidate();
            Ok::<_, ()>(())
        };
        // SAFETY: what plays the hardware reads words that stay, and panics where they are of a frame that is free.
        unsafe { self.table.reclaim(cpu, forget) }.unwrap()
    }

    /// In the end everything can be freed.
    fn finish(&self) {
        (0..4).for_each(|number| {
            self.unmap(&MAIN, number);
        });
        self.reclaim(&MAIN);
        assert_eq!(self.frames.free_frames(), FRAMES - 1);
        assert_eq!(self.table.table_bytes(), 4096);
    }
}

fn race(mapped: &'static [u64], other: fn(&Machine), main: fn(&Machine), after: fn(&Machine)) {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(3);
    model.check(move || {
        let machine = Machine::new(mapped);
        let beside = Arc::clone(&machine);
        let beside = thread::spawn(move || other(&beside));
        main(&machine);
        beside.join().unwrap();
        after(&machine);
        machine.finish();
    });
}

#[test]
fn a_map_beside_a_reclaim_is_found() {
    let reclaim = |machine: &Machine| {
        machine.reclaim(&MAIN);
    };
    race(&[], |machine| machine.map(&OTHER, 1), reclaim, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}

#[test]
fn and_reached_by_the_hardware_as_soon_as_it_is_there() {
    let map = |machine: &Machine| {
        machine.map(&OTHER, 1);
        assert!(machine.access(1), "mapped and not reached");
    };
    let reclaim = |machine: &Machine| {
        machine.reclaim(&MAIN);
    };
    race(&[], map, reclaim, |machine| assert!(machine.access(1)));
}

#[test]
fn a_map_without_a_cpu_beside_a_reclaim_is_found() {
    let map = |machine: &Machine| machine.map(&Cpu(None), 1);
    let reclaim = |machine: &Machine| {
        machine.reclaim(&MAIN);
    };
    race(&[], map, reclaim, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}

#[test]
fn a_map_beside_a_reclaim_that_fails_is_found() {
    let map = |machine: &Machine| {
        machine.map(&OTHER, 1);
        assert!(machine.access(1), "mapped and not reached");
    };
    let reclaim = |machine: &Machine| {
        // SAFETY: nothing is said to be forgotten.
        let _ = unsafe { machine.table.reclaim(&MAIN, || Err(())) };
    };
    race(&[], map, reclaim, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}

#[test]
fn a_look_beside_a_reclaim_finds_the_page_or_nothing() {
    let look = |machine: &Machine| {
        machine.is_mapped(&OTHER, 0);
        machine.is_mapped(&OTHER, 0);
    };
    let reclaim = |machine: &Machine| {
        assert!(machine.unmap(&MAIN, 0));
        assert_eq!(machine.reclaim(&MAIN), 4096);
        // In the place of what was freed, in the tables and in memory.
        machine.map(&MAIN, 2);
    };
    race(&[0], look, reclaim, |machine| assert!(!machine.is_mapped(&MAIN, 0)));
}

#[test]
fn an_unmap_beside_a_reclaim_is_done() {
    let unmap = |machine: &Machine| assert!(machine.unmap(&OTHER, 1));
    let reclaim = |machine: &Machine| {
        assert!(machine.unmap(&MAIN, 0));
        machine.reclaim(&MAIN);
    };
    race(&[0, 1], unmap, reclaim, |machine| assert!(!machine.is_mapped(&MAIN, 1)));
}

/// As [`race`], where the other CPU remembers the table of the lower half.
fn race_near(preemptions: usize, other: fn(&Machine), main: fn(&Machine), after: fn(&Machine)) {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let machine = Machine::new(&[]);
        machine.remember();
        let beside = Arc::clone(&machine);
        let beside = thread::spawn(move || other(&beside));
        main(&machine);
        beside.join().unwrap();
        after(&machine);
        machine.finish();
    });
}

#[test]
fn a_map_in_a_remembered_table_beside_its_reclaim_is_found_and_reached() {
    let map = |machine: &Machine| {
        machine.map_near(&OTHER, 1);
        assert!(machine.access(1), "mapped and not reached");
    };
    let reclaim = |machine: &Machine| {
        machine.reclaim(&MAIN);
    };
    race_near(3, map, reclaim, |machine| assert!(machine.is_mapped(&MAIN, 1) && machine.access(1)));
}

/// With one frame for both halves, the table of the upper one is where that of the lower one was.
#[test]
fn a_remembered_table_that_is_freed_and_another_s_is_not_mapped_into() {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(3);
    model.check(|| {
        let frames = LoomFrames::new(2, true);
        let table = Arc::new(PageTable::for_cpus(frames, Tiny, 2).unwrap());
        let rights = Permissions::READ_WRITE;
        // SAFETY: no hardware walks the table.
        let map = |number| unsafe { table.map(&MAIN, page(number), memory(number), rights) }.is_ok();
        let translate = |number| table.translate(&MAIN, page(number).start()).map(|(phys, _)| phys);
        // SAFETY: nothing is said to be forgotten.
        let unmap = |number| unsafe { table.unmap(&MAIN, page(number), &mut |_| false) }.bytes;
        assert!(map(0) && unmap(0) == PAGE);
        assert!(map_fast(&table, &OTHER, 0));
        assert_eq!(unmap(0), PAGE);
        let beside = Arc::clone(&table);
        let beside = thread::spawn(move || map_fast(&beside, &OTHER, 1));
        // SAFETY: no hardware walks the table.
        let reclaim = || unsafe { table.reclaim(&MAIN, || Ok::<_, ()>(())) };
        reclaim().unwrap();
        let upper = map(2);
        let near = beside.join().unwrap();
        // The table was kept for what was entered, or it was freed and nothing was.
        assert!(near != upper, "near {near}, upper {upper}");
        assert_eq!(translate(1), near.then_some(memory(1)));
        assert_eq!((translate(2), translate(3)), (upper.then_some(memory(2)), None));
        (0..4).for_each(|number| {
            unmap(number);
        });
        assert_eq!(reclaim(), Ok(4096));
    });
}

#[test]
fn a_table_that_is_remembered_beside_a_reclaim_is_none_that_goes() {
    let map = |machine: &Machine| {
        machine.map_near(&OTHER, 1);
        machine.unmap_near(&OTHER, 1);
        machine.map_near(&OTHER, 1);
    };
    let reclaim = |machine: &Machine| {
        machine.reclaim(&MAIN);
    };
    race_near(2, map, reclaim, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}

#[test]
fn two_reclaims_free_nothing_twice() {
    let reclaim = |machine: &Machine| {
        machine.reclaim(&OTHER);
    };
    let main = |machine: &Machine| {
        machine.reclaim(&MAIN);
        machine.map(&MAIN, 1);
    };
    race(&[], reclaim, main, |machine| assert!(machine.is_mapped(&MAIN, 1)));
}
