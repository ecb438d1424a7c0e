//! Accesses that an IOMMU refused, as each vendor's driver in Linux prints them, in the words of `portcullis_hw`.
//!
//! Lines of the log are text that any driver may print, and fields of them may say anything: what does not have the form is no fault.

mod amd;
mod arm;
mod intel;
mod others;

use std::collections::BTreeMap;

use portcullis_hw::Access;
use serde::Serialize;

use super::log::Log;

pub use amd::event as amd_event;

/// The most addresses that are told of a device and a reason.
const MOST_ADDRESSES: usize = 3;

/// What devices and reasons a log may name before the rest is only counted.
const MOST_KINDS: usize = 64;

/// The other lines of a fault are looked for in this many: other CPUs may print between them.
const MOST_BETWEEN: usize = 8;

/// Refused accesses of a log.
#[derive(Debug, Default, Serialize)]
pub struct Refused {
    /// Those with the most first.
    #[serde(rename = "faults")]
    pub kinds: Vec<Faults>,
    /// Accesses that are in none of these, as there are [`MOST_KINDS`].
    #[serde(rename = "more_faults")]
    pub more: u64,
    /// Lines about refused accesses that the kernel did not print, as it prints only some in five seconds.
    #[serde(rename = "left_out_lines")]
    pub left_out: u64,
}

/// Refused accesses of one device, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Faults {
    pub device: String,
    /// `read`, `write`; `None` where the line does not say.
    pub access: Option<String>,
    pub reason: String,
    pub count: usize,
    /// The first ones.
    pub addresses: Vec<String>,
}

/// One line's.
#[derive(Debug, PartialEq, Eq)]
struct One {
    device: String,
    access: Option<Access>,
    reason: String,
    address: Option<u64>,
}

/// All of the log.
pub fn of(log: &Log) -> Refused {
    let mut found: BTreeMap<(String, Option<String>, String), Faults> = BTreeMap::new();
    let mut refused = Refused::default();
    let has_words = arm::has_words(&log.lines);
    for at in 0..log.lines.len() {
        let (before, lines) = log.lines.split_at(at);
        refused.left_out = refused.left_out.saturating_add(lines.first().map_or(0, |line| left_out(line)));
        let Some(one) = fault(before, lines, has_words) else { continue };
        let access = one.access.map(|access| access.to_string());
        let key = (one.device.clone(), access.clone(), one.reason.clone());
        if found.len() >= MOST_KINDS && !found.contains_key(&key) {
            refused.more += 1;
            continue;
        }
        let empty =
            || Faults { device: one.device, access, reason: one.reason, count: 0, addresses: Vec::new() };
        let faults = found.entry(key).or_insert_with(empty);
        faults.count += 1;
        let address = one.address.map(|address| format!("{address:#x}"));
        if let Some(address) = address.filter(|address| !faults.addresses.contains(address)) {
            faults.addresses.push(address);
            faults.addresses.truncate(MOST_ADDRESSES);
        }
    }
    refused.kinds = found.into_values().collect();
    refused.kinds.sort_by_key(|faults| std::cmp::Reverse(faults.count));
    refused
}

/// The fault that the first of `lines` begins; `before` are those before it.
fn fault(before: &[String], lines: &[String], has_words: bool) -> Option<One> {
    let line = lines.first()?;
    intel::fault(lines)
        .or_else(|| amd::fault(line))
        .or_else(|| arm::version_3(before, lines, has_words))
        .or_else(|| arm::version_2(lines))
        .or_else(|| others::virtio(line))
        .or_else(|| others::riscv(line))
}

/// `dmar_fault: 893 callbacks suppressed`: lines that a function which prints faults has left out.
fn left_out(line: &str) -> u64 {
    const OF_FAULTS: [&str; 8] = [
        "dmar_fault",
        "amd_iommu_report_page_fault",
        "arm_smmu_dump_event",
        "arm_smmu_evtq_thread",
        "arm_smmu_context_fault",
        "arm_smmu_global_fault",
        "viommu_fault_handler",
        "riscv_iommu_fault",
    ];
    let text = line.strip_suffix(" callbacks suppressed").and_then(|line| line.split_once(": "));
    let count = text.filter(|(name, _)| OF_FAULTS.contains(name)).and_then(|(_, count)| count.parse().ok());
    count.unwrap_or(0)
}

/// What stands between `before` and the next blank, comma or bracket.
fn field<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    let end = rest.find([' ', ',', ']']).unwrap_or(rest.len());
    rest.get(..end).filter(|field| !field.is_empty())
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

/// `0000:02:00.0` for `02:00.0`, and the same for `0x02:0x00.0`; `None` for what is no PCI address.
fn full_name(name: &str) -> Option<String> {
    let name = name.replace("0x", "");
    let name = if name.matches(':').count() == 1 { format!("0000:{name}") } else { name };
    let is_hex = |c: char| c.is_ascii_hexdigit() || ":.".contains(c);
    ((7..=16).contains(&name.len()) && name.chars().all(is_hex)).then_some(name)
}

#[cfg(test)]
#[path = "../../tests/doctor/faults.rs"]
mod tests;
