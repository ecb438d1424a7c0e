//! Allocation of I/O virtual addresses, beside Linux's allocator and the crates of the registry.
//!
//! One operation is one allocation and one free (except where a [workload](workload::Shape) says otherwise).
//! Random replacement is measured in an aged space: each live range was replaced about twice before, as far as
//! the time for it allows. Very slow subjects age less, which flatters them.
//!
//! Sizes are in pages of 4 KiB, and a space has 48 bits of address unless the workload says otherwise.

mod allocator;
mod check;
mod cross;
mod first;
mod linux;
mod portcullis;
#[cfg(feature = "rivals")]
mod rivals;
mod stream;
mod subject;
pub mod workload;

use std::path::PathBuf;
use std::sync::Arc;

pub use linux::RivalError;
use subject::Subject;
pub use subject::{SUBJECTS, SubjectInfo};
pub use workload::WORKLOADS;
use workload::{Plans, Shape, Workload};

use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::runner::{Failure, Group, Open, Options, Progress, Runner};
use crate::team::{Team, TeamError};
use crate::timer::OpTimer;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Request {
    /// Workloads by name, in any order; empty for all.
    pub workloads: Vec<String>,
    /// Subjects by name, in any order; empty for all (Linux's only with a `rival`).
    pub subjects: Vec<String>,
    /// Numbers of threads; empty for those with which each workload makes sense.
    pub threads: Vec<usize>,
    /// The shared library that holds Linux's allocator.
    pub rival: Option<PathBuf>,
    /// How much to measure.
    pub options: Options,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A name that no workload has.
    #[error("no workload {name:?}; there are {}", names(WORKLOADS.iter().map(|workload| workload.name)))]
    NoSuchWorkload {
        /// What was asked for.
        name: String,
    },
    /// A name that no subject has.
    #[error("no subject {name:?}; there are {}", names(SUBJECTS.iter().map(|subject| subject.name)))]
    NoSuchSubject {
        /// What was asked for.
        name: String,
    },
    /// Linux's allocator was asked for, but not where it is.
    #[error("the subject `linux` needs the shared library that holds it")]
    NoRival,
    /// Linux's allocator cannot be used.
    #[error(transparent)]
    Rival(#[from] RivalError),
    /// There are no threads to measure with.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// Not even the machine's limits could be measured.
    #[error("the machine's limits cannot be measured: {0}")]
    Limits(Failure),
}

fn names(names: impl Iterator<Item = &'static str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// Measures, telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report.
pub fn run(request: &Request, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let workloads = workloads(&request.workloads)?;
    let wanted = wanted_subjects(request)?;
    let most_threads = request.threads.iter().copied().max().unwrap_or(2).max(1);
    let runner =
        Runner { team: Team::new(most_threads)?, timer: OpTimer::calibrated(), options: request.options };
    let subjects = subject::open(&wanted, request.rival.as_deref(), &runner.team)?;
    let groups: Vec<Group> = workloads
        .iter()
        .flat_map(|workload| {
            let threads =
                if request.threads.is_empty() { workload.threads.to_vec() } else { request.threads.clone() };
            let subjects = &subjects;
            threads.into_iter().map(move |threads| group(workload, threads, subjects))
        })
        .collect();
    let limits = Limits::measure(&runner.team).map_err(BenchError::Limits)?;
    let (results, skipped) = runner.run(&groups, progress);
    Ok(Report {
        bench: "iova",
        machine: Machine::here(),
        limits,
        timer: runner.timer.figures(),
        results,
        skipped,
    })
}

fn workloads(wanted: &[String]) -> Result<Vec<Workload>, BenchError> {
    if let Some(name) = wanted.iter().find(|name| WORKLOADS.iter().all(|w| w.name != **name)) {
        return Err(BenchError::NoSuchWorkload { name: name.clone() });
    }
    let chosen = |w: &&Workload| wanted.is_empty() || wanted.iter().any(|name| name == w.name);
    Ok(WORKLOADS.iter().filter(chosen).copied().collect())
}

fn wanted_subjects(request: &Request) -> Result<Vec<&'static SubjectInfo>, BenchError> {
    let wanted = &request.subjects;
    if let Some(name) = wanted.iter().find(|name| SUBJECTS.iter().all(|s| s.name != **name)) {
        return Err(BenchError::NoSuchSubject { name: name.clone() });
    }
    if request.rival.is_none() && wanted.iter().any(|name| name == subject::LINUX) {
        return Err(BenchError::NoRival);
    }
    let chosen = |subject: &&SubjectInfo| {
        let by_default = request.rival.is_some() || subject.name != subject::LINUX;
        if wanted.is_empty() { by_default } else { wanted.iter().any(|name| name == subject.name) }
    };
    Ok(SUBJECTS.iter().filter(chosen).collect())
}

fn group(workload: &Workload, threads: usize, subjects: &[Subject]) -> Group {
    let plans = Arc::new(Plans::default());
    let open = |subject: &Subject| -> (&'static str, Open) {
        let (workload, plans, subject_open) = (*workload, Arc::clone(&plans), Arc::clone(&subject.open));
        let open: Open = Box::new(move |runner| {
            if !workload.threads.contains(&threads) {
                let counts: Vec<String> = workload.threads.iter().map(usize::to_string).collect();
                let reason = format!("this workload is defined for {} threads only", counts.join(" or "));
                return Err(Failure::Unsupported(reason));
            }
            subject_open(runner, workload.shape, threads, &plans)
        });
        (subject.name, open)
    };
    let size = match workload.shape {
        Shape::Replace { live } => Some(live * threads),
        _ => None,
    };
    Group { workload: workload.name, threads, size, subjects: subjects.iter().map(open).collect() }
}
