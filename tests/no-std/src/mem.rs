//! The four functions that the compiler itself calls for copies, fills and comparisons, and expects a C
//! library or a kernel to bring. In machine code, so that the compiler does not turn them into calls of
//! themselves.

use core::arch::asm;

/// # Safety
/// As C's `memcpy`: `len` bytes can be read at `from` and written at `to`, and they do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear by the calling convention.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As C's `memmove`: `len` bytes can be read at `from` and written at `to`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= len {
        // Front to back never overwrites what is still to be read.
        // SAFETY: as the caller's.
        return unsafe { memcpy(to, from, len) };
    }
    // SAFETY: back to front from the last byte of each range, which the caller vouches for (`len` is not 0
    // here); the direction flag is put back.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") len => _, inout("rdi") to.add(len - 1) => _,
             inout("rsi") from.add(len - 1) => _, options(nostack));
    }
    to
}

/// # Safety
/// As C's `memset`: `len` bytes can be written at `to`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range.
    unsafe {
        asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") byte as u8,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As C's `memcmp`: `len` bytes can be read at `a` and at `b`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    for at in 0..len {
        // SAFETY: `at` is below `len`, up to which the caller vouches for both.
        let (x, y) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}
