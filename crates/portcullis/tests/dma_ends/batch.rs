//! Batches: nothing is the driver's before the commit, everything is unreachable after it.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova};
use portcullis::dma::{BatchError, MOST_IN_BATCH, RawBatch, UnmapBatch};
use portcullis::domain::{Policy, UnmapError};
use portcullis::invalidation::InvalidationError;
use portcullis_model::Buffer;

use crate::bench::{Bench, LAZY_FOREVER, Mapper, PAGE};

const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

type Batch = UnmapBatch<Buffer, Mapper, portcullis::std_platform::StdPlatform>;

#[test]
fn buffers_come_back_after_one_wait_and_are_unreachable_then() {
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let bench = Bench::new(policy);
        let mapped: Vec<_> = (1..=5).map(|pages| bench.mapped(pages)).collect();
        let iovas: Vec<_> = mapped.iter().map(|mapped| mapped.iova()).collect();
        let places: Vec<_> = mapped.iter().map(|mapped| mapped.buffer().phys()).collect();
        let mut batch: Batch = UnmapBatch::new(&bench.device, 8);
        for mapped in mapped {
            batch.unmap(mapped).unwrap();
        }
        assert_eq!((batch.len(), batch.is_full(), bench.submissions()), (5, false, 0));
        // The batch is the unit: what is cached is still used, and that is why there is no buffer yet.
        assert!(bench.writes(iovas[0], 0));
        let buffers = batch.commit().unwrap();
        assert_eq!(bench.submissions(), 1);
        assert_eq!(buffers.iter().map(Buffer::phys).collect::<Vec<_>>(), places, "in order");
        for (iova, pages) in iovas.iter().zip(1..) {
            assert!((0..pages).all(|page| !bench.writes(*iova, page)), "{policy:?}");
        }
        let (stats, usage) = (bench.domain.stats(), bench.domain.usage());
        assert_eq!((stats.unmaps, stats.lost_iova_bytes, stats.flushes), (5, 0, 0));
        assert_eq!(usage.taken, usage.cached, "the addresses are back");
    }
}

#[test]
fn no_address_is_used_again_before_the_commit() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = UnmapBatch::new(&bench.device, 64);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..64 {
        let mapped = bench.mapped(1);
        assert!(seen.insert(mapped.iova()));
        batch.unmap(mapped).unwrap();
    }
    assert_eq!(batch.commit_and_drain().unwrap().count(), 64);
    assert!(batch.is_empty(), "and can be filled again");
    assert!(seen.contains(&bench.mapped(1).iova()));
}

#[test]
fn a_full_batch_refuses_and_the_mapping_lives_on() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = UnmapBatch::new(&bench.device, 2);
    batch.unmap(bench.mapped(1)).unwrap();
    batch.unmap(bench.mapped(1)).unwrap();
    let refused = batch.unmap(bench.mapped(1)).unwrap_err();
    assert_eq!(refused.error, BatchError::Full { most: 2 });
    assert!(bench.writes(refused.mapped.iova(), 0));
    assert_eq!(batch.commit_and_drain().unwrap().len(), 2);
    batch.unmap(refused.mapped).unwrap();
    let other = Bench::new(Policy::Strict);
    let refused = batch.unmap(other.mapped(1)).unwrap_err();
    assert_eq!(refused.error, BatchError::OtherDomain);
    assert!(other.writes(refused.mapped.iova(), 0));
    // Sizes are brought into bounds.
    let mut small: Batch = UnmapBatch::new(&bench.device, 0);
    small.unmap(bench.mapped(1)).unwrap();
    assert!(small.is_full());
    let mut large = RawBatch::new(&bench.device, usize::MAX);
    for number in 0..MOST_IN_BATCH as u64 {
        assert!(!large.is_full());
        bench.device.unmap_sg_in(&mut large, &bench.raw(number)).unwrap();
    }
    assert!(large.is_full());
    let view = bench.raw(1);
    let refused = bench.device.unmap_sg_in(&mut large, &view).unwrap_err();
    assert_eq!(refused, BatchError::Full { most: MOST_IN_BATCH });
    assert!(bench.reaches(view[0].iova));
}

#[test]
fn dropping_a_batch_commits_it() {
    let bench = Bench::new(Policy::Strict);
    let before = bench.memory.frames_in_use();
    let mapped = bench.mapped(3);
    let (iova, tables) = (mapped.iova(), bench.memory.frames_in_use() - before - 3);
    let mut batch = UnmapBatch::new(&bench.device, 8);
    batch.unmap(mapped).unwrap();
    drop(batch);
    assert!(!bench.writes(iova, 0));
    assert_eq!((bench.submissions(), bench.memory.frames_in_use()), (1, before + tables));
    let view = bench.raw(0);
    let mut batch = RawBatch::new(&bench.device, 8);
    bench.device.unmap_sg_in(&mut batch, &view).unwrap();
    drop(batch);
    assert!(!bench.reaches(view[0].iova));
    drop(Batch::new(&bench.device, 8));
    assert_eq!(bench.submissions(), 2, "nothing is asked for nothing");
}

