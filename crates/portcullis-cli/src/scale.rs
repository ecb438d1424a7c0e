//! `portcullis scale`.

#[cfg(test)]
mod documented;
pub mod report;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

use portcullis::addr::Direction;
use portcullis::domain;
use portcullis_model::scale::{
    Copied, Copies, Machine, Mapping, NAMES, Operations, Outcome, POLICIES, Policy, Random, Request,
    Workload, run,
};
use portcullis_trace::replay::{FORMATS, Profile, ProfileError, Work};
use portcullis_trace::{Chunk, OpKind, Printable, ReadOptions, Segment, Trace, TraceError};

use crate::args::{On, Scale};
use crate::calibration::{Calibration, CalibrationError};
use crate::choice::{BUSY, Besides, by_copies};
use crate::counted::INSTRUCTION_NS;
use crate::on_linux::{Offer, OwnStrict, Place};
use crate::verdict::{nothing_told, too_much_missing};
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

/// The most mappings of a recording that are simulated.
const MAPPINGS: usize = 4096;

/// The most pages of a mapping: beyond, nothing was measured, and costs go on in a straight line.
const MOST_PAGES: u64 = 1 << 20;

/// CPUs of a socket, unless it is said otherwise.
const PER_SOCKET: u32 = 64;

/// CPUs whose devices are behind one IOMMU, unless it is said otherwise.
const PER_IOMMU: u32 = 32;

/// IOMMUs of many a server, which have 4 to 16.
const OF_SERVERS: u32 = 8;

/// Runs the command and prints what it found.
pub fn run_command(arguments: &Scale) -> Result<ExitCode, CommandError> {
    let (tables, profile, calibration) = tables(arguments)?;
    let text = if arguments.json {
        report::json(&tables, &profile, &calibration, arguments).map_err(std::io::Error::from)?
    } else {
        let text = report::render(&tables, &profile, &calibration, look::is_unicode());
        let table = tables.last().filter(|_| arguments.explain);
        text + &table.map(|table| report::explain(table, &profile, &calibration)).unwrap_or_default()
    };
    print(&if arguments.json { text } else { look::shown(&text) })?;
    Ok(ExitCode::SUCCESS)
}

