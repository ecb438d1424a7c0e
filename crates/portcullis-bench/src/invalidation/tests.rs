//! A subject that does not do what it promises is found.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::invalidation::Invalidation;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::check::{Watch, WatchedLane};
use super::hardware::{Hardware, Timing};
use super::subject::{Lane, Maker, Promise, SUBJECTS, Subject};
use super::turns::Turns;
use super::workload::{PAGE, Shape, TURN, WORKLOADS, phys};
use crate::runner::{Cell, Failure};
use crate::team::Team;
use crate::timer::OpTimer;

fn maker(profile: &str) -> Maker {
    let profile = Profile::load(profile).unwrap();
    let (timing, costs) = (Timing::of(&profile), profile.waits.costs());
    Maker { platform: StdPlatform::new(), timer: OpTimer::calibrated(), timing, costs, crowded: true }
}

/// Forgets one thing of all that it is to do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A page leads to another one's memory.
    LeadsElsewhere,
    /// The unmap of this page of a turn leaves it in the table.
    StaysMapped(usize),
    /// A strict unmap does not wait for the hardware.
    NotInvalidated,
    /// Addresses are used again without a flush.
    NotFlushed,
}

/// A subject of one page table entry for each page, all in one thread, that hands out the same addresses in each
/// turn.
struct Script {
    fault: Fault,
    promise: Promise,
    mapped: Vec<AtomicUsize>,
    watch: Arc<Watch>,
    hardware: Hardware,
}

impl Subject for Script {
    fn lane(self: Arc<Self>, _: usize) -> Result<Box<dyn Lane>, Failure> {
        Ok(Box::new(ScriptLane(self)))
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        let index = (iova >> 12) as usize;
        let at = phys(0, index) + if self.fault == Fault::LeadsElsewhere { PAGE } else { 0 };
        (self.mapped[index].load(Ordering::Relaxed) == 1).then_some(at)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    fn promise(&self) -> Promise {
        self.promise
    }
}

struct ScriptLane(Arc<Script>);

impl Lane for ScriptLane {
    fn map_one(&mut self, index: usize) -> bool {
        if index == 0 && self.0.promise == Promise::Lazy && self.0.fault != Fault::NotFlushed {
            self.0.watch.forget(Invalidation::Domain);
        }
        self.0.mapped[index].store(1, Ordering::Relaxed);
        true
    }

    fn unmap_one(&mut self, index: usize) -> bool {
        if self.0.fault != Fault::StaysMapped(index) {
            self.0.mapped[index].store(0, Ordering::Relaxed);
        }
        if self.0.promise == Promise::Strict && self.0.fault != Fault::NotInvalidated {
            self.0.watch.forget(Invalidation::Domain);
        }
        true
    }

