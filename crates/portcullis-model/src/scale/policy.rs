//! The policies and designs that can be compared.

use portcullis::dma::QueueConfig;
use portcullis::invalidation::QUEUE_ENTRIES;

use super::workload::Mapping;

/// How unmaps wait for the invalidation queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// They do not.
    Never,
    /// One wait for this number of unmaps, shared by all CPUs that wait at the time.
    Shared(u32),
    /// A CPU waits once for this number of unmaps, holding a lock that all CPUs need.
    Locked(u32),
    /// A CPU waits once for this number of unmaps. Each CPU submits individually, and the hardware executes one submission after the other.
    Own(u32),
    /// A CPU waits once for this number of unmaps, in a hardware queue of its own, independent of the others.
    Queues(u32),
}

/// What is copied, and what of it is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// Nothing is.
    Nothing,
    /// To or from the slot that this CPU used last.
    Newest,
    /// To or from the least recently used slot.
    Oldest,
    /// To or from the slot that any CPU used last.
    Anyones,
    /// To or from the slot that this CPU used last, if that is cheaper than to map, or other data shares the page: `adaptive`.
    Cheaper,
}

/// A policy of the library, or a design of the past.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Its name in commands.
    pub name: &'static str,
    /// Its measured operation; none if it maps nothing.
    pub operation: Option<&'static str>,
    /// Its waits.
    pub waits: Waits,
    /// Nanoseconds between its polls of the hardware, if these are far apart: a wait is a multiple of them.
    pub looks_ns: f64,
    /// Nanoseconds for each mapping to write changed tables back to memory, for a non-coherent IOMMU.
    pub written_back_ns: f64,
    /// Cache lines that a CPU fetches from the lock's last holder. The operation was measured without the lock, which also covers the CPU's
    /// submission.
    pub handed_on: u32,
    /// Its copies.
    pub copied: Copied,
    /// It first copies a device-written buffer into its slot, on every machine.
    pub copies_in: bool,
    /// Mappings of more bytes than this number of pages has are not copied but mapped, and their unmap waits.
    pub most_copied: u64,
    /// Memory reads of page walks for each page that a device uses: by `docs/strict.md`, streams of 10 flows in an aged space.
    pub reads: f64,
    /// A device no longer reaches a buffer when its unmap, or the commit of its batch, has returned.
    pub strict: bool,
    /// All CPUs share its state, however many IOMMUs there are, because it does not translate.
    pub of_machine: bool,
    /// It is a design of the past, or needs rare hardware.
    pub old: bool,
}

const OURS: Policy = Policy {
    name: "passthrough",
    operation: None,
    waits: Waits::Never,
    looks_ns: 0.0,
    written_back_ns: 0.0,
    handed_on: 0,
    copied: Copied::Nothing,
    copies_in: false,
    most_copied: u64::MAX,
    reads: 0.0,
    strict: false,
    of_machine: false,
    old: false,
};

/// The additional time of a map and an unmap of 4 KiB with tables that are written back: `portcullis bench pgtable --format vtd-ss
/// --subject portcullis,portcullis-nc` on 2 virtual CPUs of an AMD EPYC (family 26), 23 November 2026: 697 ns and 13 ns.
const WRITTEN_BACK_NS: f64 = 684.0;

/// Linux's drivers of 2017 polled the SMMU at intervals of a microsecond, `udelay(1)`: `queue_poll_cons` in `arm-smmu-v3.c` and
/// `__arm_smmu_tlb_sync` in `arm-smmu.c`, version 4.10.
const UDELAY_NS: f64 = 1_000.0;

/// Walks of Linux's placement there: 1.24 misses of the IOTLB, and 0.12 + 0.12 + 0.932 of the caches above.
const SCATTERED: f64 = 2.41;

/// The same since December 2025, with the leaf-only hint.
const HINTED: f64 = 1.23 + 0.812;

const fn ours(name: &'static str, operation: &'static str) -> Policy {
    Policy { name, operation: Some(operation), ..OURS }
}

const fn old(name: &'static str, operation: &'static str, waits: Waits) -> Policy {
    Policy { waits, old: true, reads: SCATTERED, ..ours(name, operation) }
}

/// Replays use the same number.
const BATCH: Waits = Waits::Shared(QueueConfig::BATCH as u32);
const RING: Waits = Waits::Shared(QueueConfig::RING_BATCH as u32);

