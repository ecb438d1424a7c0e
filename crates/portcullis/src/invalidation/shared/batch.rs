//! The requests of one submission. It covers all added requests, and concerns only domains that these name.

use arrayvec::ArrayVec;

use crate::invalidation::{Invalidation, Request};

/// The most requests of one submission. A further request finds room in a full batch only as a request for its whole domain, which replaces
/// the ranges of that domain.
pub(super) const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

#[derive(Debug, Clone, Default)]
pub(super) struct Batch {
    requests: ArrayVec<Request, BATCH>,
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

    /// Adds `requests`: all or, if there is no room, none. Returns whether it did.
    pub fn add_all(&mut self, requests: &[Request]) -> bool {
        // A single request needs no copy to go back to.
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
        // The whole domain replaces all requests of that domain; where there are none, it makes no room.
        if is_full && !self.requests.iter().any(|other| other.domain == request.domain) {
            return false;
        }
        self.requests.retain(|other| other.domain != request.domain);
        self.requests.push(whole);
        self.has_whole = true;
        true
    }
}
