//! The source lines behind transfers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::program::{Outcome, Program, Site};
use crate::nightly::output;

/// Source lines of each address, the innermost inlined function first.
type Sources = BTreeMap<String, Vec<String>>;

/// Lines that a site is told by.
const LINES: usize = 4;

/// Where the library's own sources are.
const LIBRARY: &str = "crates/portcullis/src/";

/// For each case, its `count` worst sites.
pub fn report(program: &Program, root: &Path, outcomes: &[Outcome], count: usize) -> String {
    if count == 0 {
        return String::new();
    }
    let mut text = String::new();
    let (known, lines) = lines(program, root, outcomes);
    if !known {
        text.push_str("\nno `addr2line` (binutils): sites are addresses in ");
        let _ = writeln!(text, "{}", program.path.display());
    }
    for (Outcome { case, .. }, lines) in outcomes.iter().zip(lines).filter(|(_, lines)| !lines.is_empty()) {
        let _ = writeln!(text, "\n{} on {} CPUs, transfers for each operation:", case.workload, case.cpus);
        for (line, transfers) in lines.into_iter().take(count) {
            let _ = writeln!(text, "  {transfers:>7.3}  {line}");
        }
    }
    text
}

/// Lines and their transfers, the most first.
type Lines = Vec<(String, f64)>;

/// The lines of each case; and whether anything is known but addresses.
pub fn lines(program: &Program, root: &Path, outcomes: &[Outcome]) -> (bool, Vec<Lines>) {
    let addresses = outcomes.iter().flat_map(|outcome| &outcome.sites).flat_map(|site| &site.addresses);
    let sources = look_up(&program.path, root, &addresses.cloned().collect());
    let of = |outcome: &Outcome| {
        let mut lines: BTreeMap<String, f64> = BTreeMap::new();
        for site in &outcome.sites {
            *lines.entry(name(site, &sources)).or_default() += site.transfers;
        }
        let mut lines: Lines = lines.into_iter().collect();
        lines.sort_by(|a, b| b.1.total_cmp(&a.1));
        lines
    };
    (!sources.is_empty(), outcomes.iter().map(of).collect())
}

/// The line of the access, and those that led to it: of the library, and of the standard library's locks and memory. One
/// for each file.
fn name(site: &Site, sources: &Sources) -> String {
    let lines = |address: &String| sources.get(address).cloned().unwrap_or_else(|| vec![address.clone()]);
    let all: Vec<String> = site.addresses.iter().flat_map(lines).collect();
    let mut named: Vec<&str> = Vec::new();
    for line in &all {
        let file = |line: &str| line.rsplit_once(':').map(|(file, _)| file.to_owned());
        let counts = ["std/src/sync/", "std/src/sys/sync/", "alloc/src/", "0x"]
            .iter()
            .any(|start| line.starts_with(start));
        let line = line.strip_prefix(LIBRARY).or_else(|| counts.then_some(line));
        named.extend(
            line.filter(|line| named.iter().all(|other| file(other) != file(line) || file(line).is_none())),
        );
    }
    named.truncate(LINES);
    if named.is_empty() {
        let own = all.iter().find(|line| line.starts_with("crates/") || line.starts_with("tests/"));
        return own.or(all.first()).cloned().unwrap_or_default();
    }
    named.join(" < ")
}

/// What `addr2line` says of `addresses`, which are those behind the calls.
fn look_up(program: &Path, root: &Path, addresses: &BTreeSet<String>) -> Sources {
    let number = |address: &str| u64::from_str_radix(address.trim_start_matches("0x"), 16).ok();
    let calls: BTreeMap<u64, &String> =
        addresses.iter().filter_map(|address| Some((number(address)?.checked_sub(1)?, address))).collect();
    let mut sources = Sources::new();
    let all: Vec<u64> = calls.keys().copied().collect();
    for some in all.chunks(500) {
        let mut command = Command::new("addr2line");
        command
            .args(["-a", "-i", "-e"])
            .arg(program)
            .args(some.iter().map(|address| format!("{address:#x}")));
        let mut current = None;
        for line in output(&mut command).unwrap_or_default().lines() {
            if line.starts_with("0x") {
                current = number(line).and_then(|address| calls.get(&address));
            } else if let Some(address) = current {
                sources.entry((*address).clone()).or_default().push(short(line, root));
            }
        }
    }
    sources
}

/// A file and a line, from the project's root or the library's.
fn short(line: &str, root: &Path) -> String {
    let line = line.split(" (discriminator").next().unwrap_or(line);
    let own = line.strip_prefix(&*root.to_string_lossy()).map(|rest| rest.trim_start_matches('/'));
    let library = || line.rsplit_once("/library/").map(|(_, rest)| rest);
    own.or_else(library).unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_are_told_by_the_access_and_the_library_s_lines() {
        let root = Path::new("/r");
        assert_eq!(
            short("/r/crates/portcullis/src/a.rs:3 (discriminator 2)", root),
            "crates/portcullis/src/a.rs:3"
        );
        assert_eq!(short("/x/library/std/src/sync/m.rs:7", root), "std/src/sync/m.rs:7");
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let mut sources = Sources::new();
        let (access, caller) = ("core/src/atomic.rs:9", "tests/coherence/src/work.rs:1");
        sources.insert("0x1".into(), lines(&[access, "std/src/sync/m.rs:7", "crates/portcullis/src/a.rs:3"]));
        sources.insert(
            "0x2".into(),
            lines(&[caller, "crates/portcullis/src/a.rs:4", "crates/portcullis/src/b.rs:9"]),
        );
        let mut site = Site { transfers: 1.0, addresses: lines(&["0x1", "0x2"]) };
        assert_eq!(name(&site, &sources), "std/src/sync/m.rs:7 < a.rs:3 < b.rs:9");
        // Without `addr2line`.
        assert_eq!(name(&site, &Sources::new()), "0x1 < 0x2");
        site.addresses = lines(&["0x3"]);
        sources.insert("0x3".into(), lines(&[access, caller]));
        assert_eq!(name(&site, &sources), caller);
    }
}
