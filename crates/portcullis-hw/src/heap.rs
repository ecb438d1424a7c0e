//! Lists and maps on the kernel's heap, which may have no memory left: that is a
//! [`UnitError::OutOfMemory`] here, where the standard collections end the program.

use alloc::vec::Vec;

use crate::host::UnitError;

/// Room for `count` values more.
pub(crate) fn reserve<T>(list: &mut Vec<T>, count: usize) -> Result<(), UnitError> {
    list.try_reserve(count).map_err(|_| UnitError::OutOfMemory)
}

/// `count` values, each made by `value`.
pub(crate) fn filled<T>(count: usize, value: impl FnMut() -> T) -> Result<Vec<T>, UnitError> {
    let mut list = Vec::new();
    reserve(&mut list, count)?;
    list.resize_with(count, value);
    Ok(list)
}

/// Values by their keys, in order. A look-up is O(log n); an insertion moves what is behind it, for
/// what a unit gets once.
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

    /// The value of `key`, which `value` makes where there is none.
    ///
    /// # Errors
    /// [`UnitError::OutOfMemory`], or what `value` returns: nothing has changed. `value` is called
    /// only where there is room for what it makes.
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
