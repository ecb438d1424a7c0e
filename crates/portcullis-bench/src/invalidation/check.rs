//! Whether a subject keeps what it promises: a device that goes on using whatever it was given.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::invalidation::Invalidation;

use super::subject::{Lane, Promise, Subject};
use super::workload::{PAGE, TURN, phys};
use crate::runner::Failure;

/// The device and what the IOMMU has cached for it: every page that was ever mapped, until an invalidation that
/// began later is to remove it.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Pages by address, and the memory that each led to.
    cached: HashMap<u64, u64>,
    fault: Option<String>,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device uses `iova`, so it is cached that it leads to `phys`.
    fn cache(&self, iova: u64, phys: u64) {
        self.lock().cached.insert(iova, phys);
    }

    /// Where the device gets at `iova` by what is cached alone.
    fn cached(&self, iova: u64) -> Option<u64> {
        self.lock().cached.get(&iova).copied()
    }

    /// The IOMMU is asked to forget.
    pub(crate) fn forget(&self, invalidation: Invalidation) {
        let mut seen = self.lock();
        match invalidation {
            Invalidation::Domain => seen.cached.clear(),
            Invalidation::Range { range, .. } => {
                let (first, last) = (range.start().get(), range.last().get());
                (first..=last).step_by(PAGE as usize).for_each(|page| {
                    seen.cached.remove(&page);
                });
            }
            // No device here has a TLB of its own.
            Invalidation::DeviceTlb { .. } => {}
        }
    }

    /// The first thing that was wrong.
    pub(crate) fn fault(&self) -> Option<String> {
        self.lock().fault.clone()
    }

    pub(super) fn broken(&self, fault: impl FnOnce() -> String) -> bool {
        self.lock().fault.get_or_insert_with(fault);
        false
    }
}

/// A thread's part of a subject, watched.
pub(crate) struct WatchedLane {
    inner: Box<dyn Lane>,
    subject: Arc<dyn Subject>,
    watch: Arc<Watch>,
    thread: usize,
}

impl WatchedLane {
    pub(crate) fn new(
        inner: Box<dyn Lane>,
        subject: Arc<dyn Subject>,
        watch: Arc<Watch>,
        thread: usize,
    ) -> Self {
        Self { inner, subject, watch, thread }
    }

    /// What is wrong with page `index`, whose unmap is complete.
    fn reachable(&self, index: usize) -> Option<String> {
        let (iova, phys) = (self.inner.iova(index), phys(self.thread, index));
        // Another thread may have been given the address meanwhile: then it leads elsewhere.
        if self.subject.look_up(iova) == Some(phys) {
            return Some(format!("{iova:#x} was unmapped and still leads to {phys:#x}"));
        }
        let strict = self.subject.promise() == Promise::Strict;
        let cached = strict && self.watch.cached(iova) == Some(phys);
        cached.then(|| format!("the unmap of {iova:#x} returned before it was invalidated"))
    }
}

impl Lane for WatchedLane {
    fn map_one(&mut self, index: usize) -> bool {
        if !self.inner.map_one(index) {
            return false;
        }
        let (iova, phys) = (self.inner.iova(index), phys(self.thread, index));
        let found = self.subject.look_up(iova);
        if found != Some(phys) {
            let found = found.unwrap_or_default();
            return self.watch.broken(|| format!("{iova:#x} leads to {found:#x} instead of {phys:#x}"));
        }
        match self.watch.cached(iova) {
            Some(old) if self.subject.promise() != Promise::Nothing => self.watch.broken(|| {
                format!("{iova:#x} was handed out while the device could still reach {old:#x} there")
            }),
            _ => true,
        }
    }

    fn unmap_one(&mut self, index: usize) -> bool {
        self.watch.cache(self.inner.iova(index), phys(self.thread, index));
        if !self.inner.unmap_one(index) {
            return false;
        }
        // The last of a turn ends the last batch: by then all of them are complete.
        let complete = if index + 1 == TURN { 0..TURN } else { 0..0 };
        match complete.into_iter().find_map(|index| self.reachable(index)) {
            Some(fault) => self.watch.broken(|| fault),
            None => true,
        }
    }

    fn iova(&self, index: usize) -> u64 {
        self.inner.iova(index)
    }
}

/// Fails unless something was invalidated, where it was promised.
pub(crate) fn was_asked(subject: &dyn Subject) -> Result<(), Failure> {
    if subject.promise() != Promise::Nothing && subject.hardware().asked().submissions == 0 {
        return Err(Failure::Broken("nothing was ever invalidated".into()));
    }
    Ok(())
}
