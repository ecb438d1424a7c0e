//! Page-table formats for replays, by name.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{DomainId, IovaRange, PageSize, PhysAddr};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{AmdV1, Arm, Format, PageTable, Riscv, VtdSecondStage, X86FirstStage};
use portcullis_model::{ArmStage, ArmTables, Granule, Memory, RiscvMode, TableFormat};

use super::queue::ClockedQueue;
use super::tables::{Tables, TablesOf};

/// Width of physical addresses in the model's memory and every format.
const PHYS_BITS: u32 = 48;

/// A format for the library's writer and the model's reader: two independent descriptions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Both<X: Format> {
    pub written: X,
    pub read: TableFormat,
}

pub(super) trait AnyFormat {
    /// The smallest page.
    fn granule(&self) -> PageSize;

    /// For the model's reader.
    fn read(&self) -> TableFormat;

    /// Page tables in `memory` of domain `id`, and the address of their root. `reserved` stays unmapped.
    fn tables(
        &self,
        memory: &Arc<Memory>,
        queue: Arc<ClockedQueue>,
        id: DomainId,
        reserved: Vec<IovaRange>,
    ) -> Result<(Tables, PhysAddr), SetupError>;
}

impl<X: Format> AnyFormat for Both<X>
where
    Tables: From<TablesOf<X>>,
{
    fn granule(&self) -> PageSize {
        PageSize::from_shift(X::GRANULE_SHIFT).unwrap_or(PageSize::SIZE_4K)
    }

    fn read(&self) -> TableFormat {
        self.read
    }

    fn tables(
        &self,
        memory: &Arc<Memory>,
        queue: Arc<ClockedQueue>,
        id: DomainId,
        reserved: Vec<IovaRange>,
    ) -> Result<(Tables, PhysAddr), SetupError> {
        let table = PageTable::new(Arc::clone(memory), self.written)?;
        let root = table.root();
        Ok((TableMapper::new(table, queue, id, reserved).into(), root))
    }
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

/// The format called `name`; `None` if there is none.
pub(super) fn named(name: &str) -> Option<Result<Arc<dyn AnyFormat>, SetupError>> {
    Some(match name {
        "vtd-ss" => both(VtdSecondStage::new(4, 3, PHYS_BITS), TableFormat::VtdSecondStage { levels: 4 }),
        "x86-4" => both(X86FirstStage::new(4, 3, PHYS_BITS), TableFormat::X86FirstStage { levels: 4 }),
        "x86-5" => both(X86FirstStage::new(5, 3, PHYS_BITS), TableFormat::X86FirstStage { levels: 5 }),
        "amd-v1" => both(AmdV1::new(4, 3, PHYS_BITS), TableFormat::AmdV1 { levels: 4 }),
        "arm-s1-4k" => arm(Arm::<12>::stage_1, Granule::Size4K),
        "arm-s1-16k" => arm(Arm::<14>::stage_1, Granule::Size16K),
        "arm-s1-64k" => arm(Arm::<16>::stage_1, Granule::Size64K),
        "arm-s2-4k" => arm(Arm::<12>::stage_2, Granule::Size4K),
        "arm-s2-16k" => arm(Arm::<14>::stage_2, Granule::Size16K),
        "arm-s2-64k" => arm(Arm::<16>::stage_2, Granule::Size64K),
        "riscv-sv39" => riscv(Riscv::sv39(), RiscvMode::Sv39),
        "riscv-sv48" => riscv(Riscv::sv48(), RiscvMode::Sv48),
        "riscv-sv57" => riscv(Riscv::sv57(), RiscvMode::Sv57),
        "riscv-sv39x4" => riscv(Riscv::sv39x4(), RiscvMode::Sv39x4),
        "riscv-sv48x4" => riscv(Riscv::sv48x4(), RiscvMode::Sv48x4),
        _ => return None,
    })
}

fn both<X: Format>(
    written: Result<X, SetupError>,
    read: TableFormat,
) -> Result<Arc<dyn AnyFormat>, SetupError>
where
    Tables: From<TablesOf<X>>,
{
    Ok(Arc::new(Both { written: written?, read }))
}

fn arm<const GRANULE: u32>(
    new: fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>,
    granule: Granule,
) -> Result<Arc<dyn AnyFormat>, SetupError>
where
    Tables: From<TablesOf<Arm<GRANULE>>>,
{
    let written = new(PHYS_BITS, PHYS_BITS)?;
    let tables = ArmTables {
        stage: if written.is_stage_2() { ArmStage::Two } else { ArmStage::One },
        granule,
        input_bits: PHYS_BITS,
        levels: written.levels(),
        output_bits: PHYS_BITS,
    };
    both(Ok(written), TableFormat::Arm(tables))
}

fn riscv(mode: Riscv, model: RiscvMode) -> Result<Arc<dyn AnyFormat>, SetupError> {
    both(mode.within(3, PHYS_BITS), TableFormat::RiscV(model))
}
