//! Calls of VFIO and iommufd. Their numbers, and the structures that the kernel reads and writes, are those of `linux/vfio.h` and
//! `linux/iommufd.h`, which the crates `vfio-bindings` and `iommufd-bindings` have. (The crates above these, `vfio-ioctls` and
//! `iommufd-ioctls`, map the memory of guests; they do not say how much was unmapped, nor map what may only be read, nor read the
//! ranges of addresses.)

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vfio_bindings::bindings::vfio::{VFIO_BASE, VFIO_TYPE};

/// The number of VFIO's call `number`: all are of `_IO`, without a size.
pub const fn vfio(number: u32) -> u64 {
    (VFIO_TYPE as u64) << 8 | (VFIO_BASE + number) as u64
}

/// The number of an iommufd's call.
pub const fn iommufd(command: u32) -> u64 {
    (VFIO_TYPE as u64) << 8 | command as u64
}

/// Makes a call that reads and writes `data`, and returns what the kernel returned.
///
/// # Safety
/// `data` is the structure of this call, as long as it says, and what it points to may be accessed as the call does.
pub unsafe fn call<T: ?Sized>(file: BorrowedFd<'_>, request: u64, data: &mut T) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    unsafe { ioctl(file, request, std::ptr::from_mut(data).cast()) }
}

/// Makes a call that takes a number.
///
/// # Safety
/// The call takes a number, and no address.
pub unsafe fn call_with(file: BorrowedFd<'_>, request: u64, number: u64) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    unsafe { ioctl(file, request, std::ptr::with_exposed_provenance_mut(number as usize)) }
}

/// # Safety
/// What the call takes as `argument`, a number or an address, it may take.
unsafe fn ioctl(file: BorrowedFd<'_>, request: u64, argument: *mut libc::c_void) -> io::Result<i32> {
    #[cfg(test)]
    if let Some(answer) = super::tests::kernel::answer(file, request, argument) {
        return answer;
    }
    // SAFETY: the caller's promise.
    let returned = unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument) };
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// The code of an error; `EIO` where it has none.
pub fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
