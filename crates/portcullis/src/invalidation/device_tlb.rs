//! The devices of a domain that cache translations themselves (PCIe's Address Translation Services,
//! ATS). Where [`DeviceTlbs::submit`] returns `Ok`, each of them has forgotten what the IOTLB was
//! asked to forget.
//!
//! What such a device has fetched it uses without asking the IOMMU again, until *it* is told to
//! forget: an unmap that ended with the IOTLB would leave the device all that it had. So after the
//! IOTLB each of these devices is asked, too. [`DeviceTlbs`] is the set of them, of one domain. A
//! domain that has none pays for two loads each time it waits for hardware.
//!
//! **Order.** The IOTLB forgets first: a device that forgot before it could fetch the old translation from there
//! again. Both are in one submission, as long as that holds them, and share its wait.
//!
//! **A device that comes.** An invalidation may miss a device that is just being added. That is no harm, as what
//! the invalidation is about is then nothing that the device can fetch:
//!
//! - [`add`](DeviceTlbs::add) stores the device in the set, fences, and then has the IOTLB forget the domain; the
//!   device may fetch translations only after that;
//! - [`submit`](DeviceTlbs::submit) is called after the page-table entries were cleared (another
//!   CPU may have cleared them, before the call). It submits for the devices that it finds, and
//!   looks again *when that is confirmed*.
//!
//! The second look is the one that counts. The queue's `Ok` says that whatever the hardware reads
//! from then on is what the caller has stored, and comes from the hardware: so the entries are
//! cleared for all walks before the set is looked at, without a fence of our own. If the device is
//! found, it is asked then (and the IOTLB again). If it is not, `add`'s store comes later, and
//! after its fence so do the walks for the device, which find the entries cleared; what the IOTLB
//! had of them is forgotten, and older walks end with `add`'s invalidation. (A look before the
//! submission alone, without a fence, might be older than the clearing; it only saves a device that
//! is there a second submission.)
//!
//! Until that invalidation is confirmed a device is *coming*: it is asked like the others, but
//! another `add` does not find it there, as that must not say that the device may fetch; nor do the
//! calls that take a device out.
//!
//! **A device that goes** fetches nothing any more when [`remove`](DeviceTlbs::remove) is called,
//! and is taken out of the set after it has confirmed that it forgot everything. That store is
//! `Release` and the loads of the set are `Acquire`: whatever a caller does that does not find the
//! device comes after that confirmation.

use arrayvec::ArrayVec;

