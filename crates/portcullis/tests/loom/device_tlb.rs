//! A device that begins to cache translations itself, or ends it, beside an unmap that waits for the hardware: what
//! is unmapped is then in none of the caches, and nothing can fetch it again.

use ::loom::sync::{Arc, Mutex};
use ::loom::thread;
use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange};
use portcullis::invalidation::{DeviceTlbs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::sync::{AtomicU64, Ordering};

const DOMAIN: DomainId = DomainId(1);
const DEVICE: DeviceId = DeviceId(7);
const OTHER: DeviceId = DeviceId(8);

/// One translation: what is cached of it.
struct Caches {
    iotlb: u64,
    /// What is in the device's own TLB. It is used first, whatever else.
    device: u64,
    /// Whether the device keeps what it fetches.
    enabled: bool,
}

/// The device uses the translation again and again, and so whenever anything happens. Its lock is the hardware's own
/// order: a walk after an invalidation finds what was stored before that was asked for.
struct Hardware {
    entry: AtomicU64,
    caches: Mutex<Caches>,
}

impl Hardware {
    /// A device without a TLB has put the translation into the IOTLB.
    fn new() -> Self {
        Self { entry: AtomicU64::new(1), caches: Mutex::new(Caches { iotlb: 1, device: 0, enabled: false }) }
    }

    /// What the device gets: from its own TLB, or the IOTLB, or memory.
    fn access(&self) -> u64 {
        let mut caches = self.caches.lock().unwrap();
        if caches.iotlb == 0 {
            caches.iotlb = self.entry.load(Ordering::Relaxed);
        }
        if caches.enabled && caches.device == 0 {
            caches.device = caches.iotlb;
        }
        caches.iotlb.max(caches.device)
    }

    fn enable(&self, enabled: bool) {
        self.caches.lock().unwrap().enabled = enabled;
        self.access();
    }

    fn is_held(&self) -> bool {
        self.caches.lock().unwrap().device == 1
    }
}

// SAFETY: each cache is emptied, under its lock, before the next request; no memory is behind it.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        for request in requests {
            {
                let mut caches = self.caches.lock().unwrap();
                match request.invalidation {
                    Invalidation::DeviceTlb { device: DEVICE, .. } => caches.device = 0,
                    Invalidation::DeviceTlb { .. } => {}
                    _ => caches.iotlb = 0,
                }
            }
            self.access();
        }
        Ok(())
    }
}

struct Machine {
    hardware: Hardware,
    set: DeviceTlbs,
}

impl Machine {
    fn unmap(&self) {
        self.hardware.entry.store(0, Ordering::Relaxed);
        let range = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
        let request =
            Request { domain: DOMAIN, invalidation: Invalidation::Range { range, leaf_only: true } };
        self.set.submit(&self.hardware, &[request]).unwrap();
        assert_eq!(self.hardware.access(), 0, "unmapped and reached");
    }

    fn come(&self) {
        self.set.add(DEVICE, &self.hardware).unwrap();
        self.hardware.enable(true);
    }
}

fn race(before: fn(&Machine), other: fn(&Machine)) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let machine = Arc::new(Machine { hardware: Hardware::new(), set: DeviceTlbs::new(DOMAIN) });
        before(&machine);
        let beside = Arc::clone(&machine);
        let beside = thread::spawn(move || other(&beside));
        machine.unmap();
        beside.join().unwrap();
        assert!(!machine.hardware.is_held());
        assert_eq!(machine.hardware.access(), 0, "in the end");
    });
}

#[test]
fn a_device_that_comes_beside_an_unmap_gets_nothing() {
    race(|_| (), Machine::come);
}

#[test]
fn nor_where_there_is_another_already() {
    race(|machine| machine.set.add(OTHER, &machine.hardware).unwrap(), Machine::come);
}

#[test]
fn nor_where_another_goes() {
    let come_and_go = |machine: &Machine| {
        // SAFETY: what plays the device has no memory behind it.
        unsafe { machine.set.remove(OTHER, &machine.hardware) }.unwrap();
        machine.come();
    };
    race(|machine| machine.set.add(OTHER, &machine.hardware).unwrap(), come_and_go);
}

