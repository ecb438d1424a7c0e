//! A mapper that does not remove what it is asked to, while it is stuck.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper, TableMapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;
use portcullis_model::open::Simulated;
use portcullis_model::{Memory, Queue};

pub type Tables = TableMapper<Arc<Memory>, Queue>;

pub struct Stuck {
    pub inner: Tables,
    stuck: AtomicBool,
    /// Where each mapping was, and what its first memory is.
    pub mapped: Mutex<Vec<(Iova, PhysAddr)>>,
}

impl Stuck {
    pub fn new(inner: Tables) -> Self {
        Self { inner, stuck: AtomicBool::new(false), mapped: Mutex::default() }
    }

    pub fn stick(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }
}

// SAFETY: it maps in the model's tables.
unsafe impl Simulated for Stuck {}

// SAFETY: all is the inner mapper's; what is stuck is said to be kept.
unsafe impl Mapper for Stuck {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let mut list = list.into_iter().peekable();
        let first = list.peek().map(|(phys, _)| (range.start(), *phys));
        self.mapped.lock().unwrap().extend(first);
        // SAFETY: the caller's promise.
        unsafe { self.inner.map(platform, range, list, attributes, gather) }
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        if self.stuck.load(Ordering::Relaxed) {
            return Unmapped { kept: range.len(), ..Unmapped::of(range, 0) };
        }
        self.inner.unmap(platform, range, gather)
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.inner.sync(gather)
    }
}
