//! What a unit can do.

use portcullis::invalidation::Granularity;
use portcullis::pgtable::{Format, Riscv};

use super::layout::cap;
use crate::host::UnitError;

/// The stage of translation that a unit's domains use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The first: Sv39, Sv48 and Sv57.
    First,
    /// The second: Sv39x4 and Sv48x4.
    Second,
}

impl Stage {
    /// The stage of `layout`.
    pub const fn of(layout: Riscv) -> Self {
        if layout.is_second_stage() { Self::Second } else { Self::First }
    }
}

/// The layouts, each with its capability bit.
static LAYOUTS: [(u64, Riscv); 5] = [
    (cap::SV39, Riscv::sv39()),
    (cap::SV48, Riscv::sv48()),
    (cap::SV57, Riscv::sv57()),
    (cap::SV39X4, Riscv::sv39x4()),
    (cap::SV48X4, Riscv::sv48x4()),
];

/// Capabilities, from the unit's register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities(pub(super) u64);

impl Capabilities {
    /// The register.
    pub const fn value(&self) -> u64 {
        self.0
    }

    /// Whether the unit walks tables of this layout.
    pub fn walks(&self, layout: Riscv) -> bool {
        self.layouts(Stage::of(layout)).any(|walked| walked.mode() == layout.mode())
    }

    /// Whether device contexts have the extended format.
    pub const fn is_extended(&self) -> bool {
        self.0 & cap::MSI_FLAT != 0
    }

    /// Whether the unit supports ATS.
    pub const fn has_device_tlbs(&self) -> bool {
        self.0 & cap::ATS != 0
    }

    /// The addresses that one command for leaves covers.
    pub(super) const fn granularity(&self) -> Granularity {
        if self.0 & cap::S != 0 { Granularity::ANY_BLOCK } else { Granularity::Page }
    }

    /// The unit's layouts of `stage`, the widest last.
    pub(super) fn layouts(self, stage: Stage) -> impl DoubleEndedIterator<Item = Riscv> {
        let walked = LAYOUTS.iter().filter(move |(bit, _)| self.0 & bit != 0);
        walked.map(|(_, layout)| *layout).filter(move |layout| Stage::of(*layout) == stage)
    }

    /// Four levels if the unit walks them, else three, else five; pages of all sizes.
    pub(super) fn layout(self, stage: Stage) -> Result<Riscv, UnitError> {
        let walked = || self.layouts(stage);
        let layout = walked().find(|layout| layout.levels() == 4).or_else(|| walked().next());
        let lacks = |what| UnitError::Lacks { what, register: "capabilities", value: self.0 };
        let layout = layout.ok_or(lacks("page tables of 64-bit entries for this stage"))?;
        let bits = cap::physical_bits(self.0).min(56);
        layout.within(layout.levels(), bits).map_err(|_| lacks("physical addresses"))
    }
}
