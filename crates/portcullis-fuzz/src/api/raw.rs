//! Mappings by number: single ones, lists, batches, whole ranges of a domain, a ring, and registrations.

use std::sync::Arc;

use portcullis::addr::{DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, DmaUnmapError, Ended, RawBatch, RawMapping, StrictRing};
use portcullis::domain::UnmapError;
use portcullis::pgtable::Format;
use portcullis_linux::registration::{Keep, Registration, RegistrationCache, Released};

use super::Clocked;
use super::model::{End, FOLLOWED, PAGE, State, pages, pages_of};
use super::world::{Mapper, NOWHERE, World, limit};
use crate::input::Input;

type Platform = Arc<Clocked>;

/// What is mapped by number, and what it was made by.
pub struct Raw<X: Format> {
    pub batch: RawBatch<Mapper<X>, Platform>,
    pub ring: StrictRing<Mapper<X>, Platform>,
    /// How many descriptors of the ring are a batch.
    pub ring_batch: usize,
    /// Descriptors that a commit has ended which could not say so.
    pub ring_untold: usize,
    pub registrations: RegistrationCache<Mapper<X>, Platform>,
    /// Device, address and length.
    pub singles: Vec<(usize, u64, u64)>,
    pub lists: Vec<(usize, Vec<DmaSegment>)>,
    pub ranges: Vec<IovaRange>,
    pub in_ring: Vec<RawMapping>,
    pub held: Vec<Registration>,
}

impl<X: Format> World<X> {
    pub fn raw_step(&mut self, way: u8, input: &mut Input<'_>) {
        match way {
            14..=16 => self.map_single(input),
            17..=18 => {
                let Some(which) = input.which(self.raw.singles.len()) else { return };
                let (device, iova, len) = self.raw.singles.swap_remove(which);
                let lazy = self.is_lazy(device);
                let result = self.devices[device].unmap_single(Iova::new(iova), len);
                self.unmapped((iova, len), result, lazy);
            }
            19 => {
                // Anything, perhaps somebody else's.
                let device = usize::from(input.flag());
                let iova = match self.model.known(usize::from(input.byte())) {
                    Some(iova) if input.flag() => {
                        iova.wrapping_add_signed(i64::from(input.byte() as i8) * 64)
                    }
                    _ => input.number(),
                };
                let len = if input.flag() { input.below(8 * PAGE) } else { input.number() % (1 << 21) };
                let lazy = self.is_lazy(device);
                self.tainted = true;
                let result = self.devices[device].unmap_single(Iova::new(iova), len);
                self.unmapped((iova, len), result, lazy);
            }
            20..=21 => self.map_list(input),
            22 => {
                let Some(which) = input.which(self.raw.lists.len()) else { return };
                let (device, list) = self.raw.lists.swap_remove(which);
                let lazy = self.is_lazy(device);
                let result = self.devices[device].unmap_sg(&list);
                self.unmapped(span(&list), result, lazy);
            }
            23..=24 => self.unmap_in_batch(input),
            25 => {
                let count = self.raw.batch.len();
                match self.raw.batch.commit() {
                    Ok(committed) => {
                        assert_eq!(committed, count);
                        self.model.committed(End::Raw);
                    }
                    Err(error) => assert!(self.weak && count > 0, "{error}"),
                }
            }
            26..=27 => self.map_range(input),
            28 => {
                let Some(which) = input.which(self.raw.ranges.len()) else { return };
                let range = self.raw.ranges.swap_remove(which);
                let (strictly, lazy) = (input.flag(), self.is_lazy(0));
                let part = part(range, input).unwrap_or(range);
                let result =
                    if strictly { self.domain.unmap_strictly(part) } else { self.domain.unmap(part) };
                // The pieces of a mapping: the rest is still to be unmapped, and its addresses come back with that.
                if part != range {
                    self.tainted = true;
                    self.raw.ranges.push(range);
                }
                self.unmapped((part.start().get(), part.len()), result, lazy && !strictly);
            }
            29..=31 => self.map_in_ring(input),
            32..=33 => self.unmap_in_ring(input),
            34 => self.commit_ring(),
            35..=37 => self.acquire(input),
            38..=39 => {
                let Some(which) = input.which(self.raw.held.len()) else { return };
                let held = self.raw.held.swap_remove(which);
                let (iova, len) = (held.iova().get(), held.len());
                match self.raw.registrations.release(held) {
                    Ok(Released::Unmapped) => self.model.unmap(iova, len, None),
                    Ok(_) => {}
                    Err(error) => assert!(self.weak, "{error}"),
                }
            }
            40 => {
                let memory = self.registered(input);
                match self.raw.registrations.forget(memory) {
                    Ok(_) => self.model.forget(Some((memory.phys.get(), memory.len))),
                    Err(error) => assert!(self.weak, "{error}"),
                }
            }
            _ => {
                let keep = if input.flag() { 0 } else { input.number() };
                match self.raw.registrations.trim(keep) {
                    Ok(_) if keep == 0 && self.raw.held.is_empty() => self.model.forget(None),
                    Ok(_) => {}
                    Err(error) => assert!(self.weak, "{error}"),
                }
            }
        }
    }

