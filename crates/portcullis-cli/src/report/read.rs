//! Reading results: what `replay`, `bench` and `scale` print with `--json`.

use std::fs::File;
use std::path::{Path, PathBuf};

use portcullis_trace::Printable;
use portcullis_trace::input::read_whole;
use portcullis_trace::replay::Report;
use serde::Deserialize;
use serde_json::Value;

use crate::args::On;
use crate::calibration::Calibration;
use crate::machine::schema;
use crate::runs::{Cost, Runs, TIMED_FROM};

/// The largest result that is read: 16 MiB, of which ours have less than one.
const MOST_BYTES: u64 = 16 << 20;

/// The most results in one: policies, or measurements. Names in a plot are placed beside each other, which takes longer than
/// in proportion.
const MOST_RESULTS: usize = 8192;
const MOST_POLICIES: usize = 64;

/// Why a report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("{}: {error}", Printable(name))]
    Input { name: String, error: std::io::Error },
    #[error(
        "{}: this is no JSON ({error}); `portcullis replay --json` prints what a report is made of",
        Printable(name)
    )]
    Json { name: String, error: serde_json::Error },
    #[error(
        "{}: this is no result that a report is made of; it reads what `portcullis replay`, `portcullis bench` and \
             `portcullis scale` print with --json",
        Printable(name)
    )]
    Unknown { name: String },
    #[error(
        "{}: this looks like a result of {tool}, but {}; print it again with this version's `{tool} --json`",
        Printable(name),
        Printable(error)
    )]
    Shape { name: String, tool: &'static str, error: String },
}

/// A result, by what made it.
pub enum Outcome {
    Replay(Box<Replayed>),
    Bench(Benched),
    Scale(Scaled),
}

/// What the result says of its making.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Origin {
    /// When, of UTC.
    pub date: Option<String>,
    pub command: Option<String>,
    pub machine: Machine,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub os: Option<String>,
    pub arch: Option<String>,
    pub cpu: Option<String>,
    pub cpus: u64,
}

pub struct Replayed {
    pub origin: Origin,
    pub runs: Runs,
    pub format: String,
    /// What the verdict chooses among.
    pub on: On,
    pub notes: Vec<String>,
    pub warnings: Vec<String>,
}

#[derive(Deserialize)]
struct ReplayJson {
    #[serde(flatten)]
    report: Report,
    options: OptionsJson,
    costs: Vec<CostJson>,
    /// Results of earlier versions have none.
    #[serde(default)]
    calibration: Calibration,
    #[serde(default)]
    notes: Vec<String>,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct OptionsJson {
    format: String,
    repeat: usize,
    #[serde(default)]
    on: On,
}

#[derive(Deserialize)]
struct CostJson {
    policy: String,
    median_ns: f64,
    least_ns: f64,
    most_ns: f64,
}

#[derive(Deserialize)]
pub struct Benched {
    #[serde(skip)]
    pub origin: Origin,
    pub bench: String,
    pub results: Vec<Measured>,
    pub skipped: Vec<Skipped>,
}

#[derive(Deserialize)]
pub struct Measured {
    pub format: Option<String>,
    pub direction: Option<String>,
    pub workload: String,
    pub threads: u64,
    pub subject: String,
    pub profile: Option<String>,
    pub ns_per_op: f64,
    pub min: f64,
    pub max: f64,
    pub p99_99: Option<f64>,
}

#[derive(Deserialize)]
pub struct Skipped {
    pub workload: String,
    pub threads: u64,
    pub subject: String,
    pub reason: String,
}

#[derive(Deserialize)]
pub struct Scaled {
    #[serde(skip)]
    pub origin: Origin,
    pub workload: String,
    #[serde(default)]
    pub about: String,
    pub profile: String,
    #[serde(default)]
    pub calibration: Calibrated,
    /// The command's own, for the most CPUs.
    #[serde(default)]
    pub verdict: Vec<String>,
    /// The policy that it chooses.
    #[serde(default)]
    pub choice: Option<String>,
    pub results: Vec<Scale>,
}

/// Whose cache lines and memory were assumed.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Calibrated {
    pub machine: String,
}

/// A policy on a number of CPUs.
#[derive(Clone, Deserialize)]
pub struct Scale {
    pub policy: String,
    pub cpus: u64,
    pub relative_to_passthrough: f64,
    /// The same with the kernel's code, where that would run.
    #[serde(default)]
    pub relative_with_kernel: Option<f64>,
    pub requests_per_s: f64,
    #[serde(flatten)]
    pub spent: Spent,
    #[serde(default)]
    pub hottest: String,
    /// What of it was not measured.
    #[serde(default)]
    pub extrapolated: Vec<String>,
}

/// What the time of a request goes into, in nanoseconds.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct Spent {
    pub work_ns: f64,
    pub library_ns: f64,
    pub shared_ns: f64,
    pub queue_wait_ns: f64,
    pub copy_ns: f64,
    pub idle_ns: f64,
}

