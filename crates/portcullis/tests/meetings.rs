//! What a fresh audit found where two callers meet, or one meets what another has removed by number: each test failed on the
//! build before.
#![cfg(not(loom))]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, Permissions};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::domain::{PhysSegment, Policy};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper as _;
use portcullis_model::open::{OpenDomain, OpenPool};
use rig::{ANYWHERE, Clocked, DEVICE, Hooked, PAGE, Rig, page};

const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };
const BOTH: Permissions = Permissions::READ_WRITE;

/// Caching mode: a map that is not confirmed removes what it has entered; by then somebody has removed it by number, and
/// has not invalidated it.
#[test]
fn a_map_that_is_not_confirmed_and_was_removed_by_number() {
    let rig =
        Rig::with_config(Clocked::new(1), Policy::Strict, |config| config.caches_absent = true, Hooked::new);
    let range = rig.domain.open(&[page(9)], BOTH, ANYWHERE).unwrap();
    rig.domain.unmap(range).unwrap();
    let (domain, iommu, platform) =
        (Arc::clone(&rig.domain), Arc::clone(&rig.iommu), Arc::clone(&rig.platform));
    let calls = AtomicU64::new(0);
    rig.queue.set(move || {
        if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            // Another CPU's: the device uses what is there, and somebody unmaps it by number.
            assert!(iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).is_ok(), "mapped there");
            let _ = domain.mapper().unmap(&platform, range, &mut Gather::new());
            iommu.queue().fail_next(1, TIMEOUT);
        }
    });
    let buffer = rig.memory.buffer(PAGE).unwrap();
    let failed = rig.device.map(buffer, Direction::Bidirectional).map(|_| ()).unwrap_err();
    rig.queue.clear();
    assert!(failed.buffer.is_none() || !rig.reaches(range.start()), "given back, and the device reaches it");
}

fn run_apart(turn: u64) -> bool {
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let config =
        PoolConfig { threshold: 64 << 10, class_bytes: 4 << 20, large_from: 0, ..PoolConfig::default() };
    let pool = BouncePool::new(Arc::clone(&rig.domain), Arc::clone(&rig.memory), config).unwrap();
    let device = BounceDevice::new(Arc::clone(&pool), DeviceProfile::default()).unwrap();
    let buffer = rig.memory.buffer(64 << 10).unwrap();
    let list = [PhysSegment { phys: buffer.phys(), len: 64 << 10 }];
    // SAFETY: simulated memory.
    let mapping = unsafe { device.map(&list, Direction::FromDevice, Attributes::default()) }.unwrap();
    let iova = mapping.iova();
    assert!(rig.reaches(iova));
    pool.close(iova, 64 << 10).unwrap();
    rig.iommu.queue().fail_next(1, TIMEOUT);
    assert!(pool.trim(0).is_err());
    assert!(rig.reaches(iova), "or the test means nothing");
    // Two trims at once: the other's turn is after so many of this one's.
    let (turns, other) = (AtomicU64::new(0), Arc::clone(&pool));
    rig.platform.after_each_turn(move || {
        if turns.fetch_add(1, Ordering::Relaxed) == turn {
            let _ = other.trim(0);
        }
    });
    pool.trim(0).unwrap();
    rig.platform.after_each_turn(|| ());
    pool.usage().buffer_bytes == 0 && pool.usage().unconfirmed_bytes == 0 && rig.reaches(iova)
}

/// A run's slots are retired; two trims take a part of them each, and neither invalidates the large page as a whole.
#[test]
fn two_trims_share_a_run() {
    let bad: Vec<u64> = (0..120).filter(|turn| run_apart(*turn)).collect();
    assert!(bad.is_empty(), "freed, and the device reaches it: after turns {bad:?}");
}
