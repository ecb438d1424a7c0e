//! What a simulation came to, for people and for machines.

mod explain;
mod verdict;

use std::fmt::Write;

use anstyle::Style;
use portcullis::domain;
use portcullis_model::scale::{Machine, Outcome, Policy, Request, Spent, Workload};
use portcullis_trace::Printable;
use portcullis_trace::replay::{Mode, Profile, Work};
use serde::Serialize;

use crate::args::Scale;
use crate::calibration::Calibration;
use crate::choice::{Candidate, Chosen};
use crate::counted::INSTRUCTION_NS;
use crate::instructions::Instructions;
use crate::look::{BOLD, COLUMNS, columns, count, number_of, wrap};
use crate::machine;
use crate::on_linux::{Offer, OwnStrict};
use crate::scale::{PER_IOMMU, Told};
pub use explain::explain;
pub use verdict::memory_is_full;
use verdict::{choice, verdict};

/// A policy and what it came to.
#[derive(Clone)]
pub struct Row {
    pub policy: &'static Policy,
    /// As tables and sentences call it.
    pub name: &'static str,
    pub outcome: Outcome,
    /// Of what there is without protection.
    pub share: f64,
    /// The same with the code of Linux or of the module in place of the library's, where that would run.
    pub of_kernel: Option<Box<Row>>,
    /// The same at [`BUSY`](crate::choice::BUSY) of the work, where only the most that this can be is known.
    pub hardly_busy: Option<Box<Row>>,
}

impl Row {
    pub fn new(policy: &'static Policy, outcome: Outcome, all: &Outcome) -> Self {
        let share = if all.per_s > 0.0 { outcome.per_s / all.per_s } else { 0.0 };
        Self { policy, name: policy.name, outcome, share, of_kernel: None, hardly_busy: None }
    }

    /// The row with an estimate of what it comes to with the kernel's code, where an instruction of that takes `instruction_ns`.
    pub fn priced(&self, machine: &Machine, workload: &Workload, instruction_ns: f64) -> Self {
        let of_kernel = self.with_kernel(machine, workload, instruction_ns).map(Box::new);
        Self { of_kernel, ..self.clone() }
    }

    /// The row with the code that would run.
    fn run(&self) -> &Self {
        self.of_kernel.as_deref().unwrap_or(self)
    }

    /// The share of the throughput that it costs.
    fn lost(&self) -> f64 {
        (1.0 - self.share).max(0.0)
    }

    /// The kernel's code takes longer than the library's, whose time this row has. CPUs that have nothing to do have time for it.
    fn with_kernel(&self, machine: &Machine, workload: &Workload, instruction_ns: f64) -> Option<Self> {
        let (name, _) = Instructions::in_scale(self.policy)?;
        let mut outcome = self.outcome.clone();
        let ours_ns = outcome.spent.own_ns - outcome.asked_ns;
        let more_ns = instructions(workload, self.policy)? * instruction_ns - ours_ns;
        let Outcome { per_s, spent, queue_busy, device_busy, copy_busy, .. } = &mut outcome;
        let request_ns = f64::from(machine.cpus) * 1e9 / (*per_s).max(f64::MIN_POSITIVE);
        let spare_ns = spent.idle_ns.min(more_ns);
        let slower = request_ns / (request_ns + more_ns - spare_ns);
        spent.own_ns += more_ns;
        spent.idle_ns -= spare_ns;
        [per_s, queue_busy, device_busy, copy_busy].into_iter().for_each(|rate| *rate *= slower);
        let hardly_busy = self.hardly_busy.as_ref();
        let hardly_busy = hardly_busy.and_then(|row| row.with_kernel(machine, workload, instruction_ns));
        let (share, hardly_busy) = (self.share * slower, hardly_busy.map(Box::new));
        Some(Self { policy: self.policy, name, outcome, share, of_kernel: None, hardly_busy })
    }

    /// What takes the most of a request besides the workload's own work and time with nothing to do; nanoseconds.
    fn hottest(&self) -> (&'static str, f64) {
        let Spent { own_ns, shared_ns, wait_ns, copy_ns, .. } = self.outcome.spent;
        let all = [
            ("its own instructions", own_ns),
            ("waits for lines and locks that CPUs share", shared_ns),
            ("waits for the invalidation queue", wait_ns),
            ("copies", copy_ns),
        ];
        all.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(all[0])
    }
}

