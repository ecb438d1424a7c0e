//! Device-TLB (ATC) invalidation: the devices of a domain that cache translations themselves (PCIe's Address Translation Services, ATS).
//! After `Ok` of [`DeviceTlbs::submit`], each of them has dropped the same translations as the IOTLB. A domain without such devices pays
//! two loads for each wait.
//!
//! **Order.** The IOTLB comes first: a device that dropped a translation earlier could fetch it from there again. Both are in one
//! submission, if it holds them, and share its wait.
//!
//! **Adding a device.** An invalidation may miss a device that is just being added. No harm is done, as the device cannot fetch the
//! translations in question:
//!
//! - [`add`](DeviceTlbs::add) stores the device in the set, fences, and then invalidates the domain in the IOTLB. The device may fetch
//!   translations only after that;
//! - [`submit`](DeviceTlbs::submit) is called after the page-table entries were cleared (by any CPU). It submits for the devices that it
//!   finds, and reads the set again *after the confirmation*.
//!
//! The check after the confirmation decides. The queue's `Ok` says that the hardware reads from then on what the caller has stored; so all
//! later walks find the entries cleared before the set is read, without a fence here. If the check finds the device, everything is
//! submitted again with it. If not, `add`'s store comes later, and so do the device's walks, after `add`'s fence: they find the entries
//! cleared. `add`'s invalidation drops what the IOTLB had of them, and ends older walks. (The read before the submission may be older than
//! the clearing; it only saves a second submission.)
//!
//! Until `add`'s invalidation is confirmed, the device is *being added*. It gets invalidations like the others, but another `add` does not
//! take it for present, as the device may not fetch yet; nor do the calls that take a device out.
//!
//! **Removing a device.** A device fetches nothing any more when [`remove`](DeviceTlbs::remove) is called, and is taken out of the set
//! after it has confirmed a device-TLB invalidation of everything. That store is `Release`, and the set is loaded with `Acquire`: a caller
//! that does not find the device acts after that confirmation.

use arrayvec::ArrayVec;

