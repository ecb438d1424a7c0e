//! A policy for many devices: several domains, domains of several devices, devices in several domains, domains that go,
//! hardware that fails. Everything is compared with a plain model, and the devices with what they could reach before.

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::{Bench, Mapper, PAGE, vtd};
use crate::dice::Dice;
use crate::played::Played;
use crate::queued::{direct, end};
use crate::rig::{Moment, Observed};
use portcullis::addr::{DeviceId, Direction, DomainId, Iova};
use portcullis::domain::{Domain, Policies, Policy, PolicyError};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::PageTable;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

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

    fn check(&self, what: &str) {
        assert_eq!(self.bench.domain.policy(), self.policy, "{what}");
        assert_eq!(self.bench.domain.stats().flushes, self.flushes, "{what}");
        if let Some(iova) = self.stale {
            assert!(self.bench.writes(iova), "{what}: a flush that nobody asked for");
        }
    }
}

/// What `Policies` should do, and it.
struct World {
    policies: Policies,
    default: Policy,
    exceptions: BTreeMap<u16, Policy>,
    governed: Vec<(u16, usize)>,
    places: Vec<Place>,
}

impl World {
    fn policy_for(&self, device: u16) -> Policy {
        self.exceptions.get(&device).copied().unwrap_or(self.default)
    }

    /// Whether a flush must follow.
    fn tell(&mut self, device: u16, place: usize) -> Result<bool, PolicyError> {
        self.places[place].may_have(self.policy_for(device))?;
        let its = self.governed.iter().filter(|(_, other)| *other == place);
        let strictest = its.map(|(device, _)| self.policy_for(*device)).min_by_key(|policy| rank(*policy));
        let (new, place) = (strictest.unwrap(), &mut self.places[place]);
        place.may_have(new)?;
        let weaker = rank(new) > rank(place.policy);
        place.policy = new;
        Ok(place.translated && !weaker)
    }

    /// Tells all that are concerned, each once, and then flushes.
    fn change(&mut self, concerned: impl Fn(&Self, u16) -> bool) -> Result<(), PolicyError> {
        let mut told: BTreeMap<usize, bool> = BTreeMap::new();
        let mut order = Vec::new();
        let mut result = Ok(());
        for (device, place) in self.governed.clone() {
            if concerned(self, device) && !told.contains_key(&place) {
                let stored = self.tell(device, place);
                told.insert(place, stored == Ok(true));
                order.push(place);
                result = result.and(stored.map(|_| ()));
            }
        }
        for place in order {
            if told[&place] {
                result = result.and(self.places[place].flush());
            }
        }
        result
    }

    fn govern(&mut self, device: u16, place: usize) {
        if !self.governed.contains(&(device, place)) {
            self.governed.push((device, place));
        }
        let expected = match self.tell(device, place) {
            Ok(true) => self.places[place].flush(),
            stored => stored.map(|_| ()),
        };
        let domain = &self.places[place].bench.domain;
        assert_eq!(self.policies.govern(DeviceId(device.into()), domain), expected);
    }

    fn set_default(&mut self, policy: Policy) {
        self.default = policy;
        let expected = self.change(|world, device| !world.exceptions.contains_key(&device));
        assert_eq!(self.policies.set_default(policy), expected);
    }

    fn except(&mut self, device: u16, policy: Option<Policy>) {
        match policy {
            Some(policy) => self.exceptions.insert(device, policy),
            None => self.exceptions.remove(&device),
        };
        let expected = self.change(|_, other| other == device);
        assert_eq!(self.policies.except(DeviceId(device.into()), policy), expected);
    }

    /// The domain's own, past all devices: until one of them is told of a change.
    fn set_policy(&mut self, place: usize, policy: Policy) {
        let place = &mut self.places[place];
        let mut expected = place.may_have(policy);
        if expected.is_ok() {
            let flush = place.translated && rank(policy) <= rank(place.policy);
            place.policy = policy;
            expected = if flush { place.flush() } else { Ok(()) };
        }
        assert_eq!(place.bench.domain.set_policy(policy), expected);
    }

