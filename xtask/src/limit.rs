//! A time limit for programs of tests, which names the test that hangs.
//!
//! Cargo runs each program through this one ([`add`]). It passes on what the program prints, and ends it when it has printed
//! nothing for the limit: each test that ends prints a line. The tests that are under way then are those that libtest
//! has warned of after 60 seconds, or, where it runs one at a time, the one whose line has no end yet.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The command that runs a program with a limit, which Cargo is told of.
pub const COMMAND: &str = "limit";

/// Says another limit, in seconds. The usual one is as long as all tests take together.
const VARIABLE: &str = "PORTCULLIS_TEST_LIMIT";
const USUAL: Duration = Duration::from_secs(600);

/// How long it is before this looks whether a program that prints nothing has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Has a command of Cargo run programs with the limit.
pub fn add(cargo: &mut Command) -> Result<&mut Command, String> {
    let own = std::env::current_exe().map_err(|error| format!("this program has no path: {error}"))?;
    // Paths and JSON's strings are quoted alike, but for what no path has.
    Ok(cargo.args(["--config", &format!("target.'cfg(all())'.runner = [{own:?}, {COMMAND:?}]")]))
}

/// Runs a program with its arguments, and returns what it does.
pub fn run(program: &[&str]) -> ExitCode {
    let limit =
        std::env::var(VARIABLE).ok().and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
    match watch(program, limit.unwrap_or(USUAL), &mut std::io::stdout()) {
        Ok(code) => ExitCode::from(code),
        Err(reason) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a program to its end, or to the limit, which is an error.
fn watch(program: &[&str], limit: Duration, out: &mut dyn Write) -> Result<u8, String> {
    let [name, arguments @ ..] = program else { return Err("no program to run".to_owned()) };
    let failed = |error: std::io::Error| format!("{name}: {error}");
    let mut child = Command::new(name).args(arguments).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut printed = child.stdout.take().ok_or("no output")?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = printed.read(&mut bytes) {
            if sender.send(bytes[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut tests = Tests::default();
    let mut last = Instant::now();
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(bytes) => {
                out.write_all(&bytes).and_then(|()| out.flush()).map_err(failed)?;
                tests.read(&String::from_utf8_lossy(&bytes));
                last = Instant::now();
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(status) = child.try_wait().map_err(failed)? {
            // Ended by a signal, it has no code.
            return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(101));
        }
        if last.elapsed() >= limit {
            child.kill().and_then(|()| child.wait()).map_err(failed)?;
            let seconds = limit.as_secs();
            return Err(format!(
                "{name} printed nothing for {seconds} s ({VARIABLE}) and was ended. {tests}"
            ));
        }
    }
}

/// The tests of a program that are known to be under way.
#[derive(Debug, Default)]
struct Tests {
    warned: BTreeSet<String>,
    /// What was printed since the last end of a line.
    line: String,
}

impl Tests {
    fn read(&mut self, text: &str) {
        for piece in text.split_inclusive('\n') {
            self.line.push_str(piece);
            let Some(line) = self.line.strip_suffix('\n') else { continue };
            if let Some(test) = line.strip_prefix("test ") {
                let (name, rest) = test.split_once(" has been running").unwrap_or_else(|| {
                    let (name, rest) = test.split_once(" ... ").unwrap_or((test, ""));
                    (name.split_once(" - should panic").map_or(name, |(name, _)| name), rest)
                });
                if rest.starts_with(" for over") {
                    self.warned.insert(name.to_owned());
                } else {
                    self.warned.remove(name);
                }
            }
            self.line.clear();
        }
    }
}

impl std::fmt::Display for Tests {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let begun = self.line.strip_prefix("test ").and_then(|test| test.split_once(" ... "));
        let names: Vec<&str> =
            self.warned.iter().map(String::as_str).chain(begun.map(|(name, _)| name)).collect();
        match &names[..] {
            [] => out.write_str("No test is known to be under way."),
            names => write!(out, "Tests under way: {}", names.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> String {
        let mut tests = Tests::default();
        // In whatever pieces it comes.
        text.split_inclusive(['e', '.']).for_each(|piece| tests.read(piece));
        tests.to_string()
    }

    #[test]
    fn what_was_warned_of_and_has_not_ended_is_under_way() {
        let warned = "\nrunning 3 tests\ntest a::b ... ok\ntest a::c has been running for over 60 seconds\n\
            test d - should panic has been running for over 60 seconds\n";
        assert_eq!(names(warned), "Tests under way: a::c, d - should panic");
        assert_eq!(names(&format!("{warned}test a::c ... FAILED\n")), "Tests under way: d - should panic");
        assert_eq!(names("test a::b ... ok\n"), "No test is known to be under way.");
        // One at a time.
        assert_eq!(names("test a::b ... ok\ntest a::c ... "), "Tests under way: a::c");
    }

    /// The program of these tests, which runs the test below.
    fn hanging(limit: Duration) -> (Result<u8, String>, String) {
        let own = std::env::current_exe().unwrap();
        let test = concat!(module_path!(), "::hangs");
        let test = test.split_once("::").unwrap().1;
        let arguments = ["--ignored", "--exact", test, "--test-threads=1"];
        let mut out = Vec::new();
        let result = watch(&[&[own.to_str().unwrap()], &arguments[..]].concat(), limit, &mut out);
        (result, String::from_utf8(out).unwrap())
    }

    #[test]
    #[ignore = "it hangs: the next test runs it"]
    fn hangs() {
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn a_test_that_hangs_is_ended_and_named() {
        let (result, out) = hanging(Duration::from_secs(1));
        let error = result.unwrap_err();
        assert!(error.contains("printed nothing for 1 s"), "{error}");
        assert!(error.ends_with("Tests under way: limit::tests::hangs"), "{error}");
        assert!(out.contains("running 1 test\n"), "what it prints is passed on: {out}");
    }

    #[test]
    #[cfg(unix)]
    fn what_a_program_prints_and_returns_is_passed_on() {
        let mut out = Vec::new();
        assert_eq!(watch(&["sh", "-c", "echo said; exit 3"], USUAL, &mut out), Ok(3));
        assert_eq!(out, b"said\n");
        assert_eq!(watch(&["sh", "-c", "kill -9 $$"], USUAL, &mut out), Ok(101));
        let missing = watch(&["/nowhere/at/all"], USUAL, &mut out);
        assert!(missing.unwrap_err().starts_with("/nowhere/at/all: "));
    }

    #[test]
    fn cargo_takes_it() {
        let mut cargo = Command::new("cargo");
        add(&mut cargo).unwrap();
        let arguments: Vec<_> = cargo.get_args().map(|argument| argument.to_str().unwrap()).collect();
        assert_eq!(arguments[0], "--config");
        let own = std::env::current_exe().unwrap();
        assert_eq!(arguments[1], format!("target.'cfg(all())'.runner = [\"{}\", \"limit\"]", own.display()));
    }
}
