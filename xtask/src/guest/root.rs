//! Debian's kernels, their headers, and the compilers that these want: packages, unpacked below `target/guest/root`, where a
//! command runs by `chroot` in a mount namespace of its own.
//!
//! Nothing is installed in the system. One folder serves all kernels: those of Debian 13 and of its backports want GCC 14, and a C library
//! that is newer than Debian 12's; that of Debian 12 wants GCC 12, which Debian 13 has, too. apt fetches and checks the packages, with a
//! state of its own there.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::packages::{self, codename};

/// The kernels that the guest boots: what each is called here, and the versions that it may have. The highest one that is offered is
/// taken.
pub const KERNELS: [(&str, &[u64]); 3] = [("6.1", &[6, 1]), ("6.12", &[6, 12]), ("newest", &[])];

/// What the guest and the builds need beside headers and kernels.
const PACKAGES: [&str; 15] = [
    "base-files",
    "bash",
    "busybox-static",
    "coreutils",
    "dash",
    "e2fsprogs",
    "findutils",
    "gawk",
    "gcc-12",
    "gcc-14",
    "grep",
    // Rust links the build scripts of what the core depends on.
    "libc6-dev",
    // Debian's own is older than what the newest kernel wants.
    "linux-base/trixie-backports",
    "make",
    "sed",
];

/// What the kernels' packages depend on, and neither a build nor the guest uses.
const UNUSED: [&str; 9] = [
    "debconf_",
    "dracut",
    "initramfs-tools",
    "klibc",
    "libapparmor1_",
    "libklibc",
    "libsystemd-shared_",
    "systemd_",
    "udev_",
];

/// Of the kernels' own packages: the image, and drivers without the large families that QEMU has no device of.
const OF_KERNELS: [&str; 6] = [
    "./boot/vmlinuz*",
    "*/vmlinuz",
    "*/kernel/drivers/*",
    "*/kernel/fs/*",
    "*/kernel/lib/*",
    "*/kernel/net/*",
];
const OF_KERNELS_TOO: [&str; 4] =
    ["*/kernel/crypto/*", "*/kernel/arch/*", "*/kernel/block/*", "*/kernel/virt/*"];
const NOT_OF_KERNELS: [&str; 8] = [
    "*/drivers/gpu/*",
    "*/drivers/media/*",
    "*/drivers/staging/*",
    "*/net/wireless/*",
    "*/drivers/infiniband/*",
    "*/drivers/iio/*",
    "*/drivers/input/*",
    "*/drivers/hwmon/*",
];

