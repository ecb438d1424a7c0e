//! `portcullis anonymize`.

use std::fs::File;
use std::io::{BufWriter, Read};
use std::path::Path;
use std::process::ExitCode;

use portcullis_trace::anonymize::{AnonymizeError, anonymize};
use portcullis_trace::{Input, Printable, TraceError};

use crate::look::{number_of, tell, wrap};

/// Why a recording was not rewritten.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Anonymize(#[from] AnonymizeError),
    #[error("cannot read standard input: {0}")]
    Input(std::io::Error),
    #[error("cannot write {}: {source}", Printable(name))]
    Output { name: String, source: std::io::Error },
}

/// Runs the command. What is written goes to standard output for `-`, what there is to say to standard error.
pub fn run(input: &Path, output: &Path) -> Result<ExitCode, CommandError> {
    // The recording is read twice, and standard input cannot be.
    let mut piped = Vec::new();
    let is_piped = input == Path::new("-");
    if is_piped {
        std::io::stdin().lock().read_to_end(&mut piped).map_err(CommandError::Input)?;
    }
    let open = || -> Result<Input<'_>, TraceError> {
        if is_piped { Input::from_bytes("standard input", piped.as_slice()) } else { Input::open(input) }
    };
    // Before the output is made, so that a wrong name leaves nothing behind.
    open().map_err(AnonymizeError::from)?;
    let failed = |source| CommandError::Output { name: output.display().to_string(), source };
    let done = if output == Path::new("-") {
        anonymize(open, &mut BufWriter::new(std::io::stdout().lock()))
    } else {
        let file = File::options().write(true).create_new(true).open(output).map_err(failed)?;
        anonymize(open, &mut BufWriter::new(file))
    };
    let done = match done {
        Ok(done) => done,
        // A reader who has seen enough (`| head`) is no error.
        Err(AnonymizeError::Write(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            return Ok(ExitCode::SUCCESS);
        }
        Err(AnonymizeError::Write(error)) => return Err(failed(error)),
        Err(error) => {
            if output != Path::new("-") {
                // Half a recording is of no use. That it stays is no worse than the error itself.
                let _ = std::fs::remove_file(output);
            }
            return Err(error.into());
        }
    };
    let text = format!(
        "{} of {} written, {} left out. Kept: what each event maps or unmaps, sizes, directions, CPUs, the time between events, \
         and which memory lies side by side. Gone: task names and process numbers, devices' names, the time of day, where in \
         memory buffers lay, and the fields of all other events.",
        number_of(done.events, "event"),
        number_of(done.devices, "device"),
        number_of(done.left_out, "line"),
    );
    tell(&wrap(&text, ""));
    Ok(ExitCode::SUCCESS)
}
