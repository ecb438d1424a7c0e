//! What a kernel is asked for of an address space.

use portcullis::addr::{IovaRange, Permissions};

/// An address space of the kernel's: an IOAS, or a container. The errors are those of `errno`.
///
/// # Safety
/// - After `Ok` of [`unmap`](Self::unmap) no device reaches anything through the range. After an error of it, devices may reach
///   any of it, though whole mappings may be gone.
/// - [`map`](Self::map) opens the memory that it is given, and no other; after an error it has opened nothing.
pub unsafe trait Calls: Send + Sync + 'static {
    /// Lets devices reach the process's memory from `address` on through `range`.
    ///
    /// # Safety
    /// The memory is the caller's to open, as for [`Mapper::map`](portcullis::mapper::Mapper::map).
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32>;

    /// Removes all that was mapped in `range`, which covers no mapping in part only. Returns how many bytes of it were mapped.
    fn unmap(&self, range: IovaRange) -> Result<u64, i32>;
}
