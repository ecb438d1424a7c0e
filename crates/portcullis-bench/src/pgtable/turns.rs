//! Turns: everything is mapped, then everything is unmapped, and the clock runs for one of the two.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::check;
use super::table::Measured;
use super::work::{Operation, Pattern, Work};
use crate::runner::{Cell, Failure, Timing};
use crate::team::Team;
use crate::timer::OpTimer;

/// Why a turn failed that only noticed that it did.
fn cause() -> Failure {
    Failure::Refused("it failed to map what was free, or to remove or translate what was mapped".into())
}

/// A subject's tables and what is done with them.
pub(crate) struct Turns {
    tables: Arc<dyn Measured>,
    pattern: Arc<Pattern>,
    operation: Operation,
    timer: OpTimer,
}

/// `each` for every table of `work`.
fn all(work: &Work, mut each: impl FnMut(u64) -> bool) -> Option<()> {
    (0..work.tables).all(&mut each).then_some(())
}

fn map(tables: &dyn Measured, work: &Work) -> Option<()> {
    all(work, |table| tables.map_all(work, table, 0..work.entries))
}

fn unmap(tables: &dyn Measured, work: &Work) -> Option<()> {
    all(work, |table| tables.unmap_all(work, table, 0..work.entries))
}

/// One turn: the ticks of what is timed.
fn turn(tables: &dyn Measured, work: &Work, operation: Operation, timer: &OpTimer) -> Option<u64> {
    let (ticks, done) = match operation {
        Operation::Map => {
            let (ticks, mapped) = timer.ticks(|| map(tables, work));
            (ticks, mapped.and_then(|()| unmap(tables, work)))
        }
        Operation::Unmap => {
            map(tables, work)?;
            timer.ticks(|| unmap(tables, work))
        }
        Operation::Translate => {
            timer.ticks(|| all(work, |table| tables.translate_all(work, table, 0..work.entries)))
        }
    };
    done.map(|()| ticks)
}

/// One turn, of which each operation is timed by itself; up to `most` of them are added to `samples`.
fn turn_by_ones(
    tables: &dyn Measured,
    work: &Work,
    operation: Operation,
    timer: &OpTimer,
    samples: &mut Vec<u64>,
) -> Option<()> {
    let mut each = |table, one: &dyn Fn(u64, u64) -> bool| {
        (0..work.entries).all(|entry| {
            let (ticks, done) = timer.ticks(|| one(table, entry));
            samples.push(ticks);
            done
        })
    };
    match operation {
        Operation::Map => {
            all(work, |table| each(table, &|table, entry| tables.map_all(work, table, entry..entry + 1)))?;
            unmap(tables, work)
        }
        Operation::Unmap => {
            map(tables, work)?;
            all(work, |table| each(table, &|table, entry| tables.unmap_all(work, table, entry..entry + 1)))
        }
        Operation::Translate => all(work, |table| {
            each(table, &|table, entry| tables.translate_all(work, table, entry..entry + 1))
        }),
    }
}

impl Turns {
    /// Checks the tables, which are empty, and so makes all that will be needed.
    pub(crate) fn open(
        team: &Team,
        tables: Arc<dyn Measured>,
        pattern: Pattern,
        operation: Operation,
        timer: &OpTimer,
    ) -> Result<Self, Failure> {
        let pattern = Arc::new(pattern);
        let mut turns = Self { tables, pattern, operation, timer: timer.clone() };
        turns.check_all(team, false)?;
        if operation == Operation::Translate {
            let (tables, pattern) = (Arc::clone(&turns.tables), Arc::clone(&turns.pattern));
            let map_all =
                move |thread: usize, _: &_| map(&*tables, &pattern.threads[thread]).ok_or_else(cause);
            team.each(turns.pattern.threads.len(), map_all)?;
        }
        Ok(turns)
    }

    /// Has one thread check everything; whether it is mapped already is said by `mapped`.
    fn check_all(&mut self, team: &Team, mapped: bool) -> Result<(), Failure> {
        let (tables, pattern) = (Arc::clone(&self.tables), Arc::clone(&self.pattern));
        team.each(1, move |_, _| {
            if !mapped {
                pattern.threads.iter().try_for_each(|work| map(&*tables, work)).ok_or_else(cause)?;
            }
            check::mapped(&*tables, &pattern)?;
            pattern.threads.iter().try_for_each(|work| unmap(&*tables, work)).ok_or_else(cause)?;
            check::unmapped(&*tables, &pattern)
        })?;
        Ok(())
    }
}

impl Cell for Turns {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let turns = ops.div_ceil(self.pattern.threads[0].ops());
        let (tables, pattern) = (Arc::clone(&self.tables), Arc::clone(&self.pattern));
        let (operation, timer) = (self.operation, self.timer.clone());
        let ns = team.each(self.pattern.threads.len(), move |thread, line| {
            let (tables, work) = (&*tables, &pattern.threads[thread]);
            let turn = || turn(tables, work, operation, &timer).ok_or_else(cause);
            // What the subjects before have pushed out of the caches comes back first.
            for _ in 0..turns.div_ceil(16) {
                turn()?;
            }
            line.wait()?;
            let mut ticks = 0;
            for _ in 0..turns {
                ticks += turn()?;
            }
            Ok(timer.sum_ns(ticks, turns))
        })?;
        // The slowest thread's, as where the threads are timed from the first start to the last end.
        let slowest = ns.into_iter().fold(0.0, f64::max);
        Ok(Timing {
            wall: Duration::from_secs_f64(slowest / 1e9),
            ops: turns * self.pattern.threads[0].ops(),
        })
    }

    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let (tables, pattern) = (Arc::clone(&self.tables), Arc::clone(&self.pattern));
        let (operation, timer) = (self.operation, timer.clone());
        let ticks = team.each(self.pattern.threads.len(), move |thread, line| {
            let (tables, work) = (&*tables, &pattern.threads[thread]);
            let mut ticks = Vec::with_capacity(count + work.ops() as usize);
            line.wait()?;
            let start = Instant::now();
            while ticks.len() < count && start.elapsed() < limit {
                turn_by_ones(tables, work, operation, &timer, &mut ticks).ok_or_else(cause)?;
            }
            Ok(ticks)
        })?;
        Ok(Some(ticks.concat()))
    }

    fn check(&mut self, team: &Team) -> Result<(), Failure> {
        self.check_all(team, self.operation == Operation::Translate)
    }
}
