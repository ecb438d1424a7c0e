//! Policies that change although the hardware fails, and the domain's account after mistakes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Bench, PAGE};
use crate::manual::Manual;
use crate::queued::{direct, end};
use portcullis::addr::{Direction, Iova, IovaRange, PageSize, PageSizes, PhysAddr};
use portcullis::dma::{CoherentMemory, DmaDevice, RawBatch};
use portcullis::domain::{Domain, Policy, PolicyError};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::{Platform, PlatformEvents};
use portcullis_model::Memory;
use portcullis_model::open::{OpenDevice, Simulated};

const LAZY_FOREVER: Policy = Policy::Lazy { window_ns: u64::MAX / 2 };
const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 7 };

/// An address that the device reaches although it is unmapped.
fn stale(bench: &Bench) -> Iova {
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    drop(end(&mut queue, mapping));
    assert!(bench.writes(iova));
    iova
}

#[test]
fn a_change_whose_flush_failed_can_be_asked_for_again() {
    let bench = Bench::new(LAZY_FOREVER);
    let changes: [&dyn Fn() -> Result<(), PolicyError>; 2] =
        [&|| bench.domain.set_policy(Policy::Strict), &|| bench.device.set_policy(Some(Policy::Strict))];
    for change in changes {
        let iova = stale(&bench);
        bench.iommu.queue().fail_next(1, TIMEOUT);
        assert_eq!(change(), Err(PolicyError::Unconfirmed(TIMEOUT)));
        assert!(bench.writes(iova), "as the error says");
        change().unwrap();
        assert!(!bench.writes(iova), "nothing was changed, and yet it is promised");
        bench.domain.set_policy(LAZY_FOREVER).unwrap();
    }
}

/// Translations of pages of 16 KiB that are nowhere, but counted.
struct Mapped16K {
    geometry: Geometry,
    mapped: AtomicU64,
    sync: Arc<dyn Fn() -> Result<(), InvalidationError> + Send + Sync>,
}

// SAFETY: no hardware is behind it.
unsafe impl Simulated for Mapped16K {}

// SAFETY: no hardware is behind it, so nothing is reached through it.
unsafe impl Mapper for Mapped16K {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        _: impl IntoIterator<Item = (PhysAddr, u64)>,
        _: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        self.mapped.fetch_add(range.len(), Ordering::Relaxed);
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let mapped = self.mapped.load(Ordering::Relaxed).min(range.len());
        self.mapped.fetch_sub(mapped, Ordering::Relaxed);
        gather.add(range);
        Unmapped::of(range, mapped)
    }

    fn sync(&self, _: &Gather) -> Result<(), InvalidationError> {
        (self.sync)()
    }
}

const START_NS: u64 = 1_000_000_000;

type Device = DmaDevice<Mapped16K, Manual>;

fn device(
    policy: Policy,
    sync: impl Fn() -> Result<(), InvalidationError> + Send + Sync + 'static,
) -> (Manual, Device) {
    let granule = PageSize::from_shift(14).unwrap();
    let aperture = IovaRange::new(Iova::new(0), 1 << 32).unwrap();
    let geometry = Geometry { aperture, page_sizes: PageSizes::EMPTY.with(granule), reserved: Vec::new() };
    let mapper = Mapped16K { geometry, mapped: AtomicU64::new(0), sync: Arc::new(sync) };
    // So late that the next change is timed exactly.
    let platform = Manual::default();
    platform.set_time(START_NS);
    let domain = Domain::new(platform.clone(), mapper, policy).unwrap();
    (platform, DmaDevice::new(domain, u64::MAX).unwrap())
}

/// Byte-nanoseconds of neighbours in the next 1,000 ns.
fn neighbours(platform: &Manual, device: &Device) -> u128 {
    let before = device.domain().exposure().neighbour_byte_ns;
    platform.set_time(platform.now_ns() + 1000);
    device.domain().exposure().neighbour_byte_ns - before
}

#[test]
fn coherent_memory_has_whole_granules_to_itself() {
    let (platform, device) = device(Policy::Strict, || Ok(()));
    let memory = Memory::new(1 << 20);
    let coherent = CoherentMemory::new(&device, Arc::clone(&memory), 1).unwrap();
    // One granule of 16 KiB, in 64-bit words.
    assert_eq!(coherent.words(), 2048);
    assert_eq!(coherent.iova().get() % (1 << 14), 0);
    assert_eq!(neighbours(&platform, &device), 0);
    coherent.free().unwrap();
    assert_eq!((neighbours(&platform, &device), memory.frames_in_use()), (0, 0));
}

#[test]
fn what_is_unmapped_twice_takes_its_neighbours_off_once() {
    let (platform, device) = device(Policy::Strict, || Ok(()));
    let map = || device.open_single(PhysAddr::new(0x10_0000), 0x1000, Direction::FromDevice).unwrap();
    let unmapped = map();
    device.unmap_single(unmapped, 0x1000).unwrap();
    device.unmap_single(unmapped, 0x1000).unwrap_err();
    let mut batch = RawBatch::new(&device, 8).unwrap();
    device.unmap_single_in(&mut batch, unmapped, 0x1000).unwrap_err();
    batch.commit().unwrap();
    // The second is timed.
    let _mapped = [map(), map()];
    assert_eq!(neighbours(&platform, &device), 1000 * 2 * 0x3000);
}

#[test]
fn a_flush_that_fails_or_panics_is_tried_again_whatever_the_window() {
    let panics = || -> Result<(), InvalidationError> { panic!("a queue's") };
    let syncs: [fn() -> Result<(), InvalidationError>; 2] = [|| Err(TIMEOUT), panics];
    for sync in syncs {
        let (platform, device) = device(LAZY_FOREVER, sync);
        // What may wait less than all others. (The change itself flushes, too.)
        let policy = Some(Policy::Lazy { window_ns: 5_000_000 });
        let _ = catch_unwind(AssertUnwindSafe(|| device.set_policy(policy)));
        assert_eq!(Some(device.policy()), policy);
        let iova = device.open_single(PhysAddr::new(0x10_0000), 0x1000, Direction::FromDevice).unwrap();
        device.unmap_single(iova, 0x1000).unwrap();
        assert_eq!(platform.wakes(), [START_NS + 5_000_000]);
        platform.set_time(START_NS + 5_000_000);
        let _ = catch_unwind(AssertUnwindSafe(|| PlatformEvents::timer(&**device.domain())));
        assert_eq!(platform.wakes(), [START_NS + 15_000_000]);
    }
}

#[test]
fn a_window_of_no_length_is_no_reason_to_retry_without_a_pause() {
    let (platform, device) = device(Policy::Lazy { window_ns: 0 }, || Err(TIMEOUT));
    let iova = device.open_single(PhysAddr::new(0x10_0000), 0x1000, Direction::FromDevice).unwrap();
    device.unmap_single(iova, 0x1000).unwrap();
    PlatformEvents::timer(&**device.domain());
    assert_eq!(platform.wakes(), [START_NS, START_NS + 1_000_000]);
}
