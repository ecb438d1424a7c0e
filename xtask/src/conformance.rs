//! The cases that run the drivers of `portcullis-hw` on QEMU's IOMMUs, an NVMe disk behind each by
//! each policy, a kernel that does, and QEMU itself, where the system lets it be installed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::nightly::output;
use crate::{packages, workspace};

pub const WHAT: &str = "cases on QEMU's IOMMUs";

/// The oldest QEMU whose models the cases were written against.
const OLDEST: u32 = 10;

/// QEMU's programs, and Debian's packages of them. (Until Debian 12 the last one was part of `qemu-system-misc`.)
const PROGRAMS: [&str; 3] = ["qemu-system-x86_64", "qemu-system-aarch64", "qemu-system-riscv64"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-arm", "qemu-system-riscv"];

/// The list of cases.
const CASES: &str = include_str!("../../crates/portcullis-hw/tests/conformance/main.rs");

/// The program that drives an NVMe disk: its options are the variants of two enumerations.
const NVME: &str = include_str!("../../crates/portcullis-cli/examples/nvme/main.rs");
const NVME_IOMMUS: &str = "\nenum Unit {\n";
const NVME_POLICIES: &str = "\nenum Way {\n";
/// What `tests/units` calls it.
const DISK: &str = "disk";

/// Where the kernel is, and the IOMMUs that it knows, as QEMU's options make them.
pub const KERNEL: &str = "tests/kernel";
const KERNEL_UNITS: [&str; 2] = ["intel-iommu,intremap=off", "amd-iommu,pt=off,intremap=off"];

/// The status with which a kernel ends that has found all to be well (QEMU's `isa-debug-exit`).
const WELL: i32 = 33;

/// The longest that a kernel may take.
const KERNEL_TIME: Duration = Duration::from_secs(240);

/// How many cases there are, each counted once for each IOMMU, the disk's for each policy, too; and
/// the kernel's.
pub fn count() -> usize {
    listed() + options(NVME_IOMMUS).len() * options(NVME_POLICIES).len() + KERNEL_UNITS.len()
}

/// The values of an option of the program with the disk, as `clap` names the variants.
fn options(begin: &str) -> Vec<String> {
    let variants = block_of(NVME, begin).lines().map(str::trim).filter_map(|line| line.strip_suffix(','));
    let named = |variant: &str| {
        let mut name = String::new();
        for letter in variant.chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.push(letter.to_ascii_lowercase());
        }
        name
    };
    variants.map(named).collect()
}

/// Each case for each IOMMU, and those that concern one only.
fn listed() -> usize {
    let named = |block: &str| {
        let is_name = |line: &&str| !line.is_empty() && line.chars().all(|c| c.is_alphanumeric() || c == '_');
        block.lines().map(str::trim).filter(is_name).count()
    };
    let units = block("\non! {\n").lines().filter(|line| line.contains(": ")).count();
    named(block("\nmacro_rules! every_case {\n")) * units + named(block("\nown! {\n"))
}

/// The part of the list from `begin` to the next brace that ends in the first column.
fn block(begin: &str) -> &'static str {
    block_of(CASES, begin)
}

fn block_of<'a>(text: &'a str, begin: &str) -> &'a str {
    let behind = text.split(begin).nth(1).unwrap_or_default();
    behind.split("\n}\n").next().unwrap_or_default()
}

/// What is printed of the tests' output: which ran, all about those that failed, and nothing of
/// what others print.
#[derive(Default)]
struct Output {
    is_of_successes: bool,
    gaps: std::collections::BTreeSet<String>,
    passed: usize,
}

impl Output {
    /// Takes the next line, and returns whether it is printed.
    fn take(&mut self, line: &str) -> bool {
        match line {
            "successes:" => self.is_of_successes = true,
            "failures:" => self.is_of_successes = false,
            line if line.starts_with("test result: ") => self.is_of_successes = false,
            _ => {}
        }
        if line.starts_with("not covered: ") {
            self.gaps.insert(line.to_owned());
            return false;
        }
        self.passed += usize::from(line.starts_with("test ") && line.ends_with("... ok"));
        !self.is_of_successes && !line.is_empty()
    }
}

