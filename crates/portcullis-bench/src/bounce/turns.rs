//! A subject with the buffers of its threads: checked, timed, and checked again.
//!
//! With one mapping at a time a thread maps and unmaps the same buffer again and again, so everything is as hot as it
//! can be. With more of them it is like a queue of I/Os that complete in order: a few are unmapped, and as many mapped,
//! the oldest first, and the clock is read between.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use portcullis_trace::replay::Profile;

use super::check::Check;
use super::memory::Buffers;
use super::subject::{Maker, Subject, SubjectInfo};
use super::workload::Case;
use crate::lane::Lane;
use crate::report::Halves;
use crate::runner::{Cell, Failure, Timing};
use crate::team::{Meeting, Span, Team};
use crate::timer::OpTimer;

/// Mappings that end together, as an interrupt tells of several I/Os.
const TOGETHER: usize = 16;

/// How many times as long a repetition is with more threads than cores.
const CROWDED: u64 = 16;

fn refused() -> Failure {
    Failure::Refused("it failed to map a buffer, or to unmap it".into())
}

/// What the thread's halves took, in ticks, and how many intervals of the clock that is.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    map: u64,
    unmap: u64,
    intervals: u64,
}

struct Work {
    lane: Box<dyn Lane>,
    buffers: Arc<Buffers>,
}

impl Work {
    /// `ops` operations with `depth` mappings in use.
    fn queue(&mut self, depth: usize, ops: u64, timer: &OpTimer) -> Result<Share, Failure> {
        let mut share = Share::default();
        let mut first = 0;
        let mut done = 0;
        while done < ops {
            let end = (first + TOGETHER).min(depth);
            let (unmap, unmapped) = timer.ticks(|| self.lane.unmaps(first, end));
            let (map, mapped) = timer.ticks(|| self.lane.maps(first, end));
            (unmapped && mapped).then_some(()).ok_or_else(refused)?;
            share.map += map;
            share.unmap += unmap;
            share.intervals += 1;
            done += (end - first) as u64;
            first = if end == depth { 0 } else { end };
        }
        Ok(share)
    }

    fn all(&mut self, depth: usize, work: fn(&mut dyn Lane, usize) -> bool) -> Result<(), Failure> {
        work(&mut *self.lane, depth).then_some(()).ok_or_else(refused)
    }
}

type Lanes = Arc<[Mutex<Work>]>;

fn lock(work: &Mutex<Work>) -> MutexGuard<'_, Work> {
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A subject and its threads' buffers.
pub(crate) struct Turns {
    subject: Arc<dyn Subject>,
    lanes: Lanes,
    case: Case,
    timer: OpTimer,
    halves: Option<Halves>,
}

impl Turns {
    /// A fresh subject, checked.
    pub(crate) fn open(
        team: &Team,
        maker: &Maker,
        info: &SubjectInfo,
        case: Case,
        profile: &Profile,
    ) -> Result<Self, Failure> {
        Self::of(team, maker.subject(info, &case, profile)?, case, &maker.timer)
    }

    /// The same for a subject that is there.
    pub(super) fn of(
        team: &Team,
        subject: Arc<dyn Subject>,
        case: Case,
        timer: &OpTimer,
    ) -> Result<Self, Failure> {
        // Each thread makes its own: what one allocates shares no cache line with what another does.
        let of_thread = Arc::clone(&subject);
        let work = move |thread: usize, _: &_| {
            let buffers = Arc::new(Buffers::new(case.buffers(), case.shape.bytes())?);
            let lane = Arc::clone(&of_thread).lane(thread, Arc::clone(&buffers))?;
            Ok(Work { lane, buffers })
        };
        let lanes: Lanes = team.each(case.threads, work)?.into_iter().map(Mutex::new).collect();
        let turns = Self { subject, lanes, case, timer: timer.clone(), halves: None };
        turns.look(team)?;
        Ok(turns)
    }

    /// Whether data arrives.
    fn look(&self, team: &Team) -> Result<(), Failure> {
        let (subject, lanes, case) = (Arc::clone(&self.subject), Arc::clone(&self.lanes), self.case);
        let meeting = Meeting::default();
        team.each(case.threads, move |thread, line| {
            let work = &mut *lock(&lanes[thread]);
            let check = Check { subject: &*subject, case: &case, thread, buffers: &work.buffers };
            check.run(&mut *work.lane, &meeting, line)
        })?;
        Ok(())
    }

