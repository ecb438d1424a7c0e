//! `portcullis bench`, and what else measures this machine: in a build with the feature `bench` alone, as it takes as long to
//! compile as all the rest.

pub mod args;
pub mod calibrate;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind;
use indicatif::{ProgressBar, ProgressStyle};
use portcullis_bench::pgtable::Choice;
use portcullis_bench::report::Report;
use portcullis_bench::request::{BenchError, Request};
use portcullis_bench::runner::{Options, Progress};
use portcullis_bench::table::{self, Layout};
use portcullis_bench::{bounce, invalidation, iova, path, pgtable};
use serde::Serialize;

use self::args::{BenchOptions, BenchWhat, ManyThreads};
use crate::args::Arguments;
use crate::{help, interrupt, look, machine, print};

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
    interrupt::listen();
    match what {
        BenchWhat::Iova(arguments) => {
            let options = if arguments.options.quick { Options::quick() } else { Options::full() };
            let BenchOptions { threads, rival, .. } = &arguments.options;
            let request = request(&arguments.workload, &arguments.subject, threads, rival.as_ref(), options);
            let report = measure(|progress| iova::run(&request, progress))?;
            let about = iova::SUBJECTS.map(|subject| (subject.name, subject.about));
            let layout = layout(None, &["full-32bit"], &about);
            show(arguments, arguments.options.json, &report, |report| table::render(report, &layout))
        }
        BenchWhat::Pgtable(arguments) => {
            let options = if arguments.options.quick { pgtable::quick() } else { pgtable::full() };
            let BenchOptions { threads, rival, .. } = &arguments.options;
            let request = request(&arguments.workload, &arguments.subject, threads, rival.as_ref(), options);
            let choice = Choice { formats: arguments.format.clone(), incoherent: arguments.incoherent };
            let report = measure(|progress| pgtable::run(&request, &choice, progress))?;
            let about = pgtable::SUBJECTS.map(|subject| (subject.name, subject.about));
            let layout = layout(Some("stores"), &[], &about);
            show(arguments, arguments.options.json, &report, |report| table::render(report, &layout))
        }
        BenchWhat::Invalidation(arguments) => {
            let ManyThreads { threads, quick, json } = &arguments.options;
            let options = if *quick { invalidation::quick() } else { invalidation::full() };
            let request = request(&arguments.workload, &arguments.subject, threads, None, options);
            let report = measure(|progress| invalidation::run(&request, &arguments.profile, progress))?;
            show(arguments, *json, &report, invalidation::render)
        }
        BenchWhat::Bounce(arguments) => {
            let ManyThreads { threads, quick, json } = &arguments.options;
            let options = if *quick { bounce::quick() } else { bounce::full() };
            let rival = arguments.rival.as_ref();
            let request = request(&arguments.workload, &arguments.subject, threads, rival, options);
            let (profiles, depth) = (arguments.profile.clone(), arguments.depth.into());
            let choice = bounce::Choice { profiles, depth };
            let report = measure(|progress| bounce::run(&request, &choice, progress))?;
            show(arguments, *json, &report, bounce::render)
        }
        BenchWhat::Path(arguments) => {
            let ManyThreads { threads, quick, json } = &arguments.options;
            let options = if *quick { path::quick() } else { path::full() };
            let rival = arguments.rival.as_ref();
            let request = request(&arguments.workload, &arguments.subject, threads, rival, options);
            let choice = path::Choice {
                profile: arguments.profile.clone(),
                rival_pt: arguments.rival_pt.clone(),
                own_domains: arguments.own_domains,
            };
            let report = measure(|progress| path::run(&request, &choice, progress))?;
            let about = path::SUBJECTS.map(|subject| (subject.name, subject.about));
            let layout = layout(Some("parts"), &[], &about);
            show(arguments, *json, &report, |report| table::render(report, &layout))
        }
    }
}

fn request(
    workloads: &[String],
    subjects: &[String],
    threads: &[u8],
    rival: Option<&PathBuf>,
    options: Options,
) -> Request {
    // With Ctrl-C, a run ends with the results so far.
    let options = Options { stop: interrupt::stopped, ..options };
    let (workloads, subjects) = (workloads.to_vec(), subjects.to_vec());
    Request { workloads, subjects, threads: each_once(threads), rival: rival.cloned(), options }
}

/// Each number of threads once.
fn each_once(threads: &[u8]) -> Vec<usize> {
    let mut threads: Vec<usize> = threads.iter().map(|threads| usize::from(*threads)).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

fn layout<'a>(limit: Option<&'a str>, tails: &'a [&'a str], about: &'a [(&'a str, &'a str)]) -> Layout<'a> {
    Layout { ours: "portcullis", rival: "linux", limit, tails, about }
}

/// Runs a benchmark under a bar.
fn measure(
    run: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Report, BenchError>,
) -> Result<Report, CommandError> {
    let bar = progress_bar();
    let outcome = run(&mut |progress| advance(&bar, progress));
    bar.finish_and_clear();
    match outcome {
        Err(error @ BenchError::NoRival) => wrong_usage(&error),
        outcome => Ok(outcome?),
    }
}

/// Prints a report, for machines with the options that it was asked for by.
fn show(
    options: &impl Serialize,
    json: bool,
    report: &Report,
    render: impl Fn(&Report) -> String,
) -> Result<ExitCode, CommandError> {
    let text = if json {
        machine::document(machine::schema::BENCH, options, &report.profiles, report)
            .map_err(std::io::Error::from)?
    } else {
        render(report)
    };
    print(&text)?;
    if interrupt::stopped() {
        look::tell("portcullis: stopped by Ctrl-C: what was not measured is listed.\n");
        return Ok(interrupt::EXIT_CODE.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Ends the program as a wrong argument does.
fn wrong_usage(error: &BenchError) -> ! {
    let message = format!("{error}: name it with --rival PATH");
    help::exit(&Arguments::command().error(ErrorKind::MissingRequiredArgument, message))
}

/// A bar on a terminal, drawn only between measurements: it has no thread that could disturb them.
fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}, {eta} to go");
    ProgressBar::new(0)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars(look::BAR))
}

fn advance(bar: &ProgressBar, progress: Progress) {
    bar.set_length(progress.total as u64);
    bar.set_position(progress.done as u64);
    let format = progress.format.map_or(String::new(), |format| format!("{format} "));
    bar.set_message(format!("{format}{}", progress.workload));
    bar.tick();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_threads_is_measured_once_in_order() {
        assert_eq!(each_once(&[3, 1, 3, 2, 1]), [1, 2, 3]);
    }

    #[test]
    fn the_bar_says_how_far_it_is_and_what_is_next() {
        let bar = ProgressBar::hidden();
        for (format, message) in [(Some("vtd-ss"), "vtd-ss raw-1"), (None, "raw-1")] {
            advance(&bar, Progress { done: 3, total: 7, format, workload: "raw-1" });
            assert_eq!((bar.position(), bar.length(), bar.message()), (3, Some(7), message.into()));
        }
    }
}
