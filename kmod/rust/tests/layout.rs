//! `include/portcullis.h` and `src/ffi.rs` agree: the test compiles both, and compares sizes, offsets and constants. (The compiler is `cc`,
//! or that of the variable `CC`.)

#[allow(dead_code, clippy::missing_safety_doc, reason = "the crate's module, of which this uses the types")]
#[path = "../src/ffi.rs"]
mod ffi;

use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;

/// For each structure, its name in C, its size, and each field with its offset.
macro_rules! layouts {
    ($($rust:ident as $c:literal { $($field:ident),* })*) => {
        vec![$(($c, size_of::<ffi::$rust>(), vec![$((stringify!($field), offset_of!(ffi::$rust, $field))),*])),*]
    };
}

#[test]
fn c_and_rust_agree() {
    let layouts = layouts! {
        Segment as "pc_segment" { addr, len }
        Entered as "pc_entered" { flags, cpu }
        Range as "pc_range" { first, last }
        Policy as "pc_policy" { kind, ends, window_ns, threshold }
        DomainConfig as "pc_domain_config" { group, first, last, page_sizes, reserved, reserved_count }
        DeviceConfig as "pc_device_config" { mask, offset_mask, policy, number, untrusted }
        Usage as "pc_usage" {
            copied_bytes, copies, mapped, flushes, open_bytes, open_mappings, exposed_bytes, pool_bytes,
            book_bytes, lost_bytes
        }
    };
    let constants = [
        ("PC_STRICT", u64::from(ffi::STRICT)),
        ("PC_LAZY", ffi::LAZY.into()),
        ("PC_BOUNCE", ffi::BOUNCE.into()),
        ("PC_AUTO", ffi::AUTO.into()),
        ("PC_MMIO", ffi::MMIO.into()),
        ("PC_UNCACHED", ffi::UNCACHED.into()),
        ("PC_PRIVILEGED", ffi::PRIVILEGED.into()),
        ("PC_SKIP_COPY", ffi::SKIP_COPY.into()),
        ("PC_LASTING", ffi::LASTING.into()),
        ("PC_PROT_READ", ffi::PROT_READ.try_into().unwrap()),
        ("PC_PROT_WRITE", ffi::PROT_WRITE.try_into().unwrap()),
        ("PC_PROT_CACHE", ffi::PROT_CACHE.try_into().unwrap()),
        ("PC_PROT_MMIO", ffi::PROT_MMIO.try_into().unwrap()),
        ("PC_PROT_PRIV", ffi::PROT_PRIV.try_into().unwrap()),
        ("PC_MAPPING_ERROR", ffi::MAPPING_ERROR),
        ("PC_MAPPING_STAYS", ffi::MAPPING_STAYS),
        ("PC_STAYS", ffi::STAYS.try_into().unwrap()),
    ];
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdint.h>\ntypedef uint64_t u64; typedef uint32_t u32;\n\
         #include \"portcullis.h\"\n",
    );
    let mut claim = |claim: String| writeln!(program, "_Static_assert({claim}, \"{claim}\");").unwrap();
    for (name, size, fields) in &layouts {
        claim(format!("sizeof(struct {name}) == {size}"));
        for (field, offset) in fields {
            claim(format!("offsetof(struct {name}, {field}) == {offset}"));
        }
        // No field is missing: the last one ends where the structure does.
        let last = fields.last().unwrap().0;
        claim(format!("offsetof(struct {name}, {last}) + sizeof(((struct {name} *)0)->{last}) == sizeof(struct {name})"));
    }
    for (name, value) in constants {
        claim(format!("(u64){name} == {value}ull"));
    }
    let folder = env!("CARGO_TARGET_TMPDIR");
    let file = format!("{folder}/layout.c");
    std::fs::write(&file, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../include");
    let result = Command::new(compiler).args(["-fsyntax-only", "-I", include, &file]).output().unwrap();
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
}
