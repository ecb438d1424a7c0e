//! Interrupts of a device, and the kernel's unplug request.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use portcullis_linux::vfio::{Interrupt, InterruptKind};

use crate::device::{PortcullisDevice, device, locked, place};
use crate::error::{Failed, PortcullisReleased, PortcullisSystem, Result, code};

/// How a device raises interrupts.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisInterruptKind {
    /// The first of the other kinds of which the device has enough.
    PortcullisAnyInterrupt = 0,
    /// Messages: up to 2,048, by its MSI-X table.
    PortcullisMsiX = 1,
    /// Messages, up to 32.
    PortcullisMsi = 2,
    /// One line.
    PortcullisIntx = 3,
}

/// Turns on `count` interrupts of a portcullis_interrupt_kind, numbered from 0, and writes an eventfd for each to `events`: it is readable
/// after its interrupt was raised, and a read returns how often, in 8 bytes. It is non-blocking. The library closes it;
/// portcullis_interrupts_off and closing the device turn the interrupts off. Two system calls and one for each.
///
/// PORTCULLIS_SYSTEM: the device has too few, or some are already on.
///
/// # Safety
/// 1. `device` is open. 2. `count` numbers at `events` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupts(
    device: *const PortcullisDevice,
    kind: u32,
    count: u32,
    events: *mut c_int,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, events) = unsafe { (self::device(device)?, place(events)?) };
        let kind = match kind {
            0 => None,
            1 => Some(InterruptKind::MsiX),
            2 => Some(InterruptKind::Msi),
            3 => Some(InterruptKind::Intx),
            _ => {
                return Err(Failed::argument(
                    "this is none of the kinds that portcullis_interrupt_kind names",
                ));
            }
        };
        if count == 0 {
            return Err(Failed::argument("there is an interrupt to turn on, or more"));
        }
        let mut all = locked(&device.interrupts);
        let made = device.device.interrupts(kind, count);
        *all =
            made.map_err(|error| Failed::new(PortcullisSystem, error))?.into_iter().map(Arc::new).collect();
        for (index, interrupt) in all.iter().enumerate() {
            // SAFETY: clause 2: there is room for as many as requested.
            unsafe { events.0.add(index).write(interrupt.as_fd().as_raw_fd()) };
        }
        Ok(())
    })
}

/// Waits until interrupt `number` is raised, for at most `milliseconds`, or without limit if negative. Writes to `count` how often it was
/// since the last call or read of its file: 0 after the time limit. PORTCULLIS_RELEASED: the device was released, before or during the
/// wait; all waiting threads return. Two system calls.
///
/// # Safety
/// 1. `device` is open. 2. `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupt_wait(
    device: *const PortcullisDevice,
    number: u32,
    milliseconds: i64,
    count: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, count) = unsafe { (self::device(device)?, place(count)?) };
        let one = device.interrupt(number)?;
        let waited = match u64::try_from(milliseconds) {
            Ok(milliseconds) => one.wait_timeout(Duration::from_millis(milliseconds)),
            Err(_) => one.wait(),
        };
        count.put(waited.map_err(|error| match error.kind() {
            io::ErrorKind::NotConnected => Failed::new(PortcullisReleased, error),
            _ => Failed::system("the interrupt", &error),
        })?);
        Ok(())
    })
}

/// Turns off the interrupts of portcullis_interrupts, and closes their files. One system call for each.
///
/// # Safety
/// 1. `device` is open. 2. No thread uses the files, or waits for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupts_off(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        locked(&unsafe { self::device(device) }?.interrupts).clear();
        Ok(())
    })
}

/// Unmasks an interrupt of PORTCULLIS_INTX, after the driver has made the device deassert it. One system call; nothing for other kinds.
///
/// # Safety
/// 1. `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupt_unmask(device: *const PortcullisDevice, number: u32) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let one = unsafe { self::device(device) }?.interrupt(number)?;
        one.unmask().map_err(|error| Failed::system("the interrupt", &error))
    })
}

/// Writes to `event` an eventfd that is readable when the kernel requests the device: it is to be unplugged, or unbound from VFIO. The
/// unplug waits for portcullis_device_release or portcullis_device_close. The library closes it with the device.
///
/// # Safety
/// 1. `device` is open. 2. `event` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unplug_request(
    device: *const PortcullisDevice,
    event: *mut c_int,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, event) = unsafe { (self::device(device)?, place(event)?) };
        let mut request = locked(&device.unplug_request);
        if request.is_none() {
            let made = device.device.unplug_request();
            *request = Some(made.map_err(|error| Failed::new(PortcullisSystem, error))?);
        }
        event.put(request.as_ref().map_or(-1, |request| request.as_fd().as_raw_fd()));
        Ok(())
    })
}

impl PortcullisDevice {
    fn interrupt(&self, number: u32) -> Result<Arc<Interrupt>> {
        let found = locked(&self.interrupts).get(number as usize).cloned();
        found.ok_or_else(|| Failed::argument("no interrupt of this number is on"))
    }
}
