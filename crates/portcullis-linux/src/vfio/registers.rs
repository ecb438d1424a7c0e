//! The [`Registers`] of a device, which outlive it: a release replaces them by memory.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use super::opened::Opened;

/// The registers of a device, mapped into the process. Each access is one bus access of the named width.
///
/// On x86-64 a device that acts on a write sees the CPU's earlier stores, and a CPU sees after a read what the device stored before its
/// answer. On other machines a driver needs its own barrier before each write that starts a transfer, and after each read that reports its
/// end: a map, an unmap and a sync have none for that.
///
/// They hold the device's file open. After [`Device::release`](super::Device::release) no access reaches the device: reads have all bits
/// set, like those of an absent device, and writes change nothing.
#[derive(Debug)]
pub struct Registers {
    bar: ManuallyDrop<Arc<Bar>>,
    /// Dropped after the mapping, which holds the file.
    opened: Arc<Opened>,
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: dropped once, here.
        self.opened.while_not_released(|| unsafe { ManuallyDrop::drop(&mut self.bar) });
    }
}

/// A mapping of the device's file, or its replacement.
#[derive(Debug)]
pub(super) struct Bar {
    memory: MmapRaw,
    is_covered: AtomicBool,
}

impl Bar {
    pub fn new(memory: MmapRaw) -> Self {
        Self { memory, is_covered: AtomicBool::new(false) }
    }

    pub fn is_covered(&self) -> bool {
        self.is_covered.load(Ordering::SeqCst)
    }

    /// Memory of its size, for [`cover`](Self::cover). One system call.
    pub fn memory_for(&self) -> io::Result<MmapMut> {
        MmapOptions::new().len(self.memory.len()).no_reserve_swap().map_anon()
    }

    /// Replaces the registers, which others may be accessing, by memory. One system call, which allocates no memory: that exists, and the
    /// kernel checks its other needs before it removes the registers.
    ///
    /// # Errors
    /// The kernel's: accesses go to the device as before.
    pub fn cover(&self, memory: MmapMut) -> io::Result<()> {
        // Before the memory is there: so a thread that has read it, and then checks this, knows that it was no register.
        self.is_covered.store(true, Ordering::SeqCst);
        let (at, len) = (self.memory.as_mut_ptr().cast::<libc::c_void>(), self.memory.len());
        let (from, how) = (memory.as_ptr().cast_mut().cast(), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        // SAFETY: it moves memory of this call, and replaces only the pages of this mapping, which are only accessed by `at` below.
        if unsafe { libc::mremap(from, len, len, how, at) } == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            self.is_covered.store(false, Ordering::SeqCst);
            return Err(error);
        }
        // It was moved away.
        std::mem::forget(memory);
        Ok(())
    }
}

macro_rules! accesses {
    ($($read:ident, $write:ident: $word:ty),*) => {$(
        /// Reads the register at `offset`; `None` if it is unaligned or out of bounds.
        pub fn $read(&self, offset: usize) -> Option<$word> {
            let at = self.at::<$word>(offset)?;
            // SAFETY: inside the registers, and aligned.
            let value = <$word>::from_le(unsafe { at.read_volatile() });
            // Keeps the compiler from reordering later memory accesses before it. An x86 CPU does not: VFIO maps registers uncached.
            fence(Ordering::Acquire);
            // Hides the memory that has replaced the registers meanwhile.
            Some(if self.bar.is_covered() { <$word>::MAX } else { value })
        }

        /// Writes the register at `offset`; `None`, with nothing written, if it is unaligned or out of bounds.
        pub fn $write(&self, offset: usize, value: $word) -> Option<()> {
            let at = self.at::<$word>(offset)?;
            // As after a read, for earlier accesses.
            fence(Ordering::Release);
            // SAFETY: inside the registers, and aligned. The device's reaction stays inside its mappings.
            unsafe { at.write_volatile(value.to_le()) };
            Some(())
        }
    )*};
}

impl Registers {
    pub(super) fn new(bar: Arc<Bar>, opened: Arc<Opened>) -> Self {
        Self { bar: ManuallyDrop::new(bar), opened }
    }

    /// Their size in bytes.
    pub fn size(&self) -> usize {
        self.bar.memory.len()
    }

    /// Their address in this process, as long as this value lives: for volatile, aligned accesses inside [`size`](Self::size). After
    /// [`Device::release`](super::Device::release) it is zeroed memory, which no device sees.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bar.memory.as_mut_ptr()
    }

    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        let end = offset.checked_add(size_of::<T>())?;
        let is_inside = end <= self.size() && offset.is_multiple_of(size_of::<T>());
        // SAFETY: inside the mapping.
        is_inside.then(|| unsafe { self.bar.memory.as_mut_ptr().add(offset) }.cast())
    }

    accesses! { read32, write32: u32, read64, write64: u64 }
}
