//! `portcullis.h` is what `cbindgen` makes of the functions. With `UPDATE_EXPECT=1` the test writes it.
#![cfg(target_os = "linux")]

use std::path::Path;

fn made() -> String {
    let here = env!("CARGO_MANIFEST_DIR");
    let config = cbindgen::Config::from_file(Path::new(here).join("cbindgen.toml")).expect("cbindgen.toml");
    let sources =
        ["error", "device", "dma", "queue"].map(|name| Path::new(here).join(format!("src/{name}.rs")));
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in sources {
        builder = builder.with_src(source);
    }
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    // C has no such sections, and what is in them holds for C alike.
    String::from_utf8(header)
        .expect("text")
        .replace("// # Safety\n// ", "// The caller promises: ")
        .replace("promises: As ", "promises: as ")
        .replace("promises: Nobody", "promises: nobody")
}

#[test]
fn the_header_is_what_the_functions_are() {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/portcullis.h");
    let made = made();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&at, &made).expect("the header is written");
    }
    let kept = std::fs::read_to_string(&at).unwrap_or_default();
    assert_eq!(kept, made, "run this test with UPDATE_EXPECT=1, and read what has changed in portcullis.h");
}
