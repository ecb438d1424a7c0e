//! The kernel's heap, and its end of a panic.

use core::alloc::{GlobalAlloc, Layout};
use core::fmt::Write;
use core::panic::PanicInfo;

use crate::ffi;

struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

/// What the kernel aligns any block to.
const ALIGNED: usize = 8;
/// From here on blocks are whole pages, and aligned to them.
const PAGES: usize = 4096;

/// Bytes to ask the kernel for: it aligns powers of two to themselves, and whole pages to pages. `None` for what it does not align.
fn bytes(layout: Layout) -> Option<usize> {
    match (layout.size(), layout.align()) {
        (size, align) if align <= ALIGNED => Some(size),
        (size, align) if size >= 2 * PAGES && align <= PAGES => size.checked_next_multiple_of(PAGES),
        (size, align) if align <= PAGES => size.max(align).checked_next_power_of_two(),
        _ => None,
    }
}

// SAFETY: a block of `bytes(layout)` bytes holds the layout and is aligned to it, as the header says of `pcs_alloc`.
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

/// A broken invariant: the kernel says which, and stops this task. Nothing is unmapped, and no memory given back.
#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let mut text = Text { bytes: [0; 200], len: 0 };
    // Never an error: see `write_str`.
    let _ = write!(text, "{info}");
    // SAFETY: the bytes are there.
    unsafe { ffi::pcs_say(text.bytes.as_ptr(), text.len) };
    // SAFETY: an invalid instruction, which the kernel's handler does not return from. (It stands here, as objtool must see that nothing
    // follows: what a function of another file does it knows in some kernels only.)
    unsafe { core::arch::asm!("ud2", options(noreturn, nomem, nostack)) }
}