    /// The domain goes, and another comes in its place, which nobody governs.
    fn replace(&mut self, place: usize, policy: Policy) {
        self.places[place] = Place::new(policy);
        self.governed.retain(|(_, other)| *other != place);
    }
}

#[test]
fn every_change_does_what_a_plain_model_does_to_every_domain() {
    const DEVICES: u64 = 4;
    const PLACES: usize = 4;
    for seed in 1..=12 {
        let mut dice = Dice::new(seed);
        let places = (0..PLACES).map(|place| Place::new(if place == 3 { Policy::Passthrough } else { LONG }));
        let mut world = World {
            policies: Policies::new(LONG),
            default: LONG,
            exceptions: BTreeMap::new(),
            governed: Vec::new(),
            places: places.collect(),
        };
        for step in 0..120 {
            world.places.iter_mut().for_each(Place::stain);
            if dice.below(4) == 0 {
                let place = &mut world.places[dice.below(PLACES as u64) as usize];
                place.bench.iommu.queue().fail_next(1, TIMEOUT);
                place.flush_fails = true;
            }
            let policies = if dice.one_in(2) { 4 } else { 3 };
            let policy = ORDER[dice.below(policies) as usize];
            let (device, place) = (dice.below(DEVICES) as u16, dice.below(PLACES as u64) as usize);
            let what = match dice.below(18) {
                0..=4 => {
                    world.set_default(policy);
                    "set_default"
                }
                5..=8 => {
                    world.except(device, Some(policy));
                    "except"
                }
                9 | 10 => {
                    world.except(device, None);
                    "no exception"
                }
                11..=14 => {
                    world.govern(device, place);
                    "govern"
                }
                15 | 16 => {
                    world.set_policy(place, policy);
                    "set_policy"
                }
                _ => {
                    world.replace(place, policy);
                    "replace"
                }
            };
            let what = format!("seed {seed}, step {step}: {what}");
            for device in 0..DEVICES as u16 {
                let (policies, own) = (&world.policies, world.policy_for(device));
                assert_eq!(policies.policy_for(DeviceId(device.into())), own, "{what}");
            }
            for place in &mut world.places {
                place.check(&what);
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

/// Asks for the policy of a device when it is dropped: by then nobody may hold the lock.
struct Asks(Arc<Policies>, Mutex<Sender<Policy>>);

impl Drop for Asks {
    fn drop(&mut self) {
        self.1.lock().unwrap().send(self.0.policy_for(DeviceId(1))).unwrap();
    }
}

#[test]
fn a_domain_whose_last_handle_goes_during_a_change_is_dropped_without_the_lock() {
    type Slot = Arc<Mutex<Option<Shared<Domain<Observed<Mapper>, Played>>>>>;
    let bench = Bench::new(LONG);
    let policies = Arc::new(Policies::new(LONG));
    let (told, tells) = channel();
    let (asks, last) = (Asks(Arc::clone(&policies), Mutex::new(told)), Slot::default());
    let platform = StdPlatform::new();
    let table = PageTable::for_cpus(Arc::clone(&bench.memory), vtd(4), platform.cpus()).unwrap();
    let inner = TableMapper::new(table, Arc::new(bench.iommu.queue()) as _, DomainId(2), Vec::new());
    let handle = Arc::downgrade(&last);
    let mapper = Observed::new(inner, move |moment| {
        let _hold = &asks;
        if let (Moment::Sync, Some(last)) = (moment, handle.upgrade()) {
            let domain = last.lock().unwrap().take();
            drop(domain);
        }
    });
    let domain = Domain::new(Played::new(platform), mapper, LONG).unwrap();
    policies.govern(DeviceId(1), &domain).unwrap();
    *last.lock().unwrap() = Some(domain);
    let changing = Arc::clone(&policies);
    let change = thread::spawn(move || changing.set_default(Policy::Strict));
    let policy = tells.recv_timeout(Duration::from_secs(60)).expect("whoever drops it holds the lock");
    assert_eq!(policy, Policy::Strict);
    change.join().unwrap().unwrap();
    // It is not told any more.
    policies.set_default(LONG).unwrap();
    assert!(last.lock().unwrap().is_none());
}
