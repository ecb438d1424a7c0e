//! What a map and its unmap cost in instructions by a queue, beside what the queue is made of.

mod counted;

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::Ordering;

use portcullis::addr::{
    DeviceId, Direction, DmaSegment, Iova, IovaRange, PageSize, PageSizes, PhysAddr, PhysSegment,
};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{
    AnyQueue, DmaAttributes, DmaDevice, DmaDomain, DmaMask, DomainBuilder, Ended, OpsConfig, Queue,
    QueueConfig, StrictRing, StrictRingConfig,
};
use portcullis::domain::Policy;
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::{FRAME_SIZE, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_linux::registration::{Keep, RegistrationCache, RegistrationLimits, Released};

use counted::{COPIED, Heap, Page, ZEROED};

type Machine = (counted::Mapper, StdPlatform, Infallible);

const BATCH: usize = 64;
const DESCRIPTORS: u32 = 512;

/// Each kind of work, and the most instructions that a pair of map and unmap may take: today's figure and 2 % more,
/// which another build of the same source may take. These only go down with the figures.
const BARS: [(&str, u64); 24] = [
    ("raw-1", 500),
    ("direct-1", 515),
    ("direct-typed-1", 521),
    ("direct-dyn-1", 590),
    ("passthrough-1", 58),
    ("strict-ring-1", 324),
    ("ring-1", 340),
    ("ring-typed-1", 358),
    ("ring-dyn-1", 410),
    ("batch-1", 600),
    ("direct-list-4", 1272),
    ("direct-list-16", 2187),
    ("ring-list-4", 916),
    ("auto-1", 451),
    ("auto-list-4", 1060),
    ("auto-copied-1", 571),
    ("bounce-1", 457),
    ("mempool-1", 200),
    ("cache-1", 300),
    ("ops-strict-1", 620),
    ("ops-strict-list-16", 1420),
    ("ops-lazy-1", 770),
    ("ops-bounce-1", 525),
    ("ops-bounce-skip-1", 524),
];

/// Run by [`a_queue_costs_what_it_is_made_of`] in a process of its own.
#[test]
#[ignore = "the work that callgrind counts"]
fn work() {
    counted::run(pairs_of);
}

fn pairs_of(kind: &str, rounds: u32) {
    let policy = if kind == "passthrough-1" { Policy::Passthrough } else { Policy::Strict };
    let domain = counted::domain(policy);
    let list = [PhysSegment { phys: PhysAddr::new(1 << 32), len: FRAME_SIZE }];
    let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
    let front =
        DmaDomain::<Machine>::over(domain, None).unwrap().attach(DeviceId(0), DmaMask::BITS_64).unwrap();
    let config = match kind.split_once('-').unwrap().0 {
        "ring" => QueueConfig::ring(DESCRIPTORS - BATCH as u32, FRAME_SIZE).batch(BATCH),
        "batch" => QueueConfig::batched(BATCH),
        _ => QueueConfig::direct(),
    };
    match kind {
        "raw-1" => {
            let [PhysSegment { phys, len }] = list;
            for _ in 0..rounds {
                // SAFETY: no device is behind these tables.
                let iova = unsafe { device.map_single(black_box(phys), len, Direction::FromDevice) }.unwrap();
                device.unmap_single(black_box(iova), len).unwrap();
            }
        }
        "strict-ring-1" => {
            let config = StrictRingConfig::new(DESCRIPTORS, FRAME_SIZE, BATCH);
            let mut ring = StrictRing::new(&device, config).unwrap();
            let mut out = [DmaSegment::default()];
            for _ in 0..rounds {
                // SAFETY: no device is behind these tables.
                let mapped = unsafe { ring.map_sg(black_box(&list), Direction::FromDevice, &mut out) };
                let _ = ring.unmap(black_box(mapped.unwrap().0)).unwrap();
            }
        }
        "direct-typed-1" | "ring-typed-1" => {
            let mut queue = front.queue(config).unwrap();
            let mut pages: Vec<_> = (0..BATCH).map(|_| Page(list)).collect();
            for _ in 0..rounds {
                let mapped = queue.map(pages.pop().unwrap(), Direction::FromDevice).ok().unwrap();
                match queue.unmap(black_box(mapped)).ok().unwrap() {
                    Ended::Done(page) => pages.push(page),
                    Ended::Pending => {}
                    Ended::Flushed(flushed) => pages.extend(flushed),
                }
            }
        }
        "direct-dyn-1" | "ring-dyn-1" => {
            let mut queue: Queue<Machine> = front.queue(config).unwrap();
            let queue: &mut dyn AnyQueue = black_box(&mut queue);
            let mut out = [DmaSegment::default()];
            for _ in 0..rounds {
                // SAFETY: no device is behind these tables.
                let mapped = unsafe { queue.map_raw(black_box(&list), Direction::FromDevice, &mut out) };
                let _ = queue.unmap_raw(black_box(mapped.unwrap().0)).unwrap();
            }
        }
        // A buffer of the pool's own.
        "mempool-1" => {
            let platform = StdPlatform::new();
            let builder = DomainBuilder::new(counted::mapper(&platform)).bounce(Heap, PoolConfig::default());
            let domain = builder.build(platform).unwrap();
            let pool = domain.attach(DeviceId(0), DmaMask::BITS_64).unwrap().buffers().unwrap();
            for _ in 0..rounds {
                drop(black_box(pool.take(FRAME_SIZE as usize, Direction::FromDevice).unwrap()));
            }
        }
        // A buffer that a cache of registrations keeps mapped.
        "cache-1" => {
            let limits = RegistrationLimits { entries: 1, bytes: FRAME_SIZE };
            let cache = RegistrationCache::new(device, limits).unwrap();
            let [page] = list;
            for _ in 0..rounds {
                // SAFETY: no device is behind these tables.
                let held =
                    unsafe { cache.acquire(black_box(page), Direction::FromDevice, Keep::UntilForgotten) };
                let released = cache.release(black_box(held.unwrap())).unwrap();
                assert_eq!(released, Released::Open);
            }
            assert_eq!(cache.usage().misses, 1);
        }
        "auto-1" | "auto-list-4" | "auto-copied-1" | "bounce-1" => {
            let platform = StdPlatform::new();
            // Here copies alone take time, so that all goes through the ring that may.
            let builder = DomainBuilder::new(counted::mapper(&platform)).bounce(Heap, PoolConfig::default());
            let domain = builder.clock(|| COPIED.load(Ordering::Relaxed)).build(platform).unwrap();
            let device = domain.attach(DeviceId(0), DmaMask::BITS_64).unwrap();
            let config = match kind {
                "bounce-1" => QueueConfig::bounce(),
                _ => QueueConfig::auto(DESCRIPTORS - BATCH as u32, FRAME_SIZE)
                    .batch(BATCH)
                    .measuring(Direction::FromDevice),
            };
            let mut queue = device.queue(config).unwrap();
            let [page] = list;
            match kind {
                "auto-1" => pairs(&mut queue, &list, rounds),
                // A part of a page is copied always.
                "auto-copied-1" | "bounce-1" => {
                    pairs(&mut queue, &[PhysSegment { len: FRAME_SIZE / 2, ..page }], rounds)
                }
                _ => pairs(&mut queue, &four(page), rounds),
            }
            let mapped: u64 = queue.explain().map(|row| row.mapped).sum();
            assert_eq!(
                mapped,
                if kind.starts_with("auto-c") || kind == "bounce-1" { 0 } else { rounds.into() }
            );
        }
        _ if kind.starts_with("ops-") => ops(kind, rounds),
        "ring-list-4" | "direct-list-4" => {
            let [page] = list;
            pairs(&mut front.queue(config).unwrap(), &four(page), rounds);
        }
        "direct-list-16" => {
            let [page] = list;
            let at = |index| PhysAddr::new(page.phys.get() + 2 * index * page.len);
            let list: [_; 16] = core::array::from_fn(|index| PhysSegment { phys: at(index as u64), ..page });
            pairs(&mut front.queue(config).unwrap(), &list, rounds);
        }
        _ => {
            let mut queue: Queue<Machine> = front.queue(config).unwrap();
            let mut out = [DmaSegment::default()];
            for _ in 0..rounds {
                // SAFETY: no device is behind these tables.
                let mapped = unsafe { queue.map_raw(black_box(&list), Direction::FromDevice, &mut out) };
                let _ = queue.unmap_raw(black_box(mapped.unwrap().0)).unwrap();
            }
        }
    }
}

/// A kernel's mapper, whose tables are not the core's: what it does by itself is not counted here, but that it is called.
struct ByCall(Geometry);

// SAFETY: no device is behind it.
unsafe impl Mapper for ByCall {
    fn geometry(&self) -> &Geometry {
        &self.0
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        black_box((range, attributes));
        list.into_iter().for_each(|piece| _ = black_box(piece));
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        black_box(range);
        gather.add_with(range, 1);
        Unmapped { bytes: range.len(), kept: 0, stale: range }
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        black_box(gather);
        Ok(())
    }
}

/// A kernel's DMA API over its own mapper.
fn ops(kind: &str, rounds: u32) {
    let aperture = IovaRange::new(Iova::new(1 << 20), 1 << 40).unwrap();
    let page_sizes = PageSizes::EMPTY.with(PageSize::SIZE_4K);
    let mapper = ByCall(Geometry { aperture, page_sizes, reserved: Vec::new() });
    let builder = DomainBuilder::new(mapper).bounce(Heap, PoolConfig::default());
    let domain = builder.build(StdPlatform::new()).unwrap();
    let device = domain.attach(DeviceId(0), DmaMask::BITS_64).unwrap();
    let config = match kind {
        "ops-lazy-1" => OpsConfig::Lazy { window_ns: 1 << 60 },
        _ if kind.starts_with("ops-bounce") => OpsConfig::Bounce { threshold: 16 << 10 },
        _ => OpsConfig::Strict,
    };
    let ops = device.ops(config).unwrap();
    let (direction, skip_copy) = (Direction::FromDevice, kind == "ops-bounce-skip-1");
    let attributes = DmaAttributes { skip_copy, ..DmaAttributes::default() };
    let unmap = DmaAttributes { skip_copy, ..DmaAttributes::default() };
    let page = PhysSegment { phys: PhysAddr::new(1 << 32), len: FRAME_SIZE };
    if kind == "ops-strict-list-16" {
        let at = |index| PhysAddr::new(page.phys.get() + 2 * index * page.len);
        let list: [_; 16] = core::array::from_fn(|index| PhysSegment { phys: at(index as u64), ..page });
        let mut out = [DmaSegment::default(); 16];
        for _ in 0..rounds {
            // SAFETY: no device is behind the mapper.
            let written = unsafe { ops.map_sg(black_box(&list), direction, attributes, &mut out) };
            assert_eq!(written, Ok(1));
            // SAFETY: as above.
            unsafe { ops.unmap(black_box(out[0].iova), 16 * FRAME_SIZE, unmap) }.unwrap();
        }
        return;
    }
    let copied = COPIED.load(Ordering::Relaxed);
    for _ in 0..rounds {
        // SAFETY: no device is behind the mapper, and `Heap` counts a copy without making it.
        let iova = unsafe { ops.map(black_box(page.phys), page.len, direction, attributes) }.unwrap();
        // SAFETY: as above.
        unsafe { ops.unmap(black_box(iova), page.len, unmap) }.unwrap();
    }
    // The map fills the whole copy, which then shows nothing older, so the pool wipes nothing. `skip_copy` leaves out the copy at the unmap.
    let copies = match kind {
        "ops-bounce-1" => 2,
        "ops-bounce-skip-1" => 1,
        _ => 0,
    };
    assert_eq!(COPIED.load(Ordering::Relaxed) - copied, copies * u64::from(rounds) * page.len);
    assert_eq!(ZEROED.load(Ordering::Relaxed), 0);
}

/// Four pages, none of which adjoins another.
fn four(page: PhysSegment) -> [PhysSegment; 4] {
    let at = |index| PhysAddr::new(page.phys.get() + 2 * index * page.len);
    [0_u64, 1, 2, 3].map(|index| PhysSegment { phys: at(index), ..page })
}

fn pairs<X: portcullis::dma::Machine>(queue: &mut Queue<X>, list: &[PhysSegment], rounds: u32) {
    let mut out = [DmaSegment::default(); 16];
    for _ in 0..rounds {
        // SAFETY: no device is behind these tables, and `Heap` counts a copy without making it.
        let mapped = unsafe { queue.map_raw(black_box(list), Direction::FromDevice, &mut out) };
        let _ = queue.unmap_raw(black_box(mapped.unwrap().0)).unwrap();
    }
}

#[test]
fn a_queue_costs_what_it_is_made_of() {
    counted::hold(&BARS);
}
