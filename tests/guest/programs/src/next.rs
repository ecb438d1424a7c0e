//! The next kernel: loaded into memory, and started without the firmware, as `kexec` does.

use std::ffi::{CString, c_char, c_int, c_long};
use std::fs::File;
use std::os::fd::AsRawFd;

/// Linux's numbers on x86-64: of the call, and of a restart into the loaded kernel.
const KEXEC_FILE_LOAD: c_long = 320;
const RESTART_BY_KEXEC: c_int = 0x4558_4543;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn reboot(how: c_int) -> c_int;
}

/// Loads `kernel` with `initramfs` and the words of its command line.
pub fn load(kernel: &str, initramfs: &str, words: &str) -> Result<String, String> {
    let open = |path: &str| File::open(path).map_err(|error| format!("{path}: {error}"));
    let (image, initial) = (open(kernel)?, open(initramfs)?);
    let line = CString::new(words).map_err(|error| format!("{words:?}: {error}"))?;
    let len = line.as_bytes_with_nul().len();
    let line: *const c_char = line.as_ptr();
    // SAFETY: the call reads two files and `len` bytes, all of which outlive it.
    let loaded =
        unsafe { syscall(KEXEC_FILE_LOAD, image.as_raw_fd(), initial.as_raw_fd(), len, line, 0usize) };
    if loaded == 0 {
        return Ok(format!("{kernel} is loaded"));
    }
    Err(format!("kexec_file_load: {}", std::io::Error::last_os_error()))
}

/// Starts what is loaded. Returns only if there is nothing.
pub fn start() -> Result<String, String> {
    // SAFETY: the call takes a number.
    unsafe { reboot(RESTART_BY_KEXEC) };
    Err(format!("reboot: {}", std::io::Error::last_os_error()))
}
