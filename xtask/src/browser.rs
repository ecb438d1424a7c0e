//! The tests that show the report's pages to a browser, and the browser itself, where the system lets it be installed.

use std::process::Command;

use crate::nightly::output;
use crate::{packages, workspace};

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
    let lacking = || {
        let is_there = output(Command::new(PROGRAM).arg("--version")).is_some();
        (!is_there).then(|| format!("{PROGRAM} is not installed, or does not start"))
    };
    packages::missing(lacking, &[PROGRAM], false)
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
