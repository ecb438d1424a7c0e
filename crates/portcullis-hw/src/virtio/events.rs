//! The event queue: faults.

use portcullis::addr::{DeviceId, Iova};
use portcullis::platform::Frames;

use super::layout::{EVENTS, fault, ring};
use super::pci::NarrowRegisters;
use super::ring::Ring;
use crate::fault::{Access, Fault, Reason};
use crate::frames::Words;
use crate::host::{Host, UnitError};
use crate::sync::Mutex;

/// Words of a buffer.
const WORDS: usize = 4;

/// Buffers that the device fills, one for each descriptor. Faults while all are full are lost.
#[derive(Debug)]
pub(super) struct Events {
    ring: Ring,
    buffers: Words,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    available: u16,
    seen: u16,
}

impl Events {
    /// A queue of `size` descriptors. The device does not know of it yet.
    pub fn new<F: Frames>(frames: &F, size: u16, doorbell: usize) -> Result<Self, UnitError> {
        let ring = Ring::new(frames, size, EVENTS, doorbell)?;
        let bytes = usize::from(size) * WORDS * 8;
        let buffers = match Words::new(frames, bytes.div_ceil(4096)) {
            Ok(buffers) => buffers,
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: the device was not told of it.
                unsafe { ring.free(frames) };
                return Err(error);
            }
        };
        for index in 0..size {
            let at = buffers.phys().get() + u64::from(index) * WORDS as u64 * 8;
            ring.describe(frames, index, (at, fault::BYTES), (ring::DEVICE_WRITES, 0));
            ring.offer(frames, index, index);
        }
        ring.publish(frames, size);
        Ok(Self { ring, buffers, state: Mutex::new(State { available: size, seen: 0 }) })
    }

    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The device's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe {
            self.ring.free(frames);
            self.buffers.free(frames);
        }
    }

    /// The oldest event, if there is one. The device may then fill its buffer again.
    pub fn next<H: Host>(&self, host: &H) -> Option<Fault>
    where
        H::Registers: NarrowRegisters,
    {
        let frames = host.frames();
        let fault = {
            let mut state = self.state.lock();
            let ready = self.ring.used(frames).wrapping_sub(state.seen);
            if ready == 0 || ready > self.ring.size() {
                return None;
            }
            let id = self.ring.used_entry(frames, state.seen);
            state.seen = state.seen.wrapping_add(1);
            // An invalid buffer: its place in the driver's ring stays as it is.
            let id = u16::try_from(id).ok().filter(|id| *id < self.ring.size())?;
            let first = usize::from(id) * WORDS;
            let word = |index| self.buffers.load_from_unit(frames, first + index);
            let fault = decode([word(0), word(1), word(2)]);
            self.ring.offer(frames, state.available, id);
            state.available = state.available.wrapping_add(1);
            self.ring.publish(frames, state.available);
            fault
        };
        self.ring.notify(host.registers());
        Some(fault)
    }
}

fn decode([first, second, address]: [u64; 3]) -> Fault {
    let (reason, flags) = (fault::reason(first), fault::flags(first));
    let does = |what| flags & what != 0;
    Fault {
        device: DeviceId(fault::endpoint(second)),
        pasid: None,
        address: does(fault::ADDRESS).then(|| Iova::new(address)),
        access: match (does(fault::READ), does(fault::WRITE)) {
            _ if does(fault::EXECUTE) => Some(Access::Execute),
            (true, true) => Some(Access::Atomic),
            (true, false) => Some(Access::Read),
            (false, true) => Some(Access::Write),
            (false, false) => None,
        },
        reason: match reason {
            fault::DOMAIN => Reason::NotAttached,
            fault::MAPPING => Reason::NotMapped,
            _ => Reason::Other,
        },
        code: u32::from(reason),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refused_write_is_decoded() {
        let flags = u64::from(fault::WRITE | fault::ADDRESS);
        let fault = decode([flags << 32 | u64::from(fault::MAPPING), 0x28, 0x80_0123]);
        assert_eq!((fault.device, fault.address), (DeviceId(0x28), Some(Iova::new(0x80_0123))));
        assert_eq!((fault.access, fault.reason), (Some(Access::Write), Reason::NotMapped));
    }

    /// VIRTIO 1.3, section 5.13.6.9, "Fault reporting": VIRTIO_IOMMU_FAULT_R_UNKNOWN, _DOMAIN and _MAPPING.
    #[test]
    fn each_reason_is_that_of_the_specification_and_all_others_none() {
        for reason in 0..=0xff_u8 {
            let expected = match reason {
                1 => Reason::NotAttached,
                2 => Reason::NotMapped,
                _ => Reason::Other,
            };
            // READ is bit 0 of the flags, and ADDRESS bit 8.
            let fault = decode([0x101 << 32 | u64::from(reason), 0x28, 0x80_0123]);
            assert_eq!((fault.reason, fault.code), (expected, reason.into()));
            assert_eq!((fault.access, fault.address), (Some(Access::Read), Some(Iova::new(0x80_0123))));
        }
    }

    #[test]
    fn every_event_is_decoded() {
        for reason in 0..=255_u64 {
            for flags in [0, 1, 2, 3, 4, 7, 0x100, u64::from(u32::MAX)] {
                let fault = decode([flags << 32 | reason, u64::MAX, u64::MAX]);
                assert_eq!((fault.code, fault.device), (reason as u32, DeviceId(u32::MAX)));
                assert_eq!(fault.address.is_some(), flags & 0x100 != 0);
            }
        }
    }
}