/// A policy of the library that is strict, as a verdict may choose it.
#[derive(Clone, Copy)]
struct Strict<'a> {
    row: &'a Row,
    mode: Mode,
    /// Other data lies in pages that are mapped.
    open: bool,
    /// Whether that is known.
    open_is_known: bool,
}

impl Candidate for Strict<'_> {
    fn mode(&self) -> Mode {
        self.mode
    }

    fn row(&self) -> &'static str {
        self.row.name
    }

    fn lost(&self) -> f64 {
        self.row.lost()
    }

    fn open(&self) -> f64 {
        f64::from(u8::from(self.open))
    }

    fn open_is_known(&self) -> bool {
        self.open_is_known
    }

    fn hardly_busy(self) -> Self {
        Self { row: self.row.hardly_busy.as_deref().unwrap_or(self.row), ..self }
    }
}

/// All policies on one machine.
pub struct Table {
    pub machine: Machine,
    /// The IOMMUs that were asked for, which may be more than there are devices.
    pub units: Option<u32>,
    pub workload: Workload,
    pub rows: Vec<Row>,
    /// The strict policies behind one IOMMU, behind as many as servers have, and behind one for each device, where these are other numbers. Of the
    /// table with the most CPUs alone, as the next ones.
    pub by_units: Vec<(u32, Vec<Row>)>,
    /// The same, with the one of `unlocked`, if waits took a quarter of what is assumed, and four times as long; none where no row waits
    /// for each unmap.
    pub by_waits: [Vec<Row>; 2],
    /// At which price of a copied KiB the choice is another: [`by_copies`](crate::choice::by_copies).
    pub by_copies: Option<String>,
    /// The strict policies, if memory copied twice as much; none where no policy copies as much as it can.
    pub more_memory: Vec<Row>,
    /// Linux's strict mode with a lock for each CPU, where it has one for several devices. Of the table with the most CPUs.
    pub unlocked: Option<Row>,
    /// The strict policies on one CPU by itself. Of a recording, in the table with the most CPUs, if there are others.
    pub by_itself: Vec<Row>,
    /// What is chosen among.
    pub offer: Offer,
    /// What Linux's own strict mode is there.
    pub own: Option<OwnStrict>,
    pub told: Told,
}

impl Table {
    /// The rows that are printed, and how many of them have the kernel's code: these come first.
    fn printed(&self) -> (Vec<&Row>, usize) {
        let mut rows: Vec<&Row> = self.rows.iter().filter_map(|row| row.of_kernel.as_deref()).collect();
        // Linux's strict, as in a replay's table.
        rows.sort_by_key(|row| !row.policy.old);
        let of_kernel = rows.len();
        // Linux's own designs are no code of the library's.
        rows.extend(self.rows.iter().filter(|row| row.of_kernel.is_none() || !row.policy.old));
        (rows, of_kernel)
    }

    /// Linux's own strict mode, and its row, if it is what strict is where this is asked for.
    fn strict_of_linux(&self) -> Option<(OwnStrict, &Row)> {
        let own = self.own?;
        self.rows.iter().find(|row| row.policy.name == own.name).map(|row| (own, row.run()))
    }

    /// The choice among `rows`, and what it costs.
    pub fn chosen(&self, rows: &[Row]) -> Option<(Mode, f64)> {
        self.choose(&self.strict_of(rows, self.offer)).map(|Chosen { row, .. }| (row.mode, row.lost()))
    }