/// The folder, with all in it.
pub struct Root {
    path: PathBuf,
    releases: Vec<(&'static str, String)>,
}

impl Root {
    /// Fetches and unpacks what is not there yet. The error says why nothing can be had here.
    pub fn prepare(folder: &Path) -> Result<Self, String> {
        let path = folder.join("root");
        let complete = folder.join("root.complete");
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let recipe = recipe();
        let known = std::fs::read_to_string(&complete).unwrap_or_default();
        if let Some(releases) = known.strip_prefix(&recipe) {
            let named = KERNELS.iter().map(|&(name, _)| name);
            let releases = named.zip(releases.lines().map(str::to_owned)).collect();
            return Ok(Self { path, releases });
        }
        let _ = std::fs::remove_dir_all(&path);
        let etc = path.join("etc/apt");
        let state = path.join("var/lib/dpkg");
        for folder in [
            &etc.join("apt.conf.d"),
            &etc.join("preferences.d"),
            &path.join("var/lib/apt/lists/partial"),
            &path.join("var/cache/apt/archives/partial"),
            &state,
        ] {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        std::fs::write(etc.join("sources.list"), sources()?).map_err(failed)?;
        std::fs::write(state.join("status"), "").map_err(failed)?;
        let mut root = Self { path, releases: Vec::new() };
        eprintln!("== fetching Debian's kernels, headers and compilers");
        root.apt("apt-get", &["update"])?;
        root.releases = root.offered()?;
        let mut wanted: Vec<String> = PACKAGES.map(str::to_owned).to_vec();
        for (_, release) in &root.releases {
            wanted.extend([format!("linux-headers-{release}"), format!("linux-image-{release}")]);
        }
        let fetch = ["install", "-y", "--download-only", "--no-install-recommends"];
        let fetch: Vec<&str> = fetch.into_iter().chain(wanted.iter().map(String::as_str)).collect();
        root.apt("apt-get", &fetch)?;
        root.unpack()?;
        // What the packages' own scripts would link.
        let awk = root.path.join("usr/bin/awk");
        std::os::unix::fs::symlink("gawk", awk).map_err(|error| format!("awk: {error}"))?;
        let releases: Vec<&str> = root.releases.iter().map(|(_, release)| release.as_str()).collect();
        std::fs::write(complete, format!("{recipe}{}", releases.join("\n")))
            .map_err(|error| format!("root.complete: {error}"))?;
        Ok(root)
    }

    /// Where a file of the folder is for those outside.
    pub fn at(&self, path: &str) -> PathBuf {
        self.path.join(path.trim_start_matches('/'))
    }

    /// What a kernel is called here, and its release.
    pub fn releases(&self) -> &[(&'static str, String)] {
        &self.releases
    }

    /// A command that runs in the folder, with the project, and Rust's folders, at their own paths.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let home = std::env::var("HOME").unwrap_or_default();
        let of = |variable: &str, usual: &str| {
            std::env::var(variable).unwrap_or_else(|_| Path::new(&home).join(usual).display().to_string())
        };
        let (cargo, rustup) = (of("CARGO_HOME", ".cargo"), of("RUSTUP_HOME", ".rustup"));
        let script = r#"
            root=$1 project=$2; shift 2
            for shared in /dev /proc "$project" "$CARGO_HOME" "$RUSTUP_HOME"; do
                [ -d "$shared" ] || continue
                mkdir -p "$root$shared" && mount --rbind "$shared" "$root$shared" || exit 1
            done
            # Cargo and rustup may fetch what the core depends on.
            for shared in /etc/resolv.conf /etc/hosts; do
                [ -f "$shared" ] && : >>"$root$shared" && mount --bind "$shared" "$root$shared"
            done
            mkdir -p "$root/etc/ssl/certs" && mount --rbind /etc/ssl/certs "$root/etc/ssl/certs"
            exec chroot "$root" /bin/sh -c 'cd "$1" && shift && exec "$@"' - "$project" "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "-"]);
        command.arg(&self.path).arg(crate::root()).arg(program);
        command.env("CARGO_HOME", cargo).env("RUSTUP_HOME", rustup).env("LC_ALL", "C");
        command
    }

    fn apt(&self, program: &str, further: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program);
        let path = self.path.display();
        for option in [
            format!("Dir={path}"),
            format!("Dir::State::status={path}/var/lib/dpkg/status"),
            // Folders of root's own are read by root.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Architecture=amd64".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        let out = command.arg("-q").args(further).stdin(Stdio::null()).output();
        let out = out.map_err(|error| format!("{program}: {error}"))?;
        if out.status.success() {
            return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&out.stderr);
        let last: Vec<&str> = said.lines().rev().take(3).collect();
        Err(format!("{program} {} failed: {}", further[0], last.join("; ")))
    }

    /// The highest release of each kernel that apt offers.
    fn offered(&self) -> Result<Vec<(&'static str, String)>, String> {
        let found = self.apt("apt-cache", &["search", "--names-only", "^linux-headers-[0-9].*-amd64$"])?;
        let releases: Vec<&str> = found.lines().filter_map(release_of).collect();
        let highest = |&(name, version): &(&'static str, &[u64])| {
            let fit = releases.iter().filter(|release| numbers(release).starts_with(version));
            let highest = fit.max_by_key(|release| numbers(release));
            let highest = highest.ok_or_else(|| format!("apt offers no Linux {name}"))?;
            Ok((name, (*highest).to_owned()))
        };
        KERNELS.iter().map(highest).collect()
    }

    /// Unpacks all packages, two at a time. The first makes the links that lead from `/bin` to `/usr/bin`.
    fn unpack(&self) -> Result<(), String> {
        let folder = self.path.join("var/cache/apt/archives");
        let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
        let mut packages = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_unused = UNUSED.iter().any(|unused| name.starts_with(unused));
            if name.ends_with(".deb") && !is_unused {
                packages.push((entry.metadata().map_err(failed)?.len(), name));
            }
        }
        let base = packages.iter().position(|(_, name)| name.starts_with("base-files_"));
        let base = packages.swap_remove(base.ok_or("apt fetched no base-files")?);
        self.unpack_one(&folder.join(base.1))?;
        // The largest is taken first.
        packages.sort();
        let left = Mutex::new(packages);
        let next = || left.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
        let work = || std::iter::from_fn(next).try_for_each(|(_, name)| self.unpack_one(&folder.join(name)));
        std::thread::scope(|scope| {
            let running = [scope.spawn(work), scope.spawn(work)];
            running.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or(Err("a thread that unpacked packages died".to_owned()))
            })
        })
    }

    fn unpack_one(&self, package: &Path) -> Result<(), String> {
        let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let failed = |error: std::io::Error| format!("unpacking {name}: {error}");
        let mut archive = Command::new("dpkg-deb");
        archive.arg("--fsys-tarfile").arg(package).stdout(Stdio::piped());
        let mut archive = archive.spawn().map_err(failed)?;
        let mut tar = Command::new("tar");
        tar.args(["-x", "--keep-directory-symlink", "-C"]).arg(&self.path).arg("--wildcards");
        tar.args(["--exclude=./usr/share/doc", "--exclude=./usr/share/man", "--exclude=./usr/share/locale"]);
        let of_kernel = ["linux-image-", "linux-modules-", "linux-binary-"];
        let of_kernel = of_kernel.iter().any(|begin| name.starts_with(begin));
        if of_kernel {
            tar.args(NOT_OF_KERNELS.map(|pattern| format!("--exclude={pattern}")));
            tar.args(OF_KERNELS).args(OF_KERNELS_TOO).stderr(Stdio::null());
        }
        let out = archive.stdout.take().ok_or("no output")?;
        let unpacked = tar.stdin(out).status().map_err(failed)?;
        let whole = archive.wait().map_err(failed)?;
        // Of a kernel's packages none has all that is named, which tar calls an error.
        let well = whole.success() && (unpacked.success() || of_kernel);
        if well { Ok(()) } else { Err(format!("unpacking {name}: {whole}, tar: {unpacked}")) }
    }
}

