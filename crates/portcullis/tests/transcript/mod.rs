//! A machine that one thread plays, all of whose calls are heard: what a domain does to page tables, the queue, caches, memory and
//! the platform is what a [`Transcript`] has between two of its own calls.
#![allow(dead_code, reason = "each test file uses a part")]

mod heard;
mod text;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{DomainId, PhysAddr};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::platform::{
    CacheMaintenance, CopyMemory, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table,
};
use portcullis_model::Memory;
use portcullis_model::open::Simulated;

use crate::rig::Clocked;

use heard::{begin, count, found, hear};

pub use heard::{Tables, below};
pub use text::Transcript;

/// Where the files are.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis/tests/transcripts");

pub const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 7 };
pub const REJECTED: InvalidationError = InvalidationError::Rejected { code: 9 };

thread_local!(static ANSWERS: RefCell<VecDeque<Option<InvalidationError>>> = const { RefCell::new(VecDeque::new()) });

/// The queue's next submissions fail like this, where it is not `None`; no more than these.
pub fn answer(answers: impl IntoIterator<Item = Option<InvalidationError>>) {
    ANSWERS.set(answers.into_iter().collect());
}

/// A transcript of this machine.
pub fn transcript(about: &str, memory: &Arc<Memory>, clock: &Arc<Clocked>) -> Transcript {
    let clock = Arc::clone(clock);
    begin(memory, Some(Box::new(move |ns| clock.take(ns))));
    answer([]);
    Transcript::new(about, below)
}

/// Memory that is copied to and from.
#[derive(Debug, Clone)]
pub struct Copies(pub Arc<Memory>);

// SAFETY: all is the memory's.
unsafe impl Simulated for Copies {}

// SAFETY: all is the memory's.
unsafe impl Frames for Copies {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.0.alloc(count);
        hear(format!("{count} frames {}", found(first)), 0);
        first
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        let first = self.0.alloc_within(count, last);
        hear(format!("{count} frames up to {last:#x} {}", found(first)), 0);
        first
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        hear(format!("free {first:#x} x{count}"), 0);
        self.0.release(first, count);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.0.table_at(frame)
    }
}

// SAFETY: all is the memory's.
unsafe impl CopyMemory for Copies {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        hear(format!("copy {from:#x} to {to:#x} +{len:#x}"), 20 + len / 8);
        // SAFETY: the caller's promise.
        unsafe { self.0.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        hear(format!("zero {at:#x} +{len:#x}"), len / 32);
        // SAFETY: the caller's promise.
        unsafe { self.0.zero(at, len) }
    }
}

/// The caches of a machine whose devices are not coherent.
pub struct Caches;

// SAFETY: there are no caches.
unsafe impl CacheMaintenance for Caches {
    fn line_bytes(&self) -> u64 {
        64
    }

    unsafe fn clean(&self, phys: PhysAddr, len: u64) {
        hear(format!("clean {phys:#x} +{len:#x}"), 5);
    }

    unsafe fn invalidate(&self, phys: PhysAddr, len: u64) {
        hear(format!("invalidate {phys:#x} +{len:#x}"), 5);
    }
}

/// A queue that carries nothing out, as no device is there, and what it says to cost.
#[derive(Debug, Clone)]
pub struct Asked {
    pub costs: Costs,
    pub caches_absent: bool,
}

impl Default for Asked {
    fn default() -> Self {
        Self { costs: Costs::BARE_METAL, caches_absent: false }
    }
}

fn request(Request { domain: DomainId(domain), invalidation }: &Request) -> String {
    match invalidation {
        Invalidation::Domain => format!("D{domain}"),
        Invalidation::Range { range, leaf_only } => {
            let all = if *leaf_only { "" } else { " and tables" };
            format!("D{domain} {:#x}+{:#x}{all}", range.start(), range.len())
        }
        Invalidation::DeviceTlb { device, range } => {
            let range =
                range.map_or("all".into(), |range| format!("{:#x}+{:#x}", range.start(), range.len()));
            format!("D{domain} device {:#x} {range}", device.0)
        }
    }
}

// SAFETY: there is no hardware that could remember anything.
unsafe impl InvalidationQueue for Asked {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let all: Vec<String> = requests.iter().map(request).collect();
        let error = ANSWERS.with_borrow_mut(|answers| answers.pop_front().flatten());
        let said = error.map_or(String::new(), |error| format!(" FAILS: {error:?}"));
        hear(format!("forget {}{said}", all.join(", ")), 700 + 50 * requests.len() as u64);
        error.map_or(Ok(()), Err)
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn caches_absent(&self) -> bool {
        self.caches_absent
    }
}

/// The platform.
#[derive(Clone)]
pub struct Cpus(pub Arc<Clocked>);

// SAFETY: all is passed on.
unsafe impl Platform for Cpus {
    fn cpus(&self) -> usize {
        self.0.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.0.with_cpu(f)
    }

    fn now_ns(&self) -> u64 {
        count("clock read");
        self.0.now_ns()
    }

    fn fence_all(&self) {
        hear("fence all".into(), 0);
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        hear("register".into(), 0);
        self.0.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        hear(format!("wake at {deadline_ns}"), 0);
        self.0.wake_at(deadline_ns);
    }
}