/// Simulates what is asked for, a table for each number of CPUs.
fn tables(arguments: &Scale) -> Result<(Vec<Table>, Profile, Calibration), CommandError> {
    let profile = Profile::load(&arguments.profile)?;
    let calibration = Calibration::of(arguments.calibration.as_deref())?;
    let operations = Operations::measured().map_err(CommandError::Simulation)?;
    let format = arguments.format.as_deref().or(profile.format.as_deref()).unwrap_or(FORMATS[0]);
    let offer = Offer::of(arguments.on, format);
    let own = OwnStrict::of(format).filter(|_| offer != Offer::Library);
    let is_of_today = |policy: &&Policy| !policy.old || own.is_some_and(|own| own.name == policy.name);
    let mut policies: Vec<&Policy> = POLICIES.iter().filter(is_of_today).collect();
    if !arguments.policy.is_empty() {
        let asked = |name: &str| arguments.policy.iter().any(|asked| asked == name);
        // Who names strict under Linux means Linux's own.
        let is_own =
            |name: &str| asked(domain::Policy::Strict.name()) && own.is_some_and(|own| own.name == name);
        policies = POLICIES.iter().filter(|known| asked(known.name) || is_own(known.name)).collect();
    }
    let (recorded, told) = recorded(arguments)?;
    if !told.copies() {
        policies.retain(|policy| policy.copied == Copied::Nothing);
    }
    let mut cpus: Vec<u32> = arguments.cpus.iter().map(|cpus| u32::from(*cpus)).collect();
    cpus.sort_unstable();
    cpus.dedup();
    let most = cpus.last().copied();
    let mut tables = Vec::new();
    for cpus in cpus {
        let built_in = || Workload::named(&arguments.workload, cpus);
        let mut workload = recorded.clone().or_else(built_in).ok_or(CommandError::Empty(String::new()))?;
        // Nothing keeps CPUs waiting in a recording but what the library does.
        if recorded.is_some() {
            workload.device.count = cpus;
        }
        let iommus = arguments.units.map_or(cpus.div_ceil(PER_IOMMU), u32::from);
        let machine = Machine {
            iommus: iommus.min(workload.device.count),
            of_module: arguments.on == On::Linux,
            ..machine(&profile, &calibration, cpus, arguments.sockets)
        };
        // The verdict, which is of the most CPUs alone, says what strict policies come to behind another number of IOMMUs, and at other waits.
        let is_last = Some(&cpus) == most.as_ref();
        let is_bounded = is_last && told.work() == Work::Most;
        let play = |machine: &Machine| Play::new(machine, &workload, &operations, offer, is_bounded);
        let played = play(&machine)?;
        let on = |machine: &Machine, policies: &[&'static Policy]| played.rows(machine, policies);
        let rows = on(&machine, &policies)?;
        let strict: Vec<_> = policies.iter().copied().filter(|policy| is_last && policy.strict).collect();
        let each: Vec<_> = strict.iter().copied().filter(|policy| policy.waits_each()).collect();
        let mut others = vec![1, OF_SERVERS.min(workload.device.count), workload.device.count];
        others.dedup();
        others.retain(|iommus| *iommus != machine.iommus && !strict.is_empty());
        let behind = |iommus| Ok((iommus, on(&Machine { iommus, ..machine.clone() }, &strict)?));
        let by_units = others.into_iter().map(behind).collect::<Result<_, CommandError>>()?;
        let has_one_lock = is_last && machine.iommus < workload.device.count;
        let unlocked_policy = own
            .filter(|own| has_one_lock && policies.iter().any(|policy| policy.name == own.name))
            .and_then(|own| Policy::named(own.unlocked?));
        let unlocked = on(&machine, unlocked_policy.as_slice())?.pop();
        let strict: Vec<_> = strict.into_iter().chain(unlocked_policy).collect();
        let waits = |times: f64| {
            let (submission_ns, request_ns) = (machine.submission_ns * times, machine.request_ns * times);
            on(&Machine { submission_ns, request_ns, ..machine.clone() }, &strict)
        };
        let by_waits = if each.is_empty() { [Vec::new(), Vec::new()] } else { [waits(0.25)?, waits(4.0)?] };
        let by_itself = if is_last && recorded.is_some() && cpus > 1 {
            let alone = Machine { cpus: 1, sockets: 1, iommus: 1, ..machine.clone() };
            play(&alone)?.rows(&alone, &strict)?
        } else {
            Vec::new()
        };
        let more_memory = if is_last && report::memory_is_full(&rows) {
            let mut machine = machine.clone();
            machine.copies.socket_gb_per_s *= 2.0;
            on(&machine, &strict)?
        } else {
            Vec::new()
        };
        let units = arguments.units.map(u32::from);
        let told = told.clone();
        let mut table = Table {
            machine,
            units,
            workload: workload.clone(),
            rows,
            by_units,
            by_waits,
            by_copies: None,
            more_memory,
            unlocked,
            by_itself,
            offer,
            own,
            told,
        };
        if strict.len() > 1 && strict.iter().any(|policy| policy.copied != Copied::Nothing) {
            let assumed_ns = calibration.copied_kib_ns();
            // Memory that is slower for one CPU is so for all of a socket.
            let socket = |kib_ns: f64| table.machine.copies.socket_gb_per_s * assumed_ns / kib_ns;
            let at = |kib_ns| {
                let mut machine = table.machine.clone();
                let copies = &mut machine.copies;
                (copies.hot_ns, copies.cold_ns, copies.socket_gb_per_s) = (kib_ns, kib_ns, socket(kib_ns));
                let (copying, others): (Vec<&Policy>, Vec<&Policy>) =
                    strict.iter().partition(|policy| policy.copied != Copied::Nothing);
                let others = others.into_iter().filter_map(|policy| {
                    table.rows.iter().chain(&table.unlocked).find(|row| row.policy.name == policy.name)
                });
                let rows =
                    on(&machine, &copying).ok()?.into_iter().chain(others.cloned()).collect::<Vec<_>>();
                table.chosen(&rows)
            };
            table.by_copies = by_copies(assumed_ns, at, |kib_ns| {
                Some(format!("{} GB/s a socket", look::count(socket(kib_ns).round() as u64)))
            });
        }
        tables.push(table);
    }
    Ok((tables, profile, calibration))
}

/// A workload on machines with the same CPUs.
struct Play<'a> {
    workload: Workload,
    operations: &'a Operations,
    offer: Offer,
    /// What it comes to without protection, which depends on neither IOMMUs nor waits.
    all: Outcome,
    /// The same with [`BUSY`] of its work, where only the most that this can be is known.
    hardly_busy: Option<Box<Self>>,
}

