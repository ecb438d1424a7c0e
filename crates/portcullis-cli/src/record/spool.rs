//! Pages as they were read, in a file that has no name, so that nothing is left of it whatever happens to this program.
//!
//! While it is recorded, nothing else is done with them: what takes CPU time or writes to a disk would be in the recording. The kernel
//! keeps such a file in memory as long as it has some to spare.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::path::Path;

use portcullis_trace::ring::{Formats, Merge};

use super::pages::{HEAD, Pages, ROUND, read};

/// Text that is handed on at once.
const STEP: usize = 8 << 20;

/// A file of pages.
#[derive(Debug)]
pub struct Spool {
    file: File,
    bytes: u64,
}

impl Spool {
    /// Makes one in `folder`.
    pub fn new(folder: &Path) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(folder)?, bytes: 0 })
    }

    /// Adds pages.
    pub fn add(&mut self, pages: &Pages) -> io::Result<()> {
        self.bytes += pages.bytes().len() as u64;
        self.file.write_all(pages.bytes())
    }

    /// Bytes in it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes all of it as text, in the order of time, and returns how many events that were and how many were lost.
    pub fn write(self, formats: Formats, out: &mut dyn Write) -> io::Result<(u64, u64)> {
        let mut file = self.file;
        file.rewind()?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut merge = Merge::new(formats);
        let (mut text, mut page) = (Vec::new(), Vec::new());
        let mut head = [0; HEAD];
        while !file.fill_buf()?.is_empty() {
            file.read_exact(&mut head)?;
            let (cpu, len) = read(head);
            page.resize(len, 0);
            file.read_exact(&mut page)?;
            if cpu == ROUND {
                merge.round(&mut text);
            } else {
                merge.page(cpu, &page);
            }
            if text.len() >= STEP {
                out.write_all(&text)?;
                text.clear();
            }
        }
        merge.finish(&mut text);
        out.write_all(&text)?;
        Ok((merge.events(), merge.lost()))
    }
}
