//! `portcullis replay`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use portcullis_trace::replay::{
    Mode, Options, Profile, ProfileError, ReplayError, Report, built_in_text, replay,
};
use portcullis_trace::{Input, Printable, ReadOptions, Summary, Trace, TraceError, is_named};

use crate::args::{On, PolicyName, Replay};
use crate::calibration::{Calibration, CalibrationError};
use crate::header::some_of;
use crate::look::number_of;
use crate::on_linux::{Offer, Place};
use crate::runs::Runs;
use crate::{explain, interrupt, look, machine, print, short, warnings};

/// The trace that ships with the project.
const SHIPPED: &[u8] = include_bytes!("../traces/mixed-nvme-e1000e.trace.zst");
const SHIPPED_NAME: &str = "mixed-nvme-e1000e.trace.zst";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
    #[error(
        "{}: no mapping of a device \"{}\"; {} {}",
        Printable(name),
        Printable(device),
        limit.map_or("the trace has".into(), |limit| format!("up to --limit {limit} the trace has")),
        list(devices)
    )]
    NoSuchDevice { name: String, device: String, devices: Vec<String>, limit: Option<u64> },
    #[error(
        "standard input is a pipe: `portcullis replay -` reads it, and `portcullis replay < /dev/null` does without it"
    )]
    Pipe,
    #[error(
        "{}: \"{}\" is the end of several devices' names: {}",
        Printable(name),
        Printable(device),
        some_of(devices)
    )]
    SeveralDevices { name: String, device: String, devices: Vec<String> },
    #[error("nothing was replayed")]
    NoRun,
    #[error("{policy}: {} failed, the first at {first}", number_of(*failures, "call"))]
    Strict { policy: &'static str, failures: u64, first: String },
    #[error("{policy}: {} and {}: protection did not hold", number_of(*violations, "violation"), number_of(*faults, "fault"))]
    Unprotected { policy: &'static str, violations: u64, faults: u64 },
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "no device at all".into() } else { some_of(names) }
}

