//! The domain numbers of a unit. One domain at a time has a number, because the unit tags its caches by it.

use alloc::vec::Vec;

use portcullis::addr::DomainId;

use crate::host::UnitError;
use crate::sync::Mutex;

/// The numbers in use. All handles of a unit share one value: see [`Iommu::numbers`](crate::Iommu::numbers).
#[derive(Debug, Default)]
pub struct Numbers {
    taken: Mutex<Vec<u16>>,
}

impl Numbers {
    /// No number is in use.
    pub const fn new() -> Self {
        Self { taken: Mutex::new(Vec::new()) }
    }

    /// Takes `number`, of `first` to `last`, until [`give_back`](Self::give_back). O(n) with n numbers in use.
    ///
    /// # Errors
    /// [`UnitError::NoSuchDomain`], [`UnitError::DomainInUse`], [`UnitError::OutOfMemory`]: nothing has changed.
    pub(crate) fn take(
        &self,
        number: DomainId,
        (first, last): (DomainId, DomainId),
    ) -> Result<(), UnitError> {
        if number < first || number > last {
            return Err(UnitError::NoSuchDomain { domain: number.0, first: first.0, last: last.0 });
        }
        let mut taken = self.taken.lock();
        match taken.binary_search(&number.0) {
            Ok(_) => Err(UnitError::DomainInUse { domain: number.0 }),
            Err(place) => {
                taken.try_reserve(1).map_err(|_| UnitError::OutOfMemory)?;
                taken.insert(place, number.0);
                Ok(())
            }
        }
    }

    /// Releases `number`. Does not allocate.
    pub(crate) fn give_back(&self, number: DomainId) {
        let mut taken = self.taken.lock();
        if let Ok(place) = taken.binary_search(&number.0) {
            taken.remove(place);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_domains_until_it_is_given_back() {
        let (numbers, range) = (Numbers::new(), (DomainId(1), DomainId(5)));
        for number in [3, 1, 5, 2] {
            assert_eq!(numbers.take(DomainId(number), range), Ok(()));
        }
        for number in [1, 2, 3, 5] {
            let in_use = Err(UnitError::DomainInUse { domain: number });
            assert_eq!(numbers.take(DomainId(number), range), in_use);
        }
        for domain in [0, 6] {
            let none = Err(UnitError::NoSuchDomain { domain, first: 1, last: 5 });
            assert_eq!(numbers.take(DomainId(domain), range), none);
        }
        numbers.give_back(DomainId(3));
        numbers.give_back(DomainId(4));
        assert_eq!(numbers.take(DomainId(3), range), Ok(()));
        assert_eq!(numbers.take(DomainId(3), range), Err(UnitError::DomainInUse { domain: 3 }));
        assert_eq!(numbers.take(DomainId(4), range), Ok(()));
    }
}
