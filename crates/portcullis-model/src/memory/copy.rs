//! The CPU's copies for devices.
#![allow(unsafe_code, reason = "the trait's signatures; the bodies are safe code")]

use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, FRAME_SIZE};

use super::Memory;

const PAGE: usize = FRAME_SIZE as usize;

// SAFETY: 1 to 4: `read` and `write` check every address, and access exactly the bytes named, by words.
unsafe impl CopyMemory for Memory {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let mut page = [0; PAGE];
        self.each(len, |offset, count| {
            let part = &mut page[..count];
            let (from, to) = (from.checked_add(offset)?, to.checked_add(offset)?);
            self.read(from, part).ok()?;
            self.write(to, part).ok()
        });
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.each(len, |offset, count| self.write(at.checked_add(offset)?, &[0; PAGE][..count]).ok());
    }
}

impl Memory {
    /// Calls `part` with each offset and length of up to a page. Counts parts outside the memory, which are mistakes of the code under
    /// test.
    fn each(&self, len: u64, mut part: impl FnMut(u64, usize) -> Option<()>) {
        for offset in (0..len).step_by(PAGE) {
            let count = (len - offset).min(FRAME_SIZE) as usize;
            if part(offset, count).is_none() {
                self.stray_table();
            }
        }
    }
}
