//! The event log: what the unit has written there, in the common form.

use portcullis::addr::{DeviceId, Iova};

use super::layout::{control, event, reg, ring_index, ring_place, status};
use super::queue::set;
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Host, Registers};
use crate::sync::Mutex;

/// The log: one frame of entries, and how far it has been read.
#[derive(Debug)]
pub(super) struct Log {
    pub words: Words,
    next: u32,
    /// When an entry that the unit counts was found empty.
    empty_since: Option<u64>,
}

impl Log {
    pub fn new(words: Words) -> Self {
        Self { words, next: 0, empty_since: None }
    }

    /// The next fault. Events that are no device's are passed over: the queue tells of its errors
    /// itself.
    ///
    /// The unit may count an entry before it can be seen. Then there is none yet, and after the
    /// host's patience it is passed over.
    pub fn next<H: Host>(&mut self, host: &H, control: &Mutex<()>) -> Option<Fault> {
        let (registers, frames) = (host.registers(), host.frames());
        let tail = registers.read64(reg::EVENT_TAIL);
        if tail == u64::MAX {
            return None;
        }
        while self.next != ring_index(tail) {
            let index = self.next as usize * 2;
            let (first, second) = (self.words.load(frames, index), self.words.load(frames, index + 1));
            if first == 0 {
                let now = host.now_ns();
                let since = *self.empty_since.get_or_insert(now);
                if now.saturating_sub(since) <= host.patience_ns() {
                    return None;
                }
            }
            self.empty_since = None;
            self.words.store(frames, index, 0);
            self.words.store(frames, index + 1, 0);
            // The index is below 256.
            self.next = ring_index(ring_place(self.next + 1));
            registers.write64(reg::EVENT_HEAD, ring_place(self.next));
            if let Some(fault) = decode(first, second) {
                return Some(fault);
            }
        }
        let status = registers.read64(reg::STATUS);
        if status & status::EVENT_OVERFLOW != 0 && status != u64::MAX {
            // It has stopped, and has been read to the end.
            set(host, control, control::EVENT_LOG_EN, false);
            registers.write64(reg::STATUS, status::EVENT_OVERFLOW);
            set(host, control, control::EVENT_LOG_EN, true);
        }
        None
    }
}

/// An event's two words; `None` where it is about no device's access.
fn decode(first: u64, second: u64) -> Option<Fault> {
    let is = |bit: u64| first & bit != 0;
    let number = event::number(first);
    let reason = match number {
        event::ILLEGAL_DEV_TABLE_ENTRY => Reason::BadContext,
        event::IO_PAGE_FAULT if is(event::I) => Reason::Other,
        // Domain 0 is that of devices that are attached to nothing.
        event::IO_PAGE_FAULT if !is(event::GN) && event::domain(first) == 0 => Reason::NotAttached,
        event::IO_PAGE_FAULT if !is(event::PR) => Reason::NotMapped,
        event::IO_PAGE_FAULT if is(event::PE) && !is(event::RZ) => Reason::Permission,
        // A reserved bit, or a level that is none.
        event::IO_PAGE_FAULT => Reason::BadEntry,
        event::DEV_TAB_HARDWARE_ERROR | event::PAGE_TAB_HARDWARE_ERROR => Reason::Unreadable,
        event::INVALID_DEVICE_REQUEST | event::INVALID_PPR_REQUEST | event::RMP_PAGE_FAULT => Reason::Other,
        _ => return None,
    };
    // RW means something for accesses alone, and of a page fault only where the page is present
    // (section 2.5.3).
    let says_access = match number {
        event::IO_PAGE_FAULT => is(event::PR),
        event::ILLEGAL_DEV_TABLE_ENTRY | event::DEV_TAB_HARDWARE_ERROR | event::PAGE_TAB_HARDWARE_ERROR => {
            true
        }
        _ => false,
    } && !is(event::I)
        && !is(event::TR);
    let access = if is(event::RW) { Access::Write } else { Access::Read };
    Some(Fault {
        device: DeviceId(u32::from(event::device(first))),
        pasid: (number == event::IO_PAGE_FAULT && is(event::GN)).then(|| event::pasid(first)),
        // Hardware errors have the address of the entry that could not be read.
        address: (reason != Reason::Unreadable).then(|| Iova::new(second)),
        access: says_access.then_some(access),
        reason,
        code: event::code(first),
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FAULT: u64 = 2 << 60 | 0x28;

    #[test]
    fn page_faults() {
        // A write that the page does not allow, in domain 7.
        let fault = decode(FAULT | event::PR | event::RW | event::PE | 7 << 32, 0x80_0010).unwrap();
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0010))));
        assert_eq!((fault.access, fault.reason), (Some(Access::Write), Reason::Permission));
        assert_eq!((fault.pasid, fault.code), (None, 0x2070));
        // No page: the direction is not said.
        let fault = decode(FAULT | 7 << 32, 0x80_0000).unwrap();
        assert_eq!((fault.access, fault.reason), (None, Reason::NotMapped));
        let fault = decode(FAULT | event::PR | event::RZ | 7 << 32, 0).unwrap();
        assert_eq!((fault.access, fault.reason), (Some(Access::Read), Reason::BadEntry));
        assert_eq!(decode(FAULT | event::PR | event::PE, 0).unwrap().reason, Reason::NotAttached);
        let fault = decode(FAULT | event::GN | 5 << 16 | 0x1234 << 32, 0).unwrap();
        assert_eq!((fault.pasid, fault.reason), (Some(0x5_1234), Reason::NotMapped));
    }

    #[test]
    fn every_event_is_decoded_or_passed_over() {
        for number in 0..16_u64 {
            for flags in 0..1 << 9 {
                let fault = decode(number << 60 | flags << 48 | 0x28, u64::MAX);
                assert_eq!(fault.is_some(), [1, 2, 3, 4, 8, 9, 14].contains(&number));
                assert!(fault.is_none_or(|fault| u64::from(fault.code) == number << 12 | flags));
            }
        }
        assert_eq!(decode(4 << 60, 0x1000).unwrap().address, None, "the address of an entry");
    }
}
