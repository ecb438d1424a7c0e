//! What is made of the facts: findings, the worst first.

mod devices;
mod iommu;
mod log;
mod memory;
mod parameters;
mod vfio;

use super::facts::Facts;
use super::finding::Finding;
use crate::linux::host::Host;

/// All findings.
pub fn all(facts: &Facts, host: &Host<'_>) -> Vec<Finding> {
    let mut found = [
        iommu::check(facts, host),
        devices::check(facts, host),
        parameters::check(facts, host),
        log::check(facts),
        memory::check(facts, host),
        vfio::check(facts),
    ]
    .concat();
    found.sort_by_key(|finding| finding.severity);
    found
}

/// `1 device`, `2 devices`.
fn number_of(n: usize, thing: &str) -> String {
    crate::look::number_of(n as u64, thing)
}
