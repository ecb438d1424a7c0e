//! A [`Device`] that this process drives: its registers, and the address space that its accesses go through.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use portcullis::addr::DeviceId;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP, vfio_region_info,
};

use super::error::OpenError;
use super::ioctl::{call, call_with, code, vfio};
use super::iommufd::{self, Iommufd};
use super::space::{AddressSpace, Kernel};
use super::sysfs::{IOMMUS, Place, open, path};
use super::type1::{self, Container};

const GET_REGION_INFO: u64 = vfio(8);
const RESET: u64 = vfio(11);

/// The command register of PCI's configuration space, and its bits for memory and for accesses of the device's own (PCI Local Bus
/// Specification 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A PCI device in the hands of this process. The kernel resets it, where it knows how, when it and all of its [`Registers`] are
/// dropped, and when the process ends: each of these holds the device's file.
///
/// It makes no access of its own before [`set_bus_master`](Self::set_bus_master). After that it reaches what is mapped in its
/// [address space](Self::space), and nothing else.
#[derive(Debug)]
pub struct Device {
    file: File,
    place: Place,
    space: AddressSpace,
}

impl Device {
    /// Opens the device of this name, like `0000:01:00.0`, with an address space of its own: by iommufd where the kernel has it, else
    /// by VFIO's type 1. VFIO must have the device; the error says how to give it. Makes a dozen system calls, and the kernel resets
    /// the device.
    ///
    /// # Errors
    /// [`OpenError`] says what to do.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        if let Some(cdev) = place.cdev().filter(|_| path(iommufd::PATH).exists()) {
            let kernel = Arc::new(Iommufd::open()?);
            let file = bind(&kernel, &place, &cdev)?;
            kernel.attach(&file).map_err(|error| OpenError::call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", error))?;
            let ranges = kernel.ranges().map_err(|error| OpenError::call("IOMMU_IOAS_IOVA_RANGES", error))?;
            let space = AddressSpace::new(Kernel::Iommufd(kernel), &ranges)?;
            return Ok(Self { file, place, space });
        }
        Self::open_by_type1(place)
    }

    /// As [`open`](Self::open), by VFIO's type 1 even where the kernel has iommufd.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_type1(name: &str) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        Self::open_by_type1(place)
    }

    fn open_by_type1(place: Place) -> Result<Self, OpenError> {
        if !path(type1::PATH).exists() {
            return Err(OpenError::NoVfio);
        }
        let container = Arc::new(Container::open()?);
        let file = container.add(&place)?;
        let ranges = container.ranges().map_err(|error| OpenError::call("VFIO_IOMMU_GET_INFO", error))?;
        let space = AddressSpace::new(Kernel::Type1(container), &ranges)?;
        Ok(Self { file, place, space })
    }

    /// As [`open`](Self::open), in an address space that another device has: both reach what is mapped there.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`OpenError::OtherAddresses`] where the device can use less than the space has.
    pub fn open_in(name: &str, space: &AddressSpace) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        let (file, ranges) = match &space.kernel {
            Kernel::Iommufd(kernel) => {
                let cdev = place.cdev().ok_or(OpenError::NoVfio)?;
                let file = bind(kernel, &place, &cdev)?;
                kernel.attach(&file).map_err(|error| match code(&error) {
                    libc::EADDRINUSE | libc::EINVAL => OpenError::OtherAddresses { name: name.to_owned() },
                    _ => OpenError::call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", error),
                })?;
                (file, kernel.ranges())
            }
            Kernel::Type1(container) => (container.add(&place)?, container.ranges()),
        };
        let ranges = ranges.map_err(|error| OpenError::call("the ranges of addresses", error))?;
        if !ranges.allow(space.geometry()) {
            return Err(OpenError::OtherAddresses { name: name.to_owned() });
        }
        Ok(Self { file, place, space: space.clone() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// The number by which it makes its accesses: bus, device and function.
    pub fn id(&self) -> DeviceId {
        self.place.id()
    }

    /// What its accesses go through.
    pub fn space(&self) -> &AddressSpace {
        &self.space
    }

    /// The registers behind base address register `number`, 0 to 5, which the device is told to answer for. Makes six system calls.
    ///
    /// An access to them ends the process by a signal (`SIGBUS`) while the device does not answer: after [`write_config`](Self::write_config)
    /// has taken that back, in a low power state, or unplugged.
    ///
    /// # Errors
    /// Where there are none, or they cannot be mapped.
    pub fn bar(&self, number: u32) -> io::Result<Registers> {
        let region = self.region(number)?;
        if number > 5 || region.size == 0 || region.flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} has no registers behind BAR {number}", self.name()),
            ));
        }
        let len = usize::try_from(region.size).map_err(io::Error::other)?;
        self.change_command(|command| command | MEMORY)?;
        let memory = MmapOptions::new().offset(region.offset).len(len).map_raw(&self.file)?;
        Ok(Registers { memory })
    }

    fn region(&self, index: u32) -> io::Result<vfio_region_info> {
        let mut region =
            vfio_region_info { argsz: size_of::<vfio_region_info>() as u32, index, ..Default::default() };
        // SAFETY: it is this call's structure, and points nowhere.
        unsafe { call(self.file.as_fd(), GET_REGION_INFO, &mut region) }?;
        Ok(region)
    }

    /// Reads PCI's configuration space from `offset` on. One or two system calls.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read_config(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        self.file.read_exact_at(out, region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?)
    }

    /// Writes to PCI's configuration space. The kernel keeps what is its own from being changed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_config(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        self.file.write_all_at(bytes, region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?)
    }

    /// Lets the device make accesses of its own, or keeps it from them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_bus_master(&self, on: bool) -> io::Result<()> {
        self.change_command(|command| if on { command | BUS_MASTER } else { command & !BUS_MASTER })
    }

    fn change_command(&self, change: impl FnOnce(u16) -> u16) -> io::Result<()> {
        let mut command = [0; 2];
        self.read_config(COMMAND, &mut command)?;
        self.write_config(COMMAND, &change(u16::from_le_bytes(command)).to_le_bytes())
    }

    /// Resets the device, which takes up to a second.
    ///
    /// # Errors
    /// The kernel's; `ENOTTY` where it knows no way to reset it.
    pub fn reset(&self) -> io::Result<()> {
        // SAFETY: it takes a number.
        unsafe { call_with(self.file.as_fd(), RESET, 0) }.map(drop)
    }
}

