//! Policies that change: domains that translate and that do not, hardware that fails. Everything is compared with a plain model, and the devices
//! with what they could reach before.

use crate::common::{Bench, PAGE};
use crate::dice::Dice;
use crate::queued::{direct, end};
use portcullis::addr::{Direction, Iova};
use portcullis::domain::{Policy, PolicyError};
use portcullis::invalidation::InvalidationError;

const LONG: Policy = Policy::Lazy { window_ns: 1 << 60 };
const LONGER: Policy = Policy::Lazy { window_ns: 1 << 61 };
const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 7 };

/// From the strictest on.
const ORDER: [Policy; 4] = [Policy::Strict, LONG, LONGER, Policy::Passthrough];

fn rank(policy: Policy) -> usize {
    ORDER.iter().position(|other| *other == policy).unwrap()
}

/// A domain, and what is known of it.
struct Place {
    bench: Bench,
    policy: Policy,
    translated: bool,
    /// Its device reaches this although it is unmapped.
    stale: Option<Iova>,
    flushes: u64,
    flush_fails: bool,
}

impl Place {
    fn new(policy: Policy) -> Self {
        // On a platform of its own: a thread of another test that ends would flush it.
        let bench = Bench::new(policy);
        let translated = policy != Policy::Passthrough;
        Self { bench, policy, translated, stale: None, flushes: 0, flush_fails: false }
    }

    /// Leaves something stale, if the policy is lazy.
    fn stain(&mut self) {
        if self.stale.is_none() && matches!(self.policy, Policy::Lazy { .. }) {
            let buffer = self.bench.memory.buffer(PAGE).unwrap();
            let mut queue = direct(&self.bench.device);
            let mapping = queue.map(buffer, Direction::FromDevice).unwrap();
            let iova = mapping.iova();
            assert!(self.bench.writes(iova));
            // Kept, as a lazy domain's buffers are in a driver that is careful: the page is not used for others.
            std::mem::forget(end(&mut queue, mapping));
            self.stale = Some(iova);
        }
    }

    fn may_have(&self, policy: Policy) -> Result<(), PolicyError> {
        if (policy != Policy::Passthrough) == self.translated {
            return Ok(());
        }
        Err(PolicyError::Translation { from: self.policy.name(), to: policy.name() })
    }

    fn flush(&mut self) -> Result<(), PolicyError> {
        if std::mem::take(&mut self.flush_fails) {
            return Err(PolicyError::Unconfirmed(TIMEOUT));
        }
        self.flushes += 1;
        self.stale = None;
        Ok(())
    }

    fn set_policy(&mut self, policy: Policy) {
        let mut expected = self.may_have(policy);
        if expected.is_ok() {
            let flush = self.translated && rank(policy) <= rank(self.policy);
            self.policy = policy;
            expected = if flush { self.flush() } else { Ok(()) };
        }
        assert_eq!(self.bench.domain.set_policy(policy), expected);
    }

    fn check(&self, what: &str) {
        assert_eq!(self.bench.domain.policy(), self.policy, "{what}");
        assert_eq!(self.bench.domain.stats().flushes, self.flushes, "{what}");
        if let Some(iova) = self.stale {
            assert!(self.bench.writes(iova), "{what}: a flush that nobody asked for");
        }
    }
}

#[test]
fn every_change_does_what_a_plain_model_does() {
    for seed in 1..=12 {
        let mut dice = Dice::new(seed);
        let of = |place| Place::new(if place == 3 { Policy::Passthrough } else { LONG });
        let mut places: Vec<Place> = (0..4).map(of).collect();
        for step in 0..120 {
            places.iter_mut().for_each(Place::stain);
            let at = dice.below(4) as usize;
            let place = &mut places[at];
            if dice.below(4) == 0 {
                place.bench.iommu.queue().fail_next(1, TIMEOUT);
                place.flush_fails = true;
            }
            let policies = if dice.one_in(2) { 4 } else { 3 };
            let policy = ORDER[dice.below(policies) as usize];
            place.set_policy(policy);
            for place in &mut places {
                place.check(&format!("seed {seed}, step {step}: {policy:?} of domain {at}"));
                // What was to fail and was not tried does not fail later.
                place.flush_fails = false;
                place.bench.iommu.queue().fail_next(0, TIMEOUT);
            }
        }
    }
}

#[test]
fn an_exception_is_flushed_for_unless_it_weakens_what_held_before() {
    let exceptions = [None, Some(Policy::Strict), Some(LONG), Some(LONGER)];
    for own in [Policy::Strict, LONG, LONGER] {
        let bench = Bench::new(own);
        for old in exceptions {
            for new in exceptions {
                bench.device.set_policy(old).unwrap();
                let before = bench.domain.stats().flushes;
                bench.device.set_policy(new).unwrap();
                let flushed = bench.domain.stats().flushes > before;
                let weakens = rank(new.unwrap_or(own)) > rank(old.unwrap_or(own));
                assert_eq!(flushed, !weakens, "{own:?}: from {old:?} to {new:?}");
            }
        }
    }
}
