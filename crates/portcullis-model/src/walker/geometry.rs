//! The levels' indices in an address: the common part of all formats.

use portcullis::addr::{Iova, PhysAddr};

/// The dimensions of tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The binary logarithm of the smallest page.
    pub(crate) granule: u32,
    /// Bits of the index into a table below the root. The root's index has the remaining bits.
    pub(crate) stride: u32,
    /// Levels of tables.
    pub(crate) levels: u32,
    /// Bits of an address that are translated, including the page's offset.
    pub(crate) input_bits: u32,
    /// The binary logarithm of the root's alignment.
    pub(crate) root_align: u32,
}

impl Geometry {
    /// The binary logarithm of the range of one entry at `level`.
    #[inline]
    pub(crate) const fn shift(&self, level: u32) -> u32 {
        self.granule + self.stride * level.saturating_sub(1)
    }

    #[inline]
    pub(crate) const fn index_bits(&self, level: u32) -> u32 {
        if level < self.levels { self.stride } else { self.input_bits.saturating_sub(self.shift(level)) }
    }

    #[inline]
    pub(crate) fn index(&self, iova: Iova, level: u32) -> u64 {
        let index = iova.get().checked_shr(self.shift(level)).unwrap_or(0);
        index & low_bits(self.index_bits(level))
    }

    /// Whether all set bits of `iova` are translated.
    #[inline]
    pub(crate) fn fits(&self, iova: Iova) -> bool {
        iova.get().checked_shr(self.input_bits).unwrap_or(0) == 0
    }

    #[inline]
    pub(crate) fn is_root(&self, root: PhysAddr) -> bool {
        root.get() & low_bits(self.root_align) == 0
    }
}

fn low_bits(count: u32) -> u64 {
    1_u64.checked_shl(count).map_or(u64::MAX, |bit| bit - 1)
}
