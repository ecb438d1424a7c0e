//! The text of a trace: from a file, standard input or memory, plain or compressed.
//!
//! The first bytes determine the format, never the name. Archives of several members (gzip) or frames (zstd, including skippable ones) read
//! as one text. A truncated archive is an error, never a short trace.
//!
//! Cost: one buffer of 128 KiB, and for zstd the window of the archive, which the decoder limits. An archive that expands by more than
//! `MOST_OF_A_BYTE` is rejected once its text exceeds `ANYWAY`: recordings compress to a twentieth, and decompression bombs to a
//! thirty-thousandth.

mod zstd;

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;

use crate::error::TraceError;
use crate::figures::number_of;

/// Standard input in messages.
const STDIN: &str = "standard input";

/// Bytes of one read from the file.
const BUFFER: usize = 128 << 10;

/// Bytes of text that any archive may have.
const ANYWAY: u64 = 16 << 20;

/// The largest expansion beyond that.
const MOST_OF_A_BYTE: u64 = 200;

/// The largest file of settings, such as a profile: 256 KiB.
pub const MOST_SETTINGS: u64 = 256 << 10;

/// Reads all of `source`, up to `most` bytes.
///
/// # Errors
/// The operating system's, and `FileTooLarge` if there are more bytes.
pub fn read_whole(source: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let message = format!("it has more than {}, which are the limit", number_of(most, "byte"));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Reads a file of settings, a text of at most [`MOST_SETTINGS`] bytes.
///
/// # Errors
/// As [`read_whole`], and `InvalidData` if it is not UTF-8.
pub fn settings(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = read_whole(File::open(path)?, MOST_SETTINGS)?;
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no text (UTF-8)"))
}

/// The compression of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// None.
    Plain,
    /// gzip, of one or more members.
    Gzip,
    /// zstd, of one or more frames.
    Zstd,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

impl Format {
    fn of(magic: &[u8]) -> Self {
        match magic {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// Bytes that identify a format.
const MAGIC: u64 = 10;

/// The format with the prefix `magic`, and its conversion to text.
fn made_by_others(magic: &[u8]) -> Option<(&'static str, &'static str)> {
    match magic {
        [b'P', b'E', b'R', b'F', b'I', b'L', b'E', b'2', ..] => {
            Some(("a recording of perf in its binary form", "`perf script -i FILE`"))
        }
        [0x17, 0x08, 0x44, b't', b'r', b'a', b'c', b'i', b'n', b'g', ..] => {
            Some(("a recording of trace-cmd in its binary form", "`trace-cmd report -i FILE`"))
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(("an xz archive", "`xz -dc FILE`")),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Some(("a bzip2 archive", "`bzip2 -dc FILE`")),
        [b'P', b'K', 3, 4, ..] => Some(("a zip archive", "`unzip -p FILE`")),
        _ => None,
    }
}

/// Findings of the raw reader for its consumers above the decompressor.
#[derive(Debug, Default)]
struct Gauge {
    bytes: AtomicU64,
    /// A read went beyond the end.
    ran_dry: AtomicBool,
    /// The operating system returned an error, which therefore is not the archive's.
    failed: AtomicBool,
}

/// Counts bytes.
struct Metered<R> {
    inner: R,
    gauge: Arc<Gauge>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let result = self.inner.read(buf);
        match &result {
            Ok(0) if !buf.is_empty() => self.gauge.ran_dry.store(true, Ordering::Relaxed),
            Ok(n) => {
                self.gauge.bytes.fetch_add(*n as u64, Ordering::Relaxed);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.gauge.failed.store(true, Ordering::Relaxed),
        }
        result
    }
}

/// An open trace: a text stream with a name and a position.
pub struct Input<'a> {
    name: String,
    format: Format,
    total: Option<u64>,
    gauge: Arc<Gauge>,
    text_bytes: u64,
    reader: Box<dyn Read + Send + 'a>,
}

impl fmt::Debug for Input<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input")
            .field("name", &self.name)
            .field("format", &self.format)
            .field("total", &self.total)
            .field("gauge", &self.gauge)
            .finish_non_exhaustive()
    }
}

impl Input<'static> {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`TraceError::Io`] if it cannot be opened or its first bytes cannot be read, [`TraceError::Directory`] and [`TraceError::Binary`] if
    /// it cannot be a trace.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let failed = |source| TraceError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(failed)?;
        if file.metadata().is_ok_and(|about| about.is_dir()) {
            return Err(TraceError::Directory { path: path.to_path_buf() });
        }
        // A pipe or a device has no meaningful length.
        let total = file.metadata().ok().filter(|m| m.is_file()).map(|m| m.len());
        Self::new(path.display().to_string(), total, file)
    }

    /// Reads standard input, which can be read only once, unless it is a [file](Self::stdin_file).
    ///
    /// # Errors
    /// [`TraceError::Io`] if its first bytes cannot be read, [`TraceError::Binary`] if it is not a trace.
    pub fn stdin() -> Result<Self, TraceError> {
        match Self::stdin_file()? {
            Some(file) => Ok(file),
            None => Self::new(STDIN.into(), None, io::stdin()),
        }
    }

    /// Whether standard input is a pipe, which may stay silent; `false` on systems other than Unix.
    pub fn stdin_is_pipe() -> bool {
        #[cfg(unix)]
        {
            use std::os::unix::fs::FileTypeExt;
            stdin_as_file().and_then(|file| file.metadata()).is_ok_and(|about| about.file_type().is_fifo())
        }
        #[cfg(not(unix))]
        false
    }

    /// Reads standard input if it is a file, from its position, which does not change: each call begins there. `None` otherwise, without
    /// reading, and on systems other than Unix.
    ///
    /// # Errors
    /// As [`stdin`](Self::stdin).
    pub fn stdin_file() -> Result<Option<Self>, TraceError> {
        #[cfg(unix)]
        {
            use std::io::Seek;
            let file = stdin_as_file().ok();
            let Some(mut file) = file.filter(|file| file.metadata().is_ok_and(|about| about.is_file()))
            else {
                return Ok(None);
            };
            let sizes = file.stream_position().and_then(|at| Ok((at, file.metadata()?.len())));
            let (at, len) = sizes.map_err(|source| TraceError::Io { path: PathBuf::from(STDIN), source })?;
            Self::new(STDIN.into(), Some(len.saturating_sub(at)), Placed { file, at }).map(Some)
        }
        #[cfg(not(unix))]
        Ok(None)
    }
}

