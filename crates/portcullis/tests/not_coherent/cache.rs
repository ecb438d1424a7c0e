//! A CPU's data cache over simulated memory. Devices read and write the memory alone; the CPU reads
//! and writes its lines. The cache writes lines back, drops them and prefetches others whenever it
//! likes. A clean may drop lines, and an invalidate may write dirty ones back first, as the trait
//! says.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use portcullis::addr::PhysAddr;
use portcullis::platform::{CacheMaintenance, CopyMemory, FRAME_SIZE, Frames, Table};
use portcullis_model::Memory;

use crate::dice::Dice;

pub const LINE: u64 = 128;

pub struct Cache {
    memory: Arc<Memory>,
    line: u64,
    /// How often it was asked for the size of its lines.
    pub asked: AtomicUsize,
    state: Mutex<State>,
    /// Called before each clean (`true`) and invalidate (`false`).
    watch: Mutex<Option<Watch>>,
}

type Watch = Box<dyn Fn(bool) + Send>;

struct State {
    /// Lines by their numbers; `None` where one was seen and is not held now.
    lines: BTreeMap<u64, Option<Line>>,
    dice: Dice,
    /// Whether it evicts and prefetches.
    restless: bool,
    /// Whether a clean and an invalidate do both; where it is restless, the dice say.
    does_both: bool,
    /// What was cleaned and invalidated: O for out of the cache, I for into it.
    calls: Vec<(char, u64, u64)>,
}

struct Line {
    bytes: Vec<u8>,
    dirty: bool,
}

impl State {
    fn does_both(&mut self) -> bool {
        if self.restless { self.dice.one_in(2) } else { self.does_both }
    }

    fn fetch(&mut self, memory: &Memory, line: u64, number: u64) -> &mut Line {
        let held = self.lines.entry(number).or_default();
        held.get_or_insert_with(|| {
            let mut bytes = vec![0; line as usize];
            memory.read(PhysAddr::new(number * line), &mut bytes).unwrap();
            Line { bytes, dirty: false }
        })
    }

    fn write_back(&mut self, memory: &Memory, line: u64, number: u64) {
        if let Some(Some(held)) = self.lines.get_mut(&number)
            && held.dirty
        {
            memory.write(PhysAddr::new(number * line), &held.bytes).unwrap();
            held.dirty = false;
        }
    }

    fn drop_line(&mut self, number: u64) {
        if let Some(held) = self.lines.get_mut(&number) {
            *held = None;
        }
    }
}

impl Cache {
    pub fn new(memory: &Arc<Memory>, line: u64, seed: u64) -> Arc<Self> {
        let (lines, dice, calls) = (BTreeMap::new(), Dice::new(seed), Vec::new());
        let state = Mutex::new(State { lines, dice, restless: false, does_both: false, calls });
        let (watch, asked) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { memory: Arc::clone(memory), line, asked, state, watch })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn watch(&self, watch: impl Fn(bool) + Send + 'static) {
        *self.watch.lock().unwrap() = Some(Box::new(watch));
    }

    fn tell(&self, cleans: bool) {
        self.watch.lock().unwrap().iter().for_each(|watch| watch(cleans));
    }

    pub fn set_restless(&self, restless: bool) {
        self.state().restless = restless;
    }

    pub fn set_does_both(&self, does_both: bool) {
        self.state().does_both = does_both;
    }

    /// Does what a cache does by itself, to some lines that it has seen.
    pub fn stir(&self) {
        let mut state = self.state();
        if !state.restless || state.lines.is_empty() {
            return;
        }
        for _ in 0..state.dice.below(64) {
            let near = state.dice.below(1 << 40) % (state.lines.keys().next_back().unwrap() + 1);
            let number = *state.lines.range(near..).next().unwrap().0;
            if state.dice.one_in(2) {
                state.write_back(&self.memory, self.line, number);
                state.drop_line(number);
            } else {
                state.fetch(&self.memory, self.line, number);
            }
        }
    }

    /// Has every line written back, or every line that it has seen prefetched.
    pub fn evict_all(&self) {
        let mut state = self.state();
        for number in state.lines.keys().copied().collect::<Vec<_>>() {
            state.write_back(&self.memory, self.line, number);
            state.drop_line(number);
        }
    }

