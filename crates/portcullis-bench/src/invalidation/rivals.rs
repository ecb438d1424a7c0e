//! What the library is measured against: the same page table, addresses and hardware, put together differently.

use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{Direction, DomainId, Iova, IovaRange, PageSize, PhysAddr};
use portcullis::invalidation::{Costs, Gather, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::iova::{IovaSpace, SpaceConfig};
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

use super::hardware::Hardware;
use super::ours::put;
use super::parts::{FramesInUse, Tables, settled, tables};
use super::spent::{SpinLock, Waits};
use super::subject::{Lane, Promise, Subject};
use super::workload::{PAGE, TURN, phys};
use crate::runner::Failure;
use crate::timer::OpTimer;

/// Entries of the flush queue of 2015: Linux's `HIGH_WATER_MARK` of that time.
const HIGH_WATER: usize = 250;

/// A queue with one lock, held from the submission until it is confirmed.
pub(crate) struct Locked {
    lock: SpinLock<()>,
    queue: Waits,
}

impl Locked {
    pub(crate) fn new(queue: Waits, timer: &OpTimer, crowded: bool) -> Self {
        Self { lock: SpinLock::new((), timer, crowded), queue }
    }
}

// SAFETY: `Ok` is the inner queue's.
unsafe impl InvalidationQueue for Locked {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let _mine = self.lock.lock();
        self.queue.submit(requests)
    }

    fn costs(&self) -> Costs {
        self.queue.costs()
    }
}

/// An address space and a page table, without a domain around them.
pub(crate) struct Apart {
    mapper: Tables<Waits>,
    frames: FramesInUse,
    space: IovaSpace,
    limit: Iova,
    platform: StdPlatform,
    hardware: Arc<Hardware>,
}

impl Apart {
    pub(crate) fn new(
        platform: &StdPlatform,
        queue: Waits,
        hardware: Arc<Hardware>,
    ) -> Result<Self, Failure> {
        let (mapper, frames) = tables(platform, queue)?;
        let aperture = mapper.geometry().aperture;
        let config = SpaceConfig::new(aperture, PageSize::SIZE_4K, platform.cpus());
        let space = IovaSpace::new(&config).map_err(|error| Failure::Refused(error.to_string()))?;
        let limit = aperture.last();
        Ok(Self { mapper, frames, space, limit, platform: platform.clone(), hardware })
    }

    fn map(&self, phys: u64) -> Option<IovaRange> {
        let range = self.space.alloc(&self.platform, PAGE, self.limit).ok()?;
        let list = [(PhysAddr::new(phys), PAGE)];
        let permissions = Direction::FromDevice.permissions();
        // SAFETY: no device is behind it.
        unsafe { self.mapper.map(&self.platform, range, list, permissions.into(), &mut Gather::new()) }
            .ok()?;
        Some(range)
    }

    /// Clears the translation of `range`.
    #[inline]
    fn clear(&self, range: IovaRange) -> bool {
        self.mapper.unmap(&self.platform, range, &mut Gather::new()).bytes == range.len()
    }

    #[inline]
    fn free(&self, range: IovaRange) -> bool {
        self.space.free(&self.platform, range).is_ok()
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        self.mapper.table().iova_to_phys(&self.platform, Iova::new(iova)).map(PhysAddr::get)
    }

    fn settled(&self) -> Result<(), Failure> {
        let usage = self.space.usage();
        settled(&self.mapper, &self.frames, &self.platform, usage.taken.saturating_sub(usage.cached))
    }
}

/// Lazy protection of 2015: one list for all CPUs behind one lock. Who finds it full flushes it, and frees all that
/// was in it, with the lock held.
pub(crate) struct GlobalLock {
    apart: Apart,
    deferred: SpinLock<Vec<IovaRange>>,
}

impl GlobalLock {
    pub(crate) fn new(apart: Apart, timer: &OpTimer, crowded: bool) -> Self {
        Self { apart, deferred: SpinLock::new(Vec::with_capacity(HIGH_WATER), timer, crowded) }
    }

