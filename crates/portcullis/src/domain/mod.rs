//! A [`Domain`]: one I/O address space, with its addresses, its translations and its protection policy.

mod error;
mod space;

pub use error::{DomainError, MapListError, UnmapError};
pub use space::{Domain, DomainStats};
pub(crate) use space::{LinkFailed, last_byte};

use crate::addr::PhysAddr;

/// How long a device may reach memory after it was unmapped, and at what price.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// The device uses physical addresses and reaches everything, always. Costs nothing.
    Passthrough,
    /// The device may reach what was unmapped until the next flush: at the latest `window_ns` (and the time
    /// the flush takes) after the unmap, earlier when a CPU has 256 unmaps waiting. The *page* is the unit of
    /// protection. Costs a share of a flush.
    Lazy {
        /// The longest time in nanoseconds from an unmap to the start of the flush that covers it.
        window_ns: u64,
    },
    /// When an unmap returns, the device reaches nothing of the pages that were unmapped. Costs one
    /// invalidation, with its wait, for each unmap.
    Strict,
}

impl Policy {
    /// Lazy protection with the window that Linux has used since 2016, 10 ms.
    pub const LAZY: Self = Self::Lazy { window_ns: 10_000_000 };

    /// The policy's name, as the command line writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Passthrough => "passthrough",
            Self::Lazy { .. } => "lazy",
            Self::Strict => "strict",
        }
    }
}

/// A piece of a buffer that lies in one piece in physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysSegment {
    /// Where it begins.
    pub phys: PhysAddr,
    /// Its length in bytes.
    pub len: u64,
}
