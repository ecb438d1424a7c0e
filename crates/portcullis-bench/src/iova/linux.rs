//! Linux's own allocator, in a shared library that the user names.

use std::ffi::{c_uint, c_ulong, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::allocator::{Allocator, Make, Pages};
use crate::rival::{self, RivalError};
use crate::runner::Failure;

type Domain = *mut c_void;
type New = unsafe extern "C" fn() -> Domain;
type Delete = unsafe extern "C" fn(Domain);
type AllocFast = unsafe extern "C" fn(Domain, c_ulong, c_ulong, bool) -> c_ulong;
type FreeFast = unsafe extern "C" fn(Domain, c_ulong, c_ulong);

/// The library's functions. It is never closed: it keeps memory for each thread that has used it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    new: New,
    delete: Delete,
    alloc: AllocFast,
    free: FreeFast,
    /// CPUs that the library has caches for.
    cpus: usize,
}

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, RivalError> {
        let library = rival::Library::open(path, "Linux's IOVA allocator")?;
        // SAFETY: these are the types that the library's functions and its variable have in C.
        unsafe {
            Ok(Self {
                new: library.get("peer_iova_new")?,
                delete: library.get("peer_iova_del")?,
                alloc: library.get("alloc_iova_fast")?,
                free: library.get("free_iova_fast")?,
                cpus: *library.get::<*const c_uint>("kshim_ncpu")? as usize,
            })
        }
    }
}

/// One of Linux's `iova_domain`s.
pub(crate) struct Linux {
    library: Library,
    domain: NonNull<c_void>,
    last_page: u64,
}

// SAFETY: a domain is not bound to a thread: Linux calls these functions on any CPU, with locks of its own.
unsafe impl Send for Linux {}
// SAFETY: as above; the functions are made to be called on several CPUs at once for one domain.
unsafe impl Sync for Linux {}

/// The library's own preparation for its first domain takes no lock.
static CREATING: Mutex<()> = Mutex::new(());

/// Makes domains; `last_core` is the highest core that any thread of the team runs on.
pub(crate) fn make(library: &Library, last_core: Option<usize>) -> Make<Linux> {
    let library = *library;
    Arc::new(move |space| {
        if last_core.is_none_or(|core| core >= library.cpus) {
            let reason = format!("the library has caches for {} CPUs only", library.cpus);
            return Err(Failure::Unsupported(reason));
        }
        let _one_at_a_time = CREATING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: it takes no argument, and no other thread is in it.
        let domain = unsafe { (library.new)() };
        let domain = NonNull::new(domain).ok_or_else(|| Failure::Refused("no domain was made".into()))?;
        Ok(Linux { library, domain, last_page: space.pages - 1 })
    })
}

impl Allocator for Linux {
    type Range = Pages;

    #[inline]
    fn alloc(&self, pages: u64) -> Option<Pages> {
        // SAFETY: the domain lives until it is dropped. The library finds its cache by the CPU it runs on:
        // only the team's threads call this, none of which leaves its core, and `make` has seen that the
        // library has a cache for each.
        let first = unsafe { (self.library.alloc)(self.domain.as_ptr(), pages, self.last_page, true) };
        // Page 0 is never handed out and means that there was no room.
        (first != 0).then_some(Pages { first, pages })
    }

    #[inline]
    fn free(&self, range: Pages) -> bool {
        // SAFETY: as in `alloc`; the range came from there and is given back once.
        unsafe { (self.library.free)(self.domain.as_ptr(), range.first, range.pages) };
        true
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // SAFETY: the domain came from the library, and no other code has it any more. This may run on any
        // thread: it does not use the caches of the CPU it runs on.
        unsafe { (self.library.delete)(self.domain.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::Space;
    use super::*;
    use crate::rival::noted::{self, note};

    unsafe extern "C" fn new() -> Domain {
        note("new".into());
        std::ptr::dangling_mut()
    }

    unsafe extern "C" fn none() -> Domain {
        std::ptr::null_mut()
    }

    unsafe extern "C" fn delete(_: Domain) {
        note("delete".into());
    }

    unsafe extern "C" fn alloc(_: Domain, pages: c_ulong, last: c_ulong, flush: bool) -> c_ulong {
        note(format!("alloc {pages} {last} {flush}"));
        if pages == 7 { 0 } else { 40 }
    }

    unsafe extern "C" fn free(_: Domain, first: c_ulong, pages: c_ulong) {
        note(format!("free {first} {pages}"));
    }

    #[test]
    fn a_domain_is_asked_for_pages_up_to_the_last_of_the_space() {
        let library = Library { new, delete, alloc, free, cpus: 4 };
        let space = Space { pages: 1 << 20, live: 1 };
        for last_core in [Some(4), Some(9), None] {
            let refused = make(&library, last_core)(&space).err();
            assert_eq!(refused, Some(Failure::Unsupported("the library has caches for 4 CPUs only".into())));
        }
        let refused = make(&Library { new: none, ..library }, Some(0))(&space).err();
        assert_eq!(refused, Some(Failure::Refused("no domain was made".into())));
        let domain = make(&library, Some(3))(&space).unwrap();
        let range = domain.alloc(3).unwrap();
        assert_eq!((range, domain.pages(range)), (Pages { first: 40, pages: 3 }, range));
        assert!(domain.free(range) && domain.aligned());
        assert_eq!(domain.alloc(7), None, "page 0 is none");
        drop(domain);
        let expected = ["new", "alloc 3 1048575 true", "free 40 3", "alloc 7 1048575 true", "delete"];
        assert_eq!(noted::calls(), expected);
    }
}
