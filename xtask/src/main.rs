//! Everyday commands of the project: `cargo xtask test`, `cargo xtask nightly`, `cargo xtask coherence`,
//! `cargo xtask conformance`, `cargo xtask guest`, `cargo xtask check`.

mod borrowed;
mod browser;
mod c_library;
mod changed;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod codes;
mod coherence;
mod conformance;
#[cfg(test)]
mod documents;
mod guest;
mod lane;
mod limit;
mod nightly;
mod oldest;
mod packages;
mod published;
#[cfg(test)]
mod whole;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use self::lane::{Lane, Summary};

const USAGE: &str = "\
cargo xtask test      run every test: units, properties, documentation, model checker, without std; `conformance` and `guest`,
                      and `nightly`, beside each other
cargo xtask test --changed [REVISION] [--list]
                      the tests that see mistakes in the files that differ from a revision (HEAD), and how long they took here;
                      with --list nothing runs
cargo xtask test --quick [--list]
                      the tests that see the most in the least time
cargo xtask nightly   run tests under Miri, ThreadSanitizer and AddressSanitizer, and the bounds on what CPUs share, where
                      rustup has nightly Rust
cargo xtask coherence [--help]
                      what CPUs share, on 1 to 256 simulated ones
cargo xtask conformance
                      run the drivers of IOMMUs on those that QEMU emulates; installs QEMU where the system allows it
cargo xtask guest [--help]
                      Linux's drivers in guests that QEMU emulates; fetches Debian's kernels where the system allows it
cargo xtask c-library [FOLDER]
                      the library for C and C++, in a folder: header, static and shared library, and a file for pkg-config; or
                      its tests
cargo xtask limited test ..
                      what Cargo would do, with the limit that the tests above have: a program that prints nothing for ten
                      minutes is ended, and the test that hangs is named
cargo xtask picture   the picture of the README, with Debian's chromium
cargo xtask check     formatting, lints and documentation, all without a warning, and packages of the crates
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let parts = match arguments[..] {
        ["guest", ref rest @ ..] => return done(guest::command(rest)),
        ["coherence", ref rest @ ..] => return coherence::command(&root(), rest),
        [command, "--help" | "-h"] if !usage_of(command).is_empty() => {
            print!("{}", usage_of(command));
            return ExitCode::SUCCESS;
        }
        ["test"] => return report(test()),
        ["test", "--changed", ref rest @ ..] => return done(changed::command(rest)),
        ["test", "--quick"] => return done(changed::quick(false)),
        ["test", "--quick", changed::LIST] => return done(changed::quick(true)),
        [lane::BESIDE] => beside(),
        [limit::COMMAND, ref program @ ..] => return limit::run(program),
        ["limited", ref rest @ ..] => return done(limited(rest)),
        ["nightly"] => nightly_parts(),
        ["check"] => check_parts(),
        ["picture"] => return done(browser::picture()),
        ["conformance"] => vec![conformance_part()],
        ["c-library"] => vec![c_part()],
        ["c-library", ref rest @ ..] => return done(c_library::command(rest)),
        [] | ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("xtask: {}", refused(&arguments));
            return ExitCode::from(2);
        }
    };
    report(run_all(&parts, || Ok(())))
}

/// The part of the usage that is about one command; empty where there is no such command.
fn usage_of(command: &str) -> String {
    let mut is_own = false;
    let own = USAGE.lines().filter(|line| {
        if let Some(name) = command_of(line) {
            is_own = name == command;
        }
        is_own
    });
    own.map(|line| format!("{line}\n")).collect()
}

/// The command whose description begins on this line of the usage.
fn command_of(line: &str) -> Option<&str> {
    line.strip_prefix("cargo xtask ")?.split(' ').next()
}

/// Says which words are wrong, and what may stand in their place.
fn refused(arguments: &[&str]) -> String {
    let (command, rest) = arguments.split_first().map_or(("", arguments), |(command, rest)| (*command, rest));
    let own = usage_of(command);
    if own.is_empty() {
        let mut names: Vec<&str> = USAGE.lines().filter_map(command_of).collect();
        names.dedup();
        let names = names.join(", ");
        return format!("there is no command `{command}`: `cargo xtask help` explains {names}\n");
    }
    format!("`cargo xtask {command}` does not take `{}`:\n{own}", rest.join(" "))
}

