//! Is there an IOMMU, is it on, and what keeps it off.

use crate::doctor::facts::Facts;
use crate::doctor::finding::{Finding, Severity};
use crate::doctor::kernel::{Maker, boot_with};
use crate::linux::host::Host;

pub fn check(facts: &Facts, host: &Host<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !facts.has_iommu() && !facts.iommu_is_unknown() {
        found.extend(none(facts, host));
    }
    found.extend(flaws(facts));
    found
}

/// Every device reaches all memory.
const OPEN: &str = "a faulty or hostile device reads and writes all memory: in our test it reached everything that it tried (docs/linux.md, passthrough)";

fn none(facts: &Facts, host: &Host<'_>) -> Option<Finding> {
    let severity = if facts.kernel.guest { Severity::Notice } else { Severity::Critical };
    if let Some(word) = off_by(facts) {
        let what = format!("the IOMMU is off, by the kernel's parameter {word}");
        let finding = Finding::new("iommu-off", Severity::Critical, what)
            .means("nothing stands between devices and memory")
            .costs(OPEN)
            .then(format!("take {word} out of the kernel's command line, in the boot loader, and reboot"));
        return Some(finding);
    }
    // There devices reach only what is copied into memory that the guest shares.
    if facts.kernel.confidential.is_some() && facts.firmware.describes().is_none() {
        return None;
    }
    let finding = match facts.firmware.describes() {
        Some(table) => {
            let what = format!("firmware has an IOMMU (table {}), and Linux does not use it", table.name);
            described(facts, host, Finding::new("iommu-unused", Severity::Critical, what))
        }
        None if facts.kernel.guest => Finding::new("iommu-none", severity, "this virtual machine has no IOMMU")
            .means("the host's emulated devices need none; a real device that the host has given to this machine, and programs here that drive devices (VFIO), do")
            .costs("a device that the host gave to this machine reaches all memory of this machine, and none of the host's if the host has an IOMMU")
            .then("if that matters, have the host give the machine an IOMMU (QEMU: `-device virtio-iommu-pci`)"),
        None if !host.exists("sys/firmware/acpi/tables") => {
            Finding::new("iommu-none", severity, "Linux uses no IOMMU")
                .means("there is none, or it is off; sys/firmware/acpi/tables, where firmware says which there are, is not there")
                .costs(OPEN)
                .run("see what the kernel says of it", "sudo dmesg | grep -i -e iommu -e DMAR -e AMD-Vi -e smmu")
        }
        None => Finding::new("iommu-none", severity, "firmware shows no IOMMU to Linux")
            .means("there is none, or it is switched off in the firmware's settings")
            .costs(OPEN)
            .run("boot into the firmware's settings", "sudo systemctl reboot --firmware-setup")
            .then(setting(facts)),
    };
    Some(finding)
}

/// What the setting of firmware is called.
fn setting(facts: &Facts) -> String {
    let name = match facts.kernel.maker {
        Maker::Intel => "\"Intel VT for Directed I/O\" (VT-d)",
        Maker::Amd => "\"IOMMU\" (not \"SVM\", which is for virtual machines); \"Auto\" is often off",
        Maker::Arm | Maker::Other => "\"SMMU\" or \"IOMMU\"",
    };
    format!("there, switch on {name}")
}

/// The parameter that switches the IOMMU off, as it was typed.
fn off_by(facts: &Facts) -> Option<String> {
    let kernel = &facts.kernel;
    let own = match kernel.maker {
        Maker::Intel => "intel_iommu",
        Maker::Amd => "amd_iommu",
        Maker::Arm | Maker::Other => return None,
    };
    // Alone, `iommu=off` leaves a machine without either nothing to switch off.
    facts.firmware.describes()?;
    ["iommu", own].into_iter().find(|name| kernel.says(name, "off")).map(|name| format!("{name}=off"))
}

/// A table is there, but no unit.
fn described(facts: &Facts, host: &Host<'_>, finding: Finding) -> Finding {
    let finding = finding.costs(OPEN);
    let table = facts.firmware.describes().map_or("", |table| table.name);
    let is_broken =
        !facts.firmware.bugs.is_empty() || facts.firmware.tables.iter().any(|table| !table.flaws.is_empty());
    match table {
        "DMAR"
            if !facts.lacks("proc/cmdline") && !facts.kernel.says("intel_iommu", "on") && !is_broken =>
        {
            finding
                .means("this kernel leaves Intel's IOMMU off unless it is told otherwise")
                .steps(boot_with(host, "intel_iommu=on"))
        }
        "VIOT" => finding
            .means("the driver virtio_iommu is not loaded, or came after the drivers of the devices")
            .run("see what it says", "sudo modprobe virtio_iommu; sudo dmesg | grep -i virtio_iommu"),
        _ if is_broken => finding
            .means("the kernel gave it up because firmware describes it wrongly: the findings on firmware name the mistakes")
            .then("look for an update of the firmware (BIOS) at the machine's maker"),
        _ => finding
            .means("the driver of the IOMMU is missing in this kernel, or gave up")
            .run("see what it says", "sudo dmesg | grep -i -e iommu -e DMAR -e AMD-Vi -e smmu"),
    }
}

/// What firmware has got wrong.
fn flaws(facts: &Facts) -> Option<Finding> {
    let firmware = &facts.firmware;
    let of_table = |table: &crate::doctor::firmware::Table| {
        let name = table.name;
        table.flaws.iter().map(move |flaw| format!("table {name}: {flaw}")).collect::<Vec<_>>()
    };
    let tables = firmware.tables.iter().flat_map(of_table);
    let quotes: Vec<String> = firmware.bugs.iter().map(|line| format!("\"{line}\"")).collect();
    let said = (!quotes.is_empty()).then(|| format!("the kernel says {}", quotes.join(", ")));
    let all: Vec<String> = said.into_iter().chain(tables).collect();
    let (first, rest) = all.split_first()?;
    let more = if rest.is_empty() { String::new() } else { format!("; {}", rest.join("; ")) };
    let finding = Finding::new(
        "firmware-bug",
        Severity::Warning,
        format!("firmware describes the IOMMU wrongly: {first}{more}"),
    )
    .means("Linux works round it or leaves a unit, a device or the remapping of interrupts out")
    .costs("a device that firmware forgot is not kept from memory, or does not work")
    .then("look for an update of the firmware (BIOS) at the machine's maker")
    .run(
        "the whole of what the kernel says of it",
        "sudo dmesg | grep -i -e DMAR -e AMD-Vi -e IVRS -e IORT -e smmu",
    );
    Some(finding)
}
