//! What a map and its unmap cost in instructions, as callgrind counts them: a number that noise does not change.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr};
use portcullis::dma::{DmaBuffer, DmaDevice};
use portcullis::domain::{Domain, PhysSegment, Policy};
use portcullis::invalidation::DomainId;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{FRAME_SIZE, Frames, Platform, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_bench::path::AtOnce;

/// What the child does, and how often.
const WORK: &str = "PORTCULLIS_INSTRUCTIONS_OF";

/// Each kind of work, and the most instructions that a pair of map and unmap may take: today's figure and a few more.
/// These only go down.
const BARS: [(&str, u64); 4] = [("raw-1", 640), ("raw-4", 810), ("typed-1", 630), ("lazy-1", 810)];

#[derive(Debug)]
struct Heap;

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

/// No memory at all: its address is a number.
struct Page([PhysSegment; 1]);

// SAFETY: the address is a number that stays the same; no memory is behind it, as no device walks these tables.
unsafe impl DmaBuffer for Page {
    fn segments(&self) -> &[PhysSegment] {
        &self.0
    }
}

/// Run by [`the_fast_paths_stay_short`] in a process of its own.
#[test]
#[ignore = "the work that callgrind counts"]
fn work() {
    let Ok(work) = std::env::var(WORK) else { return };
    let (kind, rounds) = work.split_once(' ').unwrap();
    let platform = StdPlatform::new();
    let table = PageTable::new(Heap, VtdSecondStage::new(4, 3, 48).unwrap(), platform.slots()).unwrap();
    let mapper = TableMapper::new(table, AtOnce, DomainId(1), Vec::new());
    let policy = match kind {
        "lazy-1" => Policy::Lazy { window_ns: u64::MAX },
        _ => Policy::Strict,
    };
    let domain = Domain::new(platform, mapper, policy).unwrap();
    let device = DmaDevice::new(Arc::clone(&domain), u64::MAX);
    let phys = PhysAddr::new(1 << 32);
    let len = if kind == "raw-4" { 4 * FRAME_SIZE } else { FRAME_SIZE };
    let mut page = Some(Page([PhysSegment { phys, len }]));
    for _ in 0..rounds.parse::<u32>().unwrap() {
        if kind == "typed-1" {
            let mapped = device.map(page.take().unwrap(), Direction::FromDevice).ok().unwrap();
            page = Some(black_box(mapped).unmap().unwrap());
        } else {
            // SAFETY: no device is behind these tables.
            let iova = unsafe { device.map_single(black_box(phys), len, Direction::FromDevice) }.unwrap();
            device.unmap_single(black_box(iova), len).unwrap();
        }
    }
}

/// Instructions of `rounds` of `kind`; `None` where there is no valgrind.
fn count(kind: &str, rounds: u64) -> Option<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
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

#[test]
fn the_fast_paths_stay_short() {
    if cfg!(debug_assertions) {
        println!("skipped: this counts optimised code");
        return;
    }
    const WARM: u64 = 1_000;
    const ROUNDS: u64 = 4_000;
    for (kind, most) in BARS {
        let (Some(warm), Some(all)) = (count(kind, WARM), count(kind, WARM + ROUNDS)) else {
            println!("skipped: there is no valgrind");
            return;
        };
        let each = (all - warm).div_ceil(ROUNDS);
        println!("{kind}: {each} instructions a pair");
        assert!(each <= most, "{kind}: {each} instructions a pair, and {most} at most");
    }
}
