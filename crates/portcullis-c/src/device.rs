//! Devices: opened with how they are protected, and closed.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::bounce::PoolConfig;
use portcullis::dma::{self, CoherentMemory, DmaDomain, DmaMask, DmaOps, DomainBuilder, OpsConfig};
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::Heap;
use portcullis_linux::vfio::{self, Interrupt, KernelMapper, Machine, Registers};

use crate::error::{Failed, PortcullisOpen, PortcullisReachable, Result, code, given};

/// How a device is kept from memory that is not mapped for it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisPolicy {
    /// Each buffer is mapped, and its unmap takes that back: two system calls.
    PortcullisStrict = 0,
    /// Buffers of up to 128 KiB are copied, through memory that stays mapped: no system call, and the device never reaches the
    /// buffer. Larger ones are mapped.
    PortcullisBounce = 1,
    /// For each size the cheaper of the two, as measured while it runs.
    PortcullisAuto = 2,
}

/// Base address registers of a device.
const BARS: usize = 6;

pub(crate) type Shared = CoherentMemory<Heap, KernelMapper, StdPlatform>;

/// A PCI device in the hands of this process, and the mappings for it.
#[derive(Debug)]
pub struct PortcullisDevice {
    // In the order in which they end.
    pub(crate) ops: DmaOps<Machine>,
    /// Memory that driver and device share.
    shared: Mutex<Vec<Shared>>,
    pub(crate) attached: dma::Device<Machine>,
    domain: DmaDomain<Machine>,
    bars: Mutex<[Option<Registers>; BARS]>,
    pub(crate) interrupts: Mutex<Vec<Arc<Interrupt>>>,
    pub(crate) unplug_request: Mutex<Option<Interrupt>>,
    pub(crate) device: vfio::Device,
}

/// How a device is protected, and what it reaches, as a caller says.
fn wanted(policy: u32, address_bits: u32) -> Result<(OpsConfig, DmaMask)> {
    let threshold = PoolConfig::default().threshold;
    let config = match policy {
        0 => OpsConfig::Strict,
        1 => OpsConfig::Bounce { threshold },
        2 => OpsConfig::Auto { threshold },
        _ => return Err(Failed::argument("this is none of the policies that portcullis_policy names")),
    };
    if !(12..=64).contains(&address_bits) {
        return Err(Failed::argument("a device has 12 to 64 bits of addresses"));
    }
    Ok((config, DmaMask::bits(address_bits)))
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds it panics half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PortcullisDevice {
    fn new(
        device: vfio::Device,
        domain: DmaDomain<Machine>,
        (config, mask): (OpsConfig, DmaMask),
    ) -> Result<Self> {
        let refused = |error| Failed::new(PortcullisOpen, error);
        let attached = domain.attach(device.id(), mask).map_err(refused)?;
        let ops = attached.ops(config).map_err(refused)?;
        Ok(Self {
            ops,
            shared: Mutex::default(),
            attached,
            domain,
            bars: Mutex::default(),
            interrupts: Mutex::default(),
            unplug_request: Mutex::default(),
            device,
        })
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Vec<Shared>> {
        locked(&self.shared)
    }

    fn registers(&self, number: u32) -> io::Result<(*mut u8, usize)> {
        let mut bars = locked(&self.bars);
        let place = bars.get_mut(number as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let registers = match place.take() {
            Some(registers) => registers,
            None => self.device.bar(number)?,
        };
        let registers = place.insert(registers);
        Ok((registers.as_ptr(), registers.size()))
    }
}

/// The device behind a pointer of the caller's.
///
/// # Safety
/// It is null, or of an `open` that succeeded, and is not closed while the reference lives.
pub(crate) unsafe fn device<'a>(device: *const PortcullisDevice) -> Result<&'a PortcullisDevice> {
    // SAFETY: the caller's promise.
    unsafe { device.as_ref() }.ok_or_else(|| Failed::argument("the device is null"))
}

/// Where a result goes. It may hold anything before.
pub(crate) struct Place<T>(pub(crate) NonNull<T>);

/// # Safety
/// It is null, or the caller's to be written until the function returns.
pub(crate) unsafe fn place<T>(out: *mut T) -> Result<Place<T>> {
    NonNull::new(out).map(Place).ok_or_else(|| Failed::argument("the pointer for the result is null"))
}

impl<T> Place<T> {
    #[inline]
    pub(crate) fn put(self, value: T) {
        // SAFETY: by the promise to `place`.
        unsafe { self.0.write(value) }
    }
}

/// # Safety
/// It is null, or a text that ends with a zero.
unsafe fn name<'a>(name: *const c_char) -> Result<&'a str> {
    if name.is_null() {
        return Err(Failed::argument("the name is null"));
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_str();
    name.map_err(|_| Failed::argument("the name is no text: names are like 0000:01:00.0"))
}

/// Opens the PCI device `name`, like "0000:01:00.0", in an address space of its own: by iommufd where the kernel has it, else by VFIO's
/// type 1. VFIO must have the device; the error's text says how to give it. `policy` is a portcullis_policy, and `address_bits` says how many bits
/// of an address the device can put on the bus, 12 to 64.
///
/// Writes the device to `out`: portcullis_device_close ends it. The kernel resets the device. A dozen system calls; for PORTCULLIS_AUTO
/// no measurement: it measures while it runs.
///
/// # Safety
/// `name` is a text that ends with a zero, and `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_open(
    name: *const c_char,
    policy: u32,
    address_bits: u32,
    out: *mut *mut PortcullisDevice,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (name, out) = unsafe { (self::name(name)?, place(out)?) };
        let wanted = wanted(policy, address_bits)?;
        // Before the device is opened, which resets it.
        let platform = StdPlatform::try_new().map_err(|error| Failed::new(PortcullisOpen, error))?;
        let device = vfio::Device::open(name)?;
        // SAFETY: all memory that the domain is given is this process's: the heap's, and what C programs name by their own addresses.
        let mapper = unsafe { device.space().mapper() };
        let builder =
            DomainBuilder::new(mapper).bounce(Heap, PoolConfig::default().reached_by(wanted.1.last()));
        let domain = builder.build(platform).map_err(|error| Failed::new(PortcullisOpen, error))?;
        out.put(given(PortcullisDevice::new(device, domain, wanted)?)?);
        Ok(())
    })
}

/// As portcullis_device_open, in the address space of `sibling`: both devices reach what is mapped for either. Where this one has fewer bits of
/// addresses, it does not reach the pool's buffers, and each of its copies takes two system calls: open it first.
///
/// # Safety
/// As portcullis_device_open, and `sibling` is a device that is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_open_in(
    name: *const c_char,
    sibling: *const PortcullisDevice,
    policy: u32,
    address_bits: u32,
    out: *mut *mut PortcullisDevice,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (name, sibling, out) = unsafe { (self::name(name)?, device(sibling)?, place(out)?) };
        let wanted = wanted(policy, address_bits)?;
        let opened = vfio::Device::open_in(name, sibling.device.space())?;
        let domain = sibling.domain.clone();
        out.put(given(PortcullisDevice::new(opened, domain, wanted)?)?);
        Ok(())
    })
}