    /// The choice among `strict`, by a replay's rule.
    fn choose<'a>(&self, strict: &[Strict<'a>]) -> Option<Chosen<Strict<'a>>> {
        Chosen::of(strict, self.told.work())
    }

    /// The strict policies on offer.
    fn strict(&self) -> Vec<Strict<'_>> {
        self.strict_of(&self.rows, self.offer)
    }

    /// Those of `rows` that are on `offer`, with Linux's strict mode as the table has it.
    fn strict_of<'a>(&self, rows: &'a [Row], offer: Offer) -> Vec<Strict<'a>> {
        let own = self.strict_of_linux().map(|(own, _)| own.name);
        self.strict_where(rows, offer, own)
    }

    /// The same, where Linux's strict mode is the row `own`.
    fn strict_where<'a>(&self, rows: &'a [Row], offer: Offer, own: Option<&str>) -> Vec<Strict<'a>> {
        let strict = Mode::Each(domain::Policy::Strict);
        let mut mappings = self.workload.requests.iter().flat_map(|request| &request.mappings);
        let shares = self.told.share || mappings.any(|mapping| mapping.shared);
        let strict = rows.iter().filter(|row| row.policy.strict).filter_map(|row| {
            // Under Linux, strict is its own, and never the library's.
            let named = Mode::named(row.policy.name).filter(|mode| self.own.is_none() || *mode != strict);
            let of_linux = (own == Some(row.policy.name)).then_some(strict);
            let mode = named.or(of_linux).filter(|mode| offer.has(*mode))?;
            let open = shares && !mode.protects_bytes();
            let row = if offer == Offer::Library { row } else { row.run() };
            Some(Strict { row, mode, open, open_is_known: self.told.copies() })
        });
        strict.collect()
    }
}

/// For people; the verdict first, of the most CPUs.
pub fn render(tables: &[Table], profile: &Profile, calibration: &Calibration, unicode: bool) -> String {
    let mut text = String::new();
    let Some(table) = tables.last() else { return text };
    let Table { machine, workload, rows, .. } = table;
    let name = Printable(&workload.name);
    let (cpus, sockets) =
        (number_of(machine.cpus.into(), "CPU"), number_of(machine.sockets.into(), "socket"));
    let iommus = number_of(machine.iommus.into(), "IOMMU");
    let units = match table.units.filter(|units| *units > machine.iommus) {
        Some(units) => {
            format!("--units {}, but no more than there are devices", count(units.into()))
        }
        None if table.units.is_none() => format!("one for each {PER_IOMMU} CPUs; --units"),
        None => "--units".into(),
    };
    text.push_str(&wrap(&format!("{name} on {cpus} of {sockets}, {iommus} ({units}), simulated"), "  "));
    for line in setting(workload) {
        text.push_str(&wrap(&line, "  "));
    }
    text.push('\n');
    for sentence in verdict(table) {
        text.push_str(&wrap(&sentence, ""));
    }
    // Writing to a string cannot fail.
    let _ = write_rows(&mut text, table, unicode);
    if tables.len() > 1 {
        let _ = write_curves(&mut text, tables, unicode);
    }
    text.push_str(&wrap(&format!("Workload: {}.{}", workload.about, moved(table).unwrap_or_default()), ""));
    text.push_str(&wrap(
        &format!(
            "Measured: what the library's code takes on simulated CPUs with cache lines. Modelled: all around it. An IOMMU carries out \
         one submission after the other; what CPUs ask for meanwhile goes into the next, up to 64 together. {} \
         docs/scaling.md says how far to trust this.",
            if workload.device.keeps_up() {
                "Devices keep up: what they lose while the IOMMU walks page tables is not in it (docs/strict.md)."
            } else {
                "Devices wait for its page walks."
            }
        ),
        "",
    ));
    text.extend(kernel(table).map(|said| wrap(&said, "")));
    let mut inferred: Vec<&String> = rows.iter().flat_map(|row| &row.outcome.inferred).collect();
    inferred.sort();
    inferred.dedup();
    for line in inferred {
        text.push_str(&wrap(&format!("Extrapolated: {line}."), "  "));
    }
    text.push_str(&wrap(
        &format!(
            "Waits are those of {} ({}; --profile). Lines and copies: {}. A KiB takes {} ns to copy in a cache, and {} in memory ({}); a socket copies {} GB/s ({}). `portcullis \
             calibrate` measures these here.",
            Printable(&profile.name),
            Printable(&profile.about),
            Printable(&calibration.machine),
            calibration.copy_hot_ns.value,
            calibration.copy_cold_ns.value,
            Printable(&calibration.copy_cold_ns.source),
            calibration.socket_copy_gb_per_s.value,
            Printable(&calibration.socket_copy_gb_per_s.source)
        ),
        "",
    ));
    text
}

