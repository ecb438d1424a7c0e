//! Interrupts of the first CPU's timer: what may come between any two instructions, and how the
//! rest of the kernel is kept from it.
//!
//! The handler maps and unmaps, as drivers' handlers do. So interrupts are off while a task has a
//! CPU of the platform, while it is in the driver of the IOMMU, and while it has one of the
//! kernel's own locks: a handler that came there would be lent the same CPU a second time, or would
//! wait for ever for what it has interrupted.

use alloc::boxed::Box;
use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use spin::Once;

use crate::boot::{LOCAL_APIC, outb};

// The handler has a stack of its own, by the task state segment: what the core library was compiled
// to keep below a stack's end stays. Then it saves what a call may change. (AMD64 Architecture
// Programmer's Manual, volume 2, 8.9 "Long-Mode Interrupts".)
global_asm!(
    r#"
    .section .boot, "ax"
    .code64
    .globl timer_entry
timer_entry:
    push rax
    push rcx
    push rdx
    push rsi
    push rdi
    push r8
    push r9
    push r10
    push r11
    sub rsp, 512
    fxsave64 [rsp]
    cld
    call timer_interrupt
    fxrstor64 [rsp]
    add rsp, 512
    pop r11
    pop r10
    pop r9
    pop r8
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rax
    .globl spurious_entry
spurious_entry:
    iretq

    .section .bss, "aw", @nobits
    .balign 16
    .skip 262144
    .globl interrupt_stack
interrupt_stack:
    .text
    "#
);

unsafe extern "C" {
    static timer_entry: u8;
    static spurious_entry: u8;
    static interrupt_stack: u8;
    static boot_gdt: [AtomicU64; 6];
}

/// The numbers of the two interrupts that there are.
const TIMER: usize = 0x40;
const SPURIOUS: usize = 0xff;

/// The local APIC's registers.
const EOI: usize = 0xb0;
const SPURIOUS_VECTOR: usize = 0xf0;
const LVT_TIMER: usize = 0x320;
const INITIAL_COUNT: usize = 0x380;
const DIVIDE: usize = 0x3e0;

static GATES: [[AtomicU64; 2]; 256] = [const { [const { AtomicU64::new(0) }; 2] }; 256];
/// The task state segment: its words 9 and 10 say where the handlers' stack ends.
static TASK_STATE: [AtomicU32; 26] = [const { AtomicU32::new(0) }; 26];
static HANDLER: Once<Box<dyn Fn() + Send + Sync>> = Once::new();

/// Calls `f` with interrupts off.
pub fn off<R>(f: impl FnOnce() -> R) -> R {
    let flags: u64;
    // SAFETY: reads the flags, and turns interrupts off; memory is not moved across it.
    unsafe { asm!("pushfq", "pop {}", "cli", out(reg) flags) };
    let result = f();
    if flags & 1 << 9 != 0 {
        // SAFETY: they were on.
        unsafe { asm!("sti", options(nostack)) };
    }
    result
}

/// Calls `handler` from an interrupt of this CPU every `every_ns`, until [`stop`]. Once in the
/// machine's life.
pub fn start(every_ns: u32, handler: Box<dyn Fn() + Send + Sync>) {
    HANDLER.call_once(|| handler);
    let stack = (&raw const interrupt_stack).addr() as u64;
    TASK_STATE[9].store(stack as u32, Ordering::Relaxed);
    TASK_STATE[10].store((stack >> 32) as u32, Ordering::Relaxed);
    let at = (&raw const TASK_STATE).addr() as u64;
    // SAFETY: the table that this CPU uses; its last two words are for this.
    let table = unsafe { &boot_gdt };
    table[4].store(103 | (at & 0xff_ffff) << 16 | 0x89 << 40 | (at >> 24 & 0xff) << 56, Ordering::Relaxed);
    table[5].store(at >> 32, Ordering::Relaxed);
    for (number, entry) in [(TIMER, &raw const timer_entry), (SPURIOUS, &raw const spurious_entry)] {
        let entry = entry.addr() as u64;
        // 64-bit code, the first stack of its own, an interrupt gate.
        let low = entry & 0xffff | 8 << 16 | 1 << 32 | 0x8e << 40 | (entry >> 16 & 0xffff) << 48;
        GATES[number][0].store(low, Ordering::Relaxed);
        GATES[number][1].store(entry >> 32, Ordering::Relaxed);
    }
    let gates = (&raw const GATES).addr() as u64;
    let pointer = [(size_of_val(&GATES) as u64 - 1) << 48, gates];
    // Nothing of the old interrupt controllers.
    outb(0x21, 0xff);
    outb(0xa1, 0xff);
    // SAFETY: tables that are there for the machine's life; nothing had interrupts on before.
    unsafe {
        asm!("lidt [{}]", in(reg) (&raw const pointer).byte_add(6), options(nostack));
        asm!("ltr {:x}", in(reg) 0x20_u64, options(nostack));
    }
    apic(SPURIOUS_VECTOR, 1 << 8 | SPURIOUS as u32);
    // The timer counts down by 1, QEMU's once in a nanosecond, and begins again.
    apic(DIVIDE, 0b1011);
    apic(LVT_TIMER, 1 << 17 | TIMER as u32);
    apic(INITIAL_COUNT, every_ns);
    // SAFETY: what comes is handled.
    unsafe { asm!("sti", options(nostack)) };
}

/// No more interrupts.
pub fn stop() {
    apic(INITIAL_COUNT, 0);
    // SAFETY: turns them off.
    unsafe { asm!("cli", options(nostack)) };
}

fn apic(register: usize, value: u32) {
    // SAFETY: a register of this CPU's local APIC.
    unsafe { ((LOCAL_APIC + register) as *mut u32).write_volatile(value) };
}

#[unsafe(no_mangle)]
extern "C" fn timer_interrupt() {
    if let Some(handler) = HANDLER.get() {
        handler();
    }
    apic(EOI, 0);
}
