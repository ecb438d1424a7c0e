//! Devices that the IOMMU does not keep from memory, or not from each other.

use super::number_of;
use crate::doctor::devices::{Device, Group};
use crate::doctor::facts::Facts;
use crate::doctor::finding::{Finding, Severity, Step, write};
use crate::doctor::kernel::boot_with;
use crate::doctor::modes;
use crate::doctor::units::Kind;
use crate::linux::host::Host;
use crate::machine::quoted;

pub fn check(facts: &Facts, host: &Host<'_>) -> Vec<Finding> {
    let mut found: Vec<Finding> =
        facts.devices.endpoints().filter_map(|device| external(facts, device)).collect();
    found.extend(thunderbolt(facts));
    if facts.has_iommu() {
        found.extend(passthrough(facts, host));
        found.extend(uncovered(facts));
        found.extend(facts.devices.groups.iter().filter_map(|group| shared(facts, group)));
        found.extend(facts.devices.endpoints().filter_map(|device| far(facts, device)));
    }
    found
}

/// Commands that put a group into another mode, which Linux does only while its devices have no driver.
fn change(facts: &Facts, finding: Finding, group: &Group, kind: &str) -> Finding {
    let names: Vec<&str> = facts
        .devices
        .within(group)
        .filter(|device| device.driver.is_some())
        .map(|device| device.name.as_str())
        .collect();
    let unbind = names.iter().map(|name| write(name, &format!("/sys/bus/pci/devices/{name}/driver/unbind")));
    let set = write(kind, &format!("/sys/kernel/iommu_groups/{}/type", group.number));
    let bind = names.iter().map(|name| write(name, "/sys/bus/pci/drivers_probe"));
    // Before, the word said that it translates, and not how.
    let changed = if kind == "DMA" && facts.kernel.since((5, 15)) {
        format!("make its group {} strict", group.number)
    } else {
        format!("change the mode of its group {}", group.number)
    };
    let change = if names.is_empty() {
        changed
    } else {
        format!("take its driver away, {changed}, and give the driver back")
    };
    let say = format!("until the next boot, while nothing uses it: {change}");
    finding.run_all(say, unbind.chain([set]).chain(bind).collect())
}

/// Whatever is plugged in there may be hostile.
fn external(facts: &Facts, device: &Device) -> Option<Finding> {
    // Protected by the module, or kept from all by another driver.
    if !device.external || device.policy.is_some() || device.is_vfio() {
        return None;
    }
    let title = device.title();
    let mode = facts.devices.mode_of(device);
    let reaches = match mode {
        Some("strict") => return None,
        Some("lazy") => "is protected lazily: it reaches a buffer for a while after its driver had it back",
        Some("passthrough") => "is not protected: it is under passthrough, and reaches all memory",
        None if device.group.is_none() && !facts.lacks("sys/kernel/iommu_groups") => {
            "is not protected: it is behind no IOMMU, and reaches all memory"
        }
        _ => return None,
    };
    let costs = if mode == Some("lazy") {
        "in our test a hostile device still wrote to a buffer 13.5 ms after its unmap under Linux lazy, and read and wrote other data in a buffer's page (docs/linux.md)"
    } else {
        "in our test a hostile device reached everything that it tried (docs/linux.md, passthrough)"
    };
    let finding = Finding::new(
        "external-open",
        Severity::Critical,
        format!("{title}, behind an external port, {reaches}"),
    )
    .of([&device.name])
    .means("firmware says that anybody can plug something in there, which may be made to attack")
    .costs(costs);
    let Some(group) = facts.devices.group_of(device) else {
        return Some(finding.then("switch the IOMMU on, or the port off in the firmware's settings"));
    };
    let finding = if facts.module.loaded {
        let command = format!("sudo portcullis protect {} --policy bounce", quoted(&device.name));
        finding.run("show it copies, and nothing else", command)
    } else {
        finding
    };
    Some(change(facts, finding, group, "DMA"))
}

fn thunderbolt(facts: &Facts) -> Option<Finding> {
    let domains = &facts.devices.open_thunderbolt;
    let first = domains.first()?;
    let what = format!("Thunderbolt ({}) has no protection of memory by firmware", domains.join(", "));
    let finding = Finding::new("thunderbolt-open", Severity::Critical, what)
        .of(domains)
        .means("firmware does not promise that the IOMMU stands before what is plugged in, from its first access on (\"Kernel DMA Protection\")")
        .costs("a device that is plugged in, also before Linux runs, may read and write all memory, keys of encrypted disks among it")
        .run("see how devices are let in", format!("cat /sys/bus/thunderbolt/devices/{}/security", quoted(first)))
        .then("in the firmware's settings, switch \"Kernel DMA Protection\" (or VT-d) on; without such a setting, let in only devices that you know (`boltctl`)");
    Some(finding)
}

