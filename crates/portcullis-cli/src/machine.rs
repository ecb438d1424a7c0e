//! What results for machines say besides their figures, all in one form: by which tool, on which machine, under which options
//! and for which hardware.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;

use portcullis_trace::Summary;
use portcullis_trace::printable::is_plain;
use portcullis_trace::replay::{Profile, Report};
use serde::{Serialize, Serializer};
use serde_json::ser::Formatter;

use crate::args::{On, Replay};
use crate::calibration::Calibration;
use crate::choice::Candidate;
use crate::exposed::{self, Exposed};
use crate::on_linux::{Offer, Place};
use crate::price::Code;
use crate::runs::{Cost, Runs};
use crate::verdict::{self, Verdict};
use crate::{header, look, warnings};

/// The version of each command's form: fields are added without a new one, and never changed.
pub mod schema {
    pub const REPLAY: u32 = 1;
    pub const BENCH: u32 = 1;
    pub const SCALE: u32 = 2;
    pub const STATUS: u32 = 1;
    #[cfg(unix)]
    pub const DOCTOR: u32 = 1;
}

/// A result: a head, which is the same for all commands, and what the command found.
#[derive(Serialize)]
struct Document<'a, Options, Found> {
    schema: u32,
    tool: Tool,
    date: String,
    command: String,
    machine: Machine,
    options: Options,
    profiles: &'a [Profile],
    #[serde(flatten)]
    found: Found,
}

/// The result of a command that took these options and assumed this hardware. A line for each field, and lists in one line: a
/// distribution has hundreds of entries.
pub fn document(
    schema: u32,
    options: impl Serialize,
    profiles: &[Profile],
    found: impl Serialize,
) -> serde_json::Result<String> {
    let tool = Tool { name: env!("CARGO_BIN_NAME"), version: env!("CARGO_PKG_VERSION") };
    let (command, machine) = (command(std::env::args_os()), Machine::here());
    let document = Document { schema, tool, date: date(), command, machine, options, profiles, found };
    let mut text = Vec::new();
    document.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Lines { depth: 0 }))?;
    text.push(b'\n');
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// When this is, of UTC: `2026-11-28 00:30`.
fn date() -> String {
    look::date(look::seconds()).chars().take("2026-11-28T00:30".len()).collect::<String>().replace('T', " ")
}

/// Serialises the name of a file, of which JSON has no more than what is Unicode.
pub fn name<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(to)
}

#[derive(Serialize)]
struct Tool {
    name: &'static str,
    version: &'static str,
}

/// The machine that printed a result.
#[derive(Serialize)]
struct Machine {
    os: &'static str,
    /// Its release; `None` where it does not say. So with the processor's name.
    kernel: Option<String>,
    arch: &'static str,
    cpu: Option<String>,
    cpus: usize,
}

