//! What the kernel's log tells: refused accesses, and IOMMUs that do not answer.

use super::number_of;
use crate::doctor::facts::Facts;
use crate::doctor::faults::{Faults, amd_event};
use crate::doctor::finding::{Finding, Severity};
use crate::machine::quoted;

pub fn check(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> = stuck(facts).into_iter().collect();
    found.extend(facts.refused.kinds.iter().map(|faults| refused(facts, faults)));
    found.extend(untold(facts));
    found
}

fn refused(facts: &Facts, faults: &Faults) -> Finding {
    let Faults { device, access, reason, count, addresses } = faults;
    let access = access.as_ref().map_or("access", String::as_str);
    let at = if addresses.is_empty() { "memory".into() } else { addresses.join(", ") };
    let more = if *count > addresses.len() && !addresses.is_empty() { " and more" } else { "" };
    let known = facts.devices.devices.iter().find(|known| known.name == *device);
    let title = known.map_or_else(|| device.clone(), crate::doctor::devices::Device::title);
    let least = if facts.refused.left_out > 0 { "at least " } else { "" };
    let times = number_of(*count, "time");
    let what = format!("the IOMMU did not let {title} {access} {at}{more}, {least}{times}: {reason}");
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
        let word = if device.starts_with("device ") { "devid" } else { "smmu" };
        finding.run("what the kernel says of it", format!("sudo dmesg | grep -i -A 4 {word}"))
    };
    finding.then("if it comes under load, report it to the authors of the driver, with the lines")
}

/// How many refused accesses are not told one by one.
fn untold(facts: &Facts) -> Option<Finding> {
    let (more, left_out) = (facts.refused.more, facts.refused.left_out);
    let beyond = (more > 0).then(|| {
        let accesses = crate::look::number_of_these(more, "more access", "more accesses");
        format!("the IOMMU refused {accesses}, by further devices or for further reasons")
    });
    let left_out = (left_out > 0).then(|| {
        let lines = number_of(left_out as usize, "line");
        format!("the kernel left {lines} about refused accesses out of its log")
    });
    let what = [beyond, left_out].into_iter().flatten().collect::<Vec<_>>().join("; ");
    let finding = Finding::new("refused", Severity::Warning, what.clone())
        .means("there are more of them than the log or this list has room for")
        .costs("which devices these were is not known from here")
        .run("the lines that there are", "sudo dmesg | grep -i -e fault -e 'Event logged' -e suppressed");
    (!what.is_empty()).then_some(finding)
}

/// `02:00.0`, as AMD's and Intel's lines have it.
fn short(device: &str) -> &str {
    device.split_once(':').map_or(device, |(_, rest)| rest)
}

/// An IOMMU, or a device with a cache of its own, that leaves an invalidation unanswered.
fn stuck(facts: &Facts) -> Option<Finding> {
    const LINES: [&str; 7] = [
        "AMD-Vi: Completion-Wait loop timed out",
        "DMAR: VT-d detected invalid descriptor:",
        "DMAR: VT-d detected Invalidation Time-out Error",
        "DMAR: VT-d detected Invalidation Queue Error",
        "DMAR: VT-d detected Invalidation Completion Error",
        ": CMD_SYNC timeout",
        ": TLB sync timed out",
    ];
    let is_amd = |line: &str| amd_event(line).is_some_and(|(_, text)| text.starts_with("IOTLB_INV_TIMEOUT"));
    let is_one = |line: &&String| LINES.iter().any(|text| line.contains(text)) || is_amd(line);
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
