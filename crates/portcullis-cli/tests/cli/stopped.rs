//! What Ctrl-C ends.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::{GOOD, stderr, stdout};

/// Whether a process has a handler of its own for Ctrl-C.
fn listens(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() >> (libc::SIGINT - 1) & 1 != 0
}

#[test]
fn a_replay_that_is_interrupted_has_the_figures_of_what_it_read() {
    let mut replay = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    replay.args(["replay", "-", "--csv"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: `signal` may be called between `fork` and `exec`, and takes two numbers.
    unsafe {
        // Where this test runs in the background, a shell may have Ctrl-C ignored.
        replay.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut replay = replay.spawn().unwrap();
    while !listens(replay.id()) {
        assert!(replay.try_wait().unwrap().is_none(), "it has ended");
        std::thread::yield_now();
    }
    // SAFETY: the call takes two numbers. The number is still the child's, since this test waits for it later.
    assert_eq!(unsafe { libc::kill(replay.id() as libc::pid_t, libc::SIGINT) }, 0);
    // A read goes on, and what is read counts.
    replay.stdin.take().unwrap().write_all(GOOD.as_bytes()).unwrap();
    let output = replay.wait_with_output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("stopped by Ctrl-C: these are the figures of 1 run, which read "), "{said}");
    assert!(stdout(&output).lines().any(|line| line.starts_with("strict,")), "{}", stdout(&output));
}
