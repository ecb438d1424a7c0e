//! A ring against a plain model: a list of what is mapped, what waits, and what has ended.

use portcullis::addr::{Direction, Iova, PhysAddr, PhysSegment};
use portcullis::dma::{Ended, RawMapping, StrictRing, StrictRingConfig};
use portcullis::domain::Policy;
use portcullis::invalidation::InvalidationError;
use portcullis_model::open::OpenRing;
use proptest::prelude::*;

use crate::ends::bench::{Bench, DEVICE, PAGE};

/// A descriptor as the model sees it: where the device finds which page of memory.
#[derive(Clone)]
struct Pages {
    first: Iova,
    pages: Vec<PhysAddr>,
}

impl Pages {
    fn overlaps(&self, other: &Self) -> bool {
        let end = |pages: &Self| pages.first.get() + pages.pages.len() as u64 * PAGE;
        self.first.get() < end(other) && other.first.get() < end(self)
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// As many pages, in one piece or in as many.
    Map(usize, bool),
    Unmap(usize),
    Commit,
    Fail,
    Reclaim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1..6_usize, any::<bool>()).prop_map(|(pages, whole)| Step::Map(pages, whole)),
        // In order as a rule.
        4 => Just(Step::Unmap(0)),
        2 => any::<usize>().prop_map(Step::Unmap),
        1 => Just(Step::Commit),
        1 => Just(Step::Fail),
        1 => Just(Step::Reclaim),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn a_ring_is_what_a_plain_model_says(steps in steps(), batch in 1..9_usize, descriptors in 4..40_u32) {
        let bench = Bench::new(Policy::Strict);
        let config = StrictRingConfig::new(descriptors, PAGE, batch);
        let mut ring = StrictRing::new(&bench.device, config).unwrap();
        let mut live: Vec<(RawMapping, Pages)> = Vec::new();
        let mut waiting: Vec<Pages> = Vec::new();
        let mut ended: Vec<Pages> = Vec::new();
        let mut next = 0;
        for step in steps {
            match step {
                Step::Map(pages, whole) => {
                    // Never the same memory; in pieces, never neighbours.
                    let list: Vec<_> = (0..pages as u64)
                        .map(|n| next + n * if whole { 1 } else { 2 })
                        .map(|n| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + n * PAGE), len: PAGE })
                        .collect();
                    let piece = [PhysSegment { len: pages as u64 * PAGE, ..list[0] }];
                    next += 2 * pages as u64;
                    match ring.open(if whole { &piece } else { &list }, Direction::Bidirectional) {
                        Ok(mapping) => {
                            let pages = list.iter().map(|segment| segment.phys).collect();
                            let pages = Pages { first: mapping.iova(), pages };
                            let taken = live.iter().map(|(_, pages)| pages).chain(&waiting);
                            prop_assert!(!taken.into_iter().any(|taken| taken.overlaps(&pages)));
                            ended.retain(|old| !old.overlaps(&pages));
                            live.push((mapping, pages));
                        }
                        Err(error) => prop_assert!(error.is_full() || pages as u32 > descriptors, "{}", error),
                    }
                }
                Step::Unmap(which) if !live.is_empty() => {
                    let (mapping, pages) = live.remove(which % live.len());
                    waiting.push(pages);
                    let complete = waiting.len() == batch;
                    let result = ring.unmap(mapping).unwrap();
                    prop_assert_eq!(result == Ended::Flushed(()), complete);
                    if complete {
                        ended.append(&mut waiting);
                    }
                }
                Step::Unmap(_) => {}
                Step::Commit => {
                    prop_assert_eq!(ring.commit(), Ok(waiting.len()));
                    ended.append(&mut waiting);
                }
                Step::Reclaim => {
                    bench.domain.reclaim().unwrap();
                }
                Step::Fail => {
                    bench.iommu.queue().fail_next(1, InvalidationError::TimedOut { waited_ns: 1 });
                    prop_assert_eq!(ring.commit().is_err(), !waiting.is_empty());
                    bench.iommu.queue().fail_next(0, InvalidationError::Abandoned);
                }
            }
            prop_assert_eq!(ring.waiting(), waiting.len());
            prop_assert_eq!(ring.arena().unwrap().reservations(), live.len() + waiting.len());
            for (at, phys) in live.iter().flat_map(|(_, pages)| places(pages)) {
                let mut reached = None;
                let use_it = |_, phys, _| reached = Some(phys);
                let result = bench.iommu.translate_each(DEVICE, at, 1, Direction::ToDevice.permissions(), use_it);
                prop_assert!(result.is_ok());
                prop_assert_eq!(reached, Some(phys), "what is live leads to its own memory");
            }
            for (at, phys) in waiting.iter().flat_map(places) {
                let reached = bench.iommu.probe(DEVICE, at, Direction::ToDevice.permissions());
                prop_assert!(reached.is_none_or(|reached| reached == phys), "never to anybody else's");
            }
            for (at, _) in ended.iter().flat_map(places) {
                let reached = bench.iommu.probe(DEVICE, at, Direction::ToDevice.permissions());
                prop_assert_eq!(reached, None, "what has ended leads nowhere");
            }
        }
        for (mapping, _) in live {
            let _ = ring.unmap(mapping).unwrap();
        }
        ring.commit().unwrap();
        assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
        drop(ring);
        prop_assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
        prop_assert_eq!(bench.domain.stats().maps, bench.domain.stats().unmaps);
    }
}

fn places(pages: &Pages) -> impl Iterator<Item = (Iova, PhysAddr)> {
    let first = pages.first;
    pages.pages.iter().zip(0..).map(move |(phys, n)| (Iova::new(first.get() + n * PAGE), *phys))
}