    fn iova(&self, index: usize) -> u64 {
        (index as u64) << 12
    }
}

/// What the check says of two turns.
fn verdict(promise: Promise, fault: Fault) -> Option<String> {
    let profile = Profile::load("none").unwrap();
    let (timing, costs) = (Timing::of(&profile), profile.waits.costs());
    let hardware = Hardware::new(timing, costs, &OpTimer::calibrated(), true, None);
    let watch = Arc::new(Watch::default());
    let mapped = (0..TURN).map(|_| AtomicUsize::new(0)).collect();
    let subject = Arc::new(Script { fault, promise, mapped, watch: Arc::clone(&watch), hardware });
    let inner = Arc::clone(&subject).lane(0).unwrap();
    let mut lane = WatchedLane::new(inner, subject, Arc::clone(&watch), 0);
    for _ in 0..2 {
        let mapped = (0..TURN).all(|index| lane.map_one(index));
        if !mapped || !(0..TURN).all(|index| lane.unmap_one(index)) {
            break;
        }
    }
    watch.fault()
}

#[test]
fn broken_promises_are_found() {
    for promise in [Promise::Strict, Promise::Lazy] {
        assert_eq!(verdict(promise, Fault::None), None, "{promise:?}");
        let elsewhere = verdict(promise, Fault::LeadsElsewhere);
        assert!(elsewhere.is_some_and(|fault| fault.contains("instead of")), "{promise:?}");
        for index in [0, TURN / 2, TURN - 1] {
            let stays = verdict(promise, Fault::StaysMapped(index));
            assert!(stays.is_some_and(|fault| fault.contains("still leads to")), "{promise:?}, page {index}");
        }
    }
    let early = verdict(Promise::Strict, Fault::NotInvalidated);
    assert!(early.is_some_and(|fault| fault.contains("before it was invalidated")));
    let early = verdict(Promise::Lazy, Fault::NotFlushed);
    assert!(early.is_some_and(|fault| fault.contains("handed out while")));
}

/// The later ones follow from it.
#[test]
fn the_first_fault_is_the_one_that_is_told() {
    let watch = Watch::default();
    assert_eq!(["first", "second"].map(|fault| watch.broken(|| fault.into())), [false; 2]);
    assert_eq!(watch.fault().as_deref(), Some("first"));
}

/// What is left behind is found by the check after everything: pages that stay mapped, addresses that are lost.
#[test]
fn what_is_left_is_found() {
    let maker = maker("none");
    for info in &SUBJECTS {
        for workload in WORKLOADS.iter().filter(|workload| info.does(workload.shape)) {
            let subject = maker.subject(info, workload.shape, None).unwrap();
            let mut lane = Arc::clone(&subject).lane(0).unwrap();
            assert!(lane.map(0) && lane.map(1));
            assert!(lane.unmap(0));
            if info.name == "pgtable-only" {
                // Its lane gives addresses back when it ends: what is left is the mapping itself.
                drop(lane);
            }
            let left = subject.settle();
            assert!(matches!(left, Err(Failure::Broken(_))), "{} {}: {left:?}", info.name, workload.name);
        }
    }
}

#[test]
fn every_subject_keeps_its_promises_with_any_number_of_threads() {
    let (maker, team) = (maker("none"), Team::sharing_cores(5).unwrap());
    for info in &SUBJECTS {
        for workload in WORKLOADS.iter().filter(|workload| info.does(workload.shape)) {
            for threads in [1, 5] {
                let opened = Turns::open(&team, &maker, info, workload.shape, threads);
                let mut turns = opened.unwrap_or_else(|e| panic!("{} {}: {e}", info.name, workload.name));
                turns.repetition(&team, 2000).unwrap();
                let split = turns.split().unwrap();
                assert_eq!(split.no_flush.is_some(), workload.shape == Shape::Lazy, "{split:?}");
                turns.check(&team).unwrap();
            }
        }
    }
}

#[test]
fn each_subject_does_the_shapes_that_are_its_own() {
    for workload in WORKLOADS {
        for info in &SUBJECTS {
            let does = match (info.name, workload.shape) {
                ("portcullis", _) => true,
                ("global-lock", shape) => matches!(shape, Shape::Lazy | Shape::Strict),
                ("single-queue" | "pgtable-only", shape) => shape == Shape::Lazy,
                (_, shape) => shape == Shape::Strict,
            };
            assert_eq!(info.does(workload.shape), does, "{} {}", info.name, workload.name);
        }
    }
}

#[test]
fn each_subject_promises_what_its_workload_is() {
    let maker = maker("none");
    for info in &SUBJECTS {
        for workload in WORKLOADS.iter().filter(|workload| info.does(workload.shape)) {
            let subject = maker.subject(info, workload.shape, None).unwrap();
            let expected = match (info.name, workload.name.starts_with("lazy-")) {
                ("pgtable-only", _) => Promise::Nothing,
                (_, true) => Promise::Lazy,
                (_, false) => Promise::Strict,
            };
            assert_eq!(subject.promise(), expected, "{} {}", info.name, workload.name);
        }
    }
}

/// What can be counted, whatever the machine does meanwhile.
#[test]
fn submissions_are_those_of_the_workload() {
    let (maker, team) = (maker("vtd"), Team::sharing_cores(2).unwrap());
    let of = |subject: &str, workload: &str, threads| {
        let info = SUBJECTS.iter().find(|info| info.name == subject).unwrap();
        let workload = WORKLOADS.iter().find(|w| w.name == workload).unwrap();
        let mut turns = Turns::open(&team, &maker, info, workload.shape, threads).unwrap();
        turns.repetition(&team, 2048).unwrap();
        turns.split().unwrap()
    };
    for (workload, batch) in [
        ("strict-unmap", 1.0),
        ("strict-batch-8", 8.0),
        ("strict-batch-32", 32.0),
        ("strict-batch-64", 64.0),
        ("strict-ring-64", 64.0),
    ] {
        let split = of("portcullis", workload, 1);
        assert_eq!(split.submissions_per_op, 1.0 / batch, "{workload}");
        assert!(split.hardware_wait_ns_per_op >= 710.0 / batch, "{workload}: {split:?}");
        assert!(split.wait_ns >= 0.9 * 710.0 / batch, "{workload}: {split:?}");
    }
    let alone = of("global-lock", "strict-unmap", 2);
    assert_eq!((alone.submissions_per_op, alone.hardware_wait_ns_per_op), (1.0, 710.0));
    assert_eq!(of("pgtable-only", "lazy-unmap", 2).submissions_per_op, 0.0);
    // Whatever the profile says, the units of software take no time of their own.
    for driver in ["vtd", "amdvi", "riscv", "smmuv3", "at-once"] {
        let split = of(driver, "strict-unmap", 2);
        let hardware = (split.submissions_per_op, split.hardware_wait_ns_per_op);
        assert_eq!(hardware, (1.0, 0.0), "{driver}");
    }
    assert!(of("vtd-shared", "strict-unmap", 2).submissions_per_op <= 1.0);
    // A flush for each 250, by any CPU.
    let flushes = of("global-lock", "lazy-unmap", 2).submissions_per_op;
    assert!((3.0..=5.0).contains(&(flushes * 1000.0)), "{flushes}");
}
