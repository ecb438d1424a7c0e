//! What is done: the workloads by name.

use std::sync::LazyLock;

use portcullis::platform::FRAME_SIZE;

/// What a driver calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `DmaDevice::map_single` and `unmap_single`, strict.
    Raw,
    /// `Queue::map` and `Queue::unmap` of a direct queue, strict.
    Typed,
    /// `map_single` and `unmap_single`, lazy.
    Lazy,
    /// `map_sg` and `unmap_sg` of a list with a segment for each page, strict.
    Sg,
    /// `map_single`, and unmaps through a `RawBatch` of 64.
    Batch,
    /// A `StrictRing` that commits every 64 descriptors.
    Ring,
    /// A `BounceDevice` whose buffers stay mapped, up to 128 KiB.
    Pool,
    /// The swiotlb pool.
    Swiotlb,
    /// An `AdaptiveRing`.
    Adaptive,
}

impl Kind {
    pub(super) const ALL: [Self; 9] = [
        Self::Raw,
        Self::Typed,
        Self::Lazy,
        Self::Sg,
        Self::Batch,
        Self::Ring,
        Self::Pool,
        Self::Swiotlb,
        Self::Adaptive,
    ];

    /// As in the names of workloads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Typed => "typed",
            Self::Lazy => "lazy",
            Self::Sg => "sg",
            Self::Batch => "batch",
            Self::Ring => "ring",
            Self::Pool => "pool",
            Self::Swiotlb => "swiotlb",
            Self::Adaptive => "adaptive",
        }
    }

    /// Whether data is copied, so that buffers must be memory.
    pub(crate) const fn copies(self) -> bool {
        matches!(self, Self::Pool | Self::Swiotlb | Self::Adaptive)
    }
}

/// A workload: an operation is a map and an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What is called.
    pub kind: Kind,
    /// Pages of 4 KiB in a mapping.
    pub pages: u64,
    /// Mappings of each thread that are live at a time: with 1 each is unmapped before the next is made.
    pub live: usize,
}

impl Workload {
    /// Bytes of a mapping.
    pub(crate) fn bytes(&self) -> u64 {
        self.pages * FRAME_SIZE
    }
}

/// Unmaps that one commit of a batch or a ring waits for.
pub(crate) const BATCH: usize = 64;

static ALL: LazyLock<Vec<Workload>> = LazyLock::new(|| {
    let mut all = Vec::new();
    for live in [1, 64, 4096] {
        for kind in Kind::ALL {
            for pages in [1, 4, 16, 64] {
                let mut name = format!("{}-{pages}", kind.name());
                if live > 1 {
                    name.push_str(&format!("-live{live}"));
                }
                // Made once, and kept for as long as the program runs.
                all.push(Workload { name: name.leak(), kind, pages, live });
            }
        }
    }
    all
});

/// All workloads, in the order in which they are reported.
pub fn workloads() -> &'static [Workload] {
    &ALL
}

/// The numbers of threads that are measured without being named.
pub const THREADS: [usize; 2] = [1, 2];

/// The most threads that can be measured: no more than the platform has CPUs.
pub const MOST_THREADS: usize = 48;

/// One workload as all threads do it at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub workload: Workload,
    pub threads: usize,
    /// Mappings that are live at a time: fewer than the workload's in tests.
    pub live: usize,
    /// Each thread has a domain of its own.
    pub own_domains: bool,
    /// There are more threads than cores.
    pub crowded: bool,
}