fn report(outcome: Result<Summary, String>) -> ExitCode {
    done(outcome.map(|summary| print!("{summary}")))
}

fn done(outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every test there is: what compiles on stable Rust in one folder here, and the rest beside it, so that neither core waits
/// for a program of one thread.
fn test() -> Result<Summary, String> {
    let mut summary = borrowed::skipped();
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1) {
        summary.add(run_all(&front(), || Ok(()))?);
        summary.add(run_all(&beside(), || Ok(()))?);
        return Ok(summary);
    }
    let mut lane = Lane::start()?;
    summary.add(run_all(&front(), || lane.check())?);
    summary.add(lane.end()?);
    Ok(summary)
}

/// What runs on stable Rust, from one build of the workspace.
fn front() -> Vec<Part> {
    let mut parts: Vec<Part> = test_steps().into_iter().map(Part::from).collect();
    parts.push(Part::always(published::COMMAND, published::check_size));
    let browser = Step::cargo(browser::WHAT, browser::ARGUMENTS).into();
    parts.push(Part { count: browser::count(), missing: Box::new(browser::missing), ..browser });
    parts.push(c_part());
    parts.push(conformance_part());
    parts.push(guest_part());
    parts
}

/// What has folders of its own to compile in, the longest first.
fn beside() -> Vec<Part> {
    let mut parts = nightly_parts();
    parts.push(loom_step().into());
    let (missing, run) = (|| oldest::missing(&root()), || oldest::run(&root()));
    let (missing, run) = (Box::new(missing), Box::new(run));
    parts.push(Part { what: oldest::WHAT, count: oldest::COUNT, missing, run });
    parts
}

fn check_parts() -> Vec<Part> {
    let mut parts: Vec<Part> = check_steps().into_iter().map(Part::from).collect();
    parts.push(Part::always(published::CRATES, || published::check(&root())));
    parts
}

fn conformance_part() -> Part {
    let run = Box::new(|| conformance::run(&root()));
    let (what, count) = (conformance::WHAT, conformance::count());
    Part { what, count, missing: Box::new(conformance::missing), run }
}

fn c_part() -> Part {
    let (missing, run) = (Box::new(c_library::missing), Box::new(c_library::test));
    Part { what: c_library::WHAT, count: c_library::COUNT, missing, run }
}

fn guest_part() -> Part {
    let (missing, run) = (Box::new(guest::missing), Box::new(guest::run));
    Part { what: guest::WHAT, count: guest::count(), missing, run }
}

fn nightly_parts() -> Vec<Part> {
    let tools = nightly::TOOLS.iter().map(|tool| Part {
        what: tool.what,
        count: tool.count(),
        missing: Box::new(|| tool.missing()),
        run: Box::new(|| tool.run(&root())),
    });
    let mut parts: Vec<Part> = tools.collect();
    let run = Box::new(|| coherence::test(&root()));
    let (what, count) = (coherence::WHAT, coherence::BOUNDS.len());
    parts.push(Part { what, count, missing: Box::new(coherence::missing), run });
    parts
}

/// Runs one after another, and asks `go_on` after each. The first that fails is the last.
fn run_all(parts: &[Part], mut go_on: impl FnMut() -> Result<(), String>) -> Result<Summary, String> {
    let mut summary = Summary::default();
    for part in parts {
        if let Some(why) = (part.missing)() {
            summary.skip(part.count, format!("{}, {} tests: {why}", part.what, part.count));
            continue;
        }
        eprintln!("== {}", part.what);
        let began = Instant::now();
        (part.run)().map_err(|reason| format!("{}: {reason}", part.what))?;
        eprintln!("== {} took {} s", part.what, began.elapsed().as_secs());
        summary.done += 1;
        go_on()?;
    }
    Ok(summary)
}

/// Something to run, which may need what a machine lacks.
struct Part {
    what: &'static str,
    /// The number of its tests, where it may be skipped.
    count: usize,
    /// Says why it cannot be run here, if so. Installs what is missing where the system allows it.
    missing: Box<dyn Fn() -> Option<String>>,
    run: Box<dyn Fn() -> Result<(), String>>,
}

