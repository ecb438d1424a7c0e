//! No C runtime and no C library: `_start` is ours.
fn main() {
    println!("cargo:rustc-link-arg-bins=-nostartfiles");
    println!("cargo:rustc-link-arg-bins=-nostdlib");
    println!("cargo:rustc-link-arg-bins=-static");
    // Nobody would relocate it.
    println!("cargo:rustc-link-arg-bins=-no-pie");
}
