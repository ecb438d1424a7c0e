//! An address space of iommufd: an IOAS, to which device files are attached. Linux 6.6 or later, with `CONFIG_IOMMUFD` and
//! `CONFIG_VFIO_DEVICE_CDEV`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use iommufd_bindings::{
    IOMMUFD_CMD_IOAS_ALLOC, IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_CMD_IOAS_MAP, IOMMUFD_CMD_IOAS_MAP_FILE,
    IOMMUFD_CMD_IOAS_UNMAP, iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_map_file,
    iommu_ioas_unmap, iommu_iova_range, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
};
use portcullis::addr::{IovaRange, Permissions};
use vfio_bindings::bindings::vfio::{vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd};

use super::calls::Calls;
use super::error::OpenError;
use super::ioctl::{call, code, iommufd, vfio};
use super::ranges::{Ranges, from_kernel};
use super::sysfs::{Place, open};
use crate::buffer::file::file_at;

pub const PATH: &str = "/dev/iommu";

/// The most ranges in one answer. (A PC has two or three.)
const RANGES: usize = 64;

#[derive(Debug)]
pub struct Iommufd {
    file: File,
    ioas: u32,
}

const fn size_of_u32<T>() -> u32 {
    size_of::<T>() as u32
}

impl Iommufd {
    pub fn open() -> Result<Self, OpenError> {
        let file = open(PATH)?;
        let mut alloc = iommu_ioas_alloc { size: size_of_u32::<iommu_ioas_alloc>(), ..Default::default() };
        // SAFETY: clause 1: this call's structure, without pointers.
        let made = unsafe { call(file.as_fd(), iommufd(IOMMUFD_CMD_IOAS_ALLOC), &mut alloc) };
        made.map_err(|error| OpenError::call("IOMMU_IOAS_ALLOC", error))?;
        Ok(Self { file, ioas: alloc.out_ioas_id })
    }

    /// Binds the device to this iommufd.
    pub fn bind(&self, device: &File) -> io::Result<()> {
        let mut bind = vfio_device_bind_iommufd {
            argsz: size_of_u32::<vfio_device_bind_iommufd>(),
            iommufd: self.file.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: clause 1: this call's structure, without pointers.
        unsafe { call(device.as_fd(), vfio(18), &mut bind) }.map(drop)
    }

    /// Attaches a bound device to this IOAS.
    pub fn attach(&self, device: &File) -> io::Result<()> {
        let mut attach = vfio_device_attach_iommufd_pt {
            argsz: size_of_u32::<vfio_device_attach_iommufd_pt>(),
            pt_id: self.ioas,
            ..Default::default()
        };
        // SAFETY: clause 1: this call's structure, without pointers.
        unsafe { call(device.as_fd(), vfio(19), &mut attach) }.map(drop)
    }

    /// Maps a part of a file, by descriptor and offset.
    fn map_file(&self, range: IovaRange, (fd, start): (i32, u64), flags: u32) -> Result<(), i32> {
        let mut map = iommu_ioas_map_file {
            size: size_of_u32::<iommu_ioas_map_file>(),
            flags,
            ioas_id: self.ioas,
            fd,
            start,
            length: range.len(),
            iova: range.start().get(),
        };
        // SAFETY: clause 1: this call's structure. The kernel pins the file's memory.
        unsafe { call(self.file.as_fd(), iommufd(IOMMUFD_CMD_IOAS_MAP_FILE), &mut map) }
            .map(drop)
            .map_err(|error| code(&error))
    }

    /// The addresses that all attached devices can use, and the alignment of mappings.
    pub fn ranges(&self) -> io::Result<Ranges> {
        let mut found = [iommu_iova_range::default(); RANGES];
        let mut asked = iommu_ioas_iova_ranges {
            size: size_of_u32::<iommu_ioas_iova_ranges>(),
            ioas_id: self.ioas,
            num_iovas: RANGES as u32,
            allowed_iovas: found.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: clause 1: this call's structure, which points to as many ranges as it says.
        unsafe { call(self.file.as_fd(), iommufd(IOMMUFD_CMD_IOAS_IOVA_RANGES), &mut asked) }?;
        let allowed = found.iter().take(asked.num_iovas as usize);
        let allowed = allowed.filter_map(|range| from_kernel(range.start, range.last));
        Ok(Ranges { allowed: allowed.collect(), page_sizes: asked.out_iova_alignment, most_mappings: None })
    }
}

/// Opens a device by its own file, and binds it.
pub fn bind(kernel: &Iommufd, place: &Place) -> Result<File, OpenError> {
    let cdev = place.cdev()?.ok_or(OpenError::NoVfio)?;
    let file = open(&cdev)?;
    kernel.bind(&file).map_err(|error| match code(&error) {
        libc::EPERM => OpenError::UnsafeInterrupts { parameter: "iommufd.allow_unsafe_interrupts=1" },
        libc::EBUSY => place.not_viable(),
        // Another file of it is bound.
        libc::EINVAL => OpenError::Busy { path: cdev },
        _ => OpenError::call("VFIO_DEVICE_BIND_IOMMUFD", error),
    })?;
    Ok(file)
}

// SAFETY: by the kernel's documentation of iommufd (`Documentation/userspace-api/iommufd.rst`, `linux/iommufd.h`). 1: an unmap removes
// whole mappings from the page tables of all attached devices and unpins their pages, so it invalidates the IOTLB before. If it would split
// a mapping it fails. 2: a mapping has exactly the addresses requested (FIXED_IOVA), and none that are in use.
unsafe impl Calls for Iommufd {
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32> {
        let readable = if permissions.allows(Permissions::READ) { READABLE } else { 0 };
        let writeable = if permissions.allows(Permissions::WRITE) { WRITEABLE } else { 0 };
        let flags = FIXED | readable | writeable;
        let by_file = file_at(address, range.len())
            .map(|(file, start)| self.map_file(range, (file.as_raw_fd(), start), flags));
        match by_file {
            // The kernel does not have the call, or not for this kind of file.
            None | Some(Err(libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL | libc::EBADF)) => {}
            Some(done) => return done,
        }
        let mut map = iommu_ioas_map {
            size: size_of_u32::<iommu_ioas_map>(),
            flags,
            ioas_id: self.ioas,
            user_va: address,
            length: range.len(),
            iova: range.start().get(),
            ..Default::default()
        };
        // SAFETY: clause 1: this call's structure. The kernel pins the memory, and checks that it is the process's.
        unsafe { call(self.file.as_fd(), iommufd(IOMMUFD_CMD_IOAS_MAP), &mut map) }
            .map(drop)
            .map_err(|error| code(&error))
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, i32> {
        let mut unmap = iommu_ioas_unmap {
            size: size_of_u32::<iommu_ioas_unmap>(),
            ioas_id: self.ioas,
            iova: range.start().get(),
            length: range.len(),
        };
        // SAFETY: clause 1: this call's structure, without pointers.
        match unsafe { call(self.file.as_fd(), iommufd(IOMMUFD_CMD_IOAS_UNMAP), &mut unmap) } {
            Ok(_) => Ok(unmap.length),
            // Even if nothing is mapped: older kernels return the same for a range that splits a mapping, whose pages devices go on
            // reaching.
            Err(error) => Err(code(&error)),
        }
    }
}
