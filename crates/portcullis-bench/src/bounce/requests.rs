//! A mapper of hardware whose mappings are requests: it takes the profile's waits for them, in real time.
//!
//! What the library does for a mapping is that of tables in memory; where a request takes their place, the table's few
//! nanoseconds stand for putting it together. The hardware works on one thing at a time: requests to map wait for
//! invalidations, and the other way round.

use std::sync::Arc;

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError, SharedQueue};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Cursor, MapError, Unmapped};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::{Profile, Waits};

use crate::invalidation::hardware::Hardware;
use crate::invalidation::parts::{FramesInUse, Tables, tables};
use crate::runner::Failure;

/// Tables, and hardware that may have to be told of each change.
pub(crate) struct ByRequest {
    pub tables: Tables<SharedQueue<Arc<Hardware>>>,
    hardware: Arc<Hardware>,
    /// Nanoseconds of a request to map, of each granule in it, and of each granule of one to unmap (whose request is the
    /// invalidation).
    map_request: f64,
    map_page: f64,
    unmap_page: f64,
}

impl ByRequest {
    /// With nothing mapped.
    pub(crate) fn new(
        platform: &StdPlatform,
        hardware: Arc<Hardware>,
        profile: &Profile,
    ) -> Result<(Self, FramesInUse), Failure> {
        let (tables, frames) = tables(platform, SharedQueue::new(Arc::clone(&hardware)))?;
        let Waits { map_request, map_page, unmap_page, .. } = &profile.waits;
        let (map_request, map_page, unmap_page) = (map_request.ns, map_page.ns, unmap_page.ns);
        Ok((Self { tables, hardware, map_request, map_page, unmap_page }, frames))
    }

    fn granules(&self, bytes: u64) -> f64 {
        let granule = self.geometry().page_sizes.smallest().map_or(1, |size| size.bytes());
        (bytes / granule) as f64
    }
}

impl Mapper for ByRequest {
    fn geometry(&self) -> &Geometry {
        self.tables.geometry()
    }

    fn costs(&self) -> Costs {
        self.tables.costs()
    }

    fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        permissions: Permissions,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        self.tables.map(platform, range, list, permissions, gather)?;
        self.hardware.work_ns(self.map_request + self.map_page * self.granules(range.len()));
        Ok(())
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
        // Where a request is needed, there is no quick way.
        let quick = self.map_request + self.map_page == 0.0;
        quick && self.tables.map_near(platform, cursor, range, phys, permissions)
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unmapped = self.tables.unmap(platform, range, gather);
        self.hardware.work_ns(self.unmap_page * self.granules(unmapped.bytes));
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.tables.sync(gather)
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.tables.reclaim(platform)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use portcullis::addr::Iova;
    use portcullis::invalidation::Costs;

    use super::*;
    use crate::invalidation::hardware::Timing;
    use crate::timer::OpTimer;

    #[test]
    fn requests_to_map_are_waited_for_by_their_pages() {
        let mut profile = Profile::load("none").unwrap();
        let platform = StdPlatform::new();
        let mapper = |profile: &Profile| {
            let timer = OpTimer::calibrated();
            let hardware = Hardware::new(Timing::of(profile), Costs::BARE_METAL, &timer, true, None);
            ByRequest::new(&platform, Arc::new(hardware), profile).unwrap().0
        };
        let range = IovaRange::new(Iova::new(1 << 20), 4 << 12).unwrap();
        let mut gather = Gather::new();
        let mut map = |mapper: &ByRequest| {
            let (list, start) = ([(PhysAddr::new(1 << 30), range.len())], Instant::now());
            mapper.map(&platform, range, list, Permissions::READ, &mut gather).unwrap();
            start.elapsed()
        };
        profile.waits.map_request.ns = 2e6;
        profile.waits.map_page.ns = 1e6;
        profile.waits.unmap_page.ns = 1e6;
        let slow = mapper(&profile);
        // The clocks' rates may differ by a little.
        assert!(map(&slow) >= Duration::from_micros(5900));
        assert_eq!(slow.granules(range.len()), 4.0);
        let start = Instant::now();
        assert_eq!(slow.unmap(&platform, range, &mut gather).bytes, range.len());
        assert!(start.elapsed() >= Duration::from_micros(3900));
    }
}
