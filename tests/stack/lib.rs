//! What takes a kernel's stack, read off the code that is linked into the kernel.
#![cfg(not(any(loom, watched)))]

pub mod code;

/// The most of one frame, in bytes.
pub const FRAME: u64 = 1024;
/// What a build may have more: the compiler inlines otherwise where the sources are in another folder, or the flags are others.
pub const BUILDS: u64 = 160;
