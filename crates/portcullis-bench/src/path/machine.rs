//! What every subject of ours stands on: a domain over page tables, and the queue behind it.

use std::hint::black_box;

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::platform::{FRAME_SIZE, Platform};

use super::workload::Case;
use crate::invalidation::parts::{FramesInUse, Tables, settled, tables};
use crate::runner::Failure;

/// A queue that confirms at once: what is left is the library's own cost.
#[derive(Debug, Clone, Copy)]
pub struct AtOnce;

// SAFETY: nothing is cached by anything, so there is nothing to forget.
unsafe impl InvalidationQueue for AtOnce {
    #[inline(never)]
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        // By reference: the CPU would stall on a copy, which reads words that were written as bytes, and the stall would be
        // taken for the library's.
        black_box((domain, &invalidation));
        Ok(())
    }

    #[inline(never)]
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        black_box(requests);
        Ok(())
    }
}

pub(crate) fn refused(error: impl std::error::Error) -> Failure {
    Failure::Refused(error.to_string())
}

/// A domain and what it stands on.
pub(crate) struct World<Q: InvalidationQueue, P: Platform> {
    pub domain: Shared<Domain<Tables<Q>, P>>,
    frames: FramesInUse,
    platform: P,
}

impl<Q: InvalidationQueue, P: Platform + Clone> World<Q, P> {
    pub(crate) fn new(platform: &P, queue: Q, policy: Policy) -> Result<Self, Failure> {
        let (mapper, frames) = tables(platform, queue)?;
        let domain = Domain::new(platform.clone(), mapper, policy).map_err(refused)?;
        Ok(Self { domain, frames, platform: platform.clone() })
    }

    /// Where a device gets to from `iova`.
    pub(crate) fn reach(&self, iova: u64) -> Option<u64> {
        let table = self.domain.mapper().table();
        table.iova_to_phys(&self.platform, Iova::new(iova)).map(PhysAddr::get)
    }

    pub(crate) fn flush(&self) -> Result<(), Failure> {
        self.domain.flush().map_err(refused)
    }

    /// Fails unless nothing is mapped any more. Addresses may be kept.
    pub(crate) fn is_unmapped(&self) -> Result<(), Failure> {
        self.flush()?;
        self.frames.only_the_root(self.domain.mapper(), &self.platform)
    }

    /// Fails unless nothing is mapped any more, and no address is lost.
    pub(crate) fn settle(&self) -> Result<(), Failure> {
        self.flush()?;
        // What waited for the flush comes back when addresses run out: more are asked for than there are.
        let everything = self.domain.stats().iova_bytes;
        let limit = Iova::new(u64::MAX);
        let list = [PhysSegment { phys: PhysAddr::new(0), len: everything }];
        // SAFETY: no device is behind these tables; and the call is refused, as one page of addresses is reserved.
        let refused = unsafe { self.domain.map(&list, Permissions::READ, limit) };
        if refused.is_ok() {
            return Err(Failure::Broken("more was mapped than there are addresses".into()));
        }
        let stats = self.domain.stats();
        let handed_out = stats.taken_iova_bytes.saturating_sub(stats.cached_iova_bytes);
        settled(self.domain.mapper(), &self.frames, &self.platform, handed_out)
    }
}

/// The memory of mapping `index` of thread `thread`, where none is copied: numbers that no two mappings share. Page
/// `n` of a list lies `2 n` pages behind it, so that no two of its segments adjoin.
#[inline]
pub(crate) fn phys(case: &Case, thread: usize, index: usize) -> u64 {
    ((thread as u64 + 1) << 36) + index as u64 * (2 * case.workload.bytes() + FRAME_SIZE)
}

/// The memory of the list that is mapping `index` of thread `thread`: a segment for each page.
pub(crate) fn list(case: &Case, thread: usize, index: usize) -> impl Iterator<Item = PhysSegment> {
    let first = phys(case, thread, index);
    let at = move |page| PhysAddr::new(first + 2 * page * FRAME_SIZE);
    (0..case.workload.pages).map(move |page| PhysSegment { phys: at(page), len: FRAME_SIZE })
}