impl<'a> Play<'a> {
    fn new(
        machine: &Machine,
        workload: &Workload,
        operations: &'a Operations,
        offer: Offer,
        is_bounded: bool,
    ) -> Result<Self, CommandError> {
        let mut workload = workload.clone();
        workload.device.count = workload.device.count.min(machine.cpus);
        let all = run(machine, &workload, &POLICIES[0], operations).map_err(CommandError::Simulation)?;
        let mut less = workload.clone();
        less.requests.iter_mut().for_each(|request| request.work_ns *= BUSY);
        let hardly_busy =
            is_bounded.then(|| Self::new(machine, &less, operations, offer, false)).transpose()?;
        Ok(Self { workload, operations, offer, all, hardly_busy: hardly_busy.map(Box::new) })
    }

    /// What each of `policies` comes to.
    fn rows(&self, machine: &Machine, policies: &[&'static Policy]) -> Result<Vec<Row>, CommandError> {
        let row = |policy: &&'static Policy| {
            let mut row = self.row(machine, policy)?;
            let hardly_busy = self.hardly_busy.as_ref().filter(|_| policy.strict);
            row.hardly_busy = hardly_busy.map(|play| play.row(machine, policy)).transpose()?.map(Box::new);
            let is_kernel = self.offer == Offer::Module;
            Ok(if is_kernel { row.priced(machine, &self.workload, INSTRUCTION_NS) } else { row })
        };
        policies.iter().map(row).collect()
    }

    fn row(&self, machine: &Machine, policy: &'static Policy) -> Result<Row, CommandError> {
        let outcome = run(machine, &self.workload, policy, self.operations);
        Ok(Row::new(policy, outcome.map_err(CommandError::Simulation)?, &self.all))
    }
}

fn machine(profile: &Profile, calibration: &Calibration, cpus: u32, sockets: Option<u8>) -> Machine {
    let waits = &profile.waits;
    let sockets = sockets.map_or(cpus.div_ceil(PER_SOCKET), u32::from).clamp(1, cpus);
    Machine {
        cpus,
        sockets,
        iommus: 1,
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
        of_module: false,
    }
}

/// What a recording tells; all of it, where there is none.
#[derive(Debug, Clone)]
pub struct Told {
    /// The direction and the bytes of all mappings.
    pub directions: bool,
    /// The mappings of all syncs.
    pub syncs: bool,
    /// Why it tells no cost at all, if so.
    pub nothing: Option<String>,
    /// The CPU time that comes with each mapping; `None` for a workload that says it by itself.
    pub besides: Option<Besides>,
    /// Other data lies in a page of some mapping that ended, also of one that is not simulated.
    pub share: bool,
    /// Which device to name in commands.
    pub place: Place,
}

impl Default for Told {
    fn default() -> Self {
        let (directions, syncs, nothing, besides) = (true, true, None, None);
        Self { directions, syncs, nothing, besides, share: false, place: Place::default() }
    }
}

impl Told {
    /// How the work of a mapping is known.
    pub fn work(&self) -> Work {
        self.besides.map_or(Work::Asked, |besides| besides.work)
    }

    /// What policies that copy would copy; if not, they are not among the rows.
    pub fn copies(&self) -> bool {
        self.directions && self.syncs
    }
}

/// The recording that is asked for, if it is one, and what it tells.
fn recorded(arguments: &Scale) -> Result<(Option<Workload>, Told), CommandError> {
    let workload = arguments.workload.clone();
    if !NAMES.contains(&workload.as_str()) {
        let path = Path::new(&workload);
        if !path.exists() {
            return Err(CommandError::NoWorkload { workload });
        }
        return recording(path, arguments.work).map(|(workload, told)| (Some(workload), told));
    }
    match arguments.work {
        Some(_) => Err(CommandError::OwnWork { workload }),
        None => Ok((None, Told::default())),
    }
}

