//! What is done: the workloads by name, and the sequences of requests that they are made of.
//!
//! Sequences are made before the clock starts, from a fixed seed: every subject meets the same requests in
//! the same order, and no random number is drawn in a timed loop.

use std::sync::{Arc, OnceLock};

/// What a workload does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Allocate `pages` and free them, again and again.
    Pair {
        /// Pages at a time.
        pages: u64,
    },
    /// A ring of live ranges; each operation frees the oldest and allocates a new one.
    Ring {
        /// How many are live in each thread.
        ranges: usize,
        /// Pages of each.
        pages: u64,
    },
    /// Each operation frees a random one of the live ranges and allocates one of random size, 1 to
    /// [`MOST_PAGES`] pages.
    Replace {
        /// How many are live in each thread.
        live: usize,
    },
    /// The first allocations of one page in a fresh space. An operation is an allocation alone.
    First {
        /// How many each thread allocates.
        allocations: usize,
    },
    /// One thread allocates single pages, another frees them.
    CrossCpu,
    /// A space of 2^`order` pages, 99.9 % full with ranges of 1, 2, 4, .. 64 pages (as many pages of each
    /// size) and holes at random places; each operation frees a random range and allocates one of its size.
    Full {
        /// The binary logarithm of the pages in the space.
        order: u32,
    },
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What it does.
    pub shape: Shape,
    /// The numbers of threads with which it makes sense.
    pub threads: &'static [usize],
}

const fn workload(name: &'static str, shape: Shape) -> Workload {
    Workload { name, shape, threads: &[1, 2] }
}

/// All workloads, in the order in which they are reported. Each thread has live ranges of its own, so the
/// space holds twice as many with two threads.
pub const WORKLOADS: [Workload; 18] = [
    workload("pair-1", Shape::Pair { pages: 1 }),
    workload("pair-2", Shape::Pair { pages: 2 }),
    workload("pair-8", Shape::Pair { pages: 8 }),
    workload("pair-32", Shape::Pair { pages: 32 }),
    workload("pair-33", Shape::Pair { pages: 33 }),
    workload("pair-64", Shape::Pair { pages: 64 }),
    workload("pair-512", Shape::Pair { pages: 512 }),
    workload("ring512-1", Shape::Ring { ranges: 512, pages: 1 }),
    workload("ring512-33", Shape::Ring { ranges: 512, pages: 33 }),
    workload("ring16384-1", Shape::Ring { ranges: 16_384, pages: 1 }),
    workload("mix64-4096", Shape::Replace { live: 4096 }),
    workload("random-1k", Shape::Replace { live: 1 << 10 }),
    workload("random-16k", Shape::Replace { live: 16 << 10 }),
    workload("random-64k", Shape::Replace { live: 64 << 10 }),
    Workload { name: "random-1m", shape: Shape::Replace { live: 1 << 20 }, threads: &[1] },
    workload("first-4096", Shape::First { allocations: 4096 }),
    Workload { name: "cross-cpu", shape: Shape::CrossCpu, threads: &[2] },
    // With two threads, one could take the room that the other has just made for its next range.
    Workload { name: "full-32bit", shape: Shape::Full { order: 20 }, threads: &[1] },
];

/// The largest range that a random size asks for.
pub const MOST_PAGES: u64 = 64;

/// Ranges handed from one thread to the other at a time in [`Shape::CrossCpu`].
pub(crate) const BATCH: usize = 256;
/// Ranges that may be under way from one thread to the other.
pub(crate) const IN_FLIGHT: usize = 4 * BATCH;

/// A space for subjects to manage, in pages of 4 KiB from address 0 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Pages in it.
    pub pages: u64,
    /// The most ranges that will be live at once.
    pub live: usize,
}

impl Shape {
    /// The same on a smaller scale: no more than about `live` ranges.
    pub(crate) fn scaled(self, most: usize) -> Self {
        match self {
            Self::Ring { ranges, pages } => Self::Ring { ranges: ranges.min(most), pages },
            Self::Replace { live } => Self::Replace { live: live.min(most) },
            Self::First { allocations } => Self::First { allocations: allocations.min(most) },
            // 2^12 pages are 1,191 ranges; below that, no hole would be left in 0.1 % of the space.
            Self::Full { order } => Self::Full { order: order.min(12) },
            Self::Pair { .. } | Self::CrossCpu => self,
        }
    }

    /// The space that `threads` threads need.
    pub(crate) fn space(self, threads: usize) -> Space {
        // 48 bits of address: what Linux gives a device that can do more than 32.
        let wide = |live: usize| Space { pages: 1 << 36, live: live * threads };
        match self {
            Self::Pair { .. } => wide(1),
            Self::Ring { ranges, .. } => wide(ranges),
            Self::Replace { live } => wide(live),
            Self::First { allocations } => wide(allocations),
            Self::CrossCpu => wide(IN_FLIGHT),
            Self::Full { order } => Space { pages: 1 << order, live: 1 << order },
        }
    }

