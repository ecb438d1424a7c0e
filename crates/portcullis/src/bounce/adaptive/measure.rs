//! The first measurement: both ways, each size and direction, on memory that nobody else has.

use alloc::sync::Arc;

use super::book::{Choice, Half};
use super::{Adaptive, LEAST_SHIFT};
use crate::addr::{Direction, PhysAddr};
use crate::bounce::pool::{Attributes, BounceDevice, DeviceProfile};
use crate::domain::PhysSegment;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Mappings of each kind that are timed, after some that warm up.
const TIMED: u32 = 4;
const WARM: u32 = 2;

/// Something did not work: what is not measured by now stays unknown, and the memory may still be reached.
struct Stopped;

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> Adaptive<M, P, C, K> {
    pub(super) fn measure(&self) {
        let bytes = self.pool.threshold();
        let Some(scratch) = self.pool.alloc(bytes) else { return };
        let Ok(device) = BounceDevice::new(Arc::clone(&self.pool), DeviceProfile::default()) else { return };
        let measured =
            (0..self.classes.len()).try_for_each(|class| self.measure_class(&device, scratch, class));
        for class in 0..self.classes.len() {
            for direction in 0..Direction::ALL.len() {
                let choice = self.with_book(|book| book.cells[class][direction].begin());
                self.with_book(|_| self.hint(class, direction, choice));
            }
        }
        // Buffers that only the measurement needed; what cannot be given back now, a later trim does.
        let _ = self.pool.trim(0);
        if measured.is_ok() {
            // SAFETY: it came from `alloc`, and every mapping of it has ended.
            unsafe { self.pool.free(scratch, bytes) };
        }
    }

    fn measure_class(
        &self,
        device: &BounceDevice<M, P, C>,
        scratch: PhysAddr,
        class: usize,
    ) -> Result<(), Stopped> {
        let list = [PhysSegment { phys: scratch, len: 1 << (LEAST_SHIFT as usize + class) }];
        for (index, direction) in Direction::ALL.into_iter().enumerate() {
            for choice in [Choice::Copy, Choice::Map] {
                let attributes = Attributes { direct: choice == Choice::Map, ..Attributes::default() };
                for round in 0..WARM + TIMED {
                    let start = (self.clock)();
                    // SAFETY: the memory is this function's, and each mapping ends before the next.
                    let mapping = unsafe { device.map(&list, direction, attributes) }.map_err(|_| Stopped)?;
                    let map_ns = self.since(start);
                    let start = (self.clock)();
                    self.pool.unmap(mapping.iova(), mapping.len()).map_err(|_| Stopped)?;
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
