//! Whether data arrives: before and after all that is timed, every thread's buffers are mapped at once, a device looks
//! at what it was given and writes to it, and the drivers look at what came back.
//!
//! The device goes where the subject's own tables lead, or to the address itself where there are none. Each buffer has
//! a pattern of its own, so that somebody else's bytes are found out; so are two mappings in one place, as what each
//! device wrote must still be there when all have written. What is beside a buffer must stay as it was.

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::platform::FRAME_SIZE;

use super::memory::{Buffers, pointer};
use super::subject::Subject;
use super::workload::{Case, Shape, Way};
use crate::lane::Lane;
use crate::runner::Failure;
use crate::team::{Meeting, StartLine};

/// How often everything is mapped: slots come back in another order.
const ROUNDS: u64 = 3;

/// Buffers, what is written of them and what is around them consist of whole words.
const WORD: u64 = size_of::<u64>() as u64;

/// Who writes.
#[derive(Clone, Copy)]
enum Pen {
    Driver,
    Device,
}

/// What is beside buffers.
const BESIDE: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// One thread's part of the check.
pub(crate) struct Check<'a> {
    pub subject: &'a dyn Subject,
    pub case: &'a Case,
    pub thread: usize,
    pub buffers: &'a Buffers,
}

impl Check<'_> {
    /// Works on all of `lane`'s buffers, none of which is mapped, in step with the other threads.
    pub(crate) fn run(
        &self,
        lane: &mut dyn Lane,
        meeting: &Meeting,
        line: &StartLine,
    ) -> Result<(), Failure> {
        let count = self.case.buffers();
        let mut turns = 0..;
        let mut meet = || {
            let turn = turns.next().unwrap_or_default();
            meeting.wait(self.case.threads, turn, self.case.crowded, line)
        };
        for round in 0..ROUNDS {
            (0..count).for_each(|index| self.fill(index, round));
            if !lane.maps(0, count) {
                return Err(Failure::Refused("it failed to map a buffer".into()));
            }
            meet()?;
            (0..count).try_for_each(|index| self.device_works(lane.address(index), index, round))?;
            meet()?;
            (0..count).try_for_each(|index| self.device_looks_again(lane.address(index), index, round))?;
            meet()?;
            if !lane.unmaps(0, count) {
                return Err(Failure::Refused("it failed to unmap a buffer".into()));
            }
            (0..count).try_for_each(|index| self.driver_looks(index, round))?;
            (0..count).try_for_each(|index| self.is_out_of_reach(lane.address(index), index))?;
        }
        Ok(())
    }

    /// The word at `offset` of what `pen` writes in `round` to buffer `index`: no other buffer has it.
    fn word(&self, pen: Pen, index: usize, round: u64, offset: u64) -> u64 {
        let whose = (self.thread as u64) << 48 | (index as u64) << 40 | round << 32 | (pen as u64) << 31;
        // Odd, so nothing is lost: all bytes depend on all of it.
        (whose | offset).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Bytes that the device writes: where what it leaves alone must stay, half of them.
    fn written(&self) -> u64 {
        let bytes = self.buffers.bytes();
        match (self.case.shape, self.case.way) {
            (_, Some(Way::To)) => 0,
            (Shape::Swiotlb(_), Some(Way::From)) => bytes / 2,
            _ => bytes,
        }
    }

    /// Calls `each` with the place of every word in and around buffer `index`, and its offset where it is inside.
    fn around(
        &self,
        index: usize,
        mut each: impl FnMut(Option<u64>, *mut u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (first, len) = self.buffers.around(index);
        let start = self.buffers.at(index);
        for at in (first..first + len).step_by(WORD as usize) {
            let offset = at.checked_sub(start).filter(|offset| *offset < self.buffers.bytes());
            each(offset, pointer(at).cast())?;
        }
        Ok(())
    }

    fn fill(&self, index: usize, round: u64) {
        let filled = self.around(index, |offset, at| {
            let word = offset.map_or(BESIDE, |offset| self.word(Pen::Driver, index, round, offset));
            // SAFETY: memory of the buffers, which only this thread uses and no mapping has now.
            unsafe { at.write(word) };
            Ok(())
        });
        debug_assert_eq!(filled, Ok(()));
    }

    /// Calls `each` with the place of every word that the device reaches in a buffer of `len` bytes, and its offset.
    fn at_device(
        &self,
        address: u64,
        len: u64,
        mut each: impl FnMut(u64, &AtomicU64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut offset = 0;
        while offset < len {
            let iova = address + offset;
            let out_of_reach = || Failure::Broken(format!("the device does not reach {iova:#x}"));
            let at = self.subject.reach(iova).ok_or_else(out_of_reach)?;
            let piece = (FRAME_SIZE - iova % FRAME_SIZE).min(len - offset);
            for word in (0..piece).step_by(WORD as usize) {
                // SAFETY: memory that the subject has for this buffer, of whole words. Should it have it for another one,
                // too, devices access both at once: as atomics.
                each(offset + word, unsafe { AtomicU64::from_ptr(pointer(at + word).cast()) })?;
            }
            offset += piece;
        }
        Ok(())
    }

    fn device_works(&self, address: u64, index: usize, round: u64) -> Result<(), Failure> {
        if matches!(self.case.way, Some(Way::To | Way::Both)) {
            self.at_device(address, self.buffers.bytes(), |offset, at| {
                let found = at.load(Ordering::Relaxed);
                same(found, self.word(Pen::Driver, index, round, offset), "the device", offset)
            })?;
        }
        self.at_device(address, self.written(), |offset, at| {
            at.store(self.word(Pen::Device, index, round, offset), Ordering::Relaxed);
            Ok(())
        })
    }

    fn device_looks_again(&self, address: u64, index: usize, round: u64) -> Result<(), Failure> {
        // Where it may not write, what it was given is still there.
        let (pen, len) = match self.written() {
            0 => (Pen::Driver, self.buffers.bytes()),
            written => (Pen::Device, written),
        };
        self.at_device(address, len, |offset, at| {
            let found = at.load(Ordering::Relaxed);
            same(found, self.word(pen, index, round, offset), "the device, later,", offset)
        })
    }

    fn driver_looks(&self, index: usize, round: u64) -> Result<(), Failure> {
        // A slot is not for data.
        let written = if self.case.shape == Shape::Slot { 0 } else { self.written() };
        self.around(index, |offset, at| {
            let expected = offset.map_or(BESIDE, |offset| {
                let pen = if offset < written { Pen::Device } else { Pen::Driver };
                self.word(pen, index, round, offset)
            });
            // SAFETY: as in `fill`.
            let found = unsafe { at.read() };
            match offset {
                Some(offset) => same(found, expected, "the driver", offset),
                None if found == expected => Ok(()),
                None => Err(Failure::Broken("what is beside a buffer was changed".into())),
            }
        })
    }

    /// Where the device gets to by an address that it had: anywhere but to the buffer, of which this thread has made no
    /// other mapping yet.
    fn is_out_of_reach(&self, address: u64, index: usize) -> Result<(), Failure> {
        let buffer = self.buffers.at(index);
        let inside = self.subject.reach(address).and_then(|at| at.checked_sub(buffer));
        match inside.filter(|offset| *offset < self.buffers.bytes()) {
            Some(_) => Err(Failure::Broken("after the unmap the device still reaches the buffer".into())),
            None => Ok(()),
        }
    }
}

fn same(found: u64, expected: u64, who: &str, offset: u64) -> Result<(), Failure> {
    let wrong =
        || Failure::Broken(format!("{who} found {found:#x} instead of {expected:#x} at offset {offset:#x}"));
    if found == expected { Ok(()) } else { Err(wrong()) }
}