    /// The sequences of each thread; none for workloads that have nothing random.
    pub(crate) fn plans(self, threads: usize) -> Vec<Arc<Plan>> {
        let plan = |thread: usize| match self {
            Self::Replace { live } => Some(Arc::new(Plan::replace(live, thread as u64))),
            Self::Full { order } => Some(Arc::new(Plan::full(order))),
            _ => None,
        };
        (0..threads).filter_map(plan).collect()
    }
}

/// The plans of one workload, made when they are first asked for.
#[derive(Debug, Default)]
pub(crate) struct Plans(OnceLock<Vec<Arc<Plan>>>);

impl Plans {
    pub(crate) fn get(&self, shape: Shape, threads: usize) -> &[Arc<Plan>] {
        self.0.get_or_init(|| shape.plans(threads))
    }
}

/// One replacement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// Which live range goes.
    pub index: u32,
    /// How many pages its successor has.
    pub pages: u32,
}

/// What one thread asks for.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Pages of the ranges to allocate at first.
    pub fill: Vec<u32>,
    /// Those to free again before the steps begin, each by its place: the last one then takes that place.
    pub holes: Vec<usize>,
    /// The replacements, to be repeated from the start when all are done.
    pub steps: Vec<Step>,
}

const SEED: u64 = 0x706f_7274_6375_6c6c;

/// Steps before a sequence repeats itself: enough that every range is replaced, and that the processor does
/// not learn the sequence by heart.
fn steps(live: usize) -> usize {
    (live * 32).clamp(1 << 13, 1 << 17).max(live)
}

impl Plan {
    fn replace(live: usize, thread: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(SEED ^ thread);
        let mut pages = || random.u32(1..=MOST_PAGES as u32);
        let fill = (0..live).map(|_| pages()).collect();
        let sizes: Vec<u32> = (0..steps(live)).map(|_| pages()).collect();
        let steps = sizes.into_iter().map(|pages| Step { index: random.u32(..live as u32), pages }).collect();
        Self { fill, holes: Vec::new(), steps }
    }

    fn full(order: u32) -> Self {
        // Page 0 stays out: Linux never hands it out.
        let space = (1_u64 << order) - 1;
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut fill = Vec::new();
        let mut left = space;
        // From large to small, so that every allocator can pack them without a gap.
        for order in (1..=6_u32).rev() {
            let ranges = (space / 7) >> order;
            fill.extend(std::iter::repeat_n(1 << order, ranges as usize));
            left -= ranges << order;
        }
        fill.extend(std::iter::repeat_n(1, left as usize));
        let mut sizes: Vec<u32> = fill.clone();
        let (mut holes, mut free) = (Vec::new(), 0);
        while free * 1000 < space {
            let place = random.usize(..sizes.len());
            free += u64::from(sizes.swap_remove(place));
            holes.push(place);
        }
        let steps = (0..steps(sizes.len()))
            .map(|_| {
                let index = random.usize(..sizes.len());
                Step { index: index as u32, pages: sizes[index] }
            })
            .collect();
        Self { fill, holes, steps }
    }
}

#[cfg(test)]
mod tests {
    use super::{Plan, Shape};

    #[test]
    fn threads_replace_all_of_their_ranges_each_in_its_own_order() {
        for (live, steps) in [(64, 8192), (1024, 32_768), (4096, 131_072), (1 << 18, 1 << 18)] {
            let plans = Shape::Replace { live }.plans(2);
            let of = |plan: &Plan| (plan.fill.len(), plan.holes.len(), plan.steps.len());
            assert_eq!([of(&plans[0]), of(&plans[1])], [(live, 0, steps); 2]);
            assert!(plans[0].fill != plans[1].fill);
        }
        let plan = Plan::replace(64, 0);
        let replaced: std::collections::BTreeSet<u32> = plan.steps.iter().map(|step| step.index).collect();
        assert!(replaced.into_iter().eq(0..64));
    }

    #[test]
    fn a_full_space_is_99_9_percent_full() {
        let plan = Plan::full(20);
        let mut sizes = plan.fill.clone();
        assert_eq!(sizes.iter().map(|pages| u64::from(*pages)).sum::<u64>(), (1 << 20) - 1);
        plan.holes.iter().for_each(|place| {
            sizes.swap_remove(*place);
        });
        let live = sizes.iter().map(|pages| u64::from(*pages)).sum::<u64>() as f64 / f64::from(1 << 20);
        assert!((0.9985..=0.999).contains(&live), "{live}");
        assert!(plan.steps.iter().all(|step| sizes[step.index as usize] == step.pages));
    }
}
