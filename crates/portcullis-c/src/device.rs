//! Devices: opening with a protection policy, and closing.

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
    /// Each buffer is mapped, and unmapped again: two system calls.
    PortcullisStrict = 0,
    /// Buffers of up to 128 KiB are copied, through memory that stays mapped: no system call, and the device never reaches the buffer.
    /// Larger ones are mapped.
    PortcullisBounce = 1,
    /// For each size the cheaper of the two, as measured at run time.
    PortcullisAuto = 2,
}

/// Base address registers of a device.
const BARS: usize = 6;

pub(crate) type Shared = CoherentMemory<Heap, KernelMapper, StdPlatform>;

/// A PCI device that this process drives, and its mappings.
#[derive(Debug)]
pub struct PortcullisDevice {
    // In the order of their drops.
    pub(crate) ops: DmaOps<Machine>,
    /// Coherent memory.
    shared: Mutex<Vec<Shared>>,
    pub(crate) attached: dma::Device<Machine>,
    domain: DmaDomain<Machine>,
    bars: Mutex<[Option<Registers>; BARS]>,
    pub(crate) interrupts: Mutex<Vec<Arc<Interrupt>>>,
    pub(crate) unplug_request: Mutex<Option<Interrupt>>,
    pub(crate) device: vfio::Device,
}

/// Checks a caller's policy and address width.
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
    // No code panics half-way while it is held.
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

/// The device behind a caller's pointer.
///
/// # Safety
/// 1. It is null, or of a successful `open`.
/// 2. It is not closed while the reference lives.
pub(crate) unsafe fn device<'a>(device: *const PortcullisDevice) -> Result<&'a PortcullisDevice> {
    // SAFETY: clauses 1 and 2.
    unsafe { device.as_ref() }.ok_or_else(|| Failed::argument("the device is null"))
}

/// The target of a result, which may be uninitialised.
pub(crate) struct Place<T>(pub(crate) NonNull<T>);

/// # Safety
/// 1. It is null, or may be written until the function returns.
pub(crate) unsafe fn place<T>(out: *mut T) -> Result<Place<T>> {
    NonNull::new(out).map(Place).ok_or_else(|| Failed::argument("the pointer for the result is null"))
}

impl<T> Place<T> {
    #[inline]
    pub(crate) fn put(self, value: T) {
        // SAFETY: clause 1 of `place`.
        unsafe { self.0.write(value) }
    }
}

/// # Safety
/// 1. It is null, or a zero-terminated string.
unsafe fn name<'a>(name: *const c_char) -> Result<&'a str> {
    if name.is_null() {
        return Err(Failed::argument("the name is null"));
    }
    // SAFETY: clause 1.
    let name = unsafe { CStr::from_ptr(name) }.to_str();
    name.map_err(|_| Failed::argument("the name is no text: names are like 0000:01:00.0"))
}

/// Opens the PCI device `name`, like "0000:01:00.0", in an address space of its own: by iommufd if the kernel has it, else by type 1
/// of VFIO. The device must be bound to VFIO; the error's text says how. `policy` is a portcullis_policy, and `address_bits` is the width
/// of the device's addresses, 12 to 64.
///
/// Writes the device to `out`: portcullis_device_close ends it. The kernel resets the device. Makes a dozen system calls. PORTCULLIS_AUTO
/// measures at run time, not here.
///
/// # Safety
/// 1. `name` is a zero-terminated string. 2. `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_open(
    name: *const c_char,
    policy: u32,
    address_bits: u32,
    out: *mut *mut PortcullisDevice,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (name, out) = unsafe { (self::name(name)?, place(out)?) };
        let wanted = wanted(policy, address_bits)?;
        // Before the device is opened, which resets it.
        let platform = StdPlatform::try_new().map_err(|error| Failed::new(PortcullisOpen, error))?;
        let device = vfio::Device::open(name)?;
        // SAFETY: 1: all memory of the domain is this process's: the heap's, and C programs' by their own addresses. 2: clause 3 of
        // `portcullis_map`, whose text says that a mapped buffer opens the rest of its pages.
        let mapper = unsafe { device.space().mapper() };
        let builder =
            DomainBuilder::new(mapper).bounce(Heap, PoolConfig::default().reached_by(wanted.1.last()));
        let domain = builder.build(platform).map_err(|error| Failed::new(PortcullisOpen, error))?;
        out.put(given(PortcullisDevice::new(device, domain, wanted)?)?);
        Ok(())
    })
}

/// As portcullis_device_open, in the address space of `sibling`: both devices reach the mappings of either. If this one has narrower
/// addresses, it does not reach the pool's buffers, and each of its copies takes two system calls: open it first.
///
/// # Safety
/// 1. As portcullis_device_open, 1 and 2. 2. `sibling` is an open device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_open_in(
    name: *const c_char,
    sibling: *const PortcullisDevice,
    policy: u32,
    address_bits: u32,
    out: *mut *mut PortcullisDevice,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (name, sibling, out) = unsafe { (self::name(name)?, device(sibling)?, place(out)?) };
        let wanted = wanted(policy, address_bits)?;
        let opened = vfio::Device::open_in(name, sibling.device.space())?;
        let domain = sibling.domain.clone();
        out.put(given(PortcullisDevice::new(opened, domain, wanted)?)?);
        Ok(())
    })
}

