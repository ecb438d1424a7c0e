//! The invalidation queue: descriptors in order, executed at a wait descriptor.
//!
//! [`Queue`] is the driver's handle. As an [`InvalidationQueue`] it turns a request into the descriptors that a VT-d driver would write;
//! [`Queue::submit`] takes descriptors as they are. Hardware may execute a descriptor late, so this one always does: descriptors without a
//! later wait are not executed (unless the ring fills up), which exposes a driver that omits the wait.
//!
//! Tests can make a queue misbehave like broken hardware or a broken driver.

use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PageSize};
use portcullis::invalidation::{
    Block, Granularity, Invalidation, InvalidationError, InvalidationQueue, Request, blocks,
};
use smallvec::{SmallVec, smallvec};

use crate::iommu::Iommu;

/// Descriptors of the ring.
pub const RING_ENTRIES: usize = 256;
/// The code of [`InvalidationError::Rejected`] for an address mask above the hardware's largest.
pub const CODE_MASK_TOO_LARGE: u32 = 1;

/// One command to the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descriptor {
    /// Invalidates the translations of 2^`address_mask` pages of 4 KiB, from `address` aligned down to their size.
    PageSelective {
        /// The domain.
        domain: DomainId,
        /// An address in the block.
        address: Iova,
        /// The binary logarithm of the number of pages.
        address_mask: u32,
        /// The paging-structure caches may be kept (VT-d's IH).
        leaf_only: bool,
    },
    /// Invalidates everything of one domain.
    DomainSelective {
        /// The domain.
        domain: DomainId,
    },
    /// Invalidates a device TLB. (Hardware only takes blocks of pages, which [requests](Queue::descriptors) become; this takes any range.)
    DeviceTlb {
        /// The device.
        device: DeviceId,
        /// The addresses; `None` for all.
        range: Option<IovaRange>,
    },
    /// Executes everything before this, then reports it.
    Wait,
}

/// The invalidation queue of an [`Iommu`], for its driver.
#[derive(Debug, Clone)]
pub struct Queue {
    iommu: Arc<Iommu>,
}

impl Queue {
    pub(crate) fn new(iommu: Arc<Iommu>) -> Self {
        Self { iommu }
    }

    /// Writes descriptors into the ring and rings the doorbell once. They have been executed on return if the last of them is a wait.
    ///
    /// # Errors
    /// [`InvalidationError::Rejected`] with [`CODE_MASK_TOO_LARGE`]; none of them was written then. [`InvalidationError::DeviceTimedOut`]
    /// if a device did not answer; the others were executed.
    pub fn submit(&self, descriptors: &[Descriptor]) -> Result<(), InvalidationError> {
        self.iommu.submit(descriptors)
    }

    /// The descriptors of a request, without the wait behind them. Writes nothing.
    pub fn descriptors(&self, request: &Request) -> impl Iterator<Item = Descriptor> {
        self.iommu.descriptors(request).into_iter().map(|written| written.descriptor)
    }

    /// Answers the next `n` requests with success and does nothing: a driver or a unit that loses invalidations.
    pub fn drop_next(&self, n: u64) {
        self.iommu.misbehave(|faulty| faulty.drop = n);
    }

    /// Answers the next `n` requests with `error` and does nothing. Takes precedence over [`drop_next`](Self::drop_next).
    pub fn fail_next(&self, n: u64, error: InvalidationError) {
        self.iommu.misbehave(|faulty| faulty.fail = (n, Some(error)));
    }
}

// SAFETY: 1 to 4: the named cache entries are removed before `Ok` is returned, in order, under the lock that an access holds. (A
// misbehaving unit breaks this; but devices only reach atomics.)
#[allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]
unsafe impl InvalidationQueue for Queue {
    fn caches_absent(&self) -> bool {
        self.iommu.caches_absent()
    }

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.iommu.invalidate(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.iommu.invalidate(requests)
    }
}

