//! Simulates the caches of many CPUs under a program that is compiled for ThreadSanitizer.
//!
//! ThreadSanitizer's compiler pass puts a call in front of every load, store and atomic. This library answers those calls
//! in place of ThreadSanitizer's own: each thread that arrives (`control`) is a CPU with a clock, and an access costs what
//! the state of its cache line says (`lines`). So everything that CPUs share is seen, in code that knows nothing of it:
//! reference counts, neighbours on a line, page-table entries, the standard library's locks.
//!
//! One CPU runs at a time (`cpus`), so the order of everything is that of the clocks, and the same in each run. Threads
//! that are no CPU, the one that prepares the others among them, run as ever and cost nothing.
//!
//! Also simulated are what the program asks the system for: time, the scheduler, `futex` (`system`), and memory
//! (`heap`). What is not, and what the figures are worth, is in `docs/scaling.md`.

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod calls;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod cpus;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod heap;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod interface;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod lines;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod system;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod turns;
