//! The machine in a few lines: what it has and how it is set, whether or not anything is wrong with it.

use super::facts::Facts;
use super::kernel::Maker;
use super::memory::SLOT;
use super::units::Unit;
use crate::look::{self, NOT_KNOWN, count, number_of};

/// The most groups, names and counters that are listed; JSON has all.
const MOST: usize = 12;

/// What each line is about, and what it says.
pub fn lines(facts: &Facts) -> Vec<(&'static str, String)> {
    let mut all = vec![("Kernel", kernel(facts)), ("IOMMU", iommu(facts))];
    if facts.has_iommu() {
        all.push(("Mode", mode(facts)));
        all.push(("Groups", groups(facts)));
    }
    if !facts.parameters.is_empty() {
        let words: Vec<&str> = facts.parameters.iter().map(|parameter| parameter.word.as_str()).collect();
        all.push(("Parameters", words.join(" ")));
    }
    all.push(("swiotlb", swiotlb(facts)));
    if !facts.counts.is_empty() {
        all.push(("Mapped now", mapped(facts)));
    }
    all.push(("VFIO", vfio(facts)));
    if facts.limits.memlock.is_some() || facts.limits.dma_entry_limit.is_some() {
        all.push(("Limits", limits(facts)));
    }
    all.push(("Huge pages", huge_pages(facts)));
    let nodes = nodes(facts);
    if let Some(nodes) = nodes {
        all.push(("Memory nodes", nodes));
    }
    if !facts.counters.is_empty() {
        all.push(("Counters", counters(facts)));
    }
    all.push(("Portcullis", module(facts)));
    all
}

fn kernel(facts: &Facts) -> String {
    let kernel = &facts.kernel;
    let release = kernel.release.as_deref().unwrap_or("of a release that is not known");
    let guest = match (kernel.confidential, kernel.guest) {
        (Some(technique), _) => format!(", in a confidential virtual machine ({technique})"),
        (None, true) => ", in a virtual machine".into(),
        (None, false) => String::new(),
    };
    format!("Linux {release}{guest}")
}

fn iommu(facts: &Facts) -> String {
    let tables: Vec<&str> = facts.firmware.tables.iter().map(|table| table.name).collect();
    let firmware = match tables.as_slice() {
        [] => String::new(),
        all => format!("; firmware's tables: {}", all.join(", ")),
    };
    if facts.units.is_empty() {
        let none = match () {
            () if facts.has_iommu() => "one that does not tell its name",
            () if facts.iommu_is_unknown() => NOT_KNOWN,
            () => "none in use",
        };
        return format!("{none}{firmware}");
    }
    let mut kinds: Vec<(&Unit, Vec<&str>)> = Vec::new();
    for unit in &facts.units {
        match kinds.iter_mut().find(|(first, _)| first.is_like(unit)) {
            Some((_, names)) => names.push(&unit.name),
            None => kinds.push((unit, vec![&unit.name])),
        }
    }
    let told: Vec<String> = kinds.iter().map(|(unit, names)| abilities(unit, names)).collect();
    format!("{}{firmware}", told.join("; "))
}

/// `Intel VT-d, 2 units (dmar0, dmar1), addresses of 48 bits, pages of 4 KiB, 2 MiB and 1 GiB`.
fn abilities(unit: &Unit, names: &[&str]) -> String {
    let bits = unit.address_bits.map_or("a width that is not known".into(), |bits| format!("{bits} bits"));
    let sizes: Vec<String> = unit.page_sizes.iter().map(|size| look::size(*size)).collect();
    let pages = if sizes.is_empty() { "sizes that are not known".into() } else { sizes.join(", ") };
    let caching = if unit.caching_mode == Some(true) { ", emulated (caching mode)" } else { "" };
    let (kind, units) = (unit.kind.name(), number_of(names.len() as u64, "unit"));
    format!("{kind}, {units} ({}), addresses of {bits}, pages of {pages}{caching}", shortened(names))
}

