//! The library: a domain, and what drivers call.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, RawBatch, RawMapping, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::invalidation::InvalidationQueue;
use portcullis::iova::IovaError;
use portcullis::mapper::Mapper;
use portcullis::std_platform::StdPlatform;

use super::hardware::Hardware;
use super::parts::{FramesInUse, Tables, settled, tables};
use super::subject::{Lane, Promise, Subject};
use super::workload::{PAGE, Shape, TURN, phys};
use crate::runner::Failure;

type Device<Q> = DmaDevice<Tables<Q>, StdPlatform>;

/// A domain with one device, which all threads drive.
pub(crate) struct Ours<Q: InvalidationQueue> {
    device: Device<Q>,
    frames: FramesInUse,
    platform: StdPlatform,
    hardware: Arc<Hardware>,
    shape: Shape,
}

fn refused(error: impl std::error::Error) -> Failure {
    Failure::Refused(error.to_string())
}

impl<Q: InvalidationQueue> Ours<Q> {
    pub(crate) fn new(
        platform: &StdPlatform,
        queue: Q,
        hardware: Arc<Hardware>,
        policy: Policy,
        shape: Shape,
    ) -> Result<Self, Failure> {
        let (mapper, frames) = tables(platform, queue)?;
        let domain = Domain::new(platform.clone(), mapper, policy).map_err(refused)?;
        let device = DmaDevice::new(domain, u64::MAX).map_err(refused)?;
        Ok(Self { device, frames, platform: platform.clone(), hardware, shape })
    }
}

impl<Q: InvalidationQueue> Subject for Ours<Q> {
    fn lane(self: Arc<Self>, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let device = self.device.clone();
        Ok(match self.shape {
            Shape::Lazy | Shape::Strict => Box::new(OneByOne { device, thread, iovas: Vec::new() }),
            Shape::Batch(most) => {
                let batch = RawBatch::new(&device, most).map_err(refused)?;
                Box::new(Batched { device, batch, thread, iovas: Vec::new() })
            }
            Shape::Ring(batch) => {
                let config = StrictRingConfig::new(2 * TURN as u32, PAGE, batch);
                let ring = StrictRing::new(&device, config).map_err(refused)?;
                Box::new(Descriptors { ring, thread, mappings: Vec::new(), iovas: Vec::new() })
            }
        })
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        let table = self.device.domain().mapper().table();
        table.iova_to_phys(&self.platform, Iova::new(iova)).map(PhysAddr::get)
    }

    fn settle(&self) -> Result<(), Failure> {
        let domain = self.device.domain();
        // More than there is: before it is refused, all that is deferred is flushed and taken back, whatever queue it
        // is in.
        let everything =
            PhysSegment { phys: PhysAddr::new(0), len: domain.mapper().geometry().aperture.len() };
        let permissions = Direction::FromDevice.permissions();
        // SAFETY: no device is behind it.
        match unsafe { domain.map(&[everything], permissions, Iova::new(u64::MAX)) } {
            Err(MapListError::Iova(IovaError::Exhausted { .. })) => {}
            other => return Err(Failure::Broken(format!("the whole space was asked for: {other:?}"))),
        }
        let stats = domain.stats();
        let handed_out = stats.taken_iova_bytes.saturating_sub(stats.cached_iova_bytes);
        settled(domain.mapper(), &self.frames, &self.platform, handed_out)
    }

    fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    fn promise(&self) -> Promise {
        if self.shape == Shape::Lazy { Promise::Lazy } else { Promise::Strict }
    }
}

/// Remembers page `index` of a turn.
pub(super) fn put<T>(pages: &mut Vec<T>, index: usize, page: T) {
    match pages.get_mut(index) {
        Some(place) => *place = page,
        None => pages.push(page),
    }
}

fn map<Q: InvalidationQueue>(device: &Device<Q>, thread: usize, index: usize) -> Option<Iova> {
    // SAFETY: no device is behind it.
    unsafe { device.map_single(PhysAddr::new(phys(thread, index)), PAGE, Direction::FromDevice) }.ok()
}

/// Unmaps by the domain's policy.
struct OneByOne<Q: InvalidationQueue> {
    device: Device<Q>,
    thread: usize,
    iovas: Vec<Iova>,
}

impl<Q: InvalidationQueue> Lane for OneByOne<Q> {
    fn map_one(&mut self, index: usize) -> bool {
        let mapped = map(&self.device, self.thread, index);
        mapped.map(|iova| put(&mut self.iovas, index, iova)).is_some()
    }

    #[inline]
    fn unmap_one(&mut self, index: usize) -> bool {
        self.device.unmap_single(self.iovas[index], PAGE).is_ok()
    }

    fn iova(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

/// Unmaps into a batch.
struct Batched<Q: InvalidationQueue> {
    device: Device<Q>,
    batch: RawBatch<Tables<Q>, StdPlatform>,
    thread: usize,
    iovas: Vec<Iova>,
}

impl<Q: InvalidationQueue> Lane for Batched<Q> {
    fn map_one(&mut self, index: usize) -> bool {
        let mapped = map(&self.device, self.thread, index);
        mapped.map(|iova| put(&mut self.iovas, index, iova)).is_some()
    }

    #[inline]
    fn unmap_one(&mut self, index: usize) -> bool {
        let taken = self.device.unmap_single_in(&mut self.batch, self.iovas[index], PAGE).is_ok();
        taken && (!self.batch.is_full() || self.batch.commit().is_ok())
    }

    fn iova(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

/// Maps and unmaps descriptors of a ring.
struct Descriptors<Q: InvalidationQueue> {
    ring: StrictRing<Tables<Q>, StdPlatform>,
    thread: usize,
    mappings: Vec<Option<RawMapping>>,
    iovas: Vec<Iova>,
}

impl<Q: InvalidationQueue> Lane for Descriptors<Q> {
    fn map_one(&mut self, index: usize) -> bool {
        let list = [PhysSegment { phys: PhysAddr::new(phys(self.thread, index)), len: PAGE }];
        // SAFETY: no device is behind it.
        let Ok(mapping) = (unsafe { self.ring.map(&list, Direction::FromDevice) }) else {
            return false;
        };
        put(&mut self.iovas, index, mapping.iova());
        put(&mut self.mappings, index, Some(mapping));
        true
    }

    #[inline]
    fn unmap_one(&mut self, index: usize) -> bool {
        self.mappings[index].take().is_some_and(|mapping| self.ring.unmap(mapping).is_ok())
    }

    fn iova(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}