impl Outcome {
    /// The command that printed it.
    pub fn tool(&self) -> String {
        match self {
            Self::Replay(_) => "portcullis replay".into(),
            Self::Bench(benched) => format!("portcullis bench {}", benched.bench),
            Self::Scale(_) => "portcullis scale".into(),
        }
    }
}

/// Reads one result; `-` is standard input. Its name, too.
pub fn read(path: &Path) -> Result<(String, Outcome), ReadError> {
    let name = if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
    let all = if path == Path::new("-") {
        read_whole(std::io::stdin(), MOST_BYTES)
    } else {
        File::open(path).and_then(|file| read_whole(file, MOST_BYTES))
    };
    let text = all.map_err(|error| ReadError::Input { name: name.clone(), error })?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|error| ReadError::Json { name: name.clone(), error })?;
    let outcome = outcome(value).map_err(|what| match what {
        None => ReadError::Unknown { name: name.clone() },
        Some((tool, error)) => ReadError::Shape { name: name.clone(), tool, error },
    })?;
    let short =
        PathBuf::from(&name).file_name().map_or(name.clone(), |last| last.to_string_lossy().into_owned());
    Ok((short, outcome))
}

/// Reads one result. The error is `None` where no tool of ours wrote it; else it names the tool, and what is wrong.
pub fn outcome(value: Value) -> Result<Outcome, Option<(&'static str, String)>> {
    let has = |name: &str| value.get(name).is_some();
    let (tool, schema) = match () {
        () if has("policies") && has("costs") && has("trace") => ("portcullis replay", schema::REPLAY),
        () if has("bench") && has("results") => ("portcullis bench", schema::BENCH),
        () if has("workload") && has("results") && has("profile") => ("portcullis scale", schema::SCALE),
        () => return Err(None),
    };
    match value.get("schema").and_then(Value::as_u64) {
        Some(own) if own == u64::from(schema) => {}
        Some(own) => return Err(Some((tool, format!("its `schema` is {own}, and not {schema}")))),
        None => return Err(Some((tool, format!("it has no number `schema`, which is to be {schema}")))),
    }
    let wrong = |error: serde_json::Error| Some((tool, error.to_string()));
    if let Some(at) = negative(&value, "") {
        return Err(Some((tool, format!("{at} is less than 0"))));
    }
    for (name, most) in [("policies", MOST_POLICIES), ("results", MOST_RESULTS)] {
        let number = value.get(name).and_then(Value::as_array).map_or(0, Vec::len);
        if number > most {
            return Err(Some((tool, format!("it has {number} `{name}`, of which {most} are the limit"))));
        }
    }
    let origin = Origin::deserialize(&value).map_err(wrong)?;
    Ok(match tool {
        "portcullis replay" => {
            let json = ReplayJson::deserialize(value).map_err(wrong)?;
            Outcome::Replay(Box::new(json.checked(origin).map_err(|error| Some((tool, error)))?))
        }
        "portcullis bench" => {
            Outcome::Bench(Benched { origin, ..Benched::deserialize(value).map_err(wrong)? })
        }
        _ => Outcome::Scale(Scaled { origin, ..Scaled::deserialize(value).map_err(wrong)? }),
    })
}

impl ReplayJson {
    fn checked(self, origin: Origin) -> Result<Replayed, String> {
        let Self { report, options, costs, calibration, notes, warnings } = self;
        let names = |cost: &CostJson| cost.policy.clone();
        let policies: Vec<String> = report.policies.iter().map(|policy| policy.policy.to_owned()).collect();
        // Where nothing was mapped there are no costs.
        if !costs.is_empty() && costs.iter().map(names).collect::<Vec<_>>() != policies {
            return Err("`costs` and `policies` do not name the same policies".into());
        }
        let costs = costs.into_iter().zip(&report.policies).map(|(cost, policy)| Cost {
            policy: policy.policy,
            median_ns: cost.median_ns,
            least_ns: cost.least_ns,
            most_ns: cost.most_ns,
            known: report.trace.tells_cost_of(policy.mode),
            timed: policy.operations >= TIMED_FROM,
        });
        let runs =
            Runs { costs: costs.collect(), number: options.repeat, too_long: false, calibration, report };
        Ok(Replayed { origin, runs, format: options.format, on: options.on, notes, warnings })
    }
}

/// Where a number stands that is below 0: no figure of a result is.
fn negative(value: &Value, at: &str) -> Option<String> {
    match value {
        Value::Number(number) => number.as_f64().filter(|number| *number < 0.0).map(|_| at.to_owned()),
        Value::Array(all) => all.iter().find_map(|value| negative(value, at)),
        Value::Object(all) => all.iter().find_map(|(name, value)| negative(value, name)),
        _ => None,
    }
}
