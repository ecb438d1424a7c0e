//! Runs the repetitions of all subjects in turn.
//!
//! For each *group* (a workload with a number of threads) every subject gets its own state, is checked, and is
//! then measured in rounds: one timed repetition of each subject, in an order that changes from round to
//! round. The whole is done in several passes, minutes apart in a long run, so that a disturbance does not
//! hit all repetitions of one group.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::report::{Halves, Measurement, Skipped, Split};
use crate::stats;
use crate::team::Team;
use crate::timer::{self, OpTimer};

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How often everything is measured from the start, with fresh state.
    pub passes: usize,
    /// Timed repetitions of each subject in a pass.
    pub rounds: usize,
    /// About how long one timed repetition takes.
    pub repetition: Duration,
    /// How long a subject may take to get ready, or for the few operations that show how fast it is, before
    /// it is left out.
    pub budget: Duration,
    /// How long what can be cut short may take: ageing a space, timing single operations.
    pub part: Duration,
    /// Operations that each thread times one by one in a pass.
    pub samples: usize,
    /// The most ranges that a workload holds, if it is set. Tests set it, as they do not use the figures.
    pub tiny: Option<usize>,
    /// When the run is to be over. Groups get even shares of the time until then, and do fewer rounds where these are short;
    /// what has not begun by then is left out.
    pub until: Option<Instant>,
    /// Whether to leave out all that has not begun yet; asked before each subject.
    pub stop: fn() -> bool,
}

/// How long a quick run measures, so that the program is done in less than 30 seconds.
const QUICK: Duration = Duration::from_secs(26);

impl Options {
    /// A run of a few minutes.
    pub fn full() -> Self {
        Self {
            passes: 3,
            rounds: 3,
            repetition: Duration::from_millis(30),
            budget: Duration::from_secs(8),
            part: Duration::from_secs(1),
            samples: 100_000,
            tiny: None,
            until: None,
            stop: || false,
        }
    }

    /// A run of less than 30 seconds from now, with more noise.
    pub fn quick() -> Self {
        Self {
            passes: 1,
            rounds: 3,
            repetition: Duration::from_millis(3),
            budget: Duration::from_millis(1500),
            part: Duration::from_millis(50),
            samples: 20_000,
            tiny: None,
            until: Some(Instant::now() + QUICK),
            stop: || false,
        }
    }

    /// A run that shows no more than that everything works.
    pub fn tiny() -> Self {
        Self {
            passes: 2,
            rounds: 2,
            repetition: Duration::ZERO,
            budget: Duration::from_secs(60),
            part: Duration::from_secs(1),
            samples: 64,
            tiny: Some(64),
            until: None,
            stop: || false,
        }
    }
}

/// Why a subject has no figures for a workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// It takes too long.
    #[error("too slow: {what} takes more than {limit:?}")]
    OverBudget {
        /// What took long.
        what: String,
        /// The time it was given.
        limit: Duration,
    },
    /// It did something that it must not do.
    #[error("broken: {0}")]
    Broken(String),
    /// It refused a request that it should have met.
    #[error("refused: {0}")]
    Refused(String),
    /// It panicked.
    #[error("panicked: {0}")]
    Panicked(String),
    /// It cannot do this, or not here.
    #[error("{0}")]
    Unsupported(String),
    /// The run is over, and has figures of it.
    #[error("the run is over")]
    Over,
    /// Another thread of the same repetition failed, and says why.
    #[error("another thread failed")]
    Abandoned,
}

/// What one timed repetition took.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// From the first thread's start to the last one's end.
    pub wall: Duration,
    /// Operations that each thread did.
    pub ops: u64,
}

/// One subject, ready to do one workload again and again.
pub trait Cell {
    /// Does at least `ops` operations in each thread and times them as a whole.
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure>;

    /// What the time of the last repetition went into, where the benchmark tells.
    fn split(&self) -> Option<Split> {
        None
    }

    /// What of the last repetition's time each half of its operations took, where they have halves.
    fn halves(&self) -> Option<Halves> {
        None
    }

