//! The tests that show the report's pages to a browser, the browser itself, where the system lets it be installed, and the README's picture.

use std::process::Command;

use crate::nightly::output;
use crate::{packages, root, workspace};

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

/// The window that the picture shows.
const WINDOW: &str = "--window-size=830,1700";

/// Makes the picture of the README anew: the top of the page of the recording that ships.
pub fn picture() -> Result<(), String> {
    if let Some(why) = missing() {
        return Err(why);
    }
    let root = root();
    let page = root.join("target/picture.html");
    let result = page.with_extension("json");
    let portcullis = |arguments: &[&str]| {
        let mut command = Command::new(crate::cargo());
        command.args(["run", "--locked", "--release", "-p", "portcullis-cli", "--"]).args(arguments);
        let failed = || format!("portcullis {} failed", arguments.join(" "));
        output(command.current_dir(&root)).ok_or_else(failed)
    };
    let json = portcullis(&["replay", "--json"])?;
    std::fs::write(&result, json).map_err(|error| format!("{}: {error}", result.display()))?;
    portcullis(&["report", "target/picture.json", "--out", "target/picture.html"])?;
    let picture = root.join("docs/report.png");
    let mut browser = Command::new(PROGRAM);
    browser
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", WINDOW])
        .arg("--blink-settings=preferredColorScheme=1")
        .arg(format!("--user-data-dir={}", root.join("target/picture").display()))
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}", page.display()));
    output(&mut browser).ok_or_else(|| format!("{PROGRAM} made no picture"))?;
    println!("{}", picture.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tests_are_counted_and_only_a_step_of_its_own_runs_them() {
        assert!(super::count() > 0);
        assert_eq!(super::TESTS.matches("\n#[ignore = ").count(), super::count());
    }
}
