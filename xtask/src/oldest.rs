//! The README's first command on the oldest Rust that it names, which `rust-version` states for all crates.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::nightly::output;

/// What it is called where it is run or skipped.
pub const WHAT: &str = "the first command on the oldest Rust";

/// The number of its tests: the command, and what it does not build: its benchmarks, and other crates.
pub const COUNT: usize = 2;

/// What is built and run. The traces that ship replay in a second.
pub const COMMANDS: [&[&str]; COUNT] = [
    &["run", "--locked", "--release", "--", "replay", "--limit", "6000"],
    &[
        "check",
        "--locked",
        "--release",
        "-p",
        "portcullis-hw",
        "-p",
        "portcullis-linux",
        "-p",
        "portcullis-cli",
        "--features",
        crate::FEATURES,
    ],
];

/// The version that `Cargo.toml` states, with the third number that rustup wants.
pub fn version(manifest: &str) -> Option<String> {
    let line = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \""))?;
    Some(format!("{}.0", line.strip_suffix('"')?))
}

fn stated(root: &Path) -> Option<String> {
    version(&std::fs::read_to_string(root.join("Cargo.toml")).ok()?)
}

/// A command of that version.
fn cargo(version: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", version, "cargo"]);
    // Cargo sets these for what it runs, and xtask is one of those.
    for name in ["CARGO", "RUSTC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// Why that version is not here and cannot be had, if so.
pub fn missing(root: &Path) -> Option<String> {
    let Some(version) = stated(root) else { return Some("Cargo.toml states no rust-version".to_owned()) };
    let is_there = || output(cargo(&version).arg("--version")).is_some();
    if !is_there() {
        eprintln!("== rustup adds Rust {version}");
        let _ =
            output(Command::new("rustup").args(["toolchain", "install", &version, "--profile", "minimal"]));
    }
    (!is_there()).then(|| format!("rustup has no Rust {version}, and cannot add it"))
}

/// Runs the commands, in a folder of their own: two compilers would build everything anew in turn.
pub fn run(root: &Path) -> Result<(), String> {
    let version = stated(root).ok_or("Cargo.toml states no rust-version")?;
    for arguments in COMMANDS {
        let status = cargo(&version)
            // That compiler is asked whether it takes the code, not how fast that is.
            .args(["--config", "profile.release.package.portcullis-cli.opt-level=0"])
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
            .args(arguments)
            .env("CARGO_TARGET_DIR", root.join("target/oldest"))
            .current_dir(root)
            .stdout(Stdio::null())
            .status()
            .map_err(|error| format!("rustup did not start: {error}"))?;
        if !status.success() {
            return Err(format!("cargo {} on Rust {version}: {status}", arguments.join(" ")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root;

    #[test]
    fn the_readme_names_the_stated_version() {
        let version = stated(&root()).unwrap();
        let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
        let named = version.strip_suffix(".0").unwrap();
        assert!(readme.contains(&format!("[Rust](https://rustup.rs) {named} or later")), "{named}");
    }
}
