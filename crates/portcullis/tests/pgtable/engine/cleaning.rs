//! A walker that does not see what CPUs store until they write it back: what it has been shown is always right.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis::addr::PhysAddr;
use portcullis::pgtable::{Entry, Format, Layout, PageTable, VtdSecondStage};
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
use portcullis::sync::{AtomicU64, Ordering};
use portcullis_model::Memory;
use portcullis_model::open::{OpenTable, Simulated};

use super::support::*;
use crate::common::{PAGE, vtd};

const LARGE: u64 = 2 << 20;
const LINE: u64 = 64;

type Hook = Box<dyn FnOnce() + Send>;

/// Frames and what the walker has seen of them, line by line.
struct Recording {
    memory: Arc<Memory>,
    state: Mutex<State>,
    /// Runs before a pointer to a table is written back.
    hook: Mutex<Option<Hook>>,
}

#[derive(Default)]
struct State {
    /// Where the words of a frame are, and its number.
    frames: BTreeMap<usize, u64>,
    seen: HashMap<u64, [u64; 8]>,
    times: HashMap<u64, u32>,
}

impl Recording {
    fn new() -> Arc<Self> {
        Arc::new(Self { memory: Memory::new(64 << 20), state: Mutex::default(), hook: Mutex::default() })
    }

    fn pointed_to(&self, word: u64) -> Option<PhysAddr> {
        match vtd(4).decode(word, 2) {
            Entry::Table { table, .. } if self.memory.is_allocated(table) => Some(table),
            _ => None,
        }
    }

    fn line(&self, line: u64) -> [u64; 8] {
        let table = self.memory.table_at(PhysAddr::new(line & !(FRAME_SIZE - 1)));
        let first = (line % FRAME_SIZE / 8) as usize;
        std::array::from_fn(|index| table[first + index].load(Ordering::Relaxed))
    }

    fn is_clean(&self, state: &State, frame: u64) -> bool {
        (frame..frame + FRAME_SIZE).step_by(LINE as usize).all(|line| state.seen.contains_key(&line))
    }

    /// What is linked is what the walker sees of it.
    #[track_caller]
    fn assert_all_seen(&self) {
        let state = self.state.lock().unwrap();
        for &frame in state.frames.values() {
            for line in (frame..frame + FRAME_SIZE).step_by(LINE as usize) {
                assert_eq!(state.seen.get(&line), Some(&self.line(line)), "the line at {line:#x}");
            }
        }
    }

    /// How often each line was written back since the last call.
    fn times(&self) -> HashMap<u64, u32> {
        std::mem::take(&mut self.state.lock().unwrap().times)
    }

    /// Where the walker's walk ends.
    fn walk(&self, table: &PageTable<Arc<Self>, VtdSecondStage>, iova: u64) -> Option<u64> {
        let state = self.state.lock().unwrap();
        let format = table.format();
        let (mut frame, mut level) = (table.root(), format.levels());
        loop {
            let at = frame.get() + 8 * format.index(iova, level) as u64;
            let line = state.seen.get(&(at & !(LINE - 1))).expect("never written back");
            let entry = line[(at % LINE / 8) as usize];
            match format.decode(entry, level) {
                Entry::Absent => return None,
                Entry::Leaf { .. } => {
                    return Some(format.page(entry, level).get() + iova % (1 << format.shift(level)));
                }
                Entry::Table { table, level: below } => (frame, level) = (table, below),
            }
        }
    }
}

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for Recording {}

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for Recording {
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.memory.alloc(count)?;
        let mut state = self.state.lock().unwrap();
        for frame in (0..count as u64).map(|number| first.get() + number * FRAME_SIZE) {
            state.frames.insert(self.memory.table_at(PhysAddr::new(frame)).as_ptr() as usize, frame);
            // What the walker's last user left there.
            state.seen.retain(|line, _| line & !(FRAME_SIZE - 1) != frame);
        }
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        self.state
            .lock()
            .unwrap()
            .frames
            .retain(|_, frame| !(first.get()..first.get() + count as u64 * FRAME_SIZE).contains(frame));
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.free(first, count) }
    }

    fn clean(&self, words: &[AtomicU64]) {
        if words.iter().any(|word| self.pointed_to(word.load(Ordering::Relaxed)).is_some()) {
            // Out of the lock: others come here meanwhile.
            let hook = self.hook.lock().unwrap().take();
            hook.into_iter().for_each(|hook| hook());
        }
        let mut state = self.state.lock().unwrap();
        let at = words.as_ptr() as usize;
        let (&base, &frame) = state.frames.range(..=at).next_back().unwrap();
        let first = frame + (at - base) as u64;
        let last = first + 8 * words.len() as u64 - 1;
        assert!(at - base < 8 * TABLE_ENTRIES && last < frame + FRAME_SIZE, "words of one frame");
        if !self.is_clean(&state, frame) {
            let frames = state.frames.values();
            let mut lines = frames.flat_map(|frame| (*frame..frame + FRAME_SIZE).step_by(LINE as usize));
            let linked = lines.any(|line| {
                self.line(line).into_iter().any(|word| self.pointed_to(word) == Some(PhysAddr::new(frame)))
            });
            assert!(!linked, "the table at {frame:#x} was linked before it was written back");
        }
        for line in (first & !(LINE - 1)..=last).step_by(LINE as usize) {
            let now = self.line(line);
            state.seen.insert(line, now);
            *state.times.entry(line).or_default() += 1;
            for table in now.into_iter().filter_map(|word| self.pointed_to(word)) {
                assert!(self.is_clean(&state, table.get()), "the walker is led into rubbish at {table}");
            }
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.table(frame) }
    }
}

