//! `portcullis record` and `portcullis watch`: the DMA of this machine, as Linux's tracefs has it.
//!
//! All that is switched on is in a tracing instance of its own ([`instance`]), which is removed at the end. CPUs' buffers are read as
//! raw pages ([`streams`]) into a file without a name ([`spool`]); text is made of them when the recording has ended, so that it
//! is not in its own way.

pub mod args;
mod busy;
mod events;
mod here;
pub mod instance;
mod output;
mod pages;
mod progress;
pub mod session;
mod spool;
mod streams;
#[cfg(test)]
mod tests;
pub mod tracefs;

use std::error::Error;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::Parser;
use portcullis_trace::Printable;
use portcullis_trace::anonymize::AnonymizeError;

use self::args::Record;
use self::busy::Busy;
use self::output::{Output, Recorded};
use self::progress::{Progress, So};
use self::session::Session;
use self::spool::Spool;
use self::tracefs::TracingError;
use crate::look::{self, bytes, count, number_of, percent};
use crate::{interrupt, linux, replay};

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Tracing(#[from] TracingError),
    #[error("cannot read the kernel's buffers: {0}")]
    Read(std::io::Error),
    #[error("cannot write {}: {source}", Printable(name))]
    Write { name: String, source: std::io::Error },
    #[error("cannot run {}: {source}", Printable(name))]
    Run { name: String, source: std::io::Error },
    #[error(
        "--replay reads the recording from a file: name one by -o, or type `portcullis record .. | portcullis replay -`"
    )]
    NoFile,
    #[error(transparent)]
    Anonymize(AnonymizeError),
}

