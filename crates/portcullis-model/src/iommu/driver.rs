//! The driver's side of the unit: contexts, and the invalidation queue's descriptors carried out.
//!
//! Attaching takes effect at once (no context is cached). Translations are cached by domain, not by device:
//! whoever re-uses a domain's number must invalidate it, as with hardware.

use std::sync::Arc;

use portcullis::invalidation::{DomainId, InvalidationError, Request};
use smallvec::SmallVec;

use super::{Context, DeviceId, Iommu, State};
use crate::queue::{CODE_MASK_TOO_LARGE, Descriptor, Misbehaviour, Queue, block, descriptors};

impl Iommu {
    /// Gives `device` a context in place of the one it has. O(pages that are open to the device).
    pub fn attach(&self, device: DeviceId, context: Context) {
        self.set_context(device, Some(context));
    }

    /// Takes a device's context away: from now on its accesses fault.
    pub fn detach(&self, device: DeviceId) {
        self.set_context(device, None);
    }

    /// The invalidation queue, for a driver.
    pub fn queue(self: &Arc<Self>) -> Queue {
        Queue::new(Arc::clone(self))
    }

    fn set_context(&self, device: DeviceId, context: Option<Context>) {
        let mut state = self.state.lock();
        let State { devices, exposure, unit, .. } = &mut *state;
        let index = devices.index(device);
        devices.contexts[index] = context;
        exposure.context_changed(unit, &devices.contexts, index);
    }

    /// All of `requests`, with one wait.
    pub(crate) fn invalidate(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let mut written: SmallVec<[Descriptor; 8]> = SmallVec::new();
        for request in requests {
            written.extend(descriptors(request, self.max_address_mask));
        }
        written.push(Descriptor::Wait);
        self.submit(&written)
    }

    pub(crate) fn submit(&self, descriptors: &[Descriptor]) -> Result<(), InvalidationError> {
        let too_large = |descriptor: &Descriptor| match *descriptor {
            Descriptor::PageSelective { address_mask, .. } => address_mask > self.max_address_mask,
            _ => false,
        };
        let mut state = self.state.lock();
        if let Some(answer) = state.misbehaviour.answer() {
            return answer;
        }
        if descriptors.iter().any(too_large) {
            return Err(InvalidationError::Rejected { code: CODE_MASK_TOO_LARGE });
        }
        state.unit.stats.submissions += 1;
        for &descriptor in descriptors {
            if state.ring.push(descriptor) {
                state.carry_out(self.honours_leaf_only);
            }
        }
        Ok(())
    }

    pub(crate) fn misbehave(&self, change: impl FnOnce(&mut Misbehaviour)) {
        change(&mut self.state.lock().misbehaviour);
    }
}

impl State {
    /// Acts on everything in the ring.
    fn carry_out(&mut self, honours_leaf_only: bool) {
        while let Some(descriptor) = self.ring.pop() {
            match descriptor {
                Descriptor::PageSelective { domain, address, address_mask, leaf_only } => {
                    self.unit.stats.range_invalidations += 1;
                    match block(address, address_mask) {
                        Some(range) => self.unit.forget_range(domain, range, leaf_only),
                        None => self.unit.forget_domain(domain),
                    }
                    if !honours_leaf_only {
                        self.unit.walk_cache.invalidate_domain(domain);
                    }
                    self.touch(domain);
                }
                Descriptor::DomainSelective { domain } => {
                    self.unit.stats.domain_invalidations += 1;
                    self.unit.forget_domain(domain);
                    self.touch(domain);
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
