//! Who is measured, and how a subject is made ready for a workload.

use std::path::Path;
use std::sync::Arc;

use ::portcullis::iova::Bitmap;

use super::allocator::{Allocator, Make};
use super::check::Watched;
use super::cross::CrossCell;
use super::first::FirstCell;
use super::linux::{self, Library};
use super::portcullis;
use super::stream::{Pair, Replace, Ring, StreamCell};
use super::tree::HoleTree;
use super::workload::{Plans, Shape};
use crate::rival::RivalError;
use crate::runner::{Cell, Failure, Options, Runner};
use crate::team::Team;

/// A subject's name and what to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubjectInfo {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What it is, and what it does not do that others do.
    pub about: &'static str,
}

pub(crate) const LINUX: &str = "linux";

/// All subjects, in the order in which they are reported.
pub const SUBJECTS: [SubjectInfo; 9] = [
    SubjectInfo { name: "portcullis", about: "IovaSpace: a cache for each CPU; natural alignment" },
    SubjectInfo {
        name: "portcullis-backing",
        about: "Bitmap, which is behind the caches, alone and behind a lock; natural alignment",
    },
    SubjectInfo {
        name: "portcullis-tree",
        about: "HoleTree, which could be there before, alone and behind a lock; natural alignment",
    },
    SubjectInfo {
        name: LINUX,
        about: "alloc_iova_fast and free_iova_fast of the library given with --rival; natural alignment",
    },
    SubjectInfo {
        name: "offset-allocator",
        about: "0.2, behind a lock; no alignment; a space of 2^32 - 1 pages where others have 2^36",
    },
    SubjectInfo {
        name: "range-alloc",
        about: "0.1, behind a lock; natural alignment by allocate_range_aligned",
    },
    SubjectInfo {
        name: "buddy_system_allocator",
        about: "0.13, FrameAllocator behind a lock; every size rounded up to a power of two",
    },
    SubjectInfo {
        name: "vm-allocator",
        about: "0.1, AddressAllocator behind a lock; natural alignment; first match",
    },
    SubjectInfo { name: "vmem", about: "1.0, Arena with a lock of its own; instant fit; no alignment" },
];

/// Makes a subject ready for a workload with so many threads.
pub(crate) type OpenSubject =
    Arc<dyn Fn(&Runner, Shape, usize, &Plans) -> Result<Box<dyn Cell>, Failure> + Send + Sync>;

/// A subject that can be measured.
pub(crate) struct Subject {
    pub name: &'static str,
    pub open: OpenSubject,
}

/// The subjects named.
pub(crate) fn open(
    wanted: &[&'static SubjectInfo],
    rival: Option<&Path>,
    team: &Team,
) -> Result<Vec<Subject>, RivalError> {
    let library = match rival {
        // Opened even where it is not to be measured: a caller that names it wants to hear that it is not there.
        Some(path) => Some(Library::open(path)?),
        None => None,
    };
    let platform = portcullis::platform();
    let subject = |info: &&'static SubjectInfo| {
        let open = match (info.name, &library) {
            ("portcullis", _) => opener(portcullis::caches(platform.clone())),
            ("portcullis-backing", _) => opener(portcullis::backing::<Bitmap>()),
            ("portcullis-tree", _) => opener(portcullis::backing::<HoleTree>()),
            (LINUX, Some(library)) => opener(linux::make(library, team.cores().max())),
            (name, _) => rival_crate(name),
        };
        Subject { name: info.name, open }
    };
    Ok(wanted.iter().map(subject).collect())
}

#[cfg(feature = "rivals")]
fn rival_crate(name: &str) -> OpenSubject {
    use super::rivals;
    match name {
        "offset-allocator" => opener(rivals::offset_allocator()),
        "range-alloc" => opener(rivals::range_alloc()),
        "buddy_system_allocator" => opener(rivals::buddy_system_allocator()),
        "vm-allocator" => opener(rivals::vm_allocator()),
        "vmem" => opener(rivals::vmem()),
        _ => missing("not part of this program"),
    }
}

