//! A program without `std`, C library or operating system beneath it but for two system calls: it proves
//! that the core needs none of them, by running the example of a kernel (`examples/kernel` of the core).
//!
//! Exit code 0 means that every check held; another is the line of the check that failed, modulo 256.
#![no_std]
#![no_main]

extern crate alloc;

mod bare;
/// What a kernel supplies: an example of the library's.
#[path = "../../../crates/portcullis/examples/kernel/machine.rs"]
mod machine;
mod mem;

use core::sync::atomic::AtomicU64;

use bare::exit;
use portcullis::platform::Table;

macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            exit(line!() as u8)
        }
    };
}

#[unsafe(no_mangle)]
extern "C" fn portcullis_main() -> ! {
    check!(machine::run().is_ok_and(|seen| {
        let addresses = seen.phys.get() == 0x1234_5678 && seen.iova.get() <= u32::MAX.into();
        addresses && (seen.strict_waits, seen.lazy_waits, seen.flushes) == (1, 0, 1)
    }));
    // The words of a table are plain 64-bit atomics here.
    check!(size_of::<Table>() == size_of::<[AtomicU64; 512]>());
    exit(0)
}