/// A second handle on standard input.
#[cfg(unix)]
fn stdin_as_file() -> io::Result<File> {
    std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned().map(File::from)
}

/// A file with a read position of its own, independent of the shared one.
#[cfg(unix)]
struct Placed {
    file: File,
    at: u64,
}

#[cfg(unix)]
impl Read for Placed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = std::os::unix::fs::FileExt::read_at(&self.file, buf, self.at)?;
        self.at = self.at.saturating_add(n as u64);
        Ok(n)
    }
}

impl<'a> Input<'a> {
    /// Reads `bytes`; messages call them `name`.
    ///
    /// # Errors
    /// [`TraceError::Binary`] if they are not a trace.
    pub fn from_bytes(name: impl Into<String>, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self, TraceError> {
        let bytes = bytes.into();
        Self::new(name.into(), Some(bytes.len() as u64), Cursor::new(bytes))
    }

    /// Reads `source`, with any compression; messages call it `name`. Reads its first bytes at once.
    ///
    /// # Errors
    /// [`TraceError::Io`] if its first bytes cannot be read, [`TraceError::Binary`] if it is not a trace.
    pub fn from_reader(name: impl Into<String>, source: impl Read + Send + 'a) -> Result<Self, TraceError> {
        Self::new(name.into(), None, source)
    }

    fn new(name: String, total: Option<u64>, source: impl Read + Send + 'a) -> Result<Self, TraceError> {
        let gauge = Arc::new(Gauge::default());
        let mut source = Metered { inner: source, gauge: Arc::clone(&gauge) };
        let mut magic = Vec::with_capacity(MAGIC as usize);
        if let Err(error) = source.by_ref().take(MAGIC).read_to_end(&mut magic) {
            return Err(TraceError::Io { path: PathBuf::from(name), source: error });
        }
        if let Some((what, instead)) = made_by_others(&magic) {
            return Err(TraceError::Binary { name, what, instead });
        }
        // A file shorter than any magic number has run dry, but no reader has missed anything yet.
        gauge.ran_dry.store(false, Ordering::Relaxed);
        let format = Format::of(&magic);
        let whole = Cursor::new(magic).chain(source);
        let reader: Box<dyn Read + Send + 'a> = match format {
            Format::Plain => Box::new(whole),
            Format::Gzip => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER, whole))),
            Format::Zstd => Box::new(zstd::Frames::new(BufReader::with_capacity(BUFFER, whole))),
        };
        Ok(Self { name, format, total, gauge, text_bytes: 0, reader })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compression.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the file read so far, before decompression.
    pub fn bytes_read(&self) -> u64 {
        self.gauge.bytes.load(Ordering::Relaxed)
    }

    /// The size of the file; `None` for a pipe.
    pub fn bytes_total(&self) -> Option<u64> {
        self.total
    }

    /// Whether its text exceeds any recording's.
    fn is_bomb(&self) -> bool {
        let most = self.bytes_read().saturating_mul(MOST_OF_A_BYTE).max(ANYWAY);
        self.format != Format::Plain && self.text_bytes > most
    }

    /// Classifies `error`, which occurred in line `line` of the text.
    pub(crate) fn explain(&self, error: io::Error, line: u64) -> TraceError {
        let (name, format, after_bytes) = (self.name.clone(), self.format, self.bytes_read());
        if self.is_bomb() {
            return TraceError::Bomb { name, format, after_bytes, text_bytes: self.text_bytes, line };
        }
        if format == Format::Plain || self.gauge.failed.load(Ordering::Relaxed) {
            TraceError::Io { path: PathBuf::from(name), source: error }
        } else if self.gauge.ran_dry.load(Ordering::Relaxed) {
            TraceError::TruncatedArchive { name, format, after_bytes, line, source: error }
        } else {
            TraceError::CorruptArchive { name, format, after_bytes, line, source: error }
        }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.reader.read(buf)?;
        self.text_bytes += n as u64;
        if self.is_bomb() { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails after its bytes.
    struct Broken<'a>(&'a [u8]);

    impl Read for Broken<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buf)? {
                0 => Err(io::ErrorKind::PermissionDenied.into()),
                n => Ok(n),
            }
        }
    }

    #[test]
    fn an_error_of_the_system_is_not_the_archive_s() {
        let mut input = Input::new("x".into(), None, Broken(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0])).unwrap();
        let error = io::copy(&mut input, &mut io::sink()).unwrap_err();
        assert!(matches!(input.explain(error, 1), TraceError::Io { .. }));
    }

    /// Is interrupted before each of its bytes.
    struct Interrupted<'a>(&'a [u8], bool);

    impl Read for Interrupted<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            let most = buf.len().min(1);
            if self.1 { Err(io::ErrorKind::Interrupted.into()) } else { self.0.read(&mut buf[..most]) }
        }
    }

    #[test]
    fn reads_that_signals_interrupt_go_on() {
        use std::io::Write;

        let line = "t-1 [000] 1.000001: dma_unmap_page: d dir=TO_DEVICE dma_addr=f000 size=512 attrs=\n";
        let text = line.repeat(20);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gzip.write_all(text.as_bytes()).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let zstd = ruzstd::encoding::compress_to_vec(text.as_bytes(), level);
        for bytes in [text.as_bytes(), &gzip.finish().unwrap(), &zstd] {
            let input = Input::new("x".into(), None, Interrupted(bytes, false)).unwrap();
            let mut reader = crate::reader::EventReader::new(input, true);
            while reader.read_event(|_, _| ()).unwrap() {}
            assert_eq!(reader.summary().events, 20);
        }
    }

    #[test]
    fn an_error_is_told_with_its_figures() {
        let gzip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0];
        let said = |bytes: &[u8], text_bytes: u64, dry: bool| {
            let mut input = Input::from_bytes("x", bytes).unwrap();
            input.text_bytes = text_bytes;
            input.gauge.bytes.store(1 << 20, Ordering::Relaxed);
            input.gauge.ran_dry.store(dry, Ordering::Relaxed);
            input.explain(io::Error::other("no luck"), 7).to_string()
        };
        let most = 200 << 20;
        assert_eq!(
            said(&gzip, most, true),
            "x: truncated gzip archive: it ends after 1,048,576 bytes, in line 7 of its text, where more must follow"
        );
        assert_eq!(
            said(&gzip, most, false),
            "x: damaged gzip archive within its first 1,048,576 bytes, line 7 of its text: no luck"
        );
        assert_eq!(
            said(&gzip, most + 1, true),
            "x: 1,048,576 bytes of this gzip archive make more than 209,715,201 bytes of text, by line 7, as no recording's do: what \
             it holds can be read from a file that is not packed"
        );
        assert_eq!(said(b"text", most + 1, true), "cannot read x: no luck");
    }

    #[test]
    fn all_is_read_up_to_a_limit() {
        let read = |most: u64| read_whole(&b"12345"[..], most);
        assert_eq!([read(5).unwrap(), read(6).unwrap(), read(u64::MAX).unwrap()], [b"12345"; 3]);
        let error = read(4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it has more than 4 bytes, which are the limit");
    }

    #[test]
    fn a_small_archive_may_become_16_mib() {
        let mut input = Input::from_bytes("x", &[0x1f, 0x8b, 8, 0][..]).unwrap();
        for (text_bytes, is_bomb) in [(16 << 20, false), ((16 << 20) + 1, true)] {
            input.text_bytes = text_bytes;
            assert_eq!(input.is_bomb(), is_bomb);
        }
    }
}
