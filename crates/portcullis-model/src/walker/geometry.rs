//! Where the levels' indices are in an address: what all formats have in common.

use portcullis::addr::{Iova, PhysAddr};

/// The dimensions of tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The binary logarithm of the smallest page.
    pub(crate) granule: u32,
    /// Bits of the index into a table below the root. The root's index takes all bits that are left.
    pub(crate) stride: u32,
    /// Levels of tables.
    pub(crate) levels: u32,
    /// Bits of an address that are translated, the page's offset included.
    pub(crate) input_bits: u32,
    /// The binary logarithm of what the root's address is a multiple of.
    pub(crate) root_align: u32,
}

impl Geometry {
    /// The binary logarithm of what one entry at `level` covers.
    #[inline]
    pub(crate) const fn shift(&self, level: u32) -> u32 {
        self.granule + self.stride * level.saturating_sub(1)
    }

    /// Bits of the index into a table at `level`.
    #[inline]
    pub(crate) const fn index_bits(&self, level: u32) -> u32 {
        if level < self.levels { self.stride } else { self.input_bits.saturating_sub(self.shift(level)) }
    }

    /// The index of the entry for `iova` in a table at `level`.
    #[inline]
    pub(crate) fn index(&self, iova: Iova, level: u32) -> u64 {
        let index = iova.get().checked_shr(self.shift(level)).unwrap_or(0);
        index & low_bits(self.index_bits(level))
    }

    /// Whether `iova` has no bit that is not translated.
    #[inline]
    pub(crate) fn fits(&self, iova: Iova) -> bool {
        iova.get().checked_shr(self.input_bits).unwrap_or(0) == 0
    }

    /// Whether a root may be at `root`.
    #[inline]
    pub(crate) fn is_root(&self, root: PhysAddr) -> bool {
        root.get() & low_bits(self.root_align) == 0
    }
}

fn low_bits(count: u32) -> u64 {
    1_u64.checked_shl(count).map_or(u64::MAX, |bit| bit - 1)
}