fn bind(kernel: &Iommufd, place: &Place, cdev: &str) -> Result<File, OpenError> {
    let file = open(cdev)?;
    kernel.bind(&file).map_err(|error| match code(&error) {
        libc::EPERM => OpenError::UnsafeInterrupts { parameter: "iommufd.allow_unsafe_interrupts=1" },
        libc::EBUSY => place.not_viable(),
        // Another file of it is bound.
        libc::EINVAL => OpenError::Busy { path: cdev.to_owned() },
        _ => OpenError::call("VFIO_DEVICE_BIND_IOMMUFD", error),
    })?;
    Ok(file)
}

/// The registers of a device, mapped into the process. Each access is one of the device's bus, of the width that is named.
///
/// On x86-64 a device that acts on a write sees what the CPU has stored to memory before it, and a CPU sees after a read what the device
/// stored before its answer. On other machines it takes barriers of the driver's own.
#[derive(Debug)]
pub struct Registers {
    memory: MmapRaw,
}

macro_rules! accesses {
    ($($read:ident, $write:ident: $word:ty),*) => {$(
        /// Reads the register at `offset`; `None` where there is none that is aligned.
        pub fn $read(&self, offset: usize) -> Option<$word> {
            let at = self.at::<$word>(offset)?;
            // SAFETY: it is inside of the registers, and aligned.
            let value = <$word>::from_le(unsafe { at.read_volatile() });
            // Keeps the compiler from moving later accesses of memory before it. Of x86's CPUs none does: VFIO maps registers uncached.
            fence(Ordering::Acquire);
            Some(value)
        }

        /// Writes the register at `offset`; `None`, with nothing written, where there is none that is aligned.
        pub fn $write(&self, offset: usize, value: $word) -> Option<()> {
            let at = self.at::<$word>(offset)?;
            // As after a read, for earlier accesses.
            fence(Ordering::Release);
            // SAFETY: it is inside of the registers, and aligned. What a device does then, it does within what is mapped for it.
            unsafe { at.write_volatile(value.to_le()) };
            Some(())
        }
    )*};
}

impl Registers {
    /// How many bytes there are.
    pub fn size(&self) -> usize {
        self.memory.len()
    }

    /// Where they are in this process, as long as this value lives: for accesses that are volatile, aligned and inside of
    /// [`size`](Self::size).
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }

    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        let is_inside =
            offset.checked_add(size_of::<T>())? <= self.memory.len() && offset.is_multiple_of(size_of::<T>());
        // SAFETY: it is inside of the mapping.
        is_inside.then(|| unsafe { self.memory.as_mut_ptr().add(offset) }.cast())
    }

    accesses! { read32, write32: u32, read64, write64: u64 }
}
