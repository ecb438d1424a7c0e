//! The benchmark finds mappings that a subject leaves behind, unmaps nothing that is not mapped, and shares domains where it is asked to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::DomainId;
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::machine::phys;
use super::old::Design;
use super::ours::Ours;
use super::parts::Parts;
use super::subject::{Maker, OURS, PARTS, SUBJECTS, Subject, designs};
use super::workload::{Case, Kind, Workload};
use super::{Lanes, workloads};
use crate::runner::Failure;
use crate::timer::OpTimer;

fn named(name: &str) -> Workload {
    *workloads().iter().find(|workload| workload.name == name).unwrap()
}

/// Where pages are not copied, each leads to its own: one behind the other, or of a list two pages apart.
#[test]
fn a_mapping_is_as_long_as_its_name_says() {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    let maker = Maker { platform, timer, profile: Profile::load("none").unwrap(), linux: None };
    for info in SUBJECTS.iter().filter(|info| !info.is_linux()) {
        for workload in workloads().iter().filter(|w| w.live == 1 && info.does(w.kind) && !w.kind.copies()) {
            let case = Case { workload: *workload, threads: 2, live: 1, own_domains: false, crowded: false };
            let subject = maker.subject(info, &case).unwrap();
            let mut lane = Arc::clone(&subject).lane(&case, 1).unwrap();
            assert!(lane.map(0));
            let pages: u64 = workload.name.split('-').nth(1).unwrap().parse().unwrap();
            let apart = if workload.kind == Kind::Sg { 2 } else { 1 };
            // The second thread has the memory from there on.
            let first = 2 << 36;
            let expected: Vec<_> =
                (0..pages).map(|page| Some(first + apart * page * 4096)).chain([None]).collect();
            let found: Vec<_> =
                (0..=pages).map(|page| subject.reach(lane.address(0) + page * 4096)).collect();
            assert_eq!(found, expected, "{} {}", info.name, workload.name);
            assert!(lane.unmap(0) && lane.finish());
        }
    }
}

/// Every subject but Linux's, with each kind of mapping that it does.
#[test]
fn what_is_left_is_found() {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    let maker = Maker { platform, timer, profile: Profile::load("none").unwrap(), linux: None };
    for info in SUBJECTS.iter().filter(|info| !info.is_linux()) {
        for workload in workloads().iter().filter(|w| (w.pages, w.live) == (1, 1) && info.does(w.kind)) {
            let case = Case { workload: *workload, threads: 1, live: 2, own_domains: false, crowded: false };
            let subject = maker.subject(info, &case).unwrap();
            let mut lane = Arc::clone(&subject).lane(&case, 0).unwrap();
            let of = format!("{} {}", info.name, workload.name);
            assert!(lane.map(0) && lane.map(1) && lane.unmap(0), "{of}");
            assert!(subject.reach(lane.address(1)).is_some(), "{of}");
            let left = subject.settle();
            assert!(matches!(left, Err(Failure::Broken(_))), "{of}: {left:?}");
            assert!(lane.unmap(1) && lane.finish(), "{of}");
            // What a lane keeps for itself goes with it.
            drop(lane);
            assert_eq!(subject.settle(), Ok(()), "{of}");
        }
    }
}

/// Whichever thread it is of; and each has its own memory.
#[test]
fn what_any_thread_leaves_is_found() {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    let maker = Maker { platform, timer, profile: Profile::load("none").unwrap(), linux: None };
    for info in SUBJECTS.iter().filter(|info| !info.is_linux()) {
        for workload in workloads().iter().filter(|w| (w.pages, w.live) == (1, 1) && info.does(w.kind)) {
            let of = format!("{} {}", info.name, workload.name);
            let case = Case { workload: *workload, threads: 3, live: 2, own_domains: false, crowded: false };
            for thread in 0..3 {
                let subject = maker.subject(info, &case).unwrap();
                let mut lane = Arc::clone(&subject).lane(&case, thread).unwrap();
                assert!(lane.maps(0, 2) && lane.unmap(0), "{of}");
                if !workload.kind.copies() {
                    let expected = phys(&case, thread, 1);
                    assert_eq!(subject.reach(lane.address(1)), Some(expected), "{of}");
                }
                assert!(matches!(subject.settle(), Err(Failure::Broken(_))), "{of}: thread {thread}");
                assert!(lane.unmap(1) && lane.finish(), "{of}");
                drop(lane);
                assert_eq!(subject.settle(), Ok(()), "{of}: thread {thread}");
            }
        }
    }
}