/// Runs the command.
pub fn run(asked: &Record) -> Result<ExitCode, Box<dyn Error>> {
    let output = Output::of(asked.output.as_deref(), look::seconds());
    let file = match &output {
        Output::File(path) => Some(path.clone()),
        Output::Stdout if asked.replay => return Err(CommandError::NoFile.into()),
        Output::Stdout => None,
    };
    let name = file.as_ref().map_or("standard output".into(), |path| path.display().to_string());
    let failed = |source| CommandError::Write { name: name.clone(), source };
    if file.as_ref().is_some_and(|path| path.exists()) {
        return Err(failed(std::io::ErrorKind::AlreadyExists.into()).into());
    }
    let spool = Spool::new(&output.folder()).map_err(failed)?;
    interrupt::listen_to_ends();
    let (session, notes) = Session::prepare(Path::new("/"), instance::KERNEL, asked.device.as_deref())?;
    notes.iter().for_each(|note| tell(note));
    let made = record(session, spool, asked, &name)?;
    let mut out = output.open().map_err(failed)?;
    let (recorded, so) = (made.recorded, made.so);
    let measured = recorded.measured;
    match recorded.write(out.as_mut(), &output.folder(), asked.anonymize) {
        Ok(_) => {}
        // A reader who has seen enough (`| head`) is no error.
        Err(AnonymizeError::Write(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        Err(AnonymizeError::Write(error)) => return Err(failed(error).into()),
        Err(error) => return Err(CommandError::Anonymize(error).into()),
    }
    drop(out);
    let size = file.as_ref().and_then(|path| path.metadata().ok()).map(|about| about.len());
    tell(&said(&name, so, size, measured));
    if !asked.anonymize && so.events > 0 {
        tell(PRIVATE);
    }
    let code = made.status.map_or(0, code);
    match file.filter(|_| so.events > 0) {
        Some(path) if asked.replay => {
            let (options, said) = here::options(&linux::here());
            let words = ["portcullis".as_ref(), "replay".as_ref(), path.as_os_str()].into_iter();
            let words = words.chain(options.iter().map(AsRef::as_ref));
            let arguments = crate::args::Arguments::try_parse_from(words)?;
            said.into_iter().for_each(tell);
            if let Some(crate::args::Command::Replay(arguments)) = arguments.command {
                let verdict = replay::run(&arguments)?;
                return Ok(if code == 0 { verdict } else { ExitCode::from(code) });
            }
        }
        Some(path) => {
            let (options, _) = here::options(&linux::here());
            let options: String = options.iter().map(|word| format!(" {word}")).collect();
            look::tell(&format!("next: portcullis replay {}{options}\n", path.display()));
        }
        None if asked.replay => {
            tell("There is nothing to replay.");
            return Ok(ExitCode::FAILURE);
        }
        None => {}
    }
    Ok(ExitCode::from(code))
}

/// What is private in a recording.
const PRIVATE: &str = "Private in it: numbers of processes, addresses of devices, and where in memory buffers lay. `portcullis anonymize`, or \
                       --anonymize, takes that out.";

fn tell(text: &str) {
    look::tell(&look::wrap(text, ""));
}

/// What a recording came to.
struct Made {
    recorded: Recorded,
    so: So,
    /// What the command that ran meanwhile returned.
    status: Option<ExitStatus>,
}

/// Records until it is time.
fn record(mut session: Session, mut spool: Spool, asked: &Record, name: &str) -> Result<Made, CommandError> {
    let root = Path::new("/");
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let before = Busy::now(root);
    session.switch(true)?;
    let end = asked.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut child = spawn(&asked.command)?;
    let (mut progress, mut so, mut status) = (Progress::new(), So::default(), None);
    loop {
        session.pause(end);
        let is_over = interrupt::stopped()
            || end.is_some_and(|end| Instant::now() >= end)
            || has_ended(child.as_mut(), &mut status);
        if is_over {
            session.switch(false)?;
        }
        take(&mut session, &mut spool, &mut so, name)?;
        if is_over {
            break;
        }
        progress.show(so);
    }
    let measured = before.until(&Busy::now(root));
    progress.clear();
    let formats = session.end()?.formats;
    if let Some(child) = child.as_mut().filter(|_| status.is_none()) {
        status = child.wait().ok();
    }
    Ok(Made { recorded: Recorded { spool, formats, measured, release }, so, status })
}

/// Takes what the buffers have.
fn take(session: &mut Session, spool: &mut Spool, so: &mut So, name: &str) -> Result<(), CommandError> {
    let mut unwritten = None;
    let round = session.round(|pages| {
        if let Err(error) = spool.add(pages) {
            unwritten.get_or_insert(error);
        }
        Ok(())
    });
    let round = round.map_err(CommandError::Read)?;
    if let Some(source) = unwritten {
        return Err(CommandError::Write { name: name.to_owned(), source });
    }
    so.events += round.events;
    so.lost += round.lost;
    so.bytes = spool.bytes();
    Ok(())
}

fn spawn(command: &[std::ffi::OsString]) -> Result<Option<Child>, CommandError> {
    let Some((program, words)) = command.split_first() else { return Ok(None) };
    let run = |source| CommandError::Run { name: program.display().to_string(), source };
    Command::new(program).args(words).spawn().map(Some).map_err(run)
}

fn has_ended(child: Option<&mut Child>, status: &mut Option<ExitStatus>) -> bool {
    *status = child.and_then(|child| child.try_wait().ok().flatten());
    status.is_some()
}

/// A command's exit code, as a shell has it.
fn code(status: ExitStatus) -> u8 {
    let signal = std::os::unix::process::ExitStatusExt::signal(&status).map(|signal| 128 + signal);
    status.code().or(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// What there is to say of a recording called `name`.
fn said(name: &str, so: So, size: Option<u64>, measured: Option<portcullis_trace::Measured>) -> String {
    let seconds = measured.map(|measured| measured.wall_ns as f64 / 1e9);
    let size = size.map_or(String::new(), |size| format!(", {}", bytes(size as f64)));
    let mut text = format!("{}{size}: {}", Printable(name), number_of(so.events, "event"));
    if let Some(seconds) = seconds {
        let rate = progress::rate(so.events, Duration::from_secs_f64(seconds));
        text.push_str(&format!(" in {seconds:.1} s, {}/s", count(rate)));
    }
    match so.lost {
        0 => text.push_str(", none lost."),
        lost => text.push_str(&format!(
            ", and {} LOST: the buffers were too small, or this program had too little CPU time.",
            count(lost)
        )),
    }
    if so.events == 0 {
        text.push_str(" No driver has mapped memory meanwhile, its devices need no mappings (virtio devices without an IOMMU do not), or this kernel does not record them: docs/replay.md says what each kernel records.");
    }
    if let Some(measured) = measured {
        let own = measured.own_ns as f64 / measured.wall_ns as f64;
        text.push_str(&format!(
            " {} were {} busy; to record took {} of one.",
            number_of(u64::from(measured.cpus), "CPU"),
            percent(measured.share()),
            percent(own)
        ));
    }
    text
}