/// Which requests to answer wrongly.
#[derive(Debug, Default)]
pub(crate) struct Misbehaviour {
    drop: u64,
    fail: (u64, Option<InvalidationError>),
    silent: Vec<DeviceId>,
}

impl Misbehaviour {
    /// The answer to a request that is not executed.
    pub(crate) fn answer(&mut self) -> Option<Result<(), InvalidationError>> {
        if let (left @ 1.., Some(error)) = &mut self.fail {
            *left -= 1;
            return Some(Err(*error));
        }
        if self.drop > 0 {
            self.drop -= 1;
            return Some(Ok(()));
        }
        None
    }

    pub(crate) fn set_silent(&mut self, device: DeviceId, silent: bool) {
        self.silent.retain(|other| *other != device);
        self.silent.extend(silent.then_some(device));
    }

    pub(crate) fn is_silent(&self, device: DeviceId) -> bool {
        self.silent.contains(&device)
    }
}

/// A descriptor in the ring, and the range of its request, on which a driver may rely.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) descriptor: Descriptor,
    /// `None` if the descriptor says it all.
    pub(crate) asked: Option<IovaRange>,
}

#[derive(Debug, Default)]
pub(crate) struct Ring {
    pending: VecDeque<Written>,
}

impl Ring {
    /// Writes a descriptor; returns whether the unit must execute before the next one is written.
    pub(crate) fn push(&mut self, written: Written) -> bool {
        self.pending.push_back(written);
        written.descriptor == Descriptor::Wait || self.pending.len() >= RING_ENTRIES
    }

    pub(crate) fn pop(&mut self) -> Option<Written> {
        self.pending.pop_front()
    }
}

/// A driver's descriptors for a request: the blocks of [`blocks()`], or the whole domain if there are none.
pub(crate) fn descriptors(request: &Request, max_mask: u32) -> SmallVec<[Written; 2]> {
    let Request { domain, invalidation } = *request;
    let page = PageSize::SIZE_4K;
    let of_blocks = |range, granularity, whole, name: &dyn Fn(Block) -> Descriptor| {
        blocks(range, page, granularity).map_or_else(|| smallvec![whole], |blocks| blocks.map(name).collect())
    };
    let (descriptors, asked): (SmallVec<[Descriptor; 2]>, _) = match invalidation {
        Invalidation::Domain => (smallvec![Descriptor::DomainSelective { domain }], None),
        Invalidation::Range { range, leaf_only } => {
            let name = |Block { address, order, .. }: Block| Descriptor::PageSelective {
                domain,
                address,
                address_mask: order,
                leaf_only,
            };
            let whole = Descriptor::DomainSelective { domain };
            (
                of_blocks(range, Granularity::Block { max_order: max_mask }, whole, &name),
                Some(whole_pages(range)),
            )
        }
        Invalidation::DeviceTlb { device, range } => {
            let name = |block: Block| Descriptor::DeviceTlb { device, range: block.range(page) };
            let whole = Descriptor::DeviceTlb { device, range: None };
            let descriptors = match range {
                Some(range) => of_blocks(range, Granularity::ANY_BLOCK, whole, &name),
                None => smallvec![whole],
            };
            (descriptors, None)
        }
    };
    descriptors.into_iter().map(|descriptor| Written { descriptor, asked }).collect()
}

/// The pages of 4 KiB that a range touches: hardware has no smaller ones.
fn whole_pages(range: IovaRange) -> IovaRange {
    let page = PageSize::SIZE_4K;
    let last = Iova::new(range.last().get() | page.offset_mask());
    // The whole address space has no length.
    IovaRange::from_bounds(range.start().align_down(page), last).unwrap_or(range)
}

/// The addresses of a page-selective descriptor; `None` for all of 64 bits.
pub(crate) fn block(address: Iova, address_mask: u32) -> Option<IovaRange> {
    let size = PageSize::from_shift(address_mask.checked_add(PageSize::SIZE_4K.shift())?)?;
    IovaRange::new(address.align_down(size), size.bytes()).ok()
}
