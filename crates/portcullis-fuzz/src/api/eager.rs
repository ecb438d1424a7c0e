//! A device that does not wait for a call to end: it tries each piece of a list as soon as that is mapped.
//!
//! What comes of it is in the hardware's caches: where the map fails later on, and what it had entered is removed
//! again, only an invalidation takes it out of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use portcullis::addr::{Iova, Permissions};
use portcullis_model::Iommu;

use super::model::{DEVICE, FOLLOWED, PAGE};
use super::observed::Moment;

/// The device, and where it was let in during a call.
#[derive(Debug)]
pub struct Eager {
    iommu: Arc<Iommu>,
    /// Whether it tries. It does not where what it met may stay reachable, as invalidations fail.
    tries: AtomicBool,
    met: Mutex<Vec<u64>>,
}

impl Eager {
    pub fn new(iommu: &Arc<Iommu>) -> Arc<Self> {
        Arc::new(Self { iommu: Arc::clone(iommu), tries: AtomicBool::new(false), met: Mutex::default() })
    }

    /// Whether it tries from now on.
    pub fn may_try(&self, tries: bool) {
        self.tries.store(tries, Ordering::Relaxed);
    }

    /// The mapper is there: the last page that it has entered is tried.
    pub fn at(&self, moment: Moment) {
        let Moment::Piece { range, entered: entered @ 1.. } = moment else { return };
        if !self.tries.load(Ordering::Relaxed) || range.len() > FOLLOWED {
            return;
        }
        let page = (range.start().get() + (entered - 1)) & !(PAGE - 1);
        let reach = |access| self.iommu.access(DEVICE, Iova::new(page), 1, access).is_ok();
        if [Permissions::READ, Permissions::WRITE].map(reach).contains(&true) {
            self.met.lock().unwrap_or_else(PoisonError::into_inner).push(page);
        }
    }

    /// The pages in which it was let in since the last call of this.
    pub fn met(&self) -> Vec<u64> {
        std::mem::take(&mut *self.met.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
