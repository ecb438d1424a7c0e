//! Who is measured.

use std::sync::Arc;

use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::bare::Bare;
use super::linux::{self, Linux};
use super::memory::{Buffers, Ram};
use super::pool::{Machine, Pooled, Strict};
use super::rotating::Rotating;
use super::swiotlb::Slots;
use super::workload::{Case, Shape};
use crate::lane::Lane;
use crate::runner::Failure;
use crate::timer::OpTimer;

/// A subject's name and what to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubjectInfo {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    pub(super) which: Which,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Portcullis,
    Copy,
    Linux,
    Rotating,
    Strict,
}

pub(crate) const OURS: &str = "portcullis";
pub(crate) const COPY: &str = "copy";
pub(crate) const LINUX: &str = "linux";
pub(crate) const ROTATING: &str = "rotating";
pub(crate) const STRICT: &str = "strict";

/// All subjects, in the order in which they are reported.
pub const SUBJECTS: [SubjectInfo; 5] = [
    SubjectInfo {
        name: OURS,
        about: "slot and swiotlb: Swiotlb, with slots of 2 KiB (slot: its memory copies nothing); pool: BounceDevice \
                of a trusted device, whose buffers stay mapped",
        which: Which::Portcullis,
    },
    SubjectInfo {
        name: COPY,
        about: "the limit: the copies that the workload's promise takes and nothing else, between the same buffers \
                each time, so that they are hot as far as the caches hold them",
        which: Which::Copy,
    },
    SubjectInfo {
        name: LINUX,
        about: "Linux's swiotlb in the shared library, with an area for each CPU",
        which: Which::Linux,
    },
    SubjectInfo {
        name: ROTATING,
        about: "the design before system 2: the longest unused slots first, by an index that goes round; an area with \
                a lock for each core",
        which: Which::Rotating,
    },
    SubjectInfo {
        name: STRICT,
        about: "no bounce: the buffer itself is mapped and unmapped strictly by DmaDevice, on hardware that takes the \
                profile's waits in real time",
        which: Which::Strict,
    },
];

impl SubjectInfo {
    /// Whether it does `shape`.
    pub(crate) fn does(&self, shape: Shape) -> bool {
        match self.which {
            Which::Portcullis => true,
            Which::Copy => shape != Shape::Slot,
            Which::Linux | Which::Rotating => !matches!(shape, Shape::Pool(_)),
            Which::Strict => matches!(shape, Shape::Pool(_)),
        }
    }
}

/// What stands between a device and the drivers' buffers, shared by all threads.
pub(crate) trait Subject: Send + Sync {
    /// What thread `thread` works with.
    fn lane(self: Arc<Self>, thread: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure>;

    /// Where in memory the device finds itself at the address that it was given.
    fn reach(&self, address: u64) -> Option<u64>;

    /// Fails unless nothing is mapped any more. Every lane is gone.
    fn settle(&self) -> Result<(), Failure>;
}

/// What makes subjects.
pub(crate) struct Maker {
    /// One for all, as in a program: a thread that had used several would have to look for its slot.
    pub platform: StdPlatform,
    pub timer: OpTimer,
    /// The cores that threads run on.
    pub cores: usize,
    pub linux: Option<linux::Library>,
    /// Highest number of a core that threads run on.
    pub last_core: Option<usize>,
}

impl Maker {
    /// A fresh subject for `case`, on hardware of `profile`, where it is on any.
    pub(crate) fn subject(
        &self,
        info: &SubjectInfo,
        case: &Case,
        profile: &Profile,
    ) -> Result<Arc<dyn Subject>, Failure> {
        if !info.does(case.shape) {
            return Err(Failure::Unsupported("this subject does not do the workload".into()));
        }
        let machine = || Machine::new(&self.platform, profile, &self.timer, case.crowded);
        Ok(match (info.which, case.shape) {
            (Which::Portcullis, Shape::Slot) => Arc::new(Slots::new(&self.platform, Ram::<false>, case)?),
            (Which::Portcullis, Shape::Swiotlb(_)) => {
                Arc::new(Slots::new(&self.platform, Ram::<true>, case)?)
            }
            (Which::Portcullis, Shape::Pool(_)) => Arc::new(Pooled::new(machine()?, case)?),
            (Which::Copy, _) => Arc::new(Bare::new(case)?),
            (Which::Rotating, _) => Arc::new(Rotating::new(case, self.cores)?),
            (Which::Strict, _) => Arc::new(Strict::new(machine()?, case)?),
            (Which::Linux, _) => match &self.linux {
                Some(library) => Arc::new(Linux::new(library, case, self.last_core, self.cores)?),
                None => return Err(Failure::Unsupported("no library with Linux's code was named".into())),
            },
        })
    }
}
