//! Batches: nothing is the driver's before the commit, everything is unreachable after it.

use portcullis::addr::{Direction, Iova};
use portcullis::dma::{BatchError, DmaUnmapError, Ended, MOST_IN_BATCH, Mapping, RawBatch};
use portcullis::domain::{Policy, UnmapError};
use portcullis::invalidation::InvalidationError;
use portcullis_model::Buffer;
use portcullis_model::open::OpenDevice;

use crate::ends::bench::{Bench, BufferQueue, LAZY_FOREVER, PAGE, page};

const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

/// Unmaps into a batch that is not complete then.
fn unmap(queue: &mut BufferQueue, mapping: Mapping<Buffer>) {
    assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
}

#[test]
fn buffers_come_back_after_one_wait_and_are_unreachable_then() {
    for policy in [Policy::Strict, LAZY_FOREVER] {
        for commits in [true, false] {
            let bench = Bench::new(policy);
            let mut queue = bench.batched(if commits { 8 } else { 5 });
            let mut mappings: Vec<_> = (1..=5).map(|pages| bench.mapped(&mut queue, pages)).collect();
            let iovas: Vec<_> = mappings.iter().map(Mapping::iova).collect();
            let places: Vec<_> = mappings.iter().map(|mapping| mapping.buffer().phys()).collect();
            let last = mappings.pop().unwrap();
            mappings.into_iter().for_each(|mapping| unmap(&mut queue, mapping));
            assert_eq!((queue.waiting(), bench.submissions()), (4, 0));
            // The batch is not complete: the device still writes through its cached translation, so no buffer has come back.
            assert!(bench.writes(iovas[0], 0));
            let buffers: Vec<_> = if commits {
                unmap(&mut queue, last);
                queue.commit().unwrap().collect()
            } else {
                let Ok(Ended::Flushed(buffers)) = queue.unmap(last) else { panic!("five are a batch") };
                buffers.collect()
            };
            assert_eq!(bench.submissions(), 1);
            assert_eq!(buffers.iter().map(Buffer::phys).collect::<Vec<_>>(), places, "in order");
            for (iova, pages) in iovas.iter().zip(1..) {
                assert!((0..pages).all(|page| !bench.writes(*iova, page)), "{policy:?}");
            }
            let stats = bench.domain.stats();
            assert_eq!((stats.unmaps, stats.lost_iova_bytes, stats.flushes), (5, 0, 0));
            assert_eq!(stats.taken_iova_bytes, stats.cached_iova_bytes, "the addresses are back");
        }
    }
}

#[test]
fn no_address_is_used_again_before_the_commit() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = bench.batched(65);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..64 {
        let mapping = bench.mapped(&mut queue, 1);
        assert!(seen.insert(mapping.iova()));
        unmap(&mut queue, mapping);
    }
    assert_eq!(queue.commit().unwrap().count(), 64);
    assert_eq!(queue.waiting(), 0);
    assert!(seen.contains(&bench.mapped(&mut queue, 1).iova()));
}

#[test]
fn a_full_batch_refuses_and_the_mapping_lives_on() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 0).unwrap();
    bench.device.unmap_single_in(&mut batch, bench.raw(0)[0].iova, PAGE).unwrap();
    assert!(batch.is_full(), "sizes are brought into bounds");
    assert_eq!(batch.commit(), Ok(1));
    let other = Bench::new(Policy::Strict);
    let view = other.raw(1);
    let refused = other.device.unmap_single_in(&mut batch, view[0].iova, PAGE).unwrap_err();
    assert_eq!(refused, BatchError::OtherDomain);
    assert!(other.reaches(view[0].iova) && batch.is_empty());
    let mut large = RawBatch::new(&bench.device, usize::MAX).unwrap();
    for number in 0..MOST_IN_BATCH as u64 {
        assert!(!large.is_full());
        bench.device.unmap_single_in(&mut large, bench.raw(number)[0].iova, PAGE).unwrap();
    }
    assert!(large.is_full());
    let view = bench.raw(1);
    let refused = bench.device.unmap_single_in(&mut large, view[0].iova, PAGE).unwrap_err();
    assert_eq!(refused, BatchError::Full { most: MOST_IN_BATCH });
    assert!(bench.reaches(view[0].iova));
}

#[test]
fn dropping_a_batch_commits_it() {
    let bench = Bench::new(Policy::Strict);
    let before = bench.memory.frames_in_use();
    let mut queue = bench.batched(8);
    let mapping = bench.mapped(&mut queue, 3);
    let (iova, tables) = (mapping.iova(), bench.memory.frames_in_use() - before - 3);
    unmap(&mut queue, mapping);
    drop(queue);
    assert!(!bench.writes(iova, 0));
    assert_eq!((bench.submissions(), bench.memory.frames_in_use()), (1, before + tables));
    let view = bench.raw(0);
    let mut batch = RawBatch::new(&bench.device, 8).unwrap();
    bench.device.unmap_single_in(&mut batch, view[0].iova, PAGE).unwrap();
    drop(batch);
    assert!(!bench.reaches(view[0].iova));
    drop(bench.batched(8));
    assert_eq!(bench.submissions(), 2, "nothing is asked for nothing");
}

