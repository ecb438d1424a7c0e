//! A program without `std`, C library or operating system beneath it but for two system calls: it proves
//! that the core needs none of them, by mapping and unmapping in a domain of its own and checking the tables.
//!
//! Exit code 0 means that every check held; another is the line of the check that failed, modulo 256.
#![no_std]
#![no_main]

extern crate alloc;

mod bare;
mod mem;

use alloc::sync::{Arc, Weak};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bare::{ARENA, exit};
use portcullis::addr::{Direction, DomainId, PhysAddr};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{FRAME_SIZE, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};

/// One CPU, no clock, no timer.
#[derive(Debug, Clone, Copy)]
struct OneCpu(PlatformNumber);

// SAFETY: the program has one thread.
unsafe impl Platform for OneCpu {
    fn cpus(&self) -> usize {
        1
    }

    fn number(&self) -> PlatformNumber {
        self.0
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: the program has one thread.
        f(Some(&unsafe { LocalCpu::new(0) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _events: Weak<dyn PlatformEvents>) {}

    fn wake_at(&self, _deadline_ns: u64) {}
}

/// Table memory out of the arena, never reused: the program is short.
#[derive(Debug)]
struct ArenaFrames;

// SAFETY: the arena hands out each byte once, zeroed and aligned, far below 2^52.
unsafe impl Frames for ArenaFrames {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let bytes = count.checked_mul(FRAME_SIZE as usize)?;
        let start = ARENA.take(bytes, bytes.next_power_of_two())?;
        Some(PhysAddr::new(start as u64))
    }

    unsafe fn free(&self, _first: PhysAddr, _count: usize) {}

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller passes a frame of `alloc`, which is aligned, zeroed memory of the arena that
        // is never taken back and never given to anybody else.
        unsafe { &*(frame.get() as *const Table) }
    }
}

/// Hardware that answers at once, and counts.
#[derive(Debug, Default)]
struct CountingQueue(AtomicUsize);

// SAFETY: no hardware is behind it, and nothing caches.
unsafe impl InvalidationQueue for CountingQueue {
    fn invalidate(&self, _domain: DomainId, _invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            exit(line!() as u8)
        }
    };
}

fn run() -> Option<()> {
    let format = VtdSecondStage::four_level();
    let cpu = OneCpu(PlatformNumber::new());
    let table = PageTable::new(ArenaFrames, format).ok()?;
    let queue = Arc::new(CountingQueue::default());
    let mapper = TableMapper::new(table, Arc::clone(&queue), DomainId(1), alloc::vec::Vec::new());
    let domain = Domain::new(cpu, mapper, Policy::Strict).ok()?;
    let device = DmaDevice::new(Arc::clone(&domain), u32::MAX.into());

    let buffer = PhysAddr::new(0x1234_5678);
    // SAFETY: no hardware walks the table.
    let iova = unsafe { device.map_single(buffer, 10_000, Direction::FromDevice) }.ok()?;
    check!(iova.get() <= u32::MAX.into());
    let (phys, attributes) = domain.mapper().table().translate(&cpu, iova)?;
    check!(phys == buffer);
    check!(attributes == Direction::FromDevice.permissions().into());
    check!(queue.0.load(Ordering::Relaxed) == 0);

    check!(device.unmap_single(iova, 10_000).is_ok());
    check!(domain.mapper().table().translate(&cpu, iova).is_none());
    check!(queue.0.load(Ordering::Relaxed) == 1);
    check!(device.unmap_single(iova, 10_000).is_err());
    // The words of a table are plain 64-bit atomics here.
    check!(size_of::<Table>() == size_of::<[AtomicU64; 512]>());
    Some(())
}

#[unsafe(no_mangle)]
extern "C" fn portcullis_main() -> ! {
    check!(run().is_some());
    exit(0)
}
