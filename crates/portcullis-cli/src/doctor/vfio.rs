//! What lets programs and virtual machines have devices (VFIO, iommufd), and the counters of IOMMUs.

use serde::Serialize;

use super::kernel::switched;
use crate::linux::host::Host;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Vfio {
    /// Whether the modules are there, loaded or built in.
    pub vfio: bool,
    pub type1: bool,
    pub iommufd: bool,
    /// Nodes: groups of type 1, devices of iommufd (cdev).
    pub groups: Vec<String>,
    pub cdevs: Vec<String>,
    /// Modules that let devices through whose interrupts are not remapped.
    pub unsafe_interrupts: Vec<&'static str>,
    /// Devices without an IOMMU are let through.
    pub without_iommu: bool,
}

impl Vfio {
    pub fn read(host: &Host<'_>) -> Self {
        let is_on =
            |path: &str| host.file(&format!("sys/module/{path}")).as_deref().and_then(switched) == Some(true);
        let is_group = |name: &String| name.trim_start_matches("noiommu-").parse::<u32>().is_ok();
        Self {
            vfio: host.exists("sys/module/vfio") || host.exists("dev/vfio/vfio"),
            type1: host.exists("sys/module/vfio_iommu_type1"),
            iommufd: host.exists("sys/module/iommufd") || host.exists("dev/iommu"),
            groups: host.list("dev/vfio").into_iter().filter(is_group).collect(),
            cdevs: host.list("dev/vfio/devices"),
            unsafe_interrupts: ["vfio_iommu_type1", "iommufd"]
                .into_iter()
                .filter(|module| is_on(&format!("{module}/parameters/allow_unsafe_interrupts")))
                .collect(),
            without_iommu: is_on("vfio/parameters/enable_unsafe_noiommu_mode"),
        }
    }
}

/// Counters that an IOMMU has itself, which `perf` reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Its name for perf: `dmar0`, `amd_iommu_0`, `smmuv3_pmcg_2b440`.
    pub name: String,
    pub events: Vec<String>,
}

/// All of them.
pub fn counters(host: &Host<'_>) -> Vec<Counters> {
    let folder = "sys/bus/event_source/devices";
    let is_of_iommu = |name: &String| {
        ["dmar", "amd_iommu_", "smmuv3_pmcg_", "arm_smmu"].iter().any(|one| name.starts_with(one))
    };
    let events = |name: &String| {
        let mut events = host.list(&format!("{folder}/{name}/events"));
        events.retain(|event| !event.ends_with(".unit") && !event.ends_with(".scale"));
        events
    };
    let names = host.list(folder).into_iter().filter(is_of_iommu);
    names.map(|name| Counters { events: events(&name), name }).collect()
}

impl Counters {
    /// What reads some of them for a second.
    pub fn command(&self) -> String {
        /// What tells the most: how often the IOMMU looked an address up in vain, and walked tables.
        const TELLING: [&str; 12] = [
            "iommu_requests",
            "iotlb_lookup",
            "iotlb_miss",
            "iotlb_hit",
            "mem_trans_total",
            "mem_iommu_tlb_pte_mis",
            "mem_iommu_tlb_pte_hit",
            "int_dte_mis",
            "transaction",
            "tlb_miss",
            "trans_table_walk_access",
            "config_cache_miss",
        ];
        let known = self.events.iter().filter(|event| TELLING.contains(&event.as_str()));
        let mut events: Vec<&String> = known.take(4).collect();
        if events.is_empty() {
            events = self.events.iter().take(4).collect();
        }
        let words: Vec<String> = events.iter().map(|event| format!("{}/{event}/", self.name)).collect();
        format!("sudo perf stat -a -e {} sleep 1", crate::machine::quoted(&words.join(",")))
    }
}