fn shortened(names: &[&str]) -> String {
    match names.get(..MOST) {
        Some(first) if names.len() > MOST => format!("{} and {} more", first.join(", "), names.len() - MOST),
        _ => names.join(", "),
    }
}

fn mode(facts: &Facts) -> String {
    let modes: Vec<String> = facts
        .devices
        .modes()
        .iter()
        .map(|(mode, groups)| format!("{mode} ({})", number_of(*groups as u64, "group")))
        .collect();
    let told = match (modes.as_slice(), &facts.mode.usual) {
        ([], None) => NOT_KNOWN.into(),
        ([], Some(mode)) => mode.clone(),
        (all, _) => all.join(", "),
    };
    let about = match facts.mode.usual.as_deref() {
        Some("lazy") => {
            ". Lazy: a device reaches a buffer for up to 10 ms or so after its unmap, and the rest of its pages (docs/linux.md)"
        }
        Some("strict") => {
            ". Strict: each unmap waits for the IOMMU; a device reaches the rest of a buffer's pages (docs/linux.md)"
        }
        _ => "",
    };
    let why = match (&facts.mode.why, modes.len()) {
        (None, _) => String::new(),
        (Some(why), 1) => format!(", by {why}"),
        (Some(why), _) => format!("; {} by {why}", facts.mode.usual.as_deref().unwrap_or_default()),
    };
    let is_kept =
        |device: &super::devices::Device| device.external && facts.devices.mode_of(device) == Some("strict");
    let external = if facts.mode.usual.as_deref() == Some("lazy") && facts.devices.endpoints().any(is_kept) {
        "; strict for what is behind an external port, which Linux does not trust"
    } else {
        ""
    };
    format!("{told}{why}{external}{about}")
}

/// Each group with what does DMA in it.
fn groups(facts: &Facts) -> String {
    let devices = &facts.devices;
    let usual = facts.mode.usual.as_deref();
    let told = |group: &crate::doctor::devices::Group| {
        let names: Vec<String> = devices.within(group).map(super::devices::Device::title).collect();
        let mode = group
            .mode
            .as_deref()
            .filter(|mode| Some(*mode) != usual)
            .map_or(String::new(), |mode| format!(" ({mode})"));
        (!names.is_empty()).then(|| format!("{}{mode} {}", group.number, names.join(", ")))
    };
    let all: Vec<String> = devices.groups.iter().filter_map(told).collect();
    let rest = all.len().saturating_sub(MOST);
    let first: Vec<String> = all.into_iter().take(MOST).collect();
    match rest {
        0 => first.join("; "),
        rest => format!("{}; and {rest} more (--json)", first.join("; ")),
    }
}

fn swiotlb(facts: &Facts) -> String {
    let pool = &facts.swiotlb;
    match pool.slots {
        None => NOT_KNOWN.into(),
        Some(0) => "none".into(),
        Some(slots) => {
            let size = |slots: Option<u64>| {
                slots.map_or(NOT_KNOWN.into(), |slots| look::size(slots.saturating_mul(SLOT)))
            };
            format!("{}, in use {}, at the most {}", size(Some(slots)), size(pool.used), size(pool.most_used))
        }
    }
}

fn mapped(facts: &Facts) -> String {
    let told = facts.counts.iter().map(|counter| match counter.second {
        Some(second) => format!("{}: {}, then {}", counter.name, count(counter.first), count(second)),
        None => format!("{}: {}", counter.name, count(counter.first)),
    });
    told.collect::<Vec<_>>().join("; ")
}

