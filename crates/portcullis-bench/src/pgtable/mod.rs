//! Page tables in the formats of hardware, beside Linux's.
//!
//! One operation is one map, one unmap or one translation, in tables that exist already. What is mapped must
//! be unmapped before it can be mapped again: both are done in turns, a few hundred or thousand operations at a
//! time, and the clock runs for one of the two only. Two threads work on neighbouring parts of the same tables,
//! and are not kept in step: one may map while the other unmaps.

mod check;
mod format;
pub(crate) mod linux;
pub(crate) mod memory;
mod ours;
mod stores;
mod subject;
pub(crate) mod table;
mod turns;
pub mod work;

use std::sync::Arc;
use std::time::Duration;

use format::AnyFormat;
use subject::{ByDefault, Maker};
pub use subject::{SUBJECTS, SubjectInfo};
use turns::Turns;
use work::{Pattern, THREADS, WORKLOADS, Workload};

use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::request::choose;
pub use crate::request::{BenchError, Request};
use crate::runner::{Entrant, Failure, Group, Open, Options, Progress, Runner};
use crate::team::Team;
use crate::timer::OpTimer;

/// The names of the formats.
pub fn formats() -> Vec<&'static str> {
    format::formats().iter().map(|format| format.name()).collect()
}

/// What to measure besides what every benchmark is asked for.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Formats by name, in any order; empty for all.
    pub formats: Vec<String>,
    /// Where no subject is named: those, too, whose changes are written back from the caches.
    pub incoherent: bool,
}

/// A run of some minutes: there are many formats, so each gets less time than other benchmarks give.
pub fn full() -> Options {
    Options { repetition: Duration::from_millis(5), samples: 20_000, ..Options::full() }
}

/// A run of less than 30 seconds.
pub fn quick() -> Options {
    Options { repetition: Duration::from_millis(1), samples: 10_000, rounds: 5, ..Options::quick() }
}

/// Measures, telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report.
pub fn run(request: &Request, choice: &Choice, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let formats = choose("format", format::formats(), |format| format.name(), &choice.formats, |_| true)?;
    let workloads = choose("workload", WORKLOADS, |workload| workload.name, &request.workloads, |_| true)?;
    let by_default = |subject: &SubjectInfo| {
        let default = match subject.default {
            ByDefault::Always => true,
            ByDefault::Incoherent => choice.incoherent,
            ByDefault::Never => false,
        };
        default && (request.rival.is_some() || !subject.is_linux())
    };
    let subjects = choose("subject", SUBJECTS, |subject| subject.name, &request.subjects, by_default)?;
    if request.rival.is_none() && subjects.iter().any(SubjectInfo::is_linux) {
        return Err(BenchError::NoRival);
    }
    let threads = if request.threads.is_empty() { THREADS.to_vec() } else { request.threads.clone() };
    let most_threads = threads.iter().copied().max().unwrap_or(1).max(1);
    let runner =
        Runner { team: Team::new(most_threads)?, timer: OpTimer::calibrated(), options: request.options };
    let maker = Arc::new(Maker::new(request.rival.as_deref())?);
    let mut groups = Vec::new();
    for format in &formats {
        for workload in &workloads {
            groups.extend(threads.iter().map(|threads| group(format, workload, *threads, &subjects, &maker)));
        }
    }
    let limits = Limits::measure(&runner.team).map_err(BenchError::Limits)?;
    let (results, skipped) = runner.run(&groups, progress);
    Ok(Report {
        bench: "pgtable",
        machine: Machine::here(),
        profiles: Vec::new(),
        limits,
        timer: runner.timer.figures(),
        results,
        skipped,
    })
}

fn group(
    format: &Arc<dyn AnyFormat>,
    workload: &Workload,
    threads: usize,
    subjects: &[SubjectInfo],
    maker: &Arc<Maker>,
) -> Group {
    let open = |subject: &SubjectInfo| -> Entrant {
        let (format, workload, subject) = (Arc::clone(format), *workload, *subject);
        let maker = Arc::clone(maker);
        let name = subject.name;
        let open: Open = Box::new(move |runner| {
            if !THREADS.contains(&threads) {
                return Err(Failure::Unsupported("this workload is defined for 1 or 2 threads only".into()));
            }
            let pattern = Pattern::new(workload.shape, &format.geometry(), threads, runner.options.tiny)?;
            let tables = maker.tables(&subject, &*format, &pattern)?;
            let turns = Turns::open(&runner.team, tables, pattern, workload.operation, &runner.timer)?;
            Ok(Box::new(turns))
        });
        Entrant { subject: name, profile: None, open }
    };
    Group {
        format: Some(format.name()),
        direction: None,
        workload: workload.name,
        threads,
        size: None,
        subjects: subjects.iter().map(open).collect(),
    }
}