/// What of the sockets' memory the workload takes without protection, where that is more than half.
fn moved(table: &Table) -> Option<String> {
    let Table { machine, workload, rows, .. } = table;
    let row = rows.first().filter(|row| row.share > 0.0)?;
    let moved = row.outcome.per_s / row.share * mean(workload, |request| request.bytes() as f64) / 1e9;
    // A copied byte is read, fetched and written.
    let all = machine.copies.socket_gb_per_s * f64::from(machine.sockets) * 3.0;
    (moved > all / 2.0).then(|| {
        format!(
            " Without protection its devices move {} GB/s, of about {} that the memory of {} moves: a real server would have little left for its work.",
            count(moved.round() as u64),
            count(all.round() as u64),
            number_of(machine.sockets.into(), "socket")
        )
    })
}

/// The mean of the workload's requests.
fn mean(workload: &Workload, of: fn(&Request) -> f64) -> f64 {
    workload.requests.iter().map(of).sum::<f64>() / workload.requests.len().max(1) as f64
}

/// Instructions of the kernel for a mean request of `workload`.
fn instructions(workload: &Workload, policy: &Policy) -> Option<f64> {
    let mappings = workload.requests.iter().flat_map(Request::mapped);
    let sum: Option<f64> = mappings.map(|mapping| Instructions::of_mapping(policy, mapping)).sum();
    Some(sum? / workload.requests.len().max(1) as f64)
}

/// Those of the kernel for a mean mapping.
fn of_mapping(workload: &Workload, policy: &Policy) -> Option<f64> {
    let all = instructions(workload, policy)?;
    Some(all / mean(workload, |request| request.mapped().count() as f64).max(f64::MIN_POSITIVE))
}

/// Where the rows of the kernel's code come from.
fn kernel(table: &Table) -> Option<String> {
    let (rows, of_kernel) = table.printed();
    let each = rows[..of_kernel].iter().filter_map(|row| {
        Some(format!("{} {}", row.name, count(of_mapping(&table.workload, row.policy)?.round() as u64)))
    });
    let each = each.collect::<Vec<_>>().join(", ");
    (of_kernel > 0).then(|| {
        format!(
            "The first rows estimate the code of Linux 6.12 and of our module. Its instructions were counted in a guest behind VT-d \
             (docs/linux.md); for a mapping here they come to: {each}. Each takes {INSTRUCTION_NS} ns, as one of a program did on one machine (docs/replay.md). Waits and copies are simulated, as for the library's code."
        )
    })
}

/// What the CPUs and the devices do, in figures.
fn setting(workload: &Workload) -> [String; 2] {
    let Workload { depth, device, .. } = workload;
    let mean = |of: fn(&Request) -> f64| mean(workload, of);
    let work = count(mean(|request| request.work_ns).round() as u64);
    let mappings = number_of(mean(|request| request.mapped().count() as f64).round() as u64, "mapping");
    let bytes = number_of(mean(|request| request.bytes() as f64).round() as u64, "byte");
    let under_way = number_of(u64::from(*depth), "request");
    let mut limits = Vec::new();
    // Beyond, they stand for devices that keep up.
    if device.gb_per_s < 1e3 {
        limits.push(format!("{} Gb/s", count((device.gb_per_s * 8.0).round() as u64)));
    }
    if device.requests_per_s < 1e12 {
        limits.push(format!("{} requests in a second", count(device.requests_per_s.round() as u64)));
    }
    let pace = if limits.is_empty() {
        "as fast as the CPUs need them".into()
    } else {
        format!("each up to {}", limits.join(" and "))
    };
    [
        format!(
            "each CPU: up to {under_way} under way, each of {mappings} ({bytes}); everything but \
             protection takes {work} ns of CPU time"
        ),
        format!("devices: {}, {pace}", count(u64::from(device.count))),
    ]
}

