//! What `portcullis scale` starts from: the costs of each operation on so many CPUs, kept in the repository.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::program::{Case, Outcome, Program};
use super::{run, sites};
use crate::nightly::output;

/// Where it is kept.
const FILE: &str = "crates/portcullis-model/src/scale/operations.txt";

/// Source lines that are named of each, at the most.
const LINES: usize = 3;

/// Lines of less than this share of the transfers are not named.
const LEAST: f64 = 0.05;

const HEAD: &str = "\
# What one operation, a map and an unmap, costs on simulated CPUs: `cargo xtask coherence --keep` writes this file, and
# docs/scaling.md says how it is measured. `portcullis scale` reads it. CPUs do nothing in between, and hardware answers at once.
#
# op NAME-PAGES[-live MAPPINGS OF EACH CPU | -any THE SAME, WHICH END IN ANY ORDER][@ PROFILE OF THE HARDWARE] CPUS CPUS_PER_SOCKET NS TRANSFERS OF_THESE_BETWEEN_SOCKETS ATOMICS DATE COMMIT: figures are of each operation
# line SHARE SOURCE: that share of the op's transfers above it was caused there
";

const EACH: [u32; 5] = [1, 2, 16, 64, 256];
const CONTENDED: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 256];
/// Of designs that collapse before: 256 CPUs that look at one word take too long to simulate.
const LOCKED: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// A workload, numbers of CPUs, and CPUs of a socket.
type Wanted = (&'static str, &'static [u32], u32);

/// All that is kept. CPUs of an old design wait for each other, and how long depends on how many there are.
const KEPT: [Wanted; 46] = [
    ("raw-1", &EACH, 64),
    ("raw-4", &[1, 16], 64),
    ("raw-16", &[1, 16], 64),
    ("raw-64", &[1, 16, 64], 64),
    ("batch-1", &EACH, 64),
    ("batch-4", &[1, 16], 64),
    ("batch-16", &[1, 16], 64),
    ("batch-64", &[1, 16], 64),
    ("lazy-1", &EACH, 64),
    ("lazy-4", &[1, 16], 64),
    ("lazy-16", &[1, 16], 64),
    ("lazy-64", &[1, 16, 64], 64),
    ("ring-1", &EACH, 64),
    ("ring-4", &[1, 16], 64),
    ("ring-16", &[1, 16], 64),
    ("ring-64", &[1, 16], 64),
    ("pool-1", &EACH, 64),
    ("pool-4", &[1, 16], 64),
    ("pool-16", &[1, 16], 64),
    ("pool-64", &[1, 16], 64),
    ("swiotlb-1", &EACH, 64),
    ("swiotlb-4", &[1, 16], 64),
    ("swiotlb-16", &[1, 16], 64),
    ("swiotlb-64", &[1, 16], 64),
    ("adaptive-1", &EACH, 64),
    ("adaptive-4", &[1, 16], 64),
    ("adaptive-16", &[1, 16], 64),
    ("adaptive-64", &[1, 16], 64),
    ("vtd-raw-1@vtd", &[1], 64),
    ("vtd-shared-raw-1@vtd", &CONTENDED, 64),
    ("smmu-own-raw-1@smmuv3", &[1, 2, 16, 64], 64),
    ("lazy-2015-1-live512", &LOCKED, 64),
    ("lazy-2015-1-live512", &[2], 1),
    ("lazy-2015-1-live512", &[4], 2),
    ("lazy-2015-1-live512", &[8], 4),
    ("lazy-2015-1-live512", &[16], 8),
    ("bitmap-2008-1-live512", &LOCKED, 64),
    ("smmu-2017-1-any32", &LOCKED, 64),
    ("smmu-2017-1-any32", &[4], 2),
    ("smmu-2017-1-any32", &[16], 8),
    ("smmu-2017-1-any32", &[32], 16),
    ("smmu-2017-4-any32", &[1, 2, 16, 32], 64),
    ("smmu-2017-16-any32", &[1, 2, 16, 32], 64),
    ("swiotlb-2021-1-live32", &LOCKED, 64),
    ("swiotlb-lifo-1-live32", &LOCKED, 64),
    ("swiotlb-2022-1-live32", &EACH, 64),
];

/// What orders the file: name, sockets' size, CPUs.
type Key = (String, u32, u32);

/// The first of `workloads` of which nothing is kept.
pub fn unknown<'a>(workloads: &[&'a str]) -> Option<&'a str> {
    workloads.iter().copied().find(|name| KEPT.iter().all(|(kept, ..)| kept != name))
}