    /// Flushes and frees `deferred`, whose lock the caller holds.
    fn flush(&self, deferred: &mut Vec<IovaRange>) -> bool {
        if self.apart.mapper.sync(&Gather::everything()).is_err() {
            return false;
        }
        let mut freed = true;
        for range in deferred.drain(..) {
            freed &= self.apart.free(range);
        }
        freed
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> bool {
        if !self.apart.clear(range) {
            return false;
        }
        let mut deferred = self.deferred.lock();
        let flushed = deferred.len() < HIGH_WATER || self.flush(&mut deferred);
        deferred.push(range);
        flushed
    }
}

impl Subject for GlobalLock {
    fn lane(self: Arc<Self>, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        Ok(Box::new(LockLane { subject: self, thread, ranges: Vec::new() }))
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        self.apart.look_up(iova)
    }

    fn settle(&self) -> Result<(), Failure> {
        if !self.flush(&mut self.deferred.lock()) {
            return Err(Failure::Broken("not everything could be flushed and freed".into()));
        }
        self.apart.settled()
    }

    fn hardware(&self) -> &Hardware {
        &self.apart.hardware
    }

    fn promise(&self) -> Promise {
        Promise::Lazy
    }
}

struct LockLane {
    subject: Arc<GlobalLock>,
    thread: usize,
    ranges: Vec<IovaRange>,
}

impl Lane for LockLane {
    fn map_one(&mut self, index: usize) -> bool {
        let mapped = self.subject.apart.map(phys(self.thread, index));
        mapped.map(|range| put(&mut self.ranges, index, range)).is_some()
    }

    #[inline]
    fn unmap_one(&mut self, index: usize) -> bool {
        self.subject.unmap(self.ranges[index])
    }

    fn iova(&self, index: usize) -> u64 {
        self.ranges[index].start().get()
    }
}

/// The work on the page table, and nothing else that is timed.
pub(crate) struct Reference {
    apart: Apart,
}

impl Reference {
    pub(crate) fn new(apart: Apart) -> Self {
        Self { apart }
    }
}

impl Subject for Reference {
    fn lane(self: Arc<Self>, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let (ranges, old) = (Vec::new(), VecDeque::new());
        Ok(Box::new(ReferenceLane { subject: self, thread, ranges, old }))
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        self.apart.look_up(iova)
    }

    fn settle(&self) -> Result<(), Failure> {
        self.apart.settled()
    }

    fn hardware(&self) -> &Hardware {
        &self.apart.hardware
    }

    fn promise(&self) -> Promise {
        Promise::Nothing
    }
}

struct ReferenceLane {
    subject: Arc<Reference>,
    thread: usize,
    ranges: Vec<IovaRange>,
    /// Unmapped in the turn before: addresses come back as late as out of a flush queue.
    old: VecDeque<IovaRange>,
}

impl Lane for ReferenceLane {
    fn map_one(&mut self, index: usize) -> bool {
        let apart = &self.subject.apart;
        // What was mapped here in the turn before waits for one turn more.
        self.old.extend(self.ranges.get(index).copied());
        let due = if self.old.len() > TURN { self.old.pop_front() } else { None };
        let freed = due.is_none_or(|range| apart.free(range));
        let mapped = apart.map(phys(self.thread, index));
        freed && mapped.map(|range| put(&mut self.ranges, index, range)).is_some()
    }

    #[inline]
    fn unmap_one(&mut self, index: usize) -> bool {
        self.subject.apart.clear(self.ranges[index])
    }

    fn iova(&self, index: usize) -> u64 {
        self.ranges[index].start().get()
    }
}

impl Drop for ReferenceLane {
    fn drop(&mut self) {
        // Where one fails, `settle` finds it missing.
        self.old.iter().chain(&self.ranges).for_each(|range| {
            self.subject.apart.free(*range);
        });
    }
}
