//! Devices that programs and virtual machines have, and the module.

use super::number_of;
use crate::doctor::devices::Device;
use crate::doctor::facts::Facts;
use crate::doctor::finding::{Finding, Severity, write};
use crate::look;
use crate::machine::quoted;

/// A process may lock less than this: too little for any virtual machine, and for most programs that drive a device.
const LITTLE: u64 = 64 << 20;

/// Mappings of a container that Linux allows by itself.
const USUAL_ENTRIES: u64 = 65_535;

pub fn check(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> =
        [unsafe_interrupts(facts), without_iommu(facts)].into_iter().flatten().collect();
    let given: Vec<&Device> = facts.devices.endpoints().filter(|device| device.is_vfio()).collect();
    if !given.is_empty() {
        found.extend(given.iter().filter_map(|device| unusable(facts, device)));
        found.extend([memlock(facts), entries(facts), huge_pages(facts)].into_iter().flatten());
    }
    found.extend(facts.module_errors.iter().map(|(device, errors, lost)| module(device, *errors, *lost)));
    found
}

fn unsafe_interrupts(facts: &Facts) -> Option<Finding> {
    let modules = &facts.vfio.unsafe_interrupts;
    let off = modules
        .iter()
        .map(|module| write("N", &format!("/sys/module/{module}/parameters/allow_unsafe_interrupts")));
    (!modules.is_empty()).then(|| {
        Finding::new(
            "unsafe-interrupts",
            Severity::Warning,
            "VFIO gives devices away though their interrupts are not remapped (allow_unsafe_interrupts)",
        )
        .means("a virtual machine with a device can raise any interrupt of the host by it")
        .costs("a hostile virtual machine can disturb the host, and perhaps take it over")
        .run("where it is set", "grep -rs allow_unsafe_interrupts /etc/modprobe.d /proc/cmdline")
        .run_all("until the next boot", off.collect())
    })
}

fn without_iommu(facts: &Facts) -> Option<Finding> {
    facts.vfio.without_iommu.then(|| {
        Finding::new(
            "vfio-noiommu",
            Severity::Critical,
            "VFIO gives devices away without an IOMMU (enable_unsafe_noiommu_mode)",
        )
        .means("a program that has such a device reads and writes all memory by it")
        .costs("whoever may open /dev/vfio/noiommu-* is as good as root")
        .run("where it is set", "grep -rs enable_unsafe_noiommu_mode /etc/modprobe.d /proc/cmdline")
        .run("until the next boot", write("N", "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"))
    })
}

/// A device of VFIO's whose group has a device with a driver of Linux's: it cannot be opened.
fn unusable(facts: &Facts, device: &Device) -> Option<Finding> {
    let group = facts.devices.group_of(device)?;
    let is_harmless = |driver: &str| driver.starts_with("vfio") || driver == "pci-stub";
    let taken = facts
        .devices
        .within(group)
        .find(|other| other.driver.as_deref().is_some_and(|driver| !is_harmless(driver)))?;
    let driver = taken.driver.clone().unwrap_or_default();
    let finding = Finding::new("group-in-use", Severity::Warning, format!("{} is VFIO's, but cannot be used: {} of its group {} has the driver {driver}", device.name, taken.name, group.number))
        .of([&device.name, &taken.name])
        .means("VFIO opens a group only if no device of it is in the hands of a driver of Linux's (\"group is not viable\")")
        .costs("a virtual machine with this device does not start");
    let folder = format!("/sys/bus/pci/devices/{}", taken.name);
    let commands = vec![
        write("vfio-pci", &format!("{folder}/driver_override")),
        write(&taken.name, &format!("{folder}/driver/unbind")),
        write(&taken.name, "/sys/bus/pci/drivers_probe"),
    ];
    Some(finding.run_all("give VFIO that device as well, if nothing uses it", commands))
}

fn memlock(facts: &Facts) -> Option<Finding> {
    let bytes = facts.limits.memlock.filter(|bytes| *bytes < LITTLE)?;
    let finding = Finding::new(
        "memlock",
        Severity::Notice,
        format!(
            "a process of this user may lock {} of memory, and VFIO locks all that it maps",
            look::size(bytes)
        ),
    )
    .means("a program that is not root cannot map more than that for its device")
    .costs("maps fail with ENOMEM")
    .run(
        "more, from the next login on",
        "echo \"$USER - memlock unlimited\" | sudo tee /etc/security/limits.d/vfio.conf",
    );
    Some(finding)
}

fn entries(facts: &Facts) -> Option<Finding> {
    let limit = facts.limits.dma_entry_limit.filter(|limit| *limit < USUAL_ENTRIES)?;
    let what = format!(
        "a container of VFIO has {} at the most (dma_entry_limit)",
        look::number_of(limit, "mapping")
    );
    let finding = Finding::new("dma-entry-limit", Severity::Notice, what)
        .means(format!("somebody has lowered it: Linux allows {} by itself", look::count(USUAL_ENTRIES)))
        .costs("a program that maps many small buffers gets ENOSPC")
        .run(
            "as many as usual, until the next boot",
            write("65535", "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit"),
        );
    Some(finding)
}

fn huge_pages(facts: &Facts) -> Option<Finding> {
    let pages = &facts.huge_pages;
    let has_none = pages.reserved == Some(0) && pages.transparent.as_deref() == Some("never");
    has_none.then(|| {
        Finding::new("no-huge-pages", Severity::Notice, "devices are given away, and there are no huge pages")
            .means("the memory of programs and virtual machines is in pages of 4 KiB, which the IOMMU maps one by one")
            .costs("more levels of tables are walked, and more of the IOTLB is used, for each access (docs/strict.md has what misses cost)")
            .run("let the kernel make them where it can", write("madvise", "/sys/kernel/mm/transparent_hugepage/enabled"))
    })
}

/// What the module counts of a device that should be zero.
fn module(device: &str, errors: u64, lost: u64) -> Finding {
    let told = match (errors, lost) {
        (0, lost) => format!("lost {} of addresses", look::size(lost)),
        (errors, 0) => format!("refused {} of its driver", number_of(errors as usize, "call")),
        (errors, lost) => format!(
            "refused {} of its driver, and lost {} of addresses",
            number_of(errors as usize, "call"),
            look::size(lost)
        ),
    };
    Finding::new("module-errors", Severity::Warning, format!("the module portcullis {told} for {device}"))
        .of([device])
        .means("its driver asked for what cannot be, or Linux failed to undo a map (docs/linux.md#what-can-go-wrong)")
        .costs("addresses that are lost stay open to the device until it is unprotected")
        .run("the first of each kind is in the log", "sudo dmesg | grep portcullis")
        .run("all that the module counts", format!("portcullis status {}", quoted(device)))
}