    fn map_single(&mut self, input: &mut Input<'_>) {
        let (device, direction) = (usize::from(input.flag()), input.direction());
        let segment = self.nowhere(input);
        // SAFETY: the memory was never allocated, and devices only find out where addresses lead.
        let result = unsafe { self.devices[device].map_single(segment.phys, segment.len, direction) };
        let Ok(iova) = result else { return };
        if is_large(&[segment]) {
            let result = self.devices[device].unmap_single(iova, segment.len);
            return assert!(result.is_ok() || self.weak, "{result:?}");
        }
        self.settle();
        assert_eq!(iova.get() % PAGE, segment.phys.get() % PAGE);
        self.model.map(iova.get(), pages_of(&[segment]), direction.permissions());
        self.raw.singles.push((device, iova.get(), segment.len));
    }

    fn map_list(&mut self, input: &mut Input<'_>) {
        let (device, direction) = (usize::from(input.flag()), input.direction());
        let list = self.list(input);
        let mut out =
            vec![DmaSegment::default(); list.len() - usize::from(input.byte() == 7 && !list.is_empty())];
        // SAFETY: as in `map_single`.
        let result = unsafe { self.devices[device].map_sg(&list, direction, &mut out) };
        let Ok(count) = result else { return };
        out.truncate(count);
        if is_large(&list) {
            let result = self.devices[device].unmap_sg(&out);
            return assert!(result.is_ok() || self.weak, "{result:?}");
        }
        self.settle();
        let bytes = |lens: Vec<u64>| lens.iter().sum::<u64>();
        let asked = bytes(list.iter().map(|segment| segment.len).collect());
        assert_eq!(bytes(out.iter().map(|segment| segment.len).collect()), asked);
        self.model.map(out[0].iova.get(), pages_of(&list), direction.permissions());
        self.raw.lists.push((device, out));
    }

    fn list(&self, input: &mut Input<'_>) -> Vec<PhysSegment> {
        (0..input.below(5)).map(|_| self.nowhere(input)).collect()
    }

