//! Copied or mapped, whichever is cheaper, by a clock that the test's machine moves on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, PhysAddr};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaDomain, DmaMask, Explained, OpsConfig, Queue, QueueConfig};
use portcullis::domain::Domain;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CopyMemory, Frames, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::Simulated;
use portcullis_model::{Iommu, IommuConfig, Memory, Queue as ModelQueue};

use super::support::{Calls, part};
use crate::queue::world::PAGE;
use crate::rig::Hooked;

/// Memory whose copies take a nanosecond for each byte.
#[derive(Clone)]
struct Costly(Arc<Memory>, Arc<AtomicU64>);

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for Costly {}

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for Costly {
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

// SAFETY: as above.
unsafe impl CopyMemory for Costly {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        self.1.fetch_add(len, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.zero(at, len) }
    }
}

type Machine = (TableMapper<Arc<Memory>, Hooked<ModelQueue>>, Arc<StdPlatform>, Costly);

/// A domain whose clock goes on by `wait_ns` with each wait for the hardware, and its memory.
fn clocked(wait_ns: &Arc<AtomicU64>) -> (DmaDomain<Machine>, Arc<Memory>) {
    let (time, waits) = (Arc::new(AtomicU64::new(0)), Arc::clone(wait_ns));
    let memory = Memory::new(16 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let queue = Hooked::new(iommu.queue());
    let hardware = Arc::clone(&time);
    queue.set(move || _ = hardware.fetch_add(waits.load(Ordering::Relaxed), Ordering::Relaxed));
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::new(4, 3, 48).unwrap()).unwrap();
    let clock = Arc::clone(&time);
    let domain = Domain::builder(table, queue, DomainId(1))
        .bounce(Costly(Arc::clone(&memory), time), PoolConfig::default())
        .clock(move || clock.load(Ordering::Relaxed))
        .build(Arc::new(StdPlatform::new()))
        .unwrap();
    (domain, memory)
}

/// Each mapping counts for its size and shape, whichever way it goes.
#[test]
fn a_queue_counts_each_mapping_once() {
    let (domain, memory) = clocked(&Arc::new(AtomicU64::new(800)));
    let device = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let mut queue: Queue<_> = device.queue(QueueConfig::auto(128, PAGE)).unwrap();
    let buffer = memory.buffer(8 * PAGE).unwrap();
    let list = |offset, len| [0, 2].map(|page| part(&buffer, page * PAGE + offset, len));
    let (pages, parts, bytes) = (list(0, PAGE), list(8, PAGE), list(8, 64));
    for (list, most_bytes, shared) in [
        (&pages[..1], PAGE, false),
        (&pages, 2 * PAGE, false),
        (&parts[..1], PAGE, true),
        (&bytes, 512, true),
    ] {
        for _ in 0..500 {
            let mut view = [DmaSegment::default(); 2];
            // SAFETY: the memory is the test's, all of it atomics, and outlives the queue.
            let (mapping, _) = unsafe { queue.map_raw(list, Direction::ToDevice, &mut view) }.unwrap();
            let _ = queue.unmap_raw(mapping).unwrap();
        }
        let row = |row: &Explained| (row.most_bytes, row.shared) == (most_bytes, shared);
        let row = queue.explain().find(row).unwrap();
        assert_eq!((row.copied + row.mapped, row.copies), (500, shared), "{row:?}");
    }
    let all: u64 = queue.explain().map(|row| row.copied + row.mapped).sum();
    assert_eq!(all, 4 * 500);
}

#[test]
fn each_size_goes_the_way_that_is_cheaper_for_it_and_changes_with_the_machine() {
    let wait_ns = Arc::new(AtomicU64::new(10_000));
    let (domain, memory) = clocked(&wait_ns);
    let threshold = 64 << 10;
    let ops =
        domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap().ops(OpsConfig::Auto { threshold }).unwrap();
    let buffer = memory.buffer(threshold + PAGE).unwrap();
    let run = |offset, len| {
        let mapped = |rounds: u64| {
            let before = ops.usage();
            for _ in 0..rounds {
                let iova = ops.maps(part(&buffer, offset, len), Direction::FromDevice).unwrap();
                ops.ends(iova, len).unwrap();
            }
            let usage = ops.usage();
            assert_eq!(usage.maps - before.maps, rounds);
            usage.copies - before.copies
        };
        // It finds out, and then keeps to it, but for a probe now and then.
        mapped(12_000);
        match mapped(2_000) {
            copied @ 0..20 => copied < 20,
            copied => {
                assert!(copied > 1_980, "{copied} of 2,000");
                false
            }
        }
    };
    assert!(!run(0, PAGE), "a page is copied in less than a wait");
    assert!(run(0, 64 << 10), "what takes longer to copy is mapped");
    assert!(
        !run(8, 64 << 10),
        "but nothing that shares a page with other data, as the device is not trusted"
    );
    wait_ns.store(1_000_000, Ordering::Relaxed);
    assert!(!run(0, 64 << 10), "waits have become longer");
    assert_eq!((ops.usage().open_mappings(), ops.usage().errors), (0, 0));
}