/// Closes a device, or does nothing if `device` is null: turns bus mastering off, ends all mappings, and makes the kernel reset the device.
/// Its memory and its registers are gone, and its queues must have been freed.
///
/// Returns PORTCULLIS_REACHABLE if the kernel did not remove all mappings: it does when the process ends.
///
/// # Safety
/// 1. `device` is null or an open device. 2. No other call with it runs at the same time or later. 3. It has no queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_close(device: *mut PortcullisDevice) -> c_int {
    if device.is_null() {
        return 0;
    }
    // SAFETY: by clauses 1 and 2 it is of an `open`, and ends once.
    let device = unsafe { Box::from_raw(device) };
    code(move || {
        // The kernel's reset stops a device that is gone, or has no such register.
        let _ = device.device.set_bus_master(false);
        // SAFETY: clause 2: no other call with this device runs.
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

/// Writes the address of the registers behind base address register `number` (0 to 5), and their size in bytes. They exist until the device
/// is closed. Six system calls the first time.
///
/// Accesses are volatile, of 4 or 8 bytes, and little-endian. After portcullis_device_release all reads are 0, and writes change nothing.
/// After surprise removal all bits of a read are set; while the device does not answer at all, as in a low power state, an access raises
/// SIGBUS. On x86-64 a device that acts on a write sees the CPU's earlier stores; on other machines the driver needs a barrier for each
/// write that starts a transfer.
///
/// # Safety
/// 1. `device` is open. 2. `registers` and `size` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_bar(
    device: *const PortcullisDevice,
    number: u32,
    registers: *mut *mut u8,
    size: *mut usize,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, registers, size) = unsafe { (self::device(device)?, place(registers)?, place(size)?) };
        let found = device.registers(number).map_err(|error| Failed::system("the registers", &error))?;
        registers.put(found.0);
        size.put(found.1);
        Ok(())
    })
}

/// Reads `len` bytes of PCI configuration space from `offset` on. Two system calls.
///
/// # Safety
/// 1. `device` is open. 2. `len` bytes at `out` may be written.
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
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, out) = unsafe { (self::device(device)?, place(out)?) };
        let mut bytes = [0; CONFIG_BYTES];
        let bytes = &mut bytes[..len];
        device
            .device
            .read_config(offset, bytes)
            .map_err(|error| Failed::system("the configuration space", &error))?;
        // SAFETY: clause 2: this many bytes may be written there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.0.as_ptr(), len) };
        Ok(())
    })
}

const CONFIG_BYTES: usize = 4096;

/// Writes `len` bytes at `bytes` to PCI configuration space from `offset` on. The kernel protects its own fields. Two system calls.
///
/// # Safety
/// 1. `device` is open. 2. `len` bytes at `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_write_config(
    device: *const PortcullisDevice,
    offset: u64,
    bytes: *const u8,
    len: usize,
) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let device = unsafe { self::device(device) }?;
        if bytes.is_null() || len > CONFIG_BYTES {
            return Err(Failed::argument(
                "the bytes are null, or more than the 4096 of a configuration space",
            ));
        }
        // SAFETY: clause 2 is the caller's.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, len) };
        device
            .device
            .write_config(offset, bytes)
            .map_err(|error| Failed::system("the configuration space", &error))
    })
}

/// Turns bus mastering on (`on` is not 0) or off. An open device makes no accesses before. Four system calls.
///
/// # Safety
/// 1. `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_set_bus_master(
    device: *const PortcullisDevice,
    on: c_int,
) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let device = unsafe { self::device(device) }?;
        device.device.set_bus_master(on != 0).map_err(|error| Failed::system("the command register", &error))
    })
}

/// Resets the device, which takes up to a second. Its mappings stay.
///
/// # Safety
/// 1. `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_reset(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let device = unsafe { self::device(device) }?;
        device.device.reset().map_err(|error| Failed::system("the reset", &error))
    })
}

/// Releases a device that is to be unplugged, while it stays open: it no longer reaches memory, its registers become zeroed memory, and the
/// kernel continues the unplug. Each of its interrupts' files can be read once more: waiting threads wake, and find that calls of the
/// device fail.
///
/// Its buffers are returned as always: by portcullis_unmap, portcullis_unmap_all and the queues' functions. Unmap a buffer before freeing
/// it: a device that is opened in this address space later reaches all remaining mappings. Close the device afterwards. If a child of fork
/// has the device, too, it goes on until the child ends.
///
/// Takes up to a second. PORTCULLIS_SYSTEM: the kernel has no memory for that, or another process has the device, too.
///
/// # Safety
/// 1. `device` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_release(device: *const PortcullisDevice) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let device = unsafe { self::device(device) }?;
        device.device.release().map_err(|error| Failed::system("the device's release", &error))
    })
}

/// The mappings of a device, and its counts.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PortcullisUsage {
    /// Mappings made by portcullis_map and portcullis_map_list.
    pub maps: u64,
    /// Of these, copied ones.
    pub copies: u64,
    /// Of these, ended ones.
    pub unmaps: u64,
    /// Refused or failed calls.
    pub errors: u64,
    /// Bytes of buffers that the device reaches now.
    pub open_bytes: u64,
    /// Other bytes of their pages, which the device reaches now.
    pub exposed_bytes: u64,
    /// The kernel's current mappings in the address space, of all its devices.
    pub kernel_mappings: u64,
    /// Their bytes, all of which are locked in memory.
    pub kernel_bytes: u64,
    /// System calls of maps and unmaps, since the address space was made.
    pub kernel_calls: u64,
}

/// Writes the device's mappings and counts to `out`. Takes locks, and makes no system call.
///
/// # Safety
/// 1. `device` is open. 2. `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_device_usage(
    device: *const PortcullisDevice,
    out: *mut PortcullisUsage,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
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

/// Any number of threads may call a device's functions at once.
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
