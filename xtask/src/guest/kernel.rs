//! A kernel that the guest boots: its image, its drivers, and what modules are built against. And the modules that are built for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::root::Root;
use crate::nightly::output;
use crate::quietly;

/// Where the modules of the tests are, and what they are called.
pub const OWN: [(&str, &str); 4] = [
    ("edu", "portcullis_edu"),
    ("api", "portcullis_api"),
    ("bench", "portcullis_bench"),
    ("faults", "portcullis_faults"),
];

/// The project's module.
pub const MODULE: &str = "portcullis";

/// A kernel.
pub struct Kernel {
    /// What it is called in what is printed.
    pub name: String,
    pub release: String,
    pub image: PathBuf,
    /// The folder with its drivers.
    pub drivers: PathBuf,
    /// What modules are built against, as the folder with the compilers has it; `None` where a kernel is given without, which has all built in.
    headers: Option<PathBuf>,
    /// The compiler, where the headers do not name it themselves.
    compiler: Option<&'static str>,
}

impl Kernel {
    /// One of Debian's.
    pub fn of_debian(root: &Root, name: &str, release: &str) -> Result<Self, String> {
        // Before Linux 7 the image was in `/boot`.
        let places = [format!("boot/vmlinuz-{release}"), format!("usr/lib/modules/{release}/vmlinuz")];
        let image = places.iter().map(|place| root.at(place)).find(|place| place.is_file());
        Ok(Self {
            name: name.to_owned(),
            release: release.to_owned(),
            image: image.ok_or_else(|| format!("the packages of Linux {release} have no image"))?,
            drivers: root.at(&format!("usr/lib/modules/{release}")),
            headers: Some(PathBuf::from(format!("/usr/src/linux-headers-{release}"))),
            compiler: None,
        })
    }

    /// One that somebody else has built: a folder with `bzImage`, `modules.tar.xz` (`lib/modules/RELEASE`) and `build-tree.tar.xz` (one folder, with
    /// what modules are built against). One that has no modules is `bzImage` alone; for it, jobs run that load none.
    pub fn given(folder: &Path, into: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", into.display());
        let _ = std::fs::remove_dir_all(into);
        std::fs::create_dir_all(into).map_err(failed)?;
        if !folder.join("modules.tar.xz").exists() {
            let (name, image) = ("given".to_owned(), folder.join("bzImage"));
            return Ok(Self {
                release: name.clone(),
                name,
                image,
                drivers: into.to_owned(),
                headers: None,
                compiler: None,
            });
        }
        for archive in ["modules.tar.xz", "build-tree.tar.xz"] {
            let mut tar = Command::new("tar");
            let status = tar.arg("-xJf").arg(folder.join(archive)).arg("-C").arg(into).status();
            if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
                return Err(format!("unpacking {archive} of {}: {status:?}", folder.display()));
            }
        }
        let only = |folder: &Path, but: &str| {
            let entries = std::fs::read_dir(folder).map_err(failed)?;
            let mut names = entries.filter_map(Result::ok).map(|entry| entry.file_name());
            let name = names.find(|name| name != but);
            name.map(|name| name.to_string_lossy().into_owned())
                .ok_or(format!("{} is empty", folder.display()))
        };
        let modules = into.join("lib/modules");
        let release = only(&modules, "")?;
        Ok(Self {
            name: release.clone(),
            image: folder.join("bzImage"),
            drivers: modules.join(&release),
            headers: Some(into.join(only(into, "lib")?)),
            release,
            compiler: Some("gcc-12"),
        })
    }

    /// Builds the project's module and those of the tests, into a folder that has them afterwards.
    pub fn build(&self, root: &Root, folder: &Path) -> Result<(), String> {
        let into = folder.join("modules").join(&self.release);
        std::fs::create_dir_all(&into).map_err(|error| format!("{}: {error}", into.display()))?;
        let Some(headers) = &self.headers else { return Ok(()) };
        for (source, name) in OWN {
            let from = crate::root().join("tests/guest").join(source);
            let build = into.join(source);
            copy(&from, &build)?;
            let mut make = self.make(root);
            make.arg("-C").arg(headers).arg(format!("M={}", build.display())).arg("modules");
            quietly(&mut make, &format!("building {name} for Linux {}", self.release))?;
            let built = build.join(format!("{name}.ko"));
            std::fs::copy(&built, into.join(format!("{name}.ko")))
                .map_err(|error| format!("{}: {error}", built.display()))?;
        }
        self.build_ours(root, &into, headers)
    }

    /// Builds the project's module, if there is one.
    fn build_ours(&self, root: &Root, into: &Path, headers: &Path) -> Result<(), String> {
        let source = crate::root().join("kmod");
        if !source.join("Makefile").exists() {
            return Ok(());
        }
        // The check builds with other warnings, so the module is built after it.
        for (target, doing) in [("check", "checking"), ("module", "building")] {
            let mut make = self.make(root);
            make.arg("-C").arg(&source).arg(format!("KDIR={}", headers.display())).arg(target);
            make.env_remove("RUSTUP_TOOLCHAIN")
                .env_remove("RUSTFLAGS")
                .env_remove("CARGO")
                .env("CARGO_NET_OFFLINE", "true");
            quietly(&mut make, &format!("{doing} {MODULE} for Linux {}", self.release))?;
        }
        let built = source.join(format!("{MODULE}.ko"));
        let copied = std::fs::copy(&built, into.join(format!("{MODULE}.ko")));
        copied.map(drop).map_err(|error| format!("{}: {error}", built.display()))
    }

    fn make(&self, root: &Root) -> Command {
        let mut make = root.command("make");
        make.arg("-s");
        if let Some(compiler) = self.compiler {
            make.arg(format!("CC={compiler}"));
        }
        make
    }
}

