//! Bounce buffers: what it takes to map and unmap through them, beside a bare copy, Linux's swiotlb, the design before
//! system 2, and mapping without a bounce.
//!
//! All threads use *one* pool at once, each with buffers of its own. One operation is a map and an unmap of a buffer, with
//! the copies that the direction takes; no device uses the data meanwhile. Before and after all that is timed, a device
//! does, and its driver looks (`check`).

mod bare;
mod check;
mod linux;
pub(crate) mod memory;
mod pool;
mod requests;
pub(crate) mod rotating;
mod subject;
mod swiotlb;
mod table;
#[cfg(test)]
mod tests;
mod turns;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::{Profile, built_in_names};
use subject::{Maker, STRICT};
pub use subject::{SUBJECTS, SubjectInfo};
pub use table::render;
use turns::Turns;
use workload::Case;
pub use workload::{MOST_DEPTH, MOST_THREADS, Shape, THREADS, WORKLOADS, Way, Workload};

use crate::limits::Limits;
use crate::machine::Machine;
use crate::report::Report;
use crate::request::choose;
pub use crate::request::{BenchError, Request};
use crate::runner::{Entrant, Failure, Group, Open, Options, Progress, Runner};
use crate::team::Team;
use crate::timer::OpTimer;

/// What of this benchmark can be chosen besides.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Hardware for `strict`, each by its name or as a TOML file; empty for all that ship with Portcullis.
    pub profiles: Vec<String>,
    /// Mappings of each thread that are in use at a time, [`MOST_DEPTH`] at most. More than one: what a map and an unmap
    /// take is told apart.
    pub depth: usize,
}

impl Default for Choice {
    fn default() -> Self {
        Self { profiles: Vec::new(), depth: 1 }
    }
}

/// A run of about two minutes, without Linux's code.
pub fn full() -> Options {
    Options {
        passes: 2,
        // Many that are short: on a machine that others use, most fall between two disturbances.
        rounds: 8,
        repetition: Duration::from_millis(1),
        part: Duration::from_millis(10),
        samples: 20_000,
        ..Options::full()
    }
}

/// A run of less than 30 seconds, with more noise.
pub fn quick() -> Options {
    Options { repetition: Duration::from_millis(1), part: Duration::from_millis(3), ..Options::quick() }
}

/// Measures, telling `progress` before each workload.
///
/// # Errors
/// [`BenchError`]; a subject that cannot do a workload is no error, but told in the report where it was named.
pub fn run(request: &Request, choice: &Choice, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    let workloads = choose("workload", WORKLOADS, |workload| workload.name, &request.workloads, |_| true)?;
    let by_default = |subject: &SubjectInfo| request.rival.is_some() || subject.name != subject::LINUX;
    let subjects = choose("subject", SUBJECTS, |subject| subject.name, &request.subjects, by_default)?;
    let asks_for_linux = subjects.iter().any(|subject| subject.name == subject::LINUX);
    let linux = match &request.rival {
        None if asks_for_linux => return Err(BenchError::NoRival),
        Some(path) if asks_for_linux => Some(linux::Library::open(path)?),
        _ => None,
    };
    let names = if choice.profiles.is_empty() {
        built_in_names()
    } else {
        choice.profiles.iter().map(String::as_str).collect()
    };
    let profiles = names.into_iter().map(Profile::load).collect::<Result<Vec<_>, _>>()?;
    let threads = if request.threads.is_empty() { THREADS.to_vec() } else { request.threads.clone() };
    let most_threads = threads.iter().copied().max().unwrap_or(1).clamp(1, MOST_THREADS);
    let team = Team::sharing_cores(most_threads)?;
    let runner = Runner { team, timer: OpTimer::calibrated(), options: request.options };
    let limits = Limits::measure(&runner.team).map_err(BenchError::Limits)?;
    let machine = Machine::here();
    let maker = Arc::new(Maker {
        platform: StdPlatform::new(),
        timer: runner.timer.clone(),
        cores: machine.cpus,
        linux,
        last_core: runner.team.cores().max(),
    });
    let mut groups = Vec::new();
    for workload in &workloads {
        // Who does not do a workload is no news unless it was asked for.
        let wanted = |subject: &&SubjectInfo| !request.subjects.is_empty() || subject.does(workload.shape);
        let subjects: Vec<SubjectInfo> = subjects.iter().filter(wanted).copied().collect();
        for way in workload.shape.directions() {
            for &threads in &threads {
                let (shape, depth, crowded) = (workload.shape, choice.depth, threads > machine.cpus);
                let case = Case { shape, way: *way, threads, depth, crowded };
                groups.push(group(workload, case, &subjects, &profiles, &maker));
            }
        }
    }
    let (results, skipped) = runner.run(&groups, progress);
    let timer = runner.timer.figures();
    Ok(Report { bench: "bounce", machine, profiles, limits, timer, results, skipped })
}

fn group(
    workload: &Workload,
    case: Case,
    subjects: &[SubjectInfo],
    profiles: &[Profile],
    maker: &Arc<Maker>,
) -> Group {
    let entrant = |subject: SubjectInfo, profile: &Profile| {
        let (maker, profile) = (Arc::clone(maker), profile.clone());
        let name = (subject.name == STRICT).then(|| profile.name.clone());
        let open: Open = Box::new(move |runner| {
            if case.threads > MOST_THREADS || !(1..=MOST_DEPTH).contains(&case.depth) {
                let reason =
                    format!("no more than {MOST_THREADS} threads and {MOST_DEPTH} mappings are possible");
                return Err(Failure::Unsupported(reason));
            }
            Ok(Box::new(Turns::open(&runner.team, &maker, &subject, case, &profile)?))
        });
        Entrant { subject: subject.name, profile: name, open }
    };
    // Only `strict` waits for hardware all the time. The pool does while it has not all buffers yet: for the last one's.
    let on = |subject: &SubjectInfo| {
        if subject.name == STRICT { profiles } else { &profiles[profiles.len() - 1..] }
    };
    let entrants = |subject: &SubjectInfo| -> Vec<Entrant> {
        on(subject).iter().map(|profile| entrant(*subject, profile)).collect()
    };
    Group {
        format: None,
        direction: case.way.map(Way::name),
        workload: workload.name,
        threads: case.threads,
        size: None,
        subjects: subjects.iter().flat_map(entrants).collect(),
    }
}

#[cfg(test)]
mod groups {
    use super::*;

    /// Only subjects that always wait for hardware are measured on each.
    #[test]
    fn strict_mappings_are_measured_on_each_profile() {
        let maker = Maker {
            platform: StdPlatform::new(),
            timer: OpTimer::calibrated(),
            cores: 2,
            linux: None,
            last_core: None,
        };
        let profiles = ["none", "vtd", "virtio-iommu"].map(|name| Profile::load(name).unwrap());
        let case =
            Case { shape: Shape::Pool(4096), way: Some(Way::Both), threads: 3, depth: 1, crowded: true };
        let group = group(&WORKLOADS[7], case, &SUBJECTS, &profiles, &Arc::new(maker));
        assert_eq!((group.workload, group.direction, group.threads), ("pool-4k", Some("both"), 3));
        let entrants: Vec<_> =
            group.subjects.iter().map(|entrant| (entrant.subject, entrant.profile.as_deref())).collect();
        let strict = ["none", "vtd", "virtio-iommu"].map(|name| ("strict", Some(name)));
        let others = ["portcullis", "copy", "linux", "rotating"].map(|name| (name, None));
        assert_eq!(entrants, [&others[..], &strict[..]].concat());
    }
}
