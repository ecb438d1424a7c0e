//! A mapper that is quick is asked to be: once the tables are there and the CPU keeps addresses, no map takes the slow way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, DmaSegment, DomainId, PhysSegment};
use portcullis::dma::{DmaDevice, Ended, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::PageTable;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDevice, OpenRing};
use portcullis_model::{Iommu, IommuConfig, Memory};

use crate::common::vtd;
use crate::ends::bench::{Mapper, PAGE, page};
use crate::rig::{Moment, Observed};

type Device = DmaDevice<Observed<Mapper>, StdPlatform>;

/// A device, and how often its mapper was asked to map the slow way.
fn device() -> (Device, Arc<AtomicU64>) {
    let slow = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&slow);
    let memory = Memory::new(8 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let platform = StdPlatform::new();
    let table = PageTable::for_cpus(memory, vtd(4), portcullis::platform::Platform::cpus(&platform)).unwrap();
    let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
    let mapper = Observed::with_fast_paths(inner, move |moment| {
        counted.fetch_add(u64::from(moment == Moment::Mapped), Ordering::Relaxed);
    });
    let domain = Domain::new(platform, mapper, Policy::Strict).unwrap();
    (DmaDevice::new(domain, u64::MAX).unwrap(), slow)
}

/// Has `map` map and unmap, again and again, and returns how often that was slow in the last 50 times.
fn slow_in_50(slow: &AtomicU64, mut map: impl FnMut()) -> u64 {
    (0..50).for_each(|_| map());
    let before = slow.load(Ordering::Relaxed);
    (0..50).for_each(|_| map());
    slow.load(Ordering::Relaxed) - before
}

#[test]
fn a_buffer_and_a_list_are_mapped_quickly() {
    let (device, slow) = device();
    let single = || {
        let mapping = device.open_single(page(0).phys, PAGE, Direction::ToDevice).unwrap();
        device.unmap_single(mapping, PAGE).unwrap();
    };
    assert_eq!(slow_in_50(&slow, single), 0);
    for pages in [1, 2, 7] {
        let list: Vec<PhysSegment> = (0..pages).map(|number| page(2 * number)).collect();
        let mapped = || {
            let mut out = [DmaSegment::default(); 7];
            let segments = device.open_sg(&list, Direction::ToDevice, &mut out).unwrap();
            device.unmap_sg(&out[..segments]).unwrap();
        };
        assert_eq!(slow_in_50(&slow, mapped), 0, "{pages} pages");
    }
}

#[test]
fn a_ring_maps_buffers_and_lists_quickly() {
    let (device, slow) = device();
    for pages in [1, 2, 7] {
        let mut ring = StrictRing::new(&device, StrictRingConfig::new(64, PAGE, 1)).unwrap();
        let list: Vec<PhysSegment> = (0..pages).map(|number| page(2 * number)).collect();
        let mapped = || {
            let mapping = ring.open(&list, Direction::ToDevice).unwrap();
            assert_eq!(ring.unmap(mapping).unwrap(), Ended::Flushed(()));
        };
        assert_eq!(slow_in_50(&slow, mapped), 0, "{pages} pages");
    }
}
