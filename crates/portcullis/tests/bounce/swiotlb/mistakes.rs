//! What is asked for wrongly is an error that changes nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::SetupError;
use portcullis::addr::{Direction, Iova, PhysAddr};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::domain::MapListError;
use portcullis::platform::{CopyMemory, Frames, Table};
use portcullis_model::Memory;

use super::support::*;

#[test]
fn mappings_that_cannot_be() {
    let (_, memory, pool) = machine(&config());
    let (phys, any) = (PhysAddr::new(memory.base().get() + 0x800), Constraints::new());
    let mapped =
        |phys, len, constraints: &Constraints| map(&pool, phys, len, Direction::ToDevice, constraints);
    assert_eq!(mapped(phys, 0, &any), Err(MapListError::EmptySegment { index: 0, phys }.into()));
    let high = PhysAddr::new(u64::MAX - 9);
    assert_eq!(mapped(high, 11, &any), Err(MapListError::Wraps { index: 0, phys: high, len: 11 }.into()));
    let too_long = DmaMapError::TooLong { len: AREA + 1, most: AREA };
    assert_eq!(mapped(phys, AREA + 1, &any), Err(too_long));
    assert!(mapped(phys, u64::MAX - phys.get(), &any).is_err());
    let nvme = any.with_min_align_mask(0xfff).unwrap();
    assert!(mapped(phys, AREA - 0x800, &nvme).is_ok());
    let too_long = DmaMapError::TooLong { len: AREA - 0x7ff, most: AREA - 0x800 };
    assert_eq!(mapped(phys, AREA - 0x7ff, &nvme), Err(too_long));
    let coarse = any.with_min_align_mask((2 << 20) - 1).unwrap();
    assert_eq!(mapped(phys, 1, &coarse), Err(DmaMapError::BeyondReach { last: u64::MAX }));
    let last = u32::MAX.into();
    let near = any.with_reach(PhysAddr::new(last));
    assert_eq!(mapped(phys, 1, &near), Err(DmaMapError::BeyondReach { last }));
    // A device reaches an area's slots where it reaches the area's last byte, and none where it does not.
    let one = SwiotlbConfig { max_bytes: AREA, ..config() };
    let (_, _small, single) = machine(&one);
    let found = map(&single, phys, 1, Direction::ToDevice, &any).unwrap().phys.get();
    let area_last = found | (AREA - 1);
    let within =
        |last| map(&single, phys, 1, Direction::ToDevice, &any.with_reach(PhysAddr::new(last))).map(drop);
    assert_eq!(within(area_last), Ok(()));
    assert_eq!(within(area_last - 1), Err(DmaMapError::BeyondReach { last: area_last - 1 }));
    for mask in [5, 0xff00, u64::MAX] {
        assert_eq!(any.with_min_align_mask(mask), Err(SetupError::OffsetMask { mask }));
    }
    // The slot in front of it was left out.
    assert_eq!(pool.usage().mapped, AREA - 0x800);
}

#[test]
fn calls_about_mappings_that_are_not_there() {
    let (platform, memory, pool) = machine(&config());
    let buffer = memory.buffer(20_000).unwrap();
    let mapped = map(&pool, buffer.phys(), 20_000, Direction::Bidirectional, &Constraints::new()).unwrap();
    let at = |offset: u64| PhysAddr::new(mapped.phys.get() + offset);
    let not_mapped = |phys: PhysAddr| DmaUnmapError::NotMapped { iova: Iova::new(phys.get()) };
    let out_of_range = |phys: PhysAddr, len| {
        let offset = phys.get() - mapped.phys.get();
        DmaUnmapError::OutOfRange { iova: Iova::new(mapped.phys.get()), offset, len, mapped: 20_000 }
    };
    buffer.fill(7);
    // SAFETY: one thread does everything.
    let sync = |phys, len| unsafe { pool.sync_for_cpu(phys, len) };
    for (phys, len) in [(at(0), 19_999), (at(0), 20_001), (at(0), 0), (at(2048), 20_000), (at(1), 20_000)] {
        assert_eq!(unmap(&pool, phys, len), Err(out_of_range(phys, len)));
    }
    for (phys, len) in [(at(0), 20_001), (at(5), 0), (at(19_999), 2), (at(20_000), 1), (at(9), u64::MAX)] {
        assert_eq!(sync(phys, len), Err(out_of_range(phys, len)));
    }
    assert_eq!(pool.original(at(19_999)), Ok(PhysAddr::new(buffer.phys().get() + 19_999)));
    // The run is of 32 KiB: beyond it nothing is mapped, and outside the pool is nothing of ours.
    assert_eq!(unmap(&pool, at(32 << 10), 1), Err(not_mapped(at(32 << 10))));
    for phys in [buffer.phys(), PhysAddr::new(0), PhysAddr::new(u64::MAX), PhysAddr::new(1 << 52)] {
        assert!(!pool.holds(phys));
        assert_eq!(unmap(&pool, phys, 1), Err(not_mapped(phys)));
        assert_eq!(sync(phys, 1), Err(not_mapped(phys)));
    }
    assert!(pool.holds(at(0)) && pool.holds(at(AREA - 1)));
    assert_eq!(bytes(&memory, buffer.phys(), 20_000), [7; 20_000], "nothing was copied");
    assert_eq!(unmap(&pool, mapped.phys, 20_000), Ok(()));
    assert_eq!(bytes(&memory, buffer.phys(), 20_000), [0; 20_000]);
    for cpu in [0, 1, NONE] {
        platform.run_on(cpu);
        for phys in [at(0), at(2048), at(19_999)] {
            assert_eq!(unmap(&pool, phys, 20_000), Err(not_mapped(phys)));
        }
    }
    assert_eq!(pool.usage().mapped, 0);
    // The first slot is a run of its own now, and what was inside the longer one is free.
    pool.trim();
    let short = map(&pool, buffer.phys(), 1, Direction::ToDevice, &Constraints::new()).unwrap();
    assert_eq!(short.phys, mapped.phys);
    assert_eq!(unmap(&pool, at(2048), 1), Err(not_mapped(at(2048))));
    (1..AREA / 2048).for_each(|_| {
        map(&pool, buffer.phys(), 1, Direction::ToDevice, &Constraints::new()).unwrap();
    });
    assert_eq!(pool.usage().mapped, AREA);
}

