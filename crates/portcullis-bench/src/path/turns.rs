//! A subject with the mappings of its threads: checked, timed, and checked again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::machine::phys;
use super::subject::{Maker, Subject, SubjectInfo};
use super::workload::{Case, Kind};
use crate::lane::Lane;
use crate::runner::{Cell, Failure, Timing};
use crate::team::{Meeting, Span, Team};
use crate::timer::OpTimer;

/// Operations that are timed one by one before the clock is asked whether there is time for more.
const TOGETHER: usize = 16;

fn refused() -> Failure {
    Failure::Refused("it failed to map a buffer, or to unmap it".into())
}

type Lanes = Arc<[Mutex<Box<dyn Lane>>]>;

fn lock(lane: &Mutex<Box<dyn Lane>>) -> MutexGuard<'_, Box<dyn Lane>> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A subject, one or one for each thread, and its threads' mappings.
pub(crate) struct Turns {
    subjects: Vec<Arc<dyn Subject>>,
    lanes: Lanes,
    case: Case,
}

impl Turns {
    /// A fresh subject, checked; all mappings that are to be live are made.
    pub(crate) fn open(team: &Team, maker: &Maker, info: &SubjectInfo, case: Case) -> Result<Self, Failure> {
        let count = if case.own_domains { case.threads } else { 1 };
        let subjects = (0..count).map(|_| maker.subject(info, &case)).collect::<Result<_, Failure>>()?;
        Self::of(team, subjects, case)
    }

    /// The same for subjects that are there.
    fn of(team: &Team, subjects: Vec<Arc<dyn Subject>>, case: Case) -> Result<Self, Failure> {
        let count = subjects.len();
        // Each thread makes its own: what one allocates shares no cache line with what another does.
        let of_thread = subjects.clone();
        let lane = move |thread: usize, _: &_| Arc::clone(&of_thread[thread % count]).lane(&case, thread);
        let lanes: Lanes = team.each(case.threads, lane)?.into_iter().map(Mutex::new).collect();
        let turns = Self { subjects, lanes, case };
        turns.look(team)?;
        if case.live > 1 {
            turns.on_each(team, move |lane| lane.maps(0, case.live))?;
        }
        Ok(turns)
    }

    /// Runs `work` on each thread's lane.
    fn on_each(
        &self,
        team: &Team,
        work: impl Fn(&mut dyn Lane) -> bool + Send + Sync + 'static,
    ) -> Result<(), Failure> {
        let lanes = Arc::clone(&self.lanes);
        let work = move |thread: usize| work(&mut **lock(&lanes[thread])).then_some(()).ok_or_else(refused);
        team.each(self.case.threads, move |thread, _| work(thread)).map(|_| ())
    }

    /// Maps everything at once, looks where each address leads, unmaps it, and looks again.
    fn look(&self, team: &Team) -> Result<(), Failure> {
        let live = self.case.live;
        self.on_each(team, move |lane| lane.maps(0, live))?;
        let mut addresses = Vec::new();
        for (thread, lane) in self.lanes.iter().enumerate() {
            let lane = lock(lane);
            for index in 0..live {
                addresses.push((thread, lane.address(index)));
                self.leads_to_its_memory(thread, index, lane.address(index))?;
            }
        }
        let keeps = matches!(self.case.workload.kind, Kind::Pool | Kind::Swiotlb | Kind::Adaptive);
        self.on_each(team, move |lane| lane.unmaps(0, live) && lane.finish())?;
        // Tables are cleared by then under every policy; a pool's own buffers stay mapped.
        let reached = |(thread, address): &(usize, u64)| self.subject(*thread).reach(*address).is_some();
        if !keeps && addresses.iter().any(reached) {
            return Err(Failure::Broken("an address that was unmapped leads to memory".into()));
        }
        Ok(())
    }

    fn subject(&self, thread: usize) -> &dyn Subject {
        &*self.subjects[thread % self.subjects.len()]
    }

    fn leads_to_its_memory(&self, thread: usize, index: usize, address: u64) -> Result<(), Failure> {
        let found = self.subject(thread).reach(address);
        let expected = phys(&self.case, thread, index);
        // What is copied leads to the pool.
        let right = if self.case.workload.kind.copies() { found.is_some() } else { found == Some(expected) };
        let wrong = || format!("{address:#x} leads to {found:x?} instead of {expected:#x}");
        right.then_some(()).ok_or_else(|| Failure::Broken(wrong()))
    }
}

/// `ops` operations: pairs of one mapping, or each of the live ones in turn.
fn work(lane: &mut dyn Lane, live: usize, ops: u64) -> bool {
    if live == 1 {
        return lane.pairs(ops);
    }
    let (rounds, rest) = (ops / live as u64, (ops % live as u64) as usize);
    (0..rounds).all(|_| lane.renews(0, live)) && lane.renews(0, rest)
}

