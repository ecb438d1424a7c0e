//! `portcullis scale`.

#[cfg(test)]
mod documented;
pub mod report;

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

use portcullis_model::scale::{
    Copies, Machine, Mapping, NAMES, Operations, POLICIES, Policy, Request, Workload, run,
};
use portcullis_trace::replay::{Mode, Profile, ProfileError};
use portcullis_trace::{Chunk, OpKind, Printable, ReadOptions, Trace, TraceError};

use crate::args::{Scale, WORK_NS};
use crate::calibration::{Calibration, CalibrationError};
use crate::verdict::nothing_told;
use crate::{look, print};
use report::{Row, Table};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("{} is neither a file nor a workload: name a recording, or {}", Printable(workload), NAMES.join(", "))]
    NoWorkload { workload: String },
    #[error("--work is for recordings: the workload {workload} says by itself what its CPUs do besides")]
    OwnWork { workload: String },
    #[error("{}: nothing is mapped in this recording", Printable(.0))]
    Empty(String),
    #[error("{0}")]
    Simulation(String),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// The most mappings of a recording that CPUs repeat.
const MAPPINGS: usize = 4096;

/// The most pages of a mapping: beyond, nothing was measured, and costs go on in a straight line.
const MOST_PAGES: u64 = 1 << 20;

/// CPUs of a socket, unless it is said otherwise.
const PER_SOCKET: u32 = 64;

/// Runs the command and prints what it found.
pub fn run_command(arguments: &Scale) -> Result<ExitCode, CommandError> {
    let (tables, profile, calibration) = tables(arguments)?;
    let text = if arguments.json {
        report::json(&tables, &profile, &calibration, arguments).map_err(std::io::Error::from)?
    } else {
        report::render(&tables, &profile, &calibration, look::is_unicode())
    };
    print(&if arguments.json { text } else { look::shown(&text) })?;
    Ok(ExitCode::SUCCESS)
}

/// Simulates what is asked for, a table for each number of CPUs.
fn tables(arguments: &Scale) -> Result<(Vec<Table>, Profile, Calibration), CommandError> {
    let profile = Profile::load(&arguments.profile)?;
    let calibration = match &arguments.calibration {
        Some(path) => Calibration::load(path)?,
        None => Calibration::default(),
    };
    let operations = Operations::measured().map_err(CommandError::Simulation)?;
    let mut policies: Vec<&Policy> = POLICIES.iter().filter(|policy| !policy.old).collect();
    if !arguments.policy.is_empty() {
        policies =
            POLICIES.iter().filter(|known| arguments.policy.iter().any(|name| name == known.name)).collect();
    }
    let recorded = if NAMES.contains(&arguments.workload.as_str()) {
        if arguments.work.is_some() {
            return Err(CommandError::OwnWork { workload: arguments.workload.clone() });
        }
        None
    } else if !Path::new(&arguments.workload).exists() {
        return Err(CommandError::NoWorkload { workload: arguments.workload.clone() });
    } else {
        Some(recording(Path::new(&arguments.workload), arguments.work.unwrap_or(WORK_NS))?)
    };
    let (recorded, told) =
        recorded.map_or((None, Told::default()), |(workload, told)| (Some(workload), told));
    if !told.copies {
        policies.retain(|policy| !COPYING.contains(&policy.name));
    }
    let mut cpus: Vec<u32> = arguments.cpus.iter().map(|cpus| u32::from(*cpus)).collect();
    cpus.sort_unstable();
    cpus.dedup();
    let mut tables = Vec::new();
    for cpus in cpus {
        let machine = machine(&profile, &calibration, cpus, arguments.sockets);
        let built_in = || Workload::named(&arguments.workload, cpus);
        let mut workload = recorded.clone().or_else(built_in).ok_or(CommandError::Empty(String::new()))?;
        // Nothing keeps CPUs waiting in a recording but what the library does.
        if recorded.is_some() {
            workload.device.count = cpus;
        }
        let all = run(&machine, &workload, &POLICIES[0], &operations).map_err(CommandError::Simulation)?;
        let row = |policy: &&'static Policy| {
            let outcome = run(&machine, &workload, policy, &operations).map_err(CommandError::Simulation)?;
            Ok(Row::new(policy, outcome, &all))
        };
        let rows = policies.iter().map(row).collect::<Result<Vec<Row>, CommandError>>()?;
        tables.push(Table {
            machine,
            workload,
            rows,
            copies_known: told.copies,
            nothing_told: told.nothing.clone(),
        });
    }
    Ok((tables, profile, calibration))
}

