//! Linux's own page tables, in a shared library that the user names.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use portcullis::addr::PhysAddr;

use super::table::{Measured, Table};
use crate::rival::{self, RivalError};
use crate::runner::Failure;

type Context = *mut c_void;
type Name = unsafe extern "C" fn(c_int) -> *const c_char;
type New = unsafe extern "C" fn(c_int, c_uint) -> Context;
type Delete = unsafe extern "C" fn(Context);
type Map = unsafe extern "C" fn(Context, u64, u64, usize, usize) -> usize;
type Unmap = unsafe extern "C" fn(Context, u64, usize, usize) -> usize;
type Phys = unsafe extern "C" fn(Context, u64) -> u64;

/// The flag that asks for tables whose walker is not coherent.
const INCOHERENT: c_uint = 2;

/// A format of ours: its name, those of Linux's that are the same in the newest kernel and in 6.12, and
/// whether the library has the latter for walkers that are not coherent.
const FORMATS: [(&str, &str, Option<&str>, bool); 6] = [
    ("arm-s1-4k", "arm s1 new", Some("arm s1 6.12"), true),
    ("arm-s2-4k", "arm s2 new", Some("arm s2 6.12"), true),
    ("amd-v1", "amdv1", None, false),
    ("vtd-ss", "vtdss", None, true),
    ("x86-4", "x86_64", None, true),
    ("riscv-sv48", "riscv64", None, false),
];

/// Whose code it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// The newest that the library was built from.
    Newest,
    /// 6.12.
    V6_12,
}

/// The library's functions. It is never closed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    name: Name,
    new: New,
    delete: Delete,
    map: Map,
    unmap: Unmap,
    phys: Phys,
}

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, RivalError> {
        let library = rival::Library::open(path, "Linux's page tables")?;
        // SAFETY: these are the types that the library's functions have in C.
        unsafe {
            Ok(Self {
                name: library.get("rival_pt_name")?,
                new: library.get("rival_pt_new")?,
                delete: library.get("rival_pt_del")?,
                map: library.get("rival_pt_map")?,
                unmap: library.get("rival_pt_unmap")?,
                phys: library.get("rival_pt_iova_to_phys")?,
            })
        }
    }

    /// The number of the library's format called `name`.
    fn number(&self, name: &str) -> Option<c_int> {
        (0..64).find(|number| {
            // SAFETY: the function takes any number, and returns a constant string, or null.
            let known = unsafe { (self.name)(*number) };
            // SAFETY: it is not null, so a string that ends with 0 and is never freed.
            !known.is_null() && unsafe { CStr::from_ptr(known) }.to_bytes() == name.as_bytes()
        })
    }

    /// Empty tables of our format `format`.
    pub(crate) fn tables(
        &self,
        format: &str,
        kernel: Kernel,
        coherent: bool,
    ) -> Result<Arc<dyn Measured>, Failure> {
        Ok(Arc::new(self.linux(format, kernel, coherent)?))
    }

    /// The same, for a caller who knows that these are Linux's.
    pub(crate) fn linux(&self, format: &str, kernel: Kernel, coherent: bool) -> Result<Linux, Failure> {
        let unsupported = |what: &str| Failure::Unsupported(what.into());
        let (_, newest, old, incoherent) = FORMATS
            .iter()
            .find(|known| known.0 == format)
            .ok_or_else(|| unsupported("the library has no such format"))?;
        let name = match kernel {
            Kernel::Newest => *newest,
            Kernel::V6_12 => old.ok_or_else(|| unsupported("the library has Arm's formats of 6.12 only"))?,
        };
        if !coherent && !incoherent {
            return Err(unsupported("the library has this format for coherent walkers only"));
        }
        let number = self.number(name).ok_or_else(|| unsupported("the library has no such format"))?;
        // SAFETY: the library has a format of that number, and the flag is one that it knows.
        let context = unsafe { (self.new)(number, if coherent { 0 } else { INCOHERENT }) };
        let context = NonNull::new(context).ok_or_else(|| Failure::Refused("no tables were made".into()))?;
        Ok(Linux { library: *self, context })
    }
}

/// One of Linux's page tables.
pub(crate) struct Linux {
    library: Library,
    context: NonNull<c_void>,
}

// SAFETY: tables are not bound to a thread: Linux calls these functions on any CPU.
unsafe impl Send for Linux {}
// SAFETY: as above; the functions are made to be called on several CPUs at once for disjoint ranges.
unsafe impl Sync for Linux {}

impl Table for Linux {
    #[inline]
    fn map(&self, iova: u64, phys: u64, page: u64, pages: u64) -> bool {
        let (page, pages) = (page as usize, pages as usize);
        // SAFETY: the context lives until it is dropped; the function takes any addresses, and only writes
        // tables of its own.
        let mapped = unsafe { (self.library.map)(self.context.as_ptr(), iova, phys, page, pages) };
        mapped == page * pages
    }

    #[inline]
    fn map_list(&self, iova: u64, page: u64, pieces: &[(PhysAddr, u64)]) -> bool {
        // A call for each piece: so Linux's iommu_map_sg does with pieces that do not adjoin.
        let mut at = iova;
        pieces.iter().all(|(phys, _)| {
            let mapped = self.map(at, phys.get(), page, 1);
            at += page;
            mapped
        })
    }

    #[inline]
    fn unmap(&self, iova: u64, page: u64, pages: u64) -> bool {
        let (page, pages) = (page as usize, pages as usize);
        // SAFETY: as in `map`.
        let removed = unsafe { (self.library.unmap)(self.context.as_ptr(), iova, page, pages) };
        removed == page * pages
    }

    #[inline]
    fn phys(&self, iova: u64) -> Option<u64> {
        // SAFETY: as in `map`.
        let phys = unsafe { (self.library.phys)(self.context.as_ptr(), iova) };
        // No workload maps the memory at 0.
        (phys != 0).then_some(phys)
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // SAFETY: the context came from the library, and no other code has it any more.
        unsafe { (self.library.delete)(self.context.as_ptr()) }
    }
}
