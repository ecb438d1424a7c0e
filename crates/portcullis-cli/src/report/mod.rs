//! `portcullis report`: results as one page of HTML, with no script in it and nothing that it would load.

mod axes;
mod benched;
mod canvas;
mod compared;
mod html;
mod plot;
mod policies;
pub mod read;
mod replayed;
mod scaled;
mod text;

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::Path;

use self::html::{element, escape, pairs, sentence};
use self::read::{Origin, Outcome, ReadError, read};
use portcullis_trace::Printable;

use crate::args::ReportOptions;
use crate::look::{self, number_of};
use crate::print;

const STYLE: &str = include_str!("style.css");

/// Where the page goes from a terminal, which has no use for it.
const DEFAULT: &str = "report.html";

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("--compare takes two results, the one before and the one after, and not {0}")]
    NotTwo(usize),
    #[error(
        "--compare takes two results of the same command: {}, and {}",
        Printable(before),
        Printable(after)
    )]
    Different { before: String, after: String },
    #[error(
        "nothing that was measured is in both {} and {}, so there is nothing to compare",
        Printable(before),
        Printable(after)
    )]
    NothingCommon { before: String, after: String },
    #[error("{DEFAULT} exists: `--out {DEFAULT}` replaces it, and another name keeps it")]
    Exists,
    #[error("{}: {error}", Printable(name))]
    Write { name: String, error: std::io::Error },
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

pub fn run(options: &ReportOptions) -> Result<(), CommandError> {
    let outcomes: Vec<(String, Outcome)> =
        options.results.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
    let page = page(&outcomes, options.compare)?;
    match &options.out {
        Some(path) => write(path, &page, OpenOptions::new().create(true).truncate(true)),
        None if std::io::stdout().is_terminal() => {
            write(Path::new(DEFAULT), &page, OpenOptions::new().create_new(true))
        }
        None => Ok(print(&page)?),
    }
}

fn write(path: &Path, page: &str, how: &mut OpenOptions) -> Result<(), CommandError> {
    let name = path.display().to_string();
    let written = how.write(true).open(path).and_then(|mut file| file.write_all(page.as_bytes()));
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(CommandError::Exists),
        Err(error) => Err(CommandError::Write { name, error }),
        Ok(()) => {
            look::tell(&look::wrap(
                &format!("{}: {}, for a browser", Printable(&name), number_of(page.len() as u64, "byte")),
                "  ",
            ));
            Ok(())
        }
    }
}

pub fn page(outcomes: &[(String, Outcome)], compare: bool) -> Result<String, CommandError> {
    let mut sections = Vec::new();
    if compare {
        let [(before, was), (after, is)] = outcomes else {
            return Err(CommandError::NotTwo(outcomes.len()));
        };
        sections.push(("Before and after".to_owned(), compared::section([before, after], was, is)?));
    }
    for (name, outcome) in outcomes {
        let section = match outcome {
            Outcome::Replay(replayed) => replayed::section(replayed),
            Outcome::Bench(benched) => benched::section(benched),
            Outcome::Scale(scaled) => scaled::section(scaled),
        };
        sections.push((name.clone(), section));
    }
    let contents: String = sections
        .iter()
        .enumerate()
        .map(|(number, (name, _))| format!("<a href=\"#part-{number}\">{}</a> ", escape(name)))
        .collect();
    let contents = if sections.len() > 1 {
        format!("<nav aria-label=\"Parts\">{contents}</nav>\n")
    } else {
        String::new()
    };
    let parts: String = sections
        .iter()
        .enumerate()
        .map(|(number, (_, section))| format!("<section id=\"part-{number}\">\n{section}</section>\n"))
        .collect();
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>Portcullis: what protection from devices costs</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header><h1>What protection from devices costs</h1>\n{contents}</header>\n<main>\n{parts}</main>\n\
         <footer>Made by portcullis {}.</footer>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    ))
}

/// The verdict: what to choose comes first, in letters that are read from afar.
fn said<'a>(sentences: impl Iterator<Item = &'a String>) -> String {
    let mut sentences: Vec<&String> = sentences.collect();
    sentences.sort_by_key(|text| !text.starts_with("Choose "));
    let sentences: String = sentences.iter().map(|text| sentence(text)).collect();
    format!("<div class=\"verdict\">\n{sentences}</div>\n")
}

/// When and where a result was made.
fn made(origin: &Origin) -> String {
    let Origin { date, machine, .. } = origin;
    let date = date.as_ref().map(|date| format!("{date} UTC"));
    let cpus = (machine.cpus > 0).then(|| number_of(machine.cpus, "CPU"));
    let words: Vec<String> = date.into_iter().chain(machine.cpu.clone()).chain(cpus).collect();
    if words.is_empty() {
        String::new()
    } else {
        format!("<p class=\"made\">{}</p>\n", escape(&words.join(" · ")))
    }
}

/// What should not be overlooked.
fn warning(text: &str) -> String {
    format!("<p class=\"warning\"><strong>Warning:</strong> {}</p>\n", escape(text))
}

/// The machine, and the command.
fn machine(origin: &Origin) -> String {
    let Origin { command, machine, .. } = origin;
    let words = [&machine.cpu, &machine.os, &machine.arch].into_iter().flatten().cloned();
    // A result that does not name its machine has none.
    let cpus = (machine.cpus > 0).then(|| number_of(machine.cpus, "CPU"));
    let rows = [("machine", words.chain(cpus).collect::<Vec<_>>().join(", "))];
    let unknown = if rows[0].1.is_empty() { "The result does not name the machine." } else { "" };
    let command = command.as_deref().map_or(String::new(), |command| {
        format!("<p>The command:</p>\n<pre><code>{}</code></pre>\n", escape(command))
    });
    let no_command = "The result does not name the command that made it.";
    let said = [unknown, if command.is_empty() { no_command } else { "" }];
    let said: String = said.iter().filter(|said| !said.is_empty()).map(|said| element("p", said)).collect();
    let rows = if unknown.is_empty() { pairs(&rows) } else { String::new() };
    rows + &command + &said
}
