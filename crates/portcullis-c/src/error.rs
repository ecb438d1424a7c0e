//! Results of functions, and the text of the last error.

use std::cell::UnsafeCell;
use std::collections::TryReserveError;
use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::io::Write;

use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::domain::{MapListError, UnmapError};
use portcullis::pgtable::MapError;
use portcullis_linux::vfio::OpenError;

/// The result of a function.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisError {
    /// Success.
    PortcullisOk = 0,
    /// An argument is null, or out of its range. Nothing has happened.
    PortcullisArgument = 1,
    /// The device was not opened: the text says what to do.
    PortcullisOpen = 2,
    /// Out of memory. Nothing has happened.
    PortcullisMemory = 3,
    /// The queue or the pool is full. Nothing has happened: unmap or commit something, and call again.
    PortcullisFull = 4,
    /// The kernel's limit of locked memory or of mappings is reached. Nothing has happened.
    PortcullisLimit = 5,
    /// The buffer was refused: it has no bytes, is too long, or is to be mapped and is not memory of this process; or no addresses are left
    /// for it. Nothing has happened.
    PortcullisRefused = 6,
    /// There is no such mapping, or it is of another length. Nothing has happened.
    PortcullisNotMapped = 7,
    /// **The device may still reach the memory.** The caller must neither reuse nor free it.
    PortcullisReachable = 8,
    /// A system call failed.
    PortcullisSystem = 9,
    /// The mapping is over for the driver, but **the device may still reach the memory** until the queue's next successful commit.
    PortcullisWaits = 10,
    /// The mapping has not ended, and can be unmapped again.
    PortcullisNotEnded = 11,
    /// The device was released by portcullis_device_release.
    PortcullisReleased = 12,
}

pub(crate) use PortcullisError::*;

/// Bytes of an error's text, including the final zero.
const TEXT: usize = 1024;

thread_local! {
    /// The text of this thread's last error, preallocated, so that an out-of-memory error needs no memory.
    static LAST: UnsafeCell<[u8; TEXT]> = const { UnsafeCell::new([0; TEXT]) };
}

/// An error, whose text is this thread's last.
pub(crate) struct Failed(PortcullisError);

pub(crate) type Result<T> = std::result::Result<T, Failed>;

impl Failed {
    #[cold]
    pub(crate) fn new(code: PortcullisError, text: impl Display) -> Self {
        LAST.with(|last| {
            // SAFETY: only this thread has it, `Display` of the library's errors calls no function of this crate, and C programs read it
            // between calls.
            let last = unsafe { &mut *last.get() };
            let mut rest = &mut last[..TEXT - 1];
            // Truncates a longer text.
            let _ = write!(rest, "{text}");
            let left = rest.len();
            last[TEXT - 1 - left] = 0;
        });
        Self(code)
    }

    #[cold]
    pub(crate) fn argument(text: &str) -> Self {
        Self::new(PortcullisArgument, text)
    }

    #[cold]
    pub(crate) fn system(what: &str, error: &std::io::Error) -> Self {
        Self::new(PortcullisSystem, format_args!("{what}: {error}"))
    }
}

impl From<TryReserveError> for Failed {
    fn from(error: TryReserveError) -> Self {
        Self::new(PortcullisMemory, error)
    }
}

impl From<OpenError> for Failed {
    fn from(error: OpenError) -> Self {
        Self::new(PortcullisOpen, error)
    }
}

impl From<DmaMapError> for Failed {
    fn from(error: DmaMapError) -> Self {
        let code = match error {
            _ if error.is_full() => PortcullisFull,
            DmaMapError::List(list) => return list.into(),
            DmaMapError::NoBuffer { .. } | DmaMapError::OutOfMemory => PortcullisMemory,
            _ => PortcullisRefused,
        };
        Self::new(code, error)
    }
}

impl From<MapListError> for Failed {
    fn from(error: MapListError) -> Self {
        let code = match error {
            MapListError::Unconfirmed { .. } | MapListError::Map(MapError::Unconfirmed) => {
                PortcullisReachable
            }
            MapListError::NoFrames { .. } | MapListError::Map(MapError::OutOfMemory) => PortcullisMemory,
            MapListError::Map(MapError::Limit { .. }) => PortcullisLimit,
            _ => PortcullisRefused,
        };
        Self::new(code, error)
    }
}

impl From<DmaUnmapError> for Failed {
    fn from(error: DmaUnmapError) -> Self {
        let code = match error {
            DmaUnmapError::OtherQueue
            | DmaUnmapError::NotMapped { .. }
            | DmaUnmapError::OutOfRange { .. } => PortcullisNotMapped,
            _ => PortcullisReachable,
        };
        Self::new(code, error)
    }
}

