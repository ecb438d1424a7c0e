//! The tests that show the report's pages to a browser, and the browser itself, where the system lets it be installed.

use std::path::Path;
use std::process::Command;

use crate::nightly::output;

pub const WHAT: &str = "the report's pages in a browser";

/// Debian's package, which is also the program's name.
const PROGRAM: &str = "chromium";

/// The tests.
const TESTS: &str = include_str!("../../crates/portcullis-cli/tests/cli/browser.rs");

/// How many there are.
pub fn count() -> usize {
    TESTS.lines().filter(|line| *line == "#[test]").count()
}

/// Why there is no browser, and none can be had, if so. Installs it where that is allowed.
pub fn missing() -> Option<String> {
    let is_there = || output(Command::new(PROGRAM).arg("--version")).is_some();
    if is_there() {
        return None;
    }
    if output(Command::new("id").arg("-u")).as_deref().map(str::trim) != Some("0") {
        return Some(format!("{PROGRAM} is not installed, and only root may install that package"));
    }
    eprintln!("== {PROGRAM} is installed from the distribution's packages");
    for arguments in [&["update"][..], &["install", "-y", "--no-install-recommends", PROGRAM]] {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-qq", "-o", "Dpkg::Use-Pty=0"])
            .args(arguments);
        if output(&mut command).is_none() {
            return Some(format!("{PROGRAM} is not installed, and apt-get {} failed", arguments.join(" ")));
        }
    }
    (!is_there()).then(|| format!("{PROGRAM} does not start"))
}

/// Runs the tests, with all of the workspace as the tests before were: so the command is compiled once.
pub fn run(root: &Path) -> Result<(), String> {
    let arguments = [
        "test",
        "--locked",
        "--workspace",
        "--features",
        crate::BENCH,
        "--release",
        "--test",
        "cli",
        "--",
        "--ignored",
        "browser::",
    ];
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .current_dir(root)
        .status()
        .map_err(|error| format!("cargo test: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {}: {status}", arguments.join(" "))) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tests_are_counted_and_only_a_step_of_its_own_runs_them() {
        assert!(super::count() > 0);
        assert_eq!(super::TESTS.matches("\n#[ignore = ").count(), super::count());
    }
}
