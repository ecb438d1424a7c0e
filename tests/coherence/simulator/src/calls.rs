//! The calls that the compiler's pass puts into the program. (Their names and arguments: LLVM's `ThreadSanitizer.cpp`
//! and compiler-rt's `tsan_interface.h`.)
//!
//! Each is a few instructions that add the return address, where the program will go on, to the arguments. An atomic is
//! done here, with the strictest order; a plain access by the program, when this has returned.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

use crate::cpus::{Access, Cpus};
use crate::lines::LINE_BITS;
use crate::turns::{give_up, run};

/// C11's number of the strictest order, as the compiler passes it.
const SEQ_CST: c_int = 5;

/// `size` bytes at `address` are accessed.
#[inline]
fn touch(address: usize, size: usize, kind: Access, pc: u64) {
    if size == 0 {
        return;
    }
    let (first, last) = (address as u64 >> LINE_BITS, (address + size - 1) as u64 >> LINE_BITS);
    for number in first..=last {
        while let Some(Some(next)) = run(|cpus, me| cpus.access(me, number, kind, pc)) {
            give_up(next);
        }
    }
}

/// A prefetch of the line at `address`, which the compiler's pass does not see: code that is built for the simulator
/// calls this in place of the instruction.
extern "C" fn prefetch(address: usize, pc: u64) {
    let number = address as u64 >> LINE_BITS;
    while let Some(Some(next)) = run(|cpus, me| cpus.fetch(me, number, pc)) {
        give_up(next);
    }
}

/// An atomic read-modify-write, or a store that is followed by a fence.
#[inline]
fn update(address: usize, size: usize, pc: u64) {
    touch(address, size, Access::Update, pc);
    run(Cpus::atomic);
}

/// Defines `$name`, which passes its arguments on to `$to` with the return address behind them.
macro_rules! with_return_address {
    ($name:ident, $x86:literal, $arm:literal, $to:path) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            core::arch::naked_asm!(concat!("mov ", $x86, ", [rsp]"), "jmp {to}", to = sym $to)
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            core::arch::naked_asm!(concat!("mov ", $arm, ", x30"), "b {to}", to = sym $to)
        }
    };
}

macro_rules! after_1 {
    ($name:ident, $to:path) => {
        with_return_address!($name, "rsi", "x1", $to);
    };
}
macro_rules! after_2 {
    ($name:ident, $to:path) => {
        with_return_address!($name, "rdx", "x2", $to);
    };
}
macro_rules! after_3 {
    ($name:ident, $to:path) => {
        with_return_address!($name, "rcx", "x3", $to);
    };
}
macro_rules! after_5 {
    ($name:ident, $to:path) => {
        with_return_address!($name, "r9", "x5", $to);
    };
}

extern "C" fn read<const SIZE: usize>(address: usize, pc: u64) {
    touch(address, SIZE, Access::Read, pc);
}

extern "C" fn write<const SIZE: usize>(address: usize, pc: u64) {
    touch(address, SIZE, Access::Write, pc);
}

extern "C" fn read_range(address: usize, size: usize, pc: u64) {
    touch(address, size, Access::Read, pc);
}

extern "C" fn write_range(address: usize, size: usize, pc: u64) {
    touch(address, size, Access::Write, pc);
}

after_1!(__tsan_read1, read::<1>);
after_1!(__tsan_read2, read::<2>);
after_1!(__tsan_read4, read::<4>);
after_1!(__tsan_read8, read::<8>);
after_1!(__tsan_read16, read::<16>);
after_1!(__tsan_unaligned_read2, read::<2>);
after_1!(__tsan_unaligned_read4, read::<4>);
after_1!(__tsan_unaligned_read8, read::<8>);
after_1!(__tsan_unaligned_read16, read::<16>);
after_1!(__tsan_write1, write::<1>);
after_1!(__tsan_write2, write::<2>);
after_1!(__tsan_write4, write::<4>);
after_1!(__tsan_write8, write::<8>);
after_1!(__tsan_write16, write::<16>);
after_1!(__tsan_unaligned_write2, write::<2>);
after_1!(__tsan_unaligned_write4, write::<4>);
after_1!(__tsan_unaligned_write8, write::<8>);
after_1!(__tsan_unaligned_write16, write::<16>);
after_1!(coherence_prefetch, prefetch);
after_2!(__tsan_read_range, read_range);
after_2!(__tsan_write_range, write_range);

/// # Safety
/// As of `memcpy`.
unsafe extern "C" fn copy(to: *mut c_void, from: *const c_void, size: usize, pc: u64) -> *mut c_void {
    touch(from.addr(), size, Access::Read, pc);
    touch(to.addr(), size, Access::Write, pc);
    // SAFETY: the caller's promise is passed on; what may overlap may here, too.
    unsafe { ptr::copy(from.cast::<u8>(), to.cast::<u8>(), size) };
    to
}

/// # Safety
/// As of `memset`.
unsafe extern "C" fn fill(to: *mut c_void, value: c_int, size: usize, pc: u64) -> *mut c_void {
    touch(to.addr(), size, Access::Write, pc);
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe { to.cast::<u8>().write_bytes(value as u8, size) };
    to
}

after_3!(__tsan_memcpy, copy);
after_3!(__tsan_memmove, copy);
after_3!(__tsan_memset, fill);

#[unsafe(no_mangle)]
extern "C" fn __tsan_init() {}

