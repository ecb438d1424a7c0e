//! Who is measured.

use std::sync::Arc;

use portcullis::domain::Policy;
use portcullis::invalidation::{Costs, InvalidationQueue, SharedQueue};
use portcullis::std_platform::StdPlatform;

use super::check::{Watch, WatchedLane};
use super::hardware::{Hardware, Timing, Told};
use super::ours::Ours;
use super::rivals::{Apart, GlobalLock, Locked, Reference};
use super::spent::Waits;
use super::workload::{BLOCK, Shape};
use crate::runner::Failure;
use crate::timer::OpTimer;
use crate::units::Driver;

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
    SingleQueue,
    GlobalLock,
    PgtableOnly,
    /// A driver's queue, and the same where CPUs share its waits.
    Driver(Driver),
    SharedDriver(Driver),
    AtOnce,
}

impl Which {
    /// What a subject says a flush costs, on a machine where one costs `costs`.
    fn costs(self, costs: Costs) -> Costs {
        if self == Self::SingleQueue { VERY_EXPENSIVE } else { costs }
    }
}

pub(crate) const OURS: &str = "portcullis";
pub(crate) const SINGLE: &str = "single-queue";
pub(crate) const GLOBAL: &str = "global-lock";
pub(crate) const LIMIT: &str = "pgtable-only";
/// The limit of the drivers' queues.
pub(crate) const AT_ONCE: &str = "at-once";

/// All subjects, in the order in which they are reported.
pub const SUBJECTS: [SubjectInfo; 10] = [
    SubjectInfo {
        name: OURS,
        about: "Domain: flush queues as the profile's costs ask for, one for each CPU unless a flush is very \
                expensive; strict waits shared by SharedQueue",
        which: Which::Portcullis,
    },
    SubjectInfo {
        name: SINGLE,
        about: "Domain on hardware that states a very expensive flush (its waits are the profile's): one deferred \
                queue of 32,768 ranges for all CPUs",
        which: Which::SingleQueue,
    },
    SubjectInfo {
        name: GLOBAL,
        about: "the design of 2015: 250 deferred ranges for all CPUs behind one lock, which is held while they are \
                flushed and freed; strict, one lock held from the submission until it is confirmed. No window ends",
        which: Which::GlobalLock,
    },
    SubjectInfo {
        name: LIMIT,
        about: "the limit: TableMapper::unmap alone; nothing is invalidated, and addresses are freed later, without \
                being timed",
        which: Which::PgtableOnly,
    },
    SubjectInfo {
        name: "vtd",
        about: "Domain over portcullis-hw's driver of VT-d, each wait by itself; its unit is of software, and carries out \
                what is in the ring when it is rung, whatever the profile says. Only strict-unmap, as the next five",
        which: Which::Driver(Driver::VtD),
    },
    SubjectInfo {
        name: "vtd-shared",
        about: "the same, where CPUs share their waits",
        which: Which::SharedDriver(Driver::VtD),
    },
    SubjectInfo { name: "amdvi", about: "as vtd, of AMD-Vi's driver", which: Which::Driver(Driver::AmdVi) },
    SubjectInfo {
        name: "riscv",
        about: "as vtd, of the RISC-V IOMMU's driver",
        which: Which::Driver(Driver::RiscV),
    },
    SubjectInfo {
        name: "smmuv3",
        about: "as vtd, of the SMMUv3's driver",
        which: Which::Driver(Driver::SmmuV3),
    },
    SubjectInfo {
        name: AT_ONCE,
        about: "the limit of these five: the same domain over a queue that confirms at once, without a ring",
        which: Which::AtOnce,
    },
];

impl SubjectInfo {
    /// Whether what it costs over the limit is a driver's.
    pub(crate) fn is_of_a_driver(&self) -> bool {
        matches!(self.which, Which::Driver(_) | Which::SharedDriver(_))
    }

    /// Whether it does `shape`.
    pub(crate) fn does(&self, shape: Shape) -> bool {
        match self.which {
            Which::Portcullis => true,
            Which::SingleQueue | Which::PgtableOnly => shape == Shape::Lazy,
            Which::GlobalLock => matches!(shape, Shape::Lazy | Shape::Strict),
            Which::Driver(_) | Which::SharedDriver(_) | Which::AtOnce => shape == Shape::Strict,
        }
    }
}

/// What a device can reach after an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Nothing of it.
    Strict,
    /// What was there before, but nothing that the address is used for later.
    Lazy,
    /// Anything.
    Nothing,
}

/// One address space, shared by all threads, and the hardware behind it.
pub(crate) trait Subject: Send + Sync {
    /// What thread `thread` works with.
    fn lane(self: Arc<Self>, thread: usize) -> Result<Box<dyn Lane>, Failure>;

    /// Where the tables lead from `iova`.
    fn look_up(&self, iova: u64) -> Option<u64>;

    /// Flushes what is deferred; fails unless no page is mapped and all addresses are back. Every lane is gone.
    fn settle(&self) -> Result<(), Failure>;

    fn hardware(&self) -> &Hardware;

    fn promise(&self) -> Promise;
}

/// A thread's pages of one turn: each is mapped, then each is unmapped, in order.
pub(crate) trait Lane: Send {
    /// Maps page `index` to its memory; whether that worked.
    fn map_one(&mut self, index: usize) -> bool;

