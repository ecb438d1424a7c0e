//! A subject that does not do what it promises is found.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use portcullis::addr::PhysAddr;
use portcullis::platform::CopyMemory;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::memory::{Buffers, Ram};
use super::subject::{Maker, SUBJECTS, Subject};
use super::turns::Turns;
use super::workload::{Case, Shape, WORKLOADS, Way};
use crate::lane::Lane;
use crate::runner::{Cell, Failure};
use crate::team::Team;
use crate::timer::OpTimer;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Nothing is copied when a buffer is mapped.
    NoCopyIn,
    /// Nothing is copied when it is unmapped.
    NoCopyOut,
    /// All mappings of a thread, or of all threads, are in one place.
    OnePlace,
    AllInOnePlace,
    /// A page too much is copied back.
    TooMuch,
    /// The device is given the buffer itself.
    NoBounce,
    /// The device is given what leads nowhere.
    Nowhere,
}

/// A bounce buffer for each mapping, and perhaps a fault.
struct Script {
    fault: Fault,
    case: Case,
    bounce: Buffers,
}

impl Subject for Script {
    fn lane(self: Arc<Self>, thread: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        Ok(Box::new(ScriptLane { script: self, thread, buffers }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        (self.fault != Fault::Nowhere).then_some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }
}

struct ScriptLane {
    script: Arc<Script>,
    thread: usize,
    buffers: Arc<Buffers>,
}

impl ScriptLane {
    fn copy(&self, from: u64, to: u64, len: u64) {
        if from != to {
            // SAFETY: buffers of the same size, with a page behind each, of one thread (where threads have them in one
            // place, nothing is copied).
            unsafe { Ram::<true>.copy(PhysAddr::new(from), PhysAddr::new(to), len) };
        }
    }
}

impl Lane for ScriptLane {
    fn map(&mut self, index: usize) -> bool {
        let Script { fault, case, .. } = &*self.script;
        if case.copies_in() && *fault != Fault::NoCopyIn {
            self.copy(self.buffers.at(index), self.address(index), self.buffers.bytes());
        }
        true
    }

    fn unmap(&mut self, index: usize) -> bool {
        let Script { fault, case, .. } = &*self.script;
        if case.copies_out() && *fault != Fault::NoCopyOut {
            let more = if *fault == Fault::TooMuch { 4096 } else { 0 };
            self.copy(self.address(index), self.buffers.at(index), self.buffers.bytes() + more);
        }
        true
    }

    fn address(&self, index: usize) -> u64 {
        let buffers = self.script.case.buffers();
        match self.script.fault {
            Fault::NoBounce => self.buffers.at(index),
            Fault::OnePlace => self.script.bounce.at(self.thread * buffers),
            Fault::AllInOnePlace => self.script.bounce.at(index),
            _ => self.script.bounce.at(self.thread * buffers + index),
        }
    }
}

/// What the check says of a script, and of the same after a repetition.
fn verdict(fault: Fault, shape: Shape, way: Option<Way>) -> Result<(), Failure> {
    let (team, timer) = (Team::sharing_cores(2).unwrap(), OpTimer::calibrated());
    let threads = if fault == Fault::OnePlace { 1 } else { 2 };
    let case = Case { shape, way, threads, depth: 1, crowded: true };
    let bounce = Buffers::new(case.buffers() * threads, shape.bytes()).unwrap();
    let mut turns = Turns::of(&team, Arc::new(Script { fault, case, bounce }), case, &timer)?;
    turns.repetition(&team, 3)?;
    turns.check(&team)
}

#[test]
fn broken_promises_are_found() {
    let pool = Shape::Pool(4096);
    for way in [Way::To, Way::From, Way::Both] {
        for shape in [pool, Shape::Swiotlb(1024), Shape::Swiotlb(16 << 10)] {
            assert_eq!(verdict(Fault::None, shape, Some(way)), Ok(()), "{shape:?} {way:?}");
        }
    }
    assert_eq!(verdict(Fault::None, Shape::Slot, None), Ok(()));
    let cases = [
        (Fault::NoCopyIn, pool, Some(Way::To), "the device found"),
        (Fault::NoCopyIn, pool, Some(Way::Both), "the device found"),
        (Fault::NoCopyIn, Shape::Swiotlb(4096), Some(Way::From), "the driver found"),
        (Fault::NoCopyOut, pool, Some(Way::From), "the driver found"),
        (Fault::NoCopyOut, pool, Some(Way::Both), "the driver found"),
        (Fault::OnePlace, pool, Some(Way::To), "the device found"),
        (Fault::OnePlace, pool, Some(Way::From), "the device, later, found"),
        (Fault::OnePlace, Shape::Slot, None, "the device, later, found"),
        (Fault::AllInOnePlace, Shape::Slot, None, "the device, later, found"),
        (Fault::TooMuch, pool, Some(Way::From), "beside a buffer"),
        (Fault::NoBounce, pool, Some(Way::Both), "still reaches"),
        (Fault::Nowhere, pool, Some(Way::To), "does not reach"),
    ];
    for (fault, shape, way, expected) in cases {
        let verdict = verdict(fault, shape, way);
        let Err(Failure::Broken(reason)) = &verdict else { panic!("{fault:?} {way:?}: {verdict:?}") };
        assert!(reason.contains(expected), "{fault:?} {way:?}: {reason}");
    }
}

fn maker() -> Maker {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    Maker { platform, timer, cores: 2, linux: None, last_core: None }
}

/// What is left behind is found by the check after everything.
#[test]
fn what_is_left_is_found() {
    let (maker, profile) = (maker(), Profile::load("none").unwrap());
    for info in SUBJECTS.iter().filter(|info| !["copy", "linux"].contains(&info.name)) {
        for workload in WORKLOADS.iter().filter(|workload| info.does(workload.shape)) {
            let way = workload.shape.directions()[0];
            let case = Case { shape: workload.shape, way, threads: 1, depth: 1, crowded: true };
            let subject = maker.subject(info, &case, &profile).unwrap();
            let buffers = Arc::new(Buffers::new(case.buffers(), case.shape.bytes()).unwrap());
            let mut lane = Arc::clone(&subject).lane(0, buffers).unwrap();
            assert!(lane.map(0) && lane.map(1) && lane.unmap(0));
            let left = subject.settle();
            assert!(matches!(left, Err(Failure::Broken(_))), "{} {}: {left:?}", info.name, workload.name);
            assert!(lane.unmap(1));
            assert_eq!(subject.settle(), Ok(()), "{} {}", info.name, workload.name);
        }
    }
}

#[test]
fn each_subject_does_the_shapes_that_are_its_own() {
    for workload in WORKLOADS {
        let does = |name: &str| SUBJECTS.iter().find(|info| info.name == name).unwrap().does(workload.shape);
        let expected = match workload.shape {
            Shape::Slot => [true, false, true, true, false],
            Shape::Swiotlb(_) => [true, true, true, true, false],
            Shape::Pool(_) => [true, true, false, false, true],
        };
        let found = ["portcullis", "copy", "linux", "rotating", "strict"].map(does);
        assert_eq!(found, expected, "{}", workload.name);
    }
}

/// Counts maps and unmaps of each buffer, and how often it is looked for what is left.
#[derive(Default)]
struct Counted {
    maps: [AtomicU64; 32],
    unmaps: [AtomicU64; 32],
    settled: AtomicU64,
}

struct CountedLane {
    counted: Arc<Counted>,
    bounce: Buffers,
    /// An unmap takes as long, and a map twice as long.
    sleeps: Duration,
}

impl Subject for (Arc<Counted>, Duration) {
    fn lane(self: Arc<Self>, _: usize, _: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let bounce = Buffers::new(32, Shape::Slot.bytes())?;
        Ok(Box::new(CountedLane { counted: Arc::clone(&self.0), bounce, sleeps: self.1 }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        Some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        self.0.settled.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Lane for CountedLane {
    fn map(&mut self, index: usize) -> bool {
        std::thread::sleep(2 * self.sleeps);
        self.counted.maps[index].fetch_add(1, Ordering::Relaxed);
        true
    }

    fn unmap(&mut self, index: usize) -> bool {
        std::thread::sleep(self.sleeps);
        self.counted.unmaps[index].fetch_add(1, Ordering::Relaxed);
        true
    }

    fn address(&self, index: usize) -> u64 {
        self.bounce.at(index)
    }
}

fn count(of: &AtomicU64) -> u64 {
    of.load(Ordering::Relaxed)
}

/// What a repetition does, by counts; before and after it each buffer is looked at in three rounds.
#[test]
fn a_repetition_does_what_was_asked_for_and_a_sixteenth_before() {
    let team = Team::sharing_cores(1).unwrap();
    let timer = OpTimer::calibrated();
    let of = |depth, crowded, ops| {
        let case = Case { shape: Shape::Slot, way: None, threads: 1, depth, crowded };
        let counted = Arc::new(Counted::default());
        let subject = Arc::new((Arc::clone(&counted), Duration::ZERO));
        let mut turns = Turns::of(&team, subject, case, &timer).unwrap();
        let maps = || counted.maps.iter().map(count).filter(|maps| *maps > 0).collect::<Vec<_>>();
        assert_eq!(maps(), vec![3; case.buffers()]);
        let done = turns.repetition(&team, ops).unwrap().ops;
        let of_repetition: Vec<u64> = maps().iter().map(|maps| maps - 3).collect();
        turns.samples(&team, &timer, 5, Duration::from_secs(60)).unwrap().unwrap();
        let sampled = maps()[0] - 3 - of_repetition[0];
        turns.check(&team).unwrap();
        assert_eq!(maps()[1], of_repetition[1] + 6);
        assert_eq!(counted.settled.load(Ordering::Relaxed), 1);
        assert_eq!(counted.maps.each_ref().map(count), counted.unmaps.each_ref().map(count));
        (done, of_repetition, sampled)
    };
    assert_eq!(of(1, false, 32), (32, vec![34, 0, 0, 0], 16));
    assert_eq!(of(1, true, 32), (512, vec![544, 0, 0, 0], 16));
    // Whole rounds of the queue: one to fill it, one to get warm, and three for 45 operations.
    assert_eq!(of(20, false, 45), (60, vec![5; 20], 16));
}

#[test]
fn the_halves_of_a_queue_are_its_maps_and_its_unmaps() {
    let (team, timer) = (Team::sharing_cores(1).unwrap(), OpTimer::calibrated());
    let case = Case { shape: Shape::Slot, way: None, threads: 1, depth: 20, crowded: false };
    let sleeps = Duration::from_millis(1);
    let subject = Arc::new((Arc::new(Counted::default()), sleeps));
    let mut turns = Turns::of(&team, subject, case, &timer).unwrap();
    turns.repetition(&team, 20).unwrap();
    // The clocks' rates may differ by a little.
    let halves = turns.halves().unwrap();
    assert!(halves.map_ns >= 1.96e6 && halves.unmap_ns >= 0.98e6, "{halves:?}");
    // One by one both are timed together.
    let samples = turns.samples(&team, &timer, 1, Duration::from_secs(60)).unwrap().unwrap();
    assert!(samples.iter().all(|ticks| *ticks >= timer.in_ticks(2.94e6)), "{samples:?}");
    assert_eq!(turns.samples(&team, &timer, 1, Duration::ZERO).unwrap(), Some(Vec::new()));
    let subject = Arc::new((Arc::new(Counted::default()), sleeps));
    let mut pairs = Turns::of(&team, subject, Case { depth: 1, ..case }, &timer).unwrap();
    let timing = pairs.repetition(&team, 8).unwrap();
    assert!(timing.wall >= 8 * 3 * sleeps && pairs.halves().is_none(), "{timing:?}");
}

/// With several mappings in use, halves are told, and each thread does as much as it was asked for.
#[test]
fn a_queue_is_divided_into_maps_and_unmaps() {
    let (maker, profile) = (maker(), Profile::load("none").unwrap());
    let team = Team::sharing_cores(3).unwrap();
    for depth in [2, 17, 64] {
        let (shape, way) = (Shape::Pool(4096), Some(Way::From));
        let case = Case { shape, way, threads: 3, depth, crowded: false };
        let mut turns = Turns::open(&team, &maker, &SUBJECTS[0], case, &profile).unwrap();
        assert_eq!(turns.halves(), None);
        let timing = turns.repetition(&team, 1).unwrap();
        assert_eq!(timing.ops, depth as u64, "whole rounds");
        let halves = turns.halves().unwrap();
        assert!(halves.depth == depth && halves.map_ns >= 0.0 && halves.unmap_ns > 0.0, "{halves:?}");
        turns.check(&team).unwrap();
    }
}
