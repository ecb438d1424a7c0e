//! The long run: threads, and chance.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use portcullis::addr::Iova;
use portcullis::dma::{DmaDevice, QueueConfig};
use portcullis::domain::{Domain, Policy};

use super::paint::{Findings, Paint, Painted};
use super::policies::{Changes, Group};
use super::turns::{Border, Turns};
use super::worker::{Shared, Worker};
use crate::played::Played;
use crate::queued::{end, nic};
use crate::rig::{Hooked, LAZY_FOREVER, Mapper, PAGE, Rig};

pub type Dom = Domain<Mapper, Played>;
pub type Dev = DmaDevice<Mapper, Played>;

/// Every so many calls, a wait in which others get on.
fn late(calls: &AtomicU64, every: u64) {
    if calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(every) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

const WORKERS: u64 = 3;
const STEPS: u64 = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
const BUFFERS: u32 = 512;
/// The addresses below 16 MiB, so that they come again, and run out.
const MASK: u64 = (16 << 20) - 1;

#[test]
fn a_device_that_retries_everything_reaches_nothing_it_must_not() {
    // Now and then late where it hurts: before a CPU is lent.
    let turns = AtomicU64::new(0);
    let platform = Turns::new(8, move |border| {
        if border == Border::Before {
            late(&turns, 512);
        }
    });
    let rig = Rig::new(platform, LAZY_FOREVER, |queue| {
        let (hardware, calls) = (Hooked::new(queue), AtomicU64::new(0));
        hardware.set(move || late(&calls, 64));
        hardware
    });
    let nic = |policy| {
        let nic = nic(&rig.domain, MASK);
        nic.dma().set_policy(policy).unwrap();
        nic
    };
    let groups = [
        Group::new(nic(None), false),
        Group::new(nic(None), false),
        Group::new(nic(Some(Policy::Lazy { window_ns: 200_000 })), false),
        Group::new(nic(Some(Policy::Strict)), true),
    ];
    let findings = Findings::default();
    // Each CPU has pages of its own to begin with; what comes back stays with whoever unmapped it.
    let painted = |serial| Painted::new(rig.memory.buffer(u64::from(1 + serial % 3) * PAGE).unwrap(), serial);
    let mut all: Vec<_> = (0..BUFFERS).map(painted).collect();

    // What the device would see if protection were lazy for ever: this test has eyes.
    let mut painted = all.pop().unwrap();
    painted.paint(Paint::Open);
    let mut queue = groups[0].nic.queue(QueueConfig::direct()).unwrap();
    let mapping = queue.map(painted, portcullis::addr::Direction::Bidirectional).unwrap();
    let iova = mapping.iova();
    findings.try_page(&rig.iommu, iova);
    let mut painted = end(&mut queue, mapping);
    painted.paint(Paint::Stale);
    findings.try_page(&rig.iommu, iova);
    assert_eq!(findings.stale.load(Ordering::Relaxed), 1, "{findings:?}");
    painted.paint(Paint::Closed);
    findings.try_page(&rig.iommu, iova);
    assert_eq!(findings.closed.swap(0, Ordering::Relaxed), 1);
    assert!(painted.is_tampered_with());
    rig.domain.flush().unwrap();
    painted.paint(Paint::Closed);
    all.push(painted);

    let (free, seen, over) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
    let shared = Shared {
        iommu: &rig.iommu,
        groups: &groups,
        free: &free,
        seen: &seen,
        findings: &findings,
        over: &over,
    };
    let mut changes = Changes::new(rig.domain.clone(), LAZY_FOREVER);
    std::thread::scope(|scope| {
        let shared = &shared;
        let workers: Vec<_> = (1..=WORKERS)
            .map(|seed| {
                let own = all.split_off(all.len() - BUFFERS as usize / (WORKERS as usize + 1));
                scope.spawn(move || {
                    let mut worker = Worker::new(shared, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), own);
                    (0..STEPS).for_each(|_| worker.step());
                    worker.finish()
                })
            })
            .collect();
        let device = scope.spawn(|| retry(shared));
        let changing = scope.spawn(|| {
            let mut random = 88_172_645_463_325_252_u64;
            while !shared.over.load(Ordering::Relaxed) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                changes.change(random >> 9, shared);
            }
        });
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        // Also where one of them has failed, or nobody would ever end.
        over.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|own| all.extend(own.unwrap()));
        let seen = device.join().unwrap();
        changing.join().unwrap();
        rig.domain.set_policy(Policy::Strict).unwrap();
        // All is unmapped, whatever the policy was: the device gets nothing at all.
        let reached = seen.iter().filter(|iova| rig.reaches(**iova)).count();
        assert_eq!(reached, 0, "of {} addresses", seen.len());
    });
    let tampered =
        all.iter().chain(&*free.lock().unwrap()).filter(|painted| painted.is_tampered_with()).count();
    assert_eq!(tampered, 0, "buffers written to after their unmap");
    findings.assert_nothing_forbidden();
    assert!(findings.open.load(Ordering::Relaxed) > 0 && changes.closing > 0, "{findings:?}");
    let stats = rig.domain.stats();
    assert_eq!((stats.maps, stats.lost_iova_bytes), (stats.unmaps, 0));
    println!("{findings:?}, {} changes closed {} buffers, {stats:?}", changes.closing, changes.closed);
}

/// The device: every address that anybody was ever given, round and round.
fn retry(shared: &Shared<'_>) -> HashSet<Iova> {
    let mut all = HashSet::new();
    while !shared.over.load(Ordering::Relaxed) {
        all.extend(shared.seen.lock().unwrap().drain(..));
        for iova in &all {
            shared.findings.try_page(shared.iommu, *iova);
        }
        std::thread::yield_now();
    }
    all.extend(shared.seen.lock().unwrap().drain(..));
    all
}
