//! A mapper whose changes are requests to somebody else: what that makes the CPU wait.

use std::sync::Arc;

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Cursor, MapError, Unmapped};
use portcullis::platform::Platform;

use super::queue::ClockedQueue;

/// Passes changes on, and has the [queue](ClockedQueue) remember what waiting for them would take.
pub struct RequestMapper<M> {
    inner: M,
    queue: Arc<ClockedQueue>,
    granule: u64,
    /// Whether a map is a request at all. (Else it costs what it is measured to cost.)
    by_request: bool,
}

impl<M: Mapper> RequestMapper<M> {
    pub(super) fn new(inner: M, queue: Arc<ClockedQueue>) -> Self {
        let granule = inner.geometry().page_sizes.smallest().map_or(1, |size| size.bytes());
        let by_request = queue.prices().by_request();
        Self { inner, queue, granule, by_request }
    }

    /// What makes the changes.
    pub(super) fn inner(&self) -> &M {
        &self.inner
    }
}

impl<M: Mapper> Mapper for RequestMapper<M> {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        permissions: Permissions,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        if self.by_request {
            self.queue.waited_to_map(range.len() / self.granule);
        }
        self.inner.map(platform, range, list, permissions, gather)
    }

    #[inline]
    fn map_near<P: Platform>(
        &self,
        platform: &P,
        cursor: &mut Cursor,
        range: IovaRange,
        phys: PhysAddr,
        permissions: Permissions,
    ) -> bool {
        // By request there is no quicker way.
        !self.by_request && self.inner.map_near(platform, cursor, range, phys, permissions)
    }

    #[inline]
    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unmapped = self.inner.unmap(platform, range, gather);
        if self.by_request {
            self.queue.waited_to_unmap(unmapped.bytes / self.granule);
        }
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.inner.sync(gather)
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.inner.reclaim(platform)
    }
}