    fn unmap_in_batch(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.raw.singles.len()) else { return };
        let (device, iova, len) = self.raw.singles.swap_remove(which);
        match self.devices[device].unmap_single_in(&mut self.raw.batch, Iova::new(iova), len) {
            Ok(()) | Err(BatchError::Unmap(UnmapError::NotMapped { .. })) => {
                self.model.unmap(iova, len, Some(State::Until(End::Raw)));
            }
            // It says what stays mapped.
            Err(BatchError::Unmap(error)) => {
                assert!(self.weak, "{error}");
                self.model.unmap(iova, len, Some(State::Kept));
            }
            Err(error) => {
                assert!(self.raw.batch.is_full(), "{error}");
                self.raw.singles.push((device, iova, len));
            }
        }
    }

    fn map_range(&mut self, input: &mut Input<'_>) {
        let (list, permissions, limit) = (self.list(input), input.permissions(), limit(input));
        // SAFETY: as in `map_single`.
        let Ok(range) = (unsafe { self.domain.map(&list, permissions, limit) }) else { return };
        if is_large(&list) {
            let result = self.domain.unmap_strictly(range);
            return assert!(result.is_ok() || self.weak, "{result:?}");
        }
        self.settle();
        assert!(range.last() <= limit);
        self.model.map(range.start().get(), pages_of(&list), permissions);
        self.raw.ranges.push(range);
    }

    fn map_in_ring(&mut self, input: &mut Input<'_>) {
        let direction = input.direction();
        let list = if input.flag() { vec![self.nowhere(input)] } else { self.list(input) };
        // SAFETY: as in `map_single`.
        let Ok(mapping) = (unsafe { self.raw.ring.map(&list, direction) }) else { return };
        self.model.map(mapping.iova().get(), pages_of(&list), direction.permissions());
        self.raw.in_ring.push(mapping);
    }

    fn unmap_in_ring(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.raw.in_ring.len()) else { return };
        // In order as a rule.
        let which = if input.flag() { 0 } else { which };
        let mapping = self.raw.in_ring.remove(which);
        let range = mapping.range(self.raw.ring.device().domain().granule()).unwrap();
        let (iova, len) = (range.start().get(), range.len());
        let waits = Some(State::Until(End::Ring));
        let before = self.raw.ring.waiting();
        let result = self.raw.ring.unmap(mapping);
        let taken = result.as_ref().err().is_none_or(|failed| failed.mapping.is_none());
        if taken && before - self.raw.ring_untold >= self.raw.ring_batch {
            // A whole batch waited, and was committed first.
            self.model.committed(End::Ring);
            self.raw.ring_untold = before;
        }
        if !matches!(result, Ok(Ended::Flushed(()))) {
            assert_eq!(self.raw.ring.waiting(), before + usize::from(taken), "all of them are to be told of");
        }
        match result {
            Ok(Ended::Done(())) => unreachable!("a ring ends nothing by itself"),
            Ok(Ended::Pending) => self.model.unmap(iova, len, waits),
            Ok(Ended::Flushed(())) => {
                assert_eq!(self.raw.ring.waiting(), 0);
                self.raw.ring_untold = 0;
                self.model.unmap(iova, len, waits);
                self.model.committed(End::Ring);
            }
            Err(failed) => {
                assert!(self.weak, "{}", failed.error);
                match failed.mapping {
                    Some(mapping) => self.raw.in_ring.insert(0, mapping),
                    None => self.model.unmap(iova, len, waits),
                }
            }
        }
    }

    fn commit_ring(&mut self) {
        let waiting = self.raw.ring.waiting();
        match self.raw.ring.commit() {
            Ok(count) => {
                assert_eq!(count, waiting);
                self.raw.ring_untold = 0;
                self.model.committed(End::Ring);
            }
            Err(error) => assert!(self.weak && matches!(error, DmaUnmapError::Unconfirmed { .. }), "{error}"),
        }
    }

    /// Memory for registrations, of which there is little, so that ranges overlap.
    fn registered(&self, input: &mut Input<'_>) -> PhysSegment {
        let phys = PhysAddr::new(NOWHERE + 0x1000_0000 + input.below(16) * PAGE / 2);
        let len = if input.byte().is_multiple_of(16) { input.number() } else { 1 + input.below(5 * PAGE) };
        PhysSegment { phys, len }
    }

    fn acquire(&mut self, input: &mut Input<'_>) {
        let (memory, direction) = (self.registered(input), input.direction());
        let keep = if input.flag() { Keep::UntilForgotten } else { Keep::WhileHeld };
        // SAFETY: as in `map_single`.
        let held = unsafe { self.raw.registrations.acquire(memory, direction, keep) };
        let Ok(held) = held else { return };
        self.settle();
        let at = held.iova().get();
        assert_eq!((held.len(), at % PAGE), (memory.len, memory.phys.get() % PAGE));
        self.model.register(at, pages(memory.phys.get(), memory.len), direction.permissions());
        self.raw.held.push(held);
    }

    /// Everything that is mapped by number ends.
    pub fn finish_raw(&mut self) {
        assert!(self.raw.batch.commit().is_ok());
        while let Some((device, iova, len)) = self.raw.singles.pop() {
            let result = self.devices[device].unmap_single(Iova::new(iova), len);
            assert!(result.is_ok() || self.tainted, "{result:?}");
        }
        while let Some((device, list)) = self.raw.lists.pop() {
            let result = self.devices[device].unmap_sg(&list);
            assert!(result.is_ok() || self.tainted, "{result:?}");
        }
        while let Some(range) = self.raw.ranges.pop() {
            let result = self.domain.unmap(range);
            assert!(result.is_ok() || self.tainted, "{result:?}");
        }
        while let Some(mapping) = self.raw.in_ring.pop() {
            assert!(self.raw.ring.unmap(mapping).is_ok());
        }
        assert!(self.raw.ring.commit().is_ok());
        while let Some(held) = self.raw.held.pop() {
            assert!(self.raw.registrations.release(held).is_ok());
        }
        assert!(self.raw.registrations.trim(0).is_ok());
        assert_eq!(self.raw.registrations.usage().bytes, 0);
    }
}

/// The first address of a list, and the bytes up to its last.
fn span(list: &[DmaSegment]) -> (u64, u64) {
    let (first, last) = (list[0], list[list.len() - 1]);
    (first.iova.get(), last.iova.get() + last.len - first.iova.get())
}

/// Whether a list has more pages than the model is to follow.
fn is_large(list: &[PhysSegment]) -> bool {
    list.iter().any(|segment| segment.len > FOLLOWED)
}

/// Now and then, some pages of a range.
fn part(range: IovaRange, input: &mut Input<'_>) -> Option<IovaRange> {
    let count = range.len() / PAGE;
    let first = (input.byte() & 3 == 1).then(|| input.below(count))?;
    let pages = 1 + input.below(count - first);
    IovaRange::new(Iova::new(range.start().get() + first * PAGE), pages * PAGE).ok()
}
