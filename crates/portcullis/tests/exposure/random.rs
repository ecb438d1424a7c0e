//! A machine of several CPUs in random order: mapped here, unmapped there, flushes that fail.

use std::sync::{Arc, Mutex};

use portcullis::addr::{Direction, Iova};
use portcullis::domain::Policy;
use portcullis::exposure::Exposure;
use portcullis::invalidation::{
    Costs, DomainId, Invalidation, InvalidationError, InvalidationQueue, Request,
};
use portcullis_model::Queue;
use portcullis_model::open::OpenDevice;
use proptest::prelude::*;

use super::plain::{Plain, Tally};
use crate::rig::{Clocked, Device, PAGE, Rig, page};

/// CPUs that have a slot. One more has none.
const CPUS: usize = 3;
/// What the hardware takes for a submission.
pub const FLUSH_NS: u64 = 900;

#[derive(Debug, Clone)]
pub enum Step {
    Map { cpu: usize, offset: u64, len: u64 },
    Unmap { cpu: usize, which: usize, strictly: bool },
    Wait { ns: u64 },
    Flush,
    FailNext { flushes: u64 },
}

/// The hardware, which takes its time and tells the model.
pub struct Told {
    queue: Queue,
    costs: Costs,
    platform: Arc<Clocked>,
    model: Arc<Mutex<Plain>>,
    /// What becomes of the next flushes.
    failures: Mutex<(u64, Option<InvalidationError>)>,
    /// Unmaps that asked for their own range.
    strict: Mutex<u64>,
}

impl Told {
    fn answer(&self) -> Result<(), InvalidationError> {
        let mut failures = self.failures.lock().unwrap();
        match &mut *failures {
            (left @ 1.., Some(error)) => {
                *left -= 1;
                Err(*error)
            }
            _ => Ok(()),
        }
    }
}

// SAFETY: no device is behind it: what is checked is what domains count.
unsafe impl InvalidationQueue for Told {
    fn costs(&self) -> Costs {
        self.costs
    }

    fn invalidate(&self, domain: DomainId, request: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation: request }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let is_flush = requests.iter().any(|request| request.invalidation == Invalidation::Domain);
        let mut model = self.model.lock().unwrap();
        // A timer may have brought the clock here.
        let behind = portcullis::platform::Platform::now_ns(&*self.platform) - model.now_ns();
        model.advance(behind);
        model.advance(FLUSH_NS);
        self.platform.take(FLUSH_NS);
        if is_flush {
            self.answer()?;
            model.flushed();
        } else {
            *self.strict.lock().unwrap() += 1;
        }
        drop(model);
        InvalidationQueue::submit(&self.queue, requests)
    }
}

struct Mapping {
    iova: Iova,
    len: u64,
    neighbours: u64,
}

pub struct Machine {
    rig: Rig<Arc<Clocked>, Told>,
    strict: Device<Arc<Clocked>, Told>,
    model: Arc<Mutex<Plain>>,
    shared: bool,
    live: Vec<Mapping>,
}

impl Machine {
    pub fn new(costs: Costs, policy: Policy) -> Self {
        let platform = Clocked::new(CPUS);
        let shared = costs.shares_one_queue();
        let model = Arc::new(Mutex::new(Plain::new(if shared { 1 } else { CPUS + 1 }, CPUS + 1)));
        let rig = Rig::new(Arc::clone(&platform), policy, |queue| Told {
            queue,
            costs,
            platform,
            model: Arc::clone(&model),
            failures: Mutex::default(),
            strict: Mutex::default(),
        });
        let strict = rig.device.with_policy(Policy::Strict).unwrap();
        Self { rig, strict, model, shared, live: Vec::new() }
    }

    pub fn fail_next(&self, flushes: u64, error: InvalidationError) {
        *self.rig.queue.failures.lock().unwrap() = (flushes, Some(error));
    }

    pub fn exposure(&self) -> Exposure {
        self.rig.domain.exposure()
    }

    pub fn exact(&self) -> Tally {
        self.model.lock().unwrap().exact()
    }

