//! `portcullis.h` is what `cbindgen` makes of the functions.
#![cfg(target_os = "linux")]

#[path = "../../portcullis/tests/golden/mod.rs"]
mod golden;

use std::path::Path;

fn made() -> String {
    let here = env!("CARGO_MANIFEST_DIR");
    let config = cbindgen::Config::from_file(Path::new(here).join("cbindgen.toml")).expect("cbindgen.toml");
    let sources = ["error", "device", "interrupts", "dma", "queue"]
        .map(|name| Path::new(here).join(format!("src/{name}.rs")));
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in sources {
        builder = builder.with_src(source);
    }
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    // C has no such sections; their text holds for C as well.
    String::from_utf8(header)
        .expect("text")
        .replace("// # Safety\n// ", "// The caller promises: ")
        .replace("promises: As ", "promises: as ")
        .replace("promises: Nobody", "promises: nobody")
}

#[test]
fn the_header_is_what_the_functions_are() {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/portcullis.h");
    golden::is_golden(at, &made());
}
