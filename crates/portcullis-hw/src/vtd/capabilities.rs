//! Capabilities of a unit, and its mode.

use portcullis::addr::{DomainId, Iova, PageSize};
use portcullis::pgtable::{VtdSecondStage, X86FirstStage};

use super::layout::{cap, ecap};
use crate::host::UnitError;

/// How a unit's structures lead from devices to page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Context entries point to second-stage tables. All units with a second stage support it.
    Legacy,
    /// Context entries point to PASID tables, and these to tables of either stage. An attached device takes two more frames.
    Scalable,
}

/// Capabilities, from two registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    pub(super) cap: u64,
    pub(super) ecap: u64,
}

impl Capabilities {
    /// The Capability Register.
    pub const fn cap(&self) -> u64 {
        self.cap
    }

    /// The Extended Capability Register.
    pub const fn ecap(&self) -> u64 {
        self.ecap
    }

    /// Whether devices can pass through.
    pub const fn has_pass_through(&self) -> bool {
        self.has(ecap::PT)
    }

    /// Caching mode: non-present entries may be cached, so each map must be followed by an invalidation.
    pub const fn caches_absent(&self) -> bool {
        self.cap & cap::CM != 0
    }

    /// Whether the unit supports device TLBs. (This driver leaves them off: the unit refuses translated requests of attached devices.)
    pub const fn has_device_tlbs(&self) -> bool {
        self.has(ecap::DT)
    }

    /// Whether the unit has scalable mode, with at least one stage.
    pub const fn has_scalable_mode(&self) -> bool {
        self.has(ecap::SMTS) && (self.has(ecap::SSTS) || self.has_first_stage())
    }

    /// Whether it has the first stage, which it walks only in scalable mode.
    pub const fn has_first_stage(&self) -> bool {
        self.has(ecap::SMTS) && self.has(ecap::FSTS)
    }

    const fn has(&self, bit: u64) -> bool {
        self.ecap & bit != 0
    }

    /// Whether descriptors are of 256 bits. In scalable mode they must be; in legacy mode such a unit takes either width.
    pub(super) const fn has_wide_descriptors(&self) -> bool {
        self.has(ecap::SMTS)
    }

    pub(super) fn last_iova(&self) -> Iova {
        Iova::new(u64::MAX >> (64 - cap::mgaw(self.cap).min(64)))
    }

    /// Number 0 is reserved, because caching mode uses it for non-present entries; and the highest, for pass-through.
    pub(super) fn domains(&self) -> (DomainId, DomainId) {
        let last = (1_u32 << cap::domain_bits(self.cap).min(16)) - 2;
        (DomainId(1), DomainId(last as u16))
    }

    /// AW of the widest second-stage addresses; 0 without a second stage.
    pub(super) fn widest(&self) -> u32 {
        31_u32.saturating_sub(cap::sagaw(self.cap).leading_zeros())
    }

    /// Whether it walks second-stage tables with this AW.
    pub(super) fn walks(&self, aw: u32) -> bool {
        cap::sagaw(self.cap) >> aw & 1 != 0
    }

    /// Four levels if it walks them, else three, else five; large pages and snooping if it has them.
    pub(super) fn second_stage(&self, mode: Mode) -> Result<VtdSecondStage, UnitError> {
        if mode == Mode::Scalable && !self.has(ecap::SSTS) {
            return Err(self.lacks("page tables of the second stage in scalable mode"));
        }
        let layouts =
            [VtdSecondStage::four_level(), VtdSecondStage::three_level(), VtdSecondStage::five_level()];
        let walked = layouts.into_iter().find(|layout| self.walks(layout.aw()));
        let lacks =
            UnitError::Lacks { what: "page tables of 3 to 5 levels", register: "CAP", value: self.cap };
        let largest = match (self.cap & cap::PAGES_2M != 0, self.cap & cap::PAGES_1G != 0) {
            (true, true) => PageSize::SIZE_1G,
            (true, false) => PageSize::SIZE_2M,
            // No hardware has 1 GiB without 2 MiB.
            (false, _) => PageSize::SIZE_4K,
        };
        walked.map(|layout| layout.up_to(largest).with_snoop_control(self.has(ecap::SC))).ok_or(lacks)
    }

    /// Four levels, which every unit with a first stage walks; 1 GiB pages if it has them.
    pub(super) fn first_stage(&self, mode: Mode) -> Result<X86FirstStage, UnitError> {
        if mode != Mode::Scalable {
            return Err(self.lacks("page tables of the first stage in legacy mode"));
        }
        if !self.has_first_stage() {
            return Err(self.lacks("page tables of the first stage"));
        }
        let largest = if self.cap & cap::FS1GP != 0 { PageSize::SIZE_1G } else { PageSize::SIZE_2M };
        Ok(X86FirstStage::four_level().up_to(largest))
    }

    pub(super) fn walks_first_stage(&self, format: &X86FirstStage) -> bool {
        format.fspm() == 0 || self.cap & cap::FS5LP != 0
    }

    /// Whether the driver supports it in `mode`. `coherent`: frames are coherent, or are cleaned.
    ///
    /// # Errors
    /// [`UnitError::Lacks`].
    pub(super) fn can(&self, mode: Mode, coherent: bool) -> Result<(), UnitError> {
        if coherent && !self.has(ecap::C) {
            let what = "a coherent walker, and Frames::COHERENT says that stores need no cleaning";
            return Err(self.lacks(what));
        }
        match mode {
            Mode::Legacy => self.second_stage(mode).map(|_| ()),
            Mode::Scalable if !self.has_scalable_mode() => Err(self.lacks("scalable mode")),
            Mode::Scalable if coherent && !self.has(ecap::SMPWC) => {
                Err(self.lacks("a walker that is coherent in scalable mode, which Frames::COHERENT needs"))
            }
            Mode::Scalable => match self.second_stage(mode) {
                Err(error) if !self.has_first_stage() => Err(error),
                _ => Ok(()),
            },
        }
    }

    /// The driver's default mode: `on`, in which the unit translates now, so that it never stops; else scalable mode with the second stage,
    /// else legacy mode, else scalable mode without the second stage.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: none is possible.
    pub(super) fn preferred(&self, on: Option<Mode>, coherent: bool) -> Result<Mode, UnitError> {
        let can = |mode: &Mode| self.can(*mode, coherent).is_ok();
        let with_second = Some(Mode::Scalable).filter(|mode| self.second_stage(*mode).is_ok());
        let order = [on, with_second, Some(Mode::Legacy), Some(Mode::Scalable)];
        let found = order.into_iter().flatten().find(can);
        found.map_or_else(|| self.can(Mode::Legacy, coherent).map(|()| Mode::Legacy), Ok)
    }

    fn lacks(&self, what: &'static str) -> UnitError {
        UnitError::Lacks { what, register: "ECAP", value: self.ecap }
    }
}
