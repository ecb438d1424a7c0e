//! What a report for machines says besides its figures: by which tool, on which machine, under which options.

use std::fmt::Write;

use portcullis_trace::Summary;
use portcullis_trace::replay::Report;
use serde::Serialize;
use serde_json::ser::Formatter;

use crate::args::Replay;
use crate::runs::{Cost, Runs};
use crate::{header, warnings};

/// The version of the JSON: fields are added without a new one, and never changed.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    tool: Tool,
    command: String,
    machine: Machine,
    options: Options<'a>,
    #[serde(flatten)]
    report: &'a Report,
    costs: &'a [Cost],
    notes: Vec<String>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Tool {
    name: &'static str,
    version: &'static str,
}

/// The machine that printed a result.
#[derive(Serialize)]
pub struct Machine {
    os: &'static str,
    arch: &'static str,
    /// As the operating system calls it; `None` where it does not say.
    cpu: Option<String>,
    cpus: usize,
}

impl Machine {
    pub fn here() -> Self {
        Self {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cpu: cpu(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

#[derive(Serialize)]
struct Options<'a> {
    profile: &'a str,
    format: &'a str,
    work_ns: u64,
    device: Option<&'a str>,
    limit: Option<u64>,
    repeat: usize,
    strict_parse: bool,
}

/// The report as the JSON that docs/replay.md describes.
pub fn json(runs: &Runs, summary: &Summary, arguments: &Replay, format: &str) -> serde_json::Result<String> {
    let document = Document {
        schema: SCHEMA,
        tool: Tool { name: env!("CARGO_BIN_NAME"), version: env!("CARGO_PKG_VERSION") },
        command: command(),
        machine: Machine::here(),
        options: Options {
            profile: &arguments.profile,
            format,
            work_ns: arguments.work,
            device: arguments.device.as_deref(),
            limit: arguments.limit,
            repeat: runs.number,
            strict_parse: arguments.strict_parse,
        },
        report: &runs.report,
        costs: &runs.costs,
        notes: header::notes(summary),
        warnings: warnings::of(runs, summary),
    };
    print(&document)
}

/// The command as it was typed, with quotes where a shell wants them.
pub fn command() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    let quoted = std::env::args().skip(1).map(|word| {
        let is_plain = !word.is_empty() && word.chars().all(plain);
        if is_plain { word } else { format!("'{}'", word.replace('\'', r"'\''")) }
    });
    std::iter::once(env!("CARGO_BIN_NAME").to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

/// Prints JSON with a line for each field, and lists in one line: a distribution has hundreds of entries.
pub fn print(document: &impl Serialize) -> serde_json::Result<String> {
    let mut text = Vec::new();
    document.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Lines { depth: 0 }))?;
    text.push(b'\n');
    Ok(String::from_utf8_lossy(&text).into_owned())
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

/// A line of figures for each policy, after one with their names.
pub fn csv(runs: &Runs) -> String {
    let mut text = "policy,operations,cost_median_ns,cost_least_ns,cost_most_ns,map_ns,unmap_ns,wait_ns_per_op,ops_per_s,\
                    relative_to_passthrough,invalidations,stale_byte_s,neighbour_byte_s,faults,violations\n"
        .to_owned();
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{},{},{:.2},{:.2},{:.2},{:.2},{:.2},{:.2},{:.0},{:.4},{},{},{},{},{}",
            policy.policy,
            policy.operations,
            cost.median_ns,
            cost.least_ns,
            cost.most_ns,
            policy.map_ns.mean,
            policy.unmap_ns.mean,
            policy.wait_ns_per_op,
            policy.ops_per_s,
            policy.relative_to_passthrough.unwrap_or_default(),
            policy.invalidations,
            policy.exposure.stale_byte_s,
            policy.exposure.neighbour_byte_s,
            policy.faults,
            policy.violations,
        );
    }
    text
}
