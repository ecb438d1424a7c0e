//! A queue that calls the test before each submission.

use std::sync::{Arc, Mutex};

use portcullis::addr::DomainId;
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};

type Hook = Arc<dyn Fn() + Send + Sync>;

/// A queue, and what happens while the hardware works.
pub struct Hooked<Q> {
    queue: Q,
    costs: Costs,
    hook: Mutex<Option<Hook>>,
}

impl<Q> Hooked<Q> {
    pub fn new(queue: Q) -> Self {
        Self { queue, costs: Costs::BARE_METAL, hook: Mutex::default() }
    }

    pub fn with_costs(queue: Q, costs: Costs) -> Self {
        Self { costs, ..Self::new(queue) }
    }

    /// `hook` is called before each submission from now on, with no lock held.
    pub fn set(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.hook.lock().unwrap() = Some(Arc::new(hook));
    }

    pub fn clear(&self) {
        *self.hook.lock().unwrap() = None;
    }
}

// SAFETY: `Ok` is `Q`'s.
unsafe impl<Q: InvalidationQueue> InvalidationQueue for Hooked<Q> {
    fn costs(&self) -> Costs {
        self.costs
    }

    fn caches_absent(&self) -> bool {
        self.queue.caches_absent()
    }

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let hook = self.hook.lock().unwrap().clone();
        if let Some(hook) = hook {
            hook();
        }
        self.queue.submit(requests)
    }
}
