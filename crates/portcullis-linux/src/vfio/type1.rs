//! An address space of VFIO's type 1, version 2: a container of groups of devices. Linux 5.4 or later.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::{Mutex, PoisonError};

use portcullis::addr::{IovaRange, Permissions};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_VIABLE,
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_TYPE1v2_IOMMU, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info,
};

use super::calls::Calls;
use super::error::OpenError;
use super::ioctl::{call, call_with, code, vfio};
use super::ranges::{Ranges, from_kernel};
use super::sysfs::{Place, open};

pub const PATH: &str = "/dev/vfio/vfio";

const GET_API_VERSION: u64 = vfio(0);
const CHECK_EXTENSION: u64 = vfio(1);
const SET_IOMMU: u64 = vfio(2);
const GROUP_GET_STATUS: u64 = vfio(3);
const GROUP_SET_CONTAINER: u64 = vfio(4);
const GROUP_UNSET_CONTAINER: u64 = vfio(5);
const GROUP_GET_DEVICE_FD: u64 = vfio(6);
const IOMMU_GET_INFO: u64 = vfio(12);
const IOMMU_MAP_DMA: u64 = vfio(13);
const IOMMU_UNMAP_DMA: u64 = vfio(14);

/// ID of the capability with the mappings left; `linux/vfio.h` defines it since Linux 5.10.
const DMA_AVAIL: u32 = 3;
/// The most bytes of the kernel's answer that are read.
const MOST_INFO: usize = 64 << 10;

#[derive(Debug)]
pub struct Container {
    file: File,
    /// The groups, by number. The container keeps each until its last device has gone, and its mappings as long as it has a group.
    groups: Mutex<HashMap<u32, Group>>,
}

#[derive(Debug)]
struct Group {
    file: File,
    /// Devices of it that this process has open.
    devices: usize,
}

impl Container {
    pub fn open() -> Result<Self, OpenError> {
        let file = open(PATH)?;
        // SAFETY: clause 1: both take a number.
        let version = unsafe { call_with(file.as_fd(), GET_API_VERSION, 0) };
        // SAFETY: as above.
        let has_type1 = unsafe { call_with(file.as_fd(), CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU.into()) };
        match (version, has_type1) {
            (Ok(version), Ok(1..)) if version == VFIO_API_VERSION as i32 => {
                Ok(Self { file, groups: Mutex::default() })
            }
            _ => Err(OpenError::NoVfio),
        }
    }

    /// Adds the group of a device, if it is missing, and opens the device. Returns its file, and the group's number.
    pub fn add(&self, place: &Place) -> Result<(File, u32), OpenError> {
        let number = place.group()?;
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = groups.is_empty();
        let group = match groups.entry(number) {
            Entry::Occupied(group) => group.into_mut(),
            Entry::Vacant(place_of) => {
                let file = self.add_group(place, number, is_first)?;
                place_of.insert(Group { file, devices: 0 })
            }
        };
        let name =
            CString::new(place.name()).map_err(|_| OpenError::NoDevice { name: place.name().to_owned() })?;
        // SAFETY: the call reads the terminated name.
        let device = unsafe { call_with(group.file.as_fd(), GROUP_GET_DEVICE_FD, name.as_ptr() as u64) };
        let device = match device {
            // SAFETY: the kernel has just opened it for this call.
            Ok(device) => unsafe { File::from_raw_fd(device) },
            Err(error) => {
                // A group that was added for this device is removed again.
                let _ = Self::without(&mut groups, number);
                return Err(OpenError::call("VFIO_GROUP_GET_DEVICE_FD", error));
            }
        };
        group.devices += 1;
        Ok((device, number))
    }

