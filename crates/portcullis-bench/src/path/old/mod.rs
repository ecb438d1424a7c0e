//! Designs of the past, written from what their papers and threads describe, to be measured beside ours.
//!
//! All stand on the same page table and hardware, so that what differs is how they are put together: the locks, what is done
//! under them, and who waits. Where a description leaves a choice it was made in the old design's favour.

mod lock;
mod ranges;
mod slots;
mod tables;

use std::sync::Arc;

pub use lock::watch_with;
use portcullis::invalidation::InvalidationQueue;
use portcullis::iova::Bitmap;
use portcullis::platform::Platform;

use super::subject::Subject;
use super::workload::{Case, Kind};
use crate::runner::Failure;
use ranges::Ranges;
use slots::{Order, Slots};
use tables::{Deferred, Waiting};

/// A design of the past.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Design {
    /// Intel VT-d until 2016: addresses in a tree that is searched range by range, under a lock, and unmaps in one queue of 250 under another; who finds it full
    /// has the hardware forget everything, and frees them all, with the lock held.
    Lazy2015,
    /// The same with a bitmap in the tree's place, as was proposed in 2008.
    Bitmap2008,
    /// Arm's SMMU in 2017: the same tree under a lock, each page of a table under another, and the unmap of each page
    /// waits for the hardware with that and the command queue's lock held.
    Smmu2017,
    /// Swiotlb until 2022: an index that goes round all slots, under one lock.
    Swiotlb2021,
    /// The patch of 2021: slots in one list, the last that was freed first, under one lock.
    SwiotlbLifo,
    /// Swiotlb since 2022: an area with a lock and an index for each CPU.
    Swiotlb2022,
}

impl Design {
    /// What is called of it.
    pub fn kind(self) -> Kind {
        match self {
            Self::Lazy2015 | Self::Bitmap2008 => Kind::Lazy,
            Self::Smmu2017 => Kind::Raw,
            Self::Swiotlb2021 | Self::SwiotlbLifo | Self::Swiotlb2022 => Kind::Swiotlb,
        }
    }

    /// A fresh one.
    pub(super) fn subject<Q: InvalidationQueue + 'static, P: Platform + Clone + 'static>(
        self,
        platform: &P,
        queue: Q,
        case: &Case,
    ) -> Result<Arc<dyn Subject>, Failure> {
        Ok(match self {
            Self::Lazy2015 => Arc::new(Deferred::<Ranges, Q, P>::new(platform, queue)?),
            Self::Bitmap2008 => Arc::new(Deferred::<Bitmap, Q, P>::new(platform, queue)?),
            Self::Smmu2017 => Arc::new(Waiting::new(platform, queue)?),
            Self::Swiotlb2021 => Arc::new(Slots::new(case, Order::Rotating, 1)?),
            Self::SwiotlbLifo => Arc::new(Slots::new(case, Order::Newest, 1)?),
            Self::Swiotlb2022 => Arc::new(Slots::new(case, Order::Rotating, case.threads)?),
        })
    }
}
