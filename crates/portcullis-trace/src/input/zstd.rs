//! zstd archives of several frames, read as one stream.
//!
//! The underlying decoder handles one frame at a time and neither skips skippable ones nor verifies checksums; this does. A frame's text is
//! returned before its checksum is verified, at the frame's end.

use std::io::{self, BufRead, Read};

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Bytes of one decoding step: large enough to be cheap, small enough for a cache.
const STEP: usize = 128 << 10;

/// The text of all frames.
pub(super) struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Frames<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), inside: false }
    }

    /// Advances to the next frame with text; `false` at the end of the archive.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            let mut magic = [0; 4];
            self.source.read_exact(&mut magic)?;
            if let [0x50..=0x5f, 0x2a, 0x4d, 0x18] = magic {
                let mut length = [0; 4];
                self.source.read_exact(&mut length)?;
                let length = u64::from(u32::from_le_bytes(length));
                let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
                if skipped < length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                continue;
            }
            self.decoder.init((&magic[..]).chain(&mut self.source)).map_err(io::Error::other)?;
            self.inside = true;
            return Ok(true);
        }
    }

    fn check(&self) -> io::Result<()> {
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(stored), Some(computed)) if stored != computed => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the frame's checksum is {stored:#010x}, but its contents give {computed:#010x}"),
            )),
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside && !self.next_frame()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBytes(STEP))
                    .map_err(io::Error::other)?;
            }
            let n = self.decoder.read(buf)?;
            if n > 0 {
                return Ok(n);
            }
            self.check()?;
            self.inside = false;
        }
    }
}
