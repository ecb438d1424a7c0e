//! The command line of Portcullis.

mod args;
mod replay;
mod table;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

fn main() -> ExitCode {
    let arguments = args::Arguments::parse();
    let outcome = match arguments.command {
        None => print(&args::Arguments::command().render_help().to_string()).map(|()| ExitCode::SUCCESS),
        Some(args::Command::Replay(replay)) => replay::run(&replay),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("portcullis: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output. A reader who has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<(), replay::CommandError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}