    /// Unmaps page `index`; whether that worked. With the last of a turn, nothing is left to be committed.
    fn unmap_one(&mut self, index: usize) -> bool;

    /// The address of page `index`, as it was mapped last.
    fn iova(&self, index: usize) -> u64;

    /// Maps the pages of block `block`; in a loop that is compiled for the subject.
    fn map(&mut self, block: usize) -> bool {
        (block * BLOCK..(block + 1) * BLOCK).all(|index| self.map_one(index))
    }

    /// Unmaps them.
    fn unmap(&mut self, block: usize) -> bool {
        (block * BLOCK..(block + 1) * BLOCK).all(|index| self.unmap_one(index))
    }
}

/// A cost of a submission for which a domain makes one queue for all.
const VERY_EXPENSIVE: Costs = Costs { submission_ns: 10_000, ..Costs::BARE_METAL };

/// What makes subjects.
pub(crate) struct Maker {
    /// One for all spaces, as in a program: a thread that had used several would have to look for its CPU.
    pub platform: StdPlatform,
    pub timer: OpTimer,
    pub timing: Timing,
    /// What a driver of that hardware states.
    pub costs: Costs,
    /// There are more threads than cores.
    pub crowded: bool,
}

impl Maker {
    /// A fresh subject for `shape`, on hardware that `watch` hears of.
    pub(crate) fn subject(
        &self,
        info: &SubjectInfo,
        shape: Shape,
        watch: Option<Arc<Watch>>,
    ) -> Result<Arc<dyn Subject>, Failure> {
        if !info.does(shape) {
            return Err(Failure::Unsupported("this subject does not do the workload".into()));
        }
        let Self { platform, timer, timing, costs, crowded } = self;
        let stated = info.which.costs(*costs);
        let is_software = matches!(info.which, Which::Driver(_) | Which::SharedDriver(_) | Which::AtOnce);
        let timing = if is_software { Timing::NONE } else { *timing };
        let hardware = Arc::new(Hardware::new(timing, stated, timer, *crowded, watch));
        let driver = |driver: Driver, cpus: usize| {
            let relax = if *crowded { std::thread::yield_now } else { std::hint::spin_loop };
            let unit = driver.queue(relax, cpus);
            let unit = unit.map_err(|error| Failure::Refused(error.to_string()))?;
            Ok::<_, Failure>(Arc::new(Told { unit, hardware: Arc::clone(&hardware) }))
        };
        let waits = |queue: Arc<dyn InvalidationQueue>| Waits::new(queue, timer);
        let policy = if shape == Shape::Lazy { Policy::lazy_for(&stated) } else { Policy::Strict };
        Ok(match (info.which, shape) {
            (Which::Portcullis | Which::SingleQueue, _) => {
                let queue = waits(Arc::new(SharedQueue::new(Arc::clone(&hardware))));
                Arc::new(Ours::new(platform, queue, hardware, policy, shape)?)
            }
            (Which::Driver(which), _) => {
                let queue = waits(driver(which, 0)?);
                Arc::new(Ours::new(platform, queue, hardware, policy, shape)?)
            }
            (Which::SharedDriver(which), _) => {
                let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                let queue = waits(driver(which, cpus)?);
                Arc::new(Ours::new(platform, queue, hardware, policy, shape)?)
            }
            (Which::AtOnce, _) => {
                Arc::new(Ours::new(platform, waits(hardware.clone()), hardware, policy, shape)?)
            }
            (Which::PgtableOnly, _) => {
                let apart = Apart::new(platform, waits(hardware.clone()), hardware)?;
                Arc::new(Reference::new(apart))
            }
            (Which::GlobalLock, Shape::Lazy) => {
                let apart = Apart::new(platform, waits(hardware.clone()), hardware)?;
                Arc::new(GlobalLock::new(apart, timer, *crowded))
            }
            (Which::GlobalLock, _) => {
                // The lock is outside of what counts as a wait.
                let locked = Locked::new(waits(hardware.clone()), timer, *crowded);
                Arc::new(Ours::new(platform, locked, hardware, policy, shape)?)
            }
        })
    }
}

/// The lanes of `threads` threads, watched where there is a `watch`.
pub(crate) fn lanes(
    subject: &Arc<dyn Subject>,
    threads: usize,
    watch: Option<&Arc<Watch>>,
) -> Result<Vec<Box<dyn Lane>>, Failure> {
    let lane = |thread| {
        let lane = Arc::clone(subject).lane(thread)?;
        Ok(match watch {
            Some(watch) => {
                let (subject, watch) = (Arc::clone(subject), Arc::clone(watch));
                Box::new(WatchedLane::new(lane, subject, watch, thread))
            }
            None => lane,
        })
    };
    (0..threads).map(lane).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_single_queue_is_asked_for_by_its_stated_cost() {
        assert!(VERY_EXPENSIVE.shares_one_queue() && !Costs::BARE_METAL.shares_one_queue());
        for subject in SUBJECTS {
            let one = subject.which.costs(Costs::BARE_METAL).shares_one_queue();
            assert_eq!(one, subject.name == SINGLE, "{}", subject.name);
        }
    }
}