fn write_rows(text: &mut String, table: &Table, unicode: bool) -> std::fmt::Result {
    let best = choice(table).map(|choice| choice.row.name);
    let figures = |row: &Row| {
        let Outcome { per_s, spent, .. } = &row.outcome;
        let ns = [spent.own_ns, spent.shared_ns, spent.wait_ns, spent.copy_ns, spent.idle_ns];
        let count = |figure: f64| count(figure.round() as u64);
        let ends = [count(*per_s), format!("{:.1} %", row.share * 100.0)];
        ends.into_iter().chain(ns.map(count)).collect::<Vec<_>>()
    };
    let heads = ["in a second", "throughput", "code", "lines", "queue", "copies", "devices"];
    let least = [11, 11, 9, 9, 9, 9, 9];
    let (rows, of_kernel) = table.printed();
    let rows: Vec<(&Row, Vec<String>)> = rows.into_iter().map(|row| (row, figures(row))).collect();
    // A figure that fills its column makes that wider, and takes the room from the others where there is no more.
    let widths = |least: [usize; 7]| -> Vec<usize> {
        let widest = |at: usize| rows.iter().map(|(_, figures)| figures[at].len() + 1).max().unwrap_or(0);
        (0..heads.len()).map(|at| widest(at).max(least[at])).collect()
    };
    let roomy = widths(least);
    let fits = 13 + roomy.iter().sum::<usize>() <= COLUMNS;
    let widths = if fits { roomy } else { widths(heads.map(|head| head.len() + 1)) };
    // A narrow terminal has no room for the parts of a request's time.
    let shown = if columns() < COLUMNS { 2 } else { heads.len() };
    let widths = &widths[..shown];
    let rest: usize = widths[2..].iter().sum();
    writeln!(text)?;
    let over = ["ns of each request, in or waiting for:", "ns of a request, in or for:"];
    let over = over.into_iter().find(|over| over.len() < rest).unwrap_or("");
    writeln!(text, "{:<13}{:>3$}{:>4$}{over:>rest$}", "", "requests", "share of", widths[0], widths[1])?;
    write!(text, "{BOLD}{:<13}", "policy")?;
    heads.iter().zip(widths).try_for_each(|(head, width)| write!(text, "{head:>width$}"))?;
    writeln!(text, "{BOLD:#}")?;
    writeln!(text, "{}", if unicode { "─" } else { "-" }.repeat(13 + widths.iter().sum::<usize>()))?;
    for (at, (row, figures)) in rows.iter().enumerate() {
        write_heading(text, at, of_kernel)?;
        let style = if best == Some(row.name) { BOLD } else { Style::new() };
        write!(text, "{style}{:<13}{style:#}", row.name)?;
        figures.iter().zip(widths).try_for_each(|(figure, width)| write!(text, "{figure:>width$}"))?;
        writeln!(text)?;
    }
    writeln!(text)
}

/// What separates the rows of the library's code from those of the kernel's, if there are any.
fn write_heading(text: &mut String, at: usize, of_kernel: usize) -> std::fmt::Result {
    if at > 0 && at == of_kernel { writeln!(text, "The library's own code:") } else { Ok(()) }
}

/// The share of the throughput without protection, by number of CPUs.
fn write_curves(text: &mut String, tables: &[Table], unicode: bool) -> std::fmt::Result {
    write!(text, "{BOLD}{:<13}", "throughput, %")?;
    // As many as there is room for.
    let wide = columns();
    let shown = tables.iter().take(if wide < COLUMNS { (wide.saturating_sub(18) / 8).max(1) } else { 8 });
    for table in shown.clone() {
        write!(text, "{:>8}", table.machine.cpus)?;
    }
    writeln!(text, " CPUs{BOLD:#}")?;
    writeln!(text, "{}", if unicode { "─" } else { "-" }.repeat(wide))?;
    let all: Vec<(Vec<&Row>, usize)> = shown.clone().map(Table::printed).collect();
    let (rows, of_kernel) = all.first().map_or((0, 0), |(rows, of_kernel)| (rows.len(), *of_kernel));
    for at in 0..rows {
        write_heading(text, at, of_kernel)?;
        for (index, row) in all.iter().filter_map(|(rows, _)| rows.get(at)).enumerate() {
            if index == 0 {
                write!(text, "{:<13}", row.name)?;
            }
            write!(text, "{:>8.1}", row.share * 100.0)?;
        }
        writeln!(text)?;
    }
    // Where these change, throughput steps.
    type Size = fn(&Table) -> u32;
    let sizes: [(&str, Size); 3] = [
        ("devices", |table| table.workload.device.count),
        ("IOMMUs", |table| table.machine.iommus),
        ("sockets", |table| table.machine.sockets),
    ];
    let mut steps = false;
    for (name, of) in sizes {
        let all: Vec<u32> = shown.clone().map(of).collect();
        if all.windows(2).any(|pair| pair[0] != pair[1]) {
            write!(text, "{name:<13}")?;
            all.iter().try_for_each(|n| write!(text, "{n:>8}"))?;
            writeln!(text)?;
            steps = true;
        }
    }
    writeln!(text)?;
    if steps {
        let why = "Throughput steps where a device, an IOMMU (--units) or a socket (--sockets) is added.";
        text.push_str(&wrap(why, ""));
    }
    Ok(())
}

