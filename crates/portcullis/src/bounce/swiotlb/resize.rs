//! Growing before the pool is full, and shrinking when it is idle: beside the I/O, by the platform's timer, where that
//! is possible.

use core::mem::ManuallyDrop;

use super::Swiotlb;
use super::hands::{Lowered, NEVER, Told, Untimed};
use crate::platform::{CopyMemory, Platform, PlatformEvents};
use crate::sync::Ordering;

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Adds an area whose last address is `reach` at the most. Its number; `None` at the limit or without memory.
    ///
    /// Nobody waits for it: no lock is held while memory is asked for, and two that find the pool full add two.
    pub(super) fn grow(&self, reach: u64) -> Option<usize> {
        let added = self.areas.add(&*self.memory, reach)?;
        let area = added.area();
        // Those who failed may try again.
        let told = Told(&self.freed);
        self.platform.with_slot(|_| drop(added));
        drop(told);
        self.trim_later();
        Some(area)
    }

    /// Has the timer grow the pool if little is free, and look at what it has grown by.
    pub(super) fn grow_soon(&self) {
        if self.areas.present() > self.areas.min() && self.trim_at_ns.load(Ordering::Relaxed) == NEVER {
            // A panic kept somebody from asking.
            self.trim_later();
        }
        if self.areas.is_low()
            && self.areas.present() < self.areas.max()
            && !self.growth_asked.load(Ordering::Relaxed)
            && !self.growth_asked.swap(true, Ordering::Relaxed)
        {
            let asked = Lowered(&self.growth_asked);
            self.platform.wake_at(self.platform.now_ns());
            core::mem::forget(asked);
        }
    }

    /// Has the timer look in a while whether something can be given back.
    fn trim_later(&self) {
        let untimed = Untimed(&self.trim_at_ns);
        let at = self.platform.now_ns().saturating_add(self.idle_ns).min(NEVER - 1);
        // Release: the timer that takes an earlier time away sees what was added until now.
        if self.trim_at_ns.fetch_min(at, Ordering::Release) == NEVER {
            self.platform.wake_at(at);
        }
        core::mem::forget(untimed);
    }

    /// Gives all areas back in which nothing is mapped, down to the least that the pool has. How many bytes.
    ///
    /// Takes back first what CPUs keep in their lists: waits for their turns to end, and costs one barrier of all
    /// CPUs. Not from an interrupt handler. O(slots of the pool / 64).
    pub fn trim(&self) -> u64 {
        self.drain(None);
        self.trim_to(self.areas.min())
    }

    /// Gives empty areas back while more than `least` are there.
    fn trim_to(&self, least: usize) -> u64 {
        let mut bytes = 0;
        // The highest numbers first: those are looked at last by who takes.
        for area in (0..self.areas.max()).rev() {
            if self.areas.present() <= least {
                break;
            }
            // Whoever wanted to grow while it went may try again.
            let told = Told(&self.freed);
            match self.platform.with_slot(|_| self.areas.close(area, least)) {
                Some(shut) => {
                    self.areas.remove(&*self.memory, shut);
                    bytes += self.areas.area_bytes();
                }
                None => core::mem::forget(told),
            }
        }
        bytes
    }

    /// Gives back what is not needed by twice of what is mapped.
    fn trim_idle(&self) {
        self.drain(None);
        let slots = self.areas.area_bytes() >> self.areas.slot_shift();
        let needed = self.areas.taken().0.saturating_mul(2).div_ceil(slots) as usize;
        self.trim_to(self.areas.min().max(needed));
    }
}

impl<P: Platform, C: CopyMemory> PlatformEvents for Swiotlb<P, C> {
    fn timer(&self) {
        let at = self.trim_at_ns.load(Ordering::Relaxed);
        let untimed = Untimed(&self.trim_at_ns);
        if self.growth_asked.load(Ordering::Relaxed) {
            // Without memory it is asked for again by the next that finds little free.
            let _asked = Lowered(&self.growth_asked);
            while self.areas.is_low() && self.grow(self.areas.reach()).is_some() {}
        }
        let is_due = at != NEVER && self.platform.now_ns() >= at;
        if at != NEVER && !is_due {
            // Forgotten, maybe, for the deadline that has come now.
            self.platform.wake_at(at);
        }
        core::mem::forget(untimed);
        if !is_due {
            return;
        }
        // Acquire, and first: whoever adds an area from now on asks again, and what was added before is seen.
        self.trim_at_ns.swap(NEVER, Ordering::Acquire);
        self.trim_idle();
        if self.areas.present() > self.areas.min() {
            self.trim_later();
        }
    }

    fn slot_released(&self, index: usize) {
        self.drain(Some(index));
    }
}

impl<P: Platform, C: CopyMemory> Drop for Swiotlb<P, C> {
    /// Gives all memory back but for areas in which something is still mapped: a device may still write there. So that
    /// those stay, the handle on the memory is leaked then, too.
    fn drop(&mut self) {
        self.drain(None);
        self.trim_to(0);
        if self.areas.present() == 0 {
            // SAFETY: `self` is being dropped, and this is the only place that does it.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
