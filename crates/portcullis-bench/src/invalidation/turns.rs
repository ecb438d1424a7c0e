//! Turns: every thread maps its pages, all wait for each other, and then all unmap at once. The clock runs for the
//! unmaps only, a block at a time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::check::{Watch, was_asked};
use super::hardware::Asked;
use super::spent::Spent;
use super::subject::{Lane, Maker, Subject, SubjectInfo, lanes};
use super::workload::{BLOCK, Shape, TURN};
use crate::report::Split;
use crate::runner::{Cell, Failure, Timing};
use crate::stats;
use crate::team::{Meeting, Team};
use crate::timer::OpTimer;

/// Turns of a check at a time: in as many a thread unmaps twice what its flush queue holds.
const CHECK_TURNS: u64 = 2;
/// Turns of a check at most, of all threads together, where the hardware was not asked before: enough for one queue
/// of 32,768 entries to be flushed.
const MOST_CHECK_TURNS: u64 = 256;

/// Why a turn failed that only noticed that it did.
fn cause(watch: Option<&Arc<Watch>>) -> Failure {
    let refused = || Failure::Refused("it failed to map what was free, or to unmap what was mapped".into());
    watch.and_then(|watch| watch.fault()).map_or_else(refused, Failure::Broken)
}

/// What one thread's unmaps took.
#[derive(Debug, Default)]
struct Share {
    ticks: u64,
    /// Intervals in `ticks` whose clock is to be taken off.
    intervals: u64,
    spent: Spent,
    /// Of each block without a call of the invalidation queue, the ticks, and how often a lock was waited for.
    quiet: Vec<(u64, u64)>,
}

impl Share {
    fn add(&mut self, ticks: u64, spent: Spent) {
        self.ticks += ticks;
        // Each wait reads the clock twice inside of what is timed here, and costs as much as two intervals.
        self.intervals += 1 + 2 * (spent.waits + spent.locks);
        self.spent.wait += spent.wait;
        self.spent.waits += spent.waits;
        self.spent.lock += spent.lock;
        self.spent.locks += spent.locks;
        if spent.waits == 0 {
            self.quiet.push((ticks, spent.locks));
        }
    }
}

type Lanes = Arc<[Mutex<Box<dyn Lane>>]>;

/// A subject and its threads' pages.
pub(crate) struct Turns {
    subject: Arc<dyn Subject>,
    lanes: Lanes,
    watch: Option<Arc<Watch>>,
    timer: OpTimer,
    crowded: bool,
    flushes_rarely: bool,
    split: Option<Split>,
}

impl Turns {
    /// A fresh subject, ready for `shape`; another one was checked.
    pub(crate) fn open(
        team: &Team,
        maker: &Maker,
        info: &SubjectInfo,
        shape: Shape,
        threads: usize,
    ) -> Result<Self, Failure> {
        Self::checked(team, |watch| Self::new(maker, info, shape, threads, watch))
    }

    /// One that `make` makes without a watch, after one with a watch was found right.
    fn checked(
        team: &Team,
        make: impl Fn(Option<Arc<Watch>>) -> Result<Self, Failure>,
    ) -> Result<Self, Failure> {
        make(Some(Arc::default()))?.check_watched(team)?;
        make(None)
    }

    fn new(
        maker: &Maker,
        info: &SubjectInfo,
        shape: Shape,
        threads: usize,
        watch: Option<Arc<Watch>>,
    ) -> Result<Self, Failure> {
        let subject = maker.subject(info, shape, watch.clone())?;
        let lanes = lanes(&subject, threads, watch.as_ref())?;
        Ok(Self {
            subject,
            lanes: lanes.into_iter().map(Mutex::new).collect(),
            watch,
            timer: maker.timer.clone(),
            crowded: maker.crowded,
            flushes_rarely: shape == Shape::Lazy,
            split: None,
        })
    }

    /// Works until the hardware was asked for something, and looks at what became of it.
    fn check_watched(mut self, team: &Team) -> Result<(), Failure> {
        let asked = |turns: &Self| turns.subject.hardware().asked() != Asked::default();
        let mut done = CHECK_TURNS;
        self.turns(team, CHECK_TURNS)?;
        while !asked(&self) && done * (self.lanes.len() as u64) < MOST_CHECK_TURNS {
            done += CHECK_TURNS;
            self.turns(team, CHECK_TURNS)?;
        }
        // Once more after it, so that what was flushed is used again.
        self.turns(team, CHECK_TURNS)?;
        was_asked(&*self.subject)?;
        self.check(team)
    }

