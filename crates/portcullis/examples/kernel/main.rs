//! What a kernel supplies before its drivers can map: `kernel/machine.rs` has all of it, for one CPU, in some hundred lines.
//! It uses `core`, `alloc` and Portcullis. This file runs it as a program and prints; `tests/no-std` runs the same file
//! without `std`, C library or operating system.
#![no_std]

extern crate alloc;
extern crate std;

mod machine;

use std::println;

fn main() -> Result<(), alloc::boxed::Box<dyn core::error::Error>> {
    let seen = machine::run()?;
    println!("A buffer at {} in memory was at {} for the device.", seen.phys, seen.iova);
    println!("Strict: the unmap waited for the hardware {} time.", seen.strict_waits);
    println!(
        "Lazy: 10 unmaps waited {} times; 10 ms later, the timer flushed them with {}.",
        seen.lazy_waits, seen.flushes
    );
    Ok(())
}
