//! Parameters of the kernel that do not do what was meant.

use crate::doctor::facts::Facts;
use crate::doctor::finding::{Finding, Severity};
use crate::doctor::kernel::boot_with;
use crate::linux::host::Host;

pub fn check(facts: &Facts, host: &Host<'_>) -> Vec<Finding> {
    let ignored = facts.parameters.iter().filter_map(|parameter| {
        let why = parameter.ignored.as_ref()?;
        let severity = if parameter.harmless { Severity::Notice } else { Severity::Warning };
        let finding = Finding::new(
            "ignored-parameter",
            severity,
            format!("the kernel ignores the parameter {}: {why}", parameter.word),
        )
        .means("the machine runs as if it were not there");
        let take_out =
            format!("take {} out of the kernel's command line, in the boot loader", parameter.word);
        let Some(instead) = &parameter.instead else {
            return Some(
                finding.costs("nothing: what it asks for holds by itself, or cannot be had").then(take_out),
            );
        };
        let finding =
            finding.costs("what it was meant to change is as before: the modes above are what holds");
        Some(if facts.kernel.passes_through(instead) == Some(true) {
            // Less protection is never the first advice.
            finding.then(take_out).then(format!(
                "only where every device may read and write all memory: {instead} in its place"
            ))
        } else {
            finding.steps(boot_with(host, instead)).then(format!("take {} out", parameter.word))
        })
    });
    ignored.chain(interrupts(facts)).collect()
}

/// Remapping of interrupts that was switched off, or that Linux gave up.
fn interrupts(facts: &Facts) -> Option<Finding> {
    const GIVEN_UP: [&str; 4] = [
        "AMD-Vi: Disabling interrupt remapping",
        "DMAR-IR: Failed to enable irq remapping",
        "DMAR-IR: Not enabling interrupt remapping",
        "DMAR-IR: This system BIOS has enabled interrupt remapping",
    ];
    let line = facts.log.lines.iter().find(|line| GIVEN_UP.iter().any(|text| line.starts_with(text)));
    let by = match line {
        Some(line) => format!("the kernel says \"{line}\""),
        None if facts.has_iommu() && facts.kernel.says("intremap", "off") => {
            "by the kernel's parameter intremap=off".into()
        }
        None => return None,
    };
    let finding = Finding::new(
        "interrupts-open",
        Severity::Warning,
        format!("interrupts of devices are not remapped: {by}"),
    )
    .means("a device can raise any interrupt by a write to memory, also another's")
    .costs("VFIO refuses devices, or lets a virtual machine disturb the host where that is allowed")
    .then("take intremap=off out of the kernel's command line, or look for an update of the firmware (BIOS)")
    .run(
        "see what the kernel says of it",
        "sudo dmesg | grep -i -e 'interrupt remapping' -e 'irq remapping' -e DMAR-IR",
    );
    Some(finding)
}