    pub fn prefetch_all(&self) {
        let mut state = self.state();
        for number in state.lines.keys().copied().collect::<Vec<_>>() {
            state.fetch(&self.memory, self.line, number);
        }
    }

    /// How often something was cleaned, and how often invalidated.
    pub fn calls(&self) -> (usize, usize) {
        let state = self.state();
        let count = |wanted| state.calls.iter().filter(|(kind, ..)| *kind == wanted).count();
        (count('O'), count('I'))
    }

    /// What the CPU reads.
    pub fn read(&self, at: PhysAddr, out: &mut [u8]) {
        self.stir();
        let mut state = self.state();
        self.each_line(at, out.len(), |number, inside, part| {
            out[part].copy_from_slice(&state.fetch(&self.memory, self.line, number).bytes[inside]);
        });
    }

    /// What the CPU writes.
    pub fn write(&self, at: PhysAddr, bytes: &[u8]) {
        {
            let mut state = self.state();
            self.each_line(at, bytes.len(), |number, inside, part| {
                let line = state.fetch(&self.memory, self.line, number);
                line.bytes[inside].copy_from_slice(&bytes[part]);
                line.dirty = true;
            });
        }
        self.stir();
    }

    /// Calls `f` with each line of the bytes: its number, those of its bytes, and which of all
    /// bytes they are.
    fn each_line(&self, at: PhysAddr, len: usize, mut f: impl FnMut(u64, Range<usize>, Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = at.get() + done as u64;
            let skip = (at % self.line) as usize;
            let count = (self.line as usize - skip).min(len - done);
            f(at / self.line, skip..skip + count, done..done + count);
            done += count;
        }
    }

    fn numbers(&self, phys: PhysAddr, len: u64) -> std::ops::RangeInclusive<u64> {
        assert!(len > 0, "no bytes at {phys}");
        phys.get() / self.line..=(phys.get() + (len - 1)) / self.line
    }
}

// SAFETY: the memory is simulated; each method acts on the lines of the bytes named.
unsafe impl CacheMaintenance for Cache {
    fn line_bytes(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.line
    }

    unsafe fn clean(&self, phys: PhysAddr, len: u64) {
        self.tell(true);
        self.stir();
        let mut state = self.state();
        for number in self.numbers(phys, len) {
            state.write_back(&self.memory, self.line, number);
            if state.does_both() {
                state.drop_line(number);
            }
        }
        state.calls.push(('O', phys.get(), len));
        drop(state);
        self.stir();
    }

    unsafe fn invalidate(&self, phys: PhysAddr, len: u64) {
        self.tell(false);
        self.stir();
        let mut state = self.state();
        for number in self.numbers(phys, len) {
            if state.does_both() {
                state.write_back(&self.memory, self.line, number);
            }
            state.drop_line(number);
        }
        state.calls.push(('I', phys.get(), len));
    }
}

/// Memory that the CPU reaches through a cache, to copy through.
#[derive(Clone)]
pub struct Ram(pub Arc<Cache>);

// SAFETY: the frames are the model's. That the memory below holds other bytes than the zeros which
// the CPU finds is what the cache is for.
unsafe impl Frames for Ram {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.0.memory.alloc(count)?;
        let len = count * FRAME_SIZE as usize;
        // An earlier owner's bytes are in the memory still.
        self.0.memory.write(first, &vec![0xee; len]).unwrap();
        {
            let mut state = self.0.state();
            self.0.numbers(first, len as u64).for_each(|number| state.drop_line(number));
        }
        self.0.write(first, &vec![0; len]);
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.memory.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise.
        unsafe { self.0.memory.table(frame) }
    }
}

// SAFETY: the bytes that are named are read and written, through lines.
unsafe impl CopyMemory for Ram {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let mut bytes = vec![0; len as usize];
        self.0.read(from, &mut bytes);
        self.0.write(to, &bytes);
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.0.write(at, &vec![0; len as usize]);
    }
}

/// Memory that the CPU reaches without a cache.
pub struct Uncached(pub Arc<Memory>);

// SAFETY: the frames are the model's.
unsafe impl Frames for Uncached {
    const UNCACHED: bool = true;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise.
        unsafe { self.0.table(frame) }
    }
}
