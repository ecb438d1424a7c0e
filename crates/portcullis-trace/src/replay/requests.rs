//! A mapper that changes mappings by requests, and the CPU's waits for them.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use std::sync::Arc;

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::heap::{OutOfMemory, Shared};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::percpu::{Marks, Turn};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;

/// Waits for requests, or counts the waits.
pub trait RequestWaits: Send + Sync + 'static {
    /// Whether mappings change by requests at all. (Otherwise a change has its measured cost.) It never changes.
    fn by_request(&self) -> bool;

    /// A request to map `granules` granules was made.
    fn mapped(&self, granules: u64);

    /// `granules` granules were unmapped, by a request that is the invalidation.
    fn unmapped(&self, granules: u64);
}

/// Passes changes on, and waits for them, or counts the waits, by a [`RequestWaits`].
#[derive(Debug)]
pub struct RequestMapper<M, W> {
    inner: M,
    waits: Arc<W>,
    granule: u64,
    by_request: bool,
}

impl<M: Mapper, W: RequestWaits> RequestMapper<M, W> {
    /// Wraps `inner`, whose changes are requests with these waits.
    pub fn new(inner: M, waits: Arc<W>) -> Self {
        let granule = inner.geometry().page_sizes.smallest().map_or(1, |size| size.bytes());
        let by_request = waits.by_request();
        Self { inner, waits, granule, by_request }
    }

    /// The wrapped mapper.
    pub fn inner(&self) -> &M {
        &self.inner
    }
}

// SAFETY: clauses 1 to 9 are `M`'s: each method passes its call on, or refuses a fast one.
unsafe impl<M: Mapper, W: RequestWaits> Mapper for RequestMapper<M, W> {
    const IS_QUICK: bool = M::IS_QUICK;
    const REMOVES_WHOLES: bool = M::REMOVES_WHOLES;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        self.inner.set_cpus(cpus)
    }

    #[inline]
    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        // SAFETY: clauses 1 to 4 of `PageTable::map` are the caller's.
        unsafe { self.inner.map(platform, range, list, attributes, gather) }?;
        if self.by_request {
            self.waits.mapped(range.len() / self.granule);
        }
        Ok(())
    }

    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        self.inner.marks(platform)
    }

    #[inline]
    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        // By request there is no fast call. SAFETY: the clauses are the caller's.
        !self.by_request && unsafe { self.inner.map_fast(turn, range, phys, attributes) }
    }

    #[inline]
    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        // As above. SAFETY: the clauses are the caller's.
        !self.by_request && unsafe { self.inner.map_list_fast(turn, range, list, attributes) }
    }

    #[inline]
    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        // As above.
        !self.by_request && self.inner.unmap_fast(turn, range)
    }

    #[inline]
    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        self.inner.sync_range(range)
    }

    #[inline]
    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unmapped = self.inner.unmap(platform, range, gather);
        if self.by_request {
            self.waits.unmapped(unmapped.bytes / self.granule);
        }
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.inner.sync(gather)
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.inner.reclaim(platform)
    }

    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.inner.try_reclaim(platform)
    }
}
