//! A kernel's interface to an address space.

use portcullis::addr::{IovaRange, Permissions};

/// An address space of the kernel: an IOAS, or a container. The errors are `errno` values.
///
/// # Safety
/// 1. After `Ok` of [`unmap`](Self::unmap) no device reaches anything through the range. After its error, devices may reach any of it,
///    though whole mappings may be gone.
/// 2. [`map`](Self::map) opens only the given memory; after an error it has opened nothing.
pub unsafe trait Calls: Send + Sync + 'static {
    /// Lets devices reach the process's memory from `address` on through `range`.
    ///
    /// # Safety
    /// As for [`Mapper::map`](portcullis::mapper::Mapper::map).
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32>;

    /// Removes all mappings in `range`, which splits none. Returns how many bytes were mapped.
    fn unmap(&self, range: IovaRange) -> Result<u64, i32>;
}
