//! The library for C and C++: what a package of it installs, and whether programs find it there.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::nightly::output;
use crate::{cargo, packages, quietly, root};

/// What it is called where it is run or skipped.
pub const WHAT: &str = "the library for C";

/// Its tests: symbols and their versions; and by either library, static and shared, the programs that need no device.
pub const COUNT: usize = 1 + 2 * PROGRAMS.len();

/// Programs, their compilers, and what they say without a device.
const PROGRAMS: [(&str, &str, &[&str], &str); 3] = [
    ("tests/c/arguments.c", "cc", &["-std=c11"], ""),
    ("examples/edu.c", "cc", &["-std=c11"], "there is no PCI device 0000:ff:1f.7"),
    ("examples/edu.cpp", "c++", &["-std=c++17"], "there is no PCI device 0000:ff:1f.7"),
];

const WARNINGS: [&str; 5] = ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"];

const FOLDER: &str = "crates/portcullis-c";

/// What the shared library is found by when a program starts: a version that breaks programs has another, as each 0.N may.
const SONAME: &str = "libportcullis.so.0.1";

/// What static programs need besides.
const SYSTEM: [&str; 4] = ["-lpthread", "-ldl", "-lm", "-lgcc_s"];

/// Makes the libraries, the header and the file for pkg-config below `to`: `include`, `lib`, and `lib/pkgconfig`. They may be moved.
pub fn make(to: &Path) -> Result<(), String> {
    let root = root();
    let failed = |error: std::io::Error| format!("{}: {error}", to.display());
    let mut build = Command::new(cargo());
    build.args(["build", "--locked", "--release", "-p", "portcullis-c"]).current_dir(&root);
    let status = build.status().map_err(|error| format!("cargo did not start: {error}"))?;
    if !status.success() {
        return Err(format!("cargo build -p portcullis-c: {status}"));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let version = env!("CARGO_PKG_VERSION");
    let (include, lib) = (to.join("include"), to.join("lib"));
    std::fs::create_dir_all(&include).map_err(failed)?;
    std::fs::create_dir_all(lib.join("pkgconfig")).map_err(failed)?;
    std::fs::copy(root.join(FOLDER).join("include/portcullis.h"), include.join("portcullis.h"))
        .map_err(failed)?;
    let archive = lib.join("libportcullis.a");
    std::fs::copy(target.join("release/libportcullis_c.a"), &archive).map_err(failed)?;
    let shared = format!("libportcullis.so.{version}");
    let mut link = Command::new("cc");
    // Its timer's thread goes on after a `dlclose`: it is not unloaded.
    link.args([
        "-shared",
        "-Wl,--gc-sections",
        "-Wl,-z,defs",
        "-Wl,-z,now",
        "-Wl,-z,nodelete",
        "-Wl,--strip-debug",
    ]);
    link.arg(format!("-Wl,-soname,{SONAME}"));
    link.arg(format!("-Wl,--version-script={}", root.join(FOLDER).join("portcullis.map").display()));
    link.arg("-Wl,--whole-archive").arg(&archive).arg("-Wl,--no-whole-archive").args(SYSTEM);
    quietly(link.arg("-o").arg(lib.join(&shared)), "linking the shared library")?;
    for name in [SONAME, "libportcullis.so"] {
        // One of an earlier call.
        let _ = std::fs::remove_file(lib.join(name));
        symlink(&shared, lib.join(name)).map_err(failed)?;
    }
    let text = format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\nName: Portcullis\n\
         Description: DMA remapping for drivers in user space\nVersion: {version}\nLibs: -L${{libdir}} -lportcullis\n\
         Libs.private: {}\nCflags: -I${{includedir}}\n",
        SYSTEM.join(" ")
    );
    std::fs::write(lib.join("pkgconfig/portcullis.pc"), text).map_err(failed)
}

/// `cargo xtask c-library FOLDER`.
pub fn command(arguments: &[&str]) -> Result<(), String> {
    let [to] = arguments else {
        return Err("usage: cargo xtask c-library FOLDER (/usr/local, say, or a package's root)".to_owned());
    };
    // A compiler takes such a name for an option.
    if to.starts_with('-') {
        return Err(format!(
            "`cargo xtask c-library` has no option {to}: it takes a folder, such as /usr/local"
        ));
    }
    make(Path::new(to))?;
    println!("{to}/include/portcullis.h, {to}/lib/libportcullis.a and .so, {to}/lib/pkgconfig/portcullis.pc");
    println!(
        "In /usr/local, `ldconfig` comes next. Elsewhere programs are compiled with PKG_CONFIG_PATH={to}/lib/pkgconfig,"
    );
    println!(
        "and started with LD_LIBRARY_PATH={to}/lib; or linked with -l:libportcullis.a in the place of -lportcullis."
    );
    Ok(())
}

