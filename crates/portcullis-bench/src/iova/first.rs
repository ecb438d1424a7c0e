//! The first allocations in a fresh space.

use std::sync::Arc;
use std::time::Duration;

use super::allocator::{Allocator, Make, cause};
use super::check::check_live;
use super::workload::Space;
use crate::runner::{Cell, Failure, Timing};
use crate::team::{Span, Team};
use crate::timer::OpTimer;

/// Makes a fresh space for each turn, and times only its first allocations.
pub(crate) struct FirstCell<A: Allocator> {
    pub make: Make<A>,
    pub space: Space,
    pub threads: usize,
    pub allocations: usize,
}

impl<A: Allocator> FirstCell<A> {
    fn turn(&self, team: &Team) -> Result<Duration, Failure> {
        let (make, space, allocations) = (Arc::clone(&self.make), self.space, self.allocations);
        let fresh = team.each(1, move |_, _| make(&space))?.into_iter().next();
        let allocator = Arc::new(fresh.ok_or(Failure::Abandoned)?);
        team.race(self.threads, move |_, line| {
            let mut live = Vec::with_capacity(allocations);
            line.wait()?;
            let (span, done) = Span::of(|| {
                for _ in 0..allocations {
                    live.push(allocator.alloc(1)?);
                }
                Some(())
            });
            done.ok_or_else(|| cause(&*allocator))?;
            let pages = live.iter().map(|range| allocator.pages(*range)).collect();
            check_live(pages, allocator.aligned(), &space)?;
            if live.into_iter().all(|range| allocator.free(range)) {
                Ok(span)
            } else {
                Err(cause(&*allocator))
            }
        })
    }
}

impl<A: Allocator> Cell for FirstCell<A> {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let turns = ops.div_ceil(self.allocations as u64).max(1);
        let mut wall = Duration::ZERO;
        for _ in 0..turns {
            wall += self.turn(team)?;
        }
        Ok(Timing { wall, ops: turns * self.allocations as u64 })
    }

    fn samples(&mut self, _: &Team, _: &OpTimer, _: usize, _: Duration) -> Result<Option<Vec<u64>>, Failure> {
        Ok(None)
    }

    fn check(&mut self, _: &Team) -> Result<(), Failure> {
        // Each turn has checked its own.
        Ok(())
    }
}
