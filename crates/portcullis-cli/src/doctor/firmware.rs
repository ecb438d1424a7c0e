//! What firmware's tables say of IOMMUs: DMAR (Intel), IVRS (AMD), IORT (Arm) and VIOT (virtio-iommu), read by `portcullis_hw::acpi`.

use portcullis_hw::acpi::{Dmar, Flaw, Iort, Ivrs};
use serde::Serialize;

use super::log::Log;
use super::tree::Tree;

const FOLDER: &str = "sys/firmware/acpi/tables";

/// The most flaws that are told of a table.
const MOST_FLAWS: usize = 8;

/// A table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Table {
    pub name: &'static str,
    /// How many IOMMUs it describes that Linux can use; `None` where it cannot be read.
    pub units: Option<usize>,
    /// What is wrong with it, a sentence each.
    pub flaws: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Firmware {
    pub tables: Vec<Table>,
    /// What the kernel says of firmware's mistakes about IOMMUs, each once.
    pub bugs: Vec<String>,
}

impl Firmware {
    pub fn read(tree: &Tree, log: &Log) -> Self {
        let host = tree.host();
        let present = ["DMAR", "IVRS", "IORT", "VIOT"]
            .into_iter()
            .filter(|name| host.exists(&format!("{FOLDER}/{name}")));
        let tables = present.map(|name| {
            let bytes = tree.bytes(&format!("{FOLDER}/{name}"));
            let (units, flaws) = bytes.map_or((None, Vec::new()), |bytes| contents(name, &bytes));
            Table { name, units, flaws }
        });
        Self { tables: tables.collect(), bugs: bugs(log) }
    }

    /// The table that describes an IOMMU, if one does. (An IORT is also about interrupts, and may describe none.)
    pub fn describes(&self) -> Option<&Table> {
        let may_have = |table: &Table| table.units != Some(0) || !table.flaws.is_empty();
        self.tables.iter().find(|table| may_have(table) && (table.name != "IORT" || table.units.is_some()))
    }
}

fn contents(name: &str, bytes: &[u8]) -> (Option<usize>, Vec<String>) {
    let read = match name {
        "DMAR" => Dmar::parse(bytes).map(|table| (table.units.len(), told(&table.flaws))),
        "IVRS" => Ivrs::parse(bytes).map(|table| (table.units.len(), told(&table.flaws))),
        "IORT" => Iort::parse(bytes).map(|table| {
            // Linux drives more than we do: that is no mistake of firmware's.
            let (ours, flaws): (Vec<&Flaw>, Vec<&Flaw>) =
                table.flaws.iter().partition(|flaw| matches!(flaw, Flaw::OnePage { .. }));
            (table.units.len() + table.smmus + ours.len(), told(&flaws))
        }),
        // Its nodes are the host's choice, and it has one IOMMU.
        _ => return (Some(1), Vec::new()),
    };
    match read {
        Ok((units, flaws)) => (Some(units), flaws),
        Err(error) => (None, vec![error.to_string()]),
    }
}

fn told<T: ToString>(flaws: &[T]) -> Vec<String> {
    flaws.iter().take(MOST_FLAWS).map(ToString::to_string).collect()
}

/// Lines of the log that name a mistake of firmware's about an IOMMU.
fn bugs(log: &Log) -> Vec<String> {
    const OF_IOMMUS: [&str; 6] = ["DMAR", "AMD-Vi", "IVRS", "SMMU", "IORT", "RMRR"];
    const MISTAKES: [&str; 4] =
        ["[Firmware Bug]", "[Firmware Warn]", "BIOS is broken", "BIOS has allocated no shadow GTT"];
    let mut found: Vec<String> = Vec::new();
    for line in &log.lines {
        let is_one = MISTAKES.iter().any(|text| line.contains(text))
            && OF_IOMMUS.iter().any(|text| line.contains(text));
        if is_one && !found.contains(line) && found.len() < MOST_FLAWS {
            found.push(line.clone());
        }
    }
    found
}