    fn turns(&self, team: &Team, turns: u64) -> Result<Vec<Share>, Failure> {
        let (lanes, timer, crowded) = (Arc::clone(&self.lanes), self.timer.clone(), self.crowded);
        let watch = self.watch.clone();
        let (threads, meeting) = (lanes.len(), Meeting::default());
        team.each(threads, move |thread, line| {
            let mut lane = lanes[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let cause = || cause(watch.as_ref());
            let quiet = Vec::with_capacity(turns as usize * (TURN / BLOCK));
            let mut share = Share { quiet, ..Share::default() };
            for turn in 0..turns {
                (0..TURN / BLOCK).all(|block| lane.map(block)).then_some(()).ok_or_else(cause)?;
                meeting.wait(threads, turn, crowded, line)?;
                // What the maps have waited for is no part of this.
                Spent::take();
                for block in 0..TURN / BLOCK {
                    let (ticks, unmapped) = timer.ticks(|| lane.unmap(block));
                    unmapped.then_some(()).ok_or_else(cause)?;
                    share.add(ticks, Spent::take());
                }
            }
            Ok(share)
        })
    }

    /// What an operation takes in the blocks without a flush: in the median of all threads' blocks, as one block in
    /// which something else has had the core says nothing of unmaps.
    fn no_flush(&self, shares: &[Share]) -> Option<f64> {
        let ns = |(ticks, locks): &(u64, u64)| self.timer.sum_ns(*ticks, 1 + 2 * locks) / BLOCK as f64;
        let mut blocks: Vec<f64> = shares.iter().flat_map(|share| share.quiet.iter().map(ns)).collect();
        stats::median(&mut blocks)
    }

    /// What a repetition of `ops` operations in each thread went into.
    fn split_of(&self, slowest: &Share, no_flush: Option<f64>, ops: u64, asked: Asked) -> Split {
        let each = |ns: f64| ns / ops as f64;
        let Spent { wait, waits, lock, locks } = slowest.spent;
        let wait_ns = each(self.timer.sum_ns(wait, waits));
        let lock_ns = each(self.timer.sum_ns(lock, locks));
        let ns = each(self.timer.sum_ns(slowest.ticks, slowest.intervals));
        let all = (ops * self.lanes.len() as u64) as f64;
        Split {
            wait_ns,
            lock_ns,
            work_ns: (ns - wait_ns - lock_ns).max(0.0),
            submissions_per_op: asked.submissions as f64 / all,
            requests_per_op: asked.requests as f64 / all,
            hardware_wait_ns_per_op: self.subject.hardware().busy_ns(asked) / all,
            no_flush,
        }
    }
}

impl Cell for Turns {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let turns = ops.div_ceil(TURN as u64);
        // What the subjects before have pushed out of the caches comes back first.
        self.turns(team, turns.div_ceil(16))?;
        let before = self.subject.hardware().asked();
        let shares = self.turns(team, turns)?;
        let after = self.subject.hardware().asked();
        let asked = Asked {
            submissions: after.submissions - before.submissions,
            requests: after.requests - before.requests,
        };
        let ns = |share: &Share| self.timer.sum_ns(share.ticks, share.intervals);
        let slowest = shares.iter().max_by(|a, b| ns(a).total_cmp(&ns(b))).ok_or(Failure::Abandoned)?;
        let ops = turns * TURN as u64;
        let no_flush = if self.flushes_rarely { self.no_flush(&shares) } else { None };
        self.split = Some(self.split_of(slowest, no_flush, ops, asked));
        Ok(Timing { wall: Duration::from_secs_f64(ns(slowest) / 1e9), ops })
    }

