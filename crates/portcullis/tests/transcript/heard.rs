//! What is heard of what goes on below a library: calls that report themselves, and what has changed in memory that is not copied.
#![allow(dead_code, reason = "each test program uses a part")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis::platform::{Frames, Table};
use portcullis::sync::{AtomicU64, Ordering};
use portcullis_model::Memory;
use portcullis_model::open::Simulated;

#[derive(Default)]
struct Heard {
    events: Vec<String>,
    memory: Option<Arc<Memory>>,
    /// Lets so many nanoseconds pass.
    clock: Option<Box<dyn Fn(u64)>>,
    /// The frames of page tables, and what was in them.
    tables: BTreeMap<u64, Vec<u64>>,
    /// The words that were cleaned last, in a row: their frame, the first, and how many.
    cleaned: Option<(u64, usize, usize)>,
    /// What is only counted.
    counts: BTreeMap<&'static str, u64>,
}

thread_local!(static HEARD: RefCell<Heard> = RefCell::default());

impl Heard {
    fn end_cleaning(&mut self) {
        if let Some((frame, first, count)) = self.cleaned.take() {
            self.events.push(format!("clean {frame:#x}+{first:#x} x{count}"));
        }
    }
}

/// Hears what happens, which takes some time.
pub fn hear(event: String, ns: u64) {
    HEARD.with_borrow_mut(|heard| {
        heard.end_cleaning();
        heard.events.push(event);
        heard.clock.as_ref().inspect(|clock| clock(ns));
    });
}

/// Counts one of these.
pub fn count(what: &'static str) {
    HEARD.with_borrow_mut(|heard| *heard.counts.entry(what).or_default() += 1);
}

/// From now on what happens in this memory is heard; each event takes some time by `clock`.
pub fn begin(memory: &Arc<Memory>, clock: Option<Box<dyn Fn(u64)>>) {
    HEARD.set(Heard { memory: Some(Arc::clone(memory)), clock, ..Heard::default() });
}

/// What happened since the last call, with what has changed in page tables at the end.
pub fn below() -> Vec<String> {
    HEARD.with_borrow_mut(|heard| {
        heard.end_cleaning();
        let mut events = std::mem::take(&mut heard.events);
        let Some(memory) = &heard.memory else { return events };
        for (frame, before) in &mut heard.tables {
            let now: Vec<u64> = words(memory, *frame).collect();
            let changed = |at: &usize| before[*at] != now[*at];
            let mut at = (0..now.len()).filter(changed).peekable();
            while let Some(first) = at.next() {
                // Entries in a row that lead to pages in a row: three or more.
                let step = |at: usize| now[at].wrapping_sub(now[at - 1]);
                let follows =
                    |at: usize| now.get(at).is_some() && changed(&at) && step(at) == step(first + 1);
                let last = (first + 1..).take_while(|at| follows(*at)).last().unwrap_or(first);
                if last < first + 2 {
                    events.push(format!("[{frame:#x}+{first:#x}]={:#x}", now[first]));
                    continue;
                }
                at.nth(last - first - 1);
                let step = if step(last) > 0 { format!(" step {:#x}", step(last)) } else { String::new() };
                events.push(format!("[{frame:#x}+{first:#x}..={last:#x}]={:#x}{step}", now[first]));
            }
            *before = now;
        }
        events
            .extend(std::mem::take(&mut heard.counts).iter().map(|(what, times)| format!("{what} x{times}")));
        events
    })
}

fn words(memory: &Memory, frame: u64) -> impl Iterator<Item = u64> {
    memory.table_at(PhysAddr::new(frame)).iter().map(|word| word.load(Ordering::Relaxed))
}

/// Memory for page tables, and for what units read.
#[derive(Debug, Clone)]
pub struct Tables<const COHERENT: bool>(pub Arc<Memory>);

// SAFETY: it is the software IOMMU's memory.
unsafe impl<const COHERENT: bool> Simulated for Tables<COHERENT> {}

// SAFETY: all is the memory's.
unsafe impl<const IS_COHERENT: bool> Frames for Tables<IS_COHERENT> {
    const COHERENT: bool = IS_COHERENT;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.0.alloc(count);
        hear(format!("table of {count} {}", found(first)), 0);
        let frames = first.map_or(0, PhysAddr::get);
        HEARD.with_borrow_mut(|heard| {
            let frames = first.iter().flat_map(|_| (0..count as u64).map(|frame| frames + (frame << 12)));
            heard.tables.extend(frames.map(|frame| (frame, vec![0; 512])));
        });
        first
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        hear(format!("free table {first:#x} x{count}"), 0);
        HEARD.with_borrow_mut(|heard| {
            (0..count as u64).for_each(|frame| _ = heard.tables.remove(&(first.get() + (frame << 12))));
        });
        self.0.release(first, count);
    }

    fn clean(&self, words: &[AtomicU64]) {
        HEARD.with_borrow_mut(|heard| {
            let found = heard.tables.keys().copied().find_map(|frame| {
                let table = self.0.table_at(PhysAddr::new(frame)).as_ptr_range();
                let offset = || (words.as_ptr().addr() - table.start.addr()) / 8;
                table.contains(&words.as_ptr()).then(|| (frame, offset()))
            });
            let (frame, at) = found.unwrap_or_default();
            match &mut heard.cleaned {
                Some((before, first, count)) if *before == frame && *first + *count == at => {
                    *count += words.len()
                }
                _ => {
                    heard.end_cleaning();
                    heard.cleaned = Some((frame, at, words.len()));
                }
            }
        });
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.0.table_at(frame)
    }
}

pub fn found(first: Option<PhysAddr>) -> String {
    first.map_or("refused".into(), |first| format!("{first:#x}"))
}
