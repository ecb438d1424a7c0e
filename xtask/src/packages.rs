//! Programs that tests need, and the distribution's packages of them, which are installed where the system allows that.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use crate::nightly::output;

/// Why a program is missing and cannot be had, if so: `lacking` says what is missing now, and `packages` are installed if
/// something is. With `newer`, Debian 12 takes them from its backports, as its own are too old.
pub fn missing(lacking: impl Fn() -> Option<String>, packages: &[&str], newer: bool) -> Option<String> {
    let first = lacking()?;
    match install(packages, newer) {
        Ok(()) => lacking(),
        Err(why) => Some(format!("{first}, and {why}")),
    }
}

/// What the system's sources of packages are stays as it is.
fn install(packages: &[&str], newer: bool) -> Result<(), String> {
    let named = if packages.len() == 1 { "the package" } else { "the packages" };
    let named = format!("{named} {}", packages.join(", "));
    if output(Command::new("id").arg("-u")).as_deref().map(str::trim) != Some("0") {
        return Err(format!("only root may install {named}"));
    }
    if output(Command::new("apt-get").arg("--version")).is_none() {
        return Err(format!("there is no apt-get to install {named}"));
    }
    eprintln!("== installing {named} of the distribution");
    // A machine that has just started may be installing its own updates: apt waits for it, this many seconds.
    let options = ["-qq", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=300"];
    let mut arguments = options.map(str::to_owned).to_vec();
    let mut release = Vec::new();
    if newer && codename().as_deref() == Some("bookworm") {
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
    let wanted = [&["install", "-y", "--no-install-recommends"][..], packages].concat();
    apt(&wanted, &release)
}

/// What the system's release of Debian is called.
pub fn codename() -> Option<String> {
    let system = std::fs::read_to_string("/etc/os-release").ok()?;
    system.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")).map(str::to_owned)
}

/// The mirror of Debian that the system uses.
pub fn mirror() -> Result<String, String> {
    let own = std::fs::read_to_string(SOURCES).unwrap_or_default();
    let parts = std::fs::read_to_string("/etc/apt/sources.list.d/debian.sources").unwrap_or_default();
    let of_parts = parts.lines().find_map(|line| line.strip_prefix("URIs:")).map(str::trim);
    let of_own =
        own.lines().filter(|line| line.starts_with("deb ")).find_map(|line| line.split_whitespace().nth(1));
    let mirror = of_parts.or(of_own).ok_or("apt names no mirror of Debian")?;
    Ok(mirror.to_owned())
}

const SOURCES: &str = "/etc/apt/sources.list";

/// A list of sources with the backports of Debian 12, from the mirror that the system uses.
fn backports() -> Result<PathBuf, String> {
    let mut list = std::fs::read_to_string(SOURCES).unwrap_or_default();
    let mirror = mirror()?;
    let _ = writeln!(list, "\ndeb {mirror} bookworm-backports main");
    let at = crate::root().join("target/backports.list");
    let failed = |error: std::io::Error| format!("{}: {error}", at.display());
    at.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    std::fs::write(&at, list).map_err(failed)?;
    Ok(at)
}