/// Copies the files of a folder.
fn copy(from: &Path, into: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", from.display());
    std::fs::create_dir_all(into).map_err(failed)?;
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            std::fs::copy(&path, into.join(name)).map_err(failed)?;
        }
    }
    Ok(())
}

/// Builds the guest's own program, linked statically, and returns where it is.
pub fn program(folder: &Path) -> Result<PathBuf, String> {
    let built = by_itself(folder, super::PROGRAMS, &["--release"], "building the guest's program")?;
    Ok(built.join("release/portcullis-guest"))
}

/// Builds the command `portcullis`. What reads and replays recordings is optimised; the rest would take longer than it runs.
pub fn command(folder: &Path) -> Result<PathBuf, String> {
    let mut words = vec!["-p", "portcullis-cli", "--config", "profile.dev.debug=false"];
    for optimised in [
        "profile.dev.package.portcullis.opt-level=2",
        "profile.dev.package.portcullis-model.opt-level=2",
        "profile.dev.package.portcullis-trace.opt-level=2",
        "profile.dev.package.ruzstd.opt-level=2",
    ] {
        words.extend(["--config", optimised]);
    }
    let built = by_itself(folder, ".", &words, "building the command for the guest")?;
    Ok(built.join("debug/portcullis"))
}

/// Builds the program that drives devices by itself. It is not optimised, which takes longer than it runs.
pub fn user(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let words = [
        "-p",
        "portcullis-user",
        "-p",
        "portcullis-c",
        "--lib",
        "--bins",
        "--example",
        "edu",
        "--config",
        "profile.dev.debug=false",
    ];
    let built = by_itself(folder, ".", &words, "building the guest's program with a device")?.join("debug");
    let mut programs = vec![built.join("portcullis-user"), built.join("examples/edu")];
    programs.extend(programs_in_c(&built)?);
    Ok(programs)
}

/// Programs in C and C++ that drive devices by the library, and what they are called in the guest.
const IN_C: [(&str, &str); 4] = [
    ("tests/guest/user/c/calls.c", "portcullis-calls"),
    ("tests/guest/user/c/nvme.c", "nvme-c"),
    ("crates/portcullis-c/examples/edu.c", "edu-c"),
    ("crates/portcullis-c/examples/edu.cpp", "edu-ring"),
];

/// Compiles these beside the library, statically, as the guest has none.
fn programs_in_c(built: &Path) -> Result<Vec<PathBuf>, String> {
    let root = crate::root();
    let make = |(source, name): &(&str, &str)| {
        let program = built.join(name);
        let compiler = if source.ends_with("pp") { "c++" } else { "cc" };
        let mut compile = Command::new(compiler);
        compile
            .args(["-static", "-O2", "-Wall", "-Wextra", "-I"])
            .arg(root.join("crates/portcullis-c/include"));
        compile.arg(root.join(source)).arg(built.join("libportcullis_c.a"));
        compile.args(["-lpthread", "-ldl", "-lm", "-lgcc_eh", "-o"]).arg(&program);
        quietly(&mut compile, "building a program in C for the guest")?;
        Ok(program)
    };
    IN_C.iter().map(make).collect()
}

