//! The ledger's side of the unit: declared mappings, and the resulting exposure. [`crate::exposure`] has the definitions.

use super::{DeviceId, Iommu, State};
use crate::exposure::{Exposed, Segment};

impl Iommu {
    /// A mapping of `segments` has begun at `time`. Call it after the driver's map has returned.
    ///
    /// O(pages of the mapping), with up to two page-table walks for each segment.
    pub fn observe_map(&self, device: DeviceId, time: u64, segments: impl IntoIterator<Item = Segment>) {
        let mut state = self.state.lock();
        let State { devices, exposure, unit, .. } = &mut *state;
        let index = devices.index(device);
        exposure.set_time(time);
        for segment in segments {
            exposure.mapped(unit, devices.contexts[index], index, segment);
        }
    }

    /// The mapping of `segments`, the same as in [`observe_map`](Self::observe_map), has ended at `time`. Call it after the driver's unmap
    /// has returned.
    ///
    /// Probes every page with a stale access. Returns how many pages could still be reached: anything but 0 is a violation if unmap
    /// promises that there are none. O(pages of the mapping), a lookup for each.
    pub fn observe_unmap(
        &self,
        device: DeviceId,
        time: u64,
        segments: impl IntoIterator<Item = Segment>,
    ) -> u64 {
        let mut state = self.state.lock();
        let State { devices, exposure, unit, .. } = &mut *state;
        let index = devices.index(device);
        exposure.set_time(time);
        let mut reached = 0;
        for segment in segments {
            reached += exposure.unmapped(unit, devices.contexts[index], index, segment);
        }
        reached
    }

    /// Sets the time at which a later access or invalidation ends an exposure. Time is monotonic; an earlier `time` changes nothing.
    pub fn set_time(&self, time: u64) {
        self.state.lock().exposure.set_time(time);
    }

    /// The exposure of `device`, up to the latest time that was set. O(pages open to the device).
    pub fn exposure(&self, device: DeviceId) -> Exposed {
        let state = self.state.lock();
        state.devices.index.get(&device).map_or_else(Exposed::default, |&index| state.exposure.of(index))
    }

    /// The exposure of all devices: sums, and the longest of any.
    pub fn total_exposure(&self) -> Exposed {
        self.state.lock().exposure.total()
    }

    /// Pages in the ledger now, of all devices: each costs some hundred bytes, and twice that if several ranges of it are live or open.
    /// O(devices).
    pub fn pages_observed(&self) -> u64 {
        self.state.lock().exposure.pages()
    }
}