/// Why there is no QEMU, and none can be had, if so. Installs it where that is allowed.
pub fn missing() -> Option<String> {
    packages::missing(lacking, &PACKAGES, true)
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

/// Runs them, and lists what could not be covered.
pub fn run(root: &Path) -> Result<(), String> {
    let mut command = Command::new(crate::cargo());
    crate::limit::add(&mut command)?
        // As the tests are built, so that nothing is built anew.
        .args(workspace!("test", "--test", "conformance", "--", "--ignored", "--show-output"))
        .current_dir(root)
        .stdout(Stdio::piped());
    let failed = |error: std::io::Error| format!("cargo test: {error}");
    let mut child = command.spawn().map_err(failed)?;
    let mut said = Output::default();
    for line in BufReader::new(child.stdout.take().ok_or("no output")?).lines() {
        let line = line.map_err(failed)?;
        if said.take(&line) {
            println!("{line}");
        }
    }
    let status = child.wait().map_err(failed)?;
    if !status.success() {
        return Err(format!("cargo test -p portcullis-unoptimised --test conformance: {status}"));
    }
    if said.passed != listed() {
        return Err(format!("{} cases were run, and there are {}", said.passed, listed()));
    }
    disk(root)?;
    kernel(root)?;
    println!("{} cases hold; what the models cannot show:", count());
    said.gaps.iter().for_each(|gap| println!("{gap}"));
    Ok(())
}

/// Writes and reads a disk behind each IOMMU by each policy, and has it write where a buffer was.
fn disk(root: &Path) -> Result<(), String> {
    let mut build = Command::new(crate::cargo());
    build.args(workspace!("build", "--example", DISK));
    // Where programs go is the caller's to say: so cargo tells.
    build.arg("--message-format=json-render-diagnostics").current_dir(root).stderr(Stdio::inherit());
    let built = build.output().map_err(|error| format!("cargo build: {error}"))?;
    if !built.status.success() {
        return Err(format!("cargo build --example {DISK}: {}", built.status));
    }
    let said = String::from_utf8_lossy(&built.stdout);
    let quoted = said.split("\"executable\":\"").skip(1).filter_map(|rest| rest.split('"').next()).last();
    let program = quoted.ok_or_else(|| format!("cargo build --example {DISK} names no program"))?;
    for iommu in options(NVME_IOMMUS) {
        for policy in options(NVME_POLICIES) {
            let ran = Command::new(program).args(["--iommu", &iommu, "--policy", &policy]).output();
            let ran = ran.map_err(|error| format!("{program}: {error}"))?;
            if !ran.status.success() {
                let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
                return Err(format!("the disk behind {iommu} by {policy}: {}\n{out}{err}", ran.status));
            }
            println!("disk {iommu} {policy} ... ok");
        }
    }
    Ok(())
}

/// A machine with this IOMMU, a disk and a network card, for the kernel.
fn machine(unit: &str, program: &Path, image: &Path) -> Command {
    let mut qemu = Command::new(PROGRAMS[0]);
    qemu.args(["-display", "none", "-nodefaults", "-no-reboot", "-accel", "tcg"])
        .args(["-machine", "q35,kernel-irqchip=off", "-smp", "2", "-m", "256", "-serial", "stdio"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-device", unit])
        .args(["-device", "nvme,addr=07.0,serial=portcullis,drive=d", "-netdev", "user,id=n"])
        .args(["-device", "virtio-net-pci,addr=08.0,netdev=n,iommu_platform=on,disable-legacy=on"])
        .arg("-drive")
        .arg(format!("file={},if=none,id=d,format=raw", image.display()))
        .arg("-kernel")
        .arg(program)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    qemu
}

/// Builds the kernel, and has QEMU run it behind each IOMMU that it knows, with a disk and a network card.
fn kernel(root: &Path) -> Result<(), String> {
    let folder = root.join(KERNEL);
    let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let mut build = Command::new(crate::cargo());
    // The flags are those of its own configuration.
    build.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env("CARGO_TARGET_DIR", "target");
    build.args(["build", "--locked", "--release"]).current_dir(&folder);
    let status = build.status().map_err(failed("cargo build"))?;
    if !status.success() {
        return Err(format!("cargo build in {KERNEL}: {status}"));
    }
    let program = folder.join("target/x86_64-unknown-linux-gnu/release/portcullis-kernel");
    let image = folder.join("target/disk");
    for unit in KERNEL_UNITS {
        let disk = std::fs::File::create(&image).map_err(failed("the disk's image"))?;
        disk.set_len(16 << 20).map_err(failed("the disk's image"))?;
        let mut qemu = machine(unit, &program, &image).spawn().map_err(failed(PROGRAMS[0]))?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = qemu.try_wait().map_err(failed(PROGRAMS[0]))? {
                break status;
            }
            if began.elapsed() > KERNEL_TIME {
                let _ = qemu.kill();
                let _ = qemu.wait();
                return Err(format!("the kernel did not end within {KERNEL_TIME:?} behind {unit}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if status.code() != Some(WELL) {
            return Err(format!("the kernel ended badly behind {unit}: {status}"));
        }
    }
    Ok(())
}

/// The machines that there are.
#[cfg(test)]
pub fn machines() -> Vec<Command> {
    KERNEL_UNITS.iter().map(|unit| machine(unit, Path::new("KERNEL"), Path::new("DISK"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_counted() {
        let cases = block("\nmacro_rules! every_case {\n");
        assert!(cases.contains("\n            a_strict_unmap_ends_access") && !cases.contains("on!"));
        let units = block("\non! {\n").lines().filter(|line| !line.trim().is_empty()).count();
        let own = block("\nown! {\n").lines().filter(|line| line.starts_with("        ")).count();
        let names = cases.lines().filter(|line| line.trim().starts_with(|c: char| c.is_lowercase())).count();
        assert!(units > 10 && own > 2 && listed() == names * units + own, "{units} of {names}, {own}");
        assert_eq!(options(NVME_IOMMUS), ["vtd", "amdvi", "smmuv3", "riscv", "virtio"]);
        let policies = ["strict", "strict-batch", "strict-ring", "bounce", "adaptive", "lazy"];
        assert_eq!(options(NVME_POLICIES), policies);
    }

    #[test]
    fn what_fails_is_printed_in_full_and_what_holds_in_a_line() {
        let lines = "\nrunning 2 tests\ntest a ... ok\ntest b ... FAILED\n\nsuccesses:\n\n---- a stdout ----\n\
                     not covered: x: y\nchatter\n\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\n\
                     thread 'b' panicked\nnot covered: x: y\n\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed";
        let mut output = Output::default();
        let printed: Vec<_> = lines.lines().filter(|line| output.take(line)).collect();
        let wanted = "running 2 tests\ntest a ... ok\ntest b ... FAILED\nfailures:\n---- b stdout ----\n\
                      thread 'b' panicked\nfailures:\n    b\ntest result: FAILED. 1 passed";
        assert_eq!(printed.join("\n"), wanted);
        assert_eq!((output.passed, output.gaps.len()), (1, 1));
    }
}
