//! A CPU that maps and unmaps in every way there is.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use portcullis::addr::{Direction, DmaSegment, Iova};
use portcullis::dma::{
    Ended, Mapping, NotMapped, QueueConfig, RawBatch, RawMapping, StrictRing, StrictRingConfig,
};
use portcullis_model::Iommu;
use portcullis_model::open::{OpenDevice, OpenRing};

use super::paint::{Findings, Paint, Painted};
use super::policies::Group;
use crate::played::Played;
use crate::queued::{QueueOf, end};
use crate::rig::{Mapper, PAGE};

/// What all threads share.
pub struct Shared<'a> {
    pub iommu: &'a Iommu,
    pub groups: &'a [Group],
    pub free: &'a Mutex<Vec<Painted>>,
    /// Pages that somebody was given, for the device.
    pub seen: &'a Mutex<Vec<Iova>>,
    pub findings: &'a Findings,
    pub over: &'a AtomicBool,
}

type Queue = QueueOf<Mapper, Played, Painted>;

/// A mapping that is alive.
enum Live {
    Typed(usize, Mapping<Painted>),
    Batched(Mapping<Painted>),
    Single(usize, Painted, Iova, u64),
    List(usize, Vec<Painted>, Vec<DmaSegment>),
    Ring(Painted, RawMapping),
}

pub struct Worker<'a> {
    shared: &'a Shared<'a>,
    random: u64,
    live: VecDeque<Live>,
    /// Buffers of one's own that are closed.
    own: VecDeque<Painted>,
    ring: StrictRing<Mapper, Played>,
    in_ring: Vec<(Painted, Iova)>,
    /// Of each group, whose mappings end one by one.
    direct: Vec<Queue>,
    batched: Queue,
    in_batch: Vec<Iova>,
    raw: RawBatch<Mapper, Played>,
    in_raw: Vec<(Painted, Iova)>,
}

impl<'a> Worker<'a> {
    pub fn new(shared: &'a Shared<'a>, seed: u64, own: Vec<Painted>) -> Self {
        let device = &shared.groups[0].device;
        let direct = shared.groups.iter().map(|group| group.nic.queue(QueueConfig::direct()).unwrap());
        Self {
            shared,
            random: seed | 1,
            live: VecDeque::new(),
            own: own.into(),
            ring: StrictRing::new(device, StrictRingConfig::new(64, PAGE, 8)).unwrap(),
            in_ring: Vec::new(),
            direct: direct.collect(),
            batched: shared.groups[0].nic.queue(QueueConfig::batched(8)).unwrap(),
            in_batch: Vec::new(),
            raw: RawBatch::new(device, 8).unwrap(),
            in_raw: Vec::new(),
        }
    }

