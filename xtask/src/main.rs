//! Everyday commands of the project: `cargo xtask test`, `cargo xtask nightly`, `cargo xtask coherence`,
//! `cargo xtask conformance`, `cargo xtask check`.

mod browser;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod codes;
mod coherence;
mod conformance;
#[cfg(test)]
mod documents;
mod nightly;
mod oldest;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "\
cargo xtask test      run every test: units, properties, documentation, model checker, without std; `conformance`, and
                      `nightly`
cargo xtask nightly   run tests under Miri, ThreadSanitizer and AddressSanitizer, and the bounds on what CPUs share, where
                      rustup has nightly Rust
cargo xtask coherence [--help]
                      what CPUs share, on 1 to 256 simulated ones
cargo xtask conformance
                      run the drivers of IOMMUs on those that QEMU emulates; installs QEMU where the system allows it
cargo xtask check     formatting, lints and documentation, all without a warning
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (command, steps) = match arguments[..] {
        [command @ "test"] => (command, test_steps()),
        [command @ "nightly"] => (command, Vec::new()),
        [command @ "check"] => (command, check_steps()),
        [command @ "conformance"] => (command, Vec::new()),
        ["coherence", ref rest @ ..] => return coherence::command(&root(), rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("xtask: no such command\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    for step in &steps {
        eprintln!("== {}", step.what);
        if let Err(reason) = step.run() {
            eprintln!("xtask: {}: {reason}", step.what);
            return ExitCode::FAILURE;
        }
    }
    let mut done = steps.len();
    let guests = if command == "test" { skipped() } else { Vec::new() };
    let (mut tests, mut reasons) = (guests.len(), guests);
    for part in parts(command) {
        if let Some(why) = (part.missing)() {
            tests += part.count;
            reasons.push(format!("{}, {} tests: {why}", part.what, part.count));
            continue;
        }
        eprintln!("== {}", part.what);
        if let Err(reason) = (part.run)() {
            eprintln!("xtask: {}: {reason}", part.what);
            return ExitCode::FAILURE;
        }
        done += 1;
    }
    println!("{done} steps done, {tests} tests skipped");
    reasons.iter().for_each(|why| println!("skipped: {why}"));
    ExitCode::SUCCESS
}

/// Tests that need something which a machine may lack.
struct Part {
    what: &'static str,
    count: usize,
    /// Says why they cannot be run here, if so. Installs what is missing where the system allows it.
    missing: Box<dyn Fn() -> Option<String>>,
    run: Box<dyn Fn() -> Result<(), String>>,
}

/// The parts that `command` runs.
fn parts(command: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    if command == "test" {
        let (missing, run) = (|| oldest::missing(&root()), || oldest::run(&root()));
        let (missing, run) = (Box::new(missing), Box::new(run));
        parts.push(Part { what: oldest::WHAT, count: oldest::COUNT, missing, run });
    }
    if command == "test" {
        let run = Box::new(|| browser::run(&root()));
        let (what, count) = (browser::WHAT, browser::count());
        parts.push(Part { what, count, missing: Box::new(browser::missing), run });
    }
    if matches!(command, "test" | "conformance") {
        let run = Box::new(|| conformance::run(&root()));
        let (what, count) = (conformance::WHAT, conformance::count());
        parts.push(Part { what, count, missing: Box::new(conformance::missing), run });
    }
    if matches!(command, "test" | "nightly") {
        parts.extend(nightly::TOOLS.iter().map(|tool| Part {
            what: tool.what,
            count: tool.count(),
            missing: Box::new(|| tool.missing()),
            run: Box::new(|| tool.run(&root())),
        }));
        let run = Box::new(|| coherence::test(&root()));
        let (what, count) = (coherence::WHAT, coherence::BOUNDS.len());
        parts.push(Part { what, count, missing: Box::new(coherence::missing), run });
    }
    parts
}

/// One command and what it is for.
struct Step {
    what: &'static str,
    program: PathBuf,
    arguments: &'static [&'static str],
    /// Where it runs, below the repository's root.
    folder: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

impl Step {
    fn cargo(what: &'static str, arguments: &'static [&'static str]) -> Self {
        Self { what, program: PathBuf::new(), arguments, folder: "", environment: &[] }
    }

    fn run(&self) -> Result<(), String> {
        let root = root();
        let program = if self.program.as_os_str().is_empty() {
            std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()).into()
        } else {
            root.join(&self.program)
        };
        let status = Command::new(&program)
            .args(self.arguments)
            .envs(self.environment.iter().copied())
            .current_dir(root.join(self.folder))
            .status()
            .map_err(|error| format!("{} did not start: {error}", program.display()))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{} {}: {status}", program.display(), self.arguments.join(" ")))
        }
    }
}

/// Something to test with that is not ours to ship: a part of Linux to measure beside, recordings.
struct Guest {
    /// The variable that says where it is.
    variable: &'static str,
    /// The tests that need it.
    test: &'static str,
    /// What the variable should name.
    what: &'static str,
    step: &'static str,
    arguments: &'static [&'static str],
}

