//! What each policy promises, tried by a device that keeps accessing what it was once given.

use std::time::Duration;

use crate::common::{Bench, DEVICE, PAGE};
use crate::queued::{direct, end};
use portcullis::addr::{Direction, Iova, IovaRange, PhysSegment};
use portcullis::dma::DmaUnmapError;
use portcullis::domain::{Policy, UnmapError};
use portcullis::invalidation::{InvalidationError, QUEUE_ENTRIES};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenDomain;

/// Lazy protection whose window no test outlives.
const LAZY_FOREVER: Policy = Policy::Lazy { window_ns: u64::MAX };

/// Memory that no test reads or writes, page `n`.
fn page_of_memory(n: u64) -> PhysSegment {
    PhysSegment { phys: portcullis::addr::PhysAddr::new(0x1_0000_0000 + n * PAGE), len: PAGE }
}

#[test]
fn strict_unmapped_means_unreachable() {
    let bench = Bench::new(Policy::Strict);
    let buffer = bench.memory.buffer(1500).unwrap();
    let mut queue = direct(&bench.device);
    let mapping = queue.map(buffer, Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    bench.iommu.dma_write(DEVICE, iova, b"in time").unwrap();
    assert!(!bench.reads(iova), "mapped for writing only");
    let buffer = end(&mut queue, mapping);
    assert!(!bench.writes(iova), "the translation was cached, and must be gone");
    let mut bytes = [0; 7];
    buffer.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"in time");
}

#[test]
fn lazy_reaches_until_the_flush_and_no_longer() {
    let bench = Bench::new(LAZY_FOREVER);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    let buffer = end(&mut queue, mapping);
    assert!(bench.writes(iova), "that is the price of lazy protection");
    bench.domain.flush().unwrap();
    assert!(!bench.writes(iova));
    drop(buffer);
}

#[test]
fn lazy_flushes_when_one_queue_is_full_and_reuses_no_address_before() {
    let bench = Bench::new(LAZY_FOREVER);
    let mut seen = std::collections::HashSet::new();
    for n in 0..QUEUE_ENTRIES {
        let range =
            bench.domain.open(&[page_of_memory(0)], Direction::FromDevice.permissions(), Iova::new(u64::MAX));
        let range = range.unwrap();
        assert!(seen.insert(range.start()), "address reused before any flush, after {n} unmaps");
        bench.domain.unmap(range).unwrap();
    }
    assert_eq!(bench.domain.stats().flushes, 0);
    let last =
        bench.domain.open(&[page_of_memory(0)], Direction::FromDevice.permissions(), Iova::new(u64::MAX));
    bench.domain.unmap(last.unwrap()).unwrap();
    assert_eq!(bench.domain.stats().flushes, 1, "the 257th unmap found the queue full");
    // From now on addresses come back, one for each unmap.
    let before = bench.domain.stats().taken_iova_bytes;
    for _ in 0..10 * QUEUE_ENTRIES {
        let range =
            bench.domain.open(&[page_of_memory(0)], Direction::FromDevice.permissions(), Iova::new(u64::MAX));
        bench.domain.unmap(range.unwrap()).unwrap();
    }
    let grown = bench.domain.stats().taken_iova_bytes - before;
    assert!(grown <= 2 * PAGE, "{grown} bytes more in a steady state");
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn lazy_keeps_to_its_window_when_nothing_else_happens() {
    let bench = Bench::new(Policy::Lazy { window_ns: 5_000_000 });
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    let _buffer = end(&mut queue, mapping);
    // No further call: the platform's timer alone must end it. The bound is generous, the check is not: the
    // loop ends only when the device has lost its access.
    let start = std::time::Instant::now();
    while bench.writes(iova) {
        assert!(start.elapsed() < Duration::from_secs(60), "still reachable");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(bench.domain.stats().flushes, 1);
}

#[test]
fn passthrough_uses_the_memory_s_own_addresses_and_protects_nothing() {
    let bench = Bench::new(Policy::Passthrough);
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let phys = buffer.phys();
    let mut queue = direct(&bench.device);
    let mapping = queue.map(buffer, Direction::ToDevice).unwrap();
    assert_eq!(mapping.iova().get(), phys.get());
    let buffer = end(&mut queue, mapping);
    assert!(bench.writes(Iova::new(phys.get())));
    drop(buffer);
}

#[test]
fn an_unconfirmed_unmap_never_counts_as_done() {
    let timeout = InvalidationError::TimedOut { waited_ns: 7 };
    let bench = Bench::new(Policy::Strict);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    bench.iommu.queue().fail_next(2, timeout);
    // The unmap's own invalidation fails, and so does the one more that a commit asks for.
    let failed = queue.unmap(mapping).map(drop).unwrap_err();
    assert!(matches!(
        failed.error,
        DmaUnmapError::Unmap(UnmapError::Unconfirmed { error, .. }) if error == timeout
    ));
    assert!(failed.mapping.is_none() && queue.commit().is_err());
    assert!(bench.writes(iova), "indeed it is still reachable");
    // Its address is not handed out meanwhile.
    let other = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    assert_ne!(other.iova(), iova);
    // Now the hardware answers again.
    assert_eq!(queue.commit().unwrap().len(), 1);
    assert!(!bench.writes(iova));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn a_buffer_that_may_still_be_reached_is_never_freed() {
    let bench = Bench::new(Policy::Strict);
    let before = bench.memory.frames_in_use();
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let tables = bench.memory.frames_in_use() - before - 1;
    bench.iommu.queue().fail_next(u64::MAX, InvalidationError::Rejected { code: 3 });
    assert!(queue.unmap(mapping).is_err());
    drop(queue);
    assert_eq!(bench.memory.frames_in_use(), before + tables + 1, "leaked on purpose");
}

#[test]
fn a_queue_that_ends_frees_what_its_last_commit_has_made_unreachable() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(3 * PAGE).unwrap(), Direction::Bidirectional).unwrap();
    let with_buffer = bench.memory.frames_in_use();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    // The domain's timer asks again, too: it fails as long as this looks.
    bench.iommu.queue().fail_next(u64::MAX, InvalidationError::Rejected { code: 3 });
    assert!(queue.unmap(mapping).is_err());
    assert!(bench.writes(iova) && bench.memory.frames_in_use() == with_buffer);
    bench.iommu.queue().fail_next(0, InvalidationError::Rejected { code: 3 });
    drop(queue);
    assert!(!bench.writes(iova));
    assert_eq!(bench.memory.frames_in_use(), with_buffer - 3);
}

#[test]
fn unmapping_what_is_not_mapped_says_how_much_was() {
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let bench = Bench::new(policy);
        let list: Vec<_> = (0..4).map(page_of_memory).collect();
        let range =
            bench.domain.open(&list, Direction::Bidirectional.permissions(), Iova::new(u64::MAX)).unwrap();
        assert!(bench.writes(range.start()));
        let middle = IovaRange::new(Iova::new(range.start().get() + PAGE), PAGE).unwrap();
        bench.domain.unmap(middle).unwrap();
        // A hole in the middle: everything else goes all the same, unreachable at once.
        let error = bench.domain.unmap(range).unwrap_err();
        assert_eq!(error, UnmapError::NotMapped { range, unmapped: 3 * PAGE });
        for page in [0, 2, 3] {
            assert!(!bench.writes(Iova::new(range.start().get() + page * PAGE)));
        }
        assert_eq!(bench.domain.unmap(range), Err(UnmapError::NotMapped { range, unmapped: 0 }));
        // In lazy mode the hole waits for a flush: whose it was is not known, so the rest of the mapping is given up.
        let lost = if policy == Policy::Strict { 0 } else { 3 * PAGE };
        assert_eq!(bench.domain.stats().lost_iova_bytes, lost);
    }
}