#[test]
fn what_is_not_confirmed_keeps_the_buffers_until_it_is() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = bench.batched(8);
    let mapping = bench.mapped(&mut queue, 2);
    let iova = mapping.iova();
    unmap(&mut queue, mapping);
    for _ in 0..2 {
        // The domain's timer asks again, too: it fails as long as this looks.
        bench.iommu.queue().fail_next(u64::MAX, BROKEN);
        let failed = queue.commit().map(drop).unwrap_err();
        assert_eq!(failed, DmaUnmapError::Unconfirmed { error: BROKEN });
        assert!(bench.writes(iova, 1), "the device still has it, so nobody else may");
        assert_ne!(bench.mapped(&mut queue, 2).iova(), iova, "nor its addresses");
    }
    bench.iommu.queue().fail_next(0, BROKEN);
    assert_eq!(queue.commit().unwrap().len(), 1);
    assert!(!bench.writes(iova, 0) && !bench.writes(iova, 1));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn a_batch_that_is_dropped_unconfirmed_leaks_and_quarantines() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = bench.batched(8);
    let mapping = bench.mapped(&mut queue, 1);
    let iova = mapping.iova();
    let in_use = bench.memory.frames_in_use();
    unmap(&mut queue, mapping);
    bench.iommu.queue().fail_next(u64::MAX, BROKEN);
    drop(queue);
    bench.iommu.queue().fail_next(0, BROKEN);
    assert_eq!(bench.memory.frames_in_use(), in_use, "leaked on purpose");
    assert!(bench.writes(iova, 0));
    assert_ne!(bench.mapped(&mut bench.batched(8), 1).iova(), iova);
    bench.domain.flush().unwrap();
    assert!(!bench.writes(iova, 0));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0, "the flush ends the quarantine");
}

#[test]
fn by_number_what_is_not_mapped_is_said_and_spoils_nothing() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 8).unwrap();
    let good = bench.raw(0);
    let first = bench.device.open_single(page(2).phys, 2 * PAGE, Direction::Bidirectional).unwrap();
    let second = Iova::new(first.get() + PAGE);
    assert!(bench.reaches(second));
    bench.device.unmap_single(first, PAGE).unwrap();
    bench.device.unmap_single_in(&mut batch, good[0].iova, PAGE).unwrap();
    let error = bench.device.unmap_single_in(&mut batch, first, 2 * PAGE).unwrap_err();
    assert!(matches!(error, BatchError::Unmap(UnmapError::NotMapped { unmapped: PAGE, .. })), "{error}");
    let error = bench.device.unmap_single_in(&mut batch, first, 0).unwrap_err();
    assert!(matches!(error, BatchError::Unmap(UnmapError::NoSuchRange { .. })), "{error}");
    assert_eq!(batch.commit(), Ok(2));
    assert!(!bench.reaches(good[0].iova) && !bench.reaches(second));
}

#[test]
fn a_mapping_that_somebody_has_cut_ends_safely_in_a_batch() {
    // A lazy domain: what was cut away is still cached.
    let bench = Bench::new(LAZY_FOREVER);
    let mut queue = bench.batched(8);
    let mapping = bench.mapped(&mut queue, 2);
    let iova = mapping.iova();
    bench.device.unmap_single(iova, PAGE).unwrap();
    assert!(bench.writes(iova, 0));
    let failed = queue.unmap(mapping).map(drop).unwrap_err();
    let cut = matches!(failed.error, DmaUnmapError::Unmap(UnmapError::NotMapped { unmapped: PAGE, .. }));
    assert!(cut && failed.mapping.is_none(), "{failed}");
    assert_eq!((queue.waiting(), queue.commit().unwrap().len()), (1, 1));
    assert!(!bench.writes(iova, 0) && !bench.writes(iova, 1), "the buffer is back: all of it is unreachable");
}

#[test]
fn without_translation_a_batch_counts_and_waits_for_nothing() {
    let bench = Bench::new(Policy::Passthrough);
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let phys = buffer.phys();
    let mut queue = bench.batched(2);
    let mapping = queue.map(buffer, Direction::ToDevice).unwrap();
    unmap(&mut queue, mapping);
    assert_eq!(queue.commit().unwrap().next().unwrap().phys(), phys);
    let mut raw = RawBatch::new(&bench.device, 4).unwrap();
    bench.device.unmap_single_in(&mut raw, Iova::new(phys.get()), PAGE).unwrap();
    assert_eq!((raw.commit(), bench.submissions()), (Ok(1), 0));
}

#[test]
fn a_batch_may_outlive_every_other_handle_of_the_domain() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = bench.batched(4);
    let mapping = bench.mapped(&mut queue, 1);
    unmap(&mut queue, mapping);
    let Bench { iommu, memory, domain, device } = bench;
    drop((domain, device));
    let before = memory.frames_in_use();
    assert_eq!(queue.commit().unwrap().len(), 1);
    assert_eq!(memory.frames_in_use(), before - 1, "the buffer");
    drop(queue);
    assert!(memory.frames_in_use() < before - 1, "and the tables");
    assert_eq!(iommu.stats().submissions, 1);
}

#[test]
fn a_commit_that_fails_leaves_all_waiting() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 8).unwrap();
    let buffers = [(); 3].map(|()| bench.memory.buffer(PAGE).unwrap());
    for buffer in &buffers {
        let iova = bench.device.open_single(buffer.phys(), PAGE, Direction::FromDevice).unwrap();
        bench.device.unmap_single_in(&mut batch, iova, PAGE).unwrap();
    }
    bench.iommu.queue().fail_next(1, BROKEN);
    assert_eq!(batch.commit(), Err(DmaUnmapError::Unconfirmed { error: BROKEN }));
    assert_eq!((batch.len(), batch.commit(), batch.len()), (3, Ok(3), 0));
}
