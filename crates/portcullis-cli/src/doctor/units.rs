//! The IOMMUs that Linux drives: what they can do, as far as sysfs and the log say.

use serde::Serialize;

use super::kernel::Kernel;
use super::log::Log;
use crate::linux::host::Host;

/// Where Linux lists the units.
const FOLDER: &str = "sys/class/iommu";

/// Whose IOMMU a unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Vtd,
    AmdVi,
    #[serde(rename = "smmuv3")]
    SmmuV3,
    #[serde(rename = "smmuv2")]
    SmmuV2,
    VirtioIommu,
    RiscV,
    Other,
}

impl Kind {
    /// By the name that its driver gives it, and that of the device that it is a part of: a virtio-iommu is called by its place on PCI.
    fn of(name: &str, above: &str) -> Self {
        match name {
            _ if above.starts_with("virtio") => Self::VirtioIommu,
            _ if name.starts_with("dmar") => Self::Vtd,
            _ if name.starts_with("ivhd") => Self::AmdVi,
            _ if name.starts_with("smmu3.") => Self::SmmuV3,
            _ if name.starts_with("smmu.") => Self::SmmuV2,
            _ if name.starts_with("riscv") => Self::RiscV,
            _ => Self::Other,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Vtd => "Intel VT-d",
            Self::AmdVi => "AMD-Vi",
            Self::SmmuV3 => "Arm SMMUv3",
            Self::SmmuV2 => "Arm SMMUv2",
            Self::VirtioIommu => "virtio-iommu",
            Self::RiscV => "RISC-V IOMMU",
            Self::Other => "an IOMMU of another kind",
        }
    }
}

/// A unit. What is not told is `None`, or an empty list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unit {
    pub name: String,
    pub kind: Kind,
    /// Bits of the addresses that devices use.
    pub address_bits: Option<u32>,
    pub page_sizes: Vec<u64>,
    /// Whether absent entries are cached, as emulated ones do: then each map is told to the host, and Linux is strict.
    pub caching_mode: Option<bool>,
    pub node: Option<u64>,
    /// How many devices are behind it.
    pub devices: usize,
}

impl Unit {
    /// Whether it is another only by its name.
    pub fn is_like(&self, other: &Self) -> bool {
        let able = |unit: &Self| (unit.kind, unit.address_bits, unit.page_sizes.clone(), unit.caching_mode);
        able(self) == able(other)
    }
}

/// The names of the units, in order, and their kinds.
pub fn kinds<'a>(host: &'a Host<'_>) -> impl Iterator<Item = (String, Kind)> + 'a {
    host.list(FOLDER).into_iter().map(|name| {
        let kind = Kind::of(&name, &above(host, &name));
        (name, kind)
    })
}

/// The device that a unit is a part of.
fn above(host: &Host<'_>, name: &str) -> String {
    host.link(&host.at(&format!("{FOLDER}/{name}/device"))).unwrap_or_default()
}

/// The units, in the order of their names.
pub fn read(host: &Host<'_>, kernel: &Kernel, log: &Log) -> Vec<Unit> {
    kinds(host).map(|(name, kind)| unit(host, kernel, log, (name, kind))).collect()
}

fn unit(host: &Host<'_>, kernel: &Kernel, log: &Log, (name, kind): (String, Kind)) -> Unit {
    let folder = format!("{FOLDER}/{name}");
    let text = |file: &str| host.file(&format!("{folder}/{file}"));
    let hex = |file: &str| u64::from_str_radix(text(file)?.trim(), 16).ok();
    let above = above(host, &name);
    let mut unit = Unit {
        kind,
        address_bits: None,
        page_sizes: Vec::new(),
        caching_mode: None,
        node: text("device/numa_node").and_then(|node| node.parse().ok()),
        devices: host.list(&format!("{folder}/devices")).len(),
        name,
    };
    match kind {
        Kind::Vtd => {
            if let Some(cap) = hex("intel-iommu/cap") {
                vtd(cap, hex("intel-iommu/ecap").unwrap_or_default(), &mut unit);
            }
        }
        Kind::AmdVi => {
            amd(text("amd-iommu/features").as_deref(), kernel, &mut unit);
            unit.caching_mode = hex("amd-iommu/cap").map(|cap| cap >> 26 & 1 != 0);
        }
        Kind::SmmuV3 | Kind::SmmuV2 => arm(log, &above, &mut unit),
        Kind::VirtioIommu => virtio(log, &above, &mut unit),
        Kind::RiscV | Kind::Other => {}
    }
    unit
}

