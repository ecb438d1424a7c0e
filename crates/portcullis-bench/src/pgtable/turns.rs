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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;
    use crate::pgtable::format::Geometry;
    use crate::pgtable::work::Shape;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        /// A page leads to the next one's memory.
        Elsewhere,
        /// The first page of an unmap stays.
        Stays,
        /// Nothing is done, and that is said.
        Refuses,
    }

    /// Pages by their address, and how many entries each operation was of.
    struct Script {
        fault: Mutex<Fault>,
        pages: Mutex<BTreeMap<u64, u64>>,
        counts: [AtomicU64; 3],
    }

    fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
        of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    impl Script {
        fn new(fault: Fault) -> Arc<Self> {
            Arc::new(Self { fault: Mutex::new(fault), pages: Mutex::default(), counts: Default::default() })
        }

        fn counts(&self) -> [u64; 3] {
            self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
        }

        fn each(
            &self,
            what: usize,
            work: &Work,
            table: u64,
            entries: Range<u64>,
            mut page: impl FnMut(u64, u64),
        ) -> bool {
            self.counts[what].fetch_add(entries.end - entries.start, Ordering::Relaxed);
            for (entry, at) in entries.flat_map(|entry| (0..work.pages).map(move |page| (entry, page))) {
                page(work.iova(table, entry) + at * work.page, work.phys(table, entry, at));
            }
            *lock(&self.fault) != Fault::Refuses
        }
    }

    impl Measured for Script {
        fn map_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool {
            let more = if *lock(&self.fault) == Fault::Elsewhere { work.page } else { 0 };
            self.each(0, work, table, entries, |iova, phys| {
                lock(&self.pages).insert(iova, phys + more);
            })
        }

        fn unmap_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool {
            let stays = (*lock(&self.fault) == Fault::Stays).then(|| work.iova(table, entries.start));
            self.each(1, work, table, entries, |iova, _| {
                if stays != Some(iova) {
                    lock(&self.pages).remove(&iova);
                }
            })
        }

        fn translate_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool {
            self.each(2, work, table, entries, |_, _| ())
        }

        fn look_up(&self, iova: u64) -> Option<u64> {
            let pages = lock(&self.pages);
            pages.get(&(iova & !4095)).map(|phys| phys | iova & 4095)
        }
    }

    fn open(script: &Arc<Script>, team: &Team, shape: Shape, operation: Operation) -> Result<Turns, Failure> {
        let geometry =
            Geometry { granule: 12, index: 9, large: [true; 2], input: 48, last_phys: (1 << 48) - 1 };
        let pattern = Pattern::new(shape, &geometry, 1, Some(4)).unwrap();
        Turns::open(team, Arc::clone(script) as _, pattern, operation, &OpTimer::calibrated())
    }

    const EACH: [Operation; 3] = [Operation::Map, Operation::Unmap, Operation::Translate];

    #[test]
    fn tables_that_do_not_what_they_say_are_found() {
        let team = Team::new(1).unwrap();
        for operation in EACH {
            for shape in [Shape::Page { level: 1 }, Shape::Run, Shape::Scattered] {
                let verdict = |fault| open(&Script::new(fault), &team, shape, operation).map(|_| ());
                assert_eq!(verdict(Fault::None), Ok(()), "{operation:?} {shape:?}");
                for (fault, told) in [(Fault::Elsewhere, "instead of"), (Fault::Stays, "leads to")] {
                    let Err(Failure::Broken(said)) = verdict(fault) else {
                        panic!("{operation:?} {fault:?}")
                    };
                    assert!(said.contains(told), "{said}");
                }
                assert!(matches!(verdict(Fault::Refuses), Err(Failure::Refused(_))));
                // It may begin to do so while it is measured.
                let script = Script::new(Fault::None);
                let mut turns = open(&script, &team, shape, operation).unwrap();
                assert_eq!(turns.repetition(&team, 1).map(|_| ()), Ok(()));
                *lock(&script.fault) = Fault::Stays;
                assert!(matches!(turns.check(&team), Err(Failure::Broken(_))), "{operation:?} {shape:?}");
                *lock(&script.fault) = Fault::Refuses;
                assert!(matches!(turns.repetition(&team, 1), Err(Failure::Refused(_))));
            }
        }
    }

    /// A turn is of 4 entries in each of 4 tables; a sixteenth of the turns comes before, to get warm.
    #[test]
    fn a_repetition_is_of_whole_turns() {
        let team = Team::new(1).unwrap();
        for operation in EACH {
            let script = Script::new(Fault::None);
            let mut turns = open(&script, &team, Shape::Page { level: 1 }, operation).unwrap();
            // Opening maps a page once to look at it. For translations it maps the page again, and leaves it.
            let is_translate = operation == Operation::Translate;
            let opened = [if is_translate { 32 } else { 16 }, 16, 0];
            assert_eq!(script.counts(), opened, "{operation:?}");
            assert_eq!(turns.repetition(&team, 40).unwrap().ops, 48);
            let more = |entries| if is_translate { [0, 0, entries] } else { [entries, entries, 0] };
            let after = |before: [u64; 3], more: [u64; 3]| std::array::from_fn(|at| before[at] + more[at]);
            let repeated = after(opened, more(4 * 16));
            assert_eq!(script.counts(), repeated, "{operation:?}");
            // One by one, until there are as many as were asked for.
            let samples = turns.samples(&team, &OpTimer::calibrated(), 20, Duration::from_secs(60)).unwrap();
            assert_eq!(samples.unwrap().len(), 32);
            let sampled = after(repeated, more(2 * 16));
            assert_eq!(script.counts(), sampled, "{operation:?}");
            turns.check(&team).unwrap();
            let checked = after(sampled, if is_translate { [0, 16, 0] } else { [16, 16, 0] });
            assert_eq!(script.counts(), checked, "{operation:?}");
        }
    }
}
