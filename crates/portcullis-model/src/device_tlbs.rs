//! The TLBs that devices have of their own (PCIe's Address Translation Services).
//!
//! A device with one looks there first, and what it fetches from the unit it keeps: until its TLB needs the room,
//! or is told to forget it. An invalidation of the IOTLB is nothing to it. Each is an [`Iotlb`] of its own, so that
//! the ledger's marks mean the same in both.

use std::num::NonZeroU32;

use portcullis::addr::{DomainId, Iova, IovaRange};

use crate::iotlb::{Entry, Iotlb, IotlbConfig};

/// Translations that share a set of a device's TLB.
const WAYS: usize = 8;

/// By the devices' places in the order of devices. Empty as long as no device has a TLB: asking it costs a
/// comparison then.
#[derive(Debug, Default)]
pub(crate) struct DeviceTlbs {
    tlbs: Vec<Option<Iotlb>>,
}

impl DeviceTlbs {
    /// Gives a device an empty TLB of `entries`, or takes away the one it has.
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

    /// Puts what the unit has answered into the device's TLB, if it has one. The mark of a stale entry that had
    /// to go for it.
    pub(crate) fn keep(&mut self, device: usize, entry: Entry) -> Option<NonZeroU32> {
        self.of_mut(device)?.insert(Entry { stale: None, ..entry })?.stale
    }

    /// The TLB of a device.
    pub(crate) fn of(&self, device: usize) -> Option<&Iotlb> {
        self.tlbs.get(device)?.as_ref()
    }

    /// The TLB of a device.
    pub(crate) fn of_mut(&mut self, device: usize) -> Option<&mut Iotlb> {
        self.tlbs.get_mut(device)?.as_mut()
    }

    /// Removes what lies in `range` as a whole, or everything. O(capacity).
    pub(crate) fn invalidate(&mut self, device: usize, range: Option<IovaRange>, removed: impl FnMut(Entry)) {
        if let Some(tlb) = self.of_mut(device) {
            tlb.invalidate_if(|entry| range.is_none_or(|range| entry.is_within(range)), removed);
        }
    }
}
