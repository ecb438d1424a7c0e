//! A machine of several CPUs in random order: mapped here, unmapped there, flushes that fail.

use std::sync::{Arc, Mutex};

use portcullis::addr::{Direction, DomainId, Iova};
use portcullis::dma::DmaDevice;
use portcullis::domain::Policy;
use portcullis::exposure::Exposure;
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis_model::Queue;
use portcullis_model::open::OpenDevice;
use proptest::prelude::*;

use super::plain::{Plain, Tally};
use crate::rig::{Clocked, Device, PAGE, Rig, page};

/// CPUs that the platform lends. One more caller gets none.
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
    late: Arc<Mutex<Late>>,
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

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
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
            let mut late = self.late.lock().unwrap();
            let behind = model.now_ns() - late.plain.now_ns();
            late.plain.advance(behind);
            match late.flushes {
                Flushes::Timers => late.plain.flushed(),
                Flushes::All => late.plain.covered(),
                Flushes::FullQueues => late.plain.confirmed(),
            }
        } else {
            *self.strict.lock().unwrap() += 1;
        }
        drop(model);
        InvalidationQueue::submit(&self.queue, requests)
    }
}

/// A second model, whose queues count for as long as they ever may: what is counted lies between the
/// two.
struct Late {
    plain: Plain,
    flushes: Flushes,
}

/// Which flushes those of now are.
#[derive(Clone, Copy)]
enum Flushes {
    /// Queues hear of them at once.
    Timers,
    /// Queues hear of them with their next entries, or when the account is read.
    All,
    /// Queues hear of them so, but not what of an open segment they cover: it counts further.
    FullQueues,
}

struct Mapping {
    iova: Iova,
    len: u64,
    neighbours: u64,
}

pub struct Machine {
    rig: Rig<Arc<Clocked>, Told>,
    strict: Device,
    model: Arc<Mutex<Plain>>,
    late: Arc<Mutex<Late>>,
    shared: bool,
    live: Vec<Mapping>,
}

impl Machine {
    pub fn new(costs: Costs, policy: Policy) -> Self {
        let platform = Clocked::new(CPUS);
        let shared = costs.shares_one_queue();
        let plain = || Plain::new(if shared { 1 } else { CPUS + 1 }, CPUS + 1);
        let model = Arc::new(Mutex::new(plain()));
        let late = Arc::new(Mutex::new(Late { plain: plain(), flushes: Flushes::Timers }));
        let rig = Rig::new(Arc::clone(&platform), policy, |queue| Told {
            queue,
            costs,
            platform,
            model: Arc::clone(&model),
            late: Arc::clone(&late),
            failures: Mutex::default(),
            strict: Mutex::default(),
        });
        let strict = DmaDevice::new(rig.domain.clone(), u64::MAX).unwrap();
        strict.set_policy(Some(Policy::Strict)).unwrap();
        Self { rig, strict, model, late, shared, live: Vec::new() }
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

    /// Does the same to both models, the second of which is brought to the time of the first.
    fn tell(&self, change: impl Fn(&mut Plain)) {
        let mut model = self.model.lock().unwrap();
        change(&mut model);
        let mut late = self.late.lock().unwrap();
        let behind = model.now_ns() - late.plain.now_ns();
        late.plain.advance(behind);
        change(&mut late.plain);
    }

    fn flushing(&self, flushes: Flushes) {
        self.late.lock().unwrap().flushes = flushes;
    }

    pub fn step(&mut self, step: &Step) {
        match *step {
            Step::Map { cpu, offset, len } => {
                self.rig.platform.be(cpu);
                let phys = page(0).phys.checked_add(offset).unwrap();
                let iova = self.rig.device.open_single(phys, len, Direction::Bidirectional).unwrap();
                let neighbours = (offset + len).next_multiple_of(PAGE) - len;
                self.tell(|model| model.mapped(cpu, neighbours));
                self.live.push(Mapping { iova, len, neighbours });
            }
            Step::Unmap { cpu, which, strictly } if !self.live.is_empty() => {
                self.rig.platform.be(cpu);
                // In order, for 0.
                let Mapping { iova, len, neighbours } = self.live.remove(which % self.live.len());
                let device = if strictly { &self.strict } else { &self.rig.device };
                let before = *self.rig.queue.strict.lock().unwrap();
                self.flushing(Flushes::FullQueues);
                device.unmap_single(iova, len).unwrap();
                self.flushing(Flushes::Timers);
                self.tell(|model| model.unmapped(cpu, neighbours));
                // A queue that is full, and cannot be flushed, has each unmap wait for itself.
                if *self.rig.queue.strict.lock().unwrap() == before {
                    let queue = if self.shared { 0 } else { cpu };
                    self.tell(|model| model.queued(queue, len, neighbours));
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
            Step::Flush => {
                self.flushing(Flushes::All);
                let _ = self.rig.domain.flush();
                self.flushing(Flushes::Timers);
            }
            Step::FailNext { flushes } => {
                self.fail_next(flushes, InvalidationError::Rejected { code: 3 });
            }
        }
    }

    /// The account lies between the two models, but for the reading of the clock.
    pub fn check(&self) {
        let found = self.exposure();
        self.tell(Plain::visited);
        let (model, late) = (self.model.lock().unwrap(), &self.late.lock().unwrap().plain);
        let (least, most) = (model.exact(), late.exact());
        let (below, above) = (model.error().0, late.error().1);
        for (kind, found, least, most) in [
            ("stale", found.stale_byte_ns, least.used.saturating_sub(below.used), most.used + above.used),
            (
                "neighbours",
                found.neighbour_byte_ns,
                least.neighbour.saturating_sub(below.neighbour),
                most.neighbour + above.neighbour,
            ),
        ] {
            assert!((least..=most).contains(&found), "{kind}: {found}, of {least} to {most}");
        }
        assert!((model.longest_ns()..=late.longest_ns()).contains(&found.longest_stale_ns), "{found:?}");
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
        let costs = if shared { crate::exposure::EXPENSIVE } else { Costs::BARE_METAL };
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
