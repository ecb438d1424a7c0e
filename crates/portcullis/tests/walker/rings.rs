//! Rings, batches, and the steps of mappings over tables of any geometry: what is live leads to its own memory, and what was
//! committed leads nowhere, by tables and caches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, Ended, MOST_IN_BATCH, RawBatch, RawMapping, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy, Refused, Reserved};
use portcullis::invalidation::Gather;
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::pgtable::{Format, Layout, PageTable};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use super::cases::Case;
use super::machine::PLATFORM;
use crate::dice::Dice;

const DEVICE: DeviceId = DeviceId(3);

type Device<X> = DmaDevice<TableMapper<Arc<Memory>, Queue, X>, Arc<StdPlatform>>;

/// A domain over tables of one geometry, and what its device should reach.
pub struct Queues<X: Format> {
    case: Case<X>,
    iommu: Arc<Iommu>,
    device: Device<X>,
    /// Pages that are mapped: the memory, and what is allowed.
    live: BTreeMap<u64, (u64, Permissions)>,
    /// Pages that were, and were committed since.
    ended: BTreeSet<u64>,
}

impl<X: Format> Queues<X> {
    pub fn new(case: Case<X>) -> Self {
        let memory = Memory::new(64 << 20);
        let table = PageTable::for_cpus(Arc::clone(&memory), case.format, PLATFORM.cpus()).unwrap();
        let iommu = Iommu::new(IommuConfig::new(memory));
        let domain = DomainId(1);
        iommu.attach(DEVICE, Context::Translated { domain, root: table.root(), format: case.walker });
        let mapper = TableMapper::new(table, iommu.queue(), domain, Vec::new());
        let domain = Domain::new(Arc::clone(&PLATFORM), mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        Self { case, iommu, device, live: BTreeMap::new(), ended: BTreeSet::new() }
    }

    const GRANULE: u64 = 1 << X::GRANULE_SHIFT;

    fn note(&mut self, first: Iova, list: &[PhysSegment], direction: Direction) {
        let pages = list.iter().flat_map(|piece| {
            (0..piece.len).step_by(Self::GRANULE as usize).map(|offset| piece.phys.get() + offset)
        });
        for (at, phys) in (first.get()..).step_by(Self::GRANULE as usize).zip(pages) {
            self.ended.remove(&at);
            assert_eq!(self.live.insert(at, (phys, direction.permissions())), None);
        }
    }

    /// What was live there is committed, or waits: then it may or may not be reached.
    fn forget(&mut self, first: u64, len: u64, is_committed: bool) {
        for at in (first..first + len).step_by(Self::GRANULE as usize) {
            assert!(self.live.remove(&at).is_some());
            if is_committed {
                self.ended.insert(at);
            }
        }
    }

    #[track_caller]
    fn look(&self) {
        let name = self.case.format;
        for (&at, &(phys, permissions)) in &self.live {
            let kept = self.case.kept(permissions.into()).permissions;
            for access in [Permissions::READ, Permissions::WRITE] {
                let mut reached = None;
                let outcome = self
                    .iommu
                    .translate_each(DEVICE, Iova::new(at), 1, access, |_, phys, _| reached = Some(phys));
                assert_eq!(outcome.is_ok(), kept.allows(access), "{name:?}: {at:#x} {outcome:?}");
                assert_eq!(reached, kept.allows(access).then_some(PhysAddr::new(phys)), "{name:?}: {at:#x}");
            }
        }
        for &at in &self.ended {
            for access in [Permissions::READ, Permissions::WRITE] {
                let reached = self.iommu.probe(DEVICE, Iova::new(at), access);
                assert_eq!(reached, None, "{name:?}: {at:#x} was unmapped");
            }
        }
    }

    /// A list of memory, in pieces, the first often aligned to a large page; and over an edge, sometimes.
    fn list(&self, dice: &mut Dice, most: u64) -> Vec<PhysSegment> {
        let memory = self.case.format.last_phys().get() + 1;
        let piece = |dice: &mut Dice| {
            let len = Self::GRANULE * (1 + dice.below(most));
            let phys = match dice.below(4) {
                0 => memory - len,
                1 if memory > 1 << 48 => (1 << 48) - Self::GRANULE,
                2 => dice.below(memory >> 25) << 24,
                _ => dice.below(memory / 2 / Self::GRANULE) * Self::GRANULE,
            };
            PhysSegment { phys: PhysAddr::new(phys), len }
        };
        (0..1 + dice.below(3) / 2).map(|_| piece(dice)).collect()
    }

    /// As many steps with a ring, and as many with a batch. Whether there was a ring.
    pub fn walk(&mut self, steps: u64, dice: &mut Dice) -> bool {
        let config = StrictRingConfig::new(64, Self::GRANULE, 3);
        let device = self.device.clone();
        let ring = StrictRing::new(&device, config);
        let has_ring = ring.is_ok();
        // A ring has lowest tables to itself, and address 0 is nobody's.
        assert!(
            has_ring || self.case.format.input_bits() <= X::GRANULE_SHIFT + X::INDEX_BITS,
            "{:?}",
            ring.err()
        );
        if let Ok(mut ring) = ring {
            self.walk_ring(&mut ring, steps, dice);
            self.walk_steps(steps / 4, dice);
            ring.commit().unwrap();
            assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
            drop(ring);
        }
        self.walk_batches(steps, dice);
        self.device.domain().reclaim().unwrap();
        self.look();
        assert_eq!(self.device.domain().stats().lost_iova_bytes, 0);
        has_ring
    }

    fn walk_ring(
        &mut self,
        ring: &mut StrictRing<TableMapper<Arc<Memory>, Queue, X>, Arc<StdPlatform>>,
        steps: u64,
        dice: &mut Dice,
    ) {
        let (mut mapped, mut waiting) = (Vec::<(RawMapping, u64, u64)>::new(), Vec::new());
        for _ in 0..steps {
            if dice.below(5) < 3 && mapped.len() < 12 {
                // One page as a rule: what goes by the short way.
                let most = if dice.one_in(3) { 5 } else { 1 };
                let (list, direction) = (self.list(dice, most), Direction::ALL[dice.below(3) as usize]);
                // SAFETY: what is reached through the software IOMMU is simulated memory, where nothing is unsound.
                let Ok(mapping) = (unsafe { ring.map(&list, direction) }) else {
                    continue;
                };
                let len = list.iter().map(|piece| piece.len).sum();
                // The places of those that wait are not given out.
                assert!(waiting.iter().all(
                    |(at, other)| mapping.iova().get() >= at + other || *at >= mapping.iova().get() + len
                ));
                self.note(mapping.iova(), &list, direction);
                let first = mapping.iova().get();
                mapped.push((mapping, first, len));
            } else if !mapped.is_empty() {
                let index = if dice.one_in(3) { dice.below(mapped.len() as u64) as usize } else { 0 };
                let (mapping, first, len) = mapped.remove(index);
                self.forget(first, len, false);
                waiting.push((first, len));
                match ring.unmap(mapping).unwrap() {
                    Ended::Done(()) => unreachable!("a ring ends nothing by itself"),
                    Ended::Pending => {}
                    Ended::Flushed(()) => self.end(&mut waiting),
                }
            }
            self.look();
        }
        for (mapping, first, len) in mapped {
            let _ = ring.unmap(mapping).unwrap();
            self.forget(first, len, false);
            waiting.push((first, len));
        }
        ring.commit().unwrap();
        self.end(&mut waiting);
        self.look();
    }

    fn end(&mut self, waiting: &mut Vec<(u64, u64)>) {
        for (first, len) in waiting.drain(..) {
            self.ended.extend((first..first + len).step_by(Self::GRANULE as usize));
        }
    }

    /// Lists that are linked as a whole, and removed in parts by the mapper: what is in between stays.
    fn walk_steps(&mut self, steps: u64, dice: &mut Dice) {
        let domain = self.device.domain().clone();
        for _ in 0..steps {
            let list = self.list(dice, 30);
            let len: u64 = list.iter().map(|piece| piece.len).sum();
            let reserved = domain.reserve(len, Iova::new(self.device.mask())).unwrap();
            let mut gather = Gather::new();
            // SAFETY: what is reached through the software IOMMU is simulated memory, where nothing is unsound.
            let linked = unsafe { reserved.link(&list, Permissions::READ_WRITE, &mut gather) };
            let range = linked.map_err(Refused::end).unwrap().into_range();
            self.note(range.start(), &list, Direction::Bidirectional);
            self.look();
            let pages = len / Self::GRANULE;
            let (from, first) = (dice.below(pages), range.start().get());
            let to = from + 1 + dice.below(pages - from);
            // The middle first, then what is beside it.
            for (from, to) in [(from, to), (0, from), (to, pages)] {
                if from == to {
                    continue;
                }
                let (first, len) = (first + from * Self::GRANULE, (to - from) * Self::GRANULE);
                let part = super::machine::range(first, len);
                assert_eq!(domain.mapper().unmap(&*PLATFORM, part, &mut gather).bytes, len);
                domain.confirm(&gather).unwrap();
                gather.clear();
                self.forget(first, len, true);
                self.look();
            }
            Reserved::from_range(&domain, range).free();
        }
    }

    fn walk_batches(&mut self, steps: u64, dice: &mut Dice) {
        let device = self.device.clone();
        let mut batch = RawBatch::new(&device, MOST_IN_BATCH).unwrap();
        let (mut mapped, mut waiting) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            match dice.below(8) {
                0..4 => {
                    let (piece, direction) = (self.list(dice, 9)[0], Direction::ALL[dice.below(3) as usize]);
                    // SAFETY: what is reached through the software IOMMU is simulated memory, where nothing is unsound.
                    let first = unsafe { device.map_single(piece.phys, piece.len, direction) }.unwrap();
                    self.note(first, &[piece], direction);
                    mapped.push((first, piece.len));
                }
                4..7 if !mapped.is_empty() => {
                    let (first, len) = mapped.swap_remove(dice.below(mapped.len() as u64) as usize);
                    self.forget(first.get(), len, false);
                    device.unmap_single_in(&mut batch, first, len).unwrap();
                    waiting.push((first.get(), len));
                }
                7 => {
                    batch.commit().unwrap();
                    self.end(&mut waiting);
                }
                _ => {}
            }
            self.look();
        }
        for (first, len) in mapped {
            device.unmap_single_in(&mut batch, first, len).unwrap();
            self.forget(first.get(), len, false);
            waiting.push((first.get(), len));
        }
        batch.commit().unwrap();
        self.end(&mut waiting);
    }
}
