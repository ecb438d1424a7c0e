//! The speed of the software IOMMU: nanoseconds for each operation, and for a mapping's whole life as in a replay. Run with `cargo run
//! --release --example throughput -p portcullis-model`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::time::Instant;

use common::{DEVICE, DOMAIN, PAGE, READ, iova, phys, rig, segment};
use portcullis::addr::IovaRange;
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis_model::{Context, Segment};

const ROUNDS: u64 = 1_000_000;
/// Pages in rotation, like a ring of buffers.
const RING: u64 = 512;

fn main() {
    operations();
    for (name, len, policy) in [
        ("strict, one whole page", 4096, Policy::Strict),
        ("strict, 1500 bytes", 1500, Policy::Strict),
        ("lazy (flush every 256), one whole page", 4096, Policy::Lazy),
        ("lazy (flush every 256), 1500 bytes", 1500, Policy::Lazy),
        ("passthrough, 1500 bytes", 1500, Policy::Passthrough),
        ("strict, 64 KiB", 65536, Policy::Strict),
    ] {
        lives(name, len, policy);
    }
}

/// Times `each`, called with 0, 1, 2...
fn report(name: &str, rounds: u64, mut each: impl FnMut(u64)) {
    let start = Instant::now();
    (0..rounds).for_each(&mut each);
    println!("{:>8.1} ns  {name}", start.elapsed().as_nanos() as f64 / rounds as f64);
}

fn operations() {
    let (iommu, mapper) = rig();
    for page in 0..RING {
        mapper.map(page * PAGE, (0x10_0000 + page) * PAGE);
    }
    println!("single operations");
    let access = |page: u64| {
        iommu.access(DEVICE, iova(page * PAGE), 64, READ).unwrap();
    };
    report("access, IOTLB hit", ROUNDS, |n| access(n % 64));
    report("access, IOTLB miss, last-level table cached", ROUNDS, |n| access(n % RING));
    report("probe, IOTLB miss", ROUNDS, |n| {
        black_box(iommu.probe(DEVICE, iova(n % 384 * PAGE), READ));
    });
    let mut bytes = [0; 4096];
    let buffer = iommu.memory().buffer(4096).unwrap();
    mapper.map(RING * PAGE, buffer.phys().get());
    report("dma_read of 4 KiB", ROUNDS / 10, |_| {
        iommu.dma_read(DEVICE, iova(RING * PAGE), &mut bytes).unwrap();
    });
    let queue = iommu.queue();
    let range = IovaRange::new(iova(0), PAGE).unwrap();
    report("invalidate one page", ROUNDS, |_| {
        queue.invalidate(DOMAIN, Invalidation::Range { range, leaf_only: true }).unwrap();
    });
    report("invalidate the domain", ROUNDS, |_| queue.invalidate(DOMAIN, Invalidation::Domain).unwrap());
}

#[derive(Clone, Copy, PartialEq)]
enum Policy {
    Strict,
    Lazy,
    Passthrough,
}

/// Time in each call over many lives of mappings, without the cost of reading the clock.
fn lives(name: &str, len: u64, policy: Policy) {
    let (iommu, mapper) = rig();
    if policy == Policy::Passthrough {
        iommu.attach(DEVICE, Context::Passthrough);
    }
    let pages = len.div_ceil(PAGE);
    let rounds = ROUNDS / pages;
    let queue = iommu.queue();
    let segment = |n: u64| -> Segment {
        let at = n % RING * pages * PAGE;
        let to = 0x10_0000 * PAGE + at;
        if policy == Policy::Passthrough { segment(to, to, len) } else { segment(at, to, len) }
    };
    let mut spent = [0_u64; 4];
    let mut wrong = 0;
    let clock = clock_cost();
    let whole = Instant::now();
    for n in 0..rounds {
        let segment = segment(n);
        let first = segment.iova.get();
        if policy != Policy::Passthrough {
            (0..pages).for_each(|page| mapper.map(first + page * PAGE, segment.phys.get() + page * PAGE));
        }
        let time = n * 1000;
        let start = Instant::now();
        iommu.observe_map(DEVICE, time, [segment]);
        let mapped = Instant::now();
        let outcome = iommu.access_checked(DEVICE, segment.iova, phys(segment.phys.get()), len, READ);
        let accessed = Instant::now();
        if policy != Policy::Passthrough {
            (0..pages).for_each(|page| mapper.unmap(first + page * PAGE));
        }
        let cleared = Instant::now();
        match policy {
            Policy::Strict => {
                let range = IovaRange::new(iova(first), len).unwrap();
                queue.invalidate(DOMAIN, Invalidation::Range { range, leaf_only: true }).unwrap();
            }
            Policy::Lazy if n % 256 == 0 => queue.invalidate(DOMAIN, Invalidation::Domain).unwrap(),
            _ => {}
        }
        let invalidated = Instant::now();
        let reached = iommu.observe_unmap(DEVICE, time + 500, [segment]);
        let done = Instant::now();
        wrong += outcome.faults + outcome.wrong + if policy == Policy::Strict { reached } else { 0 };
        for (sum, (from, to)) in spent.iter_mut().zip([
            (start, mapped),
            (mapped, accessed),
            (cleared, invalidated),
            (invalidated, done),
        ]) {
            *sum += to.duration_since(from).as_nanos() as u64;
        }
    }
    let whole = whole.elapsed();
    iommu.set_time(rounds * 1000);
    assert_eq!(wrong, 0, "the model let a strict mapping leak or led an access astray");
    let [map, access, invalidate, unmap] = spent.map(|sum| (sum as f64 / rounds as f64 - clock).max(0.0));
    println!("{name}\n{map:>8.1} ns  observe_map\n{access:>8.1} ns  access_checked");
    println!("{invalidate:>8.1} ns  invalidate\n{unmap:>8.1} ns  observe_unmap");
    println!("{:>8.1} ns  map + access + unmap observed", map + access + unmap);
    println!(
        "{:>8.1} ns  everything, with the mapper and the clock",
        whole.as_nanos() as f64 / rounds as f64
    );
    println!("          {:?}", iommu.total_exposure());
}

fn clock_cost() -> f64 {
    let start = Instant::now();
    (0..ROUNDS).for_each(|_| _ = black_box(Instant::now()));
    start.elapsed().as_nanos() as f64 / ROUNDS as f64
}
