//! The limit: nothing but the copies.

use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis::platform::CopyMemory;

use super::memory::{Buffers, Ram};
use super::subject::Subject;
use super::workload::Case;
use crate::lane::Lane;
use crate::runner::Failure;

/// A bounce buffer for each buffer, always the same.
pub(crate) struct Bare {
    case: Case,
    bounce: Vec<Arc<Buffers>>,
}

impl Bare {
    pub(crate) fn new(case: &Case) -> Result<Self, Failure> {
        let each = |_| Buffers::new(case.buffers(), case.shape.bytes()).map(Arc::new);
        Ok(Self { case: *case, bounce: (0..case.threads).map(each).collect::<Result<_, _>>()? })
    }
}

impl Subject for Bare {
    fn lane(self: Arc<Self>, thread: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let bounce = Arc::clone(&self.bounce[thread]);
        let (copies_in, copies_out) = (self.case.copies_in(), self.case.copies_out());
        Ok(Box::new(Copies { bounce, buffers, copies_in, copies_out }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        Some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }
}

struct Copies {
    bounce: Arc<Buffers>,
    buffers: Arc<Buffers>,
    copies_in: bool,
    copies_out: bool,
}

impl Lane for Copies {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let (buffer, bounce) = (self.buffers.at(index), self.bounce.at(index));
        if self.copies_in {
            // SAFETY: both are as long, and this thread's alone.
            unsafe { Ram::<true>.copy(PhysAddr::new(buffer), PhysAddr::new(bounce), self.buffers.bytes()) };
        }
        true
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let (buffer, bounce) = (self.buffers.at(index), self.bounce.at(index));
        if self.copies_out {
            // SAFETY: as above.
            unsafe { Ram::<true>.copy(PhysAddr::new(bounce), PhysAddr::new(buffer), self.buffers.bytes()) };
        }
        true
    }

    fn address(&self, index: usize) -> u64 {
        self.bounce.at(index)
    }
}
