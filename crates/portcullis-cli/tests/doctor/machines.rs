//! Each machine: what was planted is named, and nothing else.

use std::path::Path;

use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::tree::Tree;
use crate::golden::files::is_golden;

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
