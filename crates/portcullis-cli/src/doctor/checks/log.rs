//! What the kernel's log tells: refused accesses, and IOMMUs that do not answer.

use super::number_of;
use crate::doctor::facts::Facts;
use crate::doctor::faults::Faults;
use crate::doctor::finding::{Finding, Severity};
use crate::machine::quoted;

pub fn check(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> = stuck(facts).into_iter().collect();
    found.extend(facts.faults.iter().map(|faults| refused(facts, faults)));
    found
}

fn refused(facts: &Facts, faults: &Faults) -> Finding {
    let Faults { device, access, reason, count, addresses } = faults;
    let access = access.as_ref().map_or("access", String::as_str);
    let at = if addresses.is_empty() { "memory".into() } else { addresses.join(", ") };
    let more = if *count > addresses.len() && !addresses.is_empty() { " and more" } else { "" };
    let known = facts.devices.devices.iter().find(|known| known.name == *device);
    let title = known.map_or_else(|| device.clone(), crate::doctor::devices::Device::title);
    let what =
        format!("the IOMMU did not let {title} {access} {at}{more}, {}: {reason}", number_of(*count, "time"));
    let is_pci = device.matches(':').count() == 2;
    let finding = Finding::new("refused", Severity::Warning, what)
        .of(is_pci.then_some(device))
        .means("its driver gave back a buffer that the device still uses, firmware left the device running at boot, or the device is faulty or hostile")
        .costs("what the device read or wrote did not happen: data is lost, and the device may hang");
    let finding = if is_pci {
        let command =
            format!("lspci -nnk -s {}; sudo dmesg | grep {}", quoted(device), quoted(short(device)));
        finding.run("which device and driver that is, and what they say besides", command)
    } else {
        finding.run("what the kernel says of it", "sudo dmesg | grep -i -A 4 smmu")
    };
    finding.then("if it comes under load, report it to the authors of the driver, with the lines")
}

/// `02:00.0`, as AMD's and Intel's lines have it.
fn short(device: &str) -> &str {
    device.split_once(':').map_or(device, |(_, rest)| rest)
}

/// An IOMMU, or a device with a cache of its own, that leaves an invalidation unanswered.
fn stuck(facts: &Facts) -> Option<Finding> {
    const LINES: [&str; 7] = [
        "AMD-Vi: Completion-Wait loop timed out",
        "Event logged [IOTLB_INV_TIMEOUT",
        "DMAR: VT-d detected Invalidation Time-out Error",
        "DMAR: VT-d detected Invalidation Queue Error",
        "DMAR: VT-d detected Invalidation Completion Error",
        ": CMD_SYNC timeout at",
        ": TLB sync timed out",
    ];
    let is_one = |line: &&String| LINES.iter().any(|text| line.contains(text));
    let mut lines = facts.log.lines.iter().filter(is_one);
    let (first, more) = (lines.next()?, lines.count());
    let what =
        format!("an IOMMU waited in vain, {}: the kernel says \"{first}\"", number_of(more + 1, "time"));
    let finding = Finding::new("invalidation-timeout", Severity::Critical, what)
        .means("an invalidation was not confirmed: the IOMMU hangs, or a device with a cache of its own (ATS) does not answer")
        .costs("a CPU waits up to a second each time, and nobody knows whether a device still reaches what was unmapped")
        .run("the lines before it name the device", "sudo dmesg | grep -B 5 -i -e timeout -e time-out -e 'timed out'")
        .then("if it is a device with ATS, boot with pci=noats and see whether it goes away");
    Some(finding)
}
