//! Each machine: what was planted is named, and nothing else.

use std::path::Path;

use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::finding::Severity;
use crate::doctor::tree::Tree;
use crate::golden::files::is_golden;
use crate::look::{BAD, BOLD};

const MACHINES: [&str; 11] = [
    "server",
    "laptop",
    "amd",
    "arm",
    "guest-vtd",
    "guest-amdvi",
    "guest-virtio",
    "no-iommu",
    "confidential",
    "broken-firmware",
    "old-kernel",
];

fn look(machine: &Machine) -> Found {
    Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()))
}

#[test]
fn what_was_planted_is_named_and_nothing_else() {
    for name in MACHINES {
        let machine = Machine::read(name);
        let found = look(&machine);
        let ids: Vec<&str> = found.findings.iter().map(|finding| finding.id).collect();
        assert_eq!(ids, machine.finds, "{name}");
    }
}

#[test]
fn machines_are_told_as_before() {
    for name in MACHINES {
        let found = look(&Machine::read(name));
        let told = [80, 40].map(|columns| anstream::adapter::strip_str(&found.text(columns)).to_string());
        let text = format!("80 columns\n\n{}\n40 columns\n\n{}\nexit {}\n", told[0], told[1], found.code());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor/golden");
        is_golden(golden.join(format!("{name}.txt")), &text);
        let json = serde_json::to_string_pretty(&found).unwrap();
        is_golden(golden.join(format!("{name}.json")), &format!("{json}\n"));
    }
}

#[test]
fn what_is_critical_is_red_and_nothing_else() {
    for name in MACHINES {
        let found = look(&Machine::read(name));
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
    for name in MACHINES {
        let found = look(&Machine::read(name));
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