    /// Times up to `count` operations of each thread one by one (in ticks of `timer`), and stops early after
    /// `limit`. `None` where the workload does not consist of operations that one thread does by itself.
    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure>;

    /// Checks the state that everything measured has led to.
    fn check(&mut self, team: &Team) -> Result<(), Failure>;
}

/// Gets one subject ready for one workload: checks it, and brings it to the state that the workload needs.
pub type Open = Box<dyn Fn(&Runner) -> Result<Box<dyn Cell>, Failure>>;

/// One workload with one number of threads, for all subjects.
pub struct Group {
    /// The format, where the benchmark has several.
    pub format: Option<&'static str>,
    /// Which way the data goes, where any goes.
    pub direction: Option<&'static str>,
    /// The workload's name.
    pub workload: &'static str,
    /// How many threads do it at once.
    pub threads: usize,
    /// How large it is, where a subject that is too slow for one group is so for every larger one too.
    pub size: Option<usize>,
    /// Who does it.
    pub subjects: Vec<Entrant>,
}

/// A subject of a group.
pub struct Entrant {
    /// Its name.
    pub subject: &'static str,
    /// The hardware whose waits it assumes, where it assumes any.
    pub profile: Option<String>,
    /// What gets it ready.
    pub open: Open,
}

/// How far a run has come.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Groups measured, over all passes.
    pub done: usize,
    /// Groups to measure in all.
    pub total: usize,
    /// The format that is next, where the benchmark has several.
    pub format: Option<&'static str>,
    /// The workload that is next.
    pub workload: &'static str,
}

/// What measures: threads, clock and options.
pub struct Runner {
    /// The threads.
    pub team: Team,
    /// The clock for single operations.
    pub timer: OpTimer,
    /// How much to measure.
    pub options: Options,
}

#[derive(Default)]
struct Outcome {
    /// Operations in a repetition, once it is known how many fill its time.
    ops: Option<u64>,
    ns_per_op: Vec<f64>,
    /// What went into each of these, where that is told.
    splits: Vec<(f64, Split)>,
    /// And how it was divided.
    halves: Vec<(f64, Halves)>,
    samples: Vec<u64>,
    failure: Option<Failure>,
}

/// The smallest group that each subject is too slow for: its size and its name.
type Beaten = HashMap<&'static str, (usize, &'static str)>;

/// The least operations in a timed repetition, however slow they are.
const LEAST_OPS: u64 = 16;

impl Runner {
    /// Measures all groups, telling `progress` before each.
    pub fn run(
        &self,
        groups: &[Group],
        mut progress: impl FnMut(Progress),
    ) -> (Vec<Measurement>, Vec<Skipped>) {
        let empty = |group: &Group| group.subjects.iter().map(|_| Outcome::default()).collect();
        let mut outcomes: Vec<Vec<Outcome>> = groups.iter().map(empty).collect();
        let total = groups.len() * self.options.passes;
        let mut beaten = Beaten::new();
        for pass in 0..self.options.passes {
            for (index, (group, outcomes)) in groups.iter().zip(&mut outcomes).enumerate() {
                let done = pass * groups.len() + index;
                progress(Progress { done, total, format: group.format, workload: group.workload });
                self.measure(group, pass, self.share(total - done), outcomes, &mut beaten);
            }
        }
        self.summarise(groups, outcomes)
    }

