//! Interrupts of a device, and the kernel's request that it be let go of.

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
    /// The first of the others of which the device has as many as are asked for.
    PortcullisAnyInterrupt = 0,
    /// By writes to memory, as its table of up to 2,048 says.
    PortcullisMsiX = 1,
    /// By writes to memory, up to 32.
    PortcullisMsi = 2,
    /// By a wire, one.
    PortcullisIntx = 3,
}

/// Turns on `count` interrupts of a portcullis_interrupt_kind, numbered from 0 on, and writes to `events` an eventfd for each: it can be read when its interrupt was
/// raised, and a read takes how often that was, in 8 bytes. None of them blocks. They are the library's to close; portcullis_interrupts_off and the device's
/// end turn them off. Two system calls and one for each.
///
/// PORTCULLIS_SYSTEM: the device has not as many, or has some turned on already.
///
/// # Safety
/// `device` is open, and `count` numbers at `events` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupts(
    device: *const PortcullisDevice,
    kind: u32,
    count: u32,
    events: *mut c_int,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
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
            // SAFETY: the caller's promise: there is room for as many as were asked for.
            unsafe { events.0.add(index).write(interrupt.as_fd().as_raw_fd()) };
        }
        Ok(())
    })
}

/// Waits until interrupt `number` is raised, for `milliseconds` at the most, or without end where they are negative. Writes to `count` how often it was since the
/// last call or read of its file: 0 where the time is over. PORTCULLIS_RELEASED says that the device was let go of, before or meanwhile: each thread that
/// waits is told. Two system calls.
///
/// # Safety
/// `device` is open, and `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupt_wait(
    device: *const PortcullisDevice,
    number: u32,
    milliseconds: i64,
    count: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
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

/// Turns off what portcullis_interrupts has turned on, and closes its files. One system call for each.
///
/// # Safety
/// `device` is open, and no thread uses the files, or waits for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupts_off(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        locked(&unsafe { self::device(device) }?.interrupts).clear();
        Ok(())
    })
}

/// Lets the wire of an interrupt of PORTCULLIS_INTX raise it again, after the driver has had the device take its wire back. One system call; nothing for
/// other kinds.
///
/// # Safety
/// `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_interrupt_unmask(device: *const PortcullisDevice, number: u32) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let one = unsafe { self::device(device) }?.interrupt(number)?;
        one.unmask().map_err(|error| Failed::system("the interrupt", &error))
    })
}

/// Writes to `event` an eventfd that can be read when the kernel asks for the device: it is to be unplugged, or unbound from VFIO. The unplug waits
/// for portcullis_device_release or portcullis_device_close. It is the library's to close, with the device.
///
/// # Safety
/// `device` is open, and `event` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unplug_request(
    device: *const PortcullisDevice,
    event: *mut c_int,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
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