/// All of them; the first is the baseline.
pub const POLICIES: [Policy; 18] = [
    OURS,
    Policy { waits: Waits::Shared(1), strict: true, reads: 1.24 + 0.856, ..ours("strict", "raw") },
    // An SMMUv3's ECMDQs, as the library's driver uses them. The hardware executes all submissions at once.
    Policy {
        waits: Waits::Queues(1),
        strict: true,
        reads: 1.24 + 0.856,
        old: true,
        ..ours("strict-ecmdq", "raw")
    },
    Policy { waits: BATCH, strict: true, reads: 1.24 + 0.856, ..ours("strict-batch", "batch") },
    Policy { waits: RING, strict: true, reads: 1.20, ..ours("strict-ring", "ring") },
    // Persistent mappings miss if the buffers are more pages than the IOTLB has.
    Policy { copied: Copied::Newest, most_copied: 32, strict: true, reads: 1.0, ..ours("bounce", "pool") },
    Policy {
        waits: RING,
        copied: Copied::Cheaper,
        most_copied: 32,
        strict: true,
        reads: 1.20,
        ..ours("adaptive", "adaptive")
    },
    // A flush drops the upper tables' pointers once in a full queue; the pages are as scattered as strict's.
    Policy { waits: Waits::Shared(QUEUE_ENTRIES as u32), reads: 1.24 + 0.856, ..ours("lazy", "lazy") },
    Policy { copied: Copied::Newest, copies_in: true, of_machine: true, ..ours("swiotlb", "swiotlb") },
    old("lazy-2015", "lazy-2015", Waits::Locked(250)),
    Policy { written_back_ns: WRITTEN_BACK_NS, ..old("tree-2008", "lazy-2015", Waits::Locked(250)) },
    Policy { written_back_ns: WRITTEN_BACK_NS, ..old("bitmap-2008", "bitmap-2008", Waits::Locked(250)) },
    Policy { strict: true, looks_ns: UDELAY_NS, ..old("smmu-2017", "smmu-2017-any", Waits::Locked(1)) },
    // Addresses and tables are as scalable as ours; the domain's lock is held during each flush. Its handover transfers the lock's word,
    // the node that the next CPU polls, the queue's place, and a line of descriptors.
    Policy { strict: true, handed_on: 4, reads: HINTED, ..old(LINUX_STRICT, "raw", Waits::Locked(1)) },
    // The command queue takes commands from all CPUs without a lock, and each CPU waits for its own CMD_SYNC. Transfers in front of that
    // queue were not measured, and are left out.
    Policy { strict: true, reads: HINTED, ..old(LINUX_STRICT_SMMU, "raw", Waits::Own(1)) },
    Policy {
        copied: Copied::Oldest,
        reads: 0.0,
        of_machine: true,
        ..old("swiotlb-2021", "swiotlb-2021", Waits::Never)
    },
    Policy {
        copied: Copied::Anyones,
        reads: 0.0,
        of_machine: true,
        ..old("swiotlb-lifo", "swiotlb-lifo", Waits::Never)
    },
    Policy {
        copied: Copied::Oldest,
        reads: 0.0,
        of_machine: true,
        ..old("swiotlb-2022", "swiotlb-2022", Waits::Never)
    },
];

/// The design of Linux's current strict mode behind VT-d, AMD-Vi and virtio-iommu: no design of the past.
pub const LINUX_STRICT: &str = "vtd-2024";

/// The same behind SMMUv3: `arm_smmu_cmdq_issue_cmdlist`, since Linux 5.4.
pub const LINUX_STRICT_SMMU: &str = "smmu-2026";

impl Policy {
    /// Whether each unmap waits for the IOMMU.
    pub fn waits_each(&self) -> bool {
        matches!(self.waits, Waits::Shared(1) | Waits::Locked(1) | Waits::Own(1) | Waits::Queues(1))
    }

    /// Whether it copies `mapping`, if it copies by size.
    pub fn copies(&self, mapping: &Mapping) -> bool {
        mapping.bytes.div_ceil(4096) <= self.most_copied
    }

    /// The policy called `name`.
    pub fn named(name: &str) -> Option<&'static Self> {
        POLICIES.iter().find(|policy| policy.name == name)
    }
}
