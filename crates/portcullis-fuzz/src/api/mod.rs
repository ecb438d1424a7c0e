//! Sequences of public calls of a whole domain, in the software IOMMU: mappings by type and by number, batches, a ring, a
//! bounce pool, a swiotlb pool and registrations, under policies that change, with invalidations that fail and memory
//! that runs out. After each call a hostile device tries every address that it knows, against a plain
//! model, and some of them while a list is being mapped. The first byte chooses between page tables of VT-d, AMD, Arm and RISC-V.

mod bounced;
#[path = "../../../portcullis/tests/rig/clocked.rs"]
#[allow(missing_docs, dead_code, reason = "support of the core's tests, of which a part is used")]
mod clocked;
mod eager;
mod mapped;
mod model;
#[path = "../../../portcullis/tests/rig/observed.rs"]
#[allow(missing_docs, dead_code, reason = "as above")]
mod observed;
mod raw;
mod world;

pub use clocked::Clocked;

use portcullis::pgtable::{AmdV1, Arm, Format, Riscv, VtdSecondStage};
use portcullis_model::{ArmStage as ModelStage, ArmTables, Granule, RiscvMode as ModelMode, TableFormat};

use crate::input::Input;
use world::World;

/// The longest sequence: bytes behind it are not looked at.
const STEPS: usize = 300;

/// Bits of addresses, on both sides of the tables.
const BITS: u32 = 48;

/// The formats of page tables that a sequence may be played on.
pub const FORMATS: u8 = 4;

/// The first byte of the sequence that begins with `first`, were it to be played on the format of this number.
pub fn on_format(first: u8, format: u8) -> u8 {
    first & 3 | (format % FORMATS) << 2
}

/// Plays `bytes`. The first says how many slots there are, and how page tables are laid out.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let first = input.byte();
    let slots = usize::from(first & 3);
    match first >> 2 & 3 {
        0 => {
            let format = VtdSecondStage::new(4, 3, BITS).unwrap();
            play(World::new(slots, format, TableFormat::VtdSecondStage { levels: 4 }, &mut input), input);
        }
        1 => {
            let format = AmdV1::new(4, 3, BITS).unwrap();
            play(World::new(slots, format, TableFormat::AmdV1 { levels: 4 }, &mut input), input);
        }
        2 => {
            let format = Arm::<12>::stage_1(BITS, BITS).unwrap();
            let tables = ArmTables {
                stage: ModelStage::One,
                granule: Granule::Size4K,
                input_bits: BITS,
                levels: format.levels(),
                output_bits: BITS,
            };
            play(World::new(slots, format, TableFormat::Arm(tables), &mut input), input);
        }
        _ => {
            let format = Riscv::sv48().within(3, BITS).unwrap();
            play(World::new(slots, format, TableFormat::RiscV(ModelMode::Sv48), &mut input), input);
        }
    }
}

fn play<X: Format>(mut world: World<X>, mut input: Input<'_>) {
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.finish();
}
