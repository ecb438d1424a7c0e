//! Maps an address to its area: a hash table with linear probing, read without a lock. A reader that finds an area finds its complete metadata, or
//! that of an area that has replaced it.
//!
//! An area is aligned to its size, so the high bits of an address are the key. The table has four places for each area that there may be. A removed
//! area leaves a tombstone (`GONE`), which another may fill; a lookup ends at the first place that was never used. Worst case, for an address in no
//! area, after long growing and shrinking: all places.
//!
//! Memory ordering. An entry is stored with release after its pointer, and loaded with acquire before it. If the place has gone to another area
//! meanwhile, the reader finds that area's pointer without having seen its entry: so the pointer is stored with release, too, after everything that
//! it leads to, and loaded with acquire. The CPU that fills a place has seen (acquire) the store that removed the last area (release), so the stores
//! of a place's pointers are ordered.

use alloc::boxed::Box;
use core::ptr;

use crate::broken::broken;
use crate::heap::{OutOfMemory, slice};
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

const NEVER: u64 = u64::MAX;
const GONE: u64 = u64::MAX - 1;
const FILLING: u64 = u64::MAX - 2;

/// The bits of an entry for the area's number. The others have room for the key of any memory, which ends below 2^52.
const AREA_BITS: u32 = 18;

/// Area numbers are below this.
pub(super) const AREAS: u64 = 1 << 16;
const _: () = assert!(AREAS + 3 <= 1 << AREA_BITS);

/// Maps the high bits of an address to an area's number and metadata.
#[derive(Debug)]
pub(super) struct Directory<T> {
    places: Box<[Place<T>]>,
    shift: u32,
}

#[derive(Debug)]
struct Place<T> {
    entry: AtomicU64,
    has: AtomicPtr<T>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Leads<T> {
    pub area: usize,
    /// Null, or the pointer that was stored for the area with this address, or for one that has replaced it.
    pub to: *mut T,
}

impl<T> Place<T> {
    /// The place's area, if its entry is for `key`. A key above those of all memory may match a place without an area: the number is no area's then,
    /// and the pointer is null or a removed area's.
    #[inline]
    fn leads(&self, entry: u64, key: u64) -> Option<Leads<T>> {
        let area = (entry & ((1 << AREA_BITS) - 1)) as usize;
        (entry >> AREA_BITS == key).then(|| Leads { area, to: self.has.load(Ordering::Acquire) })
    }
}

fn entry(key: u64, area: usize) -> u64 {
    key << AREA_BITS | area as u64
}

impl<T> Directory<T> {
    pub fn new(areas: usize) -> Result<Self, OutOfMemory> {
        let places = (4 * areas).next_power_of_two();
        let place = |_| Place { entry: AtomicU64::new(NEVER), has: AtomicPtr::new(ptr::null_mut()) };
        Ok(Self {
            places: slice(places, |number| Ok(place(number)))?,
            shift: u64::BITS - places.trailing_zeros(),
        })
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.places)
    }

    #[inline]
    fn first(&self, key: u64) -> usize {
        // Fibonacci hashing: neighbouring areas lie apart.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// The places for `key` in order, and their entries.
    #[inline]
    fn places(&self, key: u64) -> impl Iterator<Item = (&Place<T>, u64)> {
        let first = self.first(key);
        let mask = self.places.len() - 1;
        (0..self.places.len()).map(move |step| {
            let place = &self.places[(first + step) & mask];
            (place, place.entry.load(Ordering::Acquire))
        })
    }

    /// The area with `key`, if it is in the first place: a multiplication and two loads.
    #[inline]
    pub fn find_fast(&self, key: u64) -> Option<Leads<T>> {
        let place = self.places.get(self.first(key))?;
        place.leads(place.entry.load(Ordering::Acquire), key)
    }

    pub fn find(&self, key: u64) -> Option<Leads<T>> {
        for (place, found) in self.places(key) {
            if let Some(leads) = place.leads(found, key) {
                return Some(leads);
            }
            if found == NEVER {
                break;
            }
        }
        None
    }

    /// Adds the area number `area` with the pointer `to`. Its `key` is not in the table.
    pub fn insert(&self, key: u64, area: usize, to: *mut T) {
        for (place, mut found) in self.places(key) {
            while found == NEVER || found == GONE {
                match place.entry.compare_exchange(found, FILLING, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => {
                        place.has.store(to, Ordering::Release);
                        place.entry.store(entry(key, area), Ordering::Release);
                        return;
                    }
                    Err(now) => found = now,
                }
            }
        }
        broken("there are four places for each area")
    }

    /// Removes the area number `area` with `key`.
    pub fn remove(&self, key: u64, area: usize) {
        let ours = entry(key, area);
        if let Some((place, _)) = self.places(key).find(|(_, found)| *found == ours) {
            place.entry.store(GONE, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod support {
    use super::*;

    /// A pointer that tells the area `area`, and leads nowhere.
    pub fn at(area: usize) -> *mut u64 {
        ptr::without_provenance_mut(area + 1)
    }

    /// Looks `key` up, and checks the fast path against the result.
    pub fn found(directory: &Directory<u64>, key: u64) -> Option<(usize, *mut u64)> {
        let plain = |leads: Leads<u64>| (leads.area, leads.to);
        let found = directory.find(key).map(plain);
        // An area that was not there in the first lookup may be there in the second.
        if let (Some(fast), Some(found)) = (directory.find_fast(key), found) {
            assert_eq!(plain(fast), found);
        }
        found
    }
}

#[cfg(all(test, loom))]
#[path = "../../../tests/inside/bounce/swiotlb/directory_model.rs"]
mod tests;

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/bounce/swiotlb/directory.rs"]
mod tests;
