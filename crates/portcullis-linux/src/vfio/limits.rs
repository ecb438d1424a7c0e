//! The kernel's limits for a process.

use portcullis::pgtable::MapError;

/// The page size of the process.
pub fn page_size() -> u64 {
    // SAFETY: it reads a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// The error of a kernel that had no memory for `wanted` bytes beside the `used` mapped ones, if that is the limit of locked memory.
pub fn locked_too_much(used: u64, wanted: u64) -> Option<MapError> {
    // Other code of the process, or of the user, may have locked the rest.
    over(most_locked(), locked_elsewhere(), used, wanted)
}

/// Bytes that the process may lock; `None` without a limit.
pub fn most_locked() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes the structure.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    Some(limit.rlim_cur).filter(|most| is_known && *most != libc::RLIM_INFINITY)
}

/// The error if `wanted` bytes beside `used` and `elsewhere` ones exceed the limit.
pub fn over(most: Option<u64>, elsewhere: u64, used: u64, wanted: u64) -> Option<MapError> {
    let most = most?;
    let what = "bytes of memory locked for devices (raise `ulimit -l`, LimitMEMLOCK= of the service, or give CAP_IPC_LOCK)";
    let is_over = used.saturating_add(wanted) > most.saturating_sub(elsewhere);
    is_over.then_some(MapError::Limit { what, used, wanted, most })
}

/// Bytes that this process has locked otherwise.
pub fn locked_elsewhere() -> u64 {
    locked(&std::fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// Bytes that a process has locked otherwise, by its `/proc/self/status`.
pub fn locked(status: &str) -> u64 {
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmLck:")?.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64).saturating_mul(1024)
}
