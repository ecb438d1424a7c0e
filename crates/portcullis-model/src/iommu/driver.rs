//! The driver's side of the unit: contexts, and the execution of invalidation descriptors.
//!
//! Attaching takes effect at once (no context is cached). Translations are tagged by domain, not by device: a driver that reuses a domain
//! number must invalidate it first, as with hardware.

use std::sync::Arc;

use portcullis::addr::DomainId;
use portcullis::invalidation::{InvalidationError, Request};
use smallvec::SmallVec;

use super::{Context, DeviceId, Iommu, State};
use crate::queue::{CODE_MASK_TOO_LARGE, Descriptor, Misbehaviour, Queue, Written, block, descriptors};

impl Iommu {
    /// Replaces the context of `device`, and removes its TLB. O(pages that are open to the device).
    pub fn attach(&self, device: DeviceId, context: Context) {
        self.set_context(device, Some(context), None);
    }

    /// The same for a device with a TLB of up to `entries` translations (in sets of 8), as with PCIe's Address Translation Services
    /// enabled. It looks there first, and keeps a translation until it needs the room, its TLB is invalidated, or it is attached again or
    /// detached. IOTLB invalidations do not affect it. Its TLB is empty at first.
    pub fn attach_with_tlb(&self, device: DeviceId, context: Context, entries: usize) {
        self.set_context(device, Some(context), Some(entries));
    }

    /// Whether `device` does not answer invalidations of its TLB: they fail with [`InvalidationError::DeviceTimedOut`] and are not
    /// executed. Other requests of the submission are.
    pub fn set_silent(&self, device: DeviceId, silent: bool) {
        self.misbehave(|faulty| faulty.set_silent(device, silent));
    }

    /// Removes a device's context: from now on its accesses fault.
    pub fn detach(&self, device: DeviceId) {
        self.set_context(device, None, None);
    }

    /// The invalidation queue, for a driver.
    pub fn queue(self: &Arc<Self>) -> Queue {
        Queue::new(Arc::clone(self))
    }

    fn set_context(&self, device: DeviceId, context: Option<Context>, tlb_entries: Option<usize>) {
        let mut state = self.state.lock();
        let index = state.devices.index(device);
        state.unit.forget_of_device(index, None);
        state.settle_released();
        state.unit.device_tlbs.give(index, tlb_entries);
        let State { devices, exposure, unit, .. } = &mut *state;
        devices.contexts[index] = context;
        exposure.context_changed(unit, &devices.contexts, index);
    }

    /// Executes all of `requests`, with one wait.
    pub(crate) fn invalidate(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let mut all: SmallVec<[Written; 8]> = SmallVec::new();
        for request in requests {
            all.extend(self.descriptors(request));
        }
        all.push(Written { descriptor: Descriptor::Wait, asked: None });
        self.write(all.iter().copied())
    }

    pub(crate) fn descriptors(&self, request: &Request) -> SmallVec<[Written; 2]> {
        descriptors(request, self.max_address_mask)
    }

    pub(crate) fn submit(&self, descriptors: &[Descriptor]) -> Result<(), InvalidationError> {
        self.write(descriptors.iter().map(|descriptor| Written { descriptor: *descriptor, asked: None }))
    }

    fn write(&self, all: impl Iterator<Item = Written> + Clone) -> Result<(), InvalidationError> {
        let too_large = |written: Written| match written.descriptor {
            Descriptor::PageSelective { address_mask, .. } => address_mask > self.max_address_mask,
            _ => false,
        };
        let mut state = self.state.lock();
        if let Some(answer) = state.misbehaviour.answer() {
            return answer;
        }
        if all.clone().any(too_large) {
            return Err(InvalidationError::Rejected { code: CODE_MASK_TOO_LARGE });
        }
        state.unit.stats.submissions += 1;
        for written in all {
            if state.ring.push(written) {
                state.carry_out(self);
            }
        }
        state.unanswered.take().map_or(Ok(()), Err)
    }

    pub(crate) fn misbehave(&self, change: impl FnOnce(&mut Misbehaviour)) {
        change(&mut self.state.lock().misbehaviour);
    }
}

impl State {
    /// Executes everything in the ring.
    fn carry_out(&mut self, iommu: &Iommu) {
        while let Some(Written { descriptor, asked }) = self.ring.pop() {
            match descriptor {
                Descriptor::PageSelective { domain, address, address_mask, leaf_only } => {
                    self.unit.stats.range_invalidations += 1;
                    match block(address, address_mask) {
                        Some(block) => {
                            self.unit.forget_range(domain, block, asked.unwrap_or(block), leaf_only);
                        }
                        None => self.unit.forget_domain(domain, asked),
                    }
                    if !iommu.honours_leaf_only {
                        self.unit.walk_cache.invalidate_domain(domain);
                    }
                    self.touch(domain);
                }
                Descriptor::DomainSelective { domain } => {
                    self.unit.stats.domain_invalidations += 1;
                    self.unit.forget_domain(domain, asked);
                    self.touch(domain);
                }
                Descriptor::DeviceTlb { device, .. } if self.misbehaviour.is_silent(device) => {
                    let waited_ns = iommu.device_tlb_timeout_ns;
                    let error = InvalidationError::DeviceTimedOut { device: device.0, waited_ns };
                    self.unanswered.get_or_insert(error);
                }
                Descriptor::DeviceTlb { device, range } => {
                    self.unit.stats.device_invalidations += 1;
                    let (index, _) = self.devices.find(device);
                    self.unit.forget_of_device(index, range);
                }
                Descriptor::Wait => self.unit.stats.waits += 1,
            }
        }
        self.settle_released();
        while let Some(domain) = self.touched.pop() {
            self.exposure.domain_invalidated(&mut self.unit, &self.devices.contexts, domain);
        }
    }

    fn touch(&mut self, domain: DomainId) {
        if !self.touched.contains(&domain) {
            self.touched.push(domain);
        }
    }
}
