//! The cases that run the drivers of `portcullis-hw` on QEMU's IOMMUs, and QEMU itself, where the system lets it be installed.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::nightly::output;

pub const WHAT: &str = "cases on QEMU's IOMMUs";

/// The oldest QEMU whose models the cases were written against.
const OLDEST: u32 = 10;

/// QEMU's programs, and Debian's packages of them. (Until Debian 12 the last one was part of `qemu-system-misc`.)
const PROGRAMS: [&str; 3] = ["qemu-system-x86_64", "qemu-system-aarch64", "qemu-system-riscv64"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-arm", "qemu-system-riscv"];

/// The list of cases.
const CASES: &str = include_str!("../../crates/portcullis-hw/tests/conformance/main.rs");

/// How many cases there are, each counted once for each IOMMU.
pub fn count() -> usize {
    of_qemu().lines().filter(|line| line.starts_with("        ") && !line.contains(['{', '}'])).count()
}

/// The part of the list that is QEMU's.
fn of_qemu() -> &'static str {
    CASES.split("\non! {\n").nth(1).unwrap_or_default()
}

/// Why there is no QEMU, and none can be had, if so. Installs it where that is allowed.
pub fn missing() -> Option<String> {
    let first = lacking()?;
    match install() {
        Ok(()) => lacking(),
        Err(why) => Some(format!("{first}, and {why}")),
    }
}

/// What is lacking now.
fn lacking() -> Option<String> {
    PROGRAMS.iter().find_map(|program| {
        let Some(version) = output(Command::new(program).arg("--version")) else {
            return Some(format!("{program} is not installed"));
        };
        // "QEMU emulator version 10.0.2 (..)"
        let number = version.split_whitespace().nth(3).unwrap_or_default();
        let major: u32 = number.split('.').next().and_then(|digits| digits.parse().ok()).unwrap_or(0);
        (major < OLDEST).then(|| format!("{program} is of version {number}, and the cases need {OLDEST}"))
    })
}

/// Installs QEMU from the distribution's packages: on Debian 12 from its backports, as its own is too old. What the system's
/// sources are stays as it is.
fn install() -> Result<(), String> {
    if output(Command::new("id").arg("-u")).as_deref().map(str::trim) != Some("0") {
        return Err(format!("only root may install the packages {}", PACKAGES.join(", ")));
    }
    if output(Command::new("apt-get").arg("--version")).is_none() {
        return Err(format!("there is no apt-get to install the packages {}", PACKAGES.join(", ")));
    }
    eprintln!("== QEMU is installed from the distribution's packages: {}", PACKAGES.join(", "));
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = system.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let mut arguments = vec!["-qq".to_owned(), "-o".to_owned(), "Dpkg::Use-Pty=0".to_owned()];
    let mut release = Vec::new();
    if codename == Some("bookworm") {
        let list = backports()?;
        arguments.extend(["-o".to_owned(), format!("Dir::Etc::SourceList={}", list.display())]);
        release = vec!["-t".to_owned(), "bookworm-backports".to_owned()];
    }
    let apt = |further: &[&str], release: &[String]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(&arguments).args(release).args(further);
        output(&mut command).map(drop).ok_or_else(|| format!("apt-get {} failed", further.join(" ")))
    };
    apt(&["update"], &[])?;
    let wanted = [&["install", "-y", "--no-install-recommends"][..], &PACKAGES].concat();
    apt(&wanted, &release)
}

/// A list of sources with the backports of Debian 12, from the mirror that the system uses.
fn backports() -> Result<PathBuf, String> {
    let own = std::fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    let parts = std::fs::read_to_string("/etc/apt/sources.list.d/debian.sources").unwrap_or_default();
    let of_parts = parts.lines().find_map(|line| line.strip_prefix("URIs:")).map(str::trim);
    let of_own =
        own.lines().filter(|line| line.starts_with("deb ")).find_map(|line| line.split_whitespace().nth(1));
    let mirror = of_parts.or(of_own).ok_or("apt names no mirror of Debian")?;
    let mut list = own.clone();
    let _ = writeln!(list, "\ndeb {mirror} bookworm-backports main");
    let at = crate::root().join("target/backports.list");
    let failed = |error: std::io::Error| format!("{}: {error}", at.display());
    at.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    std::fs::write(&at, list).map_err(failed)?;
    Ok(at)
}

/// Runs them, and lists what could not be covered.
pub fn run(root: &Path) -> Result<(), String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["test", "--locked", "--release", "-p", "portcullis-hw", "--test", "conformance", "--"])
        .args(["--ignored", "--show-output"])
        .current_dir(root)
        .stdout(Stdio::piped());
    let failed = |error: std::io::Error| format!("cargo test: {error}");
    let mut child = command.spawn().map_err(failed)?;
    let (mut passed, mut gaps) = (0, std::collections::BTreeSet::new());
    for line in BufReader::new(child.stdout.take().ok_or("no output")?).lines() {
        let line = line.map_err(failed)?;
        passed += usize::from(line.starts_with("test ") && line.ends_with("... ok"));
        if line.starts_with("not covered: ") {
            gaps.insert(line);
        } else {
            println!("{line}");
        }
    }
    let status = child.wait().map_err(failed)?;
    if !status.success() {
        return Err(format!("cargo test -p portcullis-hw --test conformance: {status}"));
    }
    if passed != count() {
        return Err(format!("{passed} cases of {} were run", count()));
    }
    println!("{passed} cases hold; what the models cannot show:");
    gaps.iter().for_each(|gap| println!("{gap}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_cases_are_counted() {
        let named = super::of_qemu().matches("\n        a_strict_unmap_ends_access").count();
        assert!(named > 0 && super::count() >= 14 * named, "{} cases, {named} IOMMUs", super::count());
    }
}
