//! Which area an address is in: a hash table that is read without a lock.
//!
//! An area is aligned to its size, so an address's high bits are the key. The table has four places for each area
//! that there may ever be; a lookup ends at the first place that was never used. Worst case, for an address that is in
//! no area, after long growing and shrinking: all places.
//!
//! Memory ordering. An entry is stored with release after all that it leads to, and loaded with acquire.

use alloc::boxed::Box;

use crate::sync::{AtomicU64, Ordering};

/// A place that was never used: an entry of an area that there is not.
const NEVER: u64 = u64::MAX;
/// One whose area is gone.
const GONE: u64 = u64::MAX - 1;

/// Bits of an entry for the area's number. The others have room for any key of memory, which ends below 2^52.
const AREA_BITS: u32 = 18;

/// Areas are numbered from 0 to below this.
pub(super) const AREAS: u64 = 1 << 16;
const _: () = assert!(AREAS + 2 <= 1 << AREA_BITS);

/// From the high bits of an address to an area's number.
#[derive(Debug)]
pub(super) struct Directory {
    places: Box<[AtomicU64]>,
    shift: u32,
}

fn entry(key: u64, area: usize) -> u64 {
    key << AREA_BITS | area as u64
}

/// The area that an entry leads to, if it is for `key`. For a key of no memory at all it may be a number of no area.
#[inline]
fn area_of(entry: u64, key: u64) -> Option<usize> {
    (entry >> AREA_BITS == key).then_some((entry & ((1 << AREA_BITS) - 1)) as usize)
}

impl Directory {
    /// For up to `areas` areas.
    pub fn new(areas: usize) -> Self {
        let places = (4 * areas).next_power_of_two();
        Self {
            places: (0..places).map(|_| AtomicU64::new(NEVER)).collect(),
            shift: u64::BITS - places.trailing_zeros(),
        }
    }

    /// The first place for `key`.
    #[inline]
    fn first(&self, key: u64) -> usize {
        // Fibonacci hashing: neighbouring areas lie apart.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// The places for `key` in turn, and what is there.
    #[inline]
    fn places(&self, key: u64) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let first = self.first(key);
        let mask = self.places.len() - 1;
        (0..self.places.len()).map(move |step| {
            let place = &self.places[(first + step) & mask];
            (place, place.load(Ordering::Acquire))
        })
    }

    /// The number of the area with `key`, if it is in the first place: a multiplication and a load.
    #[inline]
    pub fn find_at_once(&self, key: u64) -> Option<usize> {
        area_of(self.places.get(self.first(key))?.load(Ordering::Acquire), key)
    }

    /// The number of the area with `key`, wherever it is.
    pub fn find(&self, key: u64) -> Option<usize> {
        for (_, found) in self.places(key) {
            if let Some(area) = area_of(found, key) {
                return Some(area);
            }
            if found == NEVER {
                break;
            }
        }
        None
    }

    /// Adds the area number `area` with `key`, which is not in it.
    pub fn insert(&self, key: u64, area: usize) {
        for (place, mut found) in self.places(key) {
            while found == NEVER || found == GONE {
                let new = entry(key, area);
                match place.compare_exchange(found, new, Ordering::Release, Ordering::Relaxed) {
                    Ok(_) => return,
                    Err(now) => found = now,
                }
            }
        }
        debug_assert!(false, "there are four places for each area");
    }

    /// Takes it out again.
    pub fn remove(&self, key: u64, area: usize) {
        let ours = entry(key, area);
        if let Some((place, _)) = self.places(key).find(|(_, found)| *found == ours) {
            place.store(GONE, Ordering::Release);
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Somebody looks an area up while one comes and another goes: the one that stays is always found, and one that
    /// is found is complete.
    #[test]
    fn areas_come_and_go_under_a_reader() {
        loom::model(|| {
            let directory = Arc::new(Directory::new(3));
            let ready = Arc::new(AtomicU64::new(0));
            directory.insert(5, 0);
            directory.insert(9, 1);
            let changer = {
                let (directory, ready) = (Arc::clone(&directory), Arc::clone(&ready));
                thread::spawn(move || {
                    directory.remove(5, 0);
                    ready.store(1, Ordering::Relaxed);
                    directory.insert(7, 2);
                })
            };
            assert_eq!(directory.find(9), Some(1));
            if let Some(area) = directory.find(7) {
                assert_eq!((area, ready.load(Ordering::Relaxed)), (2, 1));
            }
            changer.join().unwrap();
            assert_eq!([5, 7, 9].map(|key| directory.find(key)), [None, Some(2), Some(1)]);
        });
    }

    /// Two areas come at once.
    #[test]
    fn two_come_at_once() {
        loom::model(|| {
            let directory = Arc::new(Directory::new(1));
            let other = Arc::clone(&directory);
            let thread = thread::spawn(move || other.insert(1, 0));
            directory.insert(2, 1);
            thread.join().unwrap();
            assert_eq!([1, 2].map(|key| directory.find(key)), [Some(0), Some(1)]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Areas come and go for long: what is there is found, what is gone is not.
    #[test]
    fn long_growing_and_shrinking() {
        let directory = Directory::new(4);
        for round in 0..1000u64 {
            let keys = [0, round + 1, 7 * round + 1001, 1 << 40].map(|key| key + 3 * round);
            (0..4).for_each(|area| directory.insert(keys[area], area));
            assert_eq!(keys.map(|key| directory.find(key)), [0, 1, 2, 3].map(Some));
            assert_eq!(directory.find(1 << 45), None);
            (0..4).for_each(|area| directory.remove(keys[area], area));
            assert_eq!(keys.map(|key| directory.find(key)), [None; 4]);
        }
    }
}
