//! What a fresh audit found where two callers meet, or one meets what another has removed by number: each test failed on the
//! build before.
#![cfg(not(loom))]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::queued::direct;
use crate::rig::{ANYWHERE, Clocked, DEVICE, Hooked, PAGE, Rig, page};
use portcullis::addr::{Direction, Permissions};
use portcullis::domain::Policy;
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper as _;
use portcullis_model::open::OpenDomain;

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
    let (domain, iommu, platform) = (rig.domain.clone(), Arc::clone(&rig.iommu), Arc::clone(&rig.platform));
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
    let failed = direct(&rig.device).map(buffer, Direction::Bidirectional).map(drop).unwrap_err();
    rig.queue.clear();
    assert!(failed.buffer.is_none() || !rig.reaches(range.start()), "given back, and the device reaches it");
}
