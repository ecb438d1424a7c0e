//! Limits that the kernel sets to a process.

use portcullis::pgtable::MapError;

/// Bytes of a page of the process.
pub fn page_size() -> u64 {
    // SAFETY: it reads a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// The error of a kernel that had no memory for `wanted` bytes beside the `used` ones that are mapped, if that is for the limit of what
/// the process may lock.
pub fn locked_too_much(used: u64, wanted: u64) -> Option<MapError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes the structure.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    let most = if is_known { limit.rlim_cur } else { libc::RLIM_INFINITY };
    // Others of the process, or of the user, may have locked the rest.
    let is_over =
        most != libc::RLIM_INFINITY && used.saturating_add(wanted) > most.saturating_sub(locked_elsewhere());
    let what = "bytes of memory locked for devices (raise `ulimit -l`, LimitMEMLOCK= of the service, or give CAP_IPC_LOCK)";
    is_over.then_some(MapError::Limit { what, used, wanted, most })
}

/// Bytes that the process has locked by itself.
fn locked_elsewhere() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmLck:")?.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64).saturating_mul(1024)
}
