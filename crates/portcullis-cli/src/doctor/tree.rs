//! The files that are looked at, below a root.
//!
//! Whatever lies there, a look ends: only plain files are opened, none beyond the root, and of each no more than 4 MiB is read. What may
//! not be read is remembered, as a report must say what it did not see.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::linux::host::{Host, Outside};

/// The most that is read of a file: a kernel's log has up to some megabytes.
pub const MOST_BYTES: u64 = 4 << 20;

/// The most names that are taken of a folder.
const MOST_NAMES: usize = 1 << 16;

/// Files below a root, which nothing changes.
pub struct Tree {
    root: PathBuf,
    /// Paths that may not be read by this user.
    refused: RefCell<BTreeSet<PathBuf>>,
}

impl Tree {
    /// # Errors
    /// There is no such folder.
    pub fn new(root: &Path) -> io::Result<Self> {
        let root = root.canonicalize()?;
        std::fs::read_dir(&root)?;
        Ok(Self { root, refused: RefCell::default() })
    }

    pub fn host(&self) -> Host<'_> {
        Host::new(&self.root, self)
    }

    /// What this user may not read of `path` and below.
    pub fn is_refused(&self, path: &str) -> bool {
        let path = self.root.join(path);
        self.refused.borrow().iter().any(|refused| refused.starts_with(&path) || path.starts_with(refused))
    }

    fn open(&self, path: &Path) -> io::Result<Vec<u8>> {
        let path = path.canonicalize()?;
        if !path.starts_with(&self.root) || !path.metadata()?.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(MOST_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// What stands in a file.
    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        self.read(&self.root.join(path)).ok()
    }
}

impl Outside for Tree {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let read = self.open(path);
        if read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            self.refused.borrow_mut().insert(path.to_owned());
        }
        read
    }

    fn write(&self, _: &Path, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn load(&self) -> io::Result<Result<(), String>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_root(&self) -> bool {
        crate::linux::host::Here.is_root()
    }

    fn ask(&self, _: &str) -> Option<bool> {
        None
    }

    fn say(&self, _: &str) {}

    fn begin(&self) {}
}

impl Host<'_> {
    /// What stands in the file at `path` (`proc/cmdline`), without the end of its last line.
    pub fn file(&self, path: &str) -> Option<String> {
        self.text(&self.at(path))
    }

    /// The whole number that stands in a file.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.file(path)?.trim().parse().ok()
    }

    /// The names in a folder, in order.
    pub fn list(&self, path: &str) -> Vec<String> {
        let mut names = self.follow(&self.at(path)).map_or(Vec::new(), |path| self.names(&path));
        names.truncate(MOST_NAMES);
        names
    }

    /// Whether there is a file or a folder.
    pub fn exists(&self, path: &str) -> bool {
        self.follow(&self.at(path)).is_some()
    }
}
