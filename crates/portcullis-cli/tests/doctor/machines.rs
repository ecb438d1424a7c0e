//! Each machine: what was planted is named, and nothing else.

use std::path::Path;

use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::finding::Severity;
use crate::doctor::tree::Tree;
use crate::golden::files::is_golden;
use crate::look::{BAD, BOLD};

/// The names of all files in `machines`. A file that is new there needs no other list.
fn machines() -> Vec<String> {
    let mut names = stems("tests/doctor/machines");
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    names
}

/// The names of the files in a folder of this crate, without what follows the dot.
fn stems(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

fn look(machine: &Machine) -> Found {
    Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()))
}

#[test]
fn what_was_planted_is_named_and_nothing_else() {
    for name in machines() {
        let machine = Machine::read(&name);
        let found = look(&machine);
        let ids: Vec<&str> = found.findings.iter().map(|finding| finding.id).collect();
        let says = &machine.finds;
        assert!(
            ids == *says,
            "{name}.txt: doctor finds {ids:?}, and the line `finds` of the file says {says:?}"
        );
    }
}

#[test]
fn machines_are_told_as_before() {
    for name in machines() {
        let found = look(&Machine::read(&name));
        let told = [80, 40].map(|columns| anstream::adapter::strip_str(&found.text(columns)).to_string());
        let text = format!("80 columns\n\n{}\n40 columns\n\n{}\nexit {}\n", told[0], told[1], found.code());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor/golden");
        is_golden(golden.join(format!("{name}.txt")), &text);
        let json = serde_json::to_string_pretty(&found).unwrap();
        is_golden(golden.join(format!("{name}.json")), &format!("{json}\n"));
    }
}

#[test]
fn every_golden_is_of_a_machine() {
    let machines = machines();
    let others: Vec<_> =
        stems("tests/doctor/golden").into_iter().filter(|name| !machines.contains(name)).collect();
    assert!(others.is_empty(), "golden files of machines that are gone: {others:?}");
}

#[test]
fn what_is_critical_is_red_and_nothing_else() {
    for name in machines() {
        let found = look(&Machine::read(&name));
        let text = found.text(80);
        let lines_in = |style: anstyle::Style| text.matches(&style.to_string()).count();
        let critical = found.findings.iter().filter(|finding| finding.severity == Severity::Critical).count();
        // Where something is critical, the line that counts what was found is red, too.
        let red = critical + usize::from(critical > 0);
        assert_eq!((lines_in(BAD), lines_in(BOLD)), (red, found.findings.len() + 1 - red), "{name}");
    }
}

#[test]
fn lines_are_no_wider_than_asked() {
    for name in machines() {
        let found = look(&Machine::read(&name));
        for columns in [80, 40] {
            let text = anstream::adapter::strip_str(&found.text(columns)).to_string();
            let is_one_word =
                |line: &str| !line.trim().trim_end_matches(" \\").trim_start_matches("- ").contains(' ');
            // A word in quotes is not broken, so that a shell takes it as it stands.
            let is_wide = |line: &&str| {
                line.chars().count() > columns && !is_one_word(line) && !line.contains(['\'', '"'])
            };
            let wide: Vec<&str> = text.lines().filter(is_wide).collect();
            assert!(wide.is_empty(), "{name}, {columns}: {wide:#?}");
        }
    }
}
