//! A tracing instance of its own: all that is changed of the kernel's tracing is in it, so that its end leaves tracing as it was found.
//!
//! It has a fixed name. A run that was killed leaves it behind, and the next removes it; a lock, which ends with its owner, keeps
//! two runs apart.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::tracefs::{Tracefs, TracingError};

/// The instance's name.
pub const NAME: &str = "portcullis";

/// Clocks that are the same on all CPUs and count seconds, the best first.
const CLOCKS: [&str; 3] = ["mono", "boot", "global"];

/// How an instance's folder is made and removed. Tracefs fills it, and empties it, which no other file system does.
#[derive(Debug, Clone, Copy)]
pub struct Hands {
    pub make: fn(&Path) -> io::Result<()>,
    pub remove: fn(&Path) -> io::Result<()>,
}

/// The kernel's.
pub const KERNEL: Hands =
    Hands { make: |path| std::fs::create_dir(path), remove: |path| std::fs::remove_dir(path) };

/// An instance that records nothing until it is told to. It is removed at its end.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    hands: Hands,
    /// Locked until this run ends, however it ends.
    _lock: File,
    there: bool,
    clock: &'static str,
}

impl Instance {
    /// Makes the instance, and removes what a run before may have left. It returns the instance and whether there was such.
    pub fn make(tracefs: &Tracefs, hands: Hands) -> Result<(Self, bool), TracingError> {
        let instances = tracefs.root.join("instances");
        let lock = File::open(&instances).map_err(|error| TracingError::of(&instances, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(TracingError::Busy),
            Err(std::fs::TryLockError::Error(error)) => return Err(TracingError::of(&instances, error)),
        }
        let path = instances.join(NAME);
        let left = path.exists();
        if left {
            (hands.remove)(&path).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => TracingError::LeftInUse(path.display().to_string()),
                _ => TracingError::of(&path, error),
            })?;
        }
        (hands.make)(&path).map_err(|error| TracingError::of(&path, error))?;
        let mut instance = Self { path, hands, _lock: lock, there: true, clock: "" };
        instance.write("tracing_on", "0")?;
        let mut clocks = CLOCKS.into_iter();
        while let Some(clock) = clocks.next() {
            match instance.write("trace_clock", clock) {
                Ok(()) => {
                    instance.clock = clock;
                    break;
                }
                Err(_) if clocks.len() > 0 => {}
                Err(error) => return Err(error),
            }
        }
        Ok((instance, left))
    }

    /// Now, on its clock; `None` where that is not one that programs can read.
    pub fn now_ns(&self) -> Option<u64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is to a live value.
        let is_read = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) } == 0;
        let now = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        u64::try_from(now.as_nanos()).ok().filter(|_| is_read && self.clock == "mono")
    }

    /// Where its file `name` is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes to one of its files, in one call of the kernel.
    pub fn write(&self, name: &str, text: &str) -> Result<(), TracingError> {
        let path = self.path(name);
        let file = File::options().write(true).open(&path);
        file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
            .map_err(|error| TracingError::of(&path, error))
    }

    /// What stands in one of its files.
    pub fn read(&self, name: &str) -> Result<String, TracingError> {
        let path = self.path(name);
        // `header_page` is there for one call that has room for all of it.
        let mut text = Vec::with_capacity(64 << 10);
        let file = File::open(&path);
        file.and_then(|mut file| io::Read::read_to_end(&mut file, &mut text))
            .map_err(|error| TracingError::of(&path, error))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Removes it; all that reads its files is closed by then.
    pub fn remove(mut self) -> Result<(), TracingError> {
        self.there = false;
        (self.hands.remove)(&self.path).map_err(|error| TracingError::of(&self.path, error))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.there {
            // What was wrong is being told already; the next run tries again.
            let _ = (self.hands.remove)(&self.path);
        }
    }
}