#[test]
fn the_walker_is_shown_every_change_once() {
    let frames = Recording::new();
    let table = make(Arc::clone(&frames), VtdSecondStage::new(4, 1, 52).unwrap());
    // Three lowest tables and the way there.
    map(&table, LARGE - 3 * PAGE, LARGE + 12 * PAGE).unwrap();
    frames.assert_all_seen();
    unmap(&table, 0, 4 * LARGE);
    frames.assert_all_seen();
    frames.times();
    let once = |lines: usize| {
        frames.assert_all_seen();
        let times = frames.times();
        assert!(times.values().all(|times| *times == 1), "{times:x?}");
        assert_eq!(times.len(), lines);
    };
    // The tables are there: 3 entries of a line, 64 lines, 9 entries in two lines.
    map(&table, LARGE - 3 * PAGE, LARGE + 12 * PAGE).unwrap();
    once(1 + 64 + 2);
    // A list of single pages that share a table is one run each.
    assert_eq!(unmap(&table, LARGE + 8 * PAGE, 16 * PAGE), 16 * PAGE);
    once(2);
    map(&table, LARGE + 8 * PAGE, 16 * PAGE).unwrap();
    once(2);
    assert_eq!(unmap(&table, LARGE + 8 * PAGE, 16 * PAGE), 16 * PAGE);
    once(2);
    map(&table, LARGE + 8 * PAGE, PAGE).unwrap();
    once(1);
    assert_eq!(unmap(&table, LARGE + 8 * PAGE, PAGE), PAGE);
    once(1);
    // What is undone.
    assert!(map(&table, LARGE + 9 * PAGE, 20 * PAGE).is_err());
    frames.assert_all_seen();
    unmap(&table, 0, 4 * LARGE);
    reclaim(&table);
    frames.assert_all_seen();
    drop(table);
    let table = make(Arc::clone(&frames), vtd(4));
    map(&table, 8 * LARGE, LARGE).unwrap();
    assert_eq!(unmap(&table, 8 * LARGE + PAGE, PAGE), PAGE);
    frames.assert_all_seen();
    assert_accounted(&frames.memory, &table);
}

#[test]
fn a_broken_page_is_shown_as_such() {
    let frames = Recording::new();
    let table = make(Arc::clone(&frames), BreakFirst(vtd(4)));
    map(&table, LARGE, LARGE).unwrap();
    for confirmed in [false, true] {
        let removed = unmap_telling(&table, range(LARGE, PAGE), |_| {
            let state = frames.state.lock().unwrap();
            let leaves = state.seen.values().flatten().filter(|word| **word & 0x80 != 0);
            assert_eq!(leaves.count(), 0, "the walker sees it still");
            confirmed
        });
        assert_eq!(removed.bytes, if confirmed { PAGE } else { 0 });
        frames.assert_all_seen();
    }
}

