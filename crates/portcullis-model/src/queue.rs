//! The invalidation queue: descriptors in order, carried out when a wait descriptor is reached.
//!
//! [`Queue`] is what a driver holds. As an [`InvalidationQueue`] it turns a request into the descriptors that
//! a VT-d driver would write; [`Queue::submit`] takes descriptors as they are. Hardware is free to act on a
//! descriptor late, so this one always does: what no wait follows is not carried out (unless the ring fills
//! up), and a driver that forgets the wait is found out.
//!
//! A queue can be told to misbehave, so that tests can see what they would see with broken hardware or a
//! broken driver.

use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PageSize};
use portcullis::invalidation::{
    Block, Granularity, Invalidation, InvalidationError, InvalidationQueue, Request, blocks,
};
use smallvec::{SmallVec, smallvec};

use crate::iommu::Iommu;

/// Descriptors that the ring holds.
pub const RING_ENTRIES: usize = 256;
/// The code of [`InvalidationError::Rejected`] for an address mask above the hardware's largest.
pub const CODE_MASK_TOO_LARGE: u32 = 1;

/// One command to the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descriptor {
    /// Forget the translations of 2^`address_mask` pages of 4 KiB, from `address` aligned down to as many.
    PageSelective {
        /// Whose translations.
        domain: DomainId,
        /// An address in the block.
        address: Iova,
        /// The binary logarithm of the number of pages.
        address_mask: u32,
        /// The paging-structure caches may be kept (the hint that VT-d calls IH).
        leaf_only: bool,
    },
    /// Forget everything of one domain.
    DomainSelective {
        /// Whose.
        domain: DomainId,
    },
    /// Have a device forget what its own TLB holds. (Hardware takes blocks of pages alone, and that is what
    /// [requests](Queue::descriptors) become; this takes any range.)
    DeviceTlb {
        /// Whose.
        device: DeviceId,
        /// Which addresses; `None` for all.
        range: Option<IovaRange>,
    },
    /// Carry out everything before this, then say so.
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

    /// Writes descriptors into the ring and rings the doorbell once. They have been carried out when this
    /// returns if the last of them is a wait.
    ///
    /// # Errors
    /// [`InvalidationError::Rejected`] with [`CODE_MASK_TOO_LARGE`]; none of them was written then.
    /// [`InvalidationError::DeviceTimedOut`] where a device did not answer; the others were carried out.
    pub fn submit(&self, descriptors: &[Descriptor]) -> Result<(), InvalidationError> {
        self.iommu.submit(descriptors)
    }

    /// The descriptors that a request becomes, without the wait behind them. Writes nothing.
    pub fn descriptors(&self, request: &Request) -> impl Iterator<Item = Descriptor> {
        self.iommu.descriptors(request).into_iter().map(|written| written.descriptor)
    }

    /// Answers the next `n` requests with success and does nothing about them: a driver or a unit that loses
    /// invalidations.
    pub fn drop_next(&self, n: u64) {
        self.iommu.misbehave(|faulty| faulty.drop = n);
    }

    /// Answers the next `n` requests with `error` and does nothing about them. Goes before
    /// [`drop_next`](Self::drop_next).
    pub fn fail_next(&self, n: u64, error: InvalidationError) {
        self.iommu.misbehave(|faulty| faulty.fail = (n, Some(error)));
    }
}

// SAFETY: the unit's caches are emptied of what is named before `Ok` is returned, under the lock that an access holds. (A unit
// that was told to misbehave breaks its word; but what devices reach is atomics.)
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
    /// The answer to a request that is not to be carried out.
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

/// A descriptor in the ring, and the range that a driver wrote it for: the whole of what it may rely on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) descriptor: Descriptor,
    /// `None` where it was written for what it says.
    pub(crate) asked: Option<IovaRange>,
}

/// The ring itself.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    pending: VecDeque<Written>,
}

impl Ring {
    /// Writes a descriptor; the answer says whether the unit must act before the next one is written.
    pub(crate) fn push(&mut self, written: Written) -> bool {
        self.pending.push_back(written);
        written.descriptor == Descriptor::Wait || self.pending.len() >= RING_ENTRIES
    }

    pub(crate) fn pop(&mut self) -> Option<Written> {
        self.pending.pop_front()
    }
}

/// What a driver writes for a request: the blocks of [`blocks()`], or the whole domain where there are none.
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

/// The pages of 4 KiB that a range touches: hardware knows no smaller ones.
fn whole_pages(range: IovaRange) -> IovaRange {
    let page = PageSize::SIZE_4K;
    let last = Iova::new(range.last().get() | page.offset_mask());
    // What goes from the first address to the last has no length.
    IovaRange::from_bounds(range.start().align_down(page), last).unwrap_or(range)
}

/// The addresses that a page-selective descriptor covers; `None` for all that 64 bits can name.
pub(crate) fn block(address: Iova, address_mask: u32) -> Option<IovaRange> {
    let size = PageSize::from_shift(address_mask.checked_add(PageSize::SIZE_4K.shift())?)?;
    IovaRange::new(address.align_down(size), size.bytes()).ok()
}
