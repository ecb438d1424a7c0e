//! The first measurement: both ways, each size and direction, on memory that nobody else has.

use alloc::sync::Arc;

use super::Adaptive;
use super::book::{Choice, Half, most_bytes};
use crate::addr::{Direction, PhysAddr};
use crate::bounce::pool::{Attributes, BounceDevice, BounceError, BouncePool, DeviceProfile};
use crate::domain::{PhysSegment, UnmapError};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Mappings of each kind that are timed, after some that warm up.
pub(crate) const TIMED: u32 = 4;
pub(crate) const WARM: u32 = 2;

/// Something did not work: what is not measured by now stays unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// What was mapped is not any more, but for what the hardware is still to confirm.
    Ended,
    /// A mapping of the scratch memory may still be there, so the memory is leaked.
    Mapped,
}

/// What two readings of a clock cost, by itself: the least of many.
pub(crate) fn cost_of(clock: &impl Fn() -> u64) -> u64 {
    (0..64).map(|_| clock().abs_diff(clock())).min().unwrap_or(0)
}

/// Memory of a pool's, as large as its threshold, to try mappings with.
pub(crate) struct Scratch<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    start: PhysAddr,
    /// Buffers waited in the pool before.
    warm: bool,
}

impl<'a, M: Mapper, P: Platform, C: CopyMemory> Scratch<'a, M, P, C> {
    /// `None` where there is no memory.
    pub(crate) fn new(pool: &'a BouncePool<M, P, C>) -> Option<Self> {
        let warm = pool.usage().cached_bytes > 0;
        Some(Self { start: pool.alloc(pool.threshold())?, pool, warm })
    }

    /// The largest buffer of a class.
    pub(crate) fn buffer(&self, class: usize) -> [PhysSegment; 1] {
        [PhysSegment { phys: self.start, len: most_bytes(class).min(self.pool.threshold()) }]
    }

    /// The end, when no translation leads to the memory any more: buffers that the measurement needed go back, but wait
    /// for the timer where others' would go with them; and the memory goes back if it is `confirmed` that no device
    /// reaches it, and leaks if not.
    pub(crate) fn end(self, confirmed: bool) {
        if !self.warm {
            // What cannot be given back now, a later trim does.
            let _ = self.pool.trim(0);
        }
        if confirmed {
            // SAFETY: it came from `alloc`, every mapping of it has ended, and no device knows of one.
            unsafe { self.pool.free(self.start, self.pool.threshold()) };
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> Adaptive<M, P, C, K> {
    pub(super) fn measure(&self) {
        let Ok(device) = BounceDevice::new(Arc::clone(&self.pool), DeviceProfile::default()) else { return };
        let Some(scratch) = Scratch::new(&self.pool) else { return };
        // What was measured before something failed is as good as before.
        let measured = (0..self.classes.len())
            .try_for_each(|class| self.measure_class(&device, &scratch.buffer(class), class));
        for class in 0..self.classes.len() {
            for direction in 0..Direction::ALL.len() {
                self.with_book(|book| {
                    let choice = book.cells[class][direction].begin();
                    self.hint(class, direction, choice);
                });
            }
        }
        // What the hardware still knows of translations that are gone, where a policy that is not strict let it, or it did
        // not confirm, it forgets now, before the memory is anybody else's.
        let confirmed = self.pool.domain().flush().is_ok();
        scratch.end(confirmed && measured != Err(Stopped::Mapped));
    }

    fn measure_class(
        &self,
        device: &BounceDevice<M, P, C>,
        list: &[PhysSegment],
        class: usize,
    ) -> Result<(), Stopped> {
        for (index, direction) in Direction::ALL.into_iter().enumerate() {
            for choice in [Choice::Copy, Choice::Map] {
                let attributes = Attributes { direct: choice == Choice::Map, ..Attributes::default() };
                for round in 0..WARM + TIMED {
                    let start = (self.clock)();
                    // SAFETY: the memory is this function's, and each mapping ends before the next.
                    let mapping =
                        unsafe { device.map(list, direction, attributes) }.map_err(|_| Stopped::Ended)?;
                    let map_ns = self.since(start);
                    let start = (self.clock)();
                    // SAFETY: the mapping is this function's alone, and so is its memory until this returns.
                    let unmapped = unsafe { self.pool.unmap(mapping.iova(), mapping.len()) };
                    unmapped.map_err(|error| match error {
                        BounceError::Direct(UnmapError::Unconfirmed { .. }) => Stopped::Ended,
                        _ => Stopped::Mapped,
                    })?;
                    let unmap_ns = self.since(start);
                    if round >= WARM {
                        self.note((class, index), choice, Half::Map, map_ns);
                        self.note((class, index), choice, Half::Unmap, unmap_ns);
                    }
                }
            }
        }
        Ok(())
    }
}
