//! A bounced unmap needs no memory, whatever its way, and a bounced map with a buffer waiting needs none either.
#![cfg(not(loom))]

#[path = "../bounce/pool/support.rs"]
#[allow(dead_code, reason = "shared with the other tests of pools")]
mod support;

use crate::limited::{granting, held};
use portcullis::addr::{Direction, Iova};
use portcullis::bounce::pool::{Attributes, BouncePool, Way};
use portcullis_model::open::OpenPool;
use support::{Bench, PAGE, map, piece, small};

const NONE: Attributes = Attributes { copy_in: false };

#[test]
fn unmap_never_allocates_nor_does_a_map_that_reuses_a_buffer() {
    let bench = Bench::new(small());
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(60 * PAGE).unwrap();
    let one = [piece(buffer.phys(), 3, 5000)];
    let list =
        [piece(buffer.phys(), 3, 5000), piece(buffer.phys(), 9000, 7), piece(buffer.phys(), 9009, 100)];
    let split = [piece(buffer.phys(), 3, 20 * PAGE)];
    let pieces = [piece(buffer.phys(), 3, 20 * PAGE), piece(buffer.phys(), 21 * PAGE + 5, 30 * PAGE)];
    for (list, way) in
        [(&one[..], Way::Slot), (&list, Way::Slot), (&split, Way::Split), (&pieces, Way::SingleUse)]
    {
        for direction in Direction::ALL {
            for round in 0..4 {
                // Twice on a CPU, and twice by a caller without one.
                bench.platform.be(round / 2 * 3);
                let (live, calls) =
                    granting(usize::MAX, || [(); 8].map(|()| map(&device, list, direction, NONE).unwrap()));
                assert!(live.iter().all(|mapping| mapping.way() == way));
                assert!(
                    way != Way::Slot || round % 2 == 0 || calls == 0,
                    "{way:?} {direction:?}: {calls} calls"
                );
                let ((), calls) = granting(0, || {
                    live.iter().for_each(|mapping| bench.pool.close(mapping.iova(), mapping.len()).unwrap());
                });
                assert_eq!(calls, 0, "{way:?} {direction:?}");
            }
        }
    }
    let (freed, calls) = granting(0, || bench.pool.trim(0));
    assert!(freed.unwrap() > 0 && calls == 0);
    drop((buffer, device));
    bench.finish();
}

/// What a pool, and a domain, say that they use is what the allocator gave them.
#[test]
fn a_pool_and_its_domain_say_what_memory_they_use() {
    let bench = Bench::new(small());
    let domain = bench.domain.clone();
    let kept = |before: isize| u64::try_from(held() - before).unwrap();
    let before = held();
    let pool = BouncePool::new(domain.clone(), bench.frames.clone(), small()).unwrap();
    let (said, counted) = (pool.usage().bookkeeping_bytes as u64, kept(before));
    // But for the pool's own fields, and what its addresses take.
    assert!(said <= counted && counted - said <= 4096, "{said} bytes said, {counted} counted");
    let mut reserved = Vec::with_capacity(1 << 14);
    let (before, memory) = (held(), domain.stats().iova_memory);
    reserved.extend((0..1 << 14).map(|_| domain.reserve(PAGE, Iova::new(u64::MAX)).unwrap()));
    let (said, counted) = ((domain.stats().iova_memory - memory) as u64, kept(before));
    assert!(counted >= 1 << 15 && said.abs_diff(counted) <= 1024, "{said} bytes said, {counted} counted");
    drop((reserved, pool));
}