    /// One pass over one group.
    fn measure(
        &self,
        group: &Group,
        pass: usize,
        until: Option<Instant>,
        outcomes: &mut [Outcome],
        beaten: &mut Beaten,
    ) {
        let mut cells: Vec<Option<Box<dyn Cell>>> = Vec::new();
        for (Entrant { subject, open, .. }, outcome) in group.subjects.iter().zip(outcomes.iter_mut()) {
            // Who failed once is not measured again: figures of a part of the run would not compare.
            let open = |outcome: &mut Outcome| {
                self.goes_on(outcome)?;
                not_beaten(group, subject, beaten).and_then(|()| open(self))
            };
            cells.push(if outcome.failure.is_some() { None } else { outcome.keep(open) });
        }
        let mut each =
            |index: usize, work: &mut dyn FnMut(&mut dyn Cell, &mut Outcome) -> Result<(), Failure>| {
                if let Some(cell) = &mut cells[index]
                    && outcomes[index].keep(|outcome| work(cell.as_mut(), outcome)).is_none()
                {
                    cells[index] = None;
                }
            };
        let count = group.subjects.len();
        for index in 0..count {
            each(index, &mut |cell, outcome| self.calibrate(cell, outcome));
        }
        for round in 0..self.options.rounds {
            if round > 0 && until.is_some_and(|until| Instant::now() > until) {
                break;
            }
            for place in 0..count {
                // Another one begins each time, and every other round goes backwards, so that no subject always
                // runs after the same neighbour.
                let place = if round % 2 == 0 { place } else { count - 1 - place };
                each((place + round + pass) % count, &mut |cell, outcome| {
                    let timing = cell.repetition(&self.team, outcome.ops.unwrap_or(LEAST_OPS))?;
                    let ns = timing.wall.as_secs_f64() * 1e9 / timing.ops.max(1) as f64;
                    outcome.ns_per_op.push(ns);
                    outcome.splits.extend(cell.split().map(|split| (ns, split)));
                    outcome.halves.extend(cell.halves().map(|halves| (ns, halves)));
                    Ok(())
                });
            }
        }
        for index in 0..count {
            each(index, &mut |cell, outcome| {
                let (samples, limit) = (self.options.samples, self.options.part);
                let median = stats::median(&mut outcome.ns_per_op.clone()).unwrap_or_default();
                // Who is too slow to time enough of them need not begin.
                if Duration::from_nanos((median * timer::ENOUGH as f64) as u64) < limit * group.threads as u32
                {
                    let ticks = cell.samples(&self.team, &self.timer, samples, limit)?;
                    outcome.samples.extend(ticks.into_iter().flatten());
                }
                cell.check(&self.team)
            });
        }
        for (Entrant { subject, .. }, outcome) in group.subjects.iter().zip(outcomes.iter()) {
            if let (Some(size), Some(Failure::OverBudget { .. })) = (group.size, &outcome.failure) {
                let least = beaten.entry(subject).or_insert((size, group.workload));
                if size < least.0 {
                    *least = (size, group.workload);
                }
            }
        }
    }

    /// When the next of `groups` groups is to be over. Not all take the same, so one may take the time of two.
    fn share(&self, groups: usize) -> Option<Instant> {
        let now = Instant::now();
        let left = self.options.until?.saturating_duration_since(now);
        Some(now + left * 2 / u32::try_from(groups.max(2)).unwrap_or(u32::MAX))
    }

    /// Fails where the run is over before the subject has been measured. One that has been keeps its figures.
    fn goes_on(&self, outcome: &Outcome) -> Result<(), Failure> {
        let reason = if (self.options.stop)() {
            "the run was stopped before"
        } else if self.options.until.is_some_and(|until| Instant::now() > until) {
            "the time of a quick run was over before"
        } else {
            return Ok(());
        };
        Err(if outcome.ns_per_op.is_empty() { Failure::Unsupported(reason.into()) } else { Failure::Over })
    }

    /// Finds out how many operations take about as long as a repetition is to take.
    fn calibrate(&self, cell: &mut dyn Cell, outcome: &mut Outcome) -> Result<(), Failure> {
        if outcome.ops.is_some() {
            return Ok(());
        }
        let (target, budget) = (self.options.repetition, self.options.budget);
        let mut ops = LEAST_OPS;
        loop {
            let started = Instant::now();
            let timing = cell.repetition(&self.team, ops)?;
            if started.elapsed() > budget {
                let what = format!("a repetition of {} operations", timing.ops);
                return Err(Failure::OverBudget { what, limit: budget });
            }
            if timing.wall >= target / 8 {
                let share = target.as_secs_f64() / timing.wall.as_secs_f64().max(1e-9);
                outcome.ops = Some(((timing.ops as f64 * share) as u64).max(LEAST_OPS));
                return Ok(());
            }
            ops = timing.ops.saturating_mul(4);
        }
    }

