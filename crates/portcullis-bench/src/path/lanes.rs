//! The mappings of each thread, for programs that drive them by themselves: on threads, a platform and hardware of their
//! own.

use std::sync::Arc;

use portcullis::invalidation::InvalidationQueue;
use portcullis::platform::Platform;

use super::old::Design;
use super::ours::Ours;
use super::subject::Subject;
use super::workload::{Case, Workload};
use crate::lane::Lane;
use crate::runner::Failure;

/// The library, or a design of the past, with a workload on it.
pub struct Lanes {
    /// One, or one for each thread.
    subjects: Vec<Arc<dyn Subject>>,
    case: Case,
}

impl Lanes {
    /// `workload` for `threads` threads, in one domain, or each in its own; on the library, or on an `old` design, which does that
    /// kind. Each domain's invalidations go to a `queue`.
    ///
    /// # Errors
    /// What the library refuses, and what would take too much memory.
    pub fn new<Q: InvalidationQueue + 'static, P: Platform + Clone + 'static>(
        workload: Workload,
        old: Option<Design>,
        threads: usize,
        own_domains: bool,
        platform: &P,
        queue: impl Fn() -> Q,
    ) -> Result<Self, Failure> {
        let case = Case { workload, threads, live: workload.live, own_domains, crowded: false };
        let count = if own_domains { threads } else { 1 };
        let subject = |_| -> Result<Arc<dyn Subject>, Failure> {
            match old {
                Some(design) => design.subject(platform, queue(), &case),
                None => Ok(Arc::new(Ours::new(platform, queue(), &case)?)),
            }
        };
        Ok(Self { subjects: (0..count).map(subject).collect::<Result<_, _>>()?, case })
    }

    fn subject(&self, thread: usize) -> &Arc<dyn Subject> {
        &self.subjects[thread % self.subjects.len()]
    }

    /// What thread `thread` works with: as many mappings as the workload says, none of which is made.
    ///
    /// # Errors
    /// What the library refuses.
    pub fn lane(&self, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        Arc::clone(self.subject(thread)).lane(&self.case, thread)
    }

    /// Has the hardware forget all that unmaps have left there, in the domain of thread `thread`.
    ///
    /// # Errors
    /// What the hardware does not confirm.
    pub fn flush(&self, thread: usize) -> Result<(), Failure> {
        self.subject(thread).flush()
    }

    /// Fails unless nothing is mapped any more, and nothing is lost. Every lane is gone.
    ///
    /// # Errors
    /// What is left.
    pub fn settle(&self) -> Result<(), Failure> {
        self.subjects.iter().try_for_each(|subject| subject.settle())
    }
}
