//! Configuration of a pool, profile of a device, attributes of a mapping, and a pool's counters. A configuration is checked when a pool is
//! made of it, so that each slot is found by its address.

use super::layout::MOST_CLASSES;
use crate::addr::{Iova, PageSize};
use crate::setup::SetupError;

/// The dimensions of a bounce pool, and its treatment of buffers.
#[derive(Debug, Clone, Copy)]
pub struct PoolConfig {
    /// The pool copies mappings of up to this number of bytes, and maps larger ones directly. Rounded up to a power of two, at least the domain's
    /// granule; at most 512 granules.
    pub threshold: u64,
    /// Bytes of I/O virtual addresses for each size class: a power of two, at least the rounded threshold. A class has as many slots as fit.
    pub class_bytes: u64,
    /// The highest address of a slot. A device that does not reach all slots gets single-use buffers, each of which is mapped and unmapped.
    pub limit: Iova,
    /// For an untrusted device's mapping above the threshold that does not cover whole granules: bounce only its unaligned head and tail, and map
    /// the middle. Otherwise all of it is bounced.
    pub split: bool,
    /// Zero each buffer when its mapping ends.
    pub wipe: bool,
    /// Nanoseconds between two runs of the platform's timer: at least a millisecond; `u64::MAX` for never. It evicts buffers in depots that no map
    /// has needed since it ran last, so within twice the time; and buffers in per-CPU magazines if no mapping at all went through a slot in between.
    pub idle_ns: u64,
    /// Bytes of idle buffers that the timer leaves.
    pub keep_bytes: u64,
}

impl Default for PoolConfig {
    /// Mappings of up to 128 KiB, 32 MiB of addresses for each class (8,192 slots of 4 KiB, 256 of 128 KiB) anywhere, large mappings split, and a
    /// timer each second.
    fn default() -> Self {
        Self {
            threshold: 128 << 10,
            class_bytes: 32 << 20,
            limit: Iova::new(u64::MAX),
            split: true,
            wipe: false,
            idle_ns: 1_000_000_000,
            keep_bytes: 0,
        }
    }
}

/// The binary logarithm of the most slots of a class.
const MOST_SLOTS_SHIFT: u32 = 28;

impl PoolConfig {
    /// The same, with all slots within `last` ([`DmaMask::last`](crate::dma::DmaMask::last)), for devices that reach no further. Each class gets at
    /// most a sixteenth of these addresses. Returned unchanged if a class would hold no slot of the threshold's size.
    ///
    /// ```
    /// # use portcullis::bounce::PoolConfig;
    /// # use portcullis::dma::DmaMask;
    /// let pool = PoolConfig::default().reached_by(DmaMask::bits(28).last());
    /// assert_eq!((pool.limit.get(), pool.class_bytes), (0xfff_ffff, 16 << 20));
    /// ```
    #[must_use]
    pub fn reached_by(self, last: u64) -> Self {
        let class_bytes = self.class_bytes.min(1 << (last / 16 + 1).ilog2());
        let limit = Iova::new(self.limit.get().min(last));
        if class_bytes < self.threshold { self } else { Self { class_bytes, limit, ..self } }
    }

    /// The number of size classes, and the binary logarithm of each one's bytes of addresses.
    pub(super) fn classes(&self, granule: PageSize) -> Result<(usize, u32), SetupError> {
        let largest = self.threshold.max(granule.bytes()).checked_next_power_of_two().unwrap_or(u64::MAX);
        let most = granule.bytes() << (MOST_CLASSES - 1);
        if largest > most {
            return Err(SetupError::Threshold { threshold: self.threshold, most });
        }
        let classes = (largest / granule.bytes()).trailing_zeros() + 1;
        let bytes = self.class_bytes;
        // The largest slot's number times its size must fit into 64 bits: a bit more for each class.
        let most = granule.bytes().saturating_mul(1 << MOST_SLOTS_SHIFT).min(1 << (u64::BITS - classes));
        if !bytes.is_power_of_two() || bytes < largest || bytes > most {
            return Err(SetupError::ClassBytes { bytes, least: largest, most });
        }
        Ok((classes as usize, bytes.trailing_zeros()))
    }
}

/// A device, as the pool must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceProfile {
    /// The highest address that the device can put on the bus.
    pub mask: u64,
    /// Low bits of the original's address that the bounce buffer's address must share, as a mask (0xfff for an NVMe controller whose driver counts
    /// on page offsets). 0 for none.
    pub offset_mask: u64,
    /// The device may be hostile: it never reaches data that shares a granule with a buffer.
    pub untrusted: bool,
    /// Devices of one group may find each other's bytes in a buffer; devices of different groups never do.
    pub group: u32,
}

impl Default for DeviceProfile {
    fn default() -> Self {
        Self { mask: u64::MAX, offset_mask: 0, untrusted: false, group: 0 }
    }
}

/// Attributes of one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attributes {
    /// The device may write less than all of a [`FromDevice`](crate::addr::Direction::FromDevice) mapping, and the rest must stay as it was: the
    /// original is copied in first.
    pub copy_in: bool,
}

/// A pool's counters. They are of slightly different times while other CPUs use the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUsage {
    /// Bytes of I/O virtual addresses of the slots.
    pub iova_bytes: u64,
    /// Bytes of memory in slots' buffers, in use or not.
    pub buffer_bytes: u64,
    /// The most `buffer_bytes` that each class ever had, added up.
    pub peak_buffer_bytes: u64,
    /// Bytes of `buffer_bytes` that are idle: a trim can evict them.
    pub cached_bytes: u64,
    /// Bytes of `buffer_bytes` whose unmap is not confirmed.
    pub unconfirmed_bytes: u64,
    /// Mappings with addresses of their own: single-use buffers, split mappings and lists with gaps, including unconfirmed ones.
    pub singles: u64,
    /// Leaked slots: another caller has changed the translations at their addresses.
    pub lost_slots: u64,
    /// Mappings made through slots so far.
    pub bounced: u64,
    /// Of `bounced`, mappings whose buffer came from the CPU's magazine.
    pub reused: u64,
    /// Bytes of the pool's metadata, which remain when everything is unmapped and trimmed.
    pub bookkeeping_bytes: usize,
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/bounce/pool/config.rs"]
mod tests;
