//! A device's [`Interrupt`]s, as eventfds that the kernel signals: MSI-X, MSI and INTx, and the kernel's own request to release the device.
//!
//! An interrupt is a counter in the kernel, which a read returns and resets. It runs no code in the program: a thread
//! [waits](Interrupt::wait) for it, or an event loop with its [descriptor](AsFd).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX, vfio_irq_info,
};

use super::error::InterruptError;
use super::ioctl::{call, vfio};
use super::opened::{Opened, locked};

const GET_IRQ_INFO: u64 = vfio(9);
const SET_IRQS: u64 = vfio(10);

/// How a device raises an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterruptKind {
    /// The device writes one of up to 2048 messages, which takes [bus mastering](super::Device::set_bus_master).
    MsiX,
    /// The same, with up to 32 messages.
    Msi,
    /// The device asserts a line, which others may share. The kernel then masks it, until [`Interrupt::unmask`].
    Intx,
    /// The kernel asks for a [release](super::Device::release) of the device, which is to be unplugged or to get another driver.
    UnplugRequest,
}

impl InterruptKind {
    /// Its index in VFIO.
    fn index(self) -> u32 {
        match self {
            Self::MsiX => VFIO_PCI_MSIX_IRQ_INDEX,
            Self::Msi => VFIO_PCI_MSI_IRQ_INDEX,
            Self::Intx => VFIO_PCI_INTX_IRQ_INDEX,
            Self::UnplugRequest => VFIO_PCI_REQ_IRQ_INDEX,
        }
    }

    /// Which of the two concurrently usable groups it belongs to.
    fn place(self) -> usize {
        usize::from(self == Self::UnplugRequest)
    }
}

/// A counter that the kernel increments.
#[derive(Debug)]
pub struct Event(File);

impl Event {
    fn new() -> io::Result<Self> {
        // SAFETY: it takes numbers.
        let file = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for this call.
        Ok(Self(unsafe { File::from_raw_fd(file) }))
    }

    pub fn signal(&self) {
        // It fails at the maximum: then it is signalled already.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Returns and resets the counter.
    fn take(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        match (&self.0).read(&mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        }
    }
}

/// Calls `VFIO_DEVICE_SET_IRQS` with these files, -1 for none, from `start` on, or for `count` interrupts without files.
fn set(file: &File, flags: u32, index: u32, (start, count): (u32, u32), files: &[i32]) -> io::Result<u32> {
    let mut words = vec![0, flags, index, start, count];
    words.extend(files.iter().map(|file| file.cast_unsigned()));
    words[0] = (words.len() * size_of::<u32>()) as u32;
    // SAFETY: clause 1: this call's structure, with as many files as it says, and without pointers.
    let left = unsafe { call(file.as_fd(), SET_IRQS, words.as_mut_slice()) }?;
    Ok(left.unsigned_abs())
}

/// The interrupts of one call. The last drop turns them off.
#[derive(Debug)]
struct Vectors {
    opened: Arc<Opened>,
    kind: InterruptKind,
}

impl Drop for Vectors {
    fn drop(&mut self) {
        let mut in_use = locked(&self.opened.in_use);
        let flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
        // They are off if the device was released.
        let _ = self.opened.with(|file| set(file, flags, self.kind.index(), (0, 0), &[]));
        in_use[self.kind.place()] = false;
    }
}

/// An interrupt of a device, of [`Device::interrupts`](super::Device::interrupts) or
/// [`Device::unplug_request`](super::Device::unplug_request).
///
/// It owns a non-blocking eventfd: an event loop polls [it](AsFd::as_fd) for reading, and then takes the [`count`](Self::count). It can be
/// sent to another thread, and several may wait for it: each count goes to one of them.
///
/// A drop turns it off, by one system call; later interrupts of the device are lost. The interrupts of one call may be dropped in any
/// order, also after the device, whose file they hold open. After [`Device::release`](super::Device::release) `wait` and `count` always
/// return an error, so that waiting threads end. An event loop that reads the descriptor itself finds one more count in it.
#[derive(Debug)]
pub struct Interrupt {
    event: Arc<Event>,
    vectors: Arc<Vectors>,
    number: u32,
}

impl Interrupt {
    /// Turns on `count` interrupts of the first of these kinds that has at least `count`.
    pub(super) fn all(
        opened: &Arc<Opened>,
        kinds: &[InterruptKind],
        count: u32,
    ) -> Result<Vec<Self>, InterruptError> {
        let Some(&first) = kinds.first().filter(|_| count > 0) else { return Ok(Vec::new()) };
        let name = || opened.name().to_owned();
        let mut in_use = locked(&opened.in_use);
        if in_use[first.place()] {
            return Err(InterruptError::InUse { name: name() });
        }
        let mut most = 0;
        for &kind in kinds {
            let has = opened.with(|file| has(file, kind));
            let has = has.map_err(|error| InterruptError::call("VFIO_DEVICE_GET_IRQ_INFO", error))?;
            if has < count {
                most = most.max(has);
                continue;
            }
            let events = (0..count).map(|_| Event::new().map(Arc::new)).collect::<io::Result<Vec<_>>>();
            let events = events.map_err(|error| InterruptError::call("eventfd", error))?;
            let files: Vec<i32> = events.iter().map(|event| event.0.as_raw_fd()).collect();
            let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
            let left = opened.signal(&events, |file| set(file, flags, kind.index(), (0, count), &files));
            // The kernel returns how many are left if there are too few.
            match left.map_err(|error| InterruptError::call("VFIO_DEVICE_SET_IRQS", error))? {
                0 => {}
                left => {
                    most = most.max(left);
                    continue;
                }
            }
            in_use[kind.place()] = true;
            let vectors = Arc::new(Vectors { opened: Arc::clone(opened), kind });
            let number = |(event, number)| Self { event, vectors: Arc::clone(&vectors), number };
            return Ok(events.into_iter().zip(0..).map(number).collect());
        }
        Err(InterruptError::TooFew { name: name(), kinds: kinds.to_vec(), wanted: count, most })
    }

