//! From QEMU's `-kernel` to Rust: 32-bit protected mode (PVH), long mode with memory mapped one to one, and a second CPU.

use alloc::boxed::Box;
use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU32, Ordering};

use spin::Once;

// PVH (Xen's `docs/misc/pvh.pandoc`): a note names the entry point; `ebx` holds the address of what the loader says.
// Four GiB are mapped one to one by pages of 2 MiB, the last GiB, where devices are, uncached.
global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .long 4, 4, 18
    .asciz "Xen"
    .long start32

    .section .boot, "ax"
    .code32
    .globl start32
start32:
    cli
    mov esp, offset boot_stack
    mov [boot_info], ebx
    mov eax, offset boot_pdpt
    or eax, 3
    mov [boot_pml4], eax
    mov eax, offset boot_pd
    or eax, 3
    mov [boot_pdpt], eax
    add eax, 4096
    mov [boot_pdpt + 8], eax
    add eax, 4096
    mov [boot_pdpt + 16], eax
    add eax, 4096
    mov [boot_pdpt + 24], eax
    xor ecx, ecx
2:
    mov eax, ecx
    shl eax, 21
    or eax, 0x83
    cmp ecx, 1536
    jb 3f
    or eax, 0x18
3:
    mov [boot_pd + ecx * 8], eax
    inc ecx
    cmp ecx, 2048
    jb 2b
    call long_mode
    lgdt [boot_gdt_pointer]
    ljmp 8, offset start64

    // Turns paging and long mode on, with the SSE registers that compiled code uses.
long_mode:
    mov eax, cr4
    or eax, 0x620
    mov cr4, eax
    mov eax, offset boot_pml4
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100
    wrmsr
    mov eax, cr0
    and eax, 0xfffffffb
    or eax, 0x80000003
    mov cr0, eax
    ret

    .code64
start64:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov rsp, offset boot_stack
    xor ebp, ebp
    mov edi, [boot_info]
    call kernel_main
    ud2

    // The second CPU begins here, in real mode, at the copy of this at 0x8000.
    .balign 4
    .globl second_begin
second_begin:
    .code16
    cli
    jmp 2f
    .balign 4
    .short 31
    .long boot_gdt
2:
    xor ax, ax
    mov ds, ax
    lgdt [0x8004]
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea
    .long second32
    .short 24
    .globl second_end
second_end:
    .code32
second32:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov esp, offset second_stack
    call long_mode
    ljmp 8, offset second64
    .code64
second64:
    mov rsp, offset second_stack
    xor ebp, ebp
    call second_main
    ud2

    .balign 16
    // None; 64-bit code; data; 32-bit code; the first CPU's task state segment.
    .globl boot_gdt
boot_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff, 0, 0
boot_gdt_pointer:
    .short 47
    .long boot_gdt

    .section .bss, "aw", @nobits
    .balign 4096
boot_pml4: .skip 4096
boot_pdpt: .skip 4096
boot_pd: .skip 16384
    .skip 262144
boot_stack:
    .skip 262144
second_stack:
boot_info: .skip 8
    .text
    "#
);

unsafe extern "C" {
    static second_begin: u8;
    static second_end: u8;
}

pub const LOCAL_APIC: usize = 0xfee0_0000;

/// The number of this CPU, by its local APIC.
pub fn cpu() -> usize {
    // SAFETY: the local APIC's ID register, mapped one to one.
    (unsafe { (LOCAL_APIC as *const u32).add(8).read_volatile() } >> 24) as usize
}

/// What the second CPU does.
static WORK: Once<Box<dyn Fn() + Send + Sync>> = Once::new();

#[unsafe(no_mangle)]
extern "C" fn second_main() -> ! {
    if let Some(work) = WORK.get() {
        work();
    }
    loop {
        core::hint::spin_loop();
    }
}

/// Has CPU 1 do `work`. (INIT, then STARTUP with the page at 0x8000: Intel SDM, volume 3, "MP
/// Initialization".)
pub fn start_second(work: Box<dyn Fn() + Send + Sync>) {
    WORK.call_once(|| work);
    let command = |value: u32| {
        // SAFETY: the local APIC's interrupt command registers; nothing else uses them.
        unsafe {
            (LOCAL_APIC as *mut u32).add(0x310 / 4).write_volatile(1 << 24);
            (LOCAL_APIC as *mut u32).add(0x300 / 4).write_volatile(value);
        }
    };
    // SAFETY: the trampoline's bytes, and a page below 1 MiB that nothing uses.
    unsafe {
        let (first, end) = (&raw const second_begin, &raw const second_end);
        let len = end as usize - first as usize;
        core::ptr::copy_nonoverlapping(first, 0x8000 as *mut u8, len);
    }
    command(0x4500);
    pause_ns(10_000_000);
    command(0x4608);
}

/// Nanoseconds since the start, by the time stamp counter.
pub fn now_ns() -> u64 {
    // SAFETY: reads a counter.
    let ticks = unsafe { core::arch::x86_64::_rdtsc() };
    let per_us = TICKS_PER_US.load(Ordering::Relaxed).max(1);
    (u128::from(ticks) * 1000 / u128::from(per_us)) as u64
}

static TICKS_PER_US: AtomicU32 = AtomicU32::new(1000);

/// Measures the time stamp counter against the interval timer's second channel: 10 ms of 1.193182 MHz.
pub fn calibrate() {
    outb(0x61, inb(0x61) & !2 | 1);
    outb(0x43, 0b1011_0000);
    outb(0x42, (11_932 & 0xff) as u8);
    outb(0x42, (11_932 >> 8) as u8);
    // SAFETY: reads a counter.
    let began = unsafe { core::arch::x86_64::_rdtsc() };
    while inb(0x61) & 0x20 == 0 {}
    // SAFETY: as above.
    let ticks = unsafe { core::arch::x86_64::_rdtsc() } - began;
    TICKS_PER_US.store((ticks / 10_000) as u32, Ordering::Relaxed);
}

pub fn pause_ns(ns: u64) {
    let began = now_ns();
    while now_ns() - began < ns {
        core::hint::spin_loop();
    }
}

pub fn outb(port: u16, value: u8) {
    // SAFETY: the kernel's devices alone are there.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) }
}

pub fn inb(port: u16) -> u8 {
    let value: u8;
    // SAFETY: as above.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) }
    value
}

pub fn outl(port: u16, value: u32) {
    // SAFETY: as above.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack)) }
}

pub fn inl(port: u16) -> u32 {
    let value: u32;
    // SAFETY: as above.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) }
    value
}

/// Ends QEMU, by its `isa-debug-exit` device: with status 33 for `true`, else 35.
pub fn exit(well: bool) -> ! {
    outl(0xf4, if well { 16 } else { 17 });
    loop {
        // SAFETY: waits for an interrupt that never comes.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) }
    }
}
