//! The event log, decoded into [`Fault`]s.

use portcullis::addr::{DeviceId, Iova};

use super::layout::{control, event, reg, ring_index, ring_place, status};
use super::queue::set;
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Host, Registers};
use crate::sync::Mutex;

/// The log: one frame of entries, and the read index.
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

    /// The next fault. Skips command errors, which the queue reports itself, and counter overflows.
    ///
    /// The unit may count an entry before its contents are visible. Then there is none yet; after the host's patience it is skipped.
    pub fn next<H: Host>(&mut self, host: &H, control: &Mutex<()>) -> Option<Fault> {
        let (registers, frames) = (host.registers(), host.frames());
        let tail = registers.read64(reg::EVENT_TAIL);
        if tail == u64::MAX {
            return None;
        }
        while self.next != ring_index(tail) {
            let index = self.next as usize * 2;
            let word = |index| self.words.load_from_unit(frames, index);
            let (first, second) = (word(index), word(index + 1));
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
            self.next = ring_index(ring_place(self.next + 1));
            registers.write64(reg::EVENT_HEAD, ring_place(self.next));
            if let Some(fault) = decode(first, second) {
                return Some(fault);
            }
        }
        let status = registers.read64(reg::STATUS);
        if status & status::EVENT_OVERFLOW != 0 && status != u64::MAX {
            // The log has overflowed and stopped, and all of it has been read.
            set(host, control, control::EVENT_LOG_EN, false);
            registers.write64(reg::STATUS, status::EVENT_OVERFLOW);
            set(host, control, control::EVENT_LOG_EN, true);
        }
        None
    }
}

