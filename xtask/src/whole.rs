//! What the commands would run, without running it, against `xtask/whole.txt`: a word that is lost or in another's place is a difference.
//! With `PORTCULLIS_WRITE_TABLES=1` the test writes the file.

#[path = "../../crates/portcullis/tests/golden/mod.rs"]
mod golden;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use crate::{
    Step, beside, borrowed, changed, check_parts, check_steps, conformance, front, guest, loom_step, nightly,
    oldest, test_steps,
};

/// A command, with the folders of this machine taken out.
pub fn told(command: &Command) -> String {
    let own = std::env::current_exe().unwrap();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> =
        words.map(|word| word.to_string_lossy().replace(&*own.to_string_lossy(), "XTASK")).collect();
    let environment = command.get_envs().map(|(name, value)| {
        let value = value.map_or("(none)".into(), |value| value.to_string_lossy());
        format!("{}={value} ", name.to_string_lossy())
    });
    format!("{}{}", environment.collect::<String>(), words.join(" "))
}

fn steps(text: &mut String, steps: &[Step]) {
    for Step { what, program, arguments, folder, environment } in steps {
        let program = program.display();
        writeln!(text, "{what}: {environment:?} {program} {} in {folder:?}", arguments.join(" ")).unwrap();
    }
}

#[test]
fn the_commands_run_what_they_did() {
    let mut text = String::new();
    for (name, parts) in [("test", front()), ("test, beside", beside()), ("check", check_parts())] {
        let names: Vec<_> = parts.iter().map(|part| part.what).collect();
        writeln!(text, "== {name}\n{}", names.join("\n")).unwrap();
    }
    // Of what is borrowed, which may not be here, below.
    let own = |step: &Step| borrowed::ALL.iter().all(|borrowed| borrowed.arguments != step.arguments);
    let of_test: Vec<_> = test_steps().into_iter().filter(own).collect();
    for (name, all) in [("test", of_test), ("loom", vec![loom_step()]), ("check", check_steps())] {
        writeln!(text, "== steps of {name}").unwrap();
        steps(&mut text, &all);
    }
    text += "== with what is borrowed\n";
    for borrowed in borrowed::ALL {
        writeln!(text, "{}: {}", borrowed.variable, borrowed.arguments.join(" ")).unwrap();
    }
    text += "== nightly\n";
    for tool in &nightly::TOOLS {
        writeln!(text, "{}", told(&tool.tests_command(Path::new("."), "HOST").unwrap())).unwrap();
    }
    text += "== changed\n";
    for (begin, commands) in changed::rows() {
        commands.iter().for_each(|words| writeln!(text, "{begin}: {}", words.join(" ")).unwrap());
    }
    text += "== the oldest Rust\n";
    oldest::COMMANDS.iter().for_each(|words| writeln!(text, "{}", words.join(" ")).unwrap());
    text += "== conformance\n";
    conformance::machines().iter().for_each(|machine| writeln!(text, "{}", told(machine)).unwrap());
    guest::whole::tell(&mut text);
    golden::is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/whole.txt"), &text);
}