/// Groups without translation. Those with external devices are findings of their own.
fn passthrough(facts: &Facts, host: &Host<'_>) -> Option<Finding> {
    let is_open = |group: &&Group| {
        let mut devices = facts.devices.within(group).filter(|device| device.policy.is_none()).peekable();
        group.mode.as_deref() == Some("passthrough")
            && devices.peek().is_some()
            && devices.all(|device| !device.external)
    };
    let groups: Vec<&Group> = facts.devices.groups.iter().filter(is_open).collect();
    groups.first()?;
    let names: Vec<String> = groups
        .iter()
        .flat_map(|group| facts.devices.within(group))
        .map(|device| device.name.clone())
        .collect();
    let is_all = facts.mode.usual.as_deref() == Some("passthrough");
    let why = facts.mode.why.as_ref().filter(|_| is_all).map_or(String::new(), |why| format!(", by {why}"));
    let what = match names.as_slice() {
        [one] => format!("{one} is under passthrough{why}: the IOMMU lets it through"),
        _ => format!(
            "{} are under passthrough{why}: the IOMMU lets them through",
            number_of(names.len(), "device")
        ),
    };
    let finding = Finding::new("passthrough", Severity::Warning, what)
        .of(names)
        .means("they use memory by its physical address, as without an IOMMU")
        .costs("each reaches all memory: in our test a hostile device reached everything that it tried; protection costs 2,105 instructions (lazy) or 2,604 (strict) for a map and unmap of 4 KiB behind VT-d in a guest (docs/linux.md), and strict the hardware's wait for each unmap besides");
    // A group of several devices is changed since 6.4: before, Linux says "Group has more than one device".
    let can_change = |group: &&Group| {
        let since = if facts.devices.within(group).count() > 1 { (6, 4) } else { (5, 11) };
        facts.kernel.since(since)
    };
    let finding = if is_all { finding.steps(without_passthrough(facts, host)) } else { finding };
    let mut can: Vec<&Group> = groups.into_iter().filter(can_change).collect();
    let others = can.split_off(can.len().min(SHOWN));
    let finding = can.into_iter().fold(finding, |finding, group| change(facts, finding, group, "DMA"));
    let numbers: Vec<&str> = others.iter().map(|group| group.number.as_str()).collect();
    Some(match numbers.as_slice() {
        [] => finding,
        [one] => finding.then(format!("and so for group {one}")),
        _ => finding.then(format!("and so for the groups {}", numbers.join(", "))),
    })
}

/// Groups whose commands are shown; of others only the numbers.
const SHOWN: usize = 3;

/// How to boot without passthrough, and how devices are protected then.
fn without_passthrough(facts: &Facts, host: &Host<'_>) -> Vec<Step> {
    let kernel = &facts.kernel;
    // What each word of the command line asks for that is about passthrough; the last one holds.
    let asked: Vec<(&str, bool)> = kernel
        .cmdline
        .iter()
        .filter_map(|word| Some((word.as_str(), kernel.passes_through(word)?)))
        .collect();
    let ends = modes::translated(kernel, &facts.units, &facts.log);
    let then = ends.map_or(String::new(), |(mode, why)| format!("; devices are {mode} then, by {why}"));
    let on: Vec<&str> = asked.iter().filter(|(_, on)| *on).map(|(word, _)| *word).collect();
    let built_so = kernel.config.as_ref().is_some_and(|config| config.default_mode == Some("passthrough"));
    let off = match asked.last() {
        // It is off already, and the groups were changed since.
        Some((word, false)) => {
            let say = format!(
                "reboot: {word} is on the kernel's command line already, so the groups were changed since{then}"
            );
            return vec![Step { say, commands: Vec::new() }];
        }
        // An older word takes its place, or the kernel's default does.
        Some((_, true)) if asked.iter().any(|(_, on)| !on) || !built_so => None,
        _ if kernel.is_x86() && !kernel.since((5, 4)) => Some("iommu=nopt"),
        _ => Some("iommu.passthrough=0"),
    };
    let mut steps = Vec::new();
    if !on.is_empty() {
        let reboot = if off.is_some() { String::new() } else { format!(", and reboot{then}") };
        let say =
            format!("take {} out of the kernel's command line, in the boot loader{reboot}", on.join(" and "));
        steps.push(Step { say, commands: Vec::new() });
    }
    if let Some(word) = off {
        let mut boot = boot_with(host, word);
        boot.iter_mut().for_each(|step| step.say += &then);
        steps.extend(boot);
    }
    steps
}

