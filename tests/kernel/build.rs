//! A program that nothing runs under: its own entry point, at its own address.
fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    for argument in ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rustc-link-arg-bins=-T{here}/link.ld");
    println!("cargo:rerun-if-changed=link.ld");
}