#[test]
fn the_designs_of_the_past_unmap_nothing_twice() {
    for (info, design) in designs() {
        let workload = named(&format!("{}-4", design.kind().name()));
        let case = Case { workload, threads: 1, live: 2, own_domains: false, crowded: false };
        let subject = design.subject(&StdPlatform::new(), Told::default(), &case).unwrap();
        let mut lane = subject.lane(&case, 0).unwrap();
        assert!(!lane.unmap(0), "{}: nothing was mapped", info.name);
        assert!(lane.map(0) && lane.unmap(0) && !lane.unmap(0), "{}", info.name);
    }
}

/// Counts submissions to the hardware, and their requests; it may fail.
#[derive(Clone, Default)]
pub(super) struct Told {
    counts: Arc<[AtomicU64; 2]>,
    pub fails: Arc<AtomicBool>,
}

impl Told {
    pub fn counts(&self) -> [u64; 2] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

// SAFETY: nothing is cached by anything, so there is nothing to forget.
unsafe impl InvalidationQueue for Told {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.counts[0].fetch_add(1, Ordering::Relaxed);
        self.counts[1].fetch_add(requests.len() as u64, Ordering::Relaxed);
        if self.fails.load(Ordering::Relaxed) {
            Err(InvalidationError::TimedOut { waited_ns: 1 })
        } else {
            Ok(())
        }
    }
}

/// Submissions and requests for 128 mappings, one after the other. (An adaptive ring chooses by time.)
#[test]
fn each_kind_waits_as_often_as_it_says() {
    let platform = StdPlatform::new();
    let timed = |workload: &&Workload| workload.kind == Kind::Adaptive;
    for workload in workloads().iter().filter(|workload| workload.live == 1 && !timed(workload)) {
        let case = Case { workload: *workload, threads: 1, live: 1, own_domains: false, crowded: false };
        let assert_told = |name: &str, told: &Told, subject: Arc<dyn Subject>, expected: u64| {
            let mut lane = subject.lane(&case, 0).unwrap();
            assert!(lane.pairs(127) && lane.map(0) && lane.unmap(0), "{name}");
            assert_eq!(told.counts(), [expected; 2], "{name} {}", workload.name);
            assert!(lane.finish() && told.counts() == [expected; 2], "{name} {}", workload.name);
        };
        let told = Told::default();
        let expected = match workload.kind {
            Kind::Raw | Kind::Typed | Kind::Sg => 128,
            // Neighbours in one request, for each 64.
            Kind::Batch | Kind::Ring => 2,
            // No buffer of that size stays mapped.
            Kind::Pool if workload.pages > 32 => 128,
            Kind::Lazy | Kind::Pool | Kind::Swiotlb | Kind::Adaptive => 0,
        };
        assert_told(OURS, &told, Arc::new(Ours::new(&platform, told.clone(), &case).unwrap()), expected);
        if SUBJECTS.iter().any(|info| info.name == PARTS && info.does(workload.kind)) {
            let told = Told::default();
            assert_told(PARTS, &told, Arc::new(Parts::new(&platform, told.clone()).unwrap()), expected);
        }
        for (info, design) in designs().filter(|(_, design)| design.kind() == workload.kind) {
            let told = Told::default();
            let expected = if design == Design::Smmu2017 { 128 * workload.pages } else { 0 };
            assert_told(info.name, &told, design.subject(&platform, told.clone(), &case).unwrap(), expected);
        }
    }
}

