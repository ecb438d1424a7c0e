//! The formats by name.

use portcullis::addr::{Iova, PhysAddr};

use super::{ArmTables, Geometry, Layout, RiscvMode};

/// The layout of a device's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableFormat {
    /// Intel VT-d, second stage: 39, 48 or 57 bits of address.
    VtdSecondStage {
        /// Levels of tables, 3 to 5.
        levels: u32,
    },
    /// x86-64 paging as IOMMUs use it for first-stage (Intel) or guest (AMD) translation: the canonical lower
    /// half, 47 or 56 bits of address.
    X86FirstStage {
        /// Levels of tables, 4 or 5.
        levels: u32,
    },
    /// AMD-Vi host page tables (version 1).
    AmdV1 {
        /// Levels of tables (the device table's Mode), 1 to 6.
        levels: u32,
    },
    /// Arm VMSAv8-64, stage 1 or 2.
    Arm(ArmTables),
    /// RISC-V Sv39 and its relatives, first stage or G-stage.
    RiscV(RiscvMode),
}

/// Evaluates an expression with the [`Layout`] of a [`TableFormat`]: compiled for each of them.
macro_rules! with_layout {
    ($format:expr, $layout:ident => $body:expr) => {
        match $format {
            $crate::walker::TableFormat::VtdSecondStage { levels } => {
                let $layout = $crate::walker::vtd::SecondStage { levels };
                $body
            }
            $crate::walker::TableFormat::X86FirstStage { levels } => {
                let $layout = $crate::walker::x86::FirstStage { levels };
                $body
            }
            $crate::walker::TableFormat::AmdV1 { levels } => {
                let $layout = $crate::walker::amd::V1 { levels };
                $body
            }
            $crate::walker::TableFormat::Arm($layout) => $body,
            $crate::walker::TableFormat::RiscV($layout) => $body,
        }
    };
}
pub(super) use with_layout;

impl TableFormat {
    /// Whether hardware supports these dimensions.
    #[inline]
    pub fn is_valid(self) -> bool {
        with_layout!(self, layout => layout.is_valid())
    }

    /// Whether invalidating a part of a page removes all of it: see [`iotlb`](crate::iotlb).
    pub fn forgets_by_part(self) -> bool {
        match self {
            Self::VtdSecondStage { .. } | Self::X86FirstStage { .. } | Self::AmdV1 { .. } => false,
            Self::Arm(_) | Self::RiscV(_) => true,
        }
    }

    /// Levels of tables.
    pub fn levels(self) -> u32 {
        self.geometry().levels
    }

    /// Whether the tables translate all bits of an address.
    pub fn in_width(self, iova: Iova) -> bool {
        self.geometry().fits(iova)
    }

    /// Whether the root may be at `root`: it is aligned to its size.
    pub fn is_root(self, root: PhysAddr) -> bool {
        self.geometry().is_root(root)
    }

    #[inline]
    pub(crate) fn geometry(self) -> Geometry {
        with_layout!(self, layout => layout.geometry())
    }
}
