//! The kernel's heap, and the panic handler.

use core::alloc::{GlobalAlloc, Layout};
use core::fmt::Write;
use core::panic::PanicInfo;

use crate::ffi;

struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

/// The kernel's alignment of any block.
const ALIGNED: usize = 8;
/// Larger blocks are whole pages, and aligned to them.
const PAGES: usize = 4096;

/// The size to request: the kernel aligns powers of two to their size, and whole pages to pages. `None` for an unsupported alignment.
fn bytes(layout: Layout) -> Option<usize> {
    match (layout.size(), layout.align()) {
        (size, align) if align <= ALIGNED => Some(size),
        (size, align) if size >= 2 * PAGES && align <= PAGES => size.checked_next_multiple_of(PAGES),
        (size, align) if align <= PAGES => size.max(align).checked_next_power_of_two(),
        _ => None,
    }
}

// SAFETY: a block of `bytes(layout)` bytes is large and aligned enough for the layout, by `pcs_alloc` in the header.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match bytes(layout) {
            // SAFETY: it may be called in any context.
            Some(bytes) => unsafe { ffi::pcs_alloc(bytes) },
            None => core::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // SAFETY: the block is of `alloc`, and the caller's.
        unsafe { ffi::pcs_free(block) }
    }
}

/// A message of bounded length: the rest is cut off.
struct Text {
    bytes: [u8; 200],
    len: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let room = self.bytes.iter_mut().skip(self.len);
        self.len += room.zip(text.bytes()).map(|(place, byte)| *place = byte).count();
        Ok(())
    }
}

/// A broken invariant: logs it, and stops this task. Nothing is unmapped, and no memory freed.
#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let mut text = Text { bytes: [0; 200], len: 0 };
    // Never an error: see `write_str`.
    let _ = write!(text, "{info}");
    // SAFETY: the bytes exist.
    unsafe { ffi::pcs_say(text.bytes.as_ptr(), text.len) };
    // SAFETY: an invalid instruction; the kernel's handler does not return. (It is here because objtool must see that nothing follows: only
    // some kernels know noreturn functions of other files.)
    unsafe { core::arch::asm!("ud2", options(noreturn, nomem, nostack)) }
}
