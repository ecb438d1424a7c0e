//! Portcullis's engine, and the same behind a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::{Frames, Platform};
use portcullis::std_platform::StdPlatform;

use super::table::Table;
use crate::runner::Failure;

/// A page table, called as a mapper calls it.
pub(crate) struct Tables<F: Frames, X: Format> {
    table: PageTable<F, X>,
    platform: StdPlatform,
    /// Not a constant, as it is none for a mapper.
    permissions: Permissions,
}

impl<F: Frames, X: Format> Tables<F, X> {
    pub(crate) fn new(frames: F, format: X, platform: &StdPlatform) -> Result<Self, Failure> {
        let table = PageTable::for_cpus(frames, format, platform.cpus());
        let table = table.map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(Self { table, platform: platform.clone(), permissions: Permissions::READ_WRITE })
    }
}

impl<F: Frames, X: Format> Table for Tables<F, X> {
    #[inline]
    fn map(&self, iova: u64, phys: u64, page: u64, pages: u64) -> bool {
        let Ok(range) = IovaRange::new(Iova::new(iova), page * pages) else {
            return false;
        };
        let phys = PhysAddr::new(phys);
        // SAFETY: no hardware walks the table.
        unsafe { self.table.map(&self.platform, range, phys, self.permissions) }.is_ok()
    }

    #[inline]
    fn map_list(&self, iova: u64, page: u64, pieces: &[(PhysAddr, u64)]) -> bool {
        let Ok(range) = IovaRange::new(Iova::new(iova), page * pieces.len() as u64) else {
            return false;
        };
        let list = pieces.iter().copied();
        // SAFETY: no hardware walks the table.
        unsafe { self.table.map_list(&self.platform, range, list, self.permissions) }.is_ok()
    }

    #[inline]
    fn unmap(&self, iova: u64, page: u64, pages: u64) -> bool {
        let Ok(range) = IovaRange::new(Iova::new(iova), page * pages) else {
            return false;
        };
        // SAFETY: no hardware walks the table.
        unsafe { self.table.unmap(&self.platform, range, &mut |_| true) }.bytes == range.len()
    }

    #[inline]
    fn phys(&self, iova: u64) -> Option<u64> {
        self.table.iova_to_phys(&self.platform, Iova::new(iova)).map(PhysAddr::get)
    }
}

/// A subject that one thread uses at a time.
pub(crate) struct Locked<T>(Mutex<T>);

impl<T> Locked<T> {
    pub(crate) fn new(table: T) -> Self {
        Self(Mutex::new(table))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Table> Table for Locked<T> {
    #[inline]
    fn map(&self, iova: u64, phys: u64, page: u64, pages: u64) -> bool {
        self.lock().map(iova, phys, page, pages)
    }

    #[inline]
    fn map_list(&self, iova: u64, page: u64, pieces: &[(PhysAddr, u64)]) -> bool {
        self.lock().map_list(iova, page, pieces)
    }

    #[inline]
    fn unmap(&self, iova: u64, page: u64, pages: u64) -> bool {
        self.lock().unmap(iova, page, pages)
    }

    #[inline]
    fn phys(&self, iova: u64) -> Option<u64> {
        self.lock().phys(iova)
    }
}
