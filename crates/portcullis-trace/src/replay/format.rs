//! The page-table formats that a trace can be replayed with, by name.

use portcullis::SetupError;
use portcullis::pgtable::{AmdV1, Arm, ArmStage, Format, Riscv, RiscvMode, VtdSecondStage, X86FirstStage};
use portcullis_model::{ArmStage as ModelStage, ArmTables, Granule, RiscvMode as ModelMode, TableFormat};

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
        "arm-s1-4k" => arm::<12, W>(what, ArmStage::One, Granule::Size4K),
        "arm-s1-16k" => arm::<14, W>(what, ArmStage::One, Granule::Size16K),
        "arm-s1-64k" => arm::<16, W>(what, ArmStage::One, Granule::Size64K),
        "arm-s2-4k" => arm::<12, W>(what, ArmStage::Two, Granule::Size4K),
        "arm-s2-16k" => arm::<14, W>(what, ArmStage::Two, Granule::Size16K),
        "arm-s2-64k" => arm::<16, W>(what, ArmStage::Two, Granule::Size64K),
        "riscv-sv39" => riscv(what, RiscvMode::Sv39, ModelMode::Sv39),
        "riscv-sv48" => riscv(what, RiscvMode::Sv48, ModelMode::Sv48),
        "riscv-sv57" => riscv(what, RiscvMode::Sv57, ModelMode::Sv57),
        "riscv-sv39x4" => riscv(what, RiscvMode::Sv39x4, ModelMode::Sv39x4),
        "riscv-sv48x4" => riscv(what, RiscvMode::Sv48x4, ModelMode::Sv48x4),
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
    stage: ArmStage,
    granule: Granule,
) -> Result<W::Output, SetupError> {
    let written = Arm::<GRANULE>::new(stage, PHYS_BITS, PHYS_BITS)?;
    let model = match stage {
        ArmStage::One => ModelStage::One,
        ArmStage::Two => ModelStage::Two,
    };
    let tables = ArmTables {
        stage: model,
        granule,
        input_bits: PHYS_BITS,
        levels: written.levels(),
        output_bits: PHYS_BITS,
    };
    both(what, Ok(written), TableFormat::Arm(tables))
}

fn riscv<W: WithFormat>(what: W, mode: RiscvMode, model: ModelMode) -> Result<W::Output, SetupError> {
    both(what, Riscv::new(mode, 3, PHYS_BITS), TableFormat::RiscV(model))
}