/// What this machine lacks, if so.
pub fn missing() -> Option<String> {
    let lacking = || {
        let tools = ["cc", "c++", "pkg-config", "readelf"];
        let tool = tools.into_iter().find(|tool| output(Command::new(tool).arg("--version")).is_none())?;
        Some(format!("{tool} is not installed"))
    };
    packages::missing(lacking, &["gcc", "g++", "pkgconf", "binutils"], false)
}

/// Compiles the programs by what pkg-config says, against either library, and runs them.
pub fn test() -> Result<(), String> {
    let root = root();
    let to = root.join("target/c-library");
    make(&to)?;
    symbols(&to)?;
    for is_static in [false, true] {
        let mut query = Command::new("pkg-config");
        query.args(["--cflags", "--libs", "portcullis"]).args(is_static.then_some("--static"));
        let mut flags = quietly(query.env("PKG_CONFIG_PATH", to.join("lib/pkgconfig")), "pkg-config")?;
        if is_static {
            // The library alone: the system's own stay shared.
            flags = flags.replace("-lportcullis", "-l:libportcullis.a");
        }
        for (source, compiler, standard, says) in PROGRAMS {
            let program = to.join("program");
            let mut compile = Command::new(compiler);
            compile.args(standard).args(WARNINGS).arg(format!("-DVERSION=\"{}\"", env!("CARGO_PKG_VERSION")));
            compile.arg(root.join(FOLDER).join(source)).args(flags.split_whitespace());
            quietly(compile.arg("-o").arg(&program), source)?;
            let mut started = Command::new(&program);
            started.env("LD_LIBRARY_PATH", to.join("lib"));
            if says.is_empty() {
                quietly(&mut started, source)?;
                continue;
            }
            let out = started.arg("0000:ff:1f.7").output().map_err(|error| error.to_string())?;
            let said = String::from_utf8_lossy(&out.stderr);
            if out.status.code() != Some(1) || !said.contains(says) {
                return Err(format!("{source}, static {is_static}: {} and {said}", out.status));
            }
        }
    }
    Ok(())
}

/// The functions that the header declares, by its text.
fn declared(header: &str) -> Vec<String> {
    let lines = header.lines().filter(|line| !line.starts_with("//") && !line.starts_with(' '));
    let names = lines.filter_map(|line| {
        let name = line.split_once('(')?.0.rsplit([' ', '*']).next()?;
        name.starts_with("portcullis_").then(|| name.to_owned())
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The shared library exports what the header declares, with a version, and nothing else.
fn symbols(to: &Path) -> Result<(), String> {
    let header =
        std::fs::read_to_string(to.join("include/portcullis.h")).map_err(|error| error.to_string())?;
    let mut query = Command::new("readelf");
    let table = quietly(query.args(["--dyn-syms", "-W"]).arg(to.join("lib").join(SONAME)), "readelf")?;
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut found: Vec<String> = rows
        .filter(|row| {
            row.len() >= 8 && row[4] != "LOCAL" && row[6] != "UND" && row[6] != "ABS" && row[0] != "Num:"
        })
        .map(|row| row[7].to_owned())
        .collect();
    found.sort();
    let wanted: Vec<String> =
        declared(&header).iter().map(|name| format!("{name}@@PORTCULLIS_0.1")).collect();
    if found == wanted && !wanted.is_empty() {
        Ok(())
    } else {
        Err(format!("the shared library has {found:?}, and the header {wanted:?}"))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_header_declares_functions_and_nothing_that_its_comments_name() {
        let header = "// portcullis_no(x)\nint portcullis_map(void *x,\n               size_t len);\nconst char *portcullis_text(void);\n\
                      typedef struct portcullis_piece {\n  void *portcullis_none(int);\n";
        assert_eq!(super::declared(header), ["portcullis_map", "portcullis_text"]);
    }
}
