//! The devices' accesses to mapped memory, and the drivers' checks.

use portcullis::addr::{Direction, Permissions, PhysAddr, PhysSegment};
use portcullis_model::Segment as Piece;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use portcullis::dma::DmaUnmapError;

use super::{Engine, model_device};
use crate::replay::data::{Bytes, Pattern, Places, colour};
use crate::replay::driver::Side;
use crate::replay::live::{Copied, Live};
use crate::replay::memory::{is_pool, pages_of};
use crate::replay::{ReplayError, painted};
use crate::{MapId, Op};

impl Engine {
    /// The device transfers `len` bytes from `offset` on, as far as the mapping goes. Returns what it has written, if that is to be
    /// verified.
    pub(super) fn access(&mut self, id: MapId, offset: u64, len: u64) -> Option<Pattern> {
        let live = self.live.get(id as usize).and_then(Option::as_ref)?;
        let (first, end) = (offset, offset.saturating_add(len).min(live.bytes()));
        if live.copied == Copied::No {
            self.violations += self.access_directly(live, first, end);
            return None;
        }
        let written = Pattern { tag: self.transfers + 1, colour: colour(live.device) };
        let outcome = self.access_bytes(live, (first, end), (live.pattern, (0, u64::MAX)), Some(written));
        self.transfers += 1;
        self.violations += outcome;
        (live.direction != Direction::ToDevice && !live.overlaps).then_some(written)
    }

    /// A transfer of a mapping without a copy: only its addresses are checked. Returns how many pieces went elsewhere.
    fn access_directly(&self, live: &Live, first: u64, end: u64) -> u64 {
        let permissions = live.direction.permissions();
        let device = model_device(live.device);
        let wrong = live.pieces_between(first, end).map(|Piece { iova, phys, len }| {
            self.iommu.access_checked(device, iova, phys, len, permissions).wrong
        });
        wrong.sum()
    }

    /// A transfer of the bytes from `first` to `end` of a mapping that may be a copy: as the direction allows, the device reads, and
    /// verifies the `expected` bytes that its driver has put in `filled`, and writes `written`. Returns the number of errors.
    fn access_bytes(
        &self,
        live: &Live,
        (first, end): (u64, u64),
        (expected, filled): (Pattern, (u64, u64)),
        written: Option<Pattern>,
    ) -> u64 {
        let Some(bytes) = &self.bytes else { return 0 };
        let permissions = live.direction.permissions();
        let mut reached: SmallVec<[PhysSegment; 2]> = SmallVec::new();
        let mut wrong = 0;
        for Piece { iova, phys, len } in live.pieces_between(first, end) {
            let mut done = 0;
            let each = |_, place: PhysAddr, len: u64| {
                let original = PhysAddr::new(phys.get().wrapping_add(done));
                wrong += u64::from(!live.copied.allows(place, original));
                reached.push(PhysSegment { phys: place, len });
                done += len;
            };
            if self.iommu.translate_each(model_device(live.device), iova, len, permissions, each).is_err() {
                // A fault, counted as such.
                return wrong;
            }
        }
        let places = self.places(&live.memory, (first, end));
        if wrong > 0 {
            return wrong;
        }
        if permissions.allows(Permissions::READ) && !live.overlaps {
            // An uncopied buffer may by now have another mapping's bytes of the same memory; its address has been checked.
            let filled = Places { within: (first, end), ..self.places(&live.memory, filled) };
            wrong += Bytes::new(bytes, &reached, first).wrong(filled, expected, is_pool);
        }
        if let Some(written) = written.filter(|_| permissions.allows(Permissions::WRITE)) {
            Bytes::new(bytes, &reached, first).put(places, written);
        }
        wrong
    }

    /// A sync of a part of a mapping, by the pool or the device. A pool's time is added to that of all maps (for the device) or unmaps (for
    /// the CPU).
    pub(super) fn sync(&mut self, op: &Op, id: MapId, side: Side, (offset, len): (u64, u64)) {
        self.follow(len >> 12);
        let written = if side == Side::Cpu { self.access(id, offset, len) } else { None };
        let Some(live) = self.live.get_mut(id as usize).and_then(Option::take) else { return };
        if live.copied == Copied::No {
            self.ports[live.device].driver.sync_all(side);
        } else {
            self.sync_bytes(op, &live, side, (offset, len), written);
        }
        self.live[id as usize] = Some(live);
    }