    pub fn step(&mut self, step: &Step) {
        match *step {
            Step::Map { cpu, offset, len } => {
                self.rig.platform.be(cpu);
                let phys = page(0).phys.checked_add(offset).unwrap();
                let iova = self.rig.device.open_single(phys, len, Direction::Bidirectional).unwrap();
                let neighbours = (offset + len).next_multiple_of(PAGE) - len;
                self.model.lock().unwrap().mapped(cpu, neighbours);
                self.live.push(Mapping { iova, len, neighbours });
            }
            Step::Unmap { cpu, which, strictly } if !self.live.is_empty() => {
                self.rig.platform.be(cpu);
                // In order, for 0.
                let Mapping { iova, len, neighbours } = self.live.remove(which % self.live.len());
                let device = if strictly { &self.strict } else { &self.rig.device };
                let before = *self.rig.queue.strict.lock().unwrap();
                device.unmap_single(iova, len).unwrap();
                let mut model = self.model.lock().unwrap();
                model.unmapped(cpu, neighbours);
                // A queue that is full, and cannot be flushed, has each unmap wait for itself.
                if *self.rig.queue.strict.lock().unwrap() == before {
                    model.queued(if self.shared { 0 } else { cpu }, len, neighbours);
                }
            }
            Step::Unmap { .. } => {}
            Step::Wait { ns } => {
                let end = self.model.lock().unwrap().now_ns() + ns;
                self.rig.platform.go_to(end);
                // Flushes at timers took their own time.
                let mut model = self.model.lock().unwrap();
                let rest = end.saturating_sub(model.now_ns());
                model.advance(rest);
            }
            Step::Flush => _ = self.rig.domain.flush(),
            Step::FailNext { flushes } => {
                self.fail_next(flushes, InvalidationError::Rejected { code: 3 });
            }
        }
    }

    /// Compares the account with the model.
    pub fn check(&self) {
        let (found, model) = (self.exposure(), self.model.lock().unwrap());
        let (exact, error) = (model.exact(), model.error());
        let off = Tally {
            used: found.stale_byte_ns.abs_diff(exact.used),
            neighbour: found.neighbour_byte_ns.abs_diff(exact.neighbour),
        };
        assert!(off.used <= error.used, "stale: {} for {}, {error:?}", found.stale_byte_ns, exact.used);
        assert!(
            off.neighbour <= error.neighbour,
            "neighbours: {} for {}, {error:?}",
            found.neighbour_byte_ns,
            exact.neighbour
        );
        assert_eq!(found.longest_stale_ns, model.longest_ns());
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cpu = || 0..=CPUS;
    let step = prop_oneof![
        10 => (cpu(), 0..PAGE, 1..3 * PAGE).prop_map(|(cpu, offset, len)| Step::Map { cpu, offset, len }),
        9 => (cpu(), any::<usize>(), prop::bool::weighted(0.2))
            .prop_map(|(cpu, which, strictly)| Step::Unmap { cpu, which, strictly }),
        6 => prop_oneof![0..100_u64, 0..5_000_u64, 0..300_000_u64].prop_map(|ns| Step::Wait { ns }),
        1 => Just(Step::Flush),
        1 => (0..7_u64).prop_map(|flushes| Step::FailNext { flushes }),
    ];
    proptest::collection::vec(step, 1..800)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if cfg!(debug_assertions) { 32 } else { 256 })
    })]

    #[test]
    fn the_account_is_the_model_s_within_its_error(
        steps in steps(),
        window_ns in prop_oneof![Just(10_000_u64), Just(100_000), Just(1 << 60)],
        shared in any::<bool>(),
    ) {
        let costs = if shared { crate::EXPENSIVE } else { Costs::BARE_METAL };
        let mut machine = Machine::new(costs, Policy::Lazy { window_ns });
        for (number, step) in steps.iter().enumerate() {
            machine.step(step);
            if number % 31 == 0 {
                machine.check();
            }
        }
        machine.check();
    }
}
