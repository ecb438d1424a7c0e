//! The command line of Portcullis.

mod anonymize;
mod args;
#[cfg(feature = "bench")]
mod bench;
#[cfg(test)]
mod borders;
mod calibration;
mod choice;
mod counted;
#[cfg(unix)]
mod doctor;
#[cfg(not(unix))]
#[path = "doctor/elsewhere.rs"]
mod doctor;
#[cfg(all(test, feature = "bench"))]
mod documents;
mod explain;
mod exposed;
#[cfg(test)]
mod golden;
mod header;
mod help;
mod instructions;
mod interrupt;
mod legend;
#[cfg(unix)]
mod linux;
#[cfg(not(unix))]
#[path = "linux/elsewhere.rs"]
mod linux;
mod look;
mod machine;
mod on_linux;
mod price;
#[cfg(target_os = "linux")]
mod record;
mod replay;
mod report;
mod runs;
mod scale;
#[cfg(test)]
mod sentences;
mod short;
mod sweep;
mod table;
mod verdict;
mod warnings;
#[cfg(target_os = "linux")]
mod watch;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use portcullis_trace::budget::{self, Counted, Over};
use portcullis_trace::printable::PrintableLines;

/// What files ask for is counted where it is taken.
#[global_allocator]
static MEMORY: Counted = Counted::new(full);

/// Ends the program, which wants more memory than `--memory` allows. What was read until then is of no use by itself.
fn full(over: Over) -> ! {
    let at = budget::line().map_or(String::new(), |line| format!("by line {line} of the recording, "));
    look::tell(&look::wrap(&format!("portcullis: {at}{over}"), "  "));
    std::process::exit(1)
}

fn main() -> ExitCode {
    let mut command = help::fitted(args::Arguments::command());
    let matches =
        command.try_get_matches_from_mut(std::env::args_os()).unwrap_or_else(|error| help::exit(&error));
    let arguments = args::Arguments::from_arg_matches(&matches)
        .unwrap_or_else(|error| help::exit(&error.format(&mut command)));
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            look::tell(&look::wrap_lines(&format!("portcullis: {}", PrintableLines(error)), "  "));
            ExitCode::FAILURE
        }
    }
}

/// Tells those who ask for `command`, which measures this machine, how to get it.
#[cfg(not(feature = "bench"))]
fn lacking(command: &str) -> ExitCode {
    let text = format!(
        "portcullis: this build has no `{command}`, as benchmarks take longer to compile than all the rest. In a clone, \
         `cargo run --release --features bench -- {command}` builds and runs it; to install it, add `--features bench` to \
         `cargo install`."
    );
    look::tell(&look::wrap(&text, "  "));
    ExitCode::from(2)
}

fn run(arguments: args::Arguments) -> Result<ExitCode, Box<dyn Error>> {
    if let Some(memory) = arguments.command.as_ref().and_then(args::Command::memory) {
        budget::set_limit(memory.bytes);
    }
    Ok(match arguments.command {
        None => {
            print(&help::fitted(args::Arguments::command()).render_help().to_string())?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Replay(replay)) => replay::run(&replay)?,
        #[cfg(feature = "bench")]
        Some(args::Command::Bench(bench)) => bench::run(&bench.what)?,
        #[cfg(feature = "bench")]
        Some(args::Command::Calibrate) => bench::calibrate::run()?,
        #[cfg(not(feature = "bench"))]
        Some(args::Command::Bench(_)) => lacking("bench"),
        #[cfg(not(feature = "bench"))]
        Some(args::Command::Calibrate(_)) => lacking("calibrate"),
        Some(args::Command::Anonymize { input, output, .. }) => anonymize::run(&input, &output)?,
        #[cfg(target_os = "linux")]
        Some(args::Command::Record(asked)) => record::run(&asked)?,
        #[cfg(target_os = "linux")]
        Some(args::Command::Watch(asked)) => watch::run(&asked)?,
        Some(args::Command::Scale(scale)) => scale::run_command(&scale)?,
        Some(args::Command::Protect(asked)) => {
            if let Some(why) = asked.misplaced() {
                let mut command = args::Arguments::command();
                command.build();
                let command = command.find_subcommand_mut("protect").ok_or("the command has a name")?;
                help::exit(&command.error(clap::error::ErrorKind::ArgumentConflict, why));
            }
            linux::protect(&asked)?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Unprotect(asked)) => {
            linux::unprotect(&asked)?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Status(asked)) => {
            linux::status(&asked)?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Doctor(asked)) => doctor::run(&asked)?,
        Some(args::Command::Report(options)) => {
            report::run(&options)?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut args::Arguments::command(), "portcullis", &mut script);
            print(&String::from_utf8(script)?)?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Man) => {
            print(&manual()?)?;
            ExitCode::SUCCESS
        }
    })
}

/// Returns the manual: a page for the command, and behind it one for each of its subcommands.
fn manual() -> Result<String, Box<dyn Error>> {
    let mut text = Vec::new();
    let mut command = args::Arguments::command();
    command.build();
    pages(&command, &mut text)?;
    Ok(String::from_utf8(text)?)
}

fn pages(command: &clap::Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    clap_mangen::Man::new(command.clone()).render(text)?;
    command
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
        .try_for_each(|sub| pages(sub, text))
}

/// Writes to standard output, with its colours where that is a terminal that has them (and `NO_COLOR` is not set). A reader who
/// has seen enough (`| head`) is no error.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = anstream::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
