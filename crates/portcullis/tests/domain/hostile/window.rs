//! One thread plays all CPUs, the clock and the device: what is unmapped lazily is reached until its window ends, and
//! no longer.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions};
use portcullis::domain::Policy;
use portcullis::invalidation::{Costs, QUEUE_ENTRIES};
use portcullis_model::Queue;
use portcullis_model::open::OpenDevice;
use proptest::prelude::*;

use crate::rig::{self, Clocked, DEVICE, Device, Hooked, PAGE, page};

type Rig = rig::Rig<Arc<Clocked>, Hooked<Queue>>;

const CPUS: usize = 3;
/// What a flush takes.
const FLUSH_NS: u64 = 1_000;
/// As where flushes are so expensive that all CPUs share one queue.
const EXPENSIVE: Costs = Costs { submission_ns: 20_000, request_ns: 100, refill_ns: 1_000 };

#[derive(Debug, Clone)]
enum Step {
    Map { cpu: usize, pages: u64, own: bool },
    Unmap { cpu: usize, which: usize },
    Wait { ns: u64 },
    Domain { policy: Policy },
    Device { policy: Option<Policy> },
    Flush,
}

fn policies() -> impl Strategy<Value = Policy> {
    let window = prop_oneof![Just(0), 1..5_000_u64, Just(100_000), Just(1 << 60)];
    prop_oneof![1 => Just(Policy::Strict), 3 => window.prop_map(|window_ns| Policy::Lazy { window_ns })]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..=CPUS, 1..5_u64, any::<bool>()).prop_map(|(cpu, pages, own)| Step::Map { cpu, pages, own }),
        8 => (0..=CPUS, any::<usize>()).prop_map(|(cpu, which)| Step::Unmap { cpu, which }),
        4 => prop_oneof![0..3_000_u64, 0..200_000_u64].prop_map(|ns| Step::Wait { ns }),
        1 => policies().prop_map(|policy| Step::Domain { policy }),
        1 => proptest::option::of(policies()).prop_map(|policy| Step::Device { policy }),
        1 => Just(Step::Flush),
    ];
    proptest::collection::vec(step, 1..300)
}

/// A mapping, in memory that no other mapping ever had.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    iova: Iova,
    first: u64,
    pages: u64,
    /// Of the device with a policy of its own.
    own: bool,
}

/// What a plain reader of the documentation expects of memory that is mapped no more.
#[derive(Debug, Clone, Copy)]
struct Ended {
    /// Reached at this time at the latest.
    until_ns: u64,
}

struct Plain {
    rig: Rig,
    other: Device,
    live: Vec<Mapping>,
    /// By the number of the page of memory.
    ended: HashMap<u64, Ended>,
    seen: HashSet<Iova>,
    next: u64,
    now_ns: u64,
    domain: Policy,
    own: Option<Policy>,
    /// Pages that were reached after their unmap.
    stale: u64,
}

impl Plain {
    fn new(costs: Costs) -> Self {
        let platform = Clocked::new(CPUS);
        let clock = Arc::clone(&platform);
        let domain = Policy::Lazy { window_ns: 50_000 };
        let rig = Rig::new(platform, domain, |queue| {
            let hardware = Hooked::with_costs(queue, costs);
            hardware.set(move || clock.take(FLUSH_NS));
            hardware
        });
        let other = portcullis::dma::DmaDevice::new(rig.domain.clone(), u64::MAX).unwrap();
        Self {
            rig,
            other,
            live: Vec::new(),
            ended: HashMap::new(),
            seen: HashSet::new(),
            next: 0,
            now_ns: 0,
            domain,
            own: None,
            stale: 0,
        }
    }

    fn device(&self, own: bool) -> &Device {
        if own { &self.other } else { &self.rig.device }
    }