#[test]
fn what_is_not_confirmed_keeps_the_buffers_until_it_is() {
    let bench = Bench::new(Policy::Strict);
    let mapped = bench.mapped(2);
    let iova = mapped.iova();
    let mut batch = UnmapBatch::new(&bench.device, 8);
    batch.unmap(mapped).unwrap();
    bench.iommu.queue().fail_next(1, BROKEN);
    let failed = batch.commit().map(drop).unwrap_err();
    assert_eq!(failed.error, BatchError::Unconfirmed { mappings: 1, error: BROKEN });
    assert!(bench.writes(iova, 1), "the device still has it, so nobody else may");
    assert_ne!(bench.mapped(2).iova(), iova, "nor its addresses");
    let mut batch = failed.batch;
    bench.iommu.queue().fail_next(1, BROKEN);
    assert_eq!(batch.commit_and_drain().map(drop), Err(failed.error));
    assert_eq!(batch.commit().unwrap().len(), 1);
    assert!(!bench.writes(iova, 0) && !bench.writes(iova, 1));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn a_batch_that_is_dropped_unconfirmed_leaks_and_quarantines() {
    let bench = Bench::new(Policy::Strict);
    let mapped = bench.mapped(1);
    let iova = mapped.iova();
    let in_use = bench.memory.frames_in_use();
    let mut batch = UnmapBatch::new(&bench.device, 8);
    batch.unmap(mapped).unwrap();
    bench.iommu.queue().fail_next(1, BROKEN);
    drop(batch);
    assert_eq!(bench.memory.frames_in_use(), in_use, "leaked on purpose");
    assert!(bench.writes(iova, 0));
    assert_ne!(bench.mapped(1).iova(), iova);
    bench.domain.flush().unwrap();
    assert!(!bench.writes(iova, 0));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0, "the flush ends the quarantine");
}

#[test]
fn by_number_what_is_not_mapped_is_said_and_spoils_nothing() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 8);
    let (good, half) = (bench.raw(0), bench.mapped(2));
    let first = half.iova();
    bench.device.unmap_single(first, PAGE).unwrap();
    bench.device.unmap_sg_in(&mut batch, &good).unwrap();
    let error = bench.device.unmap_single_in(&mut batch, first, 2 * PAGE).unwrap_err();
    assert!(matches!(error, BatchError::Unmap(UnmapError::NotMapped { unmapped: PAGE, .. })), "{error}");
    let error = bench.device.unmap_single_in(&mut batch, first, 0).unwrap_err();
    assert!(matches!(error, BatchError::Unmap(UnmapError::NoSuchRange { .. })), "{error}");
    bench.device.unmap_sg_in(&mut batch, &[]).unwrap();
    assert_eq!(batch.commit(), Ok(2));
    assert!(!bench.reaches(good[0].iova) && !bench.writes(first, 1));
    std::mem::forget(half);
}

#[test]
fn a_mapping_that_somebody_has_cut_ends_safely_in_a_batch() {
    // A lazy domain: what was cut away is still cached.
    let bench = Bench::new(LAZY_FOREVER);
    let mapped = bench.mapped(2);
    let iova = mapped.iova();
    bench.device.unmap_single(iova, PAGE).unwrap();
    assert!(bench.writes(iova, 0));
    let mut batch = UnmapBatch::new(&bench.device, 8);
    batch.unmap(mapped).unwrap();
    assert_eq!(batch.commit().unwrap().len(), 1);
    assert!(!bench.writes(iova, 0) && !bench.writes(iova, 1), "the buffer is back: all of it is unreachable");
}

#[test]
fn without_translation_a_batch_counts_and_waits_for_nothing() {
    let bench = Bench::new(Policy::Passthrough);
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let phys = buffer.phys();
    let mut batch = UnmapBatch::new(&bench.device, 1);
    batch.unmap(bench.device.map(buffer, Direction::ToDevice).unwrap()).unwrap();
    assert!(batch.is_full());
    assert_eq!(batch.commit().unwrap()[0].phys(), phys);
    let mut raw = RawBatch::new(&bench.device, 4);
    bench.device.unmap_single_in(&mut raw, Iova::new(phys.get()), PAGE).unwrap();
    assert_eq!((raw.commit(), bench.submissions()), (Ok(1), 0));
}

#[test]
fn a_batch_may_outlive_every_other_handle_of_the_domain() {
    let bench = Bench::new(Policy::Strict);
    let mut batch = UnmapBatch::new(&bench.device, 4);
    batch.unmap(bench.mapped(1)).unwrap();
    let Bench { iommu, memory, .. } = bench;
    let before = memory.frames_in_use();
    assert_eq!(batch.commit().unwrap().len(), 1);
    assert!(memory.frames_in_use() < before, "tables and buffer");
    assert_eq!(iommu.stats().submissions, 1);
    drop(Arc::clone(&memory));
}
