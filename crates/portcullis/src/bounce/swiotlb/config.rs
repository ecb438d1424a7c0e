//! Configuration of a pool, and a device's constraints on its addresses. Each is checked when it is made.

use crate::addr::PhysAddr;
use crate::platform::FRAME_SIZE;
use crate::setup::SetupError;

use super::bits::WORD_SLOTS;
use super::directory::AREAS;
use super::slot_meta::LEN_BITS;

const MOST_AREA_BYTES: u64 = 1 << LEN_BITS;

/// The configuration of a [pool](super::Swiotlb). All sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwiotlbConfig {
    /// The unit of allocation, a power of two.
    pub slot_bytes: u64,
    /// Memory comes from [`Frames`](crate::platform::Frames), and goes back, in areas of this size: a power of two of at least 64 slots and at most
    /// 256 MiB. No mapping is longer.
    pub area_bytes: u64,
    /// The initial and least size. Rounded up to whole areas.
    pub min_bytes: u64,
    /// The largest size. Rounded down to whole areas; 65,536 areas at the most.
    pub max_bytes: u64,
    /// The highest address of the pool's memory: the highest that its devices reach. The pool allocates
    /// [within it](crate::platform::Frames::alloc_within), and within the reach of the device that needs the memory.
    pub reach: PhysAddr,
    /// Nanoseconds for which the pool keeps areas that it does not need.
    pub idle_ns: u64,
}

impl Default for SwiotlbConfig {
    /// Slots of 2 KiB in areas of 2 MiB, from 2 MiB to 64 MiB, anywhere; areas are freed after an idle second.
    fn default() -> Self {
        Self {
            slot_bytes: 2 << 10,
            area_bytes: 2 << 20,
            min_bytes: 2 << 20,
            max_bytes: 64 << 20,
            reach: PhysAddr::new(u64::MAX),
            idle_ns: 1_000_000_000,
        }
    }
}

impl SwiotlbConfig {
    pub(super) fn areas(&self) -> Result<(u64, u64), SetupError> {
        let Self { slot_bytes, area_bytes, min_bytes, max_bytes, .. } = *self;
        if !slot_bytes.is_power_of_two() || !(64..=MOST_AREA_BYTES).contains(&slot_bytes) {
            return Err(SetupError::Slot { slot_bytes });
        }
        let least = (slot_bytes * WORD_SLOTS as u64).max(FRAME_SIZE);
        if !area_bytes.is_power_of_two() || !(least..=MOST_AREA_BYTES).contains(&area_bytes) {
            return Err(SetupError::Area { area_bytes, least, most: MOST_AREA_BYTES });
        }
        let (min, max) = (min_bytes.div_ceil(area_bytes).max(1), max_bytes / area_bytes);
        if max > AREAS || min > max {
            return Err(SetupError::Limits { min_bytes, max_bytes, area_bytes });
        }
        Ok((min, max))
    }
}

/// A device's constraints on the addresses of its mappings, checked when they are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Constraints {
    pub(super) reach: u64,
    /// The low bits that are kept, as a mask.
    pub(super) min_align: u64,
}

impl Default for Constraints {
    fn default() -> Self {
        Self::new()
    }
}

impl Constraints {
    /// Constraints that allow every address.
    pub const fn new() -> Self {
        Self { reach: u64::MAX, min_align: 0 }
    }

    /// Sets the highest address that the device can put on the bus.
    pub const fn with_reach(self, last: PhysAddr) -> Self {
        Self { reach: last.get(), ..self }
    }

    /// Keeps these low bits of the buffer's address, on which the device relies (NVMe: 4095).
    ///
    /// # Errors
    /// [`SetupError::OffsetMask`].
    pub const fn with_min_align_mask(self, mask: u64) -> Result<Self, SetupError> {
        match mask & mask.wrapping_add(1) == 0 && mask != u64::MAX {
            true => Ok(Self { min_align: mask, ..self }),
            false => Err(SetupError::OffsetMask { mask }),
        }
    }
}

/// A mapping, as the device uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounced {
    /// Its address in the pool.
    pub phys: PhysAddr,
    /// Its length in bytes, that of the buffer.
    pub len: u64,
}
