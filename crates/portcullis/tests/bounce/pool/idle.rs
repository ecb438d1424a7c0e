//! The platform's timer gives back what nobody wants, and tries again what was not confirmed.

use std::sync::Arc;

use portcullis::addr::Direction;
use portcullis::bounce::pool::{Attributes, PoolConfig, Way};
use portcullis::domain::Policy;
use portcullis::platform::PlatformEvents;
use portcullis_model::open::OpenPool;

use crate::pool::support::{Bench, PAGE, TIMEOUT, Ticking, map, piece, small};

const IDLE: u64 = 1_000_000_000;
const LARGE: u64 = 16 * PAGE;

fn bench(config: PoolConfig) -> Bench<Arc<Ticking>> {
    Bench::on(Arc::new(Ticking::new(3)), Policy::Strict, config)
}

/// Maps `count` buffers at once, and unmaps them.
fn burst(bench: &Bench<Arc<Ticking>>, count: usize) {
    let buffer = bench.memory.buffer(LARGE).unwrap();
    let list = [piece(buffer.phys(), 0, LARGE)];
    let mapped = || map(&bench.device, &list, Direction::ToDevice, Attributes::default()).unwrap();
    let live: Vec<_> =
        (0..count).map(|_| mapped()).inspect(|mapping| assert_eq!(mapping.way(), Way::Slot)).collect();
    live.iter().for_each(|mapping| bench.pool.close(mapping.iova(), LARGE).unwrap());
}

/// The timer comes in time; the bytes that wait then, and what was asked for.
fn tick(bench: &Bench<Arc<Ticking>>) -> (u64, Vec<u64>) {
    bench.platform.advance(IDLE);
    bench.pool.timer();
    (bench.pool.usage().cached_bytes, bench.platform.wakes())
}

#[test]
fn after_a_burst_only_what_is_to_be_kept_remains() {
    for keep in [0, 2 * LARGE] {
        let bench = bench(PoolConfig { class_bytes: 4 << 20, keep_bytes: keep, ..small() });
        bench.platform.advance(7);
        assert_eq!(bench.platform.wakes(), []);
        burst(&bench, 40);
        assert_eq!(bench.platform.wakes(), [IDLE + 7], "asked for once");
        bench.pool.timer();
        assert_eq!(bench.platform.wakes(), [IDLE + 7], "not yet; but it may have been forgotten");
        assert_eq!(tick(&bench), (40 * LARGE, vec![2 * IDLE + 7]), "used since");
        assert_eq!(tick(&bench), (keep, vec![]), "and an empty pool wakes nobody");
        burst(&bench, 3);
        assert_eq!(bench.platform.wakes(), [3 * IDLE + 7]);
        bench.finish();
    }
}

#[test]
fn what_a_burst_has_left_goes_while_light_use_goes_on() {
    let bench = bench(PoolConfig { class_bytes: 4 << 20, ..small() });
    burst(&bench, 40);
    assert_eq!(tick(&bench).0, 40 * LARGE);
    for _ in 0..3 {
        burst(&bench, 1);
        // Two stacks of four are the CPU's own.
        assert_eq!(tick(&bench).0, 8 * LARGE);
    }
    assert_eq!(tick(&bench).0, 0);
    bench.finish();
}

#[test]
fn what_is_wanted_again_and_again_stays() {
    let bench = bench(PoolConfig { class_bytes: 4 << 20, ..small() });
    for _ in 0..4 {
        burst(&bench, 40);
        assert_eq!(tick(&bench).0, 40 * LARGE);
    }
    assert_eq!(bench.pool.usage().reused, 3 * 40);
    bench.finish();
}

#[test]
fn what_was_not_confirmed_is_tried_again() {
    let bench = bench(PoolConfig { split: false, ..small() });
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 9, 20 * PAGE)];
    let mapping = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap();
    assert_eq!((mapping.way(), bench.platform.wakes()), (Way::SingleUse, vec![]));
    bench.iommu.queue().fail_next(2, TIMEOUT);
    bench.pool.close(mapping.iova(), 20 * PAGE).unwrap();
    assert_eq!(bench.platform.wakes(), [IDLE]);
    assert_eq!((tick(&bench).1, bench.pool.usage().singles), (vec![2 * IDLE], 1), "no answer again");
    assert_eq!((tick(&bench).1, bench.pool.usage().singles), (vec![], 0));
    drop((buffer, device));
    bench.finish();
}

#[test]
fn a_pool_may_do_without_the_timer() {
    let bench = bench(PoolConfig { idle_ns: u64::MAX, ..small() });
    burst(&bench, 3);
    assert_eq!((tick(&bench), tick(&bench)), ((3 * LARGE, vec![]), (3 * LARGE, vec![])));
    bench.finish();
}

/// A map that fails half-way, and an unmap: what the device may still reach of the original counts as open, and the timer tries
/// again.
#[test]
fn what_a_device_may_still_reach_of_an_original_counts_until_it_is_confirmed() {
    const PAGES: u64 = 2000;
    // Of bytes that are not copied, or none, where all have a buffer.
    for (split, open) in [(true, (PAGES - 1) * PAGE), (false, 0)] {
        let bench = bench(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer((PAGES + 1) * PAGE).unwrap();
        let list = [piece(buffer.phys(), 9, PAGES * PAGE)];
        let stale = || {
            let before = bench.domain.exposure().stale_byte_ns;
            bench.platform.advance(IDLE / 2);
            bench.domain.exposure().stale_byte_ns - before
        };
        let mut unconfirmed = 0;
        for grants in 0..8 {
            bench.tables.grant(grants);
            bench.iommu.queue().fail_next(u64::MAX, TIMEOUT);
            let result = map(&device, &list, Direction::FromDevice, Attributes::default());
            bench.tables.grant(u64::MAX);
            if result.as_ref().is_err_and(|error| error.may_be_reached()) {
                unconfirmed += 1;
                assert_ne!(bench.platform.wakes(), [], "split: {split}, grants: {grants}");
                assert_eq!(
                    stale(),
                    u128::from(open) * u128::from(IDLE / 2),
                    "split: {split}, grants: {grants}"
                );
            }
            bench.iommu.queue().fail_next(0, TIMEOUT);
            if let Ok(mapping) = result {
                bench.pool.close(mapping.iova(), PAGES * PAGE).unwrap();
            }
            tick(&bench);
            bench.domain.flush().unwrap();
            assert_eq!((stale(), bench.pool.usage().singles), (0, 0));
        }
        assert!(unconfirmed > 0, "or the test means nothing");
        let mapping = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap();
        bench.platform.wakes();
        bench.iommu.queue().fail_next(u64::MAX, TIMEOUT);
        assert_eq!(bench.pool.close(mapping.iova(), PAGES * PAGE).is_err(), split);
        assert_ne!(bench.platform.wakes(), []);
        assert_eq!(stale(), u128::from(open) * u128::from(IDLE / 2));
        bench.iommu.queue().fail_next(0, TIMEOUT);
        drop((buffer, device));
        bench.finish();
    }
}
