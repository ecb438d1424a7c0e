//! Sequences of public calls of a whole domain, in the software IOMMU: mappings by type and by number, batches, a ring, a
//! bounce pool, a swiotlb pool and registrations, under policies that change, with invalidations that fail and memory
//! that runs out. After each call a hostile device tries every address that it knows, against a plain
//! model.

mod bounced;
#[path = "../../../portcullis/tests/rig/clocked.rs"]
#[allow(missing_docs, dead_code, reason = "support of the core's tests, of which a part is used")]
mod clocked;
mod mapped;
mod model;
mod raw;
mod world;

pub use clocked::Clocked;

use crate::input::Input;
use world::World;

/// The longest sequence: bytes behind it are not looked at.
const STEPS: usize = 300;

/// Plays `bytes`.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World::new(&mut input);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.finish();
}
