//! Drivers on several CPUs at once, while the configuration and the limits change and the device tries what it once had.

use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Direction, Permissions};
use portcullis::dma::{DmaAttributes, OpsConfig};

use super::support::{Calls, THRESHOLD, buffer, contents, machine, part};
use crate::queue::world::{CARD, PAGE};

#[test]
fn data_is_right_and_what_ended_is_out_of_reach_while_all_changes() {
    let rounds = if cfg!(debug_assertions) { 400 } else { 4_000 };
    let (world, ops) = machine(OpsConfig::Strict);
    let done = AtomicBool::new(false);
    let (world, ops, done) = (&world, &ops, &done);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3_u64)
            .map(|thread| {
                scope.spawn(move || {
                    let memory = buffer(world, 2 * THRESHOLD + 4 * PAGE, 0);
                    let range = memory.phys().get()..memory.phys().get() + memory.len();
                    for round in 0..rounds {
                        let lens = [64, PAGE, THRESHOLD, 2 * THRESHOLD, 2 * THRESHOLD + 24];
                        let (len, offset) = (lens[(round % 5) as usize], (round % 3) * 8);
                        let byte = (round as u8).wrapping_mul(3).wrapping_add(thread as u8) | 1;
                        let lasting = round % 7 == 0;
                        let attributes = DmaAttributes { lasting, ..DmaAttributes::default() };
                        let iova = ops
                            .maps_as(part(&memory, offset, len), Direction::FromDevice, attributes)
                            .unwrap();
                        assert!(world.writes(iova, &vec![byte; len as usize]), "{iova} {len:#x}");
                        if round % 2 == 0 {
                            ops.syncs_for_cpu(iova, len).unwrap();
                        }
                        ops.ends(iova, len).unwrap();
                        let bytes = contents(&memory);
                        assert!(bytes[offset as usize..][..len as usize].iter().all(|found| *found == byte));
                        // The address may be another thread's by now.
                        let reached = world.iommu.probe(CARD, iova, Permissions::WRITE);
                        assert!(
                            reached.is_none_or(|phys| !range.contains(&phys.get())),
                            "{len:#x} {reached:?}"
                        );
                        memory.write(0, &vec![0; memory.len() as usize]).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            let threshold = THRESHOLD;
            let configs = [OpsConfig::Bounce { threshold }, OpsConfig::Strict, OpsConfig::Auto { threshold }];
            for config in configs.into_iter().cycle() {
                ops.set_config(config).unwrap();
                ops.set_limits(if config == OpsConfig::Strict { u32::MAX.into() } else { u64::MAX }, 0)
                    .unwrap();
                ops.maintain().unwrap();
                // One call reads what has ended before what was made, and meanwhile others go on for as long as this thread does not run.
                let (made, usage) = (ops.usage().maps, ops.usage());
                assert!(made.saturating_sub(usage.unmaps) <= 3, "{made} {usage:?}");
                if done.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    let usage = ops.usage();
    assert_eq!((usage.maps, usage.unmaps, usage.errors), (3 * rounds, 3 * rounds, 0));
    assert_eq!((usage.open_bytes, usage.exposed_bytes), (0, 0));
    assert_eq!(ops.domain().stats().lost_iova_bytes, 0);
}
