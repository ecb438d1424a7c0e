//! Work that callgrind counts, in a process of its own.
#![allow(dead_code, reason = "each test file uses a part")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::hint::black_box;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{DomainId, PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Platform, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_bench::path::AtOnce;

pub type Mapper = TableMapper<Heap, AtOnce>;

/// What the child does, and how often.
const WORK: &str = "PORTCULLIS_INSTRUCTIONS_OF";

/// Bytes copied so far, for a clock by which a byte takes a nanosecond to copy and all else takes no time.
pub static COPIED: AtomicU64 = AtomicU64::new(0);

/// Bytes wiped so far.
pub static ZEROED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy)]
pub struct Heap;

fn layout(count: usize) -> Layout {
    let size = count.next_power_of_two() * FRAME_SIZE as usize;
    Layout::from_size_align(size, size).unwrap()
}

// SAFETY: frames are of the heap, zeroed and aligned by their layout; addresses of a process are below 2^52.
unsafe impl Frames for Heap {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        // SAFETY: the layout is not empty.
        let first = unsafe { alloc_zeroed(layout(count)) };
        (count > 0 && !first.is_null()).then(|| PhysAddr::new(first.expose_provenance() as u64))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: by the caller's promise they came from `alloc` with this count.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(first.get() as usize), layout(count)) }
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: by the caller's promise the frame is allocated, and of atomics it may be anything.
        unsafe { &*std::ptr::with_exposed_provenance(frame.get() as usize) }
    }
}

// SAFETY: neither a driver nor a device nor a CPU reads a byte of this memory, so none of them sees that it was not written.
unsafe impl CopyMemory for Heap {
    #[inline(never)]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        COPIED.fetch_add(len, Ordering::Relaxed);
        black_box((from, to));
    }

    #[inline(never)]
    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        ZEROED.fetch_add(len, Ordering::Relaxed);
        black_box((at, len));
    }
}

/// No memory at all: its address is a number.
pub struct Page(pub [PhysSegment; 1]);

// SAFETY: the address is a number that stays the same; no memory is behind it, as no device walks these tables.
unsafe impl DmaBuffer for Page {
    fn segments(&self) -> &[PhysSegment] {
        &self.0
    }
}

/// A domain whose device is not there.
pub fn domain(policy: Policy) -> Shared<Domain<Mapper, StdPlatform>> {
    let platform = StdPlatform::new();
    let mapper = mapper(&platform);
    Domain::new(platform, mapper, policy).unwrap()
}

/// The tables of such a domain.
pub fn mapper(platform: &StdPlatform) -> Mapper {
    let table = PageTable::for_cpus(Heap, VtdSecondStage::new(4, 3, 48).unwrap(), platform.cpus()).unwrap();
    TableMapper::new(table, AtOnce, DomainId(1), Vec::new())
}

/// Does the work that this process is asked for, if it is one that is counted.
pub fn run(work: fn(&str, u32)) {
    let Ok(asked) = std::env::var(WORK) else { return };
    let (kind, rounds) = asked.split_once(' ').unwrap();
    counted_work(work, kind, rounds.parse().unwrap());
}

/// The part of the process that callgrind counts. The test harness around it takes some thousand instructions more or
/// fewer in each run: its thread may or may not have freed its memory when the process ends.
#[inline(never)]
fn counted_work(work: fn(&str, u32), kind: &str, rounds: u32) {
    work(kind, rounds);
    black_box(()); // The call above must not become a jump, which would end this function.
}

/// Instructions of `rounds` of `kind`; `None` where there is no valgrind.
fn count(kind: &str, rounds: u64) -> Option<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*counted_work*"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "work", "--ignored", "--test-threads=1"])
        .env(WORK, format!("{kind} {rounds}"))
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let collected = said.lines().find_map(|line| line.split_once("Collected : "));
    Some(collected.expect("callgrind says how many").1.trim().parse().unwrap())
}

/// Counts each kind, and holds it against the most that it may take. What each takes; nothing where it cannot be counted.
pub fn hold(bars: &[(&str, u64)]) -> Vec<u64> {
    if cfg!(debug_assertions) {
        println!("skipped: this counts optimised code");
        return Vec::new();
    }
    const WARM: u64 = 1_000;
    const ROUNDS: u64 = 4_000;
    let (mut over, mut counts) = (Vec::new(), Vec::new());
    for (kind, most) in bars {
        let (Some(warm), Some(all)) = (count(kind, WARM), count(kind, WARM + ROUNDS)) else {
            println!("skipped: there is no valgrind");
            return Vec::new();
        };
        assert!(all > warm, "callgrind did not count the work: {warm}, then {all}");
        let each = (all - warm).div_ceil(ROUNDS);
        println!("{kind}: {each} instructions a pair");
        counts.push(each);
        if each > *most {
            over.push(format!("{kind}: {each} instructions a pair, and {most} at most"));
        }
    }
    assert!(over.is_empty(), "{}", over.join("; "));
    counts
}
