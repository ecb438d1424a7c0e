//! Units that stop repeatedly at bad commands, while threads submit: a confirmed command was executed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use portcullis::addr::{DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::pgtable::{Format, VtdSecondStage};
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, SoftwareHost, VtD};
use portcullis_hw::{Iommu, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use super::{Behind, DEVICE, MEMORY, lead_device, now};

const THREADS: u64 = 3;
const ROUNDS: u64 = 500;

/// The page numbers in commands, above all other fields of the second word.
const PAGES: std::ops::Range<u64> = 1 << 20..1 << 21;

/// Records the pages of executed commands, from the second word, shifted by `shift`. A unit refuses one in 89.
fn confirmed_is_carried_out<K: Kind, X: Format + Copy, U: Iommu<X>>(
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
    shift: u32,
) {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let done = Arc::new(Mutex::new(HashSet::new()));
    let (watched, met) = (Arc::clone(&done), AtomicU64::new(0));
    let watcher = move |command: [u64; 2]| {
        let page = command[1] >> shift;
        // A submission whose wait is refused ends with the host's patience.
        if !PAGES.contains(&page) || met.fetch_add(1, Ordering::Relaxed) % 89 != 88 {
            watched.lock().unwrap_or_else(PoisonError::into_inner).insert(page);
            return true;
        }
        false
    };
    // SAFETY: 1: the driver's host has the same frames.
    let software = unsafe { Software::watched(Arc::clone(&memory), Box::new(watcher)) };
    let patience = 60_000_000_000;
    let host =
        SoftwareHost { unit: software, now, relax: std::hint::spin_loop, patience, cpus: 0, cpu: || None };
    let unit = start(host).unwrap();
    unit.enable().unwrap();
    lead_device(&unit);
    let failed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (unit, done, failed) = (&unit, &done, &failed);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let pages = [0, 1].map(|page| PAGES.start + (thread * ROUNDS + round) * 4 + page * 2);
                    let requests = pages.map(|page| {
                        let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
                        let invalidation = Invalidation::Range { range, leaf_only: true };
                        Request { domain: DomainId(7), invalidation }
                    });
                    match unit.submit(&requests) {
                        Ok(()) => {
                            let done = done.lock().unwrap();
                            assert!(
                                pages.iter().all(|page| done.contains(page)),
                                "{pages:x?}, which is confirmed"
                            );
                        }
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let (failed, all) = (failed.into_inner(), THREADS * ROUNDS);
    assert!((all / 89..all).contains(&failed), "{failed} of {all} failed: some, and not all");
    unit.detach(DEVICE).unwrap();
    unit.shut_down().unwrap();
    assert_eq!(memory.frames_in_use(), 0);
}

/// A unit that refuses one of the commands of `enable`, whichever that is, is not reported as on.
fn each_command_counts<K: Kind, X: Format, U: Iommu<X>>(start: impl Fn(Behind<K>) -> Result<U, UnitError>) {
    static CLOCK: AtomicU64 = AtomicU64::new(0);
    for taken in 0.. {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
        let met = AtomicU64::new(0);
        let watcher = move |_| met.fetch_add(1, Ordering::Relaxed) != taken;
        // SAFETY: 1: the driver's host has the same frames.
        let unit = unsafe { Software::watched(memory, Box::new(watcher)) };
        let now = || CLOCK.fetch_add(1, Ordering::Relaxed);
        let host =
            SoftwareHost { unit, now, relax: std::hint::spin_loop, patience: 10_000, cpus: 0, cpu: || None };
        match start(host).and_then(|unit| unit.enable()) {
            Err(UnitError::Unconfirmed(_)) => {}
            done => {
                assert_eq!(done, Ok(()), "without command {taken}");
                assert!(taken > 1, "{taken} commands");
                return;
            }
        }
    }
}

#[test]
fn a_unit_that_refuses_a_command_is_not_on() {
    each_command_counts::<VtD, VtdSecondStage, _>(vtd::Unit::start);
    let config = amdvi::Config { last_device: 0xff, capability: None };
    each_command_counts::<AmdVi, _, _>(|host| amdvi::Unit::start(host, config));
    each_command_counts::<RiscV, _, _>(riscv::Unit::start);
    each_command_counts::<SmmuV3, _, _>(smmuv3::Unit::<Behind<SmmuV3>, 12>::start);
}

#[test]
fn vtd_that_stops() {
    confirmed_is_carried_out::<VtD, VtdSecondStage, _>(vtd::Unit::start, 12);
}

#[test]
fn amdvi_that_stops() {
    let config = amdvi::Config { last_device: 0xff, capability: None };
    confirmed_is_carried_out::<AmdVi, _, _>(|host| amdvi::Unit::start(host, config), 12);
}

#[test]
fn riscv_that_stops() {
    confirmed_is_carried_out::<RiscV, _, _>(riscv::Unit::start, 10);
}

#[test]
fn smmuv3_that_stops() {
    let start = smmuv3::Unit::<Behind<SmmuV3>, 12>::start;
    confirmed_is_carried_out::<SmmuV3, _, _>(start, 12);
}
