//! The driver with a device in the test, which behaves as QEMU's never does.

extern crate std;

mod device;
mod domains;
mod ends;
mod fake;
mod mapping;
mod panics;
mod seen;
#[cfg(not(watched))]
mod transcripts;

use alloc::sync::Arc;
use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper;
use portcullis::pgtable::{MapError, Unmapped};
use portcullis::std_platform::StdPlatform;

use super::layout::{answer, config, fault, feature, status};
use super::{RequestMapper, Unit};
use crate::fault::Reason;
use crate::host::UnitError;
use fake::{ENDPOINT, Fake, KEPT, OTHER, STRUCTURES};

const PAGE: u64 = 4096;

fn start(fake: &Fake) -> Result<Unit<Fake>, UnitError> {
    Unit::start(fake.clone(), STRUCTURES, [DeviceId(ENDPOINT), DeviceId(OTHER), DeviceId(0x99)])
}

/// A device, its unit, and a domain with an endpoint.
struct Bench {
    fake: Fake,
    unit: Arc<Unit<Fake>>,
    mapper: RequestMapper<Fake>,
    platform: StdPlatform,
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

/// First and last address.
fn bounds(page: u64, pages: u64) -> (u64, u64) {
    (page * PAGE, (page + pages) * PAGE - 1)
}

impl Bench {
    fn detached() -> Self {
        Self::of(Fake::new())
    }

    fn of(fake: Fake) -> Self {
        let unit = Arc::new(start(&fake).unwrap());
        unit.enable().unwrap();
        let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
        let mapper = unit.mapper(DomainId(1), alloc::vec![kept]).unwrap();
        fake.device().requests.clear();
        Self { fake, unit, mapper, platform: StdPlatform::new() }
    }

    fn new() -> Self {
        let bench = Self::detached();
        bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
        let mut device = bench.fake.device();
        device.requests.clear();
        device.doorbells = 0;
        drop(device);
        bench
    }

    fn map_in(&self, page: u64, memory: &[u64], gather: &mut Gather) -> Result<(), MapError> {
        let list = memory.iter().map(|frame| (PhysAddr::new(frame * PAGE), PAGE));
        let range = range(page, memory.len() as u64);
        // SAFETY: there is no memory.
        unsafe { self.mapper.map(&self.platform, range, list, Permissions::READ_WRITE.into(), gather) }
    }

    fn map(&self, page: u64, memory: &[u64]) {
        let mut gather = Gather::new();
        self.map_in(page, memory, &mut gather).unwrap();
        assert!(gather.is_empty());
    }

    fn unmap(&self, page: u64, pages: u64, gather: &mut Gather) -> Unmapped {
        self.mapper.unmap(&self.platform, range(page, pages), gather)
    }

    fn mapped(&self) -> Vec<(u64, u64)> {
        self.fake.device().mapped(1)
    }

    /// Requests since the last call.
    fn requests(&self) -> Vec<u8> {
        core::mem::take(&mut self.fake.device().requests)
    }
}

/// Waits until the device has delayed requests.
fn until_held(fake: &Fake) {
    while fake.device().held.is_empty() {
        std::thread::yield_now();
    }
}

/// Runs `work` on another CPU, which never times out.
fn spawn(work: impl FnOnce() + Send + 'static) -> std::thread::JoinHandle<()> {
    std::thread::Builder::new().name("patient".into()).spawn(work).unwrap()
}