use super::{Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::{DeviceId, DomainId};
use crate::guard::Guard;
use crate::sync::{AtomicU64, Mutex, Ordering, fence};

/// The number of devices with a TLB of their own that a domain can have.
pub const MOST_DEVICE_TLBS: usize = if cfg!(loom) { 2 } else { 16 };

/// The number of ranges that a device is asked for one by one; where there are more, it forgets all
/// that it has. (It answers each request over the bus.)
const RANGES: usize = 8;

/// The number of requests in one submission: eight ranges in the IOTLB and in a device, or one in it and in all devices. More
/// take several submissions, as a kernel's stack has no room for a longer list.
const REQUESTS: usize = 20;

/// A free place in the set. A place that is taken holds one more than the device's number.
const FREE: u64 = 0;

/// The bit that is set beside that number while the device is coming.
const COMING: u64 = 1 << 63;

/// The devices of one domain that cache translations themselves: up to 16.
///
/// Any number of CPUs may use it at once. A submission takes no lock. Adding a device takes one to
/// look whether the device is there; it is not held while hardware works.
#[derive(Debug)]
pub struct DeviceTlbs {
    domain: DomainId,
    /// Places in use; while one is being taken or given up it may be one too many, and never one too few.
    count: AtomicU64,
    places: [AtomicU64; MOST_DEVICE_TLBS],
    /// A caller holds it from looking for a device until that has a place, so no device gets two places.
    adding: Mutex<()>,
}

impl DeviceTlbs {
    /// Makes an empty set, for `domain`.
    pub fn new(domain: DomainId) -> Self {
        let places = core::array::from_fn(|_| AtomicU64::new(FREE));
        Self { domain, count: AtomicU64::new(0), places, adding: Mutex::new(()) }
    }

    /// Adds `device`: from now on it is asked. Call this **before** the device is allowed to fetch translations
    /// (before its ATS is enabled). A device that is there already stays, and nothing else is done.
    ///
    /// Where another call is just adding the device, this one returns an error and does not wait:
    /// the other call's result is not known yet.
    ///
    /// Looks at 16 places and waits for one invalidation of the domain by `queue`, which is the domain's. The caller
    /// holds no lock and no CPU. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: it is not added, and must not fetch translations.
    pub fn add<Q: InvalidationQueue>(&self, device: DeviceId, queue: &Q) -> Result<(), InvalidationError> {
        let number = number(device);
        let Some(place) = self.take_place(number)? else {
            return Ok(());
        };
        // Also where the queue panics.
        let coming = Guard::new(|| self.free(place, number | COMING));
        // Between the set and the walks for the device, as the module's comment says.
        fence(Ordering::SeqCst);
        queue.invalidate(self.domain, Invalidation::Domain)?;
        coming.done();
        // Release: a CPU that finds it there comes after that invalidation. No other caller changes the place of one that is coming.
        place.store(number, Ordering::Release);
        Ok(())
    }

    /// A place for a device that is coming; `None` where it is there already.
    fn take_place(&self, number: u64) -> Result<Option<&AtomicU64>, InvalidationError> {
        let _adding = self.adding.lock();
        if self.place(number).is_some() {
            return Ok(None);
        }
        let value = number | COMING;
        if self.place(value).is_some() {
            return Err(InvalidationError::BeingAdded);
        }
        // Before the place is taken: a caller that counts none does not look at the places.
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

    /// Has `device` forget everything and takes it out of the set. Call this **after** it was made
    /// to fetch no translation any more (its ATS is disabled). For a device that is not there, or
    /// that is just being added, this does nothing.
    ///
    /// Waits for one invalidation of the device's TLB by `queue`, which is the domain's: a device that does not
    /// answer takes all of the queue's time-out. The caller holds no lock and no CPU. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: it may still use what it has, and stays in the set. Call this again, or see that it
    /// reaches nothing and [`forget`](Self::forget) it.
    ///
    /// # Safety
    /// - **The device fetches no translation of the domain any more**, from the call on until another
    ///   [`add`](Self::add) that began after it has returned `Ok`: unmaps do not ask it meanwhile.
    /// - `queue` is the domain's.
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

    /// Takes `device` out of the set without asking it: it was reset or unplugged, or the IOMMU
    /// lets no access of it through, translated ones included. As long as a device is in the set
    /// that does not answer, no invalidation of the domain is confirmed. For a device that is just
    /// being added this does nothing. Looks at 16 places.
    ///
    /// # Safety
    /// - **The device reaches nothing by what it has cached**, and its accesses under way are complete.
    /// - It fetches no translation of the domain any more, from the call on until another [`add`](Self::add) that began
    ///   after it has returned `Ok`.
    pub unsafe fn forget(&self, device: DeviceId) {
        let value = number(device);
        if let Some(place) = self.place(value) {
            self.free(place, value);
        }
    }

    /// Submits `requests`, which are for the IOTLB, to `queue`, and after them what has the devices in the set
    /// forget the same. Returns when all of it is confirmed.
    ///
    /// Each device is asked for up to eight ranges one by one; for more, or for the whole domain,
    /// it forgets all that it has. Takes one submission, and one more for every 20 requests beyond
    /// the first 20, in the same order. With no device in the set, that costs two loads more than
    /// the submission itself. For each device that comes meanwhile, everything is submitted once
    /// more at the most. The caller holds no lock and no CPU. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: nothing may be assumed to be forgotten, by the IOTLB or any device.
    pub fn submit<Q: InvalidationQueue>(
        &self,
        queue: &Q,
        requests: &[Request],
    ) -> Result<(), InvalidationError> {
        // Acquire: after the last `remove` that it sees.
        if self.count.load(Ordering::Acquire) == 0 {
            queue.submit(requests)?;
            // What the queue has just confirmed is what makes this look count: see the module's comment.
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

    /// Submits `requests` and then what has `devices` forget the same, in one submission or more.
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
        // For each device all ranges, or one request for everything.
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

    /// The devices that are in the set, or coming.
    fn devices(&self) -> ArrayVec<DeviceId, MOST_DEVICE_TLBS> {
        // Acquire: after the last `remove` that it sees.
        self.places.iter().filter_map(|place| device(place.load(Ordering::Acquire))).collect()
    }

    /// The place with just this in it.
    fn place(&self, value: u64) -> Option<&AtomicU64> {
        // Acquire: after the invalidation of an `add` that is done.
        self.places.iter().find(|place| place.load(Ordering::Acquire) == value)
    }

    /// Frees a device's place, in which `value` is, unless another call has taken the device out.
    fn free(&self, place: &AtomicU64, value: u64) {
        // Release: a CPU that finds the place free, or counts none, comes after the device was told
        // to forget everything (or, by the word of the caller of `forget`, reaches nothing; or was
        // never told that it may fetch).
        if place.compare_exchange(value, FREE, Ordering::Release, Ordering::Relaxed).is_ok() {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

fn number(device: DeviceId) -> u64 {
    u64::from(device.0) + 1
}

fn device(number: u64) -> Option<DeviceId> {
    u32::try_from((number & !COMING).checked_sub(1)?).ok().map(DeviceId)
}
