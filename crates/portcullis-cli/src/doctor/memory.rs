//! Memory that DMA needs: swiotlb's, huge pages, what a process may lock, and what grows.

use serde::Serialize;

use crate::linux::host::Host;

/// Bytes of one of swiotlb's slots.
pub const SLOT: u64 = 2 << 10;

/// swiotlb, in slots. What is not told is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Swiotlb {
    pub slots: Option<u64>,
    pub used: Option<u64>,
    /// The most that were ever in use.
    pub most_used: Option<u64>,
}

impl Swiotlb {
    pub fn read(host: &Host<'_>) -> Self {
        let folder = "sys/kernel/debug/swiotlb";
        let number = |name: &str| host.number(&format!("{folder}/{name}"));
        // Where there is no pool the folder is empty.
        let none = || (host.exists(folder) && host.list(folder).is_empty()).then_some(0);
        Self {
            slots: number("io_tlb_nslabs").or_else(none),
            used: number("io_tlb_used"),
            most_used: number("io_tlb_used_hiwater"),
        }
    }
}

/// Pages that are larger than usual.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HugePages {
    pub size_kib: Option<u64>,
    pub reserved: Option<u64>,
    pub free: Option<u64>,
    /// Whether the kernel makes them by itself: `always`, `madvise`, `never`.
    pub transparent: Option<String>,
}

impl HugePages {
    pub fn read(host: &Host<'_>) -> Self {
        let info = host.file("proc/meminfo").unwrap_or_default();
        let of = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        };
        let transparent = host.file("sys/kernel/mm/transparent_hugepage/enabled");
        let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
        Self {
            size_kib: of("Hugepagesize:"),
            reserved: of("HugePages_Total:"),
            free: of("HugePages_Free:"),
            transparent: transparent.and_then(chosen),
        }
    }
}

/// What a process may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes of memory that a process of this user may lock; `None` is without a limit, or not told.
    pub memlock: Option<u64>,
    /// Mappings of a container of VFIO's type 1.
    pub dma_entry_limit: Option<u64>,
}

impl Limits {
    pub fn read(host: &Host<'_>) -> Self {
        let limits = host.file("proc/self/limits").unwrap_or_default();
        let memlock = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory")?.split_whitespace().next()?.parse().ok());
        Self {
            memlock,
            dma_entry_limit: host.number("sys/module/vfio_iommu_type1/parameters/dma_entry_limit"),
        }
    }
}

/// Something that is counted, which grows without end where mappings leak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counter {
    pub name: &'static str,
    pub first: u64,
    /// What the second look saw, if there was one.
    pub second: Option<u64>,
}

/// How many mappings there are, as far as the kernel counts any: of addresses, of swiotlb's slots, of the DMA API's debugging.
pub fn counts(host: &Host<'_>, below: &str) -> Vec<(&'static str, u64)> {
    let slab = host.file(&format!("{below}proc/slabinfo")).and_then(|text| addresses(&text));
    let debug = |name: &str| host.number(&format!("{below}sys/kernel/debug/{name}"));
    let api = || Some(debug("dma-api/nr_total_entries")?.saturating_sub(debug("dma-api/num_free_entries")?));
    let all = [
        ("addresses in use or kept (slab iommu_iova)", slab),
        ("slots of swiotlb in use", debug("swiotlb/io_tlb_used")),
        ("mappings by the DMA API's debugging", api()),
    ];
    all.into_iter().filter_map(|(name, count)| Some((name, count?))).collect()
}

/// Active objects of `iommu_iova` in `/proc/slabinfo`.
fn addresses(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("iommu_iova"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Both looks beside each other.
pub fn grown(first: &[(&'static str, u64)], second: &[(&'static str, u64)]) -> Vec<Counter> {
    let later = |name: &str| second.iter().find(|(other, _)| *other == name).map(|(_, count)| *count);
    first.iter().map(|(name, count)| Counter { name, first: *count, second: later(name) }).collect()
}

/// Of the debugging of the DMA API (`CONFIG_DMA_API_DEBUG`): calls of drivers that break its rules; `None` where it is not there.
pub fn api_errors(host: &Host<'_>) -> Option<u64> {
    host.number("sys/kernel/debug/dma-api/error_count")
}

#[cfg(test)]
#[path = "../../tests/doctor/memory.rs"]
mod tests;