impl Part {
    /// One that needs nothing.
    fn always(what: &'static str, run: impl Fn() -> Result<(), String> + 'static) -> Self {
        Self { what, count: 0, missing: Box::new(|| None), run: Box::new(run) }
    }
}

impl From<Step> for Part {
    fn from(step: Step) -> Self {
        Self::always(step.what, move || step.run())
    }
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
        let program = if self.program.as_os_str().is_empty() { cargo() } else { root.join(&self.program) };
        let mut command = Command::new(&program);
        if self.program.as_os_str().is_empty() {
            limit::add(&mut command)?;
        }
        let status = command
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

/// A command of Cargo, which runs programs with the limit.
fn limited(arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(cargo());
    let status = limit::add(&mut command)?.args(arguments).status();
    let status = status.map_err(|error| format!("cargo did not start: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {}: {status}", arguments.join(" "))) }
}

/// Runs a command of which nothing is printed unless it fails. Returns its output.
fn quietly(command: &mut Command, what: &str) -> Result<String, String> {
    let out = command.output().map_err(|error| format!("{what}: {error}"))?;
    let said = String::from_utf8_lossy(&out.stdout);
    if out.status.success() {
        return Ok(said.into_owned());
    }
    Err(format!("{what}: {}\n{said}{}", out.status, String::from_utf8_lossy(&out.stderr)))
}

/// The program that runs us.
fn cargo() -> PathBuf {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()).into()
}

/// The features that tests and lints turn on: the benchmarks of the command, and adapters.
const FEATURES: &str = "portcullis-cli/bench,portcullis-linux/virtio-drivers,portcullis-linux/vm-memory";

/// Cargo's arguments for a command on the whole workspace: the same each time, so that one build serves every step.
macro_rules! workspace {
    ($command:literal $(, $more:expr)*) => {
        &[$command, "--locked", "--workspace", "--features", crate::FEATURES, "--release" $(, $more)*]
    };
}
use workspace;

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

fn test_steps() -> Vec<Step> {
    let mut steps = vec![
        // With optimisation, as the property tests do millions of operations. The examples of the core are among them
        // (`tests/dma/examples.rs`); as programs, examples are compiled by the lints.
        Step::cargo("tests", workspace!("test", "--tests")),
        Step::cargo("the code in the documentation", workspace!("test", "--doc")),
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
    steps.extend(borrowed::steps());
    steps
}

fn loom_step() -> Step {
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
    }
}

/// The program that has neither `std` nor a C runtime.
const NO_STD: &str = "tests/no-std";

fn check_steps() -> Vec<Step> {
    let deny = &[("RUSTDOCFLAGS", "-D warnings")];
    vec![
        Step::cargo("formatting", &["fmt", "--all", "--check"]),
        Step { folder: NO_STD, ..Step::cargo("formatting of the program without std", &["fmt", "--check"]) },
        Step { folder: conformance::KERNEL, ..Step::cargo("formatting of the kernel", &["fmt", "--check"]) },
        Step {
            folder: "tests/stack/object",
            ..Step::cargo("formatting of the object for the stack's test", &["fmt", "--check"])
        },
        Step {
            folder: guest::PROGRAMS,
            ..Step::cargo("formatting of the guest's program", &["fmt", "--check"])
        },
        Step::cargo(
            "lints",
            &[
                "clippy",
                "--locked",
                "--workspace",
                "--features",
                FEATURES,
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ],
        ),
        // Without the feature `parts`, as kernels and programs have it: code that only tests call is dead there.
        Step::cargo(
            "code of the core that nobody calls",
            &[
                "clippy",
                "--locked",
                "-p",
                "portcullis",
                "--lib",
                "--no-default-features",
                "--",
                "-D",
                "warnings",
            ],
        ),
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
            folder: guest::PROGRAMS,
            environment: &[("CARGO_TARGET_DIR", "target")],
            ..Step::cargo(
                "lints of the guest's program",
                &["clippy", "--locked", "--release", "--", "-D", "warnings"],
            )
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