/// What the folder is made by: with another it is made anew.
fn recipe() -> String {
    format!("{KERNELS:?} {PACKAGES:?} {UNUSED:?} {OF_KERNELS:?} {OF_KERNELS_TOO:?} {NOT_OF_KERNELS:?}\n")
}

/// Why the folder cannot be made or used on this machine, if so.
pub fn lacking() -> Option<String> {
    let works = |program: &str, arguments: &[&str]| {
        let ran = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        ran.is_ok_and(|status| status.success())
    };
    if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
        return Some("Debian's kernels are built for by Linux on x86-64 alone".to_owned());
    }
    for (program, argument) in [("apt-get", "--version"), ("dpkg-deb", "--version"), ("xz", "--version")] {
        if !works(program, &[argument]) {
            return Some(format!("there is no {program}"));
        }
    }
    if !works("unshare", &["--mount", "chroot", "/", "true"]) {
        return Some("this user may not make a mount namespace and change the root".to_owned());
    }
    if !Path::new(KEYS).exists() {
        return Some(format!("{KEYS}, by which Debian's packages are checked, is not there"));
    }
    if codename().is_none_or(|name| name != "bookworm" && name != "trixie") {
        return Some(
            "the system is neither Debian 12 nor 13, and so its mirror need not have Debian's kernels"
                .to_owned(),
        );
    }
    None
}

