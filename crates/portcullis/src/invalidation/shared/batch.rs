//! The requests of one submission. They cover all that were added, and name no other domain.

use arrayvec::ArrayVec;

use crate::invalidation::{Invalidation, Request};

/// The most requests of one submission. If a batch is full, a further request replaces all requests of its domain by one for the whole
/// domain. If the batch has none of that domain, there is no room.
pub(super) const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

#[derive(Debug, Clone, Default)]
pub(super) struct Batch {
    requests: ArrayVec<Request, BATCH>,
    /// A whole domain is among the requests.
    has_whole: bool,
}

impl Batch {
    pub fn clear(&mut self) {
        self.requests.clear();
        self.has_whole = false;
    }

    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Adds all of `requests`, or none if there is no room. Returns whether it did.
    pub fn add_all(&mut self, requests: &[Request]) -> bool {
        // A single request is added or not, so it needs no copy to go back to.
        let before = (requests.len() > 1).then(|| self.clone());
        let added = requests.iter().all(|request| self.add(*request));
        if let (false, Some(before)) = (added, before) {
            *self = before;
        }
        added
    }

    fn add(&mut self, request: Request) -> bool {
        let whole = Request { invalidation: Invalidation::Domain, ..request };
        if self.has_whole && self.requests.contains(&whole) {
            return true;
        }
        let is_full = self.requests.is_full();
        if request.invalidation != Invalidation::Domain && !is_full {
            self.requests.push(request);
            return true;
        }
        // The whole domain replaces all requests for it. If there are none, that makes no room.
        if is_full && !self.requests.iter().any(|other| other.domain == request.domain) {
            return false;
        }
        self.requests.retain(|other| other.domain != request.domain);
        self.requests.push(whole);
        self.has_whole = true;
        true
    }
}
