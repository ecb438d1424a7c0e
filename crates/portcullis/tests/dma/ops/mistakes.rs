//! Drivers that make mistakes: each is told, and nothing is opened, changed or lost.

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Direction, Iova};
use portcullis::dma::{DmaMapError, DmaMask, DmaUnmapError, OpsConfig};
use portcullis::domain::{MapListError, Policy};

use super::support::{CONFIGS, Calls, THRESHOLD, buffer, contents, machine, part};
use crate::queue::world::{PAGE, World};

/// Lengths that go through a slot, with copies of the ends, and mapped as a whole.
const LENS: [(u64, u64); 3] = [(16, 2 * PAGE), (16, 3 * THRESHOLD), (0, 2 * THRESHOLD)];

#[test]
fn what_names_no_mapping_changes_nothing() {
    for config in CONFIGS {
        for (offset, len) in LENS {
            let (world, ops) = machine(config);
            let memory = buffer(&world, len + 2 * PAGE, 7);
            let iova = ops.maps(part(&memory, offset, len), Direction::FromDevice).unwrap();
            let at = |offset: u64| Iova::new(iova.get().wrapping_add(offset));
            let wrong = [
                (at(0), len - 1),
                (at(0), len + 1),
                (at(0), PAGE),
                (at(0), 0),
                (at(0), u64::MAX),
                (at(1), len - 1),
                (at(PAGE), len - PAGE),
                (at(1_u64.wrapping_neg()), len + 1),
                (at(len), len),
                (at(1 << 40), len),
                (Iova::new(0), len),
                (Iova::new(u64::MAX), 1),
            ];
            let mut errors = 0;
            for (iova, len) in wrong {
                let error = ops.ends(iova, len).unwrap_err();
                let is_typed =
                    matches!(error, DmaUnmapError::NotMapped { .. } | DmaUnmapError::OutOfRange { .. });
                assert!(is_typed, "{config:?} {iova} {len:#x}: {error:?}");
                assert_eq!(ops.ends_uncopied(iova, len), Err(error));
                errors += 2;
            }
            for (at, len) in [
                (at(0), len + 1),
                (at(len), 1),
                (at(1_u64.wrapping_neg()), 1),
                (at(8), u64::MAX),
                (at(1 << 40), 1),
            ] {
                let (cpu, device) = (ops.syncs_for_cpu(at, len), ops.syncs_for_device(at, len));
                assert!(cpu.is_err() && cpu == device, "{config:?} {at} {len:#x} {cpu:?}");
                errors += 2;
            }
            // It is a mapping still, and ends once.
            assert!(world.writes(iova, b"from it!"));
            ops.ends(iova, len).unwrap();
            assert_eq!(&contents(&memory)[offset as usize..][..8], b"from it!");
            memory.write(offset, b"driver's").unwrap();
            for _ in 0..2 {
                assert!(matches!(ops.ends(iova, len), Err(DmaUnmapError::NotMapped { .. })), "{config:?}");
                assert!(ops.syncs_for_cpu(iova, 8).is_err());
                errors += 2;
            }
            assert_eq!(&contents(&memory)[offset as usize..][..8], b"driver's", "nothing is copied");
            let usage = ops.usage();
            assert_eq!((usage.maps, usage.unmaps, usage.errors), (1, 1, errors));
            assert_eq!((usage.open_bytes, usage.exposed_bytes), (0, 0));
            ops.domain().flush().unwrap();
            assert_eq!(ops.domain().stats().lost_iova_bytes, 0, "{config:?}");
        }
    }
}

/// Two devices of one domain: neither ends nor syncs what is the other's.
#[test]
fn another_devices_mapping_is_not_touched() {
    for config in CONFIGS {
        let world = World::new(Policy::Strict);
        let ops = world.nic.ops(config).unwrap();
        let other = world.nic.domain().attach(DeviceId(8), DmaMask::BITS_64).unwrap().ops(config).unwrap();
        for (offset, len) in LENS {
            let memory = buffer(&world, len + 2 * PAGE, 7);
            let iova = ops.maps(part(&memory, offset, len), Direction::FromDevice).unwrap();
            assert!(matches!(other.ends(iova, len), Err(DmaUnmapError::NotMapped { .. })), "{config:?}");
            assert!(
                matches!(other.syncs_for_cpu(iova, len), Err(DmaUnmapError::NotMapped { .. })),
                "{config:?}"
            );
            assert!(world.writes(iova, b"from it!"));
            ops.ends(iova, len).unwrap();
            assert_eq!(&contents(&memory)[offset as usize..][..8], b"from it!");
        }
    }
}

#[test]
fn what_cannot_be_mapped_is_refused_whole() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, 4 * PAGE, 7);
        let (piece, empty) = (part(&memory, 0, PAGE), part(&memory, 0, 0));
        let wraps = portcullis::addr::PhysSegment { len: u64::MAX, ..piece };
        let maps = |list: &[_]| ops.maps_list(list, Direction::ToDevice).unwrap_err();
        assert!(matches!(maps(&[]), DmaMapError::List(MapListError::EmptyList)));
        assert!(matches!(
            maps(&[piece, empty]),
            DmaMapError::List(MapListError::EmptySegment { index: 1, .. })
        ));
        assert!(matches!(maps(&[piece, wraps]), DmaMapError::List(MapListError::Wraps { index: 1, .. })));
        // SAFETY: the memory is the test's, all of it atomics.
        let short = unsafe { ops.map_sg(&[piece, piece], Direction::ToDevice, Default::default(), &mut []) };
        assert!(matches!(short, Err(DmaMapError::List(MapListError::NoRoom { needed: 2, room: 0 }))));
        let usage = ops.usage();
        assert_eq!((usage.maps, usage.errors, usage.open_bytes), (0, 4, 0));
        assert_eq!(
            ops.domain().stats().taken_iova_bytes,
            ops.domain().stats().cached_iova_bytes + pool_bytes(&ops)
        );
    }
}

fn pool_bytes(ops: &super::support::Ops) -> u64 {
    ops.usage().pool.map_or(0, |pool| pool.iova_bytes)
}

#[test]
fn a_handle_that_cannot_be_made_says_why() {
    let world = World::new(Policy::Strict);
    let beyond = world.nic.ops(OpsConfig::Bounce { threshold: 1 << 30 }).unwrap_err();
    assert!(matches!(beyond, SetupError::Threshold { threshold: 0x4000_0000, .. }));
    let ops = world.nic.ops(OpsConfig::Strict).unwrap();
    assert!(ops.set_config(OpsConfig::Bounce { threshold: 1 << 30 }).is_err());
    assert_eq!(ops.config(), OpsConfig::Strict);
    let offset = world.nic.clone().keeping_offsets(0xff0).ops(OpsConfig::Strict).unwrap_err();
    assert!(matches!(offset, SetupError::OffsetMask { mask: 0xff0 }));
    let caches = world.nic.clone().not_coherent().unwrap().ops(OpsConfig::Strict).unwrap_err();
    assert_eq!(caches, SetupError::NotCoherent);
    let none = World::new(Policy::Passthrough).nic.ops(OpsConfig::Strict).unwrap_err();
    assert_eq!(none, SetupError::NotTranslated);
}
