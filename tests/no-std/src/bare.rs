//! What `std` and the C runtime would bring: an entry point, an allocator, a panic handler, an exit.

use core::alloc::{GlobalAlloc, Layout};
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicUsize, Ordering};

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the entry point and the exit call are written for Linux on x86-64");

// The stack pointer is 16-byte aligned at entry; a call leaves it as the calling convention expects.
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "call portcullis_main", "ud2");

const ARENA_BYTES: usize = 4 << 20;

/// Memory that is handed out once, front to back, and starts as zeros.
#[repr(align(4096))]
pub struct Arena {
    bytes: UnsafeCell<[u8; ARENA_BYTES]>,
    used: AtomicUsize,
}

// SAFETY: `take` gives each byte to one caller only.
unsafe impl Sync for Arena {}

#[global_allocator]
pub static ARENA: Arena = Arena { bytes: UnsafeCell::new([0; ARENA_BYTES]), used: AtomicUsize::new(0) };

impl Arena {
    /// The address of `bytes` zeroed bytes that are a multiple of `align`, a power of two.
    pub fn take(&self, bytes: usize, align: usize) -> Option<usize> {
        let base = self.bytes.get() as usize;
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let start = (base + used).checked_next_multiple_of(align)?;
            let end = start.checked_add(bytes)?;
            if end > base + ARENA_BYTES {
                return None;
            }
            match self.used.compare_exchange(used, end - base, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(start),
                Err(now) => used = now,
            }
        }
    }
}

// SAFETY: every block is fresh, aligned as asked and inside the arena; none is ever given out twice.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.take(layout.size(), layout.align()).unwrap_or(0) as *mut u8
    }

    unsafe fn dealloc(&self, _block: *mut u8, _layout: Layout) {}
}

/// Ends the program.
pub fn exit(code: u8) -> ! {
    // SAFETY: exit_group takes one number and does not return.
    unsafe { asm!("syscall", in("rax") 231, in("rdi") u64::from(code), options(noreturn)) }
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    exit(255)
}

/// `alloc` was compiled for programs that unwind, and names this; nobody unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// The same: where the example makes an error of a message, `alloc` has code that goes on unwinding.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    exit(255)
}
