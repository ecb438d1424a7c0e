//! Mappings through bounce buffers: of a domain's pool, and of a swiotlb pool. Both sides see each other's bytes.

use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, Way};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb};
use portcullis::heap::Shared;
use portcullis::pgtable::Format;
use portcullis_model::open::OpenPool;
use portcullis_model::{Buffer, Memory};

use super::Clocked;
use super::model::{DEVICE, PAGE};
use super::world::{Mapper, Pool, World};
use crate::input::Input;

/// A mapping of the domain's pool.
pub struct Bouncing {
    buffer: Buffer,
    offset: u64,
    direction: Direction,
    view: Vec<DmaSegment>,
    iova: Iova,
    span: u64,
    /// Bytes of the original may have taken the place of the device's.
    mixed: bool,
}

/// A mapping of the swiotlb pool.
pub struct Slots {
    buffer: Buffer,
    direction: Direction,
    phys: PhysAddr,
    len: u64,
}

/// The pools and what is mapped through them.
pub struct Bounced<X: Format> {
    pub device: BounceDevice<Mapper<X>, Arc<Clocked>, Arc<Memory>>,
    pub pool: Shared<Pool<X>>,
    pub swiotlb: Shared<Swiotlb<Arc<Clocked>, Arc<Memory>>>,
    pub live: Vec<Bouncing>,
    pub slots: Vec<Slots>,
}

impl<X: Format> World<X> {
    pub fn bounced_step(&mut self, way: u8, input: &mut Input<'_>) {
        match way {
            42..=43 => self.map_bounced(input),
            44..=45 => {
                let Some(which) = input.which(self.bounced.live.len()) else { return };
                self.unmap_bounced(which);
            }
            46 => {
                let Some(which) = input.which(self.bounced.live.len()) else { return };
                let Bouncing { iova, span, .. } = self.bounced.live[which];
                let (at, len) = match input.flag() {
                    true => (input.below(span), 1),
                    false => (input.number(), input.number()),
                };
                let to_cpu = input.flag();
                self.bounced.live[which].mixed |= !to_cpu;
                let pool = &self.bounced.pool;
                let result =
                    if to_cpu { pool.sync_cpu(iova, at, len) } else { pool.sync_device(iova, at, len) };
                assert!(
                    result.is_ok()
                        || self.tainted
                        || at.checked_add(len).is_none_or(|end| end > span || len == 0)
                );
            }
            47 => assert!(self.bounced.pool.trim(input.number()).is_ok() || self.weak),
            48..=49 => self.map_slots(input),
            50 => {
                let Some(which) = input.which(self.bounced.slots.len()) else { return };
                self.unmap_slots(which);
            }
            _ => {
                self.bounced.swiotlb.trim();
                if input.flag() {
                    let (phys, len) = (PhysAddr::new(input.number()), input.number());
                    // SAFETY: no mapping of this thread's is under way; and memory is simulated, its bytes atomic.
                    let result = unsafe { self.bounced.swiotlb.sync_for_cpu(phys, len) };
                    assert!(result.is_err() || self.bounced.swiotlb.holds(phys));
                }
            }
        }
    }