#[cfg(not(feature = "rivals"))]
fn rival_crate(_: &str) -> OpenSubject {
    missing("this program was built without the feature `rivals`")
}

fn missing(reason: &'static str) -> OpenSubject {
    Arc::new(move |_, _, _, _| Err(Failure::Unsupported(reason.into())))
}

/// Ranges that are live in the check before anything is timed, and operations of each thread.
const CHECK_LIVE: usize = 1024;
const CHECK_OPS: u64 = 4096;

fn opener<A: Allocator>(make: Make<A>) -> OpenSubject {
    Arc::new(move |runner, shape, threads, plans| {
        let small = shape.scaled(runner.options.tiny.unwrap_or(CHECK_LIVE).min(CHECK_LIVE));
        let mut watched = cell(runner, &Watched::make(&make), small, threads, &Plans::default())?;
        let ops = runner.options.tiny.map_or(CHECK_OPS, |most| 8 * most as u64);
        watched.repetition(&runner.team, ops)?;
        watched.check(&runner.team)?;
        drop(watched);
        let shape = runner.options.tiny.map_or(shape, |most| shape.scaled(most));
        cell(runner, &make, shape, threads, plans)
    })
}

fn cell<A: Allocator>(
    runner: &Runner,
    make: &Make<A>,
    shape: Shape,
    threads: usize,
    plans: &Plans,
) -> Result<Box<dyn Cell>, Failure> {
    let space = shape.space(threads);
    let (team, Options { budget, part, .. }) = (&runner.team, runner.options);
    Ok(match shape {
        Shape::Pair { pages } => {
            Box::new(StreamCell::open(team, make, space, threads, move |_, _| Ok(Pair { pages }))?)
        }
        Shape::Ring { ranges, pages } => {
            let open = move |allocator: &A, _| Ring::fill(allocator, ranges, pages, budget);
            Box::new(StreamCell::open(team, make, space, threads, open)?)
        }
        Shape::Replace { .. } | Shape::Full { .. } => {
            let plans = plans.get(shape, threads).to_vec();
            let open =
                move |allocator: &A, thread: usize| Replace::fill(allocator, &plans[thread], budget, part);
            Box::new(StreamCell::open(team, make, space, threads, open)?)
        }
        Shape::First { allocations } => {
            Box::new(FirstCell { make: Arc::clone(make), space, threads, allocations })
        }
        Shape::CrossCpu => Box::new(CrossCell::open(team, make, space)?),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::super::workload::WORKLOADS;
    use super::*;
    use crate::iova::allocator::Pages;
    use crate::team::Team;
    use crate::timer::OpTimer;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        /// The tenth range is not to be had.
        Full,
        /// The tenth range is not taken back.
        NotFreed,
        /// Each range is given out twice.
        Twice,
        /// Ranges begin anywhere.
        NotAligned,
    }

    /// Hands out one range behind the other, none of them again; and perhaps a fault.
    struct Script {
        fault: Fault,
        next: AtomicU64,
        allocated: AtomicU64,
        freed: AtomicU64,
    }

    impl Allocator for Script {
        type Range = Pages;

        fn alloc(&self, pages: u64) -> Option<Pages> {
            let number = self.allocated.fetch_add(1, Ordering::Relaxed);
            let size = pages.next_power_of_two();
            // Behind what is there, and aligned.
            let first = self.next.fetch_add(2 * size, Ordering::Relaxed).next_multiple_of(size);
            match self.fault {
                Fault::Full if number >= 10 => None,
                Fault::Twice => Some(Pages { first: 0, pages }),
                Fault::NotAligned => Some(Pages { first: first + u64::from(pages > 1), pages }),
                _ => Some(Pages { first, pages }),
            }
        }

        fn free(&self, _: Pages) -> bool {
            self.fault != Fault::NotFreed || self.freed.fetch_add(1, Ordering::Relaxed) < 10
        }

        fn pages(&self, range: Pages) -> Pages {
            range
        }
    }

    /// What it was asked for since it was made.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Asked {
        /// The pages of the space.
        space: u64,
        allocated: u64,
        freed: u64,
        /// The smallest and the largest range.
        least: u64,
        most: u64,
        /// Each range that was freed is younger than the one before.
        oldest_first: bool,
        freed_last: u64,
    }

    /// Hands out one range behind the other and notes what is asked for.
    struct Noted(Arc<Mutex<Asked>>, AtomicU64);

    impl Allocator for Noted {
        type Range = Pages;

        fn alloc(&self, pages: u64) -> Option<Pages> {
            let mut asked = self.0.lock().unwrap();
            asked.allocated += 1;
            (asked.least, asked.most) = (asked.least.min(pages), asked.most.max(pages));
            let size = pages.next_power_of_two();
            Some(Pages { first: self.1.fetch_add(2 * size, Ordering::Relaxed).next_multiple_of(size), pages })
        }

        fn free(&self, range: Pages) -> bool {
            let mut asked = self.0.lock().unwrap();
            asked.oldest_first &= asked.freed == 0 || asked.freed_last < range.first;
            (asked.freed, asked.freed_last) = (asked.freed + 1, range.first);
            true
        }

        fn pages(&self, range: Pages) -> Pages {
            range
        }
    }

    /// In the least number of threads: live ranges, pages of each, whether the oldest go first; and of 64 operations, with what is done
    /// before to get warm, the allocations.
    #[test]
    fn names_tell_what_is_asked_for() {
        let (both, wide) = (&[1, 2][..], 1 << 36);
        let expected = [
            ("pair-1", both, wide, 0, (1, 1), true, 68),
            ("pair-2", both, wide, 0, (2, 2), true, 68),
            ("pair-8", both, wide, 0, (8, 8), true, 68),
            ("pair-32", both, wide, 0, (32, 32), true, 68),
            ("pair-33", both, wide, 0, (33, 33), true, 68),
            ("pair-64", both, wide, 0, (64, 64), true, 68),
            ("pair-512", both, wide, 0, (512, 512), true, 68),
            ("ring512-1", both, wide, 512, (1, 1), true, 68),
            ("ring512-33", both, wide, 512, (33, 33), true, 68),
            ("ring16384-1", both, wide, 16_384, (1, 1), true, 68),
            ("mix64-4096", both, wide, 4096, (1, 64), false, 68),
            ("random-1k", both, wide, 1024, (1, 64), false, 68),
            ("random-16k", both, wide, 16_384, (1, 64), false, 68),
            ("random-64k", both, wide, 65_536, (1, 64), false, 68),
            ("random-1m", &[1], wide, 1 << 20, (1, 64), false, 68),
            ("first-4096", both, wide, 0, (1, 1), true, 4096),
            ("cross-cpu", &[2], wide, 0, (1, 1), true, 256),
            // As many as have 99.9 % of the pages.
            ("full-32bit", &[1], 1 << 20, 296_996, (1, 64), false, 68),
        ];
        let (team, timer) = (Team::sharing_cores(2).unwrap(), OpTimer::calibrated());
        // Nothing is replaced before.
        let options = Options { part: Duration::ZERO, budget: Duration::from_secs(600), ..Options::tiny() };
        let runner = Runner { team, timer, options };
        let found = WORKLOADS.map(|workload| {
            let none = Asked {
                space: 0,
                allocated: 0,
                freed: 0,
                least: u64::MAX,
                most: 0,
                oldest_first: true,
                freed_last: 0,
            };
            let asked = Arc::new(Mutex::new(none));
            let noted = Arc::clone(&asked);
            let make: Make<Noted> = Arc::new(move |space| {
                noted.lock().unwrap().space = space.pages;
                Ok(Noted(Arc::clone(&noted), AtomicU64::new(0)))
            });
            let threads = workload.threads[0];
            let mut cell = cell(&runner, &make, workload.shape, threads, &Plans::default()).unwrap();
            let opened = *asked.lock().unwrap();
            let timed = cell.repetition(&runner.team, 64).unwrap().ops;
            // As many as are asked for, in whole turns where a workload consists of turns.
            let turn = match workload.shape {
                Shape::First { allocations } => allocations as u64,
                Shape::CrossCpu => 256,
                _ => 64,
            };
            assert_eq!(timed, turn, "{}", workload.name);
            let Asked { space, allocated, freed, least, most, oldest_first, .. } = *asked.lock().unwrap();
            let live = allocated - freed;
            assert_eq!(live, opened.allocated - opened.freed, "{}", workload.name);
            let more = allocated - opened.allocated;
            (workload.name, workload.threads, space, live, (least, most), oldest_first, more)
        });
        assert_eq!(found, expected);
    }

    /// What a cell says of a script in a repetition and at the end, without being watched.
    fn verdict(runner: &Runner, fault: Fault, shape: Shape, threads: usize) -> Result<(), Failure> {
        let zero = || AtomicU64::new(0);
        let make: Make<Script> =
            Arc::new(move |_| Ok(Script { fault, next: zero(), allocated: zero(), freed: zero() }));
        let mut cell = cell(runner, &make, shape, threads, &Plans::default())?;
        cell.repetition(&runner.team, 64)?;
        cell.check(&runner.team)
    }

    #[test]
    fn an_allocator_that_fails_is_told_of_in_every_shape() {
        let (team, timer) = (Team::new(2).unwrap(), OpTimer::calibrated());
        let shapes = [
            (Shape::Pair { pages: 3 }, 1),
            (Shape::Ring { ranges: 16, pages: 3 }, 1),
            (Shape::Replace { live: 16 }, 1),
            (Shape::First { allocations: 16 }, 1),
            (Shape::CrossCpu, 2),
        ];
        let runner = Runner { team, timer, options: Options::tiny() };
        for (shape, threads) in shapes {
            if threads > runner.team.size() {
                continue;
            }
            let verdict = |fault| verdict(&runner, fault, shape, threads);
            assert_eq!(verdict(Fault::None), Ok(()), "{shape:?}");
            for fault in [Fault::Full, Fault::NotFreed] {
                let told = verdict(fault);
                assert!(matches!(told, Err(Failure::Refused(_))), "{shape:?} {fault:?}: {told:?}");
            }
            // Who keeps nothing live is looked at while it is watched, before anything is measured.
            let keeps = !matches!(shape, Shape::Pair { .. } | Shape::CrossCpu);
            let told = verdict(Fault::Twice);
            assert_eq!(matches!(told, Err(Failure::Broken(_))), keeps, "{shape:?}: {told:?}");
            let told = verdict(Fault::NotAligned);
            let is_seen = keeps && !matches!(shape, Shape::First { .. });
            assert_eq!(matches!(told, Err(Failure::Broken(_))), is_seen, "{shape:?}: {told:?}");
        }
    }

    /// The bench watches each call before it measures anything. So it sees a range that is freed at once, which no check afterwards can see.
    #[test]
    fn a_range_in_a_wrong_place_is_found_before_anything_is_measured() {
        let (team, timer) = (Team::sharing_cores(2).unwrap(), OpTimer::calibrated());
        let runner = Runner { team, timer, options: Options::tiny() };
        let shapes = [
            (Shape::Pair { pages: 3 }, 1),
            (Shape::Ring { ranges: 16, pages: 3 }, 1),
            (Shape::Replace { live: 16 }, 1),
        ];
        for (shape, threads) in shapes {
            for fault in [Fault::None, Fault::NotAligned] {
                let zero = || AtomicU64::new(0);
                let script =
                    move |_: &_| Ok(Script { fault, next: zero(), allocated: zero(), freed: zero() });
                let opened = opener(Arc::new(script))(&runner, shape, threads, &Plans::default());
                match opened.map(|_| ()) {
                    Ok(()) => assert_eq!(fault, Fault::None, "{shape:?}"),
                    Err(Failure::Broken(reason)) => {
                        assert!(reason.contains("not aligned"), "{shape:?}: {reason}")
                    }
                    Err(other) => panic!("{shape:?} {fault:?}: {other}"),
                }
            }
        }
    }
}
