//! What a map and its unmap cost in instructions, as callgrind counts them: a number that noise does not change.

mod counted;

use std::hint::black_box;
use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr};
use portcullis::dma::DmaDevice;
use portcullis::domain::{PhysSegment, Policy};
use portcullis::platform::FRAME_SIZE;

use counted::Page;

/// Each kind of work, and the most instructions that a pair of map and unmap may take: today's figure and a few more.
/// These only go down.
const BARS: [(&str, u64); 4] = [("raw-1", 500), ("raw-4", 645), ("typed-1", 500), ("lazy-1", 685)];

/// Run by [`the_fast_paths_stay_short`] in a process of its own.
#[test]
#[ignore = "the work that callgrind counts"]
fn work() {
    let Some((kind, rounds)) = counted::asked() else { return };
    let policy = match &*kind {
        "lazy-1" => Policy::Lazy { window_ns: u64::MAX },
        _ => Policy::Strict,
    };
    let domain = counted::domain(policy);
    let device = DmaDevice::new(Arc::clone(&domain), u64::MAX);
    let phys = PhysAddr::new(1 << 32);
    let len = if kind == "raw-4" { 4 * FRAME_SIZE } else { FRAME_SIZE };
    let mut page = Some(Page([PhysSegment { phys, len }]));
    for _ in 0..rounds {
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

#[test]
fn the_fast_paths_stay_short() {
    counted::hold(&BARS);
}