    fn map_bounced(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.free.len()) else { return };
        let direction = input.direction();
        let buffer = self.free.swap_remove(which);
        let offset = input.below(PAGE);
        let len = 1 + input.below(buffer.len() - offset);
        let attributes = Attributes { copy_in: input.flag() };
        buffer.fill(0x5a);
        let list = [PhysSegment { phys: PhysAddr::new(buffer.phys().get() + offset), len }];
        // SAFETY: the memory is simulated, every access to it atomic; the buffer is kept until the mapping has ended.
        match unsafe { self.bounced.device.map(&list, direction, attributes) } {
            Ok(mapping) => {
                assert!(!matches!(mapping.way(), Way::Direct | Way::Split), "{:?}", mapping.way());
                let view: Vec<_> = mapping.segments().collect();
                assert_eq!(view.iter().map(|segment| segment.len).sum::<u64>(), len);
                let (iova, span) = (mapping.iova(), mapping.len());
                self.bounced.live.push(Bouncing {
                    buffer,
                    offset,
                    direction,
                    view,
                    iova,
                    span,
                    mixed: false,
                });
                self.use_bounced(self.bounced.live.len() - 1);
            }
            Err(_) => self.free.push(buffer),
        }
    }

    /// The device reads and writes what it may.
    fn use_bounced(&self, which: usize) {
        let Bouncing { direction, view, .. } = &self.bounced.live[which];
        for segment in view {
            let mut seen = vec![0; segment.len as usize];
            let read = self.iommu.dma_read(DEVICE, segment.iova, &mut seen);
            let lost = self.tainted && read.is_err();
            let reads = *direction != Direction::FromDevice;
            assert!(lost || read.is_ok() == (reads || self.model.write_reads), "{read:?}");
            let is_it = !reads || read.is_err() || seen.iter().all(|byte| *byte == 0x5a);
            assert!(is_it, "the device sees something else");
            let written = self.iommu.dma_write(DEVICE, segment.iova, &vec![0xa5; seen.len()]);
            let lost = self.tainted && written.is_err();
            assert!(lost || written.is_ok() == (*direction != Direction::ToDevice), "{written:?}");
        }
    }

    fn unmap_bounced(&mut self, which: usize) {
        let Bouncing { buffer, offset, direction, iova, span, mixed, .. } =
            self.bounced.live.swap_remove(which);
        let result = self.bounced.pool.close(iova, span);
        assert!(self.bounced.pool.close(iova, span).is_err(), "unmapped twice");
        assert!(result.is_ok() || self.weak || self.tainted, "{result:?}");
        if result.is_ok() && !self.tainted {
            let mut bytes = vec![0; buffer.len() as usize];
            buffer.read(0, &mut bytes).unwrap();
            let inside = offset as usize..(offset + span) as usize;
            let expected = if direction == Direction::ToDevice { 0x5a } else { 0xa5 };
            for (at, byte) in bytes.into_iter().enumerate() {
                let right = byte == if inside.contains(&at) { expected } else { 0x5a };
                let right = right || mixed && byte == 0x5a;
                assert!(right, "{byte:#x} at {at:#x} of {inside:?}, {direction:?}");
            }
        }
        self.free.push(buffer);
    }

    fn map_slots(&mut self, input: &mut Input<'_>) {
        let mut constraints = Constraints::new();
        let mut align = 0;
        if input.flag() {
            let mask = input.number();
            if let Ok(with) = constraints.with_min_align_mask(mask) {
                (constraints, align) = (with, mask);
            }
        }
        if input.flag() {
            constraints = constraints.with_reach(PhysAddr::new(input.number()));
        }
        let Some(which) = input.which(self.free.len()) else { return };
        let (buffer, direction, offset) =
            (self.free.swap_remove(which), input.direction(), input.below(PAGE));
        buffer.fill(0x5a);
        let original = PhysSegment {
            phys: buffer.phys().checked_add(offset).unwrap(),
            len: 1 + input.below(buffer.len() - offset),
        };
        // SAFETY: as in `map_bounced`.
        match unsafe { self.bounced.swiotlb.map(original, direction, &constraints) } {
            Ok(bounced) => {
                let (phys, len) = (bounced.phys, bounced.len);
                assert_eq!((len, phys.get() & align), (original.len, original.phys.get() & align));
                let (first, last) = (phys.get(), phys.get() + len - 1);
                let clash = self
                    .bounced
                    .slots
                    .iter()
                    .find(|other| other.phys.get() <= last && first < other.phys.get() + other.len);
                assert!(clash.is_none(), "slots are given to two");
                self.memory.write(phys, &vec![0xa5; len as usize]).unwrap();
                self.bounced.slots.push(Slots { buffer, direction, phys, len });
            }
            Err(_) => self.free.push(buffer),
        }
    }

    fn unmap_slots(&mut self, which: usize) {
        let Slots { buffer, direction, phys, len } = self.bounced.slots.swap_remove(which);
        // SAFETY: the mapping is this thread's, and it does nothing else with it meanwhile.
        let (result, again) =
            unsafe { (self.bounced.swiotlb.unmap(phys, len), self.bounced.swiotlb.unmap(phys, len)) };
        assert!(result.is_ok() && again.is_err(), "{result:?} {again:?}");
        let mut bytes = vec![0; buffer.len() as usize];
        buffer.read(0, &mut bytes).unwrap();
        let written = bytes.into_iter().filter(|byte| *byte != 0x5a).count() as u64;
        assert_eq!(written, if direction == Direction::ToDevice { 0 } else { len });
        self.free.push(buffer);
    }

    pub fn finish_bounced(&mut self) {
        while !self.bounced.live.is_empty() {
            self.unmap_bounced(0);
        }
        while !self.bounced.slots.is_empty() {
            self.unmap_slots(0);
        }
        assert!(self.bounced.pool.trim(0).is_ok());
        self.bounced.swiotlb.trim();
    }
}
