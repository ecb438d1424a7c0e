//! The trends of the figures that `examples/placement.rs` prints in full.

#[path = "../common/placement.rs"]
mod placement;

use placement::{Blocks, Pace, Placed, Setup, run};

const SETUP: Setup = Setup {
    rings: 40,
    pages: 1,
    pace: Pace::InStep,
    blocks: Blocks::Two,
    iotlb_entries: 128,
    iotlb_ways: 8,
    warm_up: 1024,
    counted: 256,
};

/// Forty rings of single pages in an aged space: an arena hits the cached tables, and colours keep the rings out of each other's sets.
#[test]
fn arenas_find_their_tables_and_colours_their_sets() {
    let [plain, uncoloured, coloured] =
        [Placed::Pages, Placed::Arenas, Placed::Coloured].map(|placed| run(SETUP, placed));
    assert!(plain.levels[0] > 0.02 && coloured.levels[0] < plain.levels[0] / 10.0, "{plain:?} {coloured:?}");
    assert!(coloured.iotlb < plain.iotlb, "{plain:?} {coloured:?}");
    // Without colours all rings are in one set of 16.
    assert!(uncoloured.iotlb > 2.0 * coloured.iotlb, "{uncoloured:?} {coloured:?}");
    // One in six is the least: a miss for each page, of 4 accesses to it and 2 to the ring's own memory.
    assert!(coloured.iotlb < 1.1 / 6.0, "{coloured:?}");
}

/// Sixteen rings of 256 KiB: descriptors from the space alias as uncoloured arenas do.
#[test]
fn aligned_descriptors_alias_unless_coloured() {
    let setup = Setup { rings: 16, pages: 64, warm_up: 8, counted: 16, ..SETUP };
    let [ranges, uncoloured, coloured] =
        [Placed::Ranges, Placed::Arenas, Placed::Coloured].map(|placed| run(setup, placed));
    assert!(ranges.iotlb > 0.9 && uncoloured.iotlb > 0.9, "{ranges:?} {uncoloured:?}");
    assert!(coloured.iotlb < 0.26, "{coloured:?}");
    // All of them begin at multiples of 128 MiB: also one set of the cached tables.
    assert!(uncoloured.levels[0] > 0.9 && coloured.levels[0] < 0.02, "{uncoloured:?} {coloured:?}");
}

/// Rings that drift apart spread over the IOTLB's sets by themselves; they leave the tables' sets too slowly.
#[test]
fn uneven_rings_gain_at_the_tables() {
    let setup = Setup { pace: Pace::Uneven, rings: 16, pages: 64, warm_up: 8, counted: 16, ..SETUP };
    let [uncoloured, coloured] = [Placed::Arenas, Placed::Coloured].map(|placed| run(setup, placed));
    assert!(coloured.levels[0] < uncoloured.levels[0] / 5.0, "{uncoloured:?} {coloured:?}");
    assert!(coloured.iotlb < 1.05 * uncoloured.iotlb, "{uncoloured:?} {coloured:?}");
    // One block around a descriptor that crosses its end is sometimes the whole domain.
    let one_block = run(Setup { blocks: Blocks::One, ..setup }, Placed::Coloured);
    assert!(coloured.levels[0] < one_block.levels[0] / 2.0, "{coloured:?} {one_block:?}");
}
