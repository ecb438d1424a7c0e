//! The machine as its kernel shows it: files below a root, and the few things that are done to it.
//!
//! A file may be gone or half there, and the maker of a hostile device may have chosen its text. So a file that cannot be read is
//! `None`, a read has a limit, and each printer escapes the text.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most that is read of any file: `/proc/self/mountinfo` of a server with thousands of containers has some megabytes.
const MOST_BYTES: u64 = 16 << 20;

/// What is done outside of this program. Tests have one of their own.
pub trait Outside {
    /// What stands in a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Writes to a file of sysfs that is there, in one call of the kernel, whose answer is the result.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Loads the module; or what `modprobe` had to say.
    fn load(&self) -> io::Result<Result<(), String>>;
    /// Whether it may do what only root may.
    fn is_root(&self) -> bool;
    /// The answer to a question; `None` where there is no terminal to ask on.
    fn ask(&self, question: &str) -> Option<bool>;
    /// Says something that was found or done.
    fn say(&self, text: &str);
    /// From now on nothing but an end of the machine keeps this program from doing what it has begun.
    fn begin(&self);
}

/// A machine.
pub struct Host<'a> {
    /// `/`, but for tests.
    root: PathBuf,
    pub outside: &'a dyn Outside,
}

impl<'a> Host<'a> {
    /// The root must be canonical.
    pub fn new(root: impl Into<PathBuf>, outside: &'a dyn Outside) -> Self {
        Self { root: root.into(), outside }
    }

    /// The file that is at `path` (`sys/bus/pci`) on this machine.
    pub fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// What stands in a file, without the end of its line.
    pub fn text(&self, path: &Path) -> Option<String> {
        let bytes = self.outside.read(path).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    /// The names in a folder, in order; none where there is no such folder.
    pub fn names(&self, folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Where a link or a path leads, if that is on this machine.
    pub fn follow(&self, path: &Path) -> Option<PathBuf> {
        path.canonicalize().ok().filter(|path| path.starts_with(&self.root))
    }

    /// The last part of what a link leads to: the name of a driver, the number of a group.
    pub fn link(&self, path: &Path) -> Option<String> {
        let target = std::fs::read_link(path).ok()?;
        target.file_name().map(|name| name.to_string_lossy().into_owned())
    }
}

/// Runs a command; or what it had to say, where it fails.
fn answer(command: &mut Command) -> io::Result<Result<(), String>> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Ok(if output.status.success() { Ok(()) } else { Err(said) })
}

/// Whether this program may do what only root may.
pub fn is_root() -> bool {
    // SAFETY: the call takes nothing, and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// This machine.
pub struct Here;

impl Outside for Here {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(MOST_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // Neither made where it is not there, nor cut. The kernel takes a part of a text for the whole.
        let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
        let written = io::Write::write(&mut file, text.as_bytes())?;
        if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn load(&self) -> io::Result<Result<(), String>> {
        answer(Command::new("modprobe").arg("portcullis"))
    }

    fn is_root(&self) -> bool {
        is_root()
    }

    fn ask(&self, question: &str) -> Option<bool> {
        use std::io::IsTerminal;
        if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            return None;
        }
        crate::look::tell(&crate::look::wrap(&format!("{question} [y/N]"), "  "));
        let mut answer = String::new();
        io::stdin().read_line(&mut answer).ok()?;
        Some(matches!(answer.trim(), "y" | "Y" | "yes" | "Yes"))
    }

    fn say(&self, text: &str) {
        let text = portcullis_trace::printable::PrintableLines(text).to_string();
        // The terminal may be gone. The devices come first, so an error of printing stops nothing.
        let _ = crate::print(&crate::look::wrap_lines(&text, "  "));
    }

    fn begin(&self) {
        crate::interrupt::ignore();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_complains_of_is_its_answer_where_it_fails() {
        let answer = |script| answer(Command::new("sh").args(["-c", script]));
        assert_eq!(answer("echo done; echo careful >&2").unwrap(), Ok(()));
        assert_eq!(answer("echo begun; echo ' not found ' >&2; exit 1").unwrap(), Err("not found".into()));
        let none = super::answer(&mut Command::new("/nowhere/modprobe")).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }
}
