//! The IOMMU's invalidation queue, as a profile describes its waits, in real time.
//!
//! A submission is confirmed `doorbell + completion + requests x descriptor` nanoseconds after the hardware began
//! with it, and the hardware begins with it when it is rung, or when it is done with what was rung before. Whoever
//! waits polls the clock, and holds no lock. Nothing is cached, so nothing is forgotten either, but in a check,
//! where a [`Watch`] stands for a device that goes on using whatever it was given.

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::DomainId;
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis_trace::replay::{Profile, Waits};

use super::check::Watch;
use crate::timer::OpTimer;

/// The waits of a piece of hardware, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Timing {
    /// Each submission.
    submission: f64,
    /// Each request in it.
    request: f64,
}

impl Timing {
    /// Confirms at once.
    pub(crate) const NONE: Self = Self { submission: 0.0, request: 0.0 };

    /// What `profile` says of invalidations. What it says of requests to map is no part of it: the tables are in
    /// memory.
    pub(crate) fn of(profile: &Profile) -> Self {
        let Waits { doorbell, completion, descriptor, .. } = &profile.waits;
        Self { submission: doorbell.ns + completion.ns, request: descriptor.ns }
    }
}

/// What hardware has been asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Submissions.
    pub submissions: u64,
    /// Requests in them.
    pub requests: u64,
}

/// The hardware: one queue for all CPUs.
pub(crate) struct Hardware {
    timing: Timing,
    costs: Costs,
    timer: OpTimer,
    /// There are more threads than cores: who waits lets the others run, as if they had cores of their own.
    crowded: bool,
    watch: Option<std::sync::Arc<Watch>>,
    /// The tick at which it is done with all that was rung.
    free_at: AtomicU64,
    submissions: AtomicU64,
    requests: AtomicU64,
}

impl Hardware {
    /// Idle hardware that makes the asker wait by `timing`, and states `costs`.
    pub(crate) fn new(
        timing: Timing,
        costs: Costs,
        timer: &OpTimer,
        crowded: bool,
        watch: Option<std::sync::Arc<Watch>>,
    ) -> Self {
        let zero = || AtomicU64::new(0);
        let (free_at, submissions, requests) = (zero(), zero(), zero());
        Self { timing, costs, timer: timer.clone(), crowded, watch, free_at, submissions, requests }
    }

    /// What it has been asked for so far.
    pub(crate) fn asked(&self) -> Asked {
        // Relaxed: read between repetitions, when no thread asks.
        Asked {
            submissions: self.submissions.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
        }
    }

    /// Nanoseconds that it works on so much.
    pub(crate) fn busy_ns(&self, asked: Asked) -> f64 {
        asked.submissions as f64 * self.timing.submission + asked.requests as f64 * self.timing.request
    }

    /// Waits until it is done with work of `ns` nanoseconds that is no invalidation: a request to map. It begins with it
    /// when it is done with what was rung before.
    pub(crate) fn work_ns(&self, ns: f64) {
        match self.timer.in_ticks(ns) {
            0 => {}
            ticks => self.work(ticks),
        }
    }

    /// Waits until it is done with work of `ticks`, which begins when it is done with what was rung before.
    fn work(&self, ticks: u64) {
        let rung = self.timer.now();
        let done = |free_at: u64| free_at.max(rung).saturating_add(ticks);
        // Relaxed: nothing but the time is told by it.
        let before = self.free_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| Some(done(at)));
        let (Ok(before) | Err(before)) = before;
        let done = done(before);
        while self.timer.now() < done {
            if self.crowded {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

// SAFETY: it stands for hardware that caches nothing; the model that it measures beside has no device.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let asked = Asked { submissions: 1, requests: requests.len() as u64 };
        if let Some(watch) = &self.watch {
            requests.iter().for_each(|request| watch.forget(request.invalidation));
        }
        self.submissions.fetch_add(1, Ordering::Relaxed);
        self.requests.fetch_add(asked.requests, Ordering::Relaxed);
        self.work_ns(self.busy_ns(asked));
        Ok(())
    }

    fn costs(&self) -> Costs {
        self.costs
    }
}

/// A driver's queue, of which the hardware hears: it counts, and forgets what its watch has seen.
pub(crate) struct Told {
    pub unit: std::sync::Arc<dyn InvalidationQueue>,
    /// It takes no time.
    pub hardware: std::sync::Arc<Hardware>,
}

// SAFETY: the driver's, whose unit caches nothing.
unsafe impl InvalidationQueue for Told {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.unit.submit(requests)?;
        self.hardware.submit(requests)
    }

    fn costs(&self) -> Costs {
        self.unit.costs()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;

    fn hardware(name: &str) -> Hardware {
        let profile = Profile::load(name).unwrap();
        Hardware::new(Timing::of(&profile), profile.waits.costs(), &OpTimer::calibrated(), true, None)
    }

    #[test]
    fn a_profile_becomes_waits_and_stated_costs() {
        let vtd = hardware("vtd");
        assert_eq!((vtd.costs().submission_ns, vtd.costs().request_ns), (710, 0));
        assert!(!vtd.costs().shares_one_queue());
        assert!(hardware("virtio-iommu").costs().shares_one_queue());
        assert_eq!(hardware("none").costs().submission_ns, 0);
    }

    #[test]
    fn what_is_asked_for_is_counted_and_waited_for() {
        let timing = Timing { submission: 200_000.0, request: 100_000.0 };
        let hardware = Hardware::new(timing, Costs::BARE_METAL, &OpTimer::calibrated(), true, None);
        let request = Request { domain: DomainId(1), invalidation: Invalidation::Domain };
        let start = Instant::now();
        hardware.submit(&[request; 3]).unwrap();
        // The clocks' rates may differ by a little.
        assert!(start.elapsed() >= Duration::from_micros(490), "{:?}", start.elapsed());
        assert_eq!(hardware.asked(), Asked { submissions: 1, requests: 3 });
        assert_eq!(hardware.busy_ns(hardware.asked()), 500_000.0);
    }

    /// By its own clock, so that it does not matter how long this takes.
    #[test]
    fn what_is_rung_while_it_works_begins_when_that_is_done() {
        let hardware = Hardware::new(Timing::NONE, Costs::BARE_METAL, &OpTimer::calibrated(), true, None);
        for _ in 0..10 {
            let free_at = hardware.timer.now() + hardware.timer.in_ticks(2e6);
            hardware.free_at.store(free_at, Ordering::Relaxed);
            hardware.work(7);
            assert!(hardware.free_at.load(Ordering::Relaxed) >= free_at + 7);
            assert!(hardware.timer.now() >= free_at + 7, "it waits as long");
        }
    }

    #[test]
    fn submissions_of_several_threads_are_worked_on_one_after_the_other() {
        let timing = Timing { submission: 2e6, request: 0.0 };
        let hardware = Arc::new(Hardware::new(timing, Costs::BARE_METAL, &OpTimer::calibrated(), true, None));
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| hardware.invalidate(DomainId(1), Invalidation::Domain));
            }
        });
        assert!(start.elapsed() >= Duration::from_micros(7900), "{:?}", start.elapsed());
        assert_eq!(hardware.asked().submissions, 4);
    }
}