#[derive(Serialize)]
struct Scaled<'a> {
    workload: &'a str,
    about: &'a str,
    profile: &'a str,
    calibration: &'a Calibration,
    /// What comes with each mapping of a recording.
    work_ns: Option<f64>,
    work: Option<Work>,
    verdict: Vec<String>,
    choice: Option<&'static str>,
    results: Vec<Result<'a>>,
}

#[derive(Serialize)]
struct Result<'a> {
    policy: &'static str,
    cpus: u32,
    sockets: u32,
    units: u32,
    requests_per_s: f64,
    relative_to_passthrough: f64,
    /// The same with the kernel's code, where that would run.
    relative_with_kernel: Option<f64>,
    work_ns: f64,
    library_ns: f64,
    shared_ns: f64,
    queue_wait_ns: f64,
    copy_ns: f64,
    idle_ns: f64,
    queue_busy: f64,
    device_busy: f64,
    copy_busy: f64,
    hottest: &'static str,
    lines: Vec<Line<'a>>,
    extrapolated: &'a [String],
}

#[derive(Serialize)]
struct Line<'a> {
    share_of_transfers: f64,
    source: &'a str,
}

fn of<'a>(table: &Table, row: &'a Row) -> Result<'a> {
    let Outcome { per_s, spent, queue_busy, device_busy, copy_busy, lines, inferred, .. } = &row.outcome;
    Result {
        policy: row.policy.name,
        cpus: table.machine.cpus,
        sockets: table.machine.sockets,
        units: table.machine.iommus,
        requests_per_s: *per_s,
        relative_to_passthrough: row.share,
        relative_with_kernel: row.of_kernel.as_ref().map(|row| row.share),
        work_ns: spent.work_ns,
        library_ns: spent.own_ns,
        shared_ns: spent.shared_ns,
        queue_wait_ns: spent.wait_ns,
        copy_ns: spent.copy_ns,
        idle_ns: spent.idle_ns,
        queue_busy: *queue_busy,
        device_busy: *device_busy,
        copy_busy: *copy_busy,
        hottest: row.hottest().0,
        lines: lines
            .iter()
            .map(|line| Line { share_of_transfers: line.share, source: &line.source })
            .collect(),
        extrapolated: inferred,
    }
}

/// For machines: one result for each policy and number of CPUs.
pub fn json(
    tables: &[Table],
    profile: &Profile,
    calibration: &Calibration,
    options: &Scale,
) -> serde_json::Result<String> {
    let results = tables.iter().flat_map(|table| table.rows.iter().map(move |row| of(table, row))).collect();
    let first = tables.first();
    let besides = first.and_then(|table| table.told.besides);
    let scaled = Scaled {
        workload: first.map_or("", |table| &table.workload.name),
        about: first.map_or("", |table| &table.workload.about),
        profile: &profile.name,
        calibration,
        work_ns: besides.map(|besides| besides.ns),
        work: besides.map(|besides| besides.work),
        verdict: tables.last().map(verdict).unwrap_or_default(),
        choice: tables.last().and_then(choice).map(|choice| choice.row.policy.name),
        results,
    };
    machine::document(machine::schema::SCALE, options, std::slice::from_ref(profile), scaled)
}

#[cfg(test)]
mod tests;