    fn policy(&self, own: bool) -> Policy {
        self.own.filter(|_| own).unwrap_or(self.domain)
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Map { cpu, pages, own } => {
                self.rig.platform.be(cpu);
                let first = self.next;
                self.next += pages;
                let (phys, len) = (page(first).phys, pages * PAGE);
                let iova = self.device(own).open_single(phys, len, Direction::Bidirectional).unwrap();
                self.live.push(Mapping { iova, first, pages, own });
                for number in 0..pages {
                    let at = iova.checked_add(number * PAGE).unwrap();
                    self.seen.insert(at);
                    let mut reached = None;
                    let look = |_, phys, _| reached = Some(phys);
                    self.rig.iommu.translate_each(DEVICE, at, 1, Permissions::WRITE, look).unwrap();
                    assert_eq!(
                        reached,
                        Some(page(first + number).phys),
                        "what is mapped leads to its memory"
                    );
                }
            }
            Step::Unmap { cpu, which } if !self.live.is_empty() => {
                self.rig.platform.be(cpu);
                let mapping = self.live.swap_remove(which % self.live.len());
                let Mapping { iova, first, pages, own } = mapping;
                self.device(own).unmap_single(iova, pages * PAGE).unwrap();
                // From when the unmap returned; a call may have waited for a flush in between.
                let now = self.clock();
                let until_ns = match self.policy(own) {
                    Policy::Lazy { window_ns } => now.saturating_add(window_ns),
                    _ => 0,
                };
                (first..first + pages).for_each(|page| _ = self.ended.insert(page, Ended { until_ns }));
            }
            Step::Unmap { .. } => {}
            Step::Wait { ns } => self.now_ns = self.clock() + ns,
            Step::Domain { policy } => {
                let old = std::mem::replace(&mut self.domain, policy);
                self.rig.domain.set_policy(policy).unwrap();
                self.changed(old, policy);
            }
            Step::Device { policy } => {
                let old = self.policy(true);
                self.own = policy;
                self.other.set_policy(policy).unwrap();
                self.changed(old, self.policy(true));
            }
            Step::Flush => {
                self.rig.domain.flush().unwrap();
                self.close_all();
            }
        }
        self.now_ns = self.now_ns.max(self.clock());
        self.rig.platform.go_to(self.now_ns);
    }

    fn changed(&mut self, old: Policy, new: Policy) {
        let stricter = match (new, old) {
            (Policy::Strict, _) => true,
            (Policy::Lazy { window_ns }, Policy::Lazy { window_ns: old }) => window_ns < old,
            _ => false,
        };
        if stricter {
            self.close_all();
        }
    }

    fn close_all(&mut self) {
        self.ended.values_mut().for_each(|ended| ended.until_ns = 0);
    }

    fn clock(&self) -> u64 {
        use portcullis::platform::Platform;
        self.rig.platform.now_ns()
    }

    /// The device tries every address it ever saw. All timers that were due by now have run.
    fn retry(&mut self) {
        let live: HashMap<u64, Iova> = self
            .live
            .iter()
            .flat_map(|one| (0..one.pages).map(|n| (one.first + n, one.iova.checked_add(n * PAGE).unwrap())))
            .collect();
        for iova in &self.seen {
            let Some(phys) = self.rig.iommu.probe(DEVICE, *iova, Permissions::WRITE) else { continue };
            let number = (phys.get() - page(0).phys.get()) / PAGE;
            assert!(number < self.next, "memory that was never mapped");
            match self.ended.get(&number) {
                None => assert_eq!(live.get(&number), Some(iova), "by the address of a live mapping"),
                Some(ended) => {
                    self.stale += 1;
                    let late = self.now_ns.saturating_sub(ended.until_ns);
                    assert!(self.now_ns < ended.until_ns, "reached {late} ns after its window");
                }
            }
        }
    }
}

fn run(steps: &[Step], costs: Costs) {
    run_on(Plain::new(costs), steps);
}

