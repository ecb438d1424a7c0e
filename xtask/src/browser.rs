//! The tests that show the report's pages to a browser, and the browser itself, where the system lets it be installed.

use std::process::Command;

use crate::nightly::output;
use crate::workspace;

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

/// What Cargo runs.
pub const ARGUMENTS: &[&str] = workspace!("test", "--test", "cli", "--", "--ignored", "browser::");

#[cfg(test)]
mod tests {
    #[test]
    fn the_tests_are_counted_and_only_a_step_of_its_own_runs_them() {
        assert!(super::count() > 0);
        assert_eq!(super::TESTS.matches("\n#[ignore = ").count(), super::count());
    }
}
