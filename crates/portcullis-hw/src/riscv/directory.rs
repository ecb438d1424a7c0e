//! The device directory table, which leads from device IDs to device contexts.
//!
//! It always has three levels. A unit that walks fewer starts at the table of the first entries: that is the directory of the lowest device
//! IDs.
//!
//! `Words::store` makes a table's contents visible before the entry that leads to it; the entry is never removed. A unit does not cache
//! non-present entries, so a new table needs no invalidation.

use portcullis::addr::PhysAddr;
use portcullis::platform::{Frames, TABLE_ENTRIES};

use super::layout::{context, directory, number};
use crate::frames::Words;
use crate::heap::Map;
use crate::host::UnitError;

/// The most levels.
pub(super) const LEVELS: u32 = 3;

#[derive(Debug)]
pub(super) struct Directory {
    /// By level (0 has the contexts), and by the device ID bits that all devices of the table share.
    tables: Map<(u32, u32), Words>,
    context_bits: u32,
    context_words: usize,
}

/// A context: its table, and its first word.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    table: &'a Words,
    first: usize,
}

impl Place<'_> {
    pub fn load<F: Frames>(&self, frames: &F, word: usize) -> u64 {
        self.table.load(frames, self.first + word)
    }

    pub fn store<F: Frames>(&self, frames: &F, word: usize, value: u64) {
        self.table.store(frames, self.first + word, value);
    }
}

impl Directory {
    /// A directory with the tables for device 0, any of which can be the root.
    pub fn new<F: Frames>(frames: &F, is_extended: bool) -> Result<Self, UnitError> {
        let mut made = Self {
            tables: Map::new(),
            context_bits: directory::context_bits(is_extended),
            context_words: directory::context_words(is_extended),
        };
        match made.make(frames, 0) {
            Ok(_) => Ok(made),
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: no unit was told of it.
                unsafe { made.free(frames) };
                Err(error)
            }
        }
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. No unit walks the directory.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        for table in self.tables.into_values() {
            // SAFETY: clauses 1 and 2.
            unsafe { table.free(frames) };
        }
    }

    pub fn root(&self, levels: u32) -> Option<PhysAddr> {
        self.tables.get((levels.checked_sub(1)?, 0)).map(Words::phys)
    }

    /// The largest device ID of a directory of `levels` levels.
    pub fn last_device(&self, levels: u32) -> u32 {
        (1 << self.shift(levels).min(directory::DEVICE_BITS)) - 1
    }

    /// How many device ID bits are indices below a table of `level`.
    fn shift(&self, level: u32) -> u32 {
        if level == 0 { 0 } else { self.context_bits + directory::TABLE_BITS * (level - 1) }
    }

    fn key(&self, level: u32, device: u32) -> (u32, u32) {
        // One table of the highest level has all devices: its shift exceeds the width of device IDs.
        (level, device.checked_shr(self.shift(level + 1)).unwrap_or(0))
    }

    /// Makes the missing tables for a device's context, and returns the context's place.
    pub fn make<F: Frames>(&mut self, frames: &F, device: u32) -> Result<Place<'_>, UnitError> {
        for level in (0..LEVELS).rev() {
            let (key, above) = (self.key(level, device), self.key(level + 1, device));
            if self.tables.get(key).is_some() {
                continue;
            }
            let table = self.tables.get_or_insert(key, || Words::new(frames, 1))?.phys();
            if let Some(above) = self.tables.get(above) {
                above.store(frames, key.1 as usize % TABLE_ENTRIES, number(table.get()) | directory::VALID);
            }
        }
        self.find(device).ok_or(UnitError::NotAttached { device })
    }

    /// The place of a device's context, if its table exists.
    pub fn find(&self, device: u32) -> Option<Place<'_>> {
        let table = self.tables.get(self.key(0, device))?;
        let index = device as usize % (1 << self.context_bits);
        Some(Place { table, first: index * self.context_words })
    }

    /// A device with an ID above `last` and a context that is not empty.
    pub fn beyond<F: Frames>(&self, frames: &F, last: u32) -> Option<u32> {
        let contexts = self.tables.keys().filter(|(level, _)| *level == 0);
        let mut devices = contexts.flat_map(|(_, above)| {
            let first = above << self.context_bits;
            first..first + (1 << self.context_bits)
        });
        devices.find(|device| {
            let place = self.find(*device);
            *device > last && place.is_some_and(|place| place.load(frames, context::CONTROL) != 0)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_device_is_below_the_one_root() {
        for context_bits in [6, 7] {
            let none = Directory { tables: Map::new(), context_bits, context_words: 4 };
            assert_eq!(none.key(LEVELS, u32::MAX), (LEVELS, 0));
            assert_eq!(none.key(LEVELS - 1, none.last_device(LEVELS)), (LEVELS - 1, 0));
        }
    }
}