/// Devices of PCI that no unit is in front of, though there are units.
fn uncovered(facts: &Facts) -> Option<Finding> {
    if facts.devices.groups.is_empty() {
        return None;
    }
    // Behind a virtio-iommu a device joins its group when it has a driver.
    let is_late = facts.units.iter().any(|unit| unit.kind == Kind::VirtioIommu);
    let is_bare = |device: &&Device| {
        device.group.is_none()
            && device.class.is_some()
            && !device.external
            && !(is_late && device.driver.is_none())
    };
    let bare: Vec<&Device> = facts.devices.endpoints().filter(is_bare).collect();
    let titles: Vec<String> = bare.iter().map(|device| device.title()).collect();
    let first = bare.first()?;
    let (verb, it, they) = if bare.len() == 1 { ("is", "it", "it") } else { ("are", "them", "they") };
    let finding = Finding::new(
        "uncovered",
        Severity::Warning,
        format!("{} {verb} behind no IOMMU", titles.join(", ")),
    )
        .of(bare.iter().map(|device| &device.name))
        .means(format!("Linux uses an IOMMU for other devices, but firmware's tables do not name {it}, or the driver leaves {it} out"))
        .costs(format!("{they} can reach all memory (docs/linux.md, passthrough)"))
        .run("see what the kernel says of it", format!("sudo dmesg | grep -e {} -i -e iommu", quoted(&first.name)));
    Some(finding)
}

/// Devices of several slots that are not told apart. Functions of one chip always are not, and are no news.
fn shared(facts: &Facts, group: &Group) -> Option<Finding> {
    let devices: Vec<&Device> = facts.devices.within(group).collect();
    let mut slots: Vec<&str> = devices.iter().map(|device| device.slot()).collect();
    slots.dedup();
    if slots.len() < 2 || devices.iter().any(|device| device.class.is_none()) {
        return None;
    }
    let bridge = facts
        .devices
        .devices
        .iter()
        .find(|device| device.bridge && device.group.as_ref() == Some(&group.number));
    let names: Vec<String> = devices.iter().map(|device| device.title()).collect();
    let why = bridge.map_or(
        "the bridge above them may pass what one sends straight to another (it has no ACS)".into(),
        |bridge| {
            format!("the bridge {} may pass what one sends straight to another (it has no ACS)", bridge.name)
        },
    );
    let what = format!("group {} has several devices: {}", group.number, names.join(", "));
    let finding = Finding::new("shared-group", Severity::Notice, what)
        .of(devices.iter().map(|device| &device.name))
        .means(format!("the IOMMU does not tell them apart: {why}"))
        .costs("each reaches the memory of the others and the others' registers; only all together can be given to a virtual machine");
    let root = bridge.map_or_else(|| devices[0].name.clone(), |bridge| bridge.name.clone());
    Some(
        finding
            .run(
                "see whether the port has ACS",
                format!("sudo lspci -vvv -s {} | grep -i acs", quoted(&root)),
            )
            .then("put one of the cards into another slot, or switch ACS on in the firmware's settings"),
    )
}

/// A device whose memory node is not that of its unit.
fn far(facts: &Facts, device: &Device) -> Option<Finding> {
    let nodes: Vec<u64> = facts.units.iter().filter_map(|unit| unit.node).collect();
    let own = device.node?;
    // Of which unit is not read: a node with none is enough.
    if nodes.is_empty() || nodes.len() != facts.units.len() || nodes.contains(&own) {
        return None;
    }
    let what = format!("{} is on memory node {own}, and every IOMMU on another", device.title());
    let finding = Finding::new("far-iommu", Severity::Notice, what)
        .of([&device.name])
        .means("tables and queues of its IOMMU are in the memory of another socket")
        .costs("each invalidation and each walk of a page table crosses between the sockets")
        .run("see which node each device is on", "lspci -vv | grep -e '^[0-9a-f]' -e NUMA")
        .then("put the card into a slot of the other socket");
    Some(finding)
}