    /// Its kind.
    pub fn kind(&self) -> InterruptKind {
        self.vectors.kind
    }

    /// Its number within its call, as the device knows it: its index in the MSI-X table, for example.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Waits until it is raised, and returns how often since the last call. Two system calls (`poll` and `read`). Concurrent waiters each
    /// get different counts.
    ///
    /// # Errors
    /// Of kind [`NotConnected`](io::ErrorKind::NotConnected): the device was released, before or during the wait. Or the kernel's.
    pub fn wait(&self) -> io::Result<u64> {
        self.wait_until(None)
    }

    /// As [`wait`](Self::wait), for at most `limit`: 0 if it was not raised.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(&self, limit: Duration) -> io::Result<u64> {
        self.wait_until(Instant::now().checked_add(limit))
    }

    /// How often it was raised since the last call, without waiting. One system call.
    ///
    /// # Errors
    /// The device was released; or the kernel's.
    pub fn count(&self) -> io::Result<u64> {
        let count = self.event.take()?;
        if self.vectors.opened.is_released() {
            // Wakes other waiters.
            self.event.signal();
            return Err(self.vectors.opened.released());
        }
        Ok(count)
    }

    fn wait_until(&self, end: Option<Instant>) -> io::Result<u64> {
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            // Rounded up to a millisecond, or it would return too early.
            let left = left.map(|left| left.as_nanos().div_ceil(1_000_000));
            let limit = left.map_or(-1, |left| i32::try_from(left).unwrap_or(i32::MAX));
            let mut poll = libc::pollfd { fd: self.event.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one structure, with an open file.
            if unsafe { libc::poll(&raw mut poll, 1, limit) } < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            // Another thread may have taken the count, or it was a signal.
            let count = self.count()?;
            if count > 0 || left == Some(0) {
                return Ok(count);
            }
        }
    }

    /// Unmasks an [INTx](InterruptKind::Intx) interrupt, after the driver has made the device deassert it. One system call; nothing for
    /// other kinds.
    ///
    /// # Errors
    /// The device was released; or the kernel's.
    pub fn unmask(&self) -> io::Result<()> {
        if self.kind() != InterruptKind::Intx {
            return Ok(());
        }
        let flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK;
        self.vectors.opened.with(|file| set(file, flags, VFIO_PCI_INTX_IRQ_INDEX, (0, 1), &[])).map(drop)
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.0.as_fd()
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        // The last one turns all of them off.
        if Arc::strong_count(&self.vectors) > 1 {
            let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
            let index = self.kind().index();
            let _ = self.vectors.opened.with(|file| set(file, flags, index, (self.number, 1), &[-1]));
        }
    }
}

/// How many interrupts of a kind a device has.
fn has(file: &File, kind: InterruptKind) -> io::Result<u32> {
    let argsz = size_of::<vfio_irq_info>() as u32;
    let mut info = vfio_irq_info { argsz, index: kind.index(), ..Default::default() };
    // SAFETY: clause 1: this call's structure, without pointers.
    match unsafe { call(file.as_fd(), GET_IRQ_INFO, &mut info) } {
        Ok(_) if info.flags & VFIO_IRQ_INFO_EVENTFD != 0 => Ok(info.count),
        Ok(_) => Ok(0),
        // It knows no such kind.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(0),
        Err(error) => Err(error),
    }
}
