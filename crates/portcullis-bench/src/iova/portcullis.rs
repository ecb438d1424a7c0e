//! Portcullis itself, and the structures beside each other: the one behind its lists, and the one that was there.

use std::sync::{Arc, Mutex, PoisonError};

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{Bitmap, BitmapError, IovaSpace, MAX_ORDER, SpaceConfig};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

use super::allocator::{Allocator, Make, Pages};
use super::tree::HoleTree;
use super::workload::Space;
use crate::runner::Failure;

const PAGE: PageSize = PageSize::SIZE_4K;

/// One platform for all spaces, as in a program: a thread that had used several would have to look for its
/// CPU among them.
pub(crate) fn platform() -> StdPlatform {
    StdPlatform::new()
}

/// The whole allocator, called as a domain calls it.
pub(crate) struct Caches {
    platform: StdPlatform,
    space: IovaSpace,
    limit: Iova,
}

pub(crate) fn caches(platform: StdPlatform) -> Make<Caches> {
    Arc::new(move |space| {
        let aperture = IovaRange::new(Iova::new(0), space.pages << PAGE.shift());
        let aperture = aperture.map_err(|error| Failure::Unsupported(error.to_string()))?;
        let config = SpaceConfig::new(aperture, PAGE, platform.cpus());
        let space = IovaSpace::new(&config).map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(Caches { platform: platform.clone(), space, limit: aperture.last() })
    })
}

impl Allocator for Caches {
    type Range = IovaRange;

    #[inline]
    fn alloc(&self, pages: u64) -> Option<IovaRange> {
        let len = pages << PAGE.shift();
        self.space.alloc(&self.platform, len, self.limit).ok()
    }

    #[inline]
    fn free(&self, range: IovaRange) -> bool {
        self.space.free(&self.platform, range).is_ok()
    }

    fn pages(&self, range: IovaRange) -> Pages {
        Pages { first: range.start().get() >> PAGE.shift(), pages: range.len() >> PAGE.shift() }
    }
}

/// An account of free pages.
pub(crate) trait Structure: Send + Sized + 'static {
    /// A structure in which all pages of a space are free.
    fn with_pages(pages: u64) -> Result<Self, BitmapError>;
    fn alloc(&mut self, pages: u64, order: u32, last_page: u64) -> Option<u64>;
    fn free(&mut self, range: Pages) -> bool;
    fn free_pages(&self) -> u64;
}

impl Structure for Bitmap {
    fn with_pages(pages: u64) -> Result<Self, BitmapError> {
        let mut bitmap = Self::new();
        bitmap.add(0, pages)?;
        Ok(bitmap)
    }

    #[inline]
    fn alloc(&mut self, pages: u64, order: u32, last_page: u64) -> Option<u64> {
        self.alloc(pages, order, last_page + 1).ok()
    }

    #[inline]
    fn free(&mut self, range: Pages) -> bool {
        self.free(range.first, range.pages).is_ok()
    }

    fn free_pages(&self) -> u64 {
        self.free_pages()
    }
}

impl Structure for HoleTree {
    fn with_pages(pages: u64) -> Result<Self, BitmapError> {
        let mut tree = Self::new();
        tree.add(0, pages)?;
        Ok(tree)
    }

    #[inline]
    fn alloc(&mut self, pages: u64, order: u32, last_page: u64) -> Option<u64> {
        self.alloc(pages, order, last_page).ok()
    }

    #[inline]
    fn free(&mut self, range: Pages) -> bool {
        self.free(range.first, range.pages).is_ok()
    }

    fn free_pages(&self) -> u64 {
        self.free_pages()
    }
}

/// A structure alone.
pub(crate) struct Backing<S> {
    structure: Mutex<S>,
    last_page: u64,
}

pub(crate) fn backing<S: Structure>() -> Make<Backing<S>> {
    Arc::new(|space: &Space| {
        let structure = S::with_pages(space.pages).map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(Backing { structure: Mutex::new(structure), last_page: space.pages - 1 })
    })
}

impl<S: Structure> Allocator for Backing<S> {
    type Range = Pages;

    #[inline]
    fn alloc(&self, pages: u64) -> Option<Pages> {
        let order = pages.next_power_of_two().trailing_zeros().min(MAX_ORDER);
        let mut structure = self.structure.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Pages { first: structure.alloc(pages, order, self.last_page)?, pages })
    }

    #[inline]
    fn free(&self, range: Pages) -> bool {
        self.structure.lock().unwrap_or_else(PoisonError::into_inner).free(range)
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses_all<A: Allocator>(make: Make<A>) {
        let wide = make(&Space { pages: 1 << 36, live: 1 }).unwrap();
        let range = wide.alloc(1).unwrap();
        assert!(wide.pages(range).first >= 1 << 35, "from the top: {:?}", wide.pages(range));
        assert!(wide.free(range));
        // Pages of a range that is no power of two are its own, and it begins at a multiple of the next one.
        let range = wide.alloc(33).unwrap();
        let Pages { first, pages } = wide.pages(range);
        assert!(first.is_multiple_of(64) && pages == 33);
        assert!(wide.free(range));
    }

    #[test]
    fn each_of_ours_has_the_whole_space() {
        uses_all(caches(platform()));
        uses_all(backing::<Bitmap>());
        uses_all(backing::<HoleTree>());
    }
}