/// Another CPU finds the table that this one has just linked and not written back yet.
#[test]
fn a_map_through_another_cpus_new_table_can_be_walked() {
    let frames = Recording::new();
    let table = Arc::new(make(Arc::clone(&frames), vtd(4)));
    let other = Arc::clone(&table);
    let (result, mapping) = std::sync::mpsc::channel();
    let seen = Arc::clone(&frames);
    *frames.hook.lock().unwrap() = Some(Box::new(move || {
        let mapping = std::thread::spawn(move || {
            map(&other, 5 * PAGE, PAGE).unwrap();
            assert_eq!(
                seen.walk(&other, 5 * PAGE),
                Some(ELSEWHERE + 5 * PAGE),
                "mapped and cannot be walked"
            );
        });
        result.send(mapping).unwrap();
        // Long enough for it to be done, if it did not wait.
        std::thread::sleep(Duration::from_millis(20));
    }));
    map(&table, 0, PAGE).unwrap();
    assert_eq!(frames.walk(&table, 0), Some(ELSEWHERE));
    mapping.recv().unwrap().join().unwrap();
    frames.assert_all_seen();
    assert_accounted(&frames.memory, &table);
}

/// Another CPU unmaps a part of the page that this one has just split and not written back yet.
#[test]
fn a_part_of_a_page_that_is_being_split_cannot_be_walked_once_unmapped() {
    let frames = Recording::new();
    let table = Arc::new(make(Arc::clone(&frames), vtd(4)));
    map(&table, LARGE, LARGE).unwrap();
    let other = Arc::clone(&table);
    let (result, unmapping) = std::sync::mpsc::channel();
    let seen = Arc::clone(&frames);
    *frames.hook.lock().unwrap() = Some(Box::new(move || {
        let unmapping = std::thread::spawn(move || {
            assert_eq!(unmap(&other, LARGE + 5 * PAGE, PAGE), PAGE);
            assert_eq!(seen.walk(&other, LARGE + 5 * PAGE), None, "unmapped and can be walked");
        });
        result.send(unmapping).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }));
    assert_eq!(unmap(&table, LARGE, PAGE), PAGE);
    unmapping.recv().unwrap().join().unwrap();
    frames.assert_all_seen();
    assert_accounted(&frames.memory, &table);
}

/// A reclaim fails just when another CPU has put its table back and not written that back yet: who maps there as soon
/// as the mark is off is seen.
#[test]
fn a_map_through_a_table_that_was_put_back_beside_a_failing_reclaim_can_be_walked() {
    let frames = Recording::new();
    let table = Arc::new(make(Arc::clone(&frames), vtd(4)));
    map(&table, 0, PAGE).unwrap();
    assert_eq!(unmap(&table, 0, PAGE), PAGE);
    let set_hook = |hook: Hook| *frames.hook.lock().unwrap() = Some(hook);
    let (putting_back, is_putting_back) = std::sync::mpsc::channel();
    let (failed, has_failed) = std::sync::mpsc::channel();
    let mut hooks = Some((putting_back, has_failed));
    let mut second = None;
    let reclaimed = table.shrink(&*crate::common::PLATFORM, || {
        let (putting_back, has_failed) = hooks.take().unwrap();
        set_hook(Box::new(move || {
            putting_back.send(()).unwrap();
            has_failed.recv().unwrap();
        }));
        let other = Arc::clone(&table);
        second = Some(std::thread::spawn(move || map(&other, 5 * PAGE, PAGE).unwrap()));
        is_putting_back.recv().unwrap();
        // When the next CPU writes the entry back, which is without its mark by then.
        let (third, seen) = (Arc::clone(&table), Arc::clone(&frames));
        set_hook(Box::new(move || {
            let mapping = std::thread::spawn(move || {
                map(&third, 6 * PAGE, PAGE).unwrap();
                seen.walk(&third, 6 * PAGE)
            });
            assert_eq!(mapping.join().unwrap(), Some(ELSEWHERE + 6 * PAGE), "mapped and cannot be walked");
        }));
        Err(())
    });
    assert_eq!(reclaimed, Err(()));
    failed.send(()).unwrap();
    second.unwrap().join().unwrap();
    assert!([5, 6].iter().all(|page| frames.walk(&table, page * PAGE) == Some(ELSEWHERE + page * PAGE)));
    frames.assert_all_seen();
    assert_accounted(&frames.memory, &table);
}