    /// Each thread's part of a repetition with one mapping at a time.
    fn pairs(&self, team: &Team, ops: u64) -> Result<Duration, Failure> {
        let (lanes, case, meeting) = (Arc::clone(&self.lanes), self.case, Meeting::default());
        team.race(case.threads, move |thread, line| {
            let lane = &mut lock(&lanes[thread]).lane;
            // What the subjects before have pushed out of the caches comes back first.
            lane.pairs(ops.div_ceil(16)).then_some(()).ok_or_else(refused)?;
            meeting.wait(case.threads, 0, case.crowded, line)?;
            let (span, worked) = Span::of(|| lane.pairs(ops));
            worked.then_some(span).ok_or_else(refused)
        })
    }

    /// The same with more.
    fn queues(&self, team: &Team, ops: u64) -> Result<(Duration, Vec<Share>), Failure> {
        let (lanes, case, timer) = (Arc::clone(&self.lanes), self.case, self.timer.clone());
        let shares: Arc<[Mutex<Share>]> = (0..case.threads).map(|_| Mutex::default()).collect();
        let (told, meeting) = (Arc::clone(&shares), Meeting::default());
        let wall = team.race(case.threads, move |thread, line| {
            let work = &mut *lock(&lanes[thread]);
            work.all(case.depth, |lane, depth| lane.maps(0, depth))?;
            // Once round at least: everything is first used before the clock runs.
            work.queue(case.depth, ops.div_ceil(16).max(case.depth as u64), &timer)?;
            meeting.wait(case.threads, 0, case.crowded, line)?;
            let (span, share) = Span::of(|| work.queue(case.depth, ops, &timer));
            *told[thread].lock().unwrap_or_else(PoisonError::into_inner) = share?;
            // A thread that is done first must not unmap while others are still timed.
            meeting.wait(case.threads, 1, case.crowded, line)?;
            work.all(case.depth, |lane, depth| lane.unmaps(0, depth))?;
            Ok(span)
        })?;
        let share = |share: &Mutex<Share>| *share.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((wall, shares.iter().map(share).collect()))
    }
}

/// What the halves took, in the mean of all threads' `ops` operations: who had to share a core is in the wall's time.
fn halves_of(depth: usize, shares: &[Share], ops: u64, timer: &OpTimer) -> Halves {
    let all = (ops * shares.len() as u64) as f64;
    let ns = |ticks: fn(&Share) -> u64| {
        shares.iter().map(|share| timer.sum_ns(ticks(share), share.intervals)).sum::<f64>() / all
    };
    Halves { depth, map_ns: ns(|share| share.map), unmap_ns: ns(|share| share.unmap) }
}

impl Cell for Turns {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let depth = self.case.depth;
        // Threads that share a core take turns of some milliseconds: long enough for some of these.
        let ops = if self.case.crowded { ops.saturating_mul(CROWDED) } else { ops };
        if depth == 1 {
            return Ok(Timing { wall: self.pairs(team, ops)?, ops });
        }
        // Rounds of the whole queue, so that each thread does exactly as many.
        let ops = ops.next_multiple_of(depth as u64);
        let (wall, shares) = self.queues(team, ops)?;
        self.halves = Some(halves_of(depth, &shares, ops, &self.timer));
        Ok(Timing { wall, ops })
    }

    fn halves(&self) -> Option<Halves> {
        self.halves
    }

    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let (lanes, timer) = (Arc::clone(&self.lanes), timer.clone());
        let ticks = team.each(self.case.threads, move |thread, _| {
            let lane = &mut lock(&lanes[thread]).lane;
            let mut samples = Vec::with_capacity(count);
            let start = Instant::now();
            while samples.len() < count && start.elapsed() < limit {
                for _ in 0..TOGETHER {
                    let (ticks, worked) = timer.ticks(|| lane.map(0) && lane.unmap(0));
                    worked.then_some(()).ok_or_else(refused)?;
                    samples.push(ticks);
                }
            }
            Ok(samples)
        })?;
        Ok(Some(ticks.concat()))
    }

    fn check(&mut self, team: &Team) -> Result<(), Failure> {
        self.look(team)?;
        // No thread works any more.
        self.lanes = Arc::new([]);
        self.subject.settle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_the_mean_of_all_threads_operations() {
        let timer = OpTimer::calibrated();
        let ticks = |ns| timer.in_ticks(ns);
        let share = |map, unmap, intervals| Share { map: ticks(map), unmap: ticks(unmap), intervals };
        let shares = [share(6e9, 1e9, 3), share(2e9, 4e9, 5)];
        let ns = |first, second| (timer.sum_ns(ticks(first), 3) + timer.sum_ns(ticks(second), 5)) / 2000.0;
        let halves = Halves { depth: 8, map_ns: ns(6e9, 2e9), unmap_ns: ns(1e9, 4e9) };
        assert_eq!(halves_of(8, &shares, 1000, &timer), halves);
    }
}