    /// Removes a device of this group, whose file is closed, and the group with its last device. Returns whether a group is left: otherwise
    /// the kernel has removed all mappings.
    ///
    /// # Errors
    /// `EBUSY`: another process has the device's file, and everything is still mapped.
    pub fn remove(&self, number: u32) -> io::Result<bool> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get_mut(&number) {
            group.devices = group.devices.saturating_sub(1);
        }
        Self::without(&mut groups, number)?;
        Ok(!groups.is_empty())
    }

    /// Repeats a [`remove`](Self::remove) that failed.
    ///
    /// # Errors
    /// `EBUSY`, also if another device of the group is open here: the kernel reports only that nobody has the whole group.
    pub fn remove_again(&self, number: u32) -> io::Result<bool> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.get(&number).is_some_and(|group| group.devices > 0) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        Self::without(&mut groups, number)?;
        Ok(!groups.is_empty())
    }

    /// Tries again to remove groups that the kernel has kept for another process. Returns whether a group is left, as
    /// [`remove`](Self::remove).
    pub fn has_group(&self) -> bool {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let idle: Vec<u32> =
            groups.iter().filter(|(_, group)| group.devices == 0).map(|(number, _)| *number).collect();
        for number in idle {
            // If the kernel still keeps it, it stays in the container, with all mappings.
            let _ = Self::without(&mut groups, number);
        }
        !groups.is_empty()
    }

    /// Removes a group without a device from the container.
    fn without(groups: &mut HashMap<u32, Group>, number: u32) -> io::Result<()> {
        let Some(group) = groups.get(&number).filter(|group| group.devices == 0) else { return Ok(()) };
        // SAFETY: clause 1: it takes no argument.
        match unsafe { call_with(group.file.as_fd(), GROUP_UNSET_CONTAINER, 0) } {
            // The kernel may have removed it by itself, for an unplugged device.
            Err(error) if code(&error) != libc::EINVAL && code(&error) != libc::ENODEV => return Err(error),
            _ => {}
        }
        groups.remove(&number);
        Ok(())
    }

    fn add_group(&self, place: &Place, number: u32, is_first: bool) -> Result<File, OpenError> {
        let group = open(&format!("/dev/vfio/{number}"))?;
        let mut status = vfio_group_status { argsz: size_of::<vfio_group_status>() as u32, flags: 0 };
        // SAFETY: clause 1: this call's structure, without pointers.
        unsafe { call(group.as_fd(), GROUP_GET_STATUS, &mut status) }
            .map_err(|error| OpenError::call("VFIO_GROUP_GET_STATUS", error))?;
        if status.flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(place.not_viable());
        }
        let refused = |what: &'static str| {
            move |error: io::Error| match code(&error) {
                libc::EPERM => {
                    OpenError::UnsafeInterrupts { parameter: "vfio_iommu_type1.allow_unsafe_interrupts=1" }
                }
                _ => OpenError::call(what, error),
            }
        };
        let mut container = self.file.as_raw_fd();
        // SAFETY: clause 1: the call reads a file descriptor.
        unsafe { call(group.as_fd(), GROUP_SET_CONTAINER, &mut container) }
            .map_err(refused("VFIO_GROUP_SET_CONTAINER"))?;
        if is_first {
            // SAFETY: clause 1: it takes a number.
            unsafe { call_with(self.file.as_fd(), SET_IOMMU, VFIO_TYPE1v2_IOMMU.into()) }
                .map_err(refused("VFIO_SET_IOMMU"))?;
        }
        Ok(group)
    }

    /// The addresses of the groups, and the most mappings.
    pub fn ranges(&self) -> io::Result<Ranges> {
        let mut wanted = size_of::<vfio_iommu_type1_info>();
        loop {
            let mut info = vec![0_u64; wanted.div_ceil(8)];
            let bytes = info.len() * 8;
            let [b0, b1, b2, b3] = (bytes as u32).to_ne_bytes();
            info[0] = u64::from_ne_bytes([b0, b1, b2, b3, 0, 0, 0, 0]);
            // SAFETY: clause 1: the kernel reads the length, which comes first, and writes at most that.
            unsafe { call(self.file.as_fd(), IOMMU_GET_INFO, info.as_mut_slice()) }?;
            let info: Vec<u8> = info.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let needed = number(&info, 0).unwrap_or(0) as usize;
            if needed <= bytes || bytes >= MOST_INFO {
                return ranges_in(&info)
                    .ok_or_else(|| io::Error::other("the kernel says no ranges of addresses"));
            }
            wanted = needed.min(MOST_INFO);
        }
    }
}

/// The 32 bits at `at`.
fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Parses an answer to `VFIO_IOMMU_GET_INFO`: page sizes, and a chain of capabilities. `None` without ranges, as before Linux 5.4.
pub(super) fn ranges_in(info: &[u8]) -> Option<Ranges> {
    let page_sizes = long(info, 8)?;
    let mut ranges = Ranges { allowed: Vec::new(), page_sizes, most_mappings: None };
    let mut next = if number(info, 4)? & VFIO_IOMMU_INFO_CAPS != 0 { number(info, 16)? as usize } else { 0 };
    // Each has at least eight bytes, so a longer chain is circular.
    for _ in 0..info.len() / 8 {
        if next == 0 {
            break;
        }
        let id = number(info, next)? & 0xffff;
        if id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            let count = number(info, next + 8)? as usize;
            for at in (next + 16..info.len()).step_by(16).take(count) {
                let (first, last) = (long(info, at)?, long(info, at + 8)?);
                ranges.allowed.extend(from_kernel(first, last));
            }
        } else if id == DMA_AVAIL {
            ranges.most_mappings = Some(number(info, next + 8)?.into());
        }
        next = number(info, next + 4)? as usize;
    }
    (!ranges.allowed.is_empty()).then_some(ranges)
}

// SAFETY: by `linux/vfio.h`. 1: an unmap of version 2 removes whole mappings, or fails before it has removed any, if it would split one. It
// unpins the pages, and invalidates the IOTLB before. 2: a mapping has exactly the addresses requested, and none that are in use.
unsafe impl Calls for Container {
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32> {
        let readable = if permissions.allows(Permissions::READ) { VFIO_DMA_MAP_FLAG_READ } else { 0 };
        let writeable = if permissions.allows(Permissions::WRITE) { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
        let mut map = vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
            flags: readable | writeable,
            vaddr: address,
            iova: range.start().get(),
            size: range.len(),
        };
        // SAFETY: clause 1: this call's structure. The kernel pins the memory, and checks that it is the process's.
        unsafe { call(self.file.as_fd(), IOMMU_MAP_DMA, &mut map) }.map(drop).map_err(|error| code(&error))
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, i32> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
            iova: range.start().get(),
            size: range.len(),
            ..Default::default()
        };
        // SAFETY: clause 1: this call's structure, without pointers.
        unsafe { call(self.file.as_fd(), IOMMU_UNMAP_DMA, &mut unmap) }.map_err(|error| code(&error))?;
        Ok(unmap.size)
    }
}