/// The mappings of a recording that end in it, each with what `asked` names of work around it, or what the recording tells, and a
/// device that keeps up.
fn recording(path: &Path, asked: Option<u64>) -> Result<(Workload, Told), CommandError> {
    let mut trace = Trace::open(path, ReadOptions::default())?;
    let Ended { some: mappings, number, share, .. } = mappings(&mut trace)?;
    let name = path.display().to_string();
    let keeps_up = Workload::named("swiotlb", 1).map(|workload| workload.device);
    let device =
        keeps_up.filter(|_| !mappings.is_empty()).ok_or_else(|| CommandError::Empty(name.clone()))?;
    let summary = trace.summary();
    let (ns, work) = asked.map_or_else(|| Work::of(summary), |ns| (ns as f64, Work::Asked));
    let about = format!(
        "{} of the recording in turn on each CPU, {} ns of CPU time besides for each ({}), devices that keep up",
        if number > mappings.len() as u64 {
            format!("{} of the {} mappings", look::count(mappings.len() as u64), look::count(number))
        } else {
            look::number_of(number, "mapping")
        },
        look::count(ns as u64),
        known(work)
    );
    let requests =
        mappings.into_iter().map(|mapping| Request { work_ns: ns, mappings: vec![mapping] }).collect();
    let missing = summary.lost_events.saturating_add(summary.cut().unwrap_or(0));
    let hidden = || (!summary.costs_known()).then(|| nothing_told(summary.hidden(), summary.mappings()));
    let told = Told {
        directions: summary.directions_known(),
        syncs: summary.syncs_known(),
        nothing: hidden().or_else(|| too_much_missing(missing, summary.events)),
        besides: Some(Besides { ns, work, cpus: summary.cpus }),
        share,
        place: Place::named(&summary.devices),
    };
    Ok((Workload { name, about, requests, depth: 32, device }, told))
}

/// How the work of a recording is known.
fn known(work: Work) -> &'static str {
    match work {
        Work::Asked => "--work",
        Work::Measured => "what the recorded machine took, its protection included; --work names another",
        Work::Most => "the most that the recording's CPUs had; --work names another",
        Work::Assumed => "the recording does not tell; --work names another",
    }
}

/// The mappings of a recording that end in it.
#[derive(Default)]
struct Ended {
    /// [`MAPPINGS`] of them at the most, drawn from the whole recording, the same ones each time.
    some: Vec<Mapping>,
    number: u64,
    /// Other data lies in a page of any of them.
    share: bool,
    random: Random,
}

impl Ended {
    /// Each has the same chance to be kept (Vitter's algorithm R, 1985).
    fn add(&mut self, mapping: Mapping) {
        self.number += 1;
        self.share |= mapping.shared;
        if self.some.len() < MAPPINGS {
            self.some.push(mapping);
        } else if let Some(place) = self.some.get_mut((self.random.next() % self.number) as usize) {
            *place = mapping;
        }
    }
}

/// The mappings of a recording, which is read to its end, as that tells how much work there was for each.
fn mappings(trace: &mut Trace<'_>) -> Result<Ended, CommandError> {
    let (mut chunk, mut live, mut ended) = (Chunk::default(), HashMap::new(), Ended::default());
    let mut more = true;
    while more {
        more = trace.next_chunk(&mut chunk, 100_000)?;
        for op in &chunk.ops {
            match &op.kind {
                OpKind::Map { id, segments, dir, .. } => {
                    let received = *dir == Direction::FromDevice;
                    live.insert(*id, mapping(chunk.segments_of(segments), received));
                }
                OpKind::Unmap { id } => live.remove(id).into_iter().for_each(|mapping| ended.add(mapping)),
                _ => {}
            }
        }
    }
    Ok(ended)
}

fn mapping(segments: &[Segment], received: bool) -> Mapping {
    let bytes: u64 = segments.iter().map(|segment| segment.len).sum();
    let pages = |first: u64, len: u64| (first % 4096 + len).div_ceil(4096);
    let pages: u64 = segments.iter().map(|segment| pages(segment.phys, segment.len)).sum();
    let pieces = Segment::pieces(segments).max(1);
    let shared = segments.iter().any(|segment| (segment.phys | segment.len) % 4096 != 0);
    Mapping { pages: pages.clamp(1, MOST_PAGES), pieces, bytes, shared, received }
}