/// Decodes an event's two words, from the log or as a kernel prints them. `None` for a command error, a counter overflow, or no event.
///
/// Source: section 2.5, "Event Logging", table of event codes.
pub fn decode(first: u64, second: u64) -> Option<Fault> {
    let is = |bit: u64| first & bit != 0;
    let number = event::number(first);
    let reason = match number {
        event::ILLEGAL_COMMAND_ERROR | event::COMMAND_HARDWARE_ERROR | event::EVENT_COUNTER_ZERO => {
            return None;
        }
        _ if first == 0 => return None,
        event::ILLEGAL_DEV_TABLE_ENTRY => Reason::BadContext,
        event::IO_PAGE_FAULT if is(event::I) => Reason::Other,
        // Domain 0 is that of unattached devices.
        event::IO_PAGE_FAULT if !is(event::GN) && event::domain(first) == 0 => Reason::NotAttached,
        event::IO_PAGE_FAULT if !is(event::PR) => Reason::NotMapped,
        event::IO_PAGE_FAULT if is(event::PE) && !is(event::RZ) => Reason::Permission,
        // A reserved bit, or an invalid level.
        event::IO_PAGE_FAULT => Reason::BadEntry,
        event::INVALID_DEVICE_REQUEST | event::INVALID_PPR_REQUEST => Reason::BadRequest,
        event::DEV_TAB_HARDWARE_ERROR
        | event::PAGE_TAB_HARDWARE_ERROR
        | event::VIOMMU_HARDWARE_ERROR
        | event::RMP_HARDWARE_ERROR => Reason::Unreadable,
        // Others include a device that did not complete an invalidation (IOTLB_INV_TIMEOUT), an event that did not reach a guest
        // (GUEST_EVENT_FAULT), memory that is not the guest's (RMP_PAGE_FAULT), and reserved codes.
        _ => Reason::Other,
    };
    // RW is defined only for accesses, and in a page fault only if the page is present (section 2.5.3).
    let says_access = match number {
        event::IO_PAGE_FAULT => is(event::PR),
        event::ILLEGAL_DEV_TABLE_ENTRY | event::DEV_TAB_HARDWARE_ERROR | event::PAGE_TAB_HARDWARE_ERROR => {
            true
        }
        _ => false,
    } && !is(event::I)
        && !is(event::TR);
    let access = if is(event::RW) { Access::Write } else { Access::Read };
    // This event has a guest's ID in the device ID's field.
    let device = if number == event::VIOMMU_HARDWARE_ERROR { u32::MAX } else { event::device(first).into() };
    Some(Fault {
        device: DeviceId(device),
        pasid: (number == event::IO_PAGE_FAULT && is(event::GN)).then(|| event::pasid(first)),
        // Hardware errors give the address of the entry that could not be read, and GUEST_EVENT_FAULT gives none.
        address: (reason != Reason::Unreadable && number != event::GUEST_EVENT_FAULT)
            .then(|| Iova::new(second)),
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
        // A write without permission, in domain 7.
        let fault = decode(FAULT | event::PR | event::RW | event::PE | 7 << 32, 0x80_0010).unwrap();
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0010))));
        assert_eq!((fault.access, fault.reason), (Some(Access::Write), Reason::Permission));
        assert_eq!((fault.pasid, fault.code), (None, 0x2070));
        // No page: the event does not give the direction.
        let fault = decode(FAULT | 7 << 32, 0x80_0000).unwrap();
        assert_eq!((fault.access, fault.reason), (None, Reason::NotMapped));
        let fault = decode(FAULT | event::PR | event::RZ | 7 << 32, 0).unwrap();
        assert_eq!((fault.access, fault.reason), (Some(Access::Read), Reason::BadEntry));
        assert_eq!(decode(FAULT | event::PR | event::PE, 0).unwrap().reason, Reason::NotAttached);
        let fault = decode(FAULT | event::GN | 5 << 16 | 0x1234 << 32, 0).unwrap();
        assert_eq!((fault.pasid, fault.reason), (Some(0x5_1234), Reason::NotMapped));
    }

    /// IO_PAGE_FAULT (section 2.5.3): with PE, permissions of a present page are the reason; with RZ they are not.
    #[test]
    fn the_flags_of_a_page_fault_say_why() {
        use event::{I, PE, PR, RZ};
        const OF_7: u64 = 7 << 32;
        for (flags, reason) in [
            (OF_7, Reason::NotMapped),
            (OF_7 | PE, Reason::NotMapped),
            (OF_7 | RZ, Reason::NotMapped),
            (OF_7 | PE | RZ, Reason::NotMapped),
            (OF_7 | PR, Reason::BadEntry),
            (OF_7 | PR | RZ, Reason::BadEntry),
            (OF_7 | PR | PE | RZ, Reason::BadEntry),
            (OF_7 | PR | PE, Reason::Permission),
            (PR | PE, Reason::NotAttached),
            (0, Reason::NotAttached),
            (event::GN, Reason::NotMapped),
            (event::GN | PR | PE, Reason::Permission),
            (OF_7 | I, Reason::Other),
            (OF_7 | I | PR | PE, Reason::Other),
            (I, Reason::Other),
        ] {
            for of_any in [0, event::RW, event::TR] {
                let fault = decode(FAULT | flags | of_any, 0x5000).unwrap();
                assert_eq!(fault.reason, reason, "{flags:#x} {of_any:#x}");
                let says = flags & (I | PR) == PR && of_any != event::TR;
                let access = if of_any == event::RW { Access::Write } else { Access::Read };
                assert_eq!(fault.access, says.then_some(access), "{flags:#x} {of_any:#x}");
            }
        }
    }

    /// The table of event codes of section 2.5 (Rev. 3.10); `None` is skipped.
    const EVENTS: [(&str, Option<Reason>); 16] = [
        ("reserved", Some(Reason::Other)),
        ("ILLEGAL_DEV_TABLE_ENTRY", Some(Reason::BadContext)),
        ("IO_PAGE_FAULT", Some(Reason::NotMapped)),
        ("DEV_TAB_HARDWARE_ERROR", Some(Reason::Unreadable)),
        ("PAGE_TAB_HARDWARE_ERROR", Some(Reason::Unreadable)),
        ("ILLEGAL_COMMAND_ERROR", None),
        ("COMMAND_HARDWARE_ERROR", None),
        ("IOTLB_INV_TIMEOUT", Some(Reason::Other)),
        ("INVALID_DEVICE_REQUEST", Some(Reason::BadRequest)),
        ("INVALID_PPR_REQUEST", Some(Reason::BadRequest)),
        ("EVENT_COUNTER_ZERO", None),
        ("GUEST_EVENT_FAULT", Some(Reason::Other)),
        ("VIOMMU_HARDWARE_ERROR", Some(Reason::Unreadable)),
        ("RMP_PAGE_FAULT", Some(Reason::Other)),
        ("RMP_HARDWARE_ERROR", Some(Reason::Unreadable)),
        ("reserved", Some(Reason::Other)),
    ];

    #[test]
    fn each_code_has_its_reason_or_is_passed_over() {
        for (number, (name, reason)) in (0..16_u64).zip(EVENTS) {
            let fault = decode(number << 60 | 7 << 32 | 0x28, 0x80_0123);
            assert_eq!(fault.map(|fault| fault.reason), reason, "{number:#x}: {name}");
            let Some(fault) = fault else { continue };
            let device = if name == "VIOMMU_HARDWARE_ERROR" { u32::MAX } else { 0x28 };
            assert_eq!((fault.device, fault.code), (DeviceId(device), (number as u32) << 12), "{name}");
            let is_of_device = reason != Some(Reason::Unreadable) && name != "GUEST_EVENT_FAULT";
            assert_eq!(fault.address, is_of_device.then_some(Iova::new(0x80_0123)), "{name}");
        }
        assert_eq!(decode(0, 0x1000), None, "nothing is there yet");
    }

    #[test]
    fn every_event_is_decoded_or_passed_over() {
        for number in 0..16_u64 {
            for flags in 0..1 << 12 {
                let fault = decode(number << 60 | flags << 48 | 0x28, u64::MAX);
                assert_eq!(fault.is_none(), [5, 6, 10].contains(&number));
                assert!(fault.is_none_or(|fault| u64::from(fault.code) == number << 12 | flags));
            }
        }
    }

    /// Records made by hand after lines that Linux prints, with other devices and addresses: "Event logged [IO_PAGE_FAULT
    /// device=07:00.0 domain=0x0007 address=0xffffc02000 flags=0x0000]", and with flags 0x0050, 0x0020, 0x0010.
    #[test]
    fn what_linux_prints_is_what_we_say() {
        let record = |device: u64, domain: u64, flags: u64| 2 << 60 | flags << 48 | domain << 32 | device;
        for (first, address, said) in [
            (
                record(0x0700, 7, 0),
                0xff_ffc0_2000,
                "device 0x700 could not access 0xffffc02000: nothing is mapped there for this (code 0x2000)",
            ),
            (
                record(0x0060, 0, 0x50),
                0x7e80_0000,
                "device 0x60 could not read 0x7e800000: the device is attached to nothing (code 0x2050)",
            ),
            (
                record(0x0060, 9, 0x70),
                0x7e80_0010,
                "device 0x60 could not write 0x7e800010: the mapping does not allow this (code 0x2070)",
            ),
            (
                record(0x0100, 0xf, 0x20),
                0xfdf8_0010,
                "device 0x100 could not access 0xfdf80010: nothing is mapped there for this (code 0x2020)",
            ),
        ] {
            assert_eq!(alloc::format!("{}", decode(first, address).unwrap()), said);
        }
    }
}
