//! Shared libraries with Linux's own code, which the user names.
//!
//! Nothing of Linux is part of this program: a library is built by somebody else, from Linux's unmodified
//! sources and a few functions around them, and opened at run time. Only the names and signatures of its
//! functions are known here.

use std::path::{Path, PathBuf};

/// Why Linux's code cannot be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RivalError {
    /// There is no such file.
    #[error("{path}: {source}")]
    NoFile {
        /// What was to be opened.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// The file is no shared library for this machine.
    #[error("{path} is no shared library that can be loaded: {source}")]
    Load {
        /// What was to be opened.
        path: PathBuf,
        /// What the system's linker says.
        source: libloading::Error,
    },
    /// The library lacks a function.
    #[error("{path} does not hold {what}: it has no `{symbol}`")]
    Symbol {
        /// The library.
        path: PathBuf,
        /// What was expected in it.
        what: &'static str,
        /// The name that is not in it.
        symbol: &'static str,
    },
}

/// A library, open for good: what is copied out of it stays valid.
pub(crate) struct Library<'a> {
    library: &'static libloading::Library,
    path: &'a Path,
    what: &'static str,
}

impl<'a> Library<'a> {
    /// Opens the library at `path`, which is to hold `what`.
    pub(crate) fn open(path: &'a Path, what: &'static str) -> Result<Self, RivalError> {
        // The system's linker would look for a bare name in its own folders.
        let full = path.canonicalize().map_err(|source| RivalError::NoFile { path: path.into(), source })?;
        // SAFETY: the user named this library for its code to be run. What it must be is documented with the
        // option; nothing more can be known of it.
        let library = unsafe { libloading::Library::new(full) };
        let library = library.map_err(|source| RivalError::Load { path: path.into(), source })?;
        Ok(Self { library: Box::leak(Box::new(library)), path, what })
    }

    /// The function or variable `symbol`.
    ///
    /// # Safety
    /// `T` is a pointer to what `symbol` is in the library.
    pub(crate) unsafe fn get<T: Copy>(&self, symbol: &'static str) -> Result<T, RivalError> {
        let missing = |_| RivalError::Symbol { path: self.path.into(), what: self.what, symbol };
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { self.library.get::<T>(symbol) }.map(|symbol| *symbol).map_err(missing)
    }
}

/// The calls of a library that a test makes up, on the test's own thread.
#[cfg(test)]
pub(crate) mod noted {
    use std::cell::RefCell;

    thread_local! {
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// Notes a call.
    pub(crate) fn note(call: String) {
        CALLS.with_borrow_mut(|calls| calls.push(call));
    }

    /// The calls since the last look.
    pub(crate) fn calls() -> Vec<String> {
        CALLS.take()
    }
}
