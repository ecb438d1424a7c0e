//! The kernel's log, as lines of plain text.

use serde::Serialize;

use super::tree::Tree;

/// Where another machine's log lies below its root.
pub const FILE: &str = "dmesg";

/// The log.
#[derive(Debug, Default)]
pub struct Log {
    /// Its lines, without what stands before their text: levels, times, and the names of a journal.
    pub lines: Vec<String>,
    pub state: State,
}

/// What there is of it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// From the kernel's first line on.
    Whole,
    /// Its beginning has been overwritten.
    Cut,
    /// It may not be read.
    Refused,
    #[default]
    Missing,
}

impl Log {
    /// The log of this machine, or that of the files below a root.
    pub fn read(tree: &Tree, is_here: bool) -> Self {
        let bytes = if is_here { ring() } else { tree.bytes(FILE).ok_or(State::Missing) };
        match bytes {
            Ok(bytes) => Self::parse(&String::from_utf8_lossy(&bytes)),
            Err(state) => Self { lines: Vec::new(), state },
        }
    }

    pub fn parse(text: &str) -> Self {
        let lines: Vec<String> = text.lines().map(|line| body(line).to_owned()).collect();
        let begins = lines.iter().take(50).any(|line| line.starts_with("Linux version "));
        let state = match () {
            () if lines.is_empty() => State::Missing,
            () if begins => State::Whole,
            () => State::Cut,
        };
        Self { lines, state }
    }

    /// The text behind the first `beginning` that begins a line.
    pub fn after(&self, beginning: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| line.strip_prefix(beginning))
    }

    pub fn has(&self, part: &str) -> bool {
        self.lines.iter().any(|line| line.contains(part))
    }
}

/// A line without its level (`<6>`), its time (`[    0.438127] `, `[Thu Jan  4 23:12:54 2024] `), or what `journalctl -k` puts before it.
fn body(line: &str) -> &str {
    let line = line.trim_end_matches('\r');
    let line = line.split_once(" kernel: ").map_or(line, |(_, text)| text);
    let level = line.strip_prefix('<').and_then(|rest| rest.split_once('>'));
    let line = level.filter(|(level, _)| level.parse::<u16>().is_ok()).map_or(line, |(_, text)| text);
    let time = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    let is_time = |time: &str| {
        time.chars().any(|c| c.is_ascii_digit())
            && time.chars().all(|c| c.is_ascii_alphanumeric() || " .:+".contains(c))
    };
    time.filter(|(time, _)| is_time(time)).map_or(line, |(_, text)| text)
}

/// What the kernel's ring buffer holds.
#[cfg(target_os = "linux")]
fn ring() -> Result<Vec<u8>, State> {
    /// Of syslog(2): read all; the size of the buffer.
    const READ_ALL: libc::c_int = 3;
    const SIZE: libc::c_int = 10;
    // SAFETY: this command takes no buffer.
    let size = unsafe { libc::klogctl(SIZE, std::ptr::null_mut(), 0) };
    let size = usize::try_from(size).unwrap_or(1 << 20).clamp(1 << 16, super::tree::MOST_BYTES as usize);
    let mut bytes = vec![0_u8; size];
    let len = libc::c_int::try_from(bytes.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes up to `len` bytes, and the buffer is at least that long.
    let read = unsafe { libc::klogctl(READ_ALL, bytes.as_mut_ptr().cast(), len) };
    match usize::try_from(read) {
        Ok(read) => {
            bytes.truncate(read);
            Ok(bytes)
        }
        Err(_) => Err(State::Refused),
    }
}

#[cfg(not(target_os = "linux"))]
fn ring() -> Result<Vec<u8>, State> {
    Err(State::Missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lose_what_stands_before_their_text() {
        for (line, text) in [
            ("<6>[    0.000000] Linux version 6.12", "Linux version 6.12"),
            ("[    0.4] DMAR: IOMMU enabled", "DMAR: IOMMU enabled"),
            ("[Thu Jan  4 23:12:54 2024] ahci 0000:28:00.0: x", "ahci 0000:28:00.0: x"),
            ("Jan 04 23:12:54 host kernel: DMAR: x", "DMAR: x"),
            ("DMAR: [Firmware Bug]: x\r", "DMAR: [Firmware Bug]: x"),
            ("[Firmware Bug]: x", "[Firmware Bug]: x"),
            ("[drm] DMAR active", "[drm] DMAR active"),
            ("<x>[", "<x>["),
            ("[] a", "[] a"),
            ("", ""),
        ] {
            assert_eq!(body(line), text);
        }
    }

    #[test]
    fn a_log_is_whole_or_cut_or_missing() {
        let state = |text: &str| Log::parse(text).state;
        assert_eq!(state(""), State::Missing);
        assert_eq!(state("[  900.1] usb 1-1: new"), State::Cut);
        assert_eq!(state("[    0.000000] Linux version 6.12.1 (a@b)\n[1.0] x"), State::Whole);
        let late = format!("{}Linux version 6.12.1\n", "x\n".repeat(60));
        assert_eq!(state(&late), State::Cut);
    }
}