/// Builds that program and the one with a disk to be measured.
pub fn measured(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let words = ["-p", "portcullis-user", "-p", "portcullis-c", "--lib", "--bins", "--examples", "--release"];
    let built = by_itself(folder, ".", &words, "building the guest's programs with devices")?.join("release");
    let mut programs = vec![built.join("portcullis-user"), built.join("examples/nvme")];
    programs.extend(programs_in_c(&built)?);
    Ok(programs)
}

/// Builds a program that needs no library of the guest's, and returns the folder of its profiles.
fn by_itself(folder: &Path, from: &str, words: &[&str], what: &str) -> Result<PathBuf, String> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let target = folder.join("programs");
    let mut build = Command::new(crate::cargo());
    build.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", "-C target-feature=+crt-static");
    build.args(["build", "--locked", "--target", TARGET, "--target-dir"]).arg(&target).args(words);
    build.current_dir(crate::root().join(from));
    quietly(&mut build, what)?;
    Ok(target.join(TARGET))
}

/// Fetches the compiler that the module's core names, its sources, and the core's crates, for the builds for all kernels. This runs outside
/// of the root that has the kernel's compiler, as Cargo and rustup reach no registry there.
pub fn fetch() -> Result<(), String> {
    let core = &crate::root().join("kmod/rust");
    let command = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        // Cargo says to what it runs which compiler to take, and xtask is one of these.
        command.args(arguments).current_dir(core).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
        command
    };
    let has_sources = || {
        output(&mut command("rustc", &["--print", "sysroot"]))
            .is_some_and(|root| Path::new(root.trim()).join("lib/rustlib/src/rust/library").exists())
    };
    if !has_sources() {
        eprintln!("== rustup adds the compiler that {} names", core.join("rust-toolchain.toml").display());
        // What is still missing, the build says.
        let _ = output(&mut command("rustup", &["toolchain", "install"]));
    }
    // As the Makefile builds it: Rust's own library has crates too.
    let target = ["--target", "x86_64-unknown-none", "-Zbuild-std=core,alloc,compiler_builtins"];
    let fetch = || command("cargo", &["fetch", "--quiet", "--locked"]);
    let what = "fetching the crates of the module's core";
    quietly(fetch().args(target).env("RUSTC_BOOTSTRAP", "1"), what)?;
    // `make check` reads the core's code with a program of the workspace.
    let host = ["--target", "x86_64-unknown-linux-gnu"];
    quietly(fetch().args(host).current_dir(crate::root()), "fetching the crates of the workspace").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_given_is_what_its_archives_hold() {
        let folder = tempfile::tempdir().unwrap();
        let (given, into) = (folder.path().join("given"), folder.path().join("into"));
        std::fs::create_dir(&given).unwrap();
        let kernel = Kernel::given(&given, &into).unwrap();
        assert_eq!((&*kernel.release, kernel.headers), ("given", None), "it has no modules");
        for (archive, first, inside) in [
            ("modules.tar.xz", "lib", "lib/modules/6.9.1-test"),
            ("build-tree.tar.xz", "headers", "headers/include"),
        ] {
            std::fs::create_dir_all(given.join(inside)).unwrap();
            let mut pack = Command::new("tar");
            pack.arg("-cJf").arg(given.join(archive)).arg("-C").arg(&given).arg(first);
            quietly(&mut pack, "packing").unwrap();
        }
        let kernel = Kernel::given(&given, &into).unwrap();
        assert_eq!((&*kernel.name, &*kernel.release), ("6.9.1-test", "6.9.1-test"));
        assert_eq!(
            (kernel.image, kernel.drivers),
            (given.join("bzImage"), into.join("lib/modules/6.9.1-test"))
        );
        assert_eq!((kernel.headers, kernel.compiler), (Some(into.join("headers")), Some("gcc-12")));
        assert!(into.join("headers/include").is_dir());
        std::fs::write(given.join("build-tree.tar.xz"), "no archive").unwrap();
        let error = Kernel::given(&given, &into).err().unwrap();
        assert!(error.contains("unpacking"), "{error}");
    }
}
