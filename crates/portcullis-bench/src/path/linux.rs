//! Linux's own parts, composed as its `dma-iommu.c` composes them: an address, a map; an unmap, an invalidation that is
//! waited for, and the address back.

use std::path::Path;
use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::platform::FRAME_SIZE;

use super::machine::{AtOnce, phys};
use super::subject::Subject;
use super::workload::{Case, Kind};
use crate::invalidation::hardware::Hardware;
use crate::iova::allocator::{Allocator, Pages};
use crate::iova::linux as iova;
use crate::iova::workload::Space;
use crate::lane::{Lane, put};
use crate::pgtable::linux::{self as pgtable, Kernel};
use crate::pgtable::table::Table;
use crate::rival::RivalError;
use crate::runner::Failure;

/// The two libraries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Libraries {
    iova: iova::Library,
    pgtable: pgtable::Library,
    /// The highest core that a thread runs on.
    last_core: Option<usize>,
}

impl Libraries {
    pub(crate) fn open(iova: &Path, pgtable: &Path, last_core: Option<usize>) -> Result<Self, RivalError> {
        Ok(Self { iova: iova::Library::open(iova)?, pgtable: pgtable::Library::open(pgtable)?, last_core })
    }
}

/// An address space and page tables of Linux's.
pub(crate) struct Composed {
    space: iova::Linux,
    tables: pgtable::Linux,
    hardware: Option<Arc<Hardware>>,
}

impl Composed {
    pub(crate) fn new(
        libraries: &Libraries,
        kernel: Kernel,
        hardware: Option<Arc<Hardware>>,
    ) -> Result<Self, Failure> {
        let format = match kernel {
            Kernel::V6_12 => "arm-s1-4k",
            Kernel::Newest => "vtd-ss",
        };
        let space = iova::make(&libraries.iova, libraries.last_core)(&Space { pages: 1 << 36, live: 1 })?;
        Ok(Self { space, tables: libraries.pgtable.linux(format, kernel, true)?, hardware })
    }

    /// What the driver of the IOMMU does when the unmap is over.
    #[inline]
    fn forget(&self, range: Pages) -> bool {
        let range = IovaRange::new(Iova::new(range.first * FRAME_SIZE), range.pages * FRAME_SIZE);
        range.is_ok_and(|range| {
            let invalidation = Invalidation::Range { range, leaf_only: true };
            match &self.hardware {
                Some(hardware) => hardware.invalidate(DomainId(1), invalidation).is_ok(),
                None => AtOnce.invalidate(DomainId(1), invalidation).is_ok(),
            }
        })
    }
}

impl Subject for Composed {
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let ranges = vec![None; case.live];
        Ok(Box::new(Calls { composed: self, case: *case, thread, ranges }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.tables.phys(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }
}

struct Calls {
    composed: Arc<Composed>,
    case: Case,
    thread: usize,
    ranges: Vec<Option<Pages>>,
}

impl Lane for Calls {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let Composed { space, tables, .. } = &*self.composed;
        let pages = self.case.workload.pages;
        let Some(range) = space.alloc(pages) else {
            return false;
        };
        let (iova, at) = (range.first * FRAME_SIZE, phys(&self.case, self.thread, index));
        let mapped = if self.case.workload.kind == Kind::Sg {
            // One call for each segment, as `iommu_map_sg` does for segments that do not adjoin.
            (0..pages)
                .all(|page| tables.map(iova + page * FRAME_SIZE, at + page * 2 * FRAME_SIZE, FRAME_SIZE, 1))
        } else {
            tables.map(iova, at, FRAME_SIZE, pages)
        };
        put(&mut self.ranges, index, mapped.then_some(Some(range)))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let Some(range) = self.ranges[index] else {
            return false;
        };
        self.composed.tables.unmap(range.first * FRAME_SIZE, FRAME_SIZE, range.pages)
            && self.composed.forget(range)
            && self.composed.space.free(range)
    }

    fn address(&self, index: usize) -> u64 {
        self.ranges[index].map_or(0, |range| range.first * FRAME_SIZE)
    }
}