/// Runs the command and prints what it found.
pub fn run(arguments: &Replay) -> Result<ExitCode, CommandError> {
    if let Some(text) = arguments.print_profile.as_deref().and_then(built_in_text) {
        print(text)?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.trace.is_none() && Input::stdin_is_pipe() && !pipe_is_over() {
        return Err(CommandError::Pipe);
    }
    interrupt::listen();
    let mut options = Options::new(Profile::load(&arguments.profile)?);
    options.work_ns = arguments.work.map(|ns| ns as f64);
    options.copies_in = arguments.on == On::Linux;
    if let Some(format) = &arguments.format {
        options.format.clone_from(format);
    }
    if !arguments.policy.is_empty() {
        options.policies = policies(&arguments.policy);
    }
    let calibration = Calibration::of(arguments.calibration.as_deref())?;
    let (runs, mut summary) = replay_some(arguments, &options)?;
    let mut runs = Runs { calibration, ..runs };
    check_device(arguments, &summary)?;
    if let Some(device) = &arguments.device {
        narrow(&mut runs.report, &mut summary, device);
    }
    let unicode = look::is_unicode();
    let mut text = match arguments {
        Replay { json: true, .. } => {
            machine::json(&runs, &summary, arguments, &options.format, &options.profile)
                .map_err(std::io::Error::from)?
        }
        Replay { csv: true, .. } => machine::csv(&runs, Offer::of(arguments.on, &options.format)),
        Replay { full, legend, sweep, on, .. } => {
            let place = Place::named(&summary.devices);
            let (format, offer, sweep) = (&options.format, Offer::of(*on, &options.format), *sweep);
            let all_devices = arguments.device.is_none();
            let parts = short::Parts {
                format,
                offer,
                place,
                all_devices,
                sweep,
                full: *full,
                legend: *legend,
                unicode,
            };
            short::render(&runs, &options.profile, &summary, parts)
        }
    };
    if arguments.explain {
        text.push_str(&explain::counts(&runs, Offer::of(arguments.on, &options.format)));
        text.push_str(&explain::render(&runs.report));
    }
    print(&if arguments.json { text } else { look::shown(&text) })?;
    for warning in warnings::all(&runs, &summary) {
        look::tell(&look::wrap(&format!("warning: {warning}"), "  "));
    }
    check(arguments, &runs.report)?;
    if interrupt::stopped() {
        let of = number_of(runs.number as u64, "run");
        let text = format!(
            "portcullis: stopped by Ctrl-C: these are the figures of {of}, which read {}.",
            read(&summary)
        );
        look::tell(&look::wrap(&text, ""));
        return Ok(interrupt::EXIT_CODE.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether nothing comes out of the pipe that standard input is, and nothing will: it is closed at its other end.
#[cfg(unix)]
fn pipe_is_over() -> bool {
    let mut pipe = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: the call reads and writes one `pollfd`.
    let ready = unsafe { libc::poll(&raw mut pipe, 1, PATIENCE_MS) };
    ready == 1 && pipe.revents & libc::POLLIN == 0
}

#[cfg(not(unix))]
fn pipe_is_over() -> bool {
    false
}

/// How long the other end of a pipe may take to write or to close it.
#[cfg(unix)]
const PATIENCE_MS: libc::c_int = 1_000;

/// A run of the beginning of the trace that ships.
#[cfg(test)]
pub fn short_run() -> (Runs, Summary) {
    let limited = ReadOptions { limit: Some(6_000), ..ReadOptions::default() };
    let mut trace = Trace::from_bytes(SHIPPED_NAME, SHIPPED, limited).unwrap();
    let options = Options::new(Profile::load("vtd").unwrap());
    let report = replay(&mut trace, &options, |_| {}).unwrap();
    (Runs::of(vec![report]).unwrap(), trace.summary().clone())
}

/// How much of the trace was read.
fn read(summary: &Summary) -> String {
    if summary.stopped {
        format!("the first {}", number_of(summary.events, "event"))
    } else {
        format!("all {}", number_of(summary.events, "event"))
    }
}

/// A replay that takes less is repeated, unless it is said how often.
const SHORT: Duration = Duration::from_secs(3);

/// Replays the trace as often as is asked for, or as its length allows. A pipe is read once: where more runs are asked for, it
/// is kept in memory.
fn replay_some(arguments: &Replay, options: &Options) -> Result<(Runs, Summary), CommandError> {
    let (mut reports, mut summary) = (Vec::new(), Summary::default());
    let mut most = arguments.repeat.map_or(1, |repeat| repeat as usize);
    let mut too_long = false;
    let kept = if most > 1 { read_pipe(arguments)? } else { None };
    while reports.len() < most {
        let start = Instant::now();
        let mut trace = open(arguments, kept.as_ref())?;
        let bar = progress_bar(&trace);
        let report = replay(&mut trace, options, |trace| {
            bar.set_position(trace.bytes_read());
            if interrupt::stopped() {
                trace.stop();
            }
        });
        bar.finish_and_clear();
        let report = report?;
        // Runs are of the same events: one that was stopped counts where there is no other.
        if reports.is_empty() || !trace.summary().stopped {
            reports.push(report);
            summary = trace.summary().clone();
        }
        if trace.bytes_total().is_none() || interrupt::stopped() {
            break;
        }
        if arguments.repeat.is_none() && reports.len() == 1 {
            too_long = start.elapsed() >= SHORT;
            most = if too_long { 1 } else { 3 };
        }
    }
    Ok((Runs { too_long, ..Runs::of(reports).ok_or(CommandError::NoRun)? }, summary))
}

fn policies(names: &[PolicyName]) -> Vec<Mode> {
    let mut modes: Vec<Mode> = Vec::new();
    for mode in names.iter().map(|name| name.mode()) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    modes
}

/// A pipe's name and all that comes out of it.
type Kept = (PathBuf, Vec<u8>);

fn open<'a>(arguments: &Replay, kept: Option<&'a Kept>) -> Result<Trace<'a>, TraceError> {
    let options = ReadOptions {
        strict: arguments.strict_parse,
        device: arguments.device.clone(),
        limit: arguments.limit,
    };
    match (kept, &arguments.trace) {
        (Some((name, bytes)), _) => Trace::from_bytes(name.display().to_string(), bytes.as_slice(), options),
        // Nothing may ever come out of a pipe that is there: `-` asks for it.
        (None, None) => match Input::stdin_file()? {
            Some(input) => Ok(Trace::new(input, options)),
            None => Trace::from_bytes(SHIPPED_NAME, SHIPPED, options),
        },
        (None, Some(path)) if path == Path::new("-") => Trace::stdin(options),
        (None, Some(path)) => Trace::open(path, options),
    }
}

/// Reads the recording that is asked for to its end, where that is possible once only.
fn read_pipe(arguments: &Replay) -> Result<Option<Kept>, TraceError> {
    let (name, bytes) = match &arguments.trace {
        Some(path) if path == Path::new("-") && Input::stdin_file()?.is_none() => {
            let mut bytes = Vec::new();
            let read = std::io::stdin().lock().read_to_end(&mut bytes);
            (PathBuf::from("standard input"), read.map(|_| bytes))
        }
        Some(path) if path.metadata().is_ok_and(|about| !about.is_file() && !about.is_dir()) => {
            (path.clone(), std::fs::read(path))
        }
        _ => return Ok(None),
    };
    match bytes {
        Ok(bytes) => Ok(Some((name, bytes))),
        Err(source) => Err(TraceError::Io { path: name, source }),
    }
}

/// A bar for traces that take a while, on a terminal only.
fn progress_bar(trace: &Trace<'_>) -> ProgressBar {
    const LONG: u64 = 8 << 20;
    match trace.bytes_total() {
        Some(total) if total < LONG => ProgressBar::hidden(),
        Some(total) => {
            let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}, {eta} to go");
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars(look::BAR))
        }
        None => {
            let bar = ProgressBar::new_spinner();
            let style = ProgressStyle::with_template("{spinner} {bytes} read, {bytes_per_sec}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()).tick_chars("|/-\\ "));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        }
    }
}

fn check_device(arguments: &Replay, summary: &Summary) -> Result<(), CommandError> {
    let Some(device) = &arguments.device else { return Ok(()) };
    let (name, device) = (summary.name.clone(), device.clone());
    let is_meant = |known: &&String| is_named(&device, known);
    let meant: Vec<String> = summary.devices.iter().filter(is_meant).cloned().collect();
    match meant.len() {
        0 if summary.maps == 0 => {
            let limit = arguments.limit.filter(|_| summary.limited);
            Err(CommandError::NoSuchDevice { name, device, devices: summary.devices.clone(), limit })
        }
        0 | 1 => Ok(()),
        _ => Err(CommandError::SeveralDevices { name, device, devices: meant }),
    }
}

/// Leaves the device that was asked for, as `asked` names it: all that is printed is of it, commands too.
fn narrow(report: &mut Report, summary: &mut Summary, asked: &str) {
    let Some(at) = summary.devices.iter().position(|known| is_named(asked, known)) else { return };
    summary.devices = vec![summary.devices.swap_remove(at)];
    report.trace.devices.clone_from(&summary.devices);
    for choices in report.policies.iter_mut().flat_map(|policy| &mut policy.choices) {
        choices.device = 0;
    }
}

fn check(arguments: &Replay, report: &Report) -> Result<(), CommandError> {
    for policy in &report.policies {
        if let (true, Some(first)) = (arguments.strict_parse, &policy.first_failure) {
            let failures = policy.failures;
            return Err(CommandError::Strict { policy: policy.policy, failures, first: first.clone() });
        }
        if policy.violations > 0 || policy.faults > 0 {
            let (violations, faults) = (policy.violations, policy.faults);
            return Err(CommandError::Unprotected { policy: policy.policy, violations, faults });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Arguments;

    #[test]
    fn a_replay_fails_where_protection_did_not_hold_and_strictly_where_a_call_failed() {
        let said = |arguments: &[&str], violations, faults, first: Option<&str>| {
            let mut report = crate::golden::runs().report;
            let policy = &mut report.policies[2];
            (policy.violations, policy.faults, policy.failures) = (violations, faults, 7);
            policy.first_failure = first.map(str::to_owned);
            check(&Arguments::replay(arguments), &report).err().map(|error| error.to_string())
        };
        let broken = |violations: &str, faults: &str| {
            Some(format!("lazy: {violations} and {faults}: protection did not hold"))
        };
        assert_eq!(said(&[], 0, 0, None), None);
        assert_eq!(said(&[], 1, 0, None), broken("1 violation", "0 faults"));
        assert_eq!(said(&[], 0, 1, None), broken("0 violations", "1 fault"));
        assert_eq!(said(&[], 0, 0, Some("line 5")), None);
        let strictly = said(&["--strict-parse"], 0, 0, Some("line 5"));
        assert_eq!(strictly.as_deref(), Some("lazy: 7 calls failed, the first at line 5"));
    }

    #[test]
    fn a_device_that_the_recording_names_may_have_no_mapping() {
        let said = |device, maps, devices: &[&str]| {
            let mut summary = Summary::default();
            (summary.maps, summary.devices) = (maps, devices.iter().map(ToString::to_string).collect());
            check_device(&Arguments::replay(&["--device", device]), &summary)
                .err()
                .map(|error| error.to_string())
        };
        assert_eq!(said("a", 0, &["a", "b"]), None);
        assert_eq!(said("a", 1, &[]), None);
        assert_eq!(
            said("c", 0, &["a", "b"]).as_deref(),
            Some(": no mapping of a device \"c\"; the trace has a, b")
        );
        let several = ": \"03.0\" is the end of several devices' names: 0:03.0, 1:03.0";
        assert_eq!(said("03.0", 2, &["0:03.0", "x", "1:03.0"]).as_deref(), Some(several));
        assert_eq!(said("03.0", 2, &["0:03.0", "13.0"]), None);
        let none = ": no mapping of a device \"c\"; the trace has no device at all";
        assert_eq!(said("c", 0, &[]).as_deref(), Some(none));
    }

    #[test]
    fn it_is_said_how_much_was_read() {
        let mut summary = Summary::default();
        summary.events = 1234;
        assert_eq!(read(&summary), "all 1,234 events");
        summary.stopped = true;
        assert_eq!(read(&summary), "the first 1,234 events");
    }
}