#[test]
fn a_device_that_goes_beside_an_unmap_keeps_nothing() {
    let go = |machine: &Machine| {
        machine.hardware.enable(false);
        // SAFETY: what plays the device has no memory behind it.
        unsafe { machine.set.remove(DEVICE, &machine.hardware) }.unwrap();
    };
    race(Machine::come, go);
}

/// What was unmapped is gone from the tables and not yet from the IOTLB, by an unmap that looked at the set before.
fn adding(beside: fn(&Machine), ours: fn(&Machine)) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let machine = Arc::new(Machine { hardware: Hardware::new(), set: DeviceTlbs::new(DOMAIN) });
        machine.hardware.entry.store(0, Ordering::Relaxed);
        let other = Arc::clone(&machine);
        let other = thread::spawn(move || beside(&other));
        ours(&machine);
        other.join().unwrap();
        // It is there already, unless it was taken out.
        machine.set.add(DEVICE, &machine.hardware).unwrap();
        machine.hardware.caches.lock().unwrap().device = 1;
        machine.unmap();
        assert!(!machine.hardware.is_held(), "it is there, and was not asked");
        // SAFETY: what plays the device has no memory behind it.
        unsafe { machine.set.forget(DEVICE) };
        // All places are free again, and it is counted so.
        [DEVICE, OTHER].iter().for_each(|device| machine.set.add(*device, &machine.hardware).unwrap());
    });
}

fn come_if_it_may(machine: &Machine) {
    match machine.set.add(DEVICE, &machine.hardware) {
        Ok(()) => {
            machine.hardware.enable(true);
            assert!(!machine.hardware.is_held(), "it may fetch, and there is something left for it");
            machine.hardware.enable(false);
        }
        Err(error) => assert_eq!(error, InvalidationError::BeingAdded),
    }
}

#[test]
fn a_device_added_twice_at_once_fetches_nothing_that_is_unmapped() {
    adding(come_if_it_may, come_if_it_may);
}

#[test]
fn a_device_that_is_forgotten_while_it_is_added_is_there_or_not() {
    // SAFETY: what plays the device has no memory behind it.
    adding(|machine| unsafe { machine.set.forget(DEVICE) }, come_if_it_may);
    // SAFETY: as above.
    adding(|machine| unsafe { machine.set.remove(DEVICE, &machine.hardware) }.unwrap(), come_if_it_may);
}

/// A device's TLB, and hardware that orders nothing by itself: only who asks whom does.
struct Unordered {
    held: AtomicU64,
}

// SAFETY: what it forgets is all that the test looks at.
unsafe impl InvalidationQueue for Unordered {
    fn invalidate(&self, _: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        if matches!(invalidation, Invalidation::DeviceTlb { device: DEVICE, .. }) {
            self.held.store(0, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Who does not find the device any more comes after what made it forget everything.
#[test]
fn who_does_not_find_a_device_that_went_comes_after_its_last_invalidation() {
    for others in [&[][..], &[OTHER]] {
        ::loom::model(move || {
            let machine = Arc::new((Unordered { held: AtomicU64::new(1) }, DeviceTlbs::new(DOMAIN)));
            for device in [DEVICE].iter().chain(others) {
                machine.1.add(*device, &machine.0).unwrap();
            }
            let beside = Arc::clone(&machine);
            // SAFETY: what plays the device has no memory behind it.
            let beside = thread::spawn(move || unsafe { beside.1.remove(DEVICE, &beside.0) }.unwrap());
            let (hardware, set) = &*machine;
            let range = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
            let invalidation = Invalidation::Range { range, leaf_only: true };
            set.submit(hardware, &[Request { domain: DOMAIN, invalidation }]).unwrap();
            assert_eq!(hardware.held.load(Ordering::Relaxed), 0, "neither asked nor gone");
            beside.join().unwrap();
        });
    }
}