/// A batch or a ring waits at the end for the rest.
#[test]
fn what_is_left_of_a_batch_is_committed_at_the_end() {
    for kind in [Kind::Batch, Kind::Ring] {
        let case = Case {
            workload: named(&format!("{}-1", kind.name())),
            threads: 1,
            live: 70,
            own_domains: false,
            crowded: false,
        };
        let told = Told::default();
        let subject = Arc::new(Ours::new(&StdPlatform::new(), told.clone(), &case).unwrap());
        let mut lane = subject.lane(&case, 0).unwrap();
        assert!(lane.maps(0, 70) && lane.unmaps(0, 63));
        assert_eq!(told.counts()[0], 0, "{kind:?}");
        assert!(lane.unmaps(63, 70) && told.counts()[0] == 1, "{kind:?}: the 64th commits");
        assert!(lane.finish() && told.counts()[0] == 2, "{kind:?}");
    }
}

/// A profile that answers at once has no hardware to wait for, and ours share the waits of others.
#[test]
fn hardware_takes_what_its_profile_says() {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    let workload = named("raw-1");
    let case = Case { workload, threads: 1, live: 1, own_domains: false, crowded: true };
    let maker = |name| {
        let (platform, timer) = (platform.clone(), timer.clone());
        Maker { platform, timer, profile: Profile::load(name).unwrap(), linux: None }
    };
    assert!(maker("none").hardware(&case).is_none());
    for name in ["vtd", "smmuv3", "virtio-iommu"] {
        let maker = maker(name);
        let hardware = maker.hardware(&case).unwrap();
        assert_eq!(hardware.costs(), maker.profile.waits.costs());
        let waits = &maker.profile.waits;
        let expected = waits.doorbell.ns + waits.completion.ns + waits.descriptor.ns;
        hardware.invalidate(DomainId(1), Invalidation::Domain).unwrap();
        assert_eq!(hardware.busy_ns(hardware.asked()), expected, "{name}");
    }
}

#[test]
fn threads_share_a_domain_or_have_their_own() {
    for (own_domains, domains) in [(false, 1), (true, 3)] {
        for old in [None, Some(Design::Lazy2015)] {
            let (counted, told) = (AtomicU64::new(0), Told::default());
            let queue = || {
                counted.fetch_add(1, Ordering::Relaxed);
                told.clone()
            };
            let lanes = Lanes::new(named("lazy-1"), old, 3, own_domains, &StdPlatform::new(), queue).unwrap();
            assert_eq!(counted.into_inner(), domains);
            let mut of_threads: Vec<_> = (0..3).map(|thread| lanes.lane(thread).unwrap()).collect();
            assert!(of_threads.iter_mut().all(|lane| lane.map(0)));
            let mut addresses: Vec<u64> = of_threads.iter().map(|lane| lane.address(0)).collect();
            addresses.sort_unstable();
            addresses.dedup();
            assert!(own_domains || addresses.len() == 3, "{addresses:x?}");
            assert!(matches!(lanes.settle(), Err(Failure::Broken(_))), "{old:?}, own: {own_domains}");
            assert!(of_threads.iter_mut().all(|lane| lane.unmap(0)));
            let before = told.counts();
            lanes.flush(2).unwrap();
            assert_eq!(told.counts() > before, old.is_none(), "ours has a flush to be asked for");
            drop(of_threads);
            assert_eq!(lanes.settle(), Ok(()));
        }
    }
}

/// Copies are not made of as much as would take more memory than most machines can spare.
#[test]
fn a_pool_that_is_too_large_is_refused() {
    let (platform, timer) = (StdPlatform::new(), OpTimer::calibrated());
    let maker = Maker { platform, timer, profile: Profile::load("none").unwrap(), linux: None };
    let ours = SUBJECTS.iter().find(|info| info.name == OURS).unwrap();
    for (kind, refused) in
        [(Kind::Pool, true), (Kind::Swiotlb, true), (Kind::Adaptive, true), (Kind::Raw, false)]
    {
        let workload = named(&format!("{}-64-live4096", kind.name()));
        let case = Case { workload, threads: 1, live: 4096, own_domains: false, crowded: false };
        let made = maker.subject(ours, &case).map(|_| ());
        let expected = Failure::Unsupported("it would take a pool of 2048 MiB".into());
        assert_eq!(made, if refused { Err(expected) } else { Ok(()) }, "{kind:?}");
    }
}
