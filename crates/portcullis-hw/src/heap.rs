//! Fallible collections: out of memory is [`UnitError::OutOfMemory`], where the standard ones abort.

use alloc::vec::Vec;

use crate::host::UnitError;

pub(crate) fn reserve<T>(list: &mut Vec<T>, count: usize) -> Result<(), UnitError> {
    list.try_reserve(count).map_err(|_| UnitError::OutOfMemory)
}

pub(crate) fn filled<T>(count: usize, value: impl FnMut() -> T) -> Result<Vec<T>, UnitError> {
    let mut list = Vec::new();
    reserve(&mut list, count)?;
    list.resize_with(count, value);
    Ok(list)
}

/// A sorted map. A look-up is O(log n); an insertion moves all later entries, for values that a unit gets once.
#[derive(Debug)]
pub(crate) struct Map<K, V>(Vec<(K, V)>);

impl<K: Ord + Copy, V> Map<K, V> {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    fn place(&self, key: K) -> Result<usize, usize> {
        self.0.binary_search_by_key(&key, |(key, _)| *key)
    }

    pub fn get(&self, key: K) -> Option<&V> {
        self.place(key).ok().map(|place| &self.0[place].1)
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.place(key).ok().map(|place| &mut self.0[place].1)
    }

    /// Returns the value of `key`, or inserts the one that `value` makes.
    ///
    /// # Errors
    /// [`UnitError::OutOfMemory`], or the error of `value`: nothing has changed. `value` is called only if there is room.
    pub fn get_or_insert(
        &mut self,
        key: K,
        value: impl FnOnce() -> Result<V, UnitError>,
    ) -> Result<&mut V, UnitError> {
        let place = match self.place(key) {
            Ok(place) => place,
            Err(place) => {
                reserve(&mut self.0, 1)?;
                self.0.insert(place, (key, value()?));
                place
            }
        };
        Ok(&mut self.0[place].1)
    }

    pub fn keys(&self) -> impl Iterator<Item = K> {
        self.0.iter().map(|(key, _)| *key)
    }

    pub fn into_values(self) -> impl Iterator<Item = V> {
        self.0.into_iter().map(|(_, value)| value)
    }
}
