//! A change at each border of an unmap, and an unmap at each border of a change.
//!
//! A border is where a thread takes a slot, gives one back, or asks the hardware for something: between two borders
//! nothing of a domain that others see is done but under a lock, or is one store. Here the other side's whole call
//! is made right at a border, by another thread. So every order of these steps that matters is tried, and none by
//! chance.

use std::cell::Cell;
use std::sync::{Arc, Mutex, Weak};

use portcullis::addr::{Direction, Iova};
use portcullis::domain::{Policies, Policy, PolicyError};
use portcullis::invalidation::{DeviceId, InvalidationError};
use portcullis::platform::{LocalSlot, Platform, PlatformEvents};
use portcullis::std_platform::StdPlatform;
use portcullis_model::Queue;

use crate::rig::{self, Device, Dom, Hooked, LAZY_FOREVER, PAGE, page};

type Action = Box<dyn FnOnce() + Send>;
type Hardware = Hooked<Queue>;

/// Threads as CPUs, one of which is stopped at a border until another has acted.
#[derive(Clone)]
struct Borders {
    inner: StdPlatform,
    action: Arc<Mutex<Option<Action>>>,
}

thread_local! {
    /// Borders that this thread passes until it is stopped; `None` for a thread that is not.
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

impl Borders {
    fn pass(&self) {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                let action = self.action.lock().unwrap().take().expect("stopped once");
                std::thread::spawn(action).join().unwrap();
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}

impl Platform for Borders {
    fn slots(&self) -> usize {
        self.inner.slots()
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        self.pass();
        let result = self.inner.with_slot(f);
        self.pass();
        result
    }

    fn now_ns(&self) -> u64 {
        self.inner.now_ns()
    }

    fn fence_all(&self) {
        self.inner.fence_all();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        self.inner.register(events);
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.inner.wake_at(deadline_ns);
    }
}

type Rig = rig::Rig<Borders, Hardware>;

/// What changes share.
#[derive(Clone)]
struct Parties {
    domain: Arc<Dom<Borders, Hardware>>,
    device: Device<Borders, Hardware>,
    policies: Arc<Policies>,
}

type Step = fn(&Parties) -> Result<(), PolicyError>;

/// Ways to become strict, and what comes before.
const CHANGES: [(&str, Step, Step); 5] = [
    ("the domain", |_| Ok(()), |all| all.domain.set_policy(Policy::Strict)),
    ("the device", |_| Ok(()), |all| all.device.set_policy(Some(Policy::Strict))),
    (
        "an exception less",
        |all| {
            all.device.set_policy(Some(LAZY_FOREVER))?;
            all.domain.set_policy(Policy::Strict)
        },
        |all| all.device.set_policy(None),
    ),
    ("all devices", |_| Ok(()), |all| all.policies.set_default(Policy::Strict)),
    ("this device of all", |_| Ok(()), |all| all.policies.except(DeviceId(7), Some(Policy::Strict))),
];

/// A rig, and a mapping in it that the device has used.
fn setting(before: Step) -> (Rig, Parties, Iova) {
    let platform = Borders { inner: StdPlatform::with_slots(4), action: Arc::default() };
    let borders = platform.clone();
    let rig = Rig::new(platform, LAZY_FOREVER, |queue| {
        let hardware = Hooked::new(queue);
        hardware.set(move || borders.pass());
        hardware
    });
    let policies = Arc::new(Policies::new(LAZY_FOREVER));
    policies.govern(DeviceId(7), &rig.domain).unwrap();
    let all = Parties { domain: Arc::clone(&rig.domain), device: rig.device.clone(), policies };
    before(&all).unwrap();
    let iova = rig.device.map_single(page(1).phys, PAGE, Direction::Bidirectional).unwrap();
    assert!(rig.reaches(iova));
    (rig, all, iova)
}

/// Runs `first`, which is stopped at its border number `border` until `second` is over. Whether it got there.
fn interrupted(platform: &Borders, border: u32, first: impl FnOnce(), second: Action) -> bool {
    *platform.action.lock().unwrap() = Some(second);
    LEFT.set(Some(border));
    first();
    LEFT.replace(None).is_none()
}

#[test]
fn a_change_at_any_border_of_an_unmap_holds_when_both_have_returned() {
    for (name, before, change) in CHANGES {
        let mut borders = 0;
        loop {
            let (rig, all, iova) = setting(before);
            let device = rig.device.clone();
            let unmap = || device.unmap_single(iova, PAGE).unwrap();
            if !interrupted(&rig.platform, borders, unmap, Box::new(move || change(&all).unwrap())) {
                break;
            }
            assert!(!rig.reaches(iova), "{name}, at border {borders} of the unmap");
            borders += 1;
        }
        assert!(borders >= 4, "{name}: {borders} borders");
    }
}

#[test]
fn an_unmap_at_any_border_of_a_change_is_covered_when_both_have_returned() {
    for (name, before, change) in CHANGES {
        let mut borders = 0;
        loop {
            let (rig, all, iova) = setting(before);
            let device = rig.device.clone();
            let unmap = move || device.unmap_single(iova, PAGE).unwrap();
            if !interrupted(&rig.platform, borders, || change(&all).unwrap(), Box::new(unmap)) {
                break;
            }
            assert!(!rig.reaches(iova), "{name}, at border {borders} of the change");
            borders += 1;
        }
        assert!(borders >= 4, "{name}: {borders} borders");
    }
}

/// The flush of a change fails: it says so, the policy is changed all the same, and whoever asks again is not told
/// that all is well before it is.
#[test]
fn a_change_that_was_not_confirmed_can_be_asked_for_again() {
    for (name, before, change) in CHANGES {
        let (rig, all, iova) = setting(before);
        rig.device.unmap_single(iova, PAGE).unwrap();
        let broken = InvalidationError::TimedOut { waited_ns: 1 };
        for _ in 0..2 {
            rig.iommu.queue().fail_next(1, broken);
            assert_eq!(change(&all), Err(PolicyError::Unconfirmed(broken)), "{name}");
            assert!(rig.reaches(iova));
            let other = rig.device.map_single(page(2).phys, PAGE, Direction::Bidirectional).unwrap();
            assert!(rig.reaches(other));
            rig.device.unmap_single(other, PAGE).unwrap();
            assert!(!rig.reaches(other), "{name}: the new policy holds");
        }
        change(&all).unwrap();
        assert!(!rig.reaches(iova), "{name}");
    }
}