fn vfio(facts: &Facts) -> String {
    let vfio = &facts.vfio;
    let given: Vec<&str> = facts
        .devices
        .endpoints()
        .filter(|device| device.is_vfio())
        .map(|device| device.name.as_str())
        .collect();
    let is = |is: bool, name: &'static str| is.then_some(name);
    let loaded: Vec<&str> = [is(vfio.vfio, "vfio"), is(vfio.type1, "type 1"), is(vfio.iommufd, "iommufd")]
        .into_iter()
        .flatten()
        .collect();
    if loaded.is_empty() && given.is_empty() && facts.lacks("sys/module") {
        return NOT_KNOWN.into();
    }
    if loaded.is_empty() && given.is_empty() {
        return "not loaded, and has no devices".into();
    }
    let devices = if given.is_empty() { "no devices".into() } else { given.join(", ") };
    let nodes = match (vfio.groups.len(), vfio.cdevs.len()) {
        (0, 0) => "no nodes in /dev/vfio".into(),
        (groups, cdevs) => format!(
            "nodes of {} and {}",
            number_of(groups as u64, "group"),
            number_of(cdevs as u64, "device")
        ),
    };
    let loaded =
        if loaded.is_empty() { "not loaded".into() } else { format!("{} loaded", loaded.join(", ")) };
    format!("{loaded}; has {devices}; {nodes}")
}

fn limits(facts: &Facts) -> String {
    let memlock = facts.limits.memlock.map_or("without a limit".into(), look::size);
    let entries = facts
        .limits
        .dma_entry_limit
        .map_or(String::new(), |limit| format!(", mappings of a VFIO container {}", count(limit)));
    format!("locked memory of a process {memlock}{entries}")
}

fn huge_pages(facts: &Facts) -> String {
    let pages = &facts.huge_pages;
    if pages.size_kib.is_none() && pages.transparent.is_none() {
        return NOT_KNOWN.into();
    }
    let size =
        pages.size_kib.map_or("a size that is not known".into(), |kib| look::size(kib.saturating_mul(1024)));
    let number = |n: Option<u64>| n.map_or(NOT_KNOWN.into(), count);
    let transparent = pages.transparent.as_deref().unwrap_or(NOT_KNOWN);
    format!(
        "{} of {size} reserved, {} free; transparent: {transparent}",
        number(pages.reserved),
        number(pages.free)
    )
}

/// Only machines with several nodes have something to tell.
fn nodes(facts: &Facts) -> Option<String> {
    let mut nodes: Vec<u64> = facts.devices.endpoints().filter_map(|device| device.node).collect();
    nodes.sort_unstable();
    let devices = |node: u64| nodes.iter().filter(|other| **other == node).count() as u64;
    let mut distinct = nodes.clone();
    distinct.dedup();
    (distinct.len() > 1).then(|| {
        let told =
            distinct.iter().map(|node| format!("{} on node {node}", number_of(devices(*node), "device")));
        let units =
            facts.units.iter().filter_map(|unit| Some(format!("{} on node {}", unit.name, unit.node?)));
        told.chain(units).collect::<Vec<_>>().join(", ")
    })
}

fn counters(facts: &Facts) -> String {
    let names: Vec<&str> = facts.counters.iter().map(|counters| counters.name.as_str()).collect();
    let command = facts
        .counters
        .iter()
        .find(|counters| !counters.events.is_empty())
        .map(super::vfio::Counters::command);
    let command = command.map_or(String::new(), |command| format!("; for a second: {command}"));
    format!("the IOMMU has {}{command}", shortened(&names))
}

fn module(facts: &Facts) -> String {
    let module = &facts.module;
    if !module.loaded && facts.lacks("sys/module") {
        return NOT_KNOWN.into();
    }
    if !module.loaded {
        let can = facts.has_iommu() && facts.kernel.maker != Maker::Arm;
        return if can {
            "the module is not loaded (docs/linux.md)".into()
        } else {
            "the module is not loaded".into()
        };
    }
    let version = module.version.as_deref().unwrap_or(NOT_KNOWN);
    let protected = facts
        .devices
        .endpoints()
        .filter_map(|device| Some(format!("{} ({})", device.name, device.policy.as_ref()?)));
    let protected: Vec<String> = protected.collect();
    let which = if protected.is_empty() {
        "protects no device".into()
    } else {
        format!("protects {}", protected.join(", "))
    };
    format!("the module {version} is loaded, and {which}")
}
