//! Where a recording goes, and in what form.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Seek, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use portcullis_trace::anonymize::{AnonymizeError, anonymize};
use portcullis_trace::ring::Formats;
use portcullis_trace::{Input, Measured, TraceError};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::spool::Spool;

/// Text that is packed at once.
const FRAME: usize = 8 << 20;

/// Where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Stdout,
    File(PathBuf),
}

impl Output {
    /// Where `asked` says; without it, standard output where that is a pipe, and else a file that tells the time, `now`, in seconds
    /// since 1970.
    pub fn of(asked: Option<&Path>, now: u64) -> Self {
        match asked {
            Some(path) if path == Path::new("-") => Self::Stdout,
            Some(path) => Self::File(path.to_owned()),
            None if stdout_is_pipe() => Self::Stdout,
            None => Self::File(format!("dma-{}.trace.zst", date(now)).into()),
        }
    }

    /// The folder in which there is room.
    pub fn folder(&self) -> PathBuf {
        match self {
            Self::Stdout => std::env::temp_dir(),
            Self::File(path) => match path.parent() {
                Some(parent) if parent != Path::new("") => parent.to_owned(),
                _ => ".".into(),
            },
        }
    }

    /// Opens it. A file must not exist yet. Only its owner may read it, who is the user that typed `sudo`.
    pub fn open(&self) -> io::Result<Box<dyn Write>> {
        match self {
            Self::Stdout => Ok(Box::new(BufWriter::new(io::stdout()))),
            Self::File(path) => {
                let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
                if let Some((user, group)) = behind_sudo() {
                    // It is root's then, and may be read by root.
                    let _ = std::os::unix::fs::fchown(&file, Some(user), Some(group));
                }
                let is_packed = path.extension().is_some_and(|extension| extension == "zst");
                Ok(if is_packed {
                    Box::new(Packed { text: Vec::new(), file })
                } else {
                    Box::new(BufWriter::new(file))
                })
            }
        }
    }
}

fn stdout_is_pipe() -> bool {
    let stdout = std::os::fd::AsFd::as_fd(&io::stdout()).try_clone_to_owned().map(File::from);
    !io::stdout().is_terminal()
        && stdout.and_then(|file| file.metadata()).is_ok_and(|about| about.file_type().is_fifo())
}

fn behind_sudo() -> Option<(u32, u32)> {
    let id = |name| std::env::var(name).ok()?.parse().ok();
    Some((id("SUDO_UID")?, id("SUDO_GID")?))
}

/// `2026-11-28-003005`, of UTC.
fn date(now: u64) -> String {
    crate::look::date(now).replace('T', "-").replace([':', 'Z'], "")
}

/// Packs text by zstd, a frame for each some megabytes.
struct Packed {
    text: Vec<u8>,
    file: File,
}

impl Packed {
    fn pack(&mut self) -> io::Result<()> {
        if self.text.is_empty() {
            return Ok(());
        }
        let packed = compress_to_vec(self.text.as_slice(), CompressionLevel::Fastest);
        self.text.clear();
        self.file.write_all(&packed)
    }
}

impl Write for Packed {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(text);
        if self.text.len() >= FRAME {
            self.pack()?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.pack()?;
        self.file.flush()
    }
}

/// A recording that has ended.
#[derive(Debug)]
pub struct Recorded {
    pub spool: Spool,
    pub formats: Formats,
    pub measured: Option<Measured>,
    pub release: String,
}

impl Recorded {
    /// Writes it as text, to `out`.
    fn text(self, out: &mut dyn Write) -> io::Result<(u64, u64)> {
        writeln!(
            out,
            "# tracer: nop\n#\n# Recorded by portcullis record {} on Linux {}",
            env!("CARGO_PKG_VERSION"),
            self.release
        )?;
        if let Some(measured) = self.measured {
            writeln!(out, "{measured}")?;
        }
        let counts = self.spool.write(self.formats, out)?;
        out.flush()?;
        Ok(counts)
    }

    /// Writes it, `anonymous` without what is private, and returns how many events it has and how many were lost.
    pub fn write(
        self,
        out: &mut dyn Write,
        folder: &Path,
        anonymous: bool,
    ) -> Result<(u64, u64), AnonymizeError> {
        if !anonymous {
            return Ok(self.text(out)?);
        }
        let mut plain = tempfile::tempfile_in(folder)?;
        let counts = self.text(&mut BufWriter::new(&mut plain))?;
        // It is read twice, one time after the other.
        let again = || {
            let wound = (&plain).rewind();
            wound.map_err(|source| TraceError::Io { path: folder.to_owned(), source })?;
            Input::from_reader("the recording", &plain)
        };
        anonymize(again, out)?;
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_file_tells_the_time_and_no_host() {
        assert_eq!(date(1_795_825_805), "2026-11-28-003005");
        let of = |path: &str| Output::of(Some(Path::new(path)), 0);
        assert_eq!((of("-"), of("a.zst")), (Output::Stdout, Output::File("a.zst".into())));
        assert_eq!(of("a.zst").folder(), Path::new("."));
        assert_eq!(of("b/a.zst").folder(), Path::new("b"));
    }

    #[test]
    fn packed_text_is_read_as_it_was_and_no_file_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let text = "a line of some text\n".repeat(500_000);
        for name in ["a.zst", "a"] {
            let output = Output::File(folder.path().join(name));
            let mut out = output.open().unwrap();
            text.as_bytes().chunks(3_000_000).for_each(|part| out.write_all(part).unwrap());
            out.flush().unwrap();
            let mut read = String::new();
            Input::open(folder.path().join(name)).unwrap().read_to_string(&mut read).unwrap();
            assert!(read == text, "{name}");
            assert_eq!(output.open().err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        }
        assert!(folder.path().join("a.zst").metadata().unwrap().len() < text.len() as u64 / 100);
    }
}
