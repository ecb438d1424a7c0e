//! What others get: the crates as they would be published, and the command that they install.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What its two parts are called where they are run.
pub const CRATES: &str = "the crates as they would be published";
pub const COMMAND: &str = "the size of the command";

/// The most bytes that the command may have, its benchmarks among them.
const MOST_BYTES: u64 = 11_000_000;

/// The only warning there may be: the repository has no public address yet.
const NO_ADDRESS: &str = "warning: manifest has no documentation, homepage or repository";

/// The crates that do not say that they are not to be published.
fn published(root: &Path) -> Result<Vec<String>, String> {
    let failed = |error: std::io::Error| format!("crates: {error}");
    let mut names = Vec::new();
    for folder in std::fs::read_dir(root.join("crates")).map_err(failed)? {
        let folder = folder.map_err(failed)?;
        let manifest = std::fs::read_to_string(folder.path().join("Cargo.toml")).map_err(failed)?;
        if !manifest.lines().any(|line| line == "publish = false") {
            names.push(folder.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Packages each crate, without the network and without compiling it anew: that is what `cargo publish --dry-run` does, but for
/// the question whether the registry has that version, and for the build of what is in each package.
pub fn check(root: &Path) -> Result<(), String> {
    let mut command = Command::new(crate::cargo());
    command.args(["package", "--locked", "--offline", "--no-verify", "--allow-dirty"]);
    for name in published(root)? {
        command.args(["-p", &name]);
    }
    let output = command.current_dir(root).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cargo package: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let error = said.find("error").map_or(&*said, |at| &said[at..]);
        return Err(format!("cargo package: {}\n{error}", output.status));
    }
    match warnings(&said)[..] {
        [] => Ok(()),
        ref others => Err(format!("cargo package warns:\n{}", others.join("\n"))),
    }
}

/// The warnings of `cargo package` that there should not be.
fn warnings(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("warning: ") && *line != NO_ADDRESS).collect()
}

/// The command as the tests have built it: with its benchmarks, so that what is installed without them is smaller.
fn command() -> Result<PathBuf, String> {
    let here = std::env::current_exe().map_err(|error| format!("xtask: {error}"))?;
    let target = here.parent().and_then(Path::parent).ok_or("xtask is in no folder of Cargo's")?;
    Ok(target.join("release/portcullis").with_extension(std::env::consts::EXE_EXTENSION))
}

/// Fails where the command is larger than it may be.
pub fn check_size() -> Result<(), String> {
    let path = command()?;
    let about = std::fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    eprintln!("{}: {} bytes of {MOST_BYTES}", path.display(), about.len());
    small_enough(about.len())
}

fn small_enough(bytes: u64) -> Result<(), String> {
    if bytes < MOST_BYTES {
        return Ok(());
    }
    Err(format!("it has {bytes} bytes, and must have less than {MOST_BYTES}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_command_and_an_unknown_warning_are_failures() {
        assert_eq!(small_enough(10_999_999), Ok(()));
        assert!(small_enough(11_000_000).unwrap_err().contains("it has 11000000 bytes"));
        let said = format!("{NO_ADDRESS}\n  |\n   Packaging portcullis v0.1.0\n");
        assert!(warnings(&said).is_empty());
        let none = "warning: manifest has no description, documentation, homepage or repository";
        assert_eq!(warnings(&format!("{said}{none}\n")), [none]);
    }

    #[test]
    fn what_is_for_us_alone_is_not_published() {
        let names = published(&crate::root()).unwrap();
        assert!(
            names.contains(&"portcullis-cli".to_owned()) && !names.contains(&"portcullis-fuzz".to_owned())
        );
    }
}
