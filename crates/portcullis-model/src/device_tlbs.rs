//! Device TLBs (PCIe's Address Translation Services).
//!
//! A device with one looks there first, and caches what the unit returns, until it needs the room or gets an invalidation. An IOTLB
//! invalidation does not affect it. Each is an [`Iotlb`] of its own, so that the ledger's handles work in both.

use std::num::NonZeroU32;

use portcullis::addr::{DomainId, Iova, IovaRange};

use crate::iotlb::{Entry, Iotlb, IotlbConfig};

/// Ways of a device TLB.
const WAYS: usize = 8;

/// By device index. Empty while no device has a TLB, which makes a lookup cost one comparison.
#[derive(Debug, Default)]
pub(crate) struct DeviceTlbs {
    tlbs: Vec<Option<Iotlb>>,
}

impl DeviceTlbs {
    /// Gives a device an empty TLB of `entries`, or removes its TLB.
    pub(crate) fn give(&mut self, device: usize, entries: Option<usize>) {
        if self.tlbs.len() <= device && entries.is_some() {
            self.tlbs.resize_with(device + 1, || None);
        }
        if let Some(tlb) = self.tlbs.get_mut(device) {
            *tlb = entries.map(|entries| Iotlb::new(IotlbConfig { entries, ways: WAYS }));
        }
    }

    /// The translation of `iova`, which becomes the most recently used of its set.
    pub(crate) fn lookup(&mut self, device: usize, domain: DomainId, iova: Iova) -> Option<Entry> {
        self.of_mut(device)?.lookup(domain, iova)
    }

    /// Caches the unit's result in the device's TLB, if it has one. Returns the handle of an evicted stale entry.
    pub(crate) fn keep(&mut self, device: usize, entry: Entry) -> Option<NonZeroU32> {
        self.of_mut(device)?.insert(Entry { stale: None, ..entry })?.stale
    }

    pub(crate) fn of(&self, device: usize) -> Option<&Iotlb> {
        self.tlbs.get(device)?.as_ref()
    }

    pub(crate) fn of_mut(&mut self, device: usize) -> Option<&mut Iotlb> {
        self.tlbs.get_mut(device)?.as_mut()
    }

    /// Removes entries that lie in `range` as a whole, or all. O(capacity).
    pub(crate) fn invalidate(&mut self, device: usize, range: Option<IovaRange>, removed: impl FnMut(Entry)) {
        if let Some(tlb) = self.of_mut(device) {
            tlb.invalidate_if(|entry| range.is_none_or(|range| entry.is_within(range)), removed);
        }
    }
}