/// Closes a device, or nothing where `device` is null: the device loses the bus, all of its mappings end, and the kernel resets it. Its
/// memory, its registers and its queues are gone: the queues are freed before.
///
/// Returns PORTCULLIS_REACHABLE where the kernel did not take all mappings back: it does when the process ends.
///
/// # Safety
/// `device` is null or a device that is open, nothing else is called with it at the same time or later, and it has no queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_close(device: *mut PortcullisDevice) -> c_int {
    if device.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise: it is of an `open`, and ends once.
    let device = unsafe { Box::from_raw(device) };
    code(move || {
        // One that is gone, or has no such register, is kept from memory by the kernel's reset.
        let _ = device.device.set_bus_master(false);
        // SAFETY: nothing else is called with this device.
        let ended = unsafe { device.ops.unmap_all() };
        let shared = std::mem::take(&mut *device.shared());
        let mut freed = Ok(());
        for memory in shared {
            freed = freed.and(memory.free());
        }
        ended.map_err(|error| Failed::new(PortcullisReachable, error))?;
        Ok(freed?)
    })
}

/// Writes where the registers behind base address register `number` (0 to 5) are in this process, and how many bytes there are. They are
/// there until the device is closed. Six system calls the first time.
///
/// Accesses are volatile, of 4 or 8 bytes, and little-endian. After portcullis_device_release all reads are 0, and writes change nothing. A device that was
/// pulled out without a warning reads as all bits set; while it does not answer at all, as in a low power state, an access ends the process by SIGBUS. On x86-64 a device
/// that acts on a write sees what the CPU has stored before it; on other machines that takes a barrier of the driver's own, for each write that starts a transfer.
///
/// # Safety
/// `device` is open, and `registers` and `size` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_bar(
    device: *const PortcullisDevice,
    number: u32,
    registers: *mut *mut u8,
    size: *mut usize,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (device, registers, size) = unsafe { (self::device(device)?, place(registers)?, place(size)?) };
        let found = device.registers(number).map_err(|error| Failed::system("the registers", &error))?;
        registers.put(found.0);
        size.put(found.1);
        Ok(())
    })
}