    pub fn next(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    /// One step: maps something, or unmaps.
    pub fn step(&mut self) {
        let full = self.live.len() >= 24;
        if full || (self.next(2) == 0 && !self.live.is_empty()) {
            // The oldest as a rule.
            let at = if self.next(4) == 0 { self.next(self.live.len() as u64) as usize } else { 0 };
            let live = self.live.remove(at).unwrap();
            self.unmap(live);
        } else {
            self.map();
        }
    }

    /// A buffer that nobody may reach, and nobody has.
    fn buffer(&mut self) -> Option<Painted> {
        // The oldest of one's own: the device has had the longest time to try.
        let closed = (self.own.len() > 8).then(|| self.own.pop_front()).flatten();
        let closed = closed.or_else(|| self.shared.free.lock().unwrap().pop());
        let stale = |group: &Group| {
            let painted = group.stale.lock().unwrap().pop()?;
            // Else the device could go on at its old address after a strict unmap of the new one.
            group.device.domain().flush().unwrap();
            Some(painted)
        };
        let painted = closed.or_else(|| self.shared.groups.iter().find_map(stale));
        let mut painted = painted.or_else(|| self.own.pop_front())?;
        if painted.is_tampered_with() {
            Findings::count(&self.shared.findings.closed);
        }
        painted.paint(Paint::Open);
        Some(painted)
    }

    fn see(&self, iova: Iova, pages: u64) {
        let page = |number| Iova::new((iova.get() & !(PAGE - 1)) + number * PAGE);
        self.shared.seen.lock().unwrap().extend((0..pages).map(page));
    }

    fn map(&mut self) {
        let Some(painted) = self.buffer() else { return };
        let (group, way) = (self.next(self.shared.groups.len() as u64) as usize, self.next(4));
        let device = &self.shared.groups[group].device;
        let (pages, segment) = (painted.pages(), painted.segment());
        match way {
            0 => {
                let is_batched = self.next(3) == 0;
                let queue = if is_batched { &mut self.batched } else { &mut self.direct[group] };
                match queue.map(painted, Direction::Bidirectional) {
                    Ok(mapping) => {
                        self.see(mapping.iova(), pages);
                        self.check(mapping.buffer(), mapping.iova());
                        let live =
                            if is_batched { Live::Batched(mapping) } else { Live::Typed(group, mapping) };
                        self.live.push_back(live);
                    }
                    Err(NotMapped { buffer, .. }) => self.keep(buffer.unwrap()),
                }
            }
            1 => {
                let len = pages * PAGE - self.next(100);
                match device.open_single(segment.phys, len, Direction::Bidirectional) {
                    Ok(iova) => {
                        self.see(iova, pages);
                        self.live.push_back(Live::Single(group, painted, iova, len));
                    }
                    Err(_) => self.keep(painted),
                }
            }
            2 => {
                let mut list = vec![painted];
                list.extend((0..self.next(3)).filter_map(|_| self.buffer()).collect::<Vec<_>>());
                let segments: Vec<_> = list.iter().map(Painted::segment).collect();
                let mut view = vec![DmaSegment::default(); list.len()];
                match device.open_sg(&segments, Direction::Bidirectional, &mut view) {
                    Ok(used) => {
                        view.truncate(used);
                        view.iter().for_each(|segment| self.see(segment.iova, segment.len / PAGE));
                        self.live.push_back(Live::List(group, list, view));
                    }
                    Err(_) => list.into_iter().for_each(|painted| self.keep(painted)),
                }
            }
            _ => match self.ring.open(&[segment], Direction::Bidirectional) {
                Ok(mapping) => {
                    self.see(mapping.iova(), pages);
                    self.check(&painted, mapping.iova());
                    self.live.push_back(Live::Ring(painted, mapping));
                }
                Err(_) => self.keep(painted),
            },
        }
    }

    /// The device uses a new mapping, which must lead where it should.
    fn check(&self, painted: &Painted, iova: Iova) {
        if !painted.is_at(self.shared.iommu, iova) {
            Findings::count(&self.shared.findings.astray);
        }
    }

    /// The memory is nobody's any more.
    fn keep(&mut self, mut painted: Painted) {
        painted.paint(Paint::Closed);
        self.own.push_back(painted);
    }

    /// An unmap of `group` has returned just now.
    fn ended(&mut self, group: usize, mut painted: Painted, iova: Iova, strictly: bool) {
        let of = &self.shared.groups[group];
        painted.was_at = Some(iova);
        if strictly || of.is_strict_now() {
            painted.paint(Paint::Closed);
            self.shared.findings.try_buffer(self.shared.iommu, &painted);
            self.own.push_back(painted);
        } else {
            painted.paint(Paint::Stale);
            of.stale.lock().unwrap().push(painted);
        }
    }

    fn unmap(&mut self, live: Live) {
        let in_batch = self.next(3) == 0;
        match live {
            Live::Batched(mapping) => {
                self.in_batch.push(mapping.iova());
                let back: Vec<_> = match self.batched.unmap(mapping).unwrap() {
                    Ended::Flushed(buffers) => buffers.collect(),
                    _ => return,
                };
                self.batch_committed(back);
            }
            Live::Typed(group, mapping) => {
                let iova = mapping.iova();
                let painted = end(&mut self.direct[group], mapping);
                self.ended(group, painted, iova, false);
            }
            Live::Single(group, painted, iova, len) if in_batch => {
                let device = &self.shared.groups[group].device;
                device.unmap_single_in(&mut self.raw, iova, len).unwrap();
                self.in_raw.push((painted, iova));
                if self.raw.is_full() {
                    self.commit_raw();
                }
            }
            Live::Single(group, painted, iova, len) => {
                self.shared.groups[group].device.unmap_single(iova, len).unwrap();
                self.ended(group, painted, iova, false);
            }
            Live::List(group, list, view) => {
                self.shared.groups[group].device.unmap_sg(&view).unwrap();
                let strictly = self.shared.groups[group].is_strict_now();
                // Whole pages, one after another.
                let mut at = view[0].iova;
                for painted in list {
                    let len = painted.segment().len;
                    self.ended(group, painted, at, strictly);
                    at = at.checked_add(len).unwrap();
                }
            }
            Live::Ring(painted, mapping) => {
                self.in_ring.push((painted, mapping.iova()));
                if self.ring.unmap(mapping).unwrap() == Ended::Flushed(()) {
                    self.ring_committed();
                }
            }
        }
    }

    fn batch_committed(&mut self, buffers: Vec<Painted>) {
        let iovas = std::mem::take(&mut self.in_batch);
        buffers.into_iter().zip(iovas).for_each(|(painted, iova)| self.ended(0, painted, iova, true));
    }

    fn commit_raw(&mut self) {
        self.raw.commit().unwrap();
        let ended = std::mem::take(&mut self.in_raw);
        ended.into_iter().for_each(|(painted, iova)| self.ended(0, painted, iova, true));
    }

    fn ring_committed(&mut self) {
        let ended = std::mem::take(&mut self.in_ring);
        ended.into_iter().for_each(|(painted, iova)| self.ended(0, painted, iova, true));
    }

    /// Ends everything. The buffers that are closed.
    pub fn finish(mut self) -> Vec<Painted> {
        while let Some(live) = self.live.pop_front() {
            self.unmap(live);
        }
        let back = self.batched.commit().unwrap().collect();
        self.batch_committed(back);
        self.commit_raw();
        self.ring.commit().unwrap();
        self.ring_committed();
        assert_eq!(self.ring.arena().map_or(0, |arena| arena.in_use()), 0);
        self.own.into()
    }
}
