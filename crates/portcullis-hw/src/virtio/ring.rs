//! A split virtqueue: descriptors, available ring, used ring.

use portcullis::platform::Frames;

use super::layout::ring;
use super::pci::NarrowRegisters;
use crate::frames::Words;
use crate::host::{Registers, UnitError};

/// Frames of a ring.
const FRAMES: usize = 2;

/// The memory of one virtqueue. The caller serializes changes of the driver's side.
#[derive(Debug)]
pub(super) struct Ring {
    words: Words,
    /// A power of two.
    size: u16,
    number: u16,
    doorbell: usize,
}

impl Ring {
    /// A queue of `size` descriptors, a power of two of at most [`ring::MOST`]. The device does not know of it yet.
    pub fn new<F: Frames>(frames: &F, size: u16, number: u16, doorbell: usize) -> Result<Self, UnitError> {
        let words = Words::new(frames, FRAMES)?;
        // The driver polls.
        words.store(frames, ring::DRIVER, ring::NO_INTERRUPT);
        Ok(Self { words, size, number, doorbell })
    }

    pub fn size(&self) -> u16 {
        self.size
    }

    /// Addresses of the descriptors, the available ring and the used ring.
    pub fn addresses(&self) -> [u64; 3] {
        let at = |word: usize| self.words.phys().get() + word as u64 * 8;
        [at(0), at(ring::DRIVER), at(ring::DEVICE)]
    }

    pub fn describe<F: Frames>(
        &self,
        frames: &F,
        index: u16,
        (address, len): (u64, u32),
        (flags, next): (u16, u16),
    ) {
        let word = usize::from(index) * 2;
        self.words.store(frames, word, address);
        self.words.store(frames, word + 1, ring::descriptor(len, flags, next));
    }

    /// Writes entry `at` of the available ring, in a count without end: the chain that begins with descriptor `first`.
    pub fn offer<F: Frames>(&self, frames: &F, at: u16, first: u16) {
        let (word, shift) = ring::driver_entry(at & (self.size - 1));
        let others = self.words.load(frames, word) & !(0xffff << shift);
        self.words.store(frames, word, others | u64::from(first) << shift);
    }

    /// Makes all entries before `end` available to the device, after all earlier stores are visible.
    pub fn publish<F: Frames>(&self, frames: &F, end: u16) {
        let word = self.words.load(frames, ring::DRIVER);
        self.words.store(frames, ring::DRIVER, ring::with_index(word, end));
    }

    pub fn notify<R: NarrowRegisters>(&self, registers: &R) {
        registers.write16(self.doorbell, self.number);
    }

    /// The count of used entries, without end. Their contents are visible.
    pub fn used<F: Frames>(&self, frames: &F) -> u16 {
        ring::index(self.words.load_from_unit(frames, ring::DEVICE))
    }

    /// The first descriptor of used entry `at`: whatever the device wrote.
    pub fn used_entry<F: Frames>(&self, frames: &F, at: u16) -> u32 {
        ring::id(self.words.load_from_unit(frames, ring::device_entry(at & (self.size - 1))))
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The device no longer uses it.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe { self.words.free(frames) };
    }
}

/// Writes a 64-bit register of the common configuration, in halves.
pub(super) fn write_halves<R: Registers>(registers: &R, offset: usize, value: u64) {
    registers.write32(offset, value as u32);
    registers.write32(offset + 4, (value >> 32) as u32);
}