/// Cargo's arguments for a test that runs only when it is asked for.
macro_rules! ignored_test {
    ($package:literal, $target:literal, $name:literal) => {
        &[
            "test",
            "--locked",
            "--release",
            "-p",
            $package,
            "--test",
            $target,
            "--",
            "--ignored",
            "--exact",
            $name,
        ]
    };
}

const GUESTS: [Guest; 5] = [
    Guest {
        variable: "PORTCULLIS_RIVAL",
        test: "iova::every_workload_runs_on_linux",
        what: "library with Linux's allocator",
        step: "tests beside Linux's allocator",
        arguments: ignored_test!("portcullis-bench", "benches", "iova::every_workload_runs_on_linux"),
    },
    Guest {
        variable: "PORTCULLIS_RIVAL_PT",
        test: "pgtable::every_workload_runs_on_linux",
        what: "library with Linux's page tables",
        step: "tests beside Linux's page tables",
        arguments: ignored_test!("portcullis-bench", "benches", "pgtable::every_workload_runs_on_linux"),
    },
    Guest {
        variable: "PORTCULLIS_RIVAL",
        test: "bounce::every_workload_runs_on_linux",
        what: "library with Linux's swiotlb",
        step: "tests beside Linux's swiotlb",
        arguments: ignored_test!("portcullis-bench", "benches", "bounce::every_workload_runs_on_linux"),
    },
    Guest {
        variable: "PORTCULLIS_TRACES",
        test: "every_trace_keeps_its_promises",
        what: "folder with traces",
        step: "tests over all traces",
        arguments: ignored_test!("portcullis-trace", "traces", "hostile::every_trace_keeps_its_promises"),
    },
    Guest {
        variable: "PORTCULLIS_TRACES",
        test: "no_paint_shows_in_any_trace",
        what: "folder with traces",
        step: "painted memory over all traces",
        arguments: ignored_test!("portcullis-trace", "traces", "painted::no_paint_shows_in_any_trace"),
    },
];

impl Guest {
    fn is_there(&self) -> bool {
        std::env::var_os(self.variable).is_some()
    }
}

/// Tests that the command would run on a machine that had what they need.
fn skipped() -> Vec<String> {
    let missing = GUESTS.iter().filter(|guest| !guest.is_there());
    let why = |guest: &Guest| format!("{}: {} names no {}", guest.test, guest.variable, guest.what);
    missing.map(why).collect()
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

fn test_steps() -> Vec<Step> {
    let mut steps = vec![
        // With optimisation, as the property tests do millions of operations.
        Step::cargo("tests", &["test", "--locked", "--workspace", "--release", "--all-targets"]),
        Step::cargo(
            "examples in the documentation",
            &["test", "--locked", "--workspace", "--release", "--doc"],
        ),
        Step {
            // Its own folder: the configuration would otherwise rebuild everything back and forth.
            environment: &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")],
            ..Step::cargo(
                "lock-free parts in the model checker",
                &[
                    "test",
                    "--locked",
                    "--release",
                    "-p",
                    "portcullis",
                    "-p",
                    "portcullis-hw",
                    "-p",
                    "portcullis-linux",
                    "--lib",
                    "--test",
                    "loom",
                ],
            )
        },
        Step {
            folder: NO_STD,
            environment: &[("CARGO_TARGET_DIR", "target")],
            ..Step::cargo("the core linked without std", &["build", "--locked", "--release"])
        },
        Step {
            program: Path::new(NO_STD).join("target/release/portcullis-no-std"),
            ..Step::cargo("the core run without std", &[])
        },
    ];
    let guests = GUESTS.iter().filter(|guest| guest.is_there());
    steps.extend(guests.map(|guest| Step::cargo(guest.step, guest.arguments)));
    steps
}

/// The program that has neither `std` nor a C runtime.
const NO_STD: &str = "tests/no-std";

fn check_steps() -> Vec<Step> {
    let deny = &[("RUSTDOCFLAGS", "-D warnings")];
    vec![
        Step::cargo("formatting", &["fmt", "--all", "--check"]),
        Step { folder: NO_STD, ..Step::cargo("formatting of the program without std", &["fmt", "--check"]) },
        Step { folder: conformance::KERNEL, ..Step::cargo("formatting of the kernel", &["fmt", "--check"]) },
        Step::cargo("lints", &["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        Step {
            folder: NO_STD,
            environment: &[("CARGO_TARGET_DIR", "target")],
            ..Step::cargo("lints without std", &["clippy", "--locked", "--release", "--", "-D", "warnings"])
        },
        Step {
            folder: conformance::KERNEL,
            environment: &[("CARGO_TARGET_DIR", "target")],
            ..Step::cargo("lints of the kernel", &["clippy", "--locked", "--release", "--", "-D", "warnings"])
        },
        Step {
            environment: deny,
            ..Step::cargo("documentation", &["doc", "--locked", "--workspace", "--no-deps"])
        },
        Step {
            environment: deny,
            // Without the features that other crates of the workspace turn on.
            ..Step::cargo("the core's documentation", &["doc", "--locked", "-p", "portcullis", "--no-deps"])
        },
    ]
}