fn machine(profile: &Profile, calibration: &Calibration, cpus: u32, sockets: Option<u8>) -> Machine {
    let waits = &profile.waits;
    let sockets = sockets.map_or(cpus.div_ceil(PER_SOCKET), u32::from).clamp(1, cpus);
    Machine {
        cpus,
        sockets,
        near_ns: calibration.near_ns.value,
        far_ns: calibration.far_ns.value,
        submission_ns: waits.doorbell.ns + waits.completion.ns,
        request_ns: waits.descriptor.ns,
        in_flight: 1,
        map_request_ns: waits.map_request.ns,
        map_page_ns: waits.map_page.ns,
        unmap_page_ns: waits.unmap_page.ns,
        walk_read_ns: calibration.walk_read_ns.value,
        copies: Copies {
            hot_ns: calibration.copy_hot_ns.value,
            cold_ns: calibration.copy_cold_ns.value,
            remote_ns: calibration.copy_remote_ns.value,
            socket_gb_per_s: calibration.socket_copy_gb_per_s.value,
        },
    }
}

/// The policies that copy.
const COPYING: [&str; 3] = [Mode::Bounce.name(), Mode::Adaptive.name(), Mode::Swiotlb.name()];

/// What a recording tells; all of it, where there is none.
#[derive(Clone)]
struct Told {
    /// What policies that copy would copy.
    copies: bool,
    /// Why it tells no cost at all, if so.
    nothing: Option<String>,
}

impl Default for Told {
    fn default() -> Self {
        Self { copies: true, nothing: None }
    }
}

/// The mappings of a recording that end in it, each with `work_ns` of work around it, and a device that keeps up.
fn recording(path: &Path, work_ns: u64) -> Result<(Workload, Told), CommandError> {
    let mut trace = Trace::open(path, ReadOptions::default())?;
    let (mut chunk, mut live, mut requests) = (Chunk::default(), HashMap::new(), Vec::new());
    let mut more = true;
    while more && requests.len() < MAPPINGS {
        more = trace.next_chunk(&mut chunk, 100_000)?;
        for op in &chunk.ops {
            match &op.kind {
                OpKind::Map { id, segments, .. } => {
                    let segments = chunk.segments_of(segments);
                    let bytes: u64 = segments.iter().map(|segment| segment.len).sum();
                    let pages = |first: u64, len: u64| (first % 4096 + len).div_ceil(4096);
                    let pages: u64 = segments.iter().map(|segment| pages(segment.phys, segment.len)).sum();
                    let shared = segments.iter().any(|segment| (segment.phys | segment.len) % 4096 != 0);
                    live.insert(*id, Mapping { pages: pages.clamp(1, MOST_PAGES), bytes, shared });
                }
                OpKind::Unmap { id } if requests.len() < MAPPINGS => {
                    let request = |mapping| Request { work_ns: work_ns as f64, mappings: vec![mapping] };
                    requests.extend(live.remove(id).map(request));
                }
                _ => {}
            }
        }
    }
    let name = path.display().to_string();
    if requests.is_empty() {
        return Err(CommandError::Empty(name));
    }
    let besides = match work_ns {
        0 => {
            "no CPU time besides (--work 0): a worst case, as no server does nothing but map and unmap".into()
        }
        _ => format!("{} ns of CPU time besides for each (--work)", look::count(work_ns)),
    };
    let about = format!(
        "{} mappings of the recording in turn on each CPU, {besides}, devices that keep up",
        look::count(requests.len() as u64)
    );
    let keeps_up = Workload::named("swiotlb", 1).map(|workload| workload.device);
    let device = keeps_up.ok_or_else(|| CommandError::Empty(name.clone()))?;
    let summary = trace.summary();
    let nothing = || nothing_told(summary.hidden(), summary.mappings());
    let told = Told { copies: summary.copies_known(), nothing: (!summary.costs_known()).then(nothing) };
    Ok((Workload { name, about, requests, depth: 32, device }, told))
}