    fn summarise(&self, groups: &[Group], outcomes: Vec<Vec<Outcome>>) -> (Vec<Measurement>, Vec<Skipped>) {
        let (mut results, mut skipped) = (Vec::new(), Vec::new());
        for (group, outcomes) in groups.iter().zip(outcomes) {
            let Group { format, direction, workload, threads, .. } = *group;
            for (Entrant { subject, profile, .. }, mut outcome) in group.subjects.iter().zip(outcomes) {
                let profile = profile.clone();
                let ns = &mut outcome.ns_per_op;
                let (min, max) =
                    ns.iter().fold((f64::INFINITY, 0.0_f64), |(min, max), ns| (ns.min(min), ns.max(max)));
                match (outcome.failure, stats::median(ns)) {
                    (None, Some(median)) => results.push(Measurement {
                        format,
                        direction,
                        workload,
                        threads,
                        subject,
                        ns_per_op: rounded(median),
                        min: rounded(min),
                        max: rounded(max),
                        p99_99: self.timer.p99_99(&outcome.samples).map(rounded),
                        profile,
                        split: typical(median, &outcome.splits),
                        halves: halves_of(median, &outcome.halves),
                    }),
                    (failure, _) => {
                        let reason = failure.map_or("no repetition was asked for".into(), |f| f.to_string());
                        skipped.push(Skipped {
                            format,
                            direction,
                            workload,
                            threads,
                            subject,
                            profile,
                            reason,
                        });
                    }
                }
            }
        }
        (results, skipped)
    }
}

impl Outcome {
    /// The result of `work`; a failure is kept instead.
    fn keep<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Option<T> {
        match work(self) {
            Ok(result) => Some(result),
            Err(Failure::Over) => None,
            Err(failure) => {
                self.failure = Some(failure);
                None
            }
        }
    }
}

/// Fails where the group is larger than one that the subject was too slow for.
fn not_beaten(group: &Group, subject: &str, beaten: &Beaten) -> Result<(), Failure> {
    match (group.size, beaten.get(subject)) {
        (Some(size), Some((least, workload))) if size > *least => {
            Err(Failure::Unsupported(format!("too slow already for {workload}, which is smaller")))
        }
        _ => Ok(()),
    }
}

/// What went into the repetition that took `median`, so that its parts add up; but of what is no part of it, the
/// median too.
fn typical(median: f64, splits: &[(f64, Split)]) -> Option<Split> {
    let (_, split) = splits.iter().find(|(ns, _)| *ns == median)?;
    let mut no_flush: Vec<f64> = splits.iter().filter_map(|(_, split)| split.no_flush).collect();
    Some(Split {
        wait_ns: rounded(split.wait_ns),
        lock_ns: rounded(split.lock_ns),
        work_ns: rounded(split.work_ns),
        submissions_per_op: (split.submissions_per_op * 1e5).round() / 1e5,
        requests_per_op: (split.requests_per_op * 1e5).round() / 1e5,
        hardware_wait_ns_per_op: rounded(split.hardware_wait_ns_per_op),
        no_flush: stats::median(&mut no_flush).map(rounded),
    })
}

/// How the repetition that took `median` was divided, so that the parts add up.
fn halves_of(median: f64, halves: &[(f64, Halves)]) -> Option<Halves> {
    let (_, halves) = halves.iter().find(|(ns, _)| *ns == median)?;
    let (map_ns, unmap_ns) = (rounded(halves.map_ns), rounded(halves.unmap_ns));
    Some(Halves { map_ns, unmap_ns, ..*halves })
}

/// To a hundredth of a nanosecond: what lies beyond is noise.
fn rounded(ns: f64) -> f64 {
    (ns * 100.0).round() / 100.0
}
