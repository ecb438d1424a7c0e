//! `portcullis scale`.

#[cfg(test)]
mod documented;
pub mod report;

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

use portcullis_model::scale::{
    Copied, Copies, Machine, Mapping, NAMES, Operations, POLICIES, Policy, Request, Workload, run,
};
use portcullis_trace::replay::{Profile, ProfileError};
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
        policies.retain(|policy| policy.copied == Copied::Nothing);
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command};

    fn of(words: &[&str]) -> Result<Vec<Table>, CommandError> {
        let parsed = Arguments::try_parse_from([&["portcullis", "scale"], words].concat()).unwrap();
        let Some(Command::Scale(scale)) = parsed.command else { panic!("{words:?}: another command") };
        tables(&scale).map(|(tables, ..)| tables)
    }

    fn names(table: &Table) -> Vec<&str> {
        table.rows.iter().map(|row| row.policy.name).collect()
    }

    /// A file of events, which goes with what it returns.
    fn file(lines: &[String]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, lines.concat()).unwrap();
        file
    }

    /// A map and, perhaps, its unmap: the `n`th, of `len` bytes at `phys`.
    fn mapped(n: u64, phys: u64, len: u64, ends: bool) -> String {
        let event = |us, what: &str, memory: &str| {
            let time = n * 10 + us;
            let (second, us) = (1 + time / 1_000_000, time % 1_000_000);
            let dma = 0x1_0000_0000 + n * 0x100_0000 + phys % 4096;
            format!(
                "t-1 [000] ..... {second}.{us:06}: dma_{what}_page: d dir=TO_DEVICE dma_addr={dma:x} size={len} {memory}attrs=\n"
            )
        };
        let unmap = if ends { event(5, "unmap", "") } else { String::new() };
        event(0, "map", &format!("phys_addr={phys:x} ")) + &unmap
    }

    #[test]
    fn a_machine_has_the_profile_s_waits_and_the_calibration_s_lines() {
        let mut profile = Profile::load("vtd").unwrap();
        let waits = &mut profile.waits;
        (waits.doorbell.ns, waits.completion.ns, waits.descriptor.ns) = (1.0, 20.0, 300.0);
        (waits.map_request.ns, waits.map_page.ns, waits.unmap_page.ns) = (4.0, 5.0, 6.0);
        let mut calibration = Calibration::default();
        (calibration.near_ns.value, calibration.far_ns.value) = (7.0, 8.0);
        (calibration.copy_hot_ns.value, calibration.copy_cold_ns.value) = (9.0, 10.0);
        (calibration.copy_remote_ns.value, calibration.socket_copy_gb_per_s.value) = (11.0, 12.0);
        calibration.walk_read_ns.value = 13.0;
        let expected = Machine {
            cpus: 65,
            sockets: 2,
            near_ns: 7.0,
            far_ns: 8.0,
            submission_ns: 21.0,
            request_ns: 300.0,
            in_flight: 1,
            map_request_ns: 4.0,
            map_page_ns: 5.0,
            unmap_page_ns: 6.0,
            walk_read_ns: 13.0,
            copies: Copies { hot_ns: 9.0, cold_ns: 10.0, remote_ns: 11.0, socket_gb_per_s: 12.0 },
        };
        assert_eq!(machine(&profile, &calibration, 65, None), expected);
        for (cpus, asked, sockets) in
            [(1, None, 1), (64, None, 1), (256, None, 4), (2, Some(4), 2), (8, Some(4), 4)]
        {
            assert_eq!(machine(&profile, &calibration, cpus, asked).sockets, sockets, "{cpus} {asked:?}");
        }
    }

    #[test]
    fn a_recording_becomes_requests_of_its_mappings_that_end() {
        let (whole, page) = (0x10_0000, 4096);
        let lines = [
            mapped(0, whole, page, true),
            mapped(1, whole, page + 1, true),
            mapped(2, whole + 4095, 2, true),
            mapped(3, whole + 512, 512, false),
            mapped(4, whole + 1024, 2 * page, true),
            mapped(5, whole, 3 * page, true),
        ];
        let file = file(&lines);
        let (Workload { name, about, requests, depth, device }, told) = recording(file.path(), 700).unwrap();
        let mappings: Vec<_> =
            requests.iter().map(|request| (request.work_ns, &request.mappings[..])).collect();
        let mapping = |pages, bytes, shared| [Mapping { pages, bytes, shared }];
        let expected = [
            mapping(1, page, false),
            mapping(2, page + 1, true),
            mapping(2, 2, true),
            mapping(3, 2 * page, true),
            mapping(3, 3 * page, false),
        ];
        assert_eq!(mappings, expected.each_ref().map(|mappings| (700.0, &mappings[..])));
        assert_eq!((name, depth), (file.path().display().to_string(), 32));
        assert!(
            about.starts_with("5 mappings of the recording in turn on each CPU, 700 ns of CPU time"),
            "{about}"
        );
        assert!(device.gb_per_s >= 1e3 && device.requests_per_s >= 1e12, "it keeps up: {device:?}");
        assert_eq!((told.copies, told.nothing), (true, None));
        let (_, about) = recording(file.path(), 0).map(|(workload, _)| ((), workload.about)).unwrap();
        assert!(about.contains("a worst case, as no server does nothing but map and unmap"), "{about}");
        let nothing = self::file(&[mapped(0, whole, page, false)]);
        assert!(matches!(recording(nothing.path(), 0), Err(CommandError::Empty(_))));
    }

    #[test]
    fn no_more_mappings_of_a_recording_are_repeated_than_cpus_go_through() {
        let lines: Vec<String> = (0..4200).map(|n| mapped(n, 0x10_0000, 64, true)).collect();
        let (workload, _) = recording(file(&lines).path(), 0).unwrap();
        assert_eq!(workload.requests.len(), 4096);
    }

    #[test]
    fn numbers_of_cpus_come_in_their_order_and_once() {
        let tables = of(&["--cpus", "8,2,8,1", "--policy", "strict"]).unwrap();
        assert_eq!(tables.iter().map(|table| table.machine.cpus).collect::<Vec<_>>(), [1, 2, 8]);
        // Old designs are where they are named.
        assert!(of(&["--cpus", "1"]).unwrap()[0].rows.iter().all(|row| !row.policy.old));
        let named = of(&["--cpus", "1", "--policy", "vtd-2024,lazy"]).unwrap();
        assert_eq!(names(&named[0]), ["lazy", "vtd-2024"]);
    }

    /// A built-in workload has its own devices, and says itself what its CPUs do besides.
    #[test]
    fn each_cpu_has_a_device_to_play_a_recording_to() {
        let file = file(&[mapped(0, 0x10_0000, 64, true)]);
        let path = file.path().to_str().unwrap();
        let devices = |words: &[&str]| -> Vec<u32> {
            let tables = of(&[&["--cpus", "1,8,33", "--policy", "strict"], words].concat()).unwrap();
            tables.iter().map(|table| table.workload.device.count).collect()
        };
        assert_eq!(devices(&["--workload", path]), [1, 8, 33]);
        assert_eq!(devices(&["--workload", "nvme"]), [1, 1, 2]);
        let work = |words: &[&str]| {
            of(&[&["--workload", path, "--cpus", "1"], words].concat()).unwrap()[0].workload.requests[0]
                .work_ns
        };
        assert_eq!((work(&[]), work(&["--work", "5us"])), (WORK_NS as f64, 5000.0));
        assert!(matches!(of(&["--workload", "nvme", "--work", "5us"]), Err(CommandError::OwnWork { .. })));
        assert!(matches!(of(&["--workload", "nowhere.trace"]), Err(CommandError::NoWorkload { .. })));
    }

    /// Whatever is asked for, designs of the past included.
    #[test]
    fn what_a_recording_does_not_tell_the_copies_of_is_not_copied() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../portcullis-trace/tests/eras/6.1-iommu-alone.trace");
        let all: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
        let tables = of(&["--workload", path, "--cpus", "2", "--policy", &all.join(",")]).unwrap();
        let left = ["passthrough", "strict", "strict-batch", "strict-ring", "lazy"];
        let old = ["lazy-2015", "tree-2008", "bitmap-2008", "smmu-2017", "vtd-2024"];
        assert_eq!(names(&tables[0]), [&left[..], &old[..]].concat());
        assert!(!tables[0].copies_known && tables[0].nothing_told.is_none());
    }
}
