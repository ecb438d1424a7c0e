//! Building the program and its simulator, and running it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::nightly;

/// What the program calls that the simulator answers in place of the system.
const WRAPPED: &str =
    "calloc,clock_gettime,free,malloc,posix_memalign,realloc,sched_getaffinity,sched_yield,syscall";

const SIMULATOR: &str = "portcullis_coherence_simulator";

/// Packages of which the program needs a small part, `"*"` being those of others, the standard library's among them: what
/// it does not call is not compiled, which takes half of the time.
const MOSTLY_UNUSED: [&str; 4] = ["\"*\"", "portcullis-bench", "portcullis-model", "portcullis-trace"];

/// One workload on so many CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub workload: String,
    pub cpus: u32,
    /// `name=value`, as the program has them.
    pub options: Vec<String>,
    /// How many instructions to name.
    pub sites: usize,
}

impl Case {
    pub fn new(workload: &str, cpus: u32) -> Self {
        Self { workload: workload.to_owned(), cpus, options: Vec::new(), sites: 0 }
    }
}

/// What an operation takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    pub ns: f64,
    pub transfers: f64,
    pub atomics: f64,
    /// Of the transfers, those from one socket to another.
    pub far: f64,
}

/// Instructions that transfer lines: how often in each operation, and the access's own address and its callers'.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    pub transfers: f64,
    pub addresses: Vec<String>,
}

/// What became of a case: its figures, or why it has none.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub case: Case,
    pub figures: Result<Figures, String>,
    pub sites: Vec<Site>,
}

/// The program, built.
pub struct Program {
    pub path: PathBuf,
    libraries: PathBuf,
}

impl Program {
    /// Builds the simulator as everything else is built, and the program with all that it consists of for it.
    pub fn build(root: &Path) -> Result<Self, String> {
        let folder = root.join("target/coherence");
        let host = nightly::host()?;
        let cargo = crate::cargo();
        let arguments = ["build", "--quiet", "--locked", "--release", "-p", "portcullis-coherence-simulator"];
        // Not for the target that is named below: so that the flags there are not for it.
        let libraries = folder.join("simulator/release");
        let mut command = Command::new(cargo);
        command.args(arguments).arg("--target-dir").arg(folder.join("simulator"));
        finish(command.env_remove("RUSTFLAGS"), root)?;
        let wraps: Vec<String> = WRAPPED.split(',').map(|name| format!("--wrap={name}")).collect();
        let flags = [
            "-Zsanitizer=thread".to_owned(),
            // The simulator is what answers.
            "-Zexternal-clangrt".to_owned(),
            "-Cunsafe-allow-abi-mismatch=sanitizer".to_owned(),
            // Prefetches are calls of the simulator.
            "--cfg=coherence".to_owned(),
            // So that addresses are the same in each run, and those in the file.
            "-Crelocation-model=static".to_owned(),
            format!("-Clink-arg=-L{}", libraries.display()),
            format!("-Clink-arg=-l{SIMULATOR}"),
            format!("-Clink-arg=-Wl,{}", wraps.join(",")),
        ];
        let arguments =
            ["build", "--quiet", "--locked", "--release", "-p", "portcullis-coherence", "-Zbuild-std"];
        let mut command = nightly::nightly(&["cargo"]);
        command.args(arguments).args(["--target", &host]).arg("--target-dir").arg(&folder);
        // The sites are source lines.
        command.args([
            "-Zprofile-hint-mostly-unused",
            "--config",
            "profile.release.debug='line-tables-only'",
        ]);
        for package in MOSTLY_UNUSED {
            let hint = format!("profile.release.package.{package}.hint-mostly-unused=true");
            command.arg("--config").arg(hint);
        }
        // Spaces in a path are no end of a flag here.
        finish(command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}")), root)?;
        Ok(Self { path: folder.join(host).join("release/portcullis-coherence"), libraries })
    }

    /// Runs `case` on the core that is number `core` of those that there are.
    pub fn run(&self, case: &Case, core: usize) -> Result<Outcome, String> {
        let mut command = Command::new(&self.path);
        command.arg(format!("workload={}", case.workload)).arg(format!("cpus={}", case.cpus));
        command.arg(format!("sites={}", case.sites)).arg(format!("core={core}")).args(&case.options);
        // Before others: a program that cargo runs finds the toolchain's libraries by it.
        command.env("LD_LIBRARY_PATH", &self.libraries).stdin(Stdio::null());
        let output = command.output().map_err(|error| format!("{}: {error}", self.path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let outcome = output.status.success().then(|| parse(case, &text)).flatten();
        outcome.ok_or_else(|| {
            let told = String::from_utf8_lossy(&output.stderr);
            format!("{} on {} CPUs: {}\n{}", case.workload, case.cpus, output.status, told.trim_end())
        })
    }
}

/// Runs a command that builds something.
fn finish(command: &mut Command, root: &Path) -> Result<(), String> {
    let status = command.current_dir(root).status().map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}

/// What the program says.
fn parse(case: &Case, text: &str) -> Option<Outcome> {
    let mut lines = text.lines();
    let first = lines.next()?;
    let case = case.clone();
    if let Some(why) = first.strip_prefix("left out: ") {
        return Some(Outcome { case, figures: Err(why.to_owned()), sites: Vec::new() });
    }
    let mut numbers = first.strip_prefix("figures ")?.split(' ').map(|number| number.parse::<f64>().ok());
    let mut number = || numbers.next().flatten();
    let (ns, transfers, atomics, _accesses) = (number()?, number()?, number()?, number()?);
    let figures = Figures { ns, transfers, atomics, far: number()? };
    let site = |line: &str| {
        let mut words = line.strip_prefix("site ")?.split(' ').map(str::to_owned);
        Some(Site { transfers: words.next()?.parse().ok()?, addresses: words.collect() })
    };
    Some(Outcome { case, figures: Ok(figures), sites: lines.map(site).collect::<Option<_>>()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_program_says_is_understood() {
        let case = Case::new("raw-1", 2);
        let outcome = parse(&case, "figures 53.5 1.25 2 90 1\nsite 0.5 0x10 0x20\nsite 0.25 0x30\n").unwrap();
        assert_eq!(outcome.figures, Ok(Figures { ns: 53.5, transfers: 1.25, atomics: 2.0, far: 1.0 }));
        assert_eq!(outcome.sites[0].addresses, ["0x10", "0x20"]);
        assert_eq!(outcome.sites[1].transfers, 0.25);
        let left_out = parse(&case, "left out: no memory\n").unwrap();
        assert_eq!(left_out.figures, Err("no memory".to_owned()));
        assert!(parse(&case, "").is_none() && parse(&case, "figures 1 2").is_none());
        assert!(parse(&case, "figures 1 2 3 4 5\nsite x").is_none());
    }
}
