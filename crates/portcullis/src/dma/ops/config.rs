//! Configuration, attributes and counters of a [`DmaOps`](super::DmaOps).

use crate::addr::Direction;
use crate::bounce::pool::PoolUsage;
use crate::domain::Policy;
use crate::pgtable::{Attributes, Memory};
use crate::sync::{AtomicU64, Ordering};

/// How each mapping is protected. The driver has its buffer back when an unmap returns, so nothing is batched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpsConfig {
    /// Every buffer is mapped, and its unmap waits for one invalidation.
    Strict,
    /// Every buffer is mapped, and after its unmap the device may reach it until the next flush: see
    /// [`Policy::Lazy`](crate::domain::Policy::Lazy).
    Lazy {
        /// The longest time in nanoseconds from an unmap to the start of the flush that covers it.
        window_ns: u64,
    },
    /// Buffers of up to `threshold` bytes are copied, so that the device never reaches them. Larger ones are mapped, and their unmap waits; of these,
    /// an [untrusted](crate::dma::Device::trusted) device gets only whole granules, and copies of the ends.
    Bounce {
        /// The most bytes of a mapping that is copied as a whole: at most the [threshold](crate::bounce::pool::PoolConfig::threshold) of the domain's
        /// pool.
        threshold: u64,
    },
    /// The cheaper of [`Strict`](Self::Strict) and [`Bounce`](Self::Bounce), as measured for each size while it runs: one mapping in 61 is timed, and
    /// at most one in 64 of these goes the other way; one in 4 while the other way's cost is unknown. An [untrusted](crate::dma::Device::trusted)
    /// device gets only whole granules, and copies of all else.
    Auto {
        /// The most bytes of a mapping that may be copied as a whole, as for [`Bounce`](Self::Bounce).
        threshold: u64,
    },
}

impl OpsConfig {
    /// The policy for mappings that are not copied.
    pub(super) const fn policy(self) -> Policy {
        match self {
            Self::Lazy { window_ns } => Policy::Lazy { window_ns },
            Self::Strict | Self::Bounce { .. } | Self::Auto { .. } => Policy::Strict,
        }
    }

    pub(super) const fn threshold(self) -> Option<u64> {
        match self {
            Self::Bounce { threshold } | Self::Auto { threshold } => Some(threshold),
            Self::Strict | Self::Lazy { .. } => None,
        }
    }
}

/// A configuration that every map reads and that changes rarely, in one word: the threshold plus 1 (0 if nothing is copied), shifted up by
/// one bit, and the bit [`AUTO`]. Its [policy](OpsConfig::policy) is beside it, in the handle.
#[derive(Debug)]
pub(super) struct AtomicConfig(AtomicU64);

/// Set for a handle that measures.
const AUTO: u64 = 1;

impl AtomicConfig {
    pub(super) fn new(config: OpsConfig) -> Self {
        Self(AtomicU64::new(encode(config)))
    }

    /// Relaxed: each mapping ends by its own kind, and one made during a change is of one kind or the other.
    pub(super) fn set(&self, config: OpsConfig) {
        self.0.store(encode(config), Ordering::Relaxed);
    }

    /// The configuration whose ends have `policy`.
    pub(super) fn get(&self, policy: Option<Policy>) -> OpsConfig {
        match (self.threshold(), policy) {
            (Some(threshold), _) if self.is_auto() => OpsConfig::Auto { threshold },
            (Some(threshold), _) => OpsConfig::Bounce { threshold },
            (None, Some(Policy::Lazy { window_ns })) => OpsConfig::Lazy { window_ns },
            (None, _) => OpsConfig::Strict,
        }
    }

    #[inline]
    pub(super) fn is_auto(&self) -> bool {
        self.0.load(Ordering::Relaxed) & AUTO != 0
    }

    #[inline]
    pub(super) fn threshold(&self) -> Option<u64> {
        (self.0.load(Ordering::Relaxed) >> 1).checked_sub(1)
    }
}

fn encode(config: OpsConfig) -> u64 {
    let copied = match config.threshold() {
        None => 0,
        // The library has no buffer so large.
        Some(threshold) if threshold >= u64::MAX >> 1 => u64::MAX >> 1,
        Some(threshold) => threshold + 1,
    };
    copied << 1 | if matches!(config, OpsConfig::Auto { .. }) { AUTO } else { 0 }
}

/// Attributes of a map or an unmap, Linux's `attrs`. [`default`](Self::default) is for a buffer in memory, which the driver reads after its unmap. An
/// unmap uses [`skip_copy`](Self::skip_copy) only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DmaAttributes {
    /// Another device's registers, not memory (Linux's `DMA_ATTR_MMIO`, `dma_map_resource`): never copied.
    pub mmio: bool,
    /// Mapped for long, as memory that driver and device share: never copied, and its unmap is strict under every policy, as its memory goes back to
    /// an allocator. The caller has nothing else in its granules.
    pub lasting: bool,
    /// The device bypasses the CPUs' caches, if the page table's format has bits for that.
    pub uncached: bool,
    /// Only the device's privileged accesses pass, if the format has a bit for that (Linux's `DMA_ATTR_PRIVILEGED`): never copied.
    pub privileged: bool,
    /// The call does not copy (Linux's `DMA_ATTR_SKIP_CPU_SYNC`). After such a map the driver syncs before the device reads, or there is no data yet: a
    /// device that reads before that finds zeros, or bytes of its group. A mapping that the device only writes is copied nevertheless, as the device
    /// may write only a part, and the driver relies on the rest. Such an unmap drops what the device has written since the last sync.
    pub skip_copy: bool,
}

impl DmaAttributes {
    /// Whether the device gets the memory itself under every configuration.
    pub(super) const fn is_never_copied(self) -> bool {
        self.mmio || self.lasting || self.privileged
    }

    /// What the translations allow if the mapping is not copied.
    #[inline]
    pub(super) fn of(self, direction: Direction) -> Attributes {
        let memory = match self {
            Self { mmio: true, .. } => Memory::Device,
            Self { uncached: true, .. } => Memory::Uncached,
            _ => Memory::WriteBack,
        };
        Attributes { memory, privileged: self.privileged, ..direction.permissions().into() }
    }
}

/// A handle's counters, of slightly different times while other CPUs use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OpsUsage {
    /// Mappings made; a list is one.
    pub maps: u64,
    /// Of these, copied mappings, in whole or in part.
    pub copies: u64,
    /// Bytes of the copied mappings.
    pub copied_bytes: u64,
    /// Mappings ended.
    pub unmaps: u64,
    /// Successful calls of the sync methods.
    pub syncs: u64,
    /// Maps, unmaps and syncs that returned an error.
    pub errors: u64,
    /// Bytes of drivers' memory that the device reaches now.
    pub open_bytes: u64,
    /// Other bytes in the same granules, which the device reaches, too.
    pub exposed_bytes: u64,
    /// Bytes of the handle and its book.
    pub book_bytes: usize,
    /// The counters of the domain's pool, for all of its devices; `None` without a pool.
    pub pool: Option<PoolUsage>,
}

impl OpsUsage {
    /// Mappings that have not ended.
    pub const fn open_mappings(&self) -> u64 {
        self.maps.saturating_sub(self.unmaps)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/ops/config.rs"]
mod tests;
