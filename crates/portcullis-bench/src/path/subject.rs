//! Who is measured.

use std::sync::Arc;

use portcullis::invalidation::{InvalidationQueue, SharedQueue};
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::linux::Composed;
use super::machine::AtOnce;
use super::old::Design;
use super::ours::Ours;
use super::parts::Parts;
use super::workload::{Case, Kind};
use crate::invalidation::hardware::{Hardware, Timing};
use crate::lane::Lane;
use crate::pgtable::linux::Kernel;
use crate::runner::Failure;
use crate::timer::OpTimer;

/// A subject's name and what to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubjectInfo {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    which: Which,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Portcullis,
    Linux(Kernel),
    Parts,
    Old(Design),
}

pub(crate) const OURS: &str = "portcullis";
pub(crate) const LINUX: &str = "linux";
pub(crate) const PARTS: &str = "parts";

/// All subjects, in the order in which they are reported.
pub const SUBJECTS: [SubjectInfo; 10] = [
    SubjectInfo {
        name: OURS,
        about: "what a driver calls: Queue, DmaDevice, RawBatch, StrictRing, BounceDevice, Swiotlb, AdaptiveRing",
        which: Which::Portcullis,
    },
    SubjectInfo {
        name: LINUX,
        about: "raw: Linux's alloc_iova_fast, map, unmap, invalidation, free_iova_fast one after the other, as its \
                dma-iommu.c calls them; page tables of 6.12 (Arm's stage 1, which is its fastest)",
        which: Which::Linux(Kernel::V6_12),
    },
    SubjectInfo {
        name: "linux-vtd",
        about: "the same with the newest kernel's tables in VT-d's second-stage format",
        which: Which::Linux(Kernel::Newest),
    },
    SubjectInfo {
        name: PARTS,
        about: "the limit: the library's own lowest calls in a row: IovaSpace::alloc, PageTable::map or map_list, and unmap, \
                InvalidationQueue::invalidate, IovaSpace::free",
        which: Which::Parts,
    },
    SubjectInfo {
        name: "lazy-2015",
        about: "lazy: a tree of addresses under a lock, one queue of 250 unmaps under another; where it is named",
        which: Which::Old(Design::Lazy2015),
    },
    SubjectInfo {
        name: "bitmap-2008",
        about: "lazy: the same with a bitmap of addresses; where it is named",
        which: Which::Old(Design::Bitmap2008),
    },
    SubjectInfo {
        name: "smmu-2017",
        about: "raw: a tree under a lock, a page table under another, which is held while each unmap waits; where it is named",
        which: Which::Old(Design::Smmu2017),
    },
    SubjectInfo {
        name: "swiotlb-2021",
        about: "swiotlb: an index that goes round all slots, under one lock; where it is named",
        which: Which::Old(Design::Swiotlb2021),
    },
    SubjectInfo {
        name: "swiotlb-lifo",
        about: "swiotlb: one list of slots, the newest first, under one lock; where it is named",
        which: Which::Old(Design::SwiotlbLifo),
    },
    SubjectInfo {
        name: "swiotlb-2022",
        about: "swiotlb: an area with a lock and an index for each thread; where it is named",
        which: Which::Old(Design::Swiotlb2022),
    },
];

/// The designs of the past among them, with what they are.
pub fn designs() -> impl Iterator<Item = (&'static SubjectInfo, Design)> {
    SUBJECTS.iter().filter_map(|info| Some((info, info.old()?)))
}

impl SubjectInfo {
    /// Whether it does `kind`.
    pub(crate) fn does(&self, kind: Kind) -> bool {
        match self.which {
            Which::Portcullis => true,
            Which::Linux(_) => matches!(kind, Kind::Raw | Kind::Sg),
            Which::Parts => matches!(kind, Kind::Raw | Kind::Typed | Kind::Sg | Kind::Lazy),
            Which::Old(design) => kind == design.kind(),
        }
    }

    /// Which design of the past it is, if it is one.
    pub(crate) fn old(&self) -> Option<Design> {
        if let Which::Old(design) = self.which { Some(design) } else { None }
    }

    pub(crate) fn is_linux(&self) -> bool {
        matches!(self.which, Which::Linux(_))
    }
}

/// What maps, shared by all threads of a domain.
pub(crate) trait Subject: Send + Sync {
    /// What thread `thread` works with.
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure>;

    /// Where a device gets to from `address`.
    fn reach(&self, address: u64) -> Option<u64>;

    /// Fails unless nothing is mapped any more. Every lane is gone.
    fn settle(&self) -> Result<(), Failure>;

    /// Has the hardware forget all that unmaps have left there, where that is asked for by itself.
    fn flush(&self) -> Result<(), Failure> {
        Ok(())
    }
}

/// What makes subjects.
pub(crate) struct Maker {
    /// One for all, as in a program: a thread that had used several would have to look for its CPU.
    pub platform: StdPlatform,
    pub timer: OpTimer,
    pub profile: Profile,
    pub linux: Option<super::linux::Libraries>,
}

impl Maker {
    /// A fresh subject for `case`.
    pub(crate) fn subject(&self, info: &SubjectInfo, case: &Case) -> Result<Arc<dyn Subject>, Failure> {
        if !info.does(case.workload.kind) {
            return Err(Failure::Unsupported("this subject does not do the workload".into()));
        }
        if let Which::Linux(kernel) = info.which {
            let libraries = self.linux.as_ref();
            let none = || Failure::Unsupported("no libraries with Linux's code were named".into());
            return Ok(Arc::new(Composed::new(libraries.ok_or_else(none)?, kernel, self.hardware(case))?));
        }
        match self.hardware(case) {
            None => self.ours(info, case, AtOnce),
            // Who shares waits is ours; the old designs wait one by one.
            Some(hardware) if info.old().is_some() => self.ours(info, case, hardware),
            Some(hardware) => self.ours(info, case, Arc::new(SharedQueue::new(hardware))),
        }
    }

    /// The hardware to wait for; none where the profile's answers at once.
    pub(super) fn hardware(&self, case: &Case) -> Option<Arc<Hardware>> {
        let (timing, costs) = (Timing::of(&self.profile), self.profile.waits.costs());
        let waits = costs.submission_ns > 0 || costs.request_ns > 0;
        waits.then(|| Arc::new(Hardware::new(timing, costs, &self.timer, case.crowded, None)))
    }

    fn ours<Q: InvalidationQueue + Clone>(
        &self,
        info: &SubjectInfo,
        case: &Case,
        queue: Q,
    ) -> Result<Arc<dyn Subject>, Failure> {
        Ok(match info.which {
            Which::Parts => Arc::new(Parts::new(&self.platform, queue)?),
            Which::Old(design) => design.subject(&self.platform, queue, case)?,
            Which::Portcullis | Which::Linux(_) => Arc::new(Ours::new(&self.platform, queue, case)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subject_does_the_kinds_that_are_its_own() {
        for info in &SUBJECTS {
            let expected: &[Kind] = match info.name {
                OURS => &Kind::ALL,
                LINUX | "linux-vtd" => &[Kind::Raw, Kind::Sg],
                PARTS => &[Kind::Raw, Kind::Typed, Kind::Lazy, Kind::Sg],
                "lazy-2015" | "bitmap-2008" => &[Kind::Lazy],
                "smmu-2017" => &[Kind::Raw],
                _ => &[Kind::Swiotlb],
            };
            for kind in Kind::ALL {
                assert_eq!(info.does(kind), expected.contains(&kind), "{} {kind:?}", info.name);
            }
        }
    }
}
