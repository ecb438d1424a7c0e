//! The page-table formats that a trace can be replayed with, by name.

use portcullis::SetupError;
use portcullis::pgtable::{AmdV1, Arm, Format, Riscv, VtdSecondStage, X86FirstStage};
use portcullis_model::{ArmStage, ArmTables, Granule, RiscvMode, TableFormat};

/// Bits of physical addresses: what the model's memory and every format have.
const PHYS_BITS: u32 = 48;

/// A format as the library writes it and as the model reads it: two descriptions, of different origin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Both<X: Format> {
    pub written: X,
    pub read: TableFormat,
}

/// Something that is done with a format, whichever it is.
pub(super) trait WithFormat {
    type Output;

    fn with<X: Format>(self, format: Both<X>) -> Self::Output;
}

/// The names of all formats, the default first.
pub const FORMATS: [&str; 15] = [
    "vtd-ss",
    "x86-4",
    "x86-5",
    "amd-v1",
    "arm-s1-4k",
    "arm-s1-16k",
    "arm-s1-64k",
    "arm-s2-4k",
    "arm-s2-16k",
    "arm-s2-64k",
    "riscv-sv39",
    "riscv-sv48",
    "riscv-sv57",
    "riscv-sv39x4",
    "riscv-sv48x4",
];

/// Does `what` with the format called `name`; `None` where there is none.
pub(super) fn with_format<W: WithFormat>(name: &str, what: W) -> Option<Result<W::Output, SetupError>> {
    Some(match name {
        "vtd-ss" => {
            both(what, VtdSecondStage::new(4, 3, PHYS_BITS), TableFormat::VtdSecondStage { levels: 4 })
        }
        "x86-4" => both(what, X86FirstStage::new(4, 3, PHYS_BITS), TableFormat::X86FirstStage { levels: 4 }),
        "x86-5" => both(what, X86FirstStage::new(5, 3, PHYS_BITS), TableFormat::X86FirstStage { levels: 5 }),
        "amd-v1" => both(what, AmdV1::new(4, 3, PHYS_BITS), TableFormat::AmdV1 { levels: 4 }),
        "arm-s1-4k" => arm(what, Arm::<12>::stage_1, Granule::Size4K),
        "arm-s1-16k" => arm(what, Arm::<14>::stage_1, Granule::Size16K),
        "arm-s1-64k" => arm(what, Arm::<16>::stage_1, Granule::Size64K),
        "arm-s2-4k" => arm(what, Arm::<12>::stage_2, Granule::Size4K),
        "arm-s2-16k" => arm(what, Arm::<14>::stage_2, Granule::Size16K),
        "arm-s2-64k" => arm(what, Arm::<16>::stage_2, Granule::Size64K),
        "riscv-sv39" => riscv(what, Riscv::sv39(), RiscvMode::Sv39),
        "riscv-sv48" => riscv(what, Riscv::sv48(), RiscvMode::Sv48),
        "riscv-sv57" => riscv(what, Riscv::sv57(), RiscvMode::Sv57),
        "riscv-sv39x4" => riscv(what, Riscv::sv39x4(), RiscvMode::Sv39x4),
        "riscv-sv48x4" => riscv(what, Riscv::sv48x4(), RiscvMode::Sv48x4),
        _ => return None,
    })
}

fn both<W: WithFormat, X: Format>(
    what: W,
    written: Result<X, SetupError>,
    read: TableFormat,
) -> Result<W::Output, SetupError> {
    Ok(what.with(Both { written: written?, read }))
}

fn arm<const GRANULE: u32, W: WithFormat>(
    what: W,
    new: fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>,
    granule: Granule,
) -> Result<W::Output, SetupError> {
    let written = new(PHYS_BITS, PHYS_BITS)?;
    let tables = ArmTables {
        stage: if written.is_stage_2() { ArmStage::Two } else { ArmStage::One },
        granule,
        input_bits: PHYS_BITS,
        levels: written.levels(),
        output_bits: PHYS_BITS,
    };
    both(what, Ok(written), TableFormat::Arm(tables))
}

fn riscv<W: WithFormat>(what: W, mode: Riscv, model: RiscvMode) -> Result<W::Output, SetupError> {
    both(what, mode.within(3, PHYS_BITS), TableFormat::RiscV(model))
}