use super::{Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::{DeviceId, DomainId};
use crate::guard::Guard;
use crate::sync::{AtomicU64, Mutex, Ordering, fence};

/// The most devices with a TLB of their own in a domain.
pub const MOST_DEVICE_TLBS: usize = if cfg!(loom) { 2 } else { 16 };

/// The most ranges that are invalidated one by one in a device, which answers each request over the bus. Above that, it drops all.
const RANGES: usize = 8;

/// The most requests in one submission: eight ranges in the IOTLB and in one device, or one range in the IOTLB and in all devices. More
/// take several submissions, as a kernel's stack has no room for a longer list.
const REQUESTS: usize = 20;

/// A free place. A taken one holds the device's number plus one.
const FREE: u64 = 0;

/// Set beside that number while the device is being added.
const ADDING: u64 = 1 << 63;

/// The devices of one domain that cache translations themselves: up to 16. Any number of CPUs may use it at once. A submission takes no
/// lock; adding a device takes one while it looks for the device, not while hardware works.
#[derive(Debug)]
pub struct DeviceTlbs {
    domain: DomainId,
    /// Places in use. Each change under way may make it one too high, never too low.
    count: AtomicU64,
    places: [AtomicU64; MOST_DEVICE_TLBS],
    /// Held while a device is looked up and gets a place, so that no device gets two.
    adding: Mutex<()>,
}

impl DeviceTlbs {
    /// An empty set for `domain`.
    pub fn new(domain: DomainId) -> Self {
        let places = core::array::from_fn(|_| AtomicU64::new(FREE));
        Self { domain, count: AtomicU64::new(0), places, adding: Mutex::new(()) }
    }

    /// As [`TableMapper::add_device_tlb`](crate::mapper::TableMapper::add_device_tlb), by `queue`, which is the domain's. While another call
    /// is adding the device, returns an error at once, as that call's result is not known yet.
    ///
    /// # Errors
    /// [`InvalidationError`]: it is not added, and must not fetch translations.
    pub fn add<Q: InvalidationQueue>(&self, device: DeviceId, queue: &Q) -> Result<(), InvalidationError> {
        let number = number(device);
        let Some(place) = self.take_place(number)? else {
            return Ok(());
        };
        // Runs also if the queue panics.
        let adding = Guard::new(|| self.free(place, number | ADDING));
        // Orders the set before the walks for the device: see the module's documentation.
        fence(Ordering::SeqCst);
        queue.invalidate(self.domain, Invalidation::Domain)?;
        adding.done();
        // Release: a CPU that finds it comes after the invalidation. No other caller changes the place of a device that is being added.
        place.store(number, Ordering::Release);
        Ok(())
    }

    fn take_place(&self, number: u64) -> Result<Option<&AtomicU64>, InvalidationError> {
        let _adding = self.adding.lock();
        if self.place(number).is_some() {
            return Ok(None);
        }
        let value = number | ADDING;
        if self.place(value).is_some() {
            return Err(InvalidationError::BeingAdded);
        }
        // Before the place is taken: a caller that reads 0 does not read the places.
        self.count.fetch_add(1, Ordering::Relaxed);
        let taken = self
            .places
            .iter()
            .find(|place| place.compare_exchange(FREE, value, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        match taken {
            Some(place) => Ok(Some(place)),
            None => {
                self.count.fetch_sub(1, Ordering::Release);
                Err(InvalidationError::TooManyDevices { limit: MOST_DEVICE_TLBS })
            }
        }
    }

    /// As [`TableMapper::remove_device_tlb`](crate::mapper::TableMapper::remove_device_tlb), by `queue`. Does nothing for a device that is not
    /// there, or is being added.
    ///
    /// # Errors
    /// [`InvalidationError`]: the device may still use its cached translations, and stays in the set.
    ///
    /// # Safety
    /// 1. **The device fetches no translation of the domain**, from the call on until another [`add`](Self::add) that began after it has
    ///    returned `Ok`: unmaps do not invalidate its TLB meanwhile.
    /// 2. `queue` is the domain's.
    pub unsafe fn remove<Q: InvalidationQueue>(
        &self,
        device: DeviceId,
        queue: &Q,
    ) -> Result<(), InvalidationError> {
        let value = number(device);
        if let Some(place) = self.place(value) {
            queue.invalidate(self.domain, Invalidation::DeviceTlb { device, range: None })?;
            self.free(place, value);
        }
        Ok(())
    }

    /// As [`TableMapper::forget_device_tlb`](crate::mapper::TableMapper::forget_device_tlb). Does nothing for a device that is being added.
    ///
    /// # Safety
    /// 1. **The device reaches nothing by its cached translations**, and its accesses under way are complete.
    /// 2. It fetches no translation of the domain, from the call on until another [`add`](Self::add) that began after it has returned `Ok`.
    pub unsafe fn forget(&self, device: DeviceId) {
        let value = number(device);
        if let Some(place) = self.place(value) {
            self.free(place, value);
        }
    }

    /// Submits `requests`, which are for the IOTLB, to `queue`, and after them the same for the TLBs of all devices in the set. Returns
    /// when all is confirmed.
    ///
    /// Each device gets up to eight ranges one by one; for more, or for the whole domain, it drops all. Takes one submission, and one more
    /// for every 20 requests beyond the first 20, in the same order. Without devices it costs two loads more than the submission. For each
    /// device that is added meanwhile, everything is submitted at most once more.
    ///
    /// Context: waits for hardware. The caller holds no lock and no CPU. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: the IOTLB and all devices may still use the translations.
    pub fn submit<Q: InvalidationQueue>(
        &self,
        queue: &Q,
        requests: &[Request],
    ) -> Result<(), InvalidationError> {
        // Acquire: after the last `remove` that it sees.
        if self.count.load(Ordering::Acquire) == 0 {
            queue.submit(requests)?;
            // After the confirmation, so this read decides: see the module's documentation.
            if self.count.load(Ordering::Acquire) == 0 {
                return Ok(());
            }
        }
        self.submit_to_devices(queue, requests)
    }

    #[cold]
    fn submit_to_devices<Q: InvalidationQueue>(
        &self,
        queue: &Q,
        requests: &[Request],
    ) -> Result<(), InvalidationError> {
        let mut asked = self.devices();
        loop {
            self.submit_with(queue, requests, &asked)?;
            let there = self.devices();
            if there.iter().all(|device| asked.contains(device)) {
                return Ok(());
            }
            asked = there;
        }
    }

    #[inline(never)]
    fn submit_with<Q: InvalidationQueue>(
        &self,
        queue: &Q,
        requests: &[Request],
        devices: &[DeviceId],
    ) -> Result<(), InvalidationError> {
        let range = |request: &Request| match request.invalidation {
            Invalidation::Range { range, .. } => Some(range),
            _ => None,
        };
        let by_range = requests.len() <= RANGES && requests.iter().all(|request| range(request).is_some());
        // Each device gets all ranges, or one request for everything.
        let for_each = if by_range { requests } else { requests.get(..1).unwrap_or_default() };
        let of_devices = devices.iter().flat_map(|device| {
            let of_device = |request| {
                let range = range(request).filter(|_| by_range);
                Request {
                    domain: self.domain,
                    invalidation: Invalidation::DeviceTlb { device: *device, range },
                }
            };
            for_each.iter().map(of_device)
        });
        let mut together: ArrayVec<Request, REQUESTS> = ArrayVec::new();
        for request in requests.iter().copied().chain(of_devices) {
            if together.is_full() {
                queue.submit(&together)?;
                together.clear();
            }
            together.push(request);
        }
        queue.submit(&together)
    }

    fn devices(&self) -> ArrayVec<DeviceId, MOST_DEVICE_TLBS> {
        // Acquire: after the last `remove` that it sees.
        self.places.iter().filter_map(|place| device(place.load(Ordering::Acquire))).collect()
    }

    fn place(&self, value: u64) -> Option<&AtomicU64> {
        // Acquire: after the invalidation of an `add` that has returned.
        self.places.iter().find(|place| place.load(Ordering::Acquire) == value)
    }

    /// Frees the place of a device that holds `value`, unless another call has taken the device out.
    fn free(&self, place: &AtomicU64, value: u64) {
        // Release: a CPU that finds the place free, or reads a count of 0, comes after the device dropped everything; or, after `forget`,
        // reaches nothing; or was never allowed to fetch.
        if place.compare_exchange(value, FREE, Ordering::Release, Ordering::Relaxed).is_ok() {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

fn number(device: DeviceId) -> u64 {
    u64::from(device.0) + 1
}

fn device(number: u64) -> Option<DeviceId> {
    u32::try_from((number & !ADDING).checked_sub(1)?).ok().map(DeviceId)
}