#[unsafe(no_mangle)]
extern "C" fn __tsan_func_entry(caller: u64) {
    run(|cpus, me| cpus.call(me, caller));
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_func_exit() {
    run(Cpus::returns);
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_atomic_thread_fence(order: c_int) {
    if order == SEQ_CST {
        run(Cpus::atomic);
    }
    fence(Ordering::SeqCst);
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_atomic_signal_fence(_: c_int) {
    compiler_fence(Ordering::SeqCst);
}

/// The atomics of one size.
macro_rules! atomics {
    ($module:ident, $atomic:ident, $int:ident, $size:literal: $load:ident, $store:ident, $strong:ident, $weak:ident,
     $value:ident; $($name:ident $method:ident),*) => {
        mod $module {
            use super::*;

            /// The word at `address`.
            ///
            /// # Safety
            /// There is one for as long as the reference lives, which is accessed as an atomic only.
            unsafe fn at<'a>(address: *mut $int) -> &'a $atomic {
                // SAFETY: by the caller's promise.
                unsafe { $atomic::from_ptr(address) }
            }

            /// # Safety
            /// `address` is that of an atomic, as in all of these.
            unsafe extern "C" fn load(address: *mut $int, _: c_int, pc: u64) -> $int {
                touch(address.addr(), $size, Access::Read, pc);
                run(|cpus, me| cpus.load(me, address.addr(), pc));
                // SAFETY: by the caller's promise.
                unsafe { at(address) }.load(Ordering::SeqCst)
            }

            unsafe extern "C" fn store(address: *mut $int, value: $int, order: c_int, pc: u64) {
                match order {
                    SEQ_CST => update(address.addr(), $size, pc),
                    _ => touch(address.addr(), $size, Access::Write, pc),
                }
                // SAFETY: by the caller's promise.
                unsafe { at(address) }.store(value, Ordering::SeqCst);
            }

            unsafe extern "C" fn value(
                address: *mut $int,
                expected: $int,
                new: $int,
                _: c_int,
                _: c_int,
                pc: u64,
            ) -> $int {
                update(address.addr(), $size, pc);
                // SAFETY: by the caller's promise.
                let word = unsafe { at(address) };
                let result = word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst);
                let (Ok(old) | Err(old)) = result;
                old
            }

            unsafe extern "C" fn exchanged(
                address: *mut $int,
                expected: *mut $int,
                new: $int,
                success: c_int,
                failure: c_int,
                pc: u64,
            ) -> c_int {
                // SAFETY: by the caller's promise, and what is expected is the caller's own.
                unsafe {
                    let wanted = expected.read();
                    let old = value(address, wanted, new, success, failure, pc);
                    expected.write(old);
                    c_int::from(old == wanted)
                }
            }

            after_2!($load, load);
            after_3!($store, store);
            after_5!($value, value);
            after_5!($strong, exchanged);
            after_5!($weak, exchanged);

            $(
                unsafe extern "C" fn $method(address: *mut $int, value: $int, _: c_int, pc: u64) -> $int {
                    update(address.addr(), $size, pc);
                    // SAFETY: by the caller's promise.
                    unsafe { at(address) }.$method(value, Ordering::SeqCst)
                }
                after_3!($name, $method);
            )*
        }
    };
}

atomics!(bytes, AtomicU8, u8, 1: __tsan_atomic8_load, __tsan_atomic8_store,
    __tsan_atomic8_compare_exchange_strong, __tsan_atomic8_compare_exchange_weak, __tsan_atomic8_compare_exchange_val;
    __tsan_atomic8_exchange swap, __tsan_atomic8_fetch_add fetch_add, __tsan_atomic8_fetch_sub fetch_sub,
    __tsan_atomic8_fetch_and fetch_and, __tsan_atomic8_fetch_or fetch_or, __tsan_atomic8_fetch_xor fetch_xor,
    __tsan_atomic8_fetch_nand fetch_nand);
atomics!(halves, AtomicU16, u16, 2: __tsan_atomic16_load, __tsan_atomic16_store,
    __tsan_atomic16_compare_exchange_strong, __tsan_atomic16_compare_exchange_weak, __tsan_atomic16_compare_exchange_val;
    __tsan_atomic16_exchange swap, __tsan_atomic16_fetch_add fetch_add, __tsan_atomic16_fetch_sub fetch_sub,
    __tsan_atomic16_fetch_and fetch_and, __tsan_atomic16_fetch_or fetch_or, __tsan_atomic16_fetch_xor fetch_xor,
    __tsan_atomic16_fetch_nand fetch_nand);
atomics!(words, AtomicU32, u32, 4: __tsan_atomic32_load, __tsan_atomic32_store,
    __tsan_atomic32_compare_exchange_strong, __tsan_atomic32_compare_exchange_weak, __tsan_atomic32_compare_exchange_val;
    __tsan_atomic32_exchange swap, __tsan_atomic32_fetch_add fetch_add, __tsan_atomic32_fetch_sub fetch_sub,
    __tsan_atomic32_fetch_and fetch_and, __tsan_atomic32_fetch_or fetch_or, __tsan_atomic32_fetch_xor fetch_xor,
    __tsan_atomic32_fetch_nand fetch_nand);
atomics!(longs, AtomicU64, u64, 8: __tsan_atomic64_load, __tsan_atomic64_store,
    __tsan_atomic64_compare_exchange_strong, __tsan_atomic64_compare_exchange_weak, __tsan_atomic64_compare_exchange_val;
    __tsan_atomic64_exchange swap, __tsan_atomic64_fetch_add fetch_add, __tsan_atomic64_fetch_sub fetch_sub,
    __tsan_atomic64_fetch_and fetch_and, __tsan_atomic64_fetch_or fetch_or, __tsan_atomic64_fetch_xor fetch_xor,
    __tsan_atomic64_fetch_nand fetch_nand);
