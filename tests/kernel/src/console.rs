//! The serial console, and what ends the kernel: its panics go there.

use core::fmt::{self, Write};

use spin::Mutex;

struct Serial;

static SERIAL: Mutex<Serial> = Mutex::new(Serial);

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| crate::boot::outb(0x3f8, byte));
        Ok(())
    }
}

pub fn print(line: fmt::Arguments<'_>) {
    let _ = writeln!(SERIAL.lock(), "{line}");
}

macro_rules! println {
    ($($arguments:tt)*) => { $crate::console::print(format_args!($($arguments)*)) };
}

pub(crate) use println;

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // Not through the lock: this CPU may hold it.
    let _ = writeln!(Serial, "kernel: {info}");
    crate::boot::exit(false)
}

/// `alloc` was compiled for programs that unwind, and names this; this kernel does not unwind.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// The same.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    crate::boot::exit(false)
}
