//! The requests of one submission. To carry them out does all that was asked for, and concerns only domains that were named.

use arrayvec::ArrayVec;

use crate::invalidation::{Invalidation, Request};

/// The number of requests that one submission holds. When it is full, a further request finds room only
/// where it takes the place of the ranges of its own domain, by asking for that whole domain.
pub(super) const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

#[derive(Debug, Clone, Default)]
pub(super) struct Batch {
    requests: ArrayVec<Request, BATCH>,
    /// A request is for a whole domain.
    has_whole: bool,
}

impl Batch {
    /// Takes all out again.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.has_whole = false;
    }

    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Adds `requests`. Returns whether there was room for all; else none was added.
    pub fn add_all(&mut self, requests: &[Request]) -> bool {
        // A single request is added or not.
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
        // The whole domain covers all that is there of it already, which makes room, unless nothing of it is.
        if is_full && !self.requests.iter().any(|other| other.domain == request.domain) {
            return false;
        }
        self.requests.retain(|other| other.domain != request.domain);
        self.requests.push(whole);
        self.has_whole = true;
        true
    }
}