impl Machine {
    fn here() -> Self {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        Self {
            os: std::env::consts::OS,
            kernel: release.map(|release| release.trim().to_owned()),
            arch: std::env::consts::ARCH,
            cpu: cpu(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

#[derive(Serialize)]
struct ReplayOptions<'a> {
    profile: &'a str,
    format: &'a str,
    work_ns: Option<u64>,
    device: Option<&'a str>,
    limit: Option<u64>,
    repeat: usize,
    strict_parse: bool,
    on: On,
}

#[derive(Serialize)]
struct Replayed<'a> {
    #[serde(flatten)]
    report: &'a Report,
    costs: &'a [Cost],
    calibration: &'a Calibration,
    prices: Vec<Priced>,
    verdict: Vec<String>,
    choice: Option<&'a str>,
    notes: Vec<String>,
    warnings: Vec<String>,
}

/// What a mapping costs by the code that would run it.
#[derive(Serialize)]
struct Priced {
    policy: &'static str,
    row: &'static str,
    code: &'static str,
    instructions: Option<f64>,
    /// What was measured and estimated; none of what was not timed.
    ns: Option<f64>,
    least_ns: Option<f64>,
    most_ns: Option<f64>,
    cpu_time: Option<f64>,
    /// What the choice rests on.
    copied_bytes: Option<f64>,
    counted_wait_ns: f64,
    counted_ns: f64,
}

fn prices(runs: &Runs, offer: Offer) -> Vec<Priced> {
    let row = |row: verdict::Row<'_>| {
        let price = row.price;
        let told = |figure: f64| price.cost.is_told().then_some(figure);
        Priced {
            policy: price.policy.policy,
            row: price.row,
            code: price.code.name(),
            instructions: price.instructions,
            ns: told(price.ns),
            least_ns: told(price.range_ns[0]),
            most_ns: told(price.range_ns[1]),
            cpu_time: told(row.lost()),
            copied_bytes: price
                .policy
                .copied_bytes
                .map(|bytes| bytes as f64 / price.policy.operations.max(1) as f64),
            counted_wait_ns: price.counted.wait_ns,
            counted_ns: price.counted.ns(),
        }
    };
    verdict::rows(runs, offer).into_iter().map(row).collect()
}

/// The report as the JSON that docs/replay.md describes.
pub fn json(
    runs: &Runs,
    summary: &Summary,
    arguments: &Replay,
    format: &str,
    profile: &Profile,
) -> serde_json::Result<String> {
    let options = ReplayOptions {
        profile: &arguments.profile,
        format,
        work_ns: arguments.work,
        device: arguments.device.as_deref(),
        limit: arguments.limit,
        repeat: runs.number,
        strict_parse: arguments.strict_parse,
        on: arguments.on,
    };
    let offer = Offer::of(arguments.on, format);
    let verdict = Verdict::told(runs, offer, &Place::named(&runs.report.trace.devices));
    let replayed = Replayed {
        report: &exposed::for_json(&runs.report),
        costs: &runs.costs,
        calibration: &runs.calibration,
        prices: prices(runs, offer),
        verdict: verdict.sentences,
        choice: verdict.choice,
        notes: header::notes(summary),
        warnings: warnings::all(runs, summary),
    };
    document(schema::REPLAY, options, std::slice::from_ref(profile), replayed)
}

/// The command of these words as it was typed, with quotes where a shell wants them; the first word is where the program lies.
pub fn command(words: impl Iterator<Item = OsString>) -> String {
    let quoted = words.skip(1).map(|word| quoted(&word.to_string_lossy()));
    std::iter::once(env!("CARGO_BIN_NAME").to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it, whatever is in it: names come from devices and files.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

struct Lines {
    depth: usize,
}

impl Lines {
    fn line<W: ?Sized + std::io::Write>(&self, writer: &mut W) -> std::io::Result<()> {
        write!(writer, "\n{:1$}", "", self.depth * 2)
    }
}

impl Formatter for Lines {
    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.depth += 1;
        writer.write_all(b"{")
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b"," })?;
        self.line(writer)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }

    /// What a terminal or a person would take for something else is escaped, too, as JSON may escape any character.
    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        let mut rest = fragment;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| !is_plain(*c)) {
            let (plain, after) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = after.get(c.len_utf8()..).unwrap_or_default();
        }
        writer.write_all(rest.as_bytes())
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.depth -= 1;
        self.line(writer)?;
        writer.write_all(b"}")
    }
}

/// The name that Linux has for the processor.
pub fn cpu() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A line of figures for each policy, after one with their names; then one for each row of the kernel's code.
pub fn csv(runs: &Runs, offer: Offer) -> String {
    let mut text = "policy,operations,cost_median_ns,cost_least_ns,cost_most_ns,map_ns,unmap_ns,wait_ns_per_op,ops_per_s,\
                    relative_to_passthrough,invalidations,stale_byte_s,neighbour_byte_s,faults,violations\n"
        .to_owned();
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let costs = if cost.is_told() {
            format!(
                "{:.2},{:.2},{:.2},{:.2},{:.2},{:.2},{:.0},{:.4}",
                cost.median_ns,
                cost.least_ns,
                cost.most_ns,
                policy.map_ns.mean,
                policy.unmap_ns.mean,
                policy.wait_ns_per_op,
                policy.ops_per_s,
                policy.relative_to_passthrough.unwrap_or_default(),
            )
        } else {
            ",,,,,,,".into()
        };
        // Writing to a string cannot fail.
        let [freed, other] = Exposed::of(policy, runs.report.trace.tells_copies()).map(Exposed::csv);
        let _ = writeln!(
            text,
            "{},{},{costs},{},{freed},{other},{},{}",
            policy.policy, policy.operations, policy.invalidations, policy.faults, policy.violations,
        );
    }
    for row in verdict::rows(runs, offer) {
        let (price, policy) = (row.price, row.price.policy);
        if price.code == Code::Library || !price.cost.is_told() {
            continue;
        }
        let [freed, other] = Exposed::of(policy, runs.report.trace.tells_copies()).map(Exposed::csv);
        let [least_ns, most_ns] = price.range_ns;
        let _ = writeln!(
            text,
            "{},{},{:.2},{least_ns:.2},{most_ns:.2},,,{:.2},{:.0},{:.4},{},{freed},{other},{},{}",
            price.row,
            policy.operations,
            price.ns,
            policy.wait_ns_per_op,
            1e9 / (runs.report.work_ns + price.ns),
            1.0 - row.lost(),
            policy.invalidations,
            policy.faults,
            policy.violations,
        );
    }
    text
}
