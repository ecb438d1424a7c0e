//! The whole way of a mapping: a map and an unmap as a driver calls them, beside Linux's parts composed as its DMA layer
//! composes them, and beside the library's own parts with nothing around them.
//!
//! All threads map in *one* domain, each memory of its own, or each in a domain of its own. One operation is a map and an
//! unmap; with more than one mapping live, the unmap is of the oldest.

mod lanes;
mod linux;
mod machine;
pub mod old;
mod ours;
mod parts;
mod subject;
#[cfg(test)]
mod tests;
mod turns;
mod workload;

use std::path::PathBuf;
use std::sync::Arc;

pub use lanes::Lanes;
pub use machine::AtOnce;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;
use subject::Maker;
pub use subject::{SUBJECTS, SubjectInfo, designs};
use turns::Turns;
use workload::Case;
pub use workload::{Kind, MOST_THREADS, THREADS, Workload, workloads};

pub use crate::lane::Lane;
use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::request::choose;
pub use crate::request::{BenchError, Request};
use crate::runner::{Entrant, Failure, Group, Open, Options, Progress, Runner};
use crate::team::Team;
use crate::timer::OpTimer;

/// What of this benchmark can be chosen besides.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Hardware whose waits to make, in real time: its name, or a TOML file; `none` answers at once.
    pub profile: String,
    /// The shared library with Linux's page tables ([`Request::rival`] is that with its allocator).
    pub rival_pt: Option<PathBuf>,
    /// Each thread maps in a domain of its own.
    pub own_domains: bool,
}

/// A run of some minutes.
pub fn full() -> Options {
    Options { passes: 2, rounds: 5, ..Options::full() }
}

/// A run of less than 30 seconds, with more noise.
pub fn quick() -> Options {
    Options {
        repetition: std::time::Duration::from_millis(1),
        part: std::time::Duration::from_millis(2),
        samples: 2_000,
        ..Options::quick()
    }
}

/// The subject that the library is compared with, and the one that shows what can be reached.
pub const LAYOUT: (&str, &str, &str) = (subject::OURS, subject::LINUX, subject::PARTS);

/// Measures, telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report where it was named.
pub fn run(request: &Request, choice: &Choice, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let all = workloads().iter().copied();
    let workloads = choose("workload", all, |workload| workload.name, &request.workloads, |_| true)?;
    let libraries = request.rival.as_deref().zip(choice.rival_pt.as_deref());
    let by_default =
        |subject: &SubjectInfo| subject.old().is_none() && (libraries.is_some() || !subject.is_linux());
    let subjects = choose("subject", SUBJECTS, |subject| subject.name, &request.subjects, by_default)?;
    let profile = Profile::load(&choice.profile)?;
    let threads = if request.threads.is_empty() { THREADS.to_vec() } else { request.threads.clone() };
    let most_threads = threads.iter().copied().max().unwrap_or(1).clamp(1, MOST_THREADS);
    let team = Team::sharing_cores(most_threads)?;
    let asks_for_linux = subjects.iter().any(SubjectInfo::is_linux);
    let linux = match libraries {
        None if asks_for_linux => return Err(BenchError::NoRival),
        Some((iova, pgtable)) if asks_for_linux => {
            Some(linux::Libraries::open(iova, pgtable, team.cores().max())?)
        }
        _ => None,
    };
    let runner = Runner { team, timer: OpTimer::calibrated(), options: request.options };
    let limits = Limits::measure(&runner.team).map_err(BenchError::Limits)?;
    let machine = Machine::here();
    let (name, profiles) = (profile.name.clone(), vec![profile.clone()]);
    let (platform, timer) = (StdPlatform::new(), runner.timer.clone());
    let maker = Arc::new(Maker { platform, timer, profile, linux });
    let mut groups = Vec::new();
    for workload in &workloads {
        for &threads in &threads {
            // A subject that does not do a workload is no news unless it was asked for.
            let wanted = |subject: &&SubjectInfo| !request.subjects.is_empty() || subject.does(workload.kind);
            let subjects: Vec<SubjectInfo> = subjects.iter().filter(wanted).copied().collect();
            let case = Case {
                workload: *workload,
                threads,
                live: request.options.tiny.map_or(workload.live, |tiny| workload.live.min(tiny)),
                own_domains: choice.own_domains,
                crowded: threads > machine.cpus,
            };
            groups.push(group(case, &subjects, &maker));
        }
    }
    let (mut results, skipped) = runner.run(&groups, progress);
    for result in &mut results {
        result.profile = Some(name.clone());
    }
    let timer = runner.timer.figures();
    Ok(Report { bench: "path", machine, profiles, limits, timer, results, skipped })
}

fn group(case: Case, subjects: &[SubjectInfo], maker: &Arc<Maker>) -> Group {
    let entrant = |subject: &SubjectInfo| {
        let (maker, subject) = (Arc::clone(maker), *subject);
        let open: Open = Box::new(move |runner| {
            if case.threads > MOST_THREADS {
                return Err(Failure::Unsupported(format!(
                    "no more than {MOST_THREADS} threads are possible"
                )));
            }
            Ok(Box::new(Turns::open(&runner.team, &maker, &subject, case)?))
        });
        Entrant { subject: subject.name, profile: None, open }
    };
    Group {
        format: None,
        direction: None,
        workload: case.workload.name,
        threads: case.threads,
        size: None,
        subjects: subjects.iter().map(entrant).collect(),
    }
}
