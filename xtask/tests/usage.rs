//! What the command says of itself and of words that it does not take, against `tests/usage.txt`. With `PORTCULLIS_WRITE_TABLES=1` the test
//! writes the file. Nothing that is asked for here runs anything.

#[path = "../../crates/portcullis/tests/golden/mod.rs"]
mod golden;

use std::fmt::Write;
use std::process::Command;

#[test]
fn the_command_says_what_it_takes() {
    let mut text = String::new();
    let asked: [&[&str]; 19] = [
        &["help"],
        &["guest", "--help"],
        &["coherence", "--help"],
        &["no-such"],
        &["test", "--slow"],
        &["test", "--changed", "--all"],
        &["test", "--help"],
        &["check", "--fast"],
        &["c-library", "a", "b"],
        &["c-library", "--help"],
        &["c-library", "--prefix"],
        &["guest", "--job", "no-such"],
        &["guest", "--slow", "1"],
        &["guest", "--job", "list"],
        &["guest", "--kernel"],
        &["guest", "--kernel", "5.4"],
        &["guest", "--patience", "0"],
        &["guest", "--modes", "strict fast"],
        &["guest", "--guest-kernel", "no-such", "--job", "stress"],
    ];
    for words in asked {
        let said = Command::new(env!("CARGO_BIN_EXE_xtask")).args(words).output().unwrap();
        writeln!(text, "== {}: {:?}", words.join(" "), said.status.code()).unwrap();
        for (name, bytes) in [("stdout", said.stdout), ("stderr", said.stderr)] {
            if !bytes.is_empty() {
                writeln!(text, "-- {name}\n{}", String::from_utf8(bytes).unwrap()).unwrap();
            }
        }
    }
    golden::is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/usage.txt"), &text);
}
