//! A change at each border of an unmap, and an unmap at each border of a change.
//!
//! A border is where a thread takes a CPU, gives one back, or asks the hardware for something: between two borders
//! nothing of a domain that others see is done but under a lock, or is one store. Here the other side's whole call
//! is made right at a border, by another thread. So every order of these steps that matters is tried, and none by
//! chance.

use std::cell::RefCell;
use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions};
use portcullis::domain::{Policy, PolicyError};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis_model::Queue;
use portcullis_model::open::OpenDevice;

use super::turns::Turns;
use crate::rig::{self, Device, Dom, Hooked, LAZY_FOREVER, PAGE, page};

type Action = Box<dyn FnOnce() + Send>;
type Hardware = Hooked<Queue>;

thread_local! {
    /// Borders that this thread passes until it is stopped, and what another thread does then before it goes on;
    /// `None` for a thread that is not stopped.
    static STOP: RefCell<Option<(u32, Action)>> = const { RefCell::new(None) };
}

/// This thread passes a border.
fn pass() {
    let action = STOP.with_borrow_mut(|stop| {
        let (left, _) = stop.as_mut()?;
        if let Some(fewer) = left.checked_sub(1) {
            *left = fewer;
            return None;
        }
        stop.take()
    });
    if let Some((_, action)) = action {
        std::thread::spawn(action).join().unwrap();
    }
}

type Rig = rig::Rig<Turns, Hardware>;

/// What changes share.
#[derive(Clone)]
struct Parties {
    domain: Shared<Dom>,
    device: Device,
}

type Step = fn(&Parties) -> Result<(), PolicyError>;

/// Ways to become strict, and what comes before.
const CHANGES: [(&str, Step, Step); 3] = [
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
];

/// A rig, and a mapping in it that the device has used.
fn setting(before: Step) -> (Rig, Parties, Iova) {
    let rig = Rig::new(Turns::new(4, |_| pass()), LAZY_FOREVER, |queue| {
        let hardware = Hooked::new(queue);
        hardware.set(pass);
        hardware
    });
    let all = Parties { domain: rig.domain.clone(), device: rig.device.clone() };
    before(&all).unwrap();
    let iova = rig.device.open_single(page(1).phys, PAGE, Direction::Bidirectional).unwrap();
    assert!(rig.reaches(iova));
    (rig, all, iova)
}

/// Runs `first`, which is stopped at its border number `border` until `second` is over. Whether it got there.
fn interrupted(border: u32, first: impl FnOnce(), second: Action) -> bool {
    STOP.set(Some((border, second)));
    first();
    STOP.take().is_none()
}

#[test]
fn a_change_at_any_border_of_an_unmap_holds_when_both_have_returned() {
    for (name, before, change) in CHANGES {
        let mut borders = 0;
        loop {
            let (rig, all, iova) = setting(before);
            let device = rig.device.clone();
            let unmap = || device.unmap_single(iova, PAGE).unwrap();
            // Where it is mapped still the device has it in its IOTLB again, which the change's flush has emptied.
            let iommu = Arc::clone(&rig.iommu);
            let change_and_retry = move || {
                change(&all).unwrap();
                let _ = iommu.access(rig::DEVICE, iova, 1, Permissions::WRITE);
            };
            if !interrupted(borders, unmap, Box::new(change_and_retry)) {
                break;
            }
            assert!(!rig.reaches(iova), "{name}, at border {borders} of the unmap");
            borders += 1;
        }
        // An unmap that is deferred is one turn.
        assert!(borders >= 2, "{name}: {borders} borders");
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
            if !interrupted(borders, || change(&all).unwrap(), Box::new(unmap)) {
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
            let other = rig.device.open_single(page(2).phys, PAGE, Direction::Bidirectional).unwrap();
            assert!(rig.reaches(other));
            rig.device.unmap_single(other, PAGE).unwrap();
            assert!(!rig.reaches(other), "{name}: the new policy holds");
        }
        change(&all).unwrap();
        assert!(!rig.reaches(iova), "{name}");
    }
}
