//! Growing before the pool is full, and shrinking when it is idle, by the platform's timer where possible. The pool never goes below its least size
//! or above its limit.

use core::mem::ManuallyDrop;

use super::Swiotlb;
use crate::platform::{CopyMemory, Platform, PlatformEvents};

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Adds an area whose last address is `reach` at the most. Returns its number; `None` at the limit or without memory.
    ///
    /// Holds no lock while it allocates, so no other caller waits, and two that find the pool full add two areas.
    pub(super) fn grow(&self, reach: u64) -> Option<usize> {
        let added = self.areas.add(&*self.memory, reach)?;
        let area = added.area();
        self.platform.with_cpu(|_| drop(added));
        self.trim_later();
        Some(area)
    }

    /// Asks the timer to grow the pool if little is free, and to look for idle areas if it has grown.
    pub(super) fn grow_soon(&self) {
        if self.areas.present() > self.areas.min && !self.trim.is_set() {
            // An earlier caller panicked before it asked.
            self.trim_later();
        }
        if self.areas.is_low() && self.areas.present() < self.areas.max() && !self.growth.is_set() {
            self.growth.ask(&self.platform, 0);
        }
    }

    fn trim_later(&self) {
        self.trim.ask(&self.platform, self.idle_ns);
    }

    /// Frees all areas without a mapping, down to the pool's least size. Returns the bytes. O(slots of the pool / 64).
    ///
    /// Context: drains the CPUs' magazines first, which costs one barrier of all CPUs and a wait for their exclusive sections. Not for interrupt
    /// handlers.
    pub fn trim(&self) -> u64 {
        self.drain(None);
        self.trim_to(self.areas.min)
    }

    /// Frees empty areas while there are more than `least`.
    fn trim_to(&self, least: usize) -> u64 {
        let mut bytes = 0;
        // The highest numbers first: callers that take slots look at them last.
        for area in (0..self.areas.max()).rev() {
            if self.areas.present() <= least {
                break;
            }
            if let Some(shut) = self.platform.with_cpu(|_| self.areas.close(area, least)) {
                self.areas.remove(&*self.memory, shut);
                bytes += self.areas.area_bytes();
            }
        }
        bytes
    }

    /// Shrinks the pool to twice the mapped slots, but not below its least size.
    fn trim_idle(&self) {
        self.drain(None);
        let slots = self.areas.area_bytes() >> self.areas.slot_shift;
        let needed = self.areas.taken().0.saturating_mul(2).div_ceil(slots) as usize;
        self.trim_to(self.areas.min.max(needed));
    }
}

impl<P: Platform, C: CopyMemory> PlatformEvents for Swiotlb<P, C> {
    fn timer(&self) {
        let is_idle = self.trim.has_come(&self.platform);
        if self.growth.has_come(&self.platform) {
            // Without memory, the next caller that finds little free asks again.
            while self.areas.is_low() && self.grow(self.areas.reach).is_some() {}
        }
        if !is_idle {
            return;
        }
        self.trim_idle();
        if self.areas.present() > self.areas.min {
            self.trim_later();
        }
    }

    fn cpu_released(&self, index: usize) {
        self.drain(Some(index));
    }
}

impl<P: Platform, C: CopyMemory> Drop for Swiotlb<P, C> {
    /// Frees all memory except areas that still have a mapping, where a device may still write. The handle on the memory leaks then, so these stay.
    fn drop(&mut self) {
        self.drain(None);
        self.trim_to(0);
        if self.areas.present() == 0 {
            // SAFETY: `self` is being dropped, and only this drops `memory`.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
