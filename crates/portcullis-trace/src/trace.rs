//! A whole trace: combines input, reader and pairing.

use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::TraceError;
use crate::input::Input;
use crate::pair::{Chunk, Pairer};
use crate::reader::EventReader;
use crate::summary::Summary;

/// The most pieces of a chunk, which ends early, however long lists are.
const SEGMENTS: usize = 1 << 20;

/// Options of reading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// The first warning is an error.
    pub strict: bool,
    /// Only the mappings of the device that this [names](crate::is_named); events of others are counted as filtered.
    pub device: Option<String>,
    /// Stop after this number of events.
    pub limit: Option<u64>,
}

/// A trace being read.
///
/// ```
/// use portcullis_trace::{Chunk, ReadOptions, Trace};
///
/// let text = b"t-1 [000] ..... 1.5: dma_map_page: nvme dir=TO_DEVICE dma_addr=f000 size=512 phys_addr=1000 attrs=\n";
/// let mut trace = Trace::from_bytes("example", &text[..], ReadOptions::default())?;
/// let mut chunk = Chunk::default();
/// while trace.next_chunk(&mut chunk, 1000)? {
///     assert_eq!(chunk.ops.len(), 1);
/// }
/// assert_eq!(trace.summary().still_mapped(), 1);
/// # Ok::<(), portcullis_trace::TraceError>(())
/// ```
#[derive(Debug)]
pub struct Trace<'a> {
    reader: EventReader<'a>,
    pairer: Pairer,
    limit: u64,
    /// The caller has stopped it.
    stop: AtomicBool,
    ended: bool,
}

impl Trace<'static> {
    /// Opens the file at `path`, whatever its compression.
    ///
    /// # Errors
    /// [`TraceError::Io`] if it cannot be opened or its first bytes cannot be read.
    pub fn open(path: impl AsRef<Path>, options: ReadOptions) -> Result<Self, TraceError> {
        Ok(Self::new(Input::open(path)?, options))
    }

    /// Reads standard input, whatever its compression.
    ///
    /// # Errors
    /// [`TraceError::Io`] if its first bytes cannot be read.
    pub fn stdin(options: ReadOptions) -> Result<Self, TraceError> {
        Ok(Self::new(Input::stdin()?, options))
    }
}

impl<'a> Trace<'a> {
    /// Reads `bytes`, whatever their compression; messages call them `name`.
    ///
    /// # Errors
    /// None in practice: memory can always be read.
    pub fn from_bytes(
        name: impl Into<String>,
        bytes: impl Into<Cow<'a, [u8]>>,
        options: ReadOptions,
    ) -> Result<Self, TraceError> {
        Ok(Self::new(Input::from_bytes(name, bytes)?, options))
    }

    /// Reads `input`.
    pub fn new(input: Input<'a>, options: ReadOptions) -> Self {
        Self {
            reader: EventReader::new(input, options.strict),
            pairer: Pairer::new(options.device),
            limit: options.limit.unwrap_or(u64::MAX),
            stop: AtomicBool::new(false),
            ended: false,
        }
    }

    /// Clears `chunk` and fills it with the operations of the next `max_events` events (at least one). `false` means that the trace has
    /// ended and the chunk is empty; a chunk without operations is not the end.
    ///
    /// The operations do not depend on `max_events`, except how they are divided into chunks.
    ///
    /// # Errors
    /// [`TraceError`], after which the chunk has the operations before the error, and the trace has ended.
    pub fn next_chunk(&mut self, chunk: &mut Chunk, max_events: usize) -> Result<bool, TraceError> {
        chunk.clear();
        if self.ended {
            return Ok(false);
        }
        let pairer = &mut self.pairer;
        if self.stop.load(Ordering::Relaxed) {
            self.ended = true;
            self.reader.summary_mut().stopped = true;
            pairer.finish(self.reader.summary_mut(), chunk);
            return Ok(!chunk.ops.is_empty());
        }
        for _ in 0..max_events.max(1) {
            let more = if self.reader.summary().events < self.limit {
                self.reader.read_event(|event, summary| pairer.event(event, summary, chunk))
            } else {
                self.reader.summary_mut().limited = true;
                Ok(false)
            };
            if let Ok(true) = more {
                if chunk.segments.len() >= SEGMENTS {
                    break;
                }
                continue;
            }
            self.ended = true;
            pairer.finish(self.reader.summary_mut(), chunk);
            more?;
            self.reader.check()?;
            break;
        }
        Ok(!self.ended || !chunk.ops.is_empty())
    }

    /// Ends the trace at the current position: the next chunk is the last, and settles the rest.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The counts so far; complete once [`next_chunk`](Self::next_chunk) has returned `false`.
    pub fn summary(&self) -> &Summary {
        self.reader.summary()
    }

    /// Bytes of the file read so far, before decompression.
    pub fn bytes_read(&self) -> u64 {
        self.reader.input().bytes_read()
    }

    /// The size of the file; `None` for a pipe.
    pub fn bytes_total(&self) -> Option<u64> {
        self.reader.input().bytes_total()
    }
}