/// The Capability and Extended Capability Registers. Source: VT-d, Rev. 4.1, sections 11.4.2 and 11.4.3.
fn vtd(cap: u64, ecap: u64, unit: &mut Unit) {
    let has = |bit: u32| cap >> bit & 1 != 0;
    let levels = [(11, 57), (10, 48), (9, 39)].into_iter().find(|(bit, _)| has(*bit)).map(|(_, bits)| bits);
    let guest_bits = (cap >> 16 & 0x3f) as u32 + 1;
    // With tables of the first stage alone there are no levels of the second.
    let first_stage = ecap >> 47 & 1 != 0;
    let levels = levels.or(first_stage.then_some(if has(60) { 57 } else { 48 }));
    unit.address_bits = levels.map(|bits: u32| bits.min(guest_bits));
    unit.page_sizes = sizes([true, has(34) || first_stage, has(35) || first_stage && has(56)]);
    unit.caching_mode = Some(has(7));
}

/// Which of the sizes 4 KiB, 2 MiB and 1 GiB a unit has.
fn sizes(has: [bool; 3]) -> Vec<u64> {
    [1 << 12, 1 << 21, 1 << 30].into_iter().zip(has).filter(|(_, has)| *has).map(|(size, _)| size).collect()
}

/// Two numbers with a colon since 5.11, whose order changed with 6.7: the Extended Feature Register comes first since. It says how
/// many levels tables have. Source: AMD I/O Virtualization Technology, 48882, section 3.4.
fn amd(features: Option<&str>, kernel: &Kernel, unit: &mut Unit) {
    let numbers: Vec<&str> = features.unwrap_or_default().trim().split(':').collect();
    let own = if kernel.since((6, 7)) { numbers.first() } else { numbers.last() };
    let Some(features) = own.and_then(|number| u64::from_str_radix(number, 16).ok()) else { return };
    unit.address_bits = Some(match features >> 10 & 3 {
        0 => 48,
        1 => 57,
        _ => 64,
    });
    unit.page_sizes = sizes([true; 3]);
}

/// `arm-smmu-v3 NAME: ias 48-bit, oas 48-bit (features 0x..)`, and for version 2 `arm-smmu NAME:` with tabs.
fn arm(log: &Log, name: &str, unit: &mut Unit) {
    let driver = if unit.kind == Kind::SmmuV3 { "arm-smmu-v3" } else { "arm-smmu" };
    let own = format!("{driver} {name}: ");
    for text in log.lines.iter().filter_map(|line| line.strip_prefix(&own)) {
        let text = text.trim_start();
        let bits = |text: &str| text.split('-').next()?.parse().ok();
        if let Some(rest) = text.strip_prefix("ias ").or_else(|| text.strip_prefix("Stage-1: ")) {
            unit.address_bits = bits(rest);
        } else if let Some(rest) = text.strip_prefix("Supported page sizes: ") {
            unit.page_sizes = of_mask(rest);
        }
    }
}

/// `virtio_iommu virtio0: input address: 64 bits`, `page mask: 0xfffffffffffff000`.
fn virtio(log: &Log, name: &str, unit: &mut Unit) {
    let own = format!("virtio_iommu {name}: ");
    for text in log.lines.iter().filter_map(|line| line.strip_prefix(&own)) {
        if let Some(rest) = text.strip_prefix("input address: ") {
            unit.address_bits = rest.split(' ').next().and_then(|bits| bits.parse().ok());
        } else if let Some(rest) = text.strip_prefix("page mask: ") {
            unit.page_sizes = of_mask(rest);
        }
    }
}

/// The sizes up to 1 GiB of a mask that has a bit for each. A mask of everything from one size on has that alone, as larger ones are its
/// multiples.
fn of_mask(text: &str) -> Vec<u64> {
    let digits = text.trim().trim_start_matches("0x");
    let Ok(mask) = u64::from_str_radix(digits, 16) else { return Vec::new() };
    let is_run = mask != 0 && mask == u64::MAX << mask.trailing_zeros();
    let sizes = (12..=30).map(|bit| 1_u64 << bit).filter(|size| mask & size != 0);
    sizes.take(if is_run { 1 } else { usize::MAX }).collect()
}

#[cfg(test)]
#[path = "../../tests/doctor/units.rs"]
mod tests;
