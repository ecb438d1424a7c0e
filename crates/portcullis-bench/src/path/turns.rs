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
        let subjects = (0..count).map(|_| maker.subject(info, &case)).collect::<Result<Vec<_>, Failure>>()?;
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
