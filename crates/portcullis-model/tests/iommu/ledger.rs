//! Random histories of good and bad drivers: the exposure ledger agrees with one that examines every part of every page after every event.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::common::{DEVICE, DOMAIN, Mapper, PAGE, READ, iova, phys, rig_with, segment};
use portcullis::addr::IovaRange;
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis_model::{Exposed, Iommu, Segment};
use proptest::prelude::*;

const PAGES: u64 = 5;
const FRAMES: u64 = 3;
const FIRST_FRAME: u64 = 0x9_0000;
const PARTS: usize = 8;
/// Mappings begin and end at these; too few for the ledger to join any.
const EDGES: [u64; PARTS + 1] = [0, 1, 100, 777, 2048, 2049, 3000, 4095, 4096];

/// A device page that leads (or led) to a frame.
#[derive(Debug, Default)]
struct Translation {
    /// The live parts.
    live: Option<Range<usize>>,
    /// Since when each part is stale.
    stale: [Option<u64>; PARTS],
    /// Whether a now stale mapping could reach the rest of the page.
    neighbour: bool,
}

impl Translation {
    fn age(&self, parts: Range<usize>, now: u64) -> u64 {
        self.stale[parts].iter().flatten().map(|since| now - since).max().unwrap_or(0)
    }

    fn is_live(&self, part: usize) -> bool {
        self.live.as_ref().is_some_and(|parts| parts.contains(&part))
    }

    /// Whether the rest of the page can be reached: the tables of this test always lead there.
    fn has_neighbours(&self) -> bool {
        self.live.as_ref().is_some_and(|parts| parts.len() < PARTS)
            || self.neighbour && self.stale.iter().any(Option::is_some)
    }
}

/// By page and frame.
type Translations = BTreeMap<(u64, u64), Translation>;

/// Stale and neighbour bytes of every frame, at one instant.
fn rates(translations: &Translations) -> (u128, u128) {
    let (mut stale, mut neighbour) = (0, 0);
    for frame in 0..FRAMES {
        let here: Vec<_> =
            translations.iter().filter(|(key, _)| key.1 == frame).map(|(_, one)| one).collect();
        let open = here.iter().any(|one| one.has_neighbours());
        for part in 0..PARTS {
            let bytes = u128::from(EDGES[part + 1] - EDGES[part]);
            let is_live = here.iter().any(|one| one.is_live(part));
            let is_stale = !is_live && here.iter().any(|one| one.stale[part].is_some());
            stale += u128::from(is_stale) * bytes;
            neighbour += u128::from(open && !is_live && !is_stale) * bytes;
        }
    }
    (stale, neighbour)
}

fn parts_segment(page: u64, frame: u64, parts: &Range<usize>) -> Segment {
    let (start, end) = (EDGES[parts.start], EDGES[parts.end]);
    segment(page * PAGE + start, FIRST_FRAME + frame * PAGE + start, end - start)
}

#[derive(Debug, Clone)]
enum Event {
    Map {
        page: u64,
        frame: u64,
        parts: Range<usize>,
    },
    Unmap {
        page: u64,
        clear: bool,
        strict: bool,
    },
    Access {
        page: u64,
    },
    Flush,
    /// The device TLB.
    Forget {
        page: Option<u64>,
    },
}

/// With the time since the previous one.
fn event() -> impl Strategy<Value = (Event, u64)> {
    let parts = (0..PARTS, 1..=PARTS).prop_map(|(first, more)| first..(first + more).min(PARTS));
    let (clear, strict) = (prop::bool::weighted(0.9), prop::bool::weighted(0.3));
    let event = prop_oneof![
        4 => (0..PAGES, 0..FRAMES, parts).prop_map(|(page, frame, parts)| Event::Map { page, frame, parts }),
        3 => (0..PAGES, clear, strict).prop_map(|(page, clear, strict)| Event::Unmap { page, clear, strict }),
        4 => (0..PAGES).prop_map(|page| Event::Access { page }),
        1 => Just(Event::Flush),
        1 => prop::option::of(0..PAGES).prop_map(|page| Event::Forget { page }),
    ];
    (event, 0_u64..50)
}

/// The unit under test beside the oracle.
struct Run {
    iommu: Arc<Iommu>,
    mapper: Mapper,
    open: Translations,
    expected: Exposed,
    now: u64,
}

impl Run {
    /// The device has a TLB of this size, if any.
    fn new(device_tlb: Option<usize>) -> Self {
        let (iommu, mapper) = rig_with(|config| (config.iotlb_entries, config.iotlb_ways) = (2, 2));
        if let Some(entries) = device_tlb {
            iommu.attach_with_tlb(DEVICE, mapper.context(DOMAIN), entries);
        }
        Self { iommu, mapper, open: Translations::new(), expected: Exposed::default(), now: 0 }
    }

