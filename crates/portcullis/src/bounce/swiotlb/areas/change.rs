//! Adds and removes areas. While a call adds or removes an area, the area is *shut*: no map takes slots of it, and no other call changes it.

use alloc::boxed::Box;

use super::{ABSENT, Areas, CHANGING, Head};
use crate::addr::PhysAddr;
use crate::bounce::swiotlb::slot_meta::SlotMeta;
use crate::guard::Guard;
use crate::heap::slice;
use crate::platform::{FRAME_SIZE, Frames};
use crate::sync::Ordering;

impl Areas {
    /// Gets memory for one more area that ends at `reach` at the most. Its slots are available when the result is dropped. `None` if all numbers are
    /// in use, or there is no memory within reach.
    ///
    /// Context: allocates; takes no lock.
    pub fn add<C: Frames>(&self, memory: &C, reach: u64) -> Option<Shut<'_>> {
        let claim = |head: &Head| {
            head.base.compare_exchange(ABSENT, CHANGING, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let area = self.heads.iter().position(claim)?;
        let head = &self.heads[area];
        // On failure the number is free again.
        let changing = Guard::new(|| head.base.store(ABSENT, Ordering::Release));
        let base = self.metadata_and_frames(head, memory, reach.min(self.reach))?;
        changing.done();
        for (index, meta) in self.metadata(area)?.iter().enumerate() {
            meta.set_address(base.get() + ((index as u64) << self.slot_shift));
        }
        self.directory.insert(base.get() >> self.area_shift, area, head.metadata.load(Ordering::Acquire));
        head.base.store(base.get(), Ordering::Release);
        self.counts.end.fetch_max(area + 1, Ordering::AcqRel);
        Some(Shut { areas: self, area })
    }

    fn metadata_and_frames<C: Frames>(&self, head: &Head, memory: &C, reach: u64) -> Option<PhysAddr> {
        if head.metadata.load(Ordering::Acquire).is_null() {
            let slots = 1 << self.bits();
            let metadata = slice(slots, |_| Ok(SlotMeta::default())).ok()?;
            head.metadata.store(Box::into_raw(metadata).cast(), Ordering::Release);
        }
        let frames = (self.area_bytes() / FRAME_SIZE) as usize;
        let base = match reach {
            u64::MAX => memory.alloc(frames),
            reach => memory.alloc_within(frames, PhysAddr::new(reach)),
        }?;
        // `Frames` guarantees this, and all code here relies on it.
        let last = base.get().checked_add(self.area_bytes() - 1);
        if last.is_none_or(|last| last > reach) || base.get() & (self.area_bytes() - 1) != 0 {
            // SAFETY: `alloc` has just returned these frames, and nobody else has seen them.
            unsafe { memory.free(base, frames) };
            return None;
        }
        Some(base)
    }

    /// Makes an area's slots available. Takes its lock.
    fn open(&self, area: usize) {
        let mut bits = self.spaces[area].bits.lock();
        bits.open();
        self.counts.present.fetch_add(1, Ordering::Relaxed);
        self.spaces[area].free.store(bits.free, Ordering::Relaxed);
    }

    /// Makes the slots of area `area` unavailable, if all are free and there are more than `least` areas. Dropping the result opens the area again.
    /// Takes the area's lock.
    pub fn close(&self, area: usize, least: usize) -> Option<Shut<'_>> {
        let space = &self.spaces[area];
        let mut bits = space.bits.lock();
        let present = &self.counts.present;
        let less = |present: usize| (present > least).then(|| present - 1);
        if bits.free < 1 << self.bits()
            || present.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err()
        {
            return None;
        }
        space.free.store(0, Ordering::Relaxed);
        bits.close().then_some(Shut { areas: self, area })
    }

    /// Frees the memory of a [closed](Self::close) area. Takes no lock. If that panics the memory leaks, but the number does not.
    pub fn remove<C: Frames>(&self, memory: &C, shut: Shut<'_>) {
        let area = shut.area();
        core::mem::forget(shut);
        let head = &self.heads[area];
        let base = head.base.swap(CHANGING, Ordering::Acquire);
        let _changing = Guard::new(|| head.base.store(ABSENT, Ordering::Release));
        self.directory.remove(base >> self.area_shift, area);
        // SAFETY: `add` got these frames from this memory, together. They hold no mapping, so no device uses them, and the closed area
        // gives no slots.
        unsafe { memory.free(PhysAddr::new(base), (self.area_bytes() / FRAME_SIZE) as usize) };
    }
}

/// A closed area: no caller can take slots of it. Dropping it opens the area.
#[must_use]
pub struct Shut<'a> {
    areas: &'a Areas,
    area: usize,
}

impl Shut<'_> {
    pub fn area(&self) -> usize {
        self.area
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.areas.open(self.area);
    }
}
