//! Allocation of I/O virtual addresses, beside Linux's allocator and the crates of the registry.
//!
//! One operation is one allocation and one free (except where a [workload](workload::Shape) says otherwise).
//! Random replacement is measured in an aged space: each live range was replaced about twice before, as far as
//! the time for it allows. Very slow subjects age less, which flatters them.
//!
//! Sizes are in pages of 4 KiB, and a space has 48 bits of address unless the workload says otherwise.

pub(crate) mod allocator;
mod check;
mod cross;
mod first;
pub(crate) mod linux;
pub(crate) mod portcullis;
#[cfg(feature = "rivals")]
mod rivals;
mod stream;
mod subject;
mod tree;
#[cfg(test)]
mod whole;
pub mod workload;

use std::sync::Arc;

use subject::Subject;
pub use subject::{SUBJECTS, SubjectInfo};
pub use tree::HoleTree;
pub use workload::WORKLOADS;
use workload::{Plans, Shape, Workload};

use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::request::choose;
pub use crate::request::{BenchError, Request};
pub use crate::rival::RivalError;
use crate::runner::{Entrant, Failure, Group, Open, Progress, Runner};
use crate::team::Team;
use crate::timer::OpTimer;

/// Measures, telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report.
pub fn run(request: &Request, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let workloads = choose("workload", WORKLOADS, |workload| workload.name, &request.workloads, |_| true)?;
    let by_default = |subject: &&SubjectInfo| request.rival.is_some() || subject.name != subject::LINUX;
    let wanted = choose("subject", &SUBJECTS, |subject| subject.name, &request.subjects, by_default)?;
    if request.rival.is_none() && wanted.iter().any(|subject| subject.name == subject::LINUX) {
        return Err(BenchError::NoRival);
    }
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
        profiles: Vec::new(),
        limits,
        timer: runner.timer.figures(),
        results,
        skipped,
    })
}

fn group(workload: &Workload, threads: usize, subjects: &[Subject]) -> Group {
    let plans = Arc::new(Plans::default());
    let open = |subject: &Subject| -> Entrant {
        let (workload, plans, subject_open) = (*workload, Arc::clone(&plans), Arc::clone(&subject.open));
        let open: Open = Box::new(move |runner| {
            if !workload.threads.contains(&threads) {
                let counts: Vec<String> = workload.threads.iter().map(usize::to_string).collect();
                let reason = format!("this workload is defined for {} threads only", counts.join(" or "));
                return Err(Failure::Unsupported(reason));
            }
            subject_open(runner, workload.shape, threads, &plans)
        });
        Entrant { subject: subject.name, profile: None, open }
    };
    let size = match workload.shape {
        Shape::Replace { live } => Some(live * threads),
        _ => None,
    };
    Group {
        format: None,
        direction: None,
        workload: workload.name,
        threads,
        size,
        subjects: subjects.iter().map(open).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A subject that is too slow with some live ranges is too slow with more.
    #[test]
    fn a_group_is_as_large_as_the_ranges_that_are_live() {
        let sizes = WORKLOADS.map(|workload| {
            let group = group(&workload, 2, &[]);
            assert_eq!((group.workload, group.threads, group.format), (workload.name, 2, None));
            (workload.name, group.size)
        });
        let sized: Vec<_> = sizes.into_iter().filter_map(|(name, size)| Some((name, size?))).collect();
        let expected = [
            ("mix64-4096", 2 * 4096),
            ("random-1k", 2 << 10),
            ("random-16k", 32 << 10),
            ("random-64k", 128 << 10),
            ("random-1m", 2 << 20),
        ];
        assert_eq!(sized, expected);
    }
}
