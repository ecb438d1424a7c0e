//! The CPUs' buffers, read as raw pages: the kernel formats nothing, and a page costs one call.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use portcullis_trace::ring::Formats;

use super::instance::Instance;
use super::pages::Pages;
use super::tracefs::TracingError;

/// A page of a buffer is no larger, whatever a kernel says.
const MOST_PAGE: usize = 1 << 20;

/// What one round of reading found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Round {
    pub events: u64,
    pub lost: u64,
    /// Bytes of the buffer that was fullest.
    pub fullest: u64,
}

/// The buffers of all CPUs.
#[derive(Debug)]
pub struct Streams {
    cpus: Vec<(u32, File)>,
    pages: Pages,
}

impl Streams {
    /// Opens the buffers of `instance`.
    pub fn open(instance: &Instance) -> Result<Self, TracingError> {
        let folder = instance.path("per_cpu");
        let entries = std::fs::read_dir(&folder).map_err(|error| TracingError::of(&folder, error))?;
        let mut cpus = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(cpu) = name.to_str().and_then(|name| name.strip_prefix("cpu")?.parse().ok()) else {
                continue;
            };
            let path = entry.path().join("trace_pipe_raw");
            let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
            cpus.push((cpu, file.map_err(|error| TracingError::of(&path, error))?));
        }
        cpus.sort_by_key(|(cpu, _)| *cpu);
        let size = page_size(&instance.read("events/header_page")?);
        Ok(Self { cpus, pages: Pages::new(size) })
    }

    /// How many CPUs have a buffer.
    pub fn cpus(&self) -> usize {
        self.cpus.len()
    }

    /// Empties all buffers once, and shows `take` the pages, some hundreds at a time, and at last the end of the round. What comes meanwhile may
    /// stay: of one CPU no more than `most` bytes are read, and where `now_ns` tells the time of the events' clock, nothing behind an event
    /// that is later.
    pub fn round(
        &mut self,
        formats: &Formats,
        most: u64,
        now_ns: Option<u64>,
        mut take: impl FnMut(&Pages) -> io::Result<()>,
    ) -> io::Result<Round> {
        let (Self { cpus, pages }, mut round) = (self, Round::default());
        pages.clear();
        for (cpu, file) in cpus {
            let mut bytes = 0;
            while bytes < most {
                let room = pages.room();
                let read = match file.read(room) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                };
                let page = room.get(..read).unwrap_or_default();
                bytes += read as u64;
                if formats.is_empty(page) {
                    continue;
                }
                let (found, len) = (formats.count(page), formats.used(page).len());
                round.events += found.events;
                round.lost += found.lost;
                pages.keep(*cpu, len);
                if pages.is_full() {
                    take(pages)?;
                    pages.clear();
                }
                // Else a busy CPU would hand out a page for every few events.
                if now_ns.is_some_and(|now_ns| found.last_ns >= now_ns) {
                    break;
                }
            }
            round.fullest = round.fullest.max(bytes);
        }
        pages.end_round();
        take(pages)?;
        Ok(round)
    }
}

/// How large pages are: `field: char data; offset:16; size:4080; signed:0;`.
fn page_size(header_page: &str) -> usize {
    let line = header_page.lines().find(|line| line.contains("char data;")).unwrap_or_default();
    let value = |key: &str| -> Option<usize> {
        let rest = line.split_once(key)?.1;
        rest.split(';').next()?.parse().ok()
    };
    let size =
        value("offset:").zip(value("size:")).map_or(4096, |(offset, size)| offset.saturating_add(size));
    size.clamp(4096, MOST_PAGE)
}

#[cfg(test)]
mod tests {
    #[test]
    fn pages_are_as_large_as_the_kernel_says() {
        let said = |line: &str| super::page_size(line);
        assert_eq!(said("\tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;"), 4096);
        assert_eq!(said("\tfield: char data;\toffset:16;\tsize:65520;\tsigned:0;"), 65536);
        assert_eq!(
            [said(""), said("field: char data; offset:16; size:99999999999; signed:0;")],
            [4096, 1 << 20]
        );
    }
}
