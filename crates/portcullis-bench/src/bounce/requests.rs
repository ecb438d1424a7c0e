//! Hardware whose mappings are requests: it takes the profile's waits for them, in real time.
//!
//! What the library does for a mapping is that of tables in memory; where a request takes their place, the table's few
//! nanoseconds stand for putting it together. The hardware works on one thing at a time: requests to map wait for
//! invalidations, and the other way round.

use std::sync::Arc;

use portcullis::invalidation::SharedQueue;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::{Profile, RequestMapper, RequestWaits, Waits};

use crate::invalidation::hardware::Hardware;
use crate::invalidation::parts::{FramesInUse, Tables, tables};
use crate::runner::Failure;

/// Tables, and hardware that may have to be told of each change.
pub(crate) type ByRequest = RequestMapper<Tables<SharedQueue<Arc<Hardware>>>, Requests>;

/// What hardware takes for requests, in nanoseconds.
pub(crate) struct Requests {
    hardware: Arc<Hardware>,
    map_request: f64,
    map_page: f64,
    /// The request to unmap is the invalidation.
    unmap_page: f64,
}

impl RequestWaits for Requests {
    fn by_request(&self) -> bool {
        self.map_request + self.map_page + self.unmap_page > 0.0
    }

    fn mapped(&self, granules: u64) {
        self.hardware.work_ns(self.map_request + self.map_page * granules as f64);
    }

    fn unmapped(&self, granules: u64) {
        self.hardware.work_ns(self.unmap_page * granules as f64);
    }
}

/// A mapper with nothing mapped.
pub(crate) fn by_request(
    platform: &StdPlatform,
    hardware: Arc<Hardware>,
    profile: &Profile,
) -> Result<(ByRequest, FramesInUse), Failure> {
    let (tables, frames) = tables(platform, SharedQueue::new(Arc::clone(&hardware)))?;
    let Waits { map_request, map_page, unmap_page, .. } = &profile.waits;
    let (map_request, map_page, unmap_page) = (map_request.ns, map_page.ns, unmap_page.ns);
    let requests = Requests { hardware, map_request, map_page, unmap_page };
    Ok((RequestMapper::new(tables, Arc::new(requests)), frames))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
    use portcullis::invalidation::{Costs, Gather};
    use portcullis::mapper::Mapper;

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
            by_request(&platform, Arc::new(hardware), profile).unwrap().0
        };
        let range = IovaRange::new(Iova::new(1 << 20), 4 << 12).unwrap();
        let map = |mapper: &ByRequest| {
            let (list, start) = ([(PhysAddr::new(1 << 30), range.len())], Instant::now());
            // SAFETY: no device is behind it.
            unsafe { mapper.map(&platform, range, list, Permissions::READ.into(), &mut Gather::new()) }
                .unwrap();
            start.elapsed()
        };
        profile.waits.map_request.ns = 2e6;
        profile.waits.map_page.ns = 1e6;
        profile.waits.unmap_page.ns = 1.5e6;
        let slow = mapper(&profile);
        // The clocks' rates may differ by a little.
        assert!(map(&slow) >= Duration::from_micros(5900));
        let start = Instant::now();
        assert_eq!(slow.unmap(&platform, range, &mut Gather::new()).bytes, range.len());
        assert!(start.elapsed() >= Duration::from_micros(5900));
        // Pages alone may take time.
        profile.waits.map_request.ns = 0.0;
        assert!(map(&mapper(&profile)) >= Duration::from_micros(3900));
    }

    /// Any of the three makes mappings requests.
    #[test]
    fn what_takes_time_is_by_request() {
        let timer = OpTimer::calibrated();
        let hardware = || Arc::new(Hardware::new(Timing::NONE, Costs::BARE_METAL, &timer, true, None));
        for (map_request, map_page, unmap_page) in
            [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)]
        {
            let requests = Requests { hardware: hardware(), map_request, map_page, unmap_page };
            let expected = [map_request, map_page, unmap_page].contains(&1.0);
            assert_eq!(requests.by_request(), expected, "{map_request} {map_page} {unmap_page}");
        }
    }
}