#[test]
fn pools_that_cannot_be() {
    let pool = |config: SwiotlbConfig| {
        Swiotlb::new(Manual::default(), Memory::new(1 << 20), &config).map(|pool| pool.usage().capacity)
    };
    assert_eq!(pool(config()), Ok(AREA));
    for slot_bytes in [0, 32, 3000, 1 << 40] {
        assert_eq!(pool(SwiotlbConfig { slot_bytes, ..config() }), Err(SetupError::Slot { slot_bytes }));
    }
    for area_bytes in [0, 64 << 10, 300 << 10, 512 << 20] {
        let result = pool(SwiotlbConfig { area_bytes, ..config() });
        let (least, most) = (128 << 10, 256 << 20);
        assert_eq!(result, Err(SetupError::Area { area_bytes, least, most }));
    }
    for (min_bytes, max_bytes) in [(0, AREA - 1), (2 * AREA, AREA), (0, AREA << 17), (u64::MAX, u64::MAX)] {
        let result = pool(SwiotlbConfig { min_bytes, max_bytes, ..config() });
        assert_eq!(result, Err(SetupError::Limits { min_bytes, max_bytes, area_bytes: AREA }));
    }
    let none = |reach| Err(SetupError::NoArea { area_bytes: AREA, reach });
    let reach = PhysAddr::new(Memory::DEFAULT_BASE + AREA - 2);
    assert_eq!(pool(SwiotlbConfig { reach, ..config() }), none(reach));
    // The last byte of the pool is within reach, and none is beyond it.
    let reach = PhysAddr::new(Memory::DEFAULT_BASE + AREA - 1);
    assert_eq!(pool(SwiotlbConfig { reach, ..config() }), Ok(AREA));
    let reach = PhysAddr::new(u64::MAX);
    let memory = Memory::new(1 << 20);
    let more = SwiotlbConfig { min_bytes: 5 * AREA, max_bytes: 5 * AREA, ..config() };
    let error = Swiotlb::new(Manual::default(), memory.clone(), &more).map(|_| ()).unwrap_err();
    assert_eq!(error, SetupError::NoArea { area_bytes: AREA, reach });
    assert_eq!(memory.frames_in_use(), 0);
}

/// Memory whose copies panic while it is told to.
struct Panics(Arc<Memory>, Arc<AtomicBool>);

// SAFETY: all is the memory's.
unsafe impl Frames for Panics {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.0.table_at(frame)
    }
}

// SAFETY: all is the memory's; a call that panics has copied nothing.
unsafe impl CopyMemory for Panics {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        assert!(!self.1.load(Ordering::Relaxed), "as asked for");
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.zero(at, len) }
    }
}

/// Short ones come from the CPU's magazines, odd ones from an area.
#[test]
fn a_map_whose_copy_panics_keeps_no_slots() {
    for len in [2000, 5000, AREA - 2048] {
        let (memory, panics) = (Memory::new(16 << 20), Arc::new(AtomicBool::new(false)));
        let buffer = memory.buffer(AREA).unwrap();
        let config = SwiotlbConfig { max_bytes: AREA, ..config() };
        let pool = Swiotlb::new(Manual::default(), Panics(memory, Arc::clone(&panics)), &config).unwrap();
        let mapped = || map(&pool, buffer.phys(), len, Direction::ToDevice, &Constraints::new());
        panics.store(true, Ordering::Relaxed);
        for _ in 0..3 * AREA / len {
            assert!(catch_unwind(AssertUnwindSafe(mapped)).is_err());
        }
        panics.store(false, Ordering::Relaxed);
        assert_eq!(pool.usage().mapped, 0, "{len}");
        let whole = map(&pool, buffer.phys(), AREA, Direction::ToDevice, &Constraints::new()).unwrap();
        unmap(&pool, whole.phys, AREA).unwrap();
        assert_eq!(pool.usage().mapped, 0, "{len}");
    }
}
