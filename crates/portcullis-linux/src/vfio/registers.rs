//! The [`Registers`] of a device, which outlive it: when it is let go of, memory takes their place.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use super::opened::Opened;

/// The registers of a device, mapped into the process. Each access is one of the device's bus, of the width that is named.
///
/// On x86-64 a device that acts on a write sees what the CPU has stored to memory before it, and a CPU sees after a read what the device
/// stored before its answer. On other machines a driver has a barrier of its own before each write that starts a transfer,
/// and after each read that says one has ended: a map, an unmap and a sync have none for that.
///
/// They hold the device's file open. After [`Device::release`](super::Device::release) no access goes to the device any more: reads have
/// all bits set, as those of a device that is not there, and writes change nothing.
#[derive(Debug)]
pub struct Registers {
    bar: ManuallyDrop<Arc<Bar>>,
    /// Dropped after the mapping, which holds the file.
    opened: Arc<Opened>,
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        self.opened.while_not_released(|| unsafe { ManuallyDrop::drop(&mut self.bar) });
    }
}

/// A mapping of the device's file, or what has taken its place.
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

    /// Memory of its size, to [`cover`](Self::cover) it with. One system call.
    pub fn memory_for(&self) -> io::Result<MmapMut> {
        MmapOptions::new().len(self.memory.len()).no_reserve_swap().map_anon()
    }

    /// Puts memory in the place of the registers, which others may be accessing. One system call, which is asked for no memory: that
    /// is there, and the kernel looks for what else it needs before it removes the registers.
    ///
    /// # Errors
    /// The kernel's: accesses go to the device as before.
    pub fn cover(&self, memory: MmapMut) -> io::Result<()> {
        // Before the memory is there: so whoever has read it, and finds this afterwards, knows that it was no register.
        self.is_covered.store(true, Ordering::SeqCst);
        let (at, len) = (self.memory.as_mut_ptr().cast::<libc::c_void>(), self.memory.len());
        let (from, how) = (memory.as_ptr().cast_mut().cast(), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        // SAFETY: it moves memory that nobody else has, and replaces the pages of this mapping alone, which are accessed by `at` below and
        // in no other way.
        if unsafe { libc::mremap(from, len, len, how, at) } == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            self.is_covered.store(false, Ordering::SeqCst);
            return Err(error);
        }
        // It is not where it was.
        std::mem::forget(memory);
        Ok(())
    }
}

macro_rules! accesses {
    ($($read:ident, $write:ident: $word:ty),*) => {$(
        /// Reads the register at `offset`; `None` where there is none that is aligned.
        pub fn $read(&self, offset: usize) -> Option<$word> {
            let at = self.at::<$word>(offset)?;
            // SAFETY: it is inside of the registers, and aligned.
            let value = <$word>::from_le(unsafe { at.read_volatile() });
            // Keeps the compiler from moving later accesses of memory before it. Of x86's CPUs none does: VFIO maps registers uncached.
            fence(Ordering::Acquire);
            // Of what took the registers' place meanwhile nobody sees anything.
            Some(if self.bar.is_covered() { <$word>::MAX } else { value })
        }

        /// Writes the register at `offset`; `None`, with nothing written, where there is none that is aligned.
        pub fn $write(&self, offset: usize, value: $word) -> Option<()> {
            let at = self.at::<$word>(offset)?;
            // As after a read, for earlier accesses.
            fence(Ordering::Release);
            // SAFETY: it is inside of the registers, and aligned. What a device does then, it does within what is mapped for it.
            unsafe { at.write_volatile(value.to_le()) };
            Some(())
        }
    )*};
}

impl Registers {
    pub(super) fn new(bar: Arc<Bar>, opened: Arc<Opened>) -> Self {
        Self { bar: ManuallyDrop::new(bar), opened }
    }

    /// How many bytes there are.
    pub fn size(&self) -> usize {
        self.bar.memory.len()
    }

    /// Where they are in this process, as long as this value lives: for accesses that are volatile, aligned and inside of
    /// [`size`](Self::size). After [`Device::release`](super::Device::release) it is memory of zeros, which no device sees.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bar.memory.as_mut_ptr()
    }

    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        let end = offset.checked_add(size_of::<T>())?;
        let is_inside = end <= self.size() && offset.is_multiple_of(size_of::<T>());
        // SAFETY: it is inside of the mapping.
        is_inside.then(|| unsafe { self.bar.memory.as_mut_ptr().add(offset) }.cast())
    }

    accesses! { read32, write32: u32, read64, write64: u64 }
}