    fn split(&self) -> Option<Split> {
        self.split
    }

    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let (lanes, timer, watch) = (Arc::clone(&self.lanes), timer.clone(), self.watch.clone());
        // Not in step: a thread may have its samples, or have used up its time, before the others.
        let ticks = team.each(lanes.len(), move |thread, _| {
            let mut lane = lanes[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let cause = || cause(watch.as_ref());
            let mut samples = Vec::with_capacity(count + TURN);
            let start = Instant::now();
            while samples.len() < count && start.elapsed() < limit {
                (0..TURN / BLOCK).all(|block| lane.map(block)).then_some(()).ok_or_else(cause)?;
                for index in 0..TURN {
                    let (ticks, unmapped) = timer.ticks(|| lane.unmap_one(index));
                    unmapped.then_some(()).ok_or_else(cause)?;
                    samples.push(ticks);
                }
            }
            Ok(samples)
        })?;
        Ok(Some(ticks.concat()))
    }

    fn check(&mut self, _: &Team) -> Result<(), Failure> {
        // Batches and rings end with their threads' lanes. No thread works any more.
        self.lanes = Arc::new([]);
        self.subject.settle()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use portcullis::addr::DomainId;
    use portcullis::invalidation::{Costs, Invalidation, InvalidationQueue};

    use super::super::hardware::{Hardware, Timing};
    use super::super::subject::Promise;
    use super::*;

    #[test]
    fn a_turn_that_nobody_has_seen_fail_was_refused() {
        let says = "it failed to map what was free, or to unmap what was mapped";
        assert!(matches!(cause(None), Failure::Refused(said) if said == says));
    }

    /// Asks its hardware once for a fixed number of unmaps; counts maps and unmaps, and refuses one of each.
    struct Noted {
        hardware: Hardware,
        every: u64,
        maps: AtomicU64,
        unmaps: AtomicU64,
        /// The number of the map, and of the unmap, that does not work.
        refuses: (u64, u64),
        sleeps: Duration,
        /// Lanes that there are.
        lanes: AtomicU64,
    }

    struct NotedLane(Arc<Noted>);

    impl Drop for NotedLane {
        fn drop(&mut self) {
            self.0.lanes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Of thread 1 it takes long to map; no thread may unmap before all have mapped.
    struct InStep {
        noted: Arc<Noted>,
        thread: usize,
        unmapped: u64,
        early: Arc<AtomicU64>,
    }

    impl Lane for InStep {
        fn map_one(&mut self, _: usize) -> bool {
            if self.thread == 1 && self.unmapped.is_multiple_of(TURN as u64) {
                std::thread::sleep(Duration::from_micros(20));
            }
            self.noted.maps.fetch_add(1, Ordering::AcqRel);
            true
        }

        fn unmap_one(&mut self, _: usize) -> bool {
            let turn = self.unmapped / TURN as u64;
            self.unmapped += 1;
            let is_early = self.noted.maps.load(Ordering::Acquire) < 2 * TURN as u64 * (turn + 1);
            self.early.fetch_add(is_early.into(), Ordering::AcqRel);
            true
        }

        fn iova(&self, index: usize) -> u64 {
            index as u64
        }
    }

    #[test]
    fn all_threads_have_mapped_before_any_unmaps() {
        let team = Team::sharing_cores(2).unwrap();
        let (noted, mut turns) = noted(1, (0, 0), Duration::ZERO, 2);
        let early = Arc::new(AtomicU64::new(0));
        let lane = |thread| -> Box<dyn Lane> {
            let (noted, early) = (Arc::clone(&noted), Arc::clone(&early));
            Box::new(InStep { noted, thread, unmapped: 0, early })
        };
        turns.lanes = [0, 1].map(|thread| Mutex::new(lane(thread))).into_iter().collect();
        assert_eq!(turns.turns(&team, 4).unwrap().len(), 2);
        assert_eq!(early.load(Ordering::Acquire), 0);
    }

    impl Subject for Noted {
        fn lane(self: Arc<Self>, _: usize) -> Result<Box<dyn Lane>, Failure> {
            self.lanes.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new(NotedLane(self)))
        }

        fn look_up(&self, _: u64) -> Option<u64> {
            None
        }

        fn settle(&self) -> Result<(), Failure> {
            let is_over = self.lanes.load(Ordering::Relaxed) == 0;
            is_over.then_some(()).ok_or_else(|| Failure::Broken("a lane is left".into()))
        }

        fn hardware(&self) -> &Hardware {
            &self.hardware
        }

        fn promise(&self) -> Promise {
            Promise::Strict
        }
    }

    impl Lane for NotedLane {
        fn map_one(&mut self, _: usize) -> bool {
            self.0.maps.fetch_add(1, Ordering::Relaxed) + 1 != self.0.refuses.0
        }

        fn unmap_one(&mut self, _: usize) -> bool {
            std::thread::sleep(self.0.sleeps);
            let number = self.0.unmaps.fetch_add(1, Ordering::Relaxed) + 1;
            if number.is_multiple_of(self.0.every) {
                let asked = self.0.hardware.invalidate(DomainId(1), Invalidation::Domain);
                assert_eq!(asked, Ok(()));
            }
            number != self.0.refuses.1
        }

        fn iova(&self, index: usize) -> u64 {
            index as u64
        }
    }

    fn noted(every: u64, refuses: (u64, u64), sleeps: Duration, threads: usize) -> (Arc<Noted>, Turns) {
        let timer = OpTimer::calibrated();
        let hardware = Hardware::new(Timing::NONE, Costs::BARE_METAL, &timer, true, None);
        let (maps, unmaps, lanes_made) = Default::default();
        let noted = Arc::new(Noted { hardware, every, maps, unmaps, refuses, sleeps, lanes: lanes_made });
        let subject: Arc<dyn Subject> = Arc::clone(&noted) as _;
        let lanes = lanes(&subject, threads, None).unwrap().into_iter().map(Mutex::new).collect();
        let turns =
            Turns { subject, lanes, watch: None, timer, crowded: true, flushes_rarely: true, split: None };
        (noted, turns)
    }

    /// Turns of 256 pages, of which a sixteenth comes before, to get warm.
    #[test]
    fn a_repetition_is_of_whole_turns() {
        let (team, timer) = (Team::sharing_cores(2).unwrap(), OpTimer::calibrated());
        for threads in [1, 2] {
            for (ops, done, warm) in
                [(1, 256, 256), (256, 256, 256), (257, 512, 256), (17 * 256, 17 * 256, 512)]
            {
                let (noted, mut turns) = noted(128, (0, 0), Duration::ZERO, threads);
                let of = threads as u64;
                assert_eq!(turns.repetition(&team, ops).unwrap().ops, done);
                let counts = || [&noted.maps, &noted.unmaps].map(|count| count.load(Ordering::Relaxed));
                assert_eq!(counts(), [of * (done + warm); 2], "{threads} threads, {ops} operations");
                // What was asked for to get warm does not count.
                let split = turns.split().unwrap();
                assert_eq!([split.submissions_per_op, split.requests_per_op], [1.0 / 128.0; 2]);
                let samples = turns.samples(&team, &timer, 300, Duration::from_secs(60)).unwrap().unwrap();
                assert_eq!(samples.len(), 512 * threads);
                assert_eq!(counts(), [of * (done + warm + 512); 2]);
            }
        }
    }

    /// Lanes may end what has waited; a lane that is somebody else's is left.
    #[test]
    fn a_subject_settles_when_its_lanes_are_gone() {
        let team = Team::new(1).unwrap();
        let (noted, mut turns) = noted(1, (0, 0), Duration::ZERO, 1);
        let another = Arc::clone(&noted).lane(1).unwrap();
        assert_eq!(turns.check(&team), Err(Failure::Broken("a lane is left".into())));
        drop(another);
        assert_eq!(turns.check(&team), Ok(()));
    }

    /// The check has a subject with a watch. If it passes, the measurement has a new subject without one.
    #[test]
    fn a_subject_is_checked_before_it_is_measured() {
        let team = Team::new(1).unwrap();
        let never_asked = Failure::Broken("nothing was ever invalidated".into());
        for (every, verdict) in [(1, Ok(())), (u64::MAX, Err(never_asked))] {
            let watched = Mutex::new(Vec::new());
            let opened = Turns::checked(&team, |watch| {
                watched.lock().unwrap().push(watch.is_some());
                Ok(Turns { watch, ..noted(every, (0, 0), Duration::ZERO, 1).1 })
            });
            assert_eq!(*watched.lock().unwrap(), if verdict.is_ok() { &[true, false][..] } else { &[true] });
            assert_eq!(opened.map(|turns| assert!(turns.watch.is_none())), verdict);
        }
    }

    #[test]
    fn the_clock_runs_for_unmaps() {
        let (team, timer) = (Team::new(1).unwrap(), OpTimer::calibrated());
        let (_, mut turns) = noted(256, (0, 0), Duration::from_micros(200), 1);
        let timing = turns.repetition(&team, 1).unwrap();
        // The clocks' rates may differ by a little.
        assert!(timing.wall >= Duration::from_micros(196 * 256), "{timing:?}");
        let samples = turns.samples(&team, &timer, 1, Duration::from_secs(60)).unwrap().unwrap();
        assert!(samples.iter().all(|ticks| *ticks >= timer.in_ticks(196e3)), "{samples:?}");
        assert_eq!(turns.samples(&team, &timer, 1, Duration::ZERO).unwrap(), Some(Vec::new()));
    }

    #[test]
    fn what_is_refused_is_told() {
        let team = Team::new(1).unwrap();
        let refused = cause(None);
        assert!(matches!(&refused, Failure::Refused(_)));
        for refuses in [(1, 0), (256, 0), (0, 1), (0, 256), (512, 0), (0, 512)] {
            let (_, mut turns) = noted(256, refuses, Duration::ZERO, 1);
            assert_eq!(turns.repetition(&team, 256).map(|_| ()), Err(refused.clone()), "{refuses:?}");
            let (_, mut turns) = noted(256, refuses, Duration::ZERO, 1);
            let sampled = turns.samples(&team, &OpTimer::calibrated(), 512, Duration::from_secs(60));
            assert_eq!(sampled, Err(refused.clone()), "{refuses:?}");
        }
        // An earlier watch's findings come first.
        let watch = Arc::new(Watch::default());
        watch.broken(|| "it lies".into());
        assert_eq!(cause(Some(&watch)), Failure::Broken("it lies".into()));
    }

    #[test]
    fn a_share_adds_up_and_keeps_the_blocks_without_a_wait() {
        let mut share = Share::default();
        share.add(1000, Spent { wait: 300, waits: 2, lock: 50, locks: 1 });
        share.add(700, Spent { wait: 0, waits: 0, lock: 20, locks: 4 });
        share.add(500, Spent::default());
        assert_eq!((share.ticks, share.intervals), (2200, 3 + 2 * (2 + 1 + 4)));
        assert_eq!(share.spent, Spent { wait: 300, waits: 2, lock: 70, locks: 5 });
        assert_eq!(share.quiet, [(700, 4), (500, 0)]);
    }

    #[test]
    fn time_is_divided_into_waits_locks_and_the_rest() {
        let (_, turns) = noted(1, (0, 0), Duration::ZERO, 2);
        let timer = &turns.timer;
        let ticks = |ns| timer.in_ticks(ns);
        let (all, wait, lock) = (ticks(9e9), ticks(2e9), ticks(3e9));
        let spent = Spent { wait, waits: 7, lock, locks: 5 };
        let slowest = Share { ticks: all, intervals: 30, spent, quiet: Vec::new() };
        let split = turns.split_of(&slowest, Some(4.5), 1000, Asked { submissions: 500, requests: 3000 });
        let ns = |ticks, intervals| timer.sum_ns(ticks, intervals) / 1000.0;
        let expected = Split {
            wait_ns: ns(wait, 7),
            lock_ns: ns(lock, 5),
            work_ns: ns(all, 30) - ns(wait, 7) - ns(lock, 5),
            // Of both threads' operations.
            submissions_per_op: 0.25,
            requests_per_op: 1.5,
            hardware_wait_ns_per_op: 0.0,
            no_flush: Some(4.5),
        };
        assert_eq!(split, expected);
        // The median of all threads' blocks, for each of 64 operations; each block and each lock has read the clock.
        let of = |quiet| Share { quiet, ..Share::default() };
        let shares = [of(vec![(ticks(6.4e9), 0), (ticks(64e9), 3)]), of(vec![(ticks(19.2e9), 2)])];
        assert_eq!(turns.no_flush(&shares), Some(timer.sum_ns(ticks(19.2e9), 5) / 64.0));
        assert_eq!(turns.no_flush(&[]), None);
    }
}