const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Debian 13 with its backports, and Debian 12, from the mirror that the system uses.
fn sources() -> Result<String, String> {
    let mirror = packages::mirror()?;
    let lines = ["trixie", "trixie-backports", "bookworm"];
    let lines = lines.map(|suite| format!("deb [signed-by={KEYS}] {mirror} {suite} main\n"));
    Ok(lines.concat())
}

/// The release of a kernel, from a line of `apt-cache search`. Those for clouds and for real time are none of ours.
fn release_of(line: &str) -> Option<&str> {
    let release = line.split_whitespace().next()?.strip_prefix("linux-headers-")?;
    let is_plain = !release.contains("-cloud-") && !release.contains("-rt-");
    is_plain.then_some(release)
}

/// The numbers in a release, in their order.
fn numbers(release: &str) -> Vec<u64> {
    let of = release.split_once('+').map_or(release, |(version, _)| version);
    of.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_release_is_known_by_its_numbers() {
        let line = "linux-headers-6.12.117+deb13-amd64 - Header files for Linux 6.12.117+deb13-amd64";
        assert_eq!(release_of(line), Some("6.12.117+deb13-amd64"));
        assert_eq!(release_of("linux-headers-6.12.117+deb13-rt-amd64 - x"), None);
        assert_eq!(release_of("linux-headers-7.3.4+deb13-cloud-amd64 - x"), None);
        assert_eq!(numbers("6.12.117+deb13-amd64"), [6, 12, 117]);
        assert!(numbers("6.1.0-50-amd64") > numbers("6.1.0-47-amd64"));
        assert!(numbers("6.1.0-50-amd64").starts_with(&[6, 1]) && !numbers("6.12.9").starts_with(&[6, 1]));
    }

    #[test]
    fn what_a_tool_of_apt_complains_of_is_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root { path: folder.path().to_owned(), releases: Vec::new() };
        // It takes no such options.
        let error = root.apt("sh", &["update"]).unwrap_err();
        assert!(
            error.starts_with("sh update failed: ") && error.len() > "sh update failed: ".len(),
            "{error}"
        );
        assert!(root.apt("no such tool", &["update"]).unwrap_err().starts_with("no such tool: "));
    }

    #[test]
    fn every_package_that_was_fetched_is_unpacked_but_what_is_unused() {
        if Command::new("dpkg-deb").arg("--version").output().is_err() {
            println!("skipped: no dpkg-deb, which packs the packages that are unpacked here");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = Root { path: folder.path().join("root"), releases: Vec::new() };
        let archives = root.path.join("var/cache/apt/archives");
        std::fs::create_dir_all(&archives).unwrap();
        let names = ["base-files", "bash", "make", "gcc-12", "systemd"];
        for name in names {
            let package = folder.path().join(name);
            std::fs::create_dir_all(package.join("DEBIAN")).unwrap();
            let control = "Version: 1\nArchitecture: all\nMaintainer: nobody\nDescription: a test\n";
            std::fs::write(package.join("DEBIAN/control"), format!("Package: {name}\n{control}")).unwrap();
            std::fs::write(package.join(name), "").unwrap();
            let mut build = Command::new("dpkg-deb");
            build.args(["--root-owner-group", "--build"]).arg(&package);
            crate::quietly(build.arg(archives.join(format!("{name}_1_all.deb"))), "packing").unwrap();
        }
        root.unpack().unwrap();
        let there: Vec<_> = names.into_iter().filter(|name| root.path.join(name).exists()).collect();
        assert_eq!(there, names[..4]);
    }
}