/// Reads `len` bytes of PCI's configuration space from `offset` on. Two system calls.
///
/// # Safety
/// `device` is open, and `len` bytes at `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_read_config(
    device: *const PortcullisDevice,
    offset: u64,
    out: *mut u8,
    len: usize,
) -> c_int {
    code(|| {
        if len > CONFIG_BYTES {
            return Err(Failed::argument("a configuration space has 4096 bytes"));
        }
        // SAFETY: the caller's promise.
        let (device, out) = unsafe { (self::device(device)?, place(out)?) };
        let mut bytes = [0; CONFIG_BYTES];
        let bytes = &mut bytes[..len];
        device
            .device
            .read_config(offset, bytes)
            .map_err(|error| Failed::system("the configuration space", &error))?;
        // SAFETY: the caller's promise: as many bytes may be written there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.0.as_ptr(), len) };
        Ok(())
    })
}

/// Bytes of a PCI Express device's configuration space.
const CONFIG_BYTES: usize = 4096;

/// Writes `len` bytes at `bytes` to PCI's configuration space from `offset` on. The kernel keeps its own from being changed. Two system calls.
///
/// # Safety
/// `device` is open, and `len` bytes at `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_write_config(
    device: *const PortcullisDevice,
    offset: u64,
    bytes: *const u8,
    len: usize,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { self::device(device) }?;
        if bytes.is_null() || len > CONFIG_BYTES {
            return Err(Failed::argument(
                "the bytes are null, or more than the 4096 of a configuration space",
            ));
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, len) };
        device
            .device
            .write_config(offset, bytes)
            .map_err(|error| Failed::system("the configuration space", &error))
    })
}

/// Lets the device make accesses of its own (`on` is not 0), or keeps it from them. An open device makes none before. Four system calls.
///
/// # Safety
/// `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_set_bus_master(
    device: *const PortcullisDevice,
    on: c_int,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { self::device(device) }?;
        device.device.set_bus_master(on != 0).map_err(|error| Failed::system("the command register", &error))
    })
}

/// Resets the device, which takes up to a second. Its mappings stay.
///
/// # Safety
/// `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_reset(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { self::device(device) }?;
        device.device.reset().map_err(|error| Failed::system("the reset", &error))
    })
}

/// Lets go of a device that is to be unplugged, while it is open: it reaches no memory any more, its registers are memory of zeros, and the kernel goes on with the
/// unplug. Each of its interrupts' files can be read once more, as if it was raised: a thread that waits wakes, and finds that calls of the device fail.
///
/// Its buffers come back as always: by portcullis_unmap, portcullis_unmap_all and the queues' functions. A buffer is unmapped before it is freed: a device that is opened in this
/// address space later reaches all that is still mapped. The device is closed afterwards. Where a child of fork has the device, too, the child's end is its end.
///
/// Takes up to a second. PORTCULLIS_SYSTEM: the kernel has no memory for that, or another process has the device, too.
///
/// # Safety
/// `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_release(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { self::device(device) }?;
        device.device.release().map_err(|error| Failed::system("the device's release", &error))
    })
}

/// What a device has mapped and done.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PortcullisUsage {
    /// Mappings made by portcullis_map and portcullis_map_list.
    pub maps: u64,
    /// Of these, made through copies.
    pub copies: u64,
    /// Of these, ended.
    pub unmaps: u64,
    /// Calls that were refused, or failed.
    pub errors: u64,
    /// Bytes of buffers that the device reaches now.
    pub open_bytes: u64,
    /// Bytes beside these, in the same pages, that the device reaches now.
    pub exposed_bytes: u64,
    /// Mappings of the kernel's in the address space now, of all of its devices.
    pub kernel_mappings: u64,
    /// Bytes of these, all of which are locked in memory.
    pub kernel_bytes: u64,
    /// System calls that mapped or unmapped, since the address space was made.
    pub kernel_calls: u64,
}

/// Writes what the device has mapped and done to `out`. Takes locks, and no system call.
///
/// # Safety
/// `device` is open, and `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_usage(
    device: *const PortcullisDevice,
    out: *mut PortcullisUsage,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (device, out) = unsafe { (self::device(device)?, place(out)?) };
        let (ops, kernel) = (device.ops.usage(), device.device.space().usage());
        out.put(PortcullisUsage {
            maps: ops.maps,
            copies: ops.copies,
            unmaps: ops.unmaps,
            errors: ops.errors,
            open_bytes: ops.open_bytes,
            exposed_bytes: ops.exposed_bytes,
            kernel_mappings: kernel.mappings,
            kernel_bytes: kernel.bytes,
            kernel_calls: kernel.calls,
        });
        Ok(())
    })
}

/// The library's version, like "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn portcullis_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Any number of threads call a device's functions at once.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<PortcullisDevice>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_a_page_of_addresses_or_more() {
        let of = |bits| wanted(0, bits).is_ok();
        assert_eq!([11, 12, 64, 65].map(of), [false, true, true, false]);
    }
}
