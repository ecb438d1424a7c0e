//! The command line of Portcullis.

mod args;
mod bench;
#[cfg(test)]
mod documents;
mod explain;
mod replay;
mod table;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

fn main() -> ExitCode {
    let arguments = args::Arguments::parse();
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("portcullis: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: args::Arguments) -> Result<ExitCode, Box<dyn Error>> {
    Ok(match arguments.command {
        None => {
            print(&args::Arguments::command().render_help().to_string())?;
            ExitCode::SUCCESS
        }
        Some(args::Command::Replay(replay)) => replay::run(&replay)?,
        Some(args::Command::Bench(bench)) => bench::run(&bench.what)?,
    })
}

/// Writes to standard output. A reader who has seen enough (`| head`) is no error.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
