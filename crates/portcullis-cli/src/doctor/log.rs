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

/// A line without what stands before its text: what `journalctl -k` puts there, its level (`<6>`, or `kern  :err   : `), its time
/// (`[    0.438127] `, `[Thu Jan  4 23:12:54 2024] `, `2026-11-30T10:00:00,123456+01:00 `), and the thread or the CPU that printed it
/// (`[    T1] `).
fn body(line: &str) -> &str {
    let line = line.trim_end_matches('\r');
    let journal = line.strip_prefix("kernel: ").or_else(|| Some(line.split_once(" kernel: ")?.1));
    let line = journal.unwrap_or(line);
    let line = without_level(line).unwrap_or(line);
    let Some(text) = without_time(line) else { return line };
    without_caller(text).or_else(|| text.strip_prefix(' ')).unwrap_or(line)
}

fn without_level(line: &str) -> Option<&str> {
    const FACILITIES: [&str; 5] = ["kern", "user", "daemon", "auth", "syslog"];
    const LEVELS: [&str; 8] = ["emerg", "alert", "crit", "err", "warn", "notice", "info", "debug"];
    if let Some((level, text)) = line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        return level.parse::<u16>().is_ok().then_some(text);
    }
    let (facility, rest) = line.split_once(':')?;
    let (level, text) = rest.split_once(": ")?;
    let is_one = FACILITIES.contains(&facility.trim_end()) && LEVELS.contains(&level.trim_end());
    is_one.then_some(text)
}

/// What follows the time and its bracket, from the blank on.
fn without_time(line: &str) -> Option<&str> {
    let is_time = |time: &str| {
        time.chars().any(|c| c.is_ascii_digit())
            && time.chars().all(|c| c.is_ascii_alphanumeric() || " .:+".contains(c))
    };
    if let Some((time, text)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return is_time(time).then_some(text);
    }
    let time = line.split(' ').next()?;
    let is_iso = time.len() >= "2026-11-30T10:00:00".len()
        && time.get(10..11) == Some("T")
        && time.chars().enumerate().all(|(at, c)| at == 10 || c.is_ascii_digit() || ",.:+-Z".contains(c));
    line.get(time.len()..).filter(|_| is_iso)
}

/// The text behind `[    T1] ` or `[   C31] `, with or without a blank before it.
fn without_caller(text: &str) -> Option<&str> {
    let (caller, text) = text.strip_prefix(' ').unwrap_or(text).strip_prefix('[')?.split_once(']')?;
    let number = caller.trim().strip_prefix(['T', 'C'])?;
    let is_one = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    text.strip_prefix(' ').filter(|_| is_one)
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
            // With the printing thread or CPU.
            ("[    3.912345][    T1] DMAR: x", "DMAR: x"),
            ("[    0.350000] [      T1] DMAR: x", "DMAR: x"),
            ("[   12.000001][   C31] DMAR: x", "DMAR: x"),
            ("<6>[    3.912345][ T1234] DMAR: x", "DMAR: x"),
            ("<6>[    T1] DMAR: x", "DMAR: x"),
            ("[    0.4] [drm] x", "[drm] x"),
            ("[    0.4] [T] x", "[T] x"),
            ("[    0.4] [Tx1] x", "[Tx1] x"),
            // `dmesg -x`.
            ("kern  :err   : [    0.350000] DMAR: x", "DMAR: x"),
            ("kern  :warn  : [    0.350000] [     T1] DMAR: x", "DMAR: x"),
            ("daemon:info  : [    2.000000] systemd[1]: x", "systemd[1]: x"),
            ("kern  :odd   : x", "kern  :odd   : x"),
            ("pci   :err   : x", "pci   :err   : x"),
            // `dmesg --time-format iso`.
            ("2026-11-30T10:00:00,123456+01:00 DMAR: x", "DMAR: x"),
            ("2026-11-30T10:00:00,123456+01:00 [    T7] DMAR: x", "DMAR: x"),
            ("kern  :err   : 2026-11-30T10:00:00,123456+01:00 DMAR: x", "DMAR: x"),
            ("2026-11-30 DMAR: x", "2026-11-30 DMAR: x"),
            ("kernel: DMAR: x", "DMAR: x"),
            ("2026-11-30T10:00:00+0100 host kernel: DMAR: x", "DMAR: x"),
            ("Nov 30 10:00:00 host kernel: [    0.4][    T1] DMAR: x", "DMAR: x"),
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
