//! Random maps, syncs, accesses and unmaps against a plain model of what each side must see.

use portcullis::bounce::pool::{Attributes, PoolConfig};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::pool::support::{PAGE, small};
use crate::pool::world::{Op, World};

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![5 => 1..PAGE, 3 => 1..5 * PAGE, 1 => 1..80 * PAGE, 1 => (1..40_u64).prop_map(|n| n * PAGE)];
    let offset = prop_oneof![1 => Just(0), 2 => 0..PAGE];
    let attributes = prop::bool::weighted(0.3).prop_map(|copy_in| Attributes { copy_in });
    let pieces = prop_oneof![3 => vec((offset.clone(), len.clone()), 1), 1 => vec((offset, len), 2..5)];
    let part = || (any::<usize>(), any::<u64>(), any::<u64>());
    let map = (0..4_usize, 0..3_usize, 0..3_usize, attributes, pieces, any::<bool>());
    prop_oneof![
        5 => map.prop_map(|(cpu, device, direction, attributes, pieces, touching)| {
            Op::Map { cpu, device, direction, attributes, pieces, touching }
        }),
        5 => (part(), any::<u8>()).prop_map(|((which, at, len), value)| Op::Device { which, at, len, value }),
        3 => (part(), any::<u8>()).prop_map(|((which, at, len), value)| Op::Cpu { which, at, len, value }),
        2 => part().prop_map(|(which, at, len)| Op::SyncForCpu { which, at, len }),
        2 => part().prop_map(|(which, at, len)| Op::SyncForDevice { which, at, len }),
        5 => (0..4_usize, any::<usize>()).prop_map(|(cpu, which)| Op::Unmap { cpu, which }),
        1 => prop_oneof![Just(0), 0..300_000_u64].prop_map(|keep| Op::Trim { keep }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn both_sides_see_what_a_plain_model_says(wipe: bool, ops in vec(op(), 1..60)) {
        let mut world = World::with(PoolConfig { wipe, ..small() }, false);
        ops.into_iter().for_each(|op| world.step(op));
        world.finish();
    }
}