fn run_on(mut plain: Plain, steps: &[Step]) {
    for step in steps {
        plain.step(step);
        plain.retry();
    }
    // Nothing happens any more but time: every window ends by itself.
    let last = plain.ended.values().map(|ended| ended.until_ns).max().unwrap_or(0);
    plain.now_ns = last.max(plain.clock());
    plain.rig.platform.go_to(plain.now_ns);
    plain.live.drain(..).for_each(|live| plain.rig.domain.unmap_strictly(range(live)).unwrap());
    assert!(plain.seen.iter().all(|iova| !plain.rig.reaches(*iova)));
    assert_eq!(plain.rig.domain.stats().lost_iova_bytes, 0);
}

fn range(mapping: Mapping) -> portcullis::addr::IovaRange {
    portcullis::addr::IovaRange::new(mapping.iova, mapping.pages * PAGE).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if cfg!(debug_assertions) { 64 } else { 512 })
    })]

    #[test]
    fn nothing_is_reached_after_its_window(steps in steps()) {
        run(&steps, Costs::BARE_METAL);
    }

    #[test]
    fn nor_where_all_cpus_share_one_queue(steps in steps()) {
        run(&steps, EXPENSIVE);
    }
}

/// What the properties above would pass without: lazily unmapped memory is reached within its window, by every CPU's
/// mappings, and a queue that is full ends it earlier.
#[test]
fn within_the_window_it_is_reached() {
    for costs in [Costs::BARE_METAL, EXPENSIVE] {
        let mut plain = Plain::new(costs);
        for cpu in 0..=CPUS {
            plain.step(&Step::Map { cpu, pages: 2, own: false });
            plain.step(&Step::Unmap { cpu, which: 0 });
        }
        plain.step(&Step::Wait { ns: 49_999 });
        plain.retry();
        assert_eq!(plain.stale, 2 * (CPUS as u64 + 1));
        plain.step(&Step::Wait { ns: 1 });
        plain.retry();
        assert_eq!(plain.stale, 2 * (CPUS as u64 + 1), "50 us are over");
        plain.step(&Step::Map { cpu: 0, pages: 1, own: false });
        plain.step(&Step::Unmap { cpu: 0, which: 0 });
        for _ in 0..QUEUE_ENTRIES {
            plain.step(&Step::Map { cpu: 0, pages: 1, own: false });
            plain.step(&Step::Unmap { cpu: 0, which: 0 });
        }
        plain.stale = 0;
        plain.retry();
        // Its own translation had been cleared before that flush, too.
        let left = if costs.shares_one_queue() { QUEUE_ENTRIES as u64 + 1 } else { 0 };
        assert_eq!(plain.stale, left, "in a queue of 256, the 257th has had all forgotten");
    }
}

/// The same run, where the window is not kept: it is noticed, by the page that is reached too late.
#[test]
fn a_window_that_is_not_kept_is_noticed() {
    let steps = [
        Step::Map { cpu: 0, pages: 2, own: false },
        Step::Unmap { cpu: 0, which: 0 },
        Step::Wait { ns: 49_999 },
        Step::Wait { ns: 1 },
    ];
    let breaks: [fn(&Plain); 3] = [
        // Nobody comes when the window ends.
        |plain| plain.rig.platform.lose_timers(),
        // What comes does nothing, and says that it did.
        |plain| plain.rig.iommu.queue().drop_next(u64::MAX),
        // It does something, a moment too late.
        |plain| plain.rig.platform.delay_timers(1),
    ];
    for costs in [Costs::BARE_METAL, EXPENSIVE] {
        run(&steps, costs);
        for break_it in breaks {
            let plain = Plain::new(costs);
            break_it(&plain);
            let noticed = catch_unwind(AssertUnwindSafe(|| run_on(plain, &steps))).unwrap_err();
            let message = noticed.downcast_ref::<String>().unwrap();
            assert!(message.contains("after its window"), "{message}");
        }
    }
}
