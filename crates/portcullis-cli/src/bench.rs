//! `portcullis bench`.

use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind;
use indicatif::{ProgressBar, ProgressStyle};
use portcullis_bench::iova::{self, BenchError, Request, SUBJECTS};
use portcullis_bench::runner::{Options, Progress};
use portcullis_bench::table::{self, Layout};

use crate::args::{Arguments, BenchIova, BenchWhat};
use crate::print;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the benchmark and prints what it found.
pub fn run(what: &BenchWhat) -> Result<ExitCode, CommandError> {
    let BenchWhat::Iova(arguments) = what;
    let request = Request {
        workloads: arguments.workload.clone(),
        subjects: arguments.subject.clone(),
        threads: threads(arguments),
        rival: arguments.rival.clone(),
        options: if arguments.quick { Options::quick() } else { Options::full() },
    };
    let bar = progress_bar();
    let outcome = iova::run(&request, |progress| show(&bar, progress));
    bar.finish_and_clear();
    let report = match outcome {
        Err(error @ BenchError::NoRival) => wrong_usage(&error),
        outcome => outcome?,
    };
    let text = if arguments.json {
        let mut json = serde_json::to_string_pretty(&report).map_err(std::io::Error::from)?;
        json.push('\n');
        json
    } else {
        let about = SUBJECTS.map(|subject| (subject.name, subject.about));
        let layout = Layout { ours: "portcullis", rival: "linux", tails: &["full-32bit"], about: &about };
        table::render(&report, &layout)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The numbers of threads asked for, each once.
fn threads(arguments: &BenchIova) -> Vec<usize> {
    let mut threads: Vec<usize> = arguments.threads.iter().map(|threads| usize::from(*threads)).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

/// Ends the program as a wrong argument does.
fn wrong_usage(error: &BenchError) -> ! {
    let message = format!("{error}: name it with --rival PATH");
    Arguments::command().error(ErrorKind::MissingRequiredArgument, message).exit()
}

/// A bar on a terminal, drawn only between measurements: it has no thread that could disturb them.
fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}, {eta} to go");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_length(progress.total as u64);
    bar.set_position(progress.done as u64);
    bar.set_message(progress.workload);
    bar.tick();
}
