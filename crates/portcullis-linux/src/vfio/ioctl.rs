//! System calls of VFIO and iommufd. The crates `vfio-bindings` and `iommufd-bindings` have their numbers and structures, from
//! `linux/vfio.h` and `linux/iommufd.h`. (The crates above these, `vfio-ioctls` and `iommufd-ioctls`, map guest memory; they lack the
//! number of unmapped bytes, read-only maps, and the address ranges.)

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vfio_bindings::bindings::vfio::{VFIO_BASE, VFIO_TYPE};

/// VFIO's request `number`: all are `_IO`, without a size.
pub const fn vfio(number: u32) -> u64 {
    (VFIO_TYPE as u64) << 8 | (VFIO_BASE + number) as u64
}

/// An iommufd request.
pub const fn iommufd(command: u32) -> u64 {
    (VFIO_TYPE as u64) << 8 | command as u64
}

/// Makes a call that reads and writes `data`, and returns the kernel's result.
///
/// # Safety
/// 1. `data` is the structure of this call, as long as it says, and the call may access what it points to.
pub unsafe fn call<T: ?Sized>(file: BorrowedFd<'_>, request: u64, data: &mut T) -> io::Result<i32> {
    // SAFETY: clause 1.
    unsafe { ioctl(file, request, std::ptr::from_mut(data).cast()) }
}

/// Makes a call that takes a number.
///
/// # Safety
/// 1. The call takes a number, and no address.
pub unsafe fn call_with(file: BorrowedFd<'_>, request: u64, number: u64) -> io::Result<i32> {
    // SAFETY: clause 1.
    unsafe { ioctl(file, request, std::ptr::with_exposed_provenance_mut(number as usize)) }
}

/// # Safety
/// 1. The call may take `argument`, as a number or an address.
unsafe fn ioctl(file: BorrowedFd<'_>, request: u64, argument: *mut libc::c_void) -> io::Result<i32> {
    #[cfg(test)]
    if let Some(answer) = super::tests::kernel::answer(file, request, argument) {
        return answer;
    }
    // SAFETY: clause 1.
    let returned = unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument) };
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// The `errno` of an error; `EIO` if it has none.
pub fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