    fn sync_bytes(
        &mut self,
        op: &Op,
        live: &Live,
        side: Side,
        (offset, len): (u64, u64),
        written: Option<Pattern>,
    ) {
        let part = (offset, offset.saturating_add(len).min(live.bytes()));
        let reads = live.direction.permissions().allows(Permissions::READ);
        let changed = self.next_pattern(live.device);
        if side == Side::Device && reads {
            // The driver has changed it.
            self.put_original(&live.memory, part, changed);
        }
        let (result, ticks) = self.sync_in_pool(live, side, part);
        let ticks = ticks.saturating_sub(self.timer.overhead_ticks());
        let calls = if side == Side::Device { &mut self.map } else { &mut self.unmap };
        calls.add_to_all(ticks);
        if let Err(error) = result {
            self.fail(ReplayError::Sync { line: op.line, error });
        }
        if let Some(written) = written {
            self.violations += self.wrong_original(&live.memory, part, written);
        }
        if reads {
            if side == Side::Device {
                self.violations += self.access_bytes(live, part, (changed, part), None);
            }
            // Restored, so that the device knows what to expect later.
            self.put_original(&live.memory, part, live.pattern);
            if let (Err(error), _) = self.sync_in_pool(live, Side::Device, part) {
                self.fail(ReplayError::Sync { line: op.line, error });
            }
        }
    }

    fn sync_in_pool(
        &mut self,
        live: &Live,
        side: Side,
        (first, end): (u64, u64),
    ) -> (Result<(), DmaUnmapError>, u64) {
        self.ports[live.device].sync(live, side, (first, end - first), &self.timer)
    }

    /// The bytes of the next transfer.
    pub(super) fn next_pattern(&mut self, device: usize) -> Pattern {
        self.transfers += 1;
        Pattern { tag: self.transfers, colour: colour(device) }
    }

    /// The driver writes a part of a buffer.
    pub(super) fn put_original(&self, buffer: &[PhysSegment], part: (u64, u64), pattern: Pattern) {
        if let Some(bytes) = &self.bytes {
            Bytes::new(bytes, buffer, 0).put(self.places(buffer, part), pattern);
        }
    }

    /// The driver verifies a part of its buffer. Returns the differences from the device's bytes.
    pub(super) fn wrong_original(&self, buffer: &[PhysSegment], part: (u64, u64), pattern: Pattern) -> u64 {
        let Some(bytes) = &self.bytes else { return 0 };
        Bytes::new(bytes, buffer, 0).wrong(self.places(buffer, part), pattern, |_| true)
    }

    fn places<'a>(&self, buffer: &'a [PhysSegment], (first, end): (u64, u64)) -> Places<'a> {
        Places { buffer, first, end, within: (first, end), in_full: self.painter.is_some() }
    }

    /// Allocates bytes for the memory of `scratch`. If there are too many, frees those of unmapped memory first.
    pub(super) fn back(&self) -> bool {
        let Some(bytes) = &self.bytes else { return true };
        let in_paint = self.painter.is_some();
        let back = |list| if in_paint { painted::back(bytes, list) } else { bytes.back(list, |_| ()) };
        if back(&self.scratch) {
            return true;
        }
        bytes.could_hold(&self.scratch) && self.forget() && back(&self.scratch)
    }

    /// Frees the bytes of memory that is neither mapped nor in `scratch`. Returns whether that was worthwhile.
    pub(super) fn forget(&self) -> bool {
        let Some(bytes) = self.bytes.as_ref().filter(|bytes| bytes.may_forget()) else { return false };
        let in_paint = self.painter.is_some();
        let waiting = self.ports.iter().flat_map(|port| port.waiting());
        // Mappings without a lane have bytes only with paint.
        let live = self.live.iter().flatten().filter(|live| live.lane.is_some() || in_paint);
        let lists = live.chain(waiting).map(|live| &live.memory);
        let needed: FxHashSet<u64> =
            lists.chain(std::iter::once(&self.scratch)).flat_map(|list| pages_of(list)).collect();
        bytes.keep_only(|page| needed.contains(&page));
        true
    }
}