#[test]
fn an_exhausted_space_takes_back_what_lazy_protection_holds() {
    let bench = Bench::new(LAZY_FOREVER);
    // Room below 1 MiB for 255 pages; most of them deferred.
    let limit = Iova::new((1 << 20) - 1);
    for n in 0..1000 {
        let mapped = bench.domain.open(&[page_of_memory(n)], Direction::FromDevice.permissions(), limit);
        bench.domain.unmap(mapped.unwrap()).unwrap();
    }
    let live: Vec<_> = (0..255)
        .map(|n| bench.domain.open(&[page_of_memory(n)], Direction::FromDevice.permissions(), limit).unwrap())
        .collect();
    let full =
        bench.domain.open(&[page_of_memory(0)], Direction::FromDevice.permissions(), limit).unwrap_err();
    assert!(full.to_string().contains("no room for 4096 bytes"), "{full}");
    live.into_iter().for_each(|range| bench.domain.unmap(range).unwrap());
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn threads_that_come_and_go_leave_nothing_behind() {
    let platform = StdPlatform::with_cpus(2);
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let bench = Bench::on(platform.clone(), policy);
        for _ in 0..20 {
            std::thread::scope(|scope| {
                // More threads than CPUs: one of them works without.
                for _ in 0..3 {
                    scope.spawn(|| {
                        for n in 0..50 {
                            let mapped = bench.domain.open(
                                &[page_of_memory(n)],
                                Direction::FromDevice.permissions(),
                                Iova::new(u64::MAX),
                            );
                            bench.domain.unmap(mapped.unwrap()).unwrap();
                        }
                    });
                }
            });
        }
        assert_eq!(bench.domain.stats().maps, 3000);
        assert_eq!(bench.domain.stats().unmaps, 3000);
    }
}

/// Two CPUs map, let the device write, unmap and try again, for every policy that promises something, while
/// the IOMMU walks. A stale translation or one that leads to somebody else's memory would show.
#[test]
fn concurrent_mappings_never_reach_each_other_s_memory() {
    for policy in [Policy::Strict, Policy::Lazy { window_ns: 1_000_000 }] {
        let bench = Bench::new(policy);
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                let bench = &bench;
                scope.spawn(move || {
                    let mut queue = direct(&bench.device);
                    for round in 0..2000u64 {
                        let len = 1 + round % 5 * PAGE;
                        let buffer = bench.memory.buffer(len).unwrap();
                        let mapping = queue.map(buffer, Direction::Bidirectional).unwrap();
                        let iova = mapping.iova();
                        let last = Iova::new(iova.get() + len - 1);
                        let mark = [thread, round as u8];
                        bench.iommu.dma_write(DEVICE, iova, &mark[..1]).unwrap();
                        bench.iommu.dma_write(DEVICE, last, &mark[1..]).unwrap();
                        let buffer = end(&mut queue, mapping);
                        let (mut head, mut tail) = ([0], [0]);
                        buffer.read(0, &mut head).unwrap();
                        buffer.read(len - 1, &mut tail).unwrap();
                        if len > 1 {
                            assert_eq!(head[0], mark[0]);
                        }
                        assert_eq!(tail[0], mark[1]);
                    }
                });
            }
        });
        assert_eq!(bench.iommu.stats().walks_into_freed_frames, 0);
        assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
    }
}