impl From<UnmapError> for Failed {
    fn from(error: UnmapError) -> Self {
        Self::new(PortcullisReachable, error)
    }
}

/// Runs a function's body, and returns its code. (A panic aborts, because none may unwind through C.)
#[inline]
pub(crate) fn code(f: impl FnOnce() -> Result<()>) -> c_int {
    match f() {
        Ok(()) => PortcullisOk as c_int,
        Err(Failed(code)) => code as c_int,
    }
}

/// Leaks a value to C: `Box::from_raw` frees it.
pub(crate) fn given<T>(value: T) -> Result<*mut T> {
    let mut one = Vec::new();
    one.try_reserve_exact(1)?;
    one.push(value);
    // A slice of one has the layout of its element.
    Ok(Box::into_raw(one.into_boxed_slice()).cast())
}

/// The text of this thread's last error, in a sentence; empty if there was none. Valid until the thread's next error; truncated after 1,023
/// bytes.
#[unsafe(no_mangle)]
pub extern "C" fn portcullis_error_text() -> *const c_char {
    LAST.with(|last| last.get().cast_const().cast())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use portcullis::addr::{Iova, IovaRange};
    use portcullis::invalidation::InvalidationError;

    use super::*;

    fn text() -> String {
        // SAFETY: a string of this thread's, valid until the next error.
        unsafe { CStr::from_ptr(portcullis_error_text()) }.to_str().expect("text").to_owned()
    }

    fn said(failed: impl Into<Failed>, code: PortcullisError, words: &str) {
        let Failed(found) = failed.into();
        assert_eq!(found, code, "{}", text());
        assert!(text().contains(words), "{:?} and not {words:?}", text());
    }

    #[test]
    fn each_error_has_the_code_that_says_what_holds() {
        let range = IovaRange::new(Iova::new(0x1000), 0x1000).expect("a range");
        let error = InvalidationError::Rejected { code: 5 };
        said(DmaMapError::Full, PortcullisFull, "ring is full");
        said(DmaMapError::OutOfMemory, PortcullisMemory, "no memory");
        said(DmaMapError::NoBuffer { bytes: 1, held: 2 }, PortcullisMemory, "no 1 bytes");
        said(
            DmaMapError::TooLong { len: 2, most: 1 },
            PortcullisRefused,
            "2 bytes in one piece: a mapping has 1 to 1",
        );
        said(DmaMapError::List(MapListError::EmptyList), PortcullisRefused, "no segments");
        said(MapListError::Unconfirmed { error }, PortcullisReachable, "may still reach");
        said(DmaMapError::List(MapListError::Unconfirmed { error }), PortcullisReachable, "may still reach");
        said(MapListError::NoFrames { frames: 3 }, PortcullisMemory, "no 3 free frames");
        said(MapListError::Map(MapError::OutOfMemory), PortcullisMemory, "memory");
        said(MapListError::Map(MapError::Unconfirmed), PortcullisReachable, "");
        let limit = MapError::Limit { what: "mappings", used: 1, wanted: 2, most: 2 };
        said(DmaMapError::List(MapListError::Map(limit)), PortcullisLimit, "mappings");
        said(MapListError::Map(MapError::Refused { code: 14 }), PortcullisRefused, "14");
        said(DmaUnmapError::OtherQueue, PortcullisNotMapped, "another queue");
        said(DmaUnmapError::NotMapped { iova: range.start() }, PortcullisNotMapped, "no mapping");
        let part = DmaUnmapError::OutOfRange { iova: range.start(), offset: 0, len: 1, mapped: 2 };
        said(part, PortcullisNotMapped, "has 2");
        said(DmaUnmapError::Unconfirmed { error }, PortcullisReachable, "may still reach");
        said(DmaUnmapError::StillMapped { range, kept: 1 }, PortcullisReachable, "still reach");
        said(DmaUnmapError::Busy { iova: range.start() }, PortcullisReachable, "another caller");
    }

    #[test]
    fn a_text_is_the_thread_s_own_and_is_cut() {
        said(Failed::argument(&"x".repeat(2 * TEXT)), PortcullisArgument, &"x".repeat(TEXT - 1));
        assert_eq!(text().len(), TEXT - 1);
        assert_eq!(std::thread::spawn(text).join().expect("a thread"), "");
        said(Failed::argument("short"), PortcullisArgument, "short");
        assert_eq!(text(), "short");
    }
}
