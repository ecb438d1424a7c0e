//! Invalidations: what unmaps cost with their waits and their locks, beside the designs before.
//!
//! All threads unmap single pages of *one* address space at once, which is the hard case, through hardware that
//! makes them wait in real time as a profile says. Every subject uses the same page table, allocator of addresses
//! and hardware; they differ in how unmaps wait for it, and in what they lock meanwhile. One operation is one unmap;
//! the maps between are not timed.

mod check;
pub(crate) mod hardware;
mod ours;
pub(crate) mod parts;
mod rivals;
mod spent;
mod subject;
mod table;
#[cfg(test)]
mod tests;
mod turns;
mod workload;

use std::sync::Arc;

use hardware::Timing;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;
use subject::Maker;
pub use subject::{SUBJECTS, SubjectInfo};
pub use table::render;
use turns::Turns;
pub use workload::{MOST_THREADS, Shape, THREADS, WORKLOADS, Workload};

use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::request::choose;
pub use crate::request::{BenchError, Request};
use crate::runner::{Entrant, Failure, Group, Open, Options, Progress, Runner};
use crate::team::Team;
use crate::timer::OpTimer;

/// A run of some minutes.
pub fn full() -> Options {
    Options { rounds: 5, ..Options::full() }
}

/// A run of some seconds.
pub fn quick() -> Options {
    Options { rounds: 5, ..Options::quick() }
}

/// Measures against hardware as `profile` (the name of one that ships with Portcullis, or a TOML file) describes it,
/// telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report where it was named.
pub fn run(request: &Request, profile: &str, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let workloads = choose("workload", WORKLOADS, |workload| workload.name, &request.workloads, |_| true)?;
    let subjects = choose("subject", SUBJECTS, |subject| subject.name, &request.subjects, |_| true)?;
    let profile = Profile::load(profile)?;
    let threads = if request.threads.is_empty() { THREADS.to_vec() } else { request.threads.clone() };
    let most_threads = threads.iter().copied().max().unwrap_or(1).clamp(1, MOST_THREADS);
    let team = Team::sharing_cores(most_threads)?;
    let runner = Runner { team, timer: OpTimer::calibrated(), options: request.options };
    let limits = Limits::measure(&runner.team).map_err(BenchError::Limits)?;
    let machine = Machine::here();
    let platform = StdPlatform::new();
    let mut groups = Vec::new();
    for workload in &workloads {
        for threads in &threads {
            let maker = Maker {
                platform: platform.clone(),
                timer: runner.timer.clone(),
                timing: Timing::of(&profile),
                costs: profile.waits.costs(),
                crowded: *threads > machine.cpus,
            };
            // Who does not do a workload is no news unless it was asked for.
            let wanted =
                |subject: &&SubjectInfo| !request.subjects.is_empty() || subject.does(workload.shape);
            let subjects: Vec<SubjectInfo> = subjects.iter().filter(wanted).copied().collect();
            groups.push(group(workload, *threads, &subjects, maker));
        }
    }
    let (mut results, skipped) = runner.run(&groups, progress);
    for result in &mut results {
        result.profile = Some(profile.name.clone());
    }
    let (timer, profiles) = (runner.timer.figures(), vec![profile]);
    Ok(Report { bench: "invalidation", machine, profiles, limits, timer, results, skipped })
}

fn group(workload: &Workload, threads: usize, subjects: &[SubjectInfo], maker: Maker) -> Group {
    let maker = Arc::new(maker);
    let open = |subject: &SubjectInfo| -> Entrant {
        let (maker, workload, subject) = (Arc::clone(&maker), *workload, *subject);
        let name = subject.name;
        let open: Open = Box::new(move |runner| {
            if threads > MOST_THREADS {
                return Err(Failure::Unsupported(format!(
                    "no more than {MOST_THREADS} threads are possible"
                )));
            }
            Ok(Box::new(Turns::open(&runner.team, &maker, &subject, workload.shape, threads)?))
        });
        Entrant { subject: name, profile: None, open }
    };
    Group {
        format: None,
        direction: None,
        workload: workload.name,
        threads,
        size: None,
        subjects: subjects.iter().map(open).collect(),
    }
}
