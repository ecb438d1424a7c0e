//! The policies and designs that can be compared.

/// How unmaps wait for the invalidation queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// They do not.
    Never,
    /// One wait for so many unmaps, shared with all CPUs that wait at the time.
    Shared(u32),
    /// One wait for so many unmaps, with a lock held that all CPUs need.
    Locked(u32),
}

/// What is copied, and what of it is in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// Nothing is.
    Nothing,
    /// To or from the slot that this CPU used last.
    Newest,
    /// To or from the slot that nobody has used for the longest time.
    Oldest,
    /// To or from the slot that any CPU used last.
    Anyones,
}

/// A policy of the library, or a design of the past.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// As in commands.
    pub name: &'static str,
    /// The operation that was measured for it; none where nothing is mapped.
    pub operation: Option<&'static str>,
    /// Its waits.
    pub waits: Waits,
    /// Its copies.
    pub copied: Copied,
    /// Mappings of more pages are not copied, but mapped, and their unmap waits.
    pub most_copied: u64,
    /// Memory reads of page walks for each page that a device uses: by `docs/strict.md`, streams of 10 flows in an aged space.
    pub reads: f64,
    /// A device reaches a buffer no more when its unmap, or the commit of its batch, has returned.
    pub strict: bool,
    /// It is a design of the past.
    pub old: bool,
}

const OURS: Policy = Policy {
    name: "passthrough",
    operation: None,
    waits: Waits::Never,
    copied: Copied::Nothing,
    most_copied: u64::MAX,
    reads: 0.0,
    strict: false,
    old: false,
};

/// Walks of Linux's placement there: 1.24 misses of the IOTLB, and 0.12 + 0.12 + 0.932 of the caches above.
const SCATTERED: f64 = 2.41;

const fn ours(name: &'static str, operation: &'static str) -> Policy {
    Policy { name, operation: Some(operation), ..OURS }
}

const fn old(name: &'static str, operation: &'static str, waits: Waits) -> Policy {
    Policy { waits, old: true, reads: SCATTERED, ..ours(name, operation) }
}

/// All of them; the first is what all are compared with.
pub const POLICIES: [Policy; 15] = [
    OURS,
    Policy { waits: Waits::Shared(1), strict: true, reads: 1.24 + 0.856, ..ours("strict", "raw") },
    Policy { waits: Waits::Shared(32), strict: true, reads: 1.24 + 0.856, ..ours("strict-batch", "batch") },
    Policy { waits: Waits::Shared(64), strict: true, reads: 1.20, ..ours("strict-ring", "ring") },
    // What stays mapped misses where the buffers are more pages than the IOTLB has.
    Policy { copied: Copied::Newest, most_copied: 32, strict: true, reads: 1.0, ..ours("bounce", "pool") },
    Policy { waits: Waits::Shared(64), strict: true, reads: 1.20, ..ours("adaptive", "adaptive") },
    // A flush drops the upper tables' pointers once in 256 unmaps; the pages are as scattered as strict's.
    Policy { waits: Waits::Shared(256), reads: 1.24 + 0.856, ..ours("lazy", "lazy") },
    Policy { copied: Copied::Newest, ..ours("swiotlb", "swiotlb") },
    old("lazy-2015", "lazy-2015", Waits::Locked(250)),
    old("tree-2008", "lazy-2015", Waits::Locked(250)),
    old("bitmap-2008", "bitmap-2008", Waits::Locked(250)),
    Policy { strict: true, ..old("smmu-2017", "smmu-2017", Waits::Locked(1)) },
    Policy { copied: Copied::Oldest, reads: 0.0, ..old("swiotlb-2021", "swiotlb-2021", Waits::Never) },
    Policy { copied: Copied::Anyones, reads: 0.0, ..old("swiotlb-lifo", "swiotlb-lifo", Waits::Never) },
    Policy { copied: Copied::Oldest, reads: 0.0, ..old("swiotlb-2022", "swiotlb-2022", Waits::Never) },
];

impl Policy {
    /// The one of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        POLICIES.iter().find(|policy| policy.name == name)
    }
}