impl Cell for Turns {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let (lanes, case, meeting) = (Arc::clone(&self.lanes), self.case, Meeting::default());
        let wall = team.race(case.threads, move |thread, line| {
            let lane = &mut **lock(&lanes[thread]);
            // What the subjects before have pushed out of the caches comes back first.
            work(lane, case.live, ops.div_ceil(16).max(case.live as u64))
                .then_some(())
                .ok_or_else(refused)?;
            meeting.wait(case.threads, 0, case.crowded, line)?;
            let (span, worked) = Span::of(|| work(lane, case.live, ops));
            worked.then_some(span).ok_or_else(refused)
        })?;
        Ok(Timing { wall, ops })
    }

    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let (lanes, timer, case) = (Arc::clone(&self.lanes), timer.clone(), self.case);
        let ticks = team.each(case.threads, move |thread, _| {
            let lane = &mut **lock(&lanes[thread]);
            let mut samples = Vec::with_capacity(count);
            let start = Instant::now();
            let mut index = 0;
            while samples.len() < count && start.elapsed() < limit {
                for _ in 0..TOGETHER {
                    let (ticks, worked) = timer.ticks(|| match case.live {
                        1 => lane.pairs(1),
                        _ => lane.renews(index, index + 1),
                    });
                    worked.then_some(()).ok_or_else(refused)?;
                    samples.push(ticks);
                    index = (index + 1) % case.live;
                }
            }
            Ok(samples)
        })?;
        Ok(Some(ticks.concat()))
    }

    fn check(&mut self, team: &Team) -> Result<(), Failure> {
        let live = self.case.live;
        if live > 1 {
            self.on_each(team, move |lane| lane.unmaps(0, live) && lane.finish())?;
        } else {
            self.on_each(team, |lane| lane.finish())?;
        }
        self.look(team)?;
        // No thread works any more.
        self.lanes = Arc::new([]);
        self.subjects.iter().try_for_each(|subject| subject.settle())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;
    use crate::path::workload::workloads;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        /// Mapping 1 leads to the memory of mapping 0.
        Elsewhere,
        Nowhere,
        /// It leads there for ever.
        Stays,
        /// It says that it does not map, or does not unmap, or cannot finish.
        Map,
        Unmap,
        Finish,
        /// It says that something is left.
        Left,
    }

    /// Notes what is asked for, and perhaps has a fault.
    struct Noted {
        case: Case,
        fault: Fault,
        maps: [AtomicU64; 4],
        unmaps: [AtomicU64; 4],
        mapped: [AtomicBool; 4],
        finished: AtomicU64,
        settled: AtomicU64,
        /// A map takes as long, and so does an unmap.
        sleeps: Duration,
    }

    struct NotedLane(Arc<Noted>);

    impl Subject for Noted {
        fn lane(self: Arc<Self>, _: &Case, _: usize) -> Result<Box<dyn Lane>, Failure> {
            Ok(Box::new(NotedLane(self)))
        }

        fn reach(&self, address: u64) -> Option<u64> {
            let index = (address >> 12) as usize;
            let at = if self.fault == Fault::Elsewhere { 0 } else { index };
            let is_there = self.mapped[index].load(Ordering::Relaxed) || self.fault == Fault::Stays;
            (is_there && self.fault != Fault::Nowhere).then(|| phys(&self.case, 0, at))
        }

        fn settle(&self) -> Result<(), Failure> {
            self.settled.fetch_add(1, Ordering::Relaxed);
            if self.fault == Fault::Left { Err(Failure::Broken("left".into())) } else { Ok(()) }
        }
    }

    impl Lane for NotedLane {
        fn map(&mut self, index: usize) -> bool {
            std::thread::sleep(self.0.sleeps);
            self.0.maps[index].fetch_add(1, Ordering::Relaxed);
            !self.0.mapped[index].swap(true, Ordering::Relaxed) && self.0.fault != Fault::Map
        }

        fn unmap(&mut self, index: usize) -> bool {
            std::thread::sleep(self.0.sleeps);
            self.0.unmaps[index].fetch_add(1, Ordering::Relaxed);
            self.0.mapped[index].swap(false, Ordering::Relaxed) && self.0.fault != Fault::Unmap
        }

        fn address(&self, index: usize) -> u64 {
            (index as u64) << 12
        }

        fn finish(&mut self) -> bool {
            self.0.finished.fetch_add(1, Ordering::Relaxed);
            self.0.fault != Fault::Finish
        }
    }

    fn noted(kind: Kind, live: usize, fault: Fault, sleeps: Duration) -> (Arc<Noted>, Turns) {
        let workload = *workloads().iter().find(|workload| workload.kind == kind).unwrap();
        let case = Case { workload, threads: 1, live, own_domains: false, crowded: false };
        let (maps, unmaps, mapped, finished, settled) = Default::default();
        let noted = Arc::new(Noted { case, fault, maps, unmaps, mapped, finished, settled, sleeps });
        let subject: Arc<dyn Subject> = Arc::clone(&noted) as _;
        let lanes: Lanes = Arc::new([Mutex::new(Arc::clone(&subject).lane(&case, 0).unwrap())]);
        (noted, Turns { subjects: vec![subject], lanes, case })
    }

    fn counts(of: &[AtomicU64; 4]) -> [u64; 4] {
        of.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Each mapping is looked at once before and once after; and before the clock runs, each is renewed once, or a sixteenth is done.
    #[test]
    fn a_repetition_renews_what_is_live_in_turn() {
        let (team, timer) = (Team::new(1).unwrap(), OpTimer::calibrated());
        for (live, ops, repeated, sampled) in [
            (1, 10, [11, 0, 0, 0], [16, 0, 0, 0]),
            (1, 160, [170, 0, 0, 0], [16, 0, 0, 0]),
            (3, 10, [5, 4, 4, 0], [6, 5, 5, 0]),
            (4, 100, [27, 27, 27, 26], [4, 4, 4, 4]),
        ] {
            let (noted, mut turns) = noted(Kind::Raw, live, Fault::None, Duration::ZERO);
            turns.look(&team).unwrap();
            let mut before = counts(&noted.maps);
            assert_eq!(before, [1, (live > 1).into(), (live > 2).into(), (live > 3).into()]);
            if live > 1 {
                turns.on_each(&team, move |lane| lane.maps(0, live)).unwrap();
                before = counts(&noted.maps);
            }
            let more = |before: [u64; 4]| {
                let now = counts(&noted.maps);
                [0, 1, 2, 3].map(|at| now[at] - before[at])
            };
            assert_eq!(turns.repetition(&team, ops).unwrap().ops, ops);
            assert_eq!(more(before), repeated, "{live} live, {ops} operations");
            before = counts(&noted.maps);
            let samples = turns.samples(&team, &timer, 5, Duration::from_secs(60)).unwrap().unwrap();
            assert_eq!((samples.len(), more(before)), (16, sampled));
            turns.check(&team).unwrap();
            assert_eq!(
                (counts(&noted.maps), noted.settled.load(Ordering::Relaxed)),
                (counts(&noted.unmaps), 1)
            );
            assert_eq!(
                noted.finished.load(Ordering::Relaxed),
                3,
                "when it is looked at, and when all is unmapped"
            );
        }
    }

    #[test]
    fn the_clock_runs_for_maps_and_unmaps() {
        let (team, timer) = (Team::new(1).unwrap(), OpTimer::calibrated());
        for live in [1, 2] {
            let (_, mut turns) = noted(Kind::Raw, live, Fault::None, Duration::from_millis(1));
            turns.on_each(&team, move |lane| live == 1 || lane.maps(0, live)).unwrap();
            let timing = turns.repetition(&team, 8).unwrap();
            assert!(timing.wall >= Duration::from_millis(16), "{timing:?}");
            // The clocks' rates may differ by a little.
            let least = timer.in_ticks(1.96e6);
            let samples = turns.samples(&team, &timer, 5, Duration::from_secs(60)).unwrap().unwrap();
            assert!(samples.iter().all(|ticks| *ticks >= least), "{samples:?}");
        }
        let (_, mut turns) = noted(Kind::Raw, 1, Fault::None, Duration::ZERO);
        assert_eq!(turns.samples(&team, &timer, 5, Duration::ZERO).unwrap(), Some(Vec::new()));
    }

    #[test]
    fn a_subject_that_does_not_what_it_says_is_found() {
        let team = Team::new(1).unwrap();
        let verdict = |kind, fault| {
            let (_, mut turns) = noted(kind, 2, fault, Duration::ZERO);
            turns.on_each(&team, |lane| lane.maps(0, 2))?;
            turns.repetition(&team, 4)?;
            turns.check(&team)
        };
        for kind in [Kind::Raw, Kind::Pool] {
            assert_eq!(verdict(kind, Fault::None), Ok(()));
            for fault in [Fault::Map, Fault::Unmap, Fault::Finish] {
                assert_eq!(verdict(kind, fault), Err(refused()), "{fault:?}");
            }
            assert_eq!(verdict(kind, Fault::Left), Err(Failure::Broken("left".into())));
            // Before anything is measured.
            let opened = |fault| {
                let (noted, _) = noted(kind, 2, fault, Duration::ZERO);
                let case = noted.case;
                Turns::of(&team, vec![noted], case).map(|turns| turns.lanes.len())
            };
            assert_eq!(opened(Fault::None), Ok(1));
            assert!(matches!(opened(Fault::Nowhere), Err(Failure::Broken(_))));
            let nowhere = "0x0 leads to None instead of 0x1000000000";
            assert_eq!(verdict(kind, Fault::Nowhere), Err(Failure::Broken(nowhere.into())));
        }
        // What is copied leads to some memory of a pool's, before and after.
        let elsewhere = "0x1000 leads to Some(1000000000) instead of 0x1000003000";
        assert_eq!(verdict(Kind::Raw, Fault::Elsewhere), Err(Failure::Broken(elsewhere.into())));
        let stays = "an address that was unmapped leads to memory";
        assert_eq!(verdict(Kind::Raw, Fault::Stays), Err(Failure::Broken(stays.into())));
        assert_eq!(
            [Fault::Elsewhere, Fault::Stays].map(|fault| verdict(Kind::Pool, fault)),
            [Ok(()), Ok(())]
        );
    }
}