/// Measures what is kept of `workloads`, or all of it, and replaces that in the file.
pub fn keep(root: &Path, workloads: &[&str]) -> Result<(), String> {
    if let Some(other) = unknown(workloads) {
        return Err(format!("{other}: not among what is kept"));
    }
    let program = Program::build(root)?;
    let wanted = KEPT.iter().filter(|(name, ..)| workloads.is_empty() || workloads.contains(name));
    let cases: Vec<Case> = wanted
        .flat_map(|(name, cpus, per_socket)| {
            let (workload, profile) =
                name.split_once('@').map_or((*name, None), |(name, at)| (name, Some(at)));
            let mut options = vec![format!("per-socket={per_socket}")];
            options.extend(profile.map(|profile| format!("profile={profile}")));
            let case =
                move |cpus: &u32| Case { options: options.clone(), sites: 64, ..Case::new(workload, *cpus) };
            cpus.iter().map(case)
        })
        .collect();
    let total = cases.len();
    let outcomes = run(&program, &cases, |done| eprint!("\r{done} of {total}"))?;
    eprintln!();
    let path = root.join(FILE);
    let old =
        if workloads.is_empty() { String::new() } else { std::fs::read_to_string(&path).unwrap_or_default() };
    let mut kept = entries(&old);
    let stamp =
        format!("{} {}", asked("date", &["-u", "+%F"]), asked("git", &["rev-parse", "--short", "HEAD"]));
    let (_, lines) = sites::lines(&program, root, &outcomes);
    for (outcome, lines) in outcomes.iter().zip(lines) {
        match entry(outcome, &lines, &stamp) {
            Ok((key, text)) => _ = kept.insert(key, text),
            Err(why) => {
                eprintln!("{} on {} CPUs is left out: {why}", outcome.case.workload, outcome.case.cpus)
            }
        }
    }
    let text: String = kept.into_values().collect();
    std::fs::write(&path, format!("{HEAD}{text}")).map_err(|error| format!("{}: {error}", path.display()))
}

/// What a program says, in one word.
fn asked(program: &str, arguments: &[&str]) -> String {
    let text = output(Command::new(program).args(arguments)).unwrap_or_default();
    let word = text.trim();
    if word.is_empty() { "unknown".to_owned() } else { word.to_owned() }
}

/// One operation as the file has it.
fn entry(outcome: &Outcome, lines: &[(String, f64)], stamp: &str) -> Result<(Key, String), String> {
    let figures = outcome.figures.clone()?;
    let Case { workload, cpus, options, .. } = &outcome.case;
    let per_socket = options.iter().find_map(|option| option.strip_prefix("per-socket=")?.parse().ok());
    let per_socket: u32 = per_socket.unwrap_or(64);
    let profile = options.iter().find_map(|option| option.strip_prefix("profile="));
    let workload = profile.map_or(workload.clone(), |profile| format!("{workload}@{profile}"));
    let mut text = format!(
        "op {workload} {cpus} {per_socket} {:.1} {:.3} {:.3} {:.2} {stamp}\n",
        figures.ns, figures.transfers, figures.far, figures.atomics
    );
    for (line, transfers) in lines.iter().take(LINES) {
        let share = transfers / figures.transfers;
        if figures.transfers >= 0.02 && share >= LEAST {
            let _ = writeln!(text, "line {share:.2} {line}");
        }
    }
    Ok(((workload, per_socket, *cpus), text))
}

/// The operations of a file, each with its lines.
fn entries(text: &str) -> BTreeMap<Key, String> {
    let mut found: BTreeMap<Key, String> = BTreeMap::new();
    let mut last = None;
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["op", name, cpus, per_socket, ..] = words[..] {
            let number = |text: &str| text.parse().unwrap_or_default();
            last = Some((name.to_owned(), number(per_socket), number(cpus)));
        }
        if let (Some(key), false) = (&last, line.starts_with('#')) {
            let text = found.entry(key.clone()).or_default();
            text.push_str(line);
            text.push('\n');
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::program::Figures;
    use super::*;

    #[test]
    fn what_is_kept_is_read_back_and_replaced() {
        let figures = Figures { ns: 97.04, transfers: 4.0, atomics: 2.0, far: 1.0 };
        let case = Case { options: vec!["per-socket=8".to_owned()], ..Case::new("lazy-2015-1", 16) };
        let outcome = Outcome { case, figures: Ok(figures), sites: Vec::new() };
        let lines = [("a.rs:1".to_owned(), 3.0), ("b.rs:2".to_owned(), 0.1)];
        let (key, text) = entry(&outcome, &lines, "2026-11-23 abc").unwrap();
        assert_eq!(text, "op lazy-2015-1 16 8 97.0 4.000 1.000 2.00 2026-11-23 abc\nline 0.75 a.rs:1\n");
        let case = Case { options: vec!["profile=vtd".to_owned()], ..Case::new("raw-1", 2) };
        let outcome = Outcome { case, figures: Ok(figures), sites: Vec::new() };
        let (waits, _) = entry(&outcome, &[], "2026-11-23 abc").unwrap();
        assert_eq!(waits, ("raw-1@vtd".to_owned(), 64, 2));
        let other = "op raw-1 1 64 29.2 0.000 0.000 0.00 2026-11-23 abc\n";
        let kept = entries(&format!("{HEAD}{text}{other}"));
        assert_eq!((kept.len(), kept.get(&key)), (2, Some(&text)));
    }

    #[test]
    fn nothing_is_kept_twice() {
        let all: Vec<(&str, u32, u32)> =
            KEPT.iter().flat_map(|(name, cpus, per)| cpus.iter().map(move |n| (*name, *n, *per))).collect();
        let twice = all.iter().enumerate().find(|(at, one)| all[..*at].contains(one));
        assert_eq!(twice, None);
    }
}