    fn wait(&mut self, pause: u64) {
        let (stale, neighbour) = rates(&self.open);
        self.expected.stale_byte_ns += stale * u128::from(pause);
        self.expected.neighbour_byte_ns += neighbour * u128::from(pause);
        self.now += pause;
        self.iommu.set_time(self.now);
    }

    fn stale_for(&mut self, time: u64) {
        self.expected.longest_stale_ns = self.expected.longest_stale_ns.max(time);
    }

    fn ask(&self, invalidation: Invalidation) {
        self.iommu.queue().invalidate(DOMAIN, invalidation).unwrap();
    }

    fn invalidate(&self, page: u64) {
        let range = IovaRange::new(iova(page * PAGE), PAGE).unwrap();
        self.ask(Invalidation::Range { range, leaf_only: true });
        self.forget(Some(page));
    }

    fn forget(&self, page: Option<u64>) {
        let range = page.map(|page| IovaRange::new(iova(page * PAGE), PAGE).unwrap());
        self.ask(Invalidation::DeviceTlb { device: DEVICE, range });
    }

    /// The live parts of the page, and their frame.
    fn live(&self, page: u64) -> Option<(u64, Range<usize>)> {
        self.open.iter().find_map(|(key, one)| {
            let parts = one.live.clone().filter(|_| key.0 == page)?;
            Some((key.1, parts))
        })
    }

    /// Whether cache or tables lead from the page to the frame: hardware may use either.
    fn leads(&self, page: u64, frame: u64) -> bool {
        let to = FIRST_FRAME + frame * PAGE;
        self.iommu.probe(DEVICE, iova(page * PAGE), READ) == Some(phys(to))
            || self.mapper.walk(page * PAGE, READ) == Some(to)
    }

    fn map(&mut self, page: u64, frame: u64, parts: Range<usize>) {
        let was_present = self.mapper.walk(page * PAGE, READ).is_some();
        self.mapper.map(page * PAGE, FIRST_FRAME + frame * PAGE);
        if was_present {
            self.invalidate(page);
        }
        self.iommu.observe_map(DEVICE, self.now, [parts_segment(page, frame, &parts)]);
        let translation = self.open.entry((page, frame)).or_default();
        let age = translation.age(parts.clone(), self.now);
        translation.stale[parts.clone()].fill(None);
        translation.live = Some(parts);
        self.stale_for(age);
    }

    fn unmap(&mut self, page: u64, clear: bool, strict: bool) {
        let Some((frame, parts)) = self.live(page) else { return };
        if clear {
            self.mapper.unmap(page * PAGE);
        }
        if strict {
            self.invalidate(page);
        }
        let reached = self.iommu.observe_unmap(DEVICE, self.now, [parts_segment(page, frame, &parts)]);
        assert_eq!(reached == 1, self.leads(page, frame));
        assert!(!(clear && strict) || reached == 0, "a strict unmap left something open");
        let translation = self.open.get_mut(&(page, frame)).unwrap();
        translation.neighbour |= parts.len() < PARTS;
        translation.live = None;
        translation.stale[parts].fill(Some(self.now));
    }

    /// Closes translations that have ended since the last event.
    fn close(&mut self) {
        let keys: Vec<_> = self.open.keys().copied().collect();
        for (page, frame) in keys {
            if !self.leads(page, frame)
                && let Some(translation) = self.open.get_mut(&(page, frame))
            {
                let age = translation.age(0..PARTS, self.now);
                translation.stale = [None; PARTS];
                translation.neighbour = false;
                self.stale_for(age);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_is_exact(
        device_tlb in prop::option::of(1_usize..5),
        events in prop::collection::vec(event(), 1..150),
    ) {
        let mut run = Run::new(device_tlb);
        for (event, pause) in events {
            run.wait(pause);
            match event {
                Event::Map { page, frame, parts } if run.live(page).is_none() => run.map(page, frame, parts),
                Event::Map { .. } => {}
                Event::Unmap { page, clear, strict } => run.unmap(page, clear, strict),
                Event::Access { page } => _ = run.iommu.access(DEVICE, iova(page * PAGE), 1, READ),
                Event::Flush => run.ask(Invalidation::Domain),
                Event::Forget { page } => run.forget(page),
            }
            run.close();
        }
        let ages: Vec<_> = run.open.values().map(|one| one.age(0..PARTS, run.now)).collect();
        ages.into_iter().for_each(|age| run.stale_for(age));
        prop_assert_eq!(run.iommu.exposure(DEVICE), run.expected, "before settling");
        run.iommu.set_time(run.now);
        prop_assert_eq!(run.iommu.exposure(DEVICE), run.expected);
    }
}
