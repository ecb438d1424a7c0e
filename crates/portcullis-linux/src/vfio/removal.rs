//! A device that the kernel wants back: it is to be unplugged, or another driver is to have it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_REQ_IRQ_INDEX,
};

use super::ioctl::{call, vfio};

const SET_IRQS: u64 = vfio(10);

/// Says when the kernel wants a [device](super::Device) back: before it is unplugged, and before its driver is unbound. The kernel waits until the process
/// gives the device up. So end what the device does, [unmap](portcullis::dma::Queue::unmap) all buffers, and drop the device.
///
/// It can be waited for, as it becomes readable then: [`as_fd`](AsFd::as_fd) for `poll` and its kin.
#[derive(Debug)]
pub struct Removal {
    event: File,
}

impl Removal {
    pub(super) fn of(device: &File) -> io::Result<Self> {
        // SAFETY: it takes numbers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for this call.
        let event = unsafe { File::from_raw_fd(event) };
        // `vfio_irq_set`: its length, flags, which interrupt, the first of how many, and the number of a file.
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
        let mut set = [24, flags, VFIO_PCI_REQ_IRQ_INDEX, 0, 1, event.as_raw_fd().cast_unsigned()];
        // SAFETY: it is this call's structure, as long as it says, and points nowhere.
        unsafe { call(device.as_fd(), SET_IRQS, &mut set) }?;
        Ok(Self { event })
    }

    /// Whether the kernel has asked since the last call that said so. One system call; waits for nothing. The kernel asks again, every ten seconds, as long
    /// as the process has the device.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_wanted(&self) -> io::Result<bool> {
        match (&self.event).read_exact(&mut [0; 8]) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Removal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
