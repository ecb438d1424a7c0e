//! One thread allocates, another frees.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rtrb::{Consumer, Producer, RingBuffer};

use super::allocator::{Allocator, Make, cause};
use super::workload::{BATCH, IN_FLIGHT, Space};
use crate::runner::{Cell, Failure, Timing};
use crate::team::{Span, StartLine, Team, Wait};
use crate::timer::OpTimer;

/// Hands ranges over in batches through a queue with one writer and one reader, which so costs next to
/// nothing for each of them.
pub(crate) struct CrossCell<A: Allocator> {
    allocator: Arc<A>,
}

impl<A: Allocator> CrossCell<A> {
    pub(crate) fn open(team: &Team, make: &Make<A>, space: Space) -> Result<Self, Failure> {
        let make = Arc::clone(make);
        let allocator = team.each(1, move |_, _| make(&space))?.into_iter().next();
        Ok(Self { allocator: Arc::new(allocator.ok_or(Failure::Abandoned)?) })
    }
}

/// Allocates `batches` batches; `None` where that failed or the other thread is gone.
fn produce<A: Allocator>(
    allocator: &A,
    queue: &mut Producer<A::Range>,
    batches: u64,
    line: &StartLine,
) -> Option<()> {
    for _ in 0..batches {
        let mut wait = Wait::default();
        let chunk = loop {
            match queue.write_chunk_uninit(BATCH) {
                Ok(chunk) => break chunk,
                Err(_) if line.is_abandoned() => return None,
                Err(_) => wait.pause(),
            }
        };
        let allocated = chunk.fill_from_iter((0..BATCH).map_while(|_| allocator.alloc(1)));
        if allocated < BATCH {
            return None;
        }
    }
    Some(())
}

/// Frees `batches` batches; `None` where that failed or the other thread is gone.
fn consume<A: Allocator>(
    allocator: &A,
    queue: &mut Consumer<A::Range>,
    batches: u64,
    line: &StartLine,
) -> Option<()> {
    for _ in 0..batches {
        let mut wait = Wait::default();
        let chunk = loop {
            match queue.read_chunk(BATCH) {
                Ok(chunk) => break chunk,
                Err(_) if line.is_abandoned() => return None,
                Err(_) => wait.pause(),
            }
        };
        for range in chunk {
            if !allocator.free(range) {
                return None;
            }
        }
    }
    Some(())
}

impl<A: Allocator> Cell for CrossCell<A> {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let allocator = Arc::clone(&self.allocator);
        let batches = ops.div_ceil(BATCH as u64);
        let (producer, consumer) = RingBuffer::<A::Range>::new(IN_FLIGHT);
        let ends = Mutex::new((Some(producer), Some(consumer)));
        let wall = team.race(2, move |thread, line| {
            let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut producer, mut consumer) =
                if thread == 0 { (ends.0.take(), None) } else { (None, ends.1.take()) };
            drop(ends);
            line.wait()?;
            let (span, done) = Span::of(|| match (&mut producer, &mut consumer) {
                (Some(queue), _) => produce(&*allocator, queue, batches, line),
                (_, Some(queue)) => consume(&*allocator, queue, batches, line),
                _ => None,
            });
            match done {
                Some(()) => Ok(span),
                None if line.is_abandoned() => Err(Failure::Abandoned),
                None => Err(cause(&*allocator)),
            }
        })?;
        Ok(Timing { wall, ops: batches * BATCH as u64 })
    }

    fn samples(&mut self, _: &Team, _: &OpTimer, _: usize, _: Duration) -> Result<Option<Vec<u64>>, Failure> {
        Ok(None)
    }

    fn check(&mut self, _: &Team) -> Result<(), Failure> {
        // Nothing is live between repetitions.
        Ok(())
    }
}
