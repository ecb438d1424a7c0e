//! Operations of direct mappings, until nothing can come before them.
//!
//! A run becomes a mapping, alone or with others, when an unmap touches it, and has been one since its own event. So the
//! operations behind a run that is *open* are held back until that is settled. They go on in the order of their events.
//!
//! Where a recording has `dma_*` events, nothing is held back: theirs would have to wait, too.

use std::collections::BTreeMap;

use portcullis::addr::Direction;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::live::Live;
use super::op::{At, DeviceId, MapId, OpKind, Origin, Out, Segment};

/// Operations, their pieces, and the runs that hold them back, at most: some 30 MB.
const MOST: usize = 1 << 18;

/// A mapping, by the number of the step that makes it. (Live mappings have their numbers in the order of the operations, in
/// which an older mapping may come to stand before this one.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Made(u64);

pub(super) type Pieces = SmallVec<[Segment; 1]>;

#[derive(Debug)]
enum Step {
    /// The run that begins here, of which it is not settled what it becomes.
    Open(u64),
    Map(At, Pieces, Origin),
    Unmap(At, Made),
}

/// What is held back.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By the event that a step stands at, and by its own number.
    steps: BTreeMap<(u64, u64), Step>,
    number: u64,
    /// Pieces in these beyond one for each step.
    pieces: usize,
    live: FxHashMap<Made, MapId>,
    /// Nothing is held any more.
    off: bool,
}

impl Held {
    /// Holds back what comes after event `seq`, the run at `iova`.
    pub(super) fn open(&mut self, seq: u64, iova: u64) {
        if !self.off {
            self.steps.insert((seq, 0), Step::Open(iova));
        }
    }

    /// What became of the run at event `seq` is known.
    pub(super) fn close(&mut self, seq: u64) {
        self.steps.remove(&(seq, 0));
    }

    /// Makes a mapping at an event, or, where nothing is held, `now`.
    pub(super) fn map(&mut self, at: At, now: At, pieces: Pieces, origin: Origin) -> Made {
        let at = if self.off { At { seq: now.seq, time_ns: now.time_ns, ..at } } else { at };
        self.pieces += pieces.len() - 1;
        Made(self.step(at, Step::Map(at, pieces, origin)))
    }

    pub(super) fn unmap(&mut self, at: At, made: Made) {
        self.step(at, Step::Unmap(at, made));
    }

    fn step(&mut self, at: At, step: Step) -> u64 {
        self.number += 1;
        self.steps.insert((at.seq, self.number), step);
        self.number
    }

    pub(super) fn is_full(&self) -> bool {
        self.steps.len() + self.pieces > MOST
    }

    /// The run that holds all others back, by its first address.
    pub(super) fn first_open(&self) -> Option<u64> {
        match self.steps.first_key_value()?.1 {
            Step::Open(iova) => Some(*iova),
            Step::Map(..) | Step::Unmap(..) => None,
        }
    }

    /// From now on nothing is held back. What was goes on with the next [`release`](Self::release).
    pub(super) fn turn_off(&mut self) {
        self.off = true;
        self.steps.retain(|_, step| !matches!(step, Step::Open(_)));
    }

    /// Lets everything go on that stands before the first run that is open, for `device`.
    pub(super) fn release(&mut self, device: DeviceId, live: &mut Live, out: &mut Out<'_>) {
        while let Some(first) = self.steps.first_entry().filter(|first| !matches!(first.get(), Step::Open(_)))
        {
            let ((_, number), step) = first.remove_entry();
            match step {
                Step::Open(_) => {}
                Step::Map(at, pieces, origin) => {
                    let id = live.take_id();
                    self.live.insert(Made(number), id);
                    self.pieces -= pieces.len() - 1;
                    let own = &mut Out { chunk: out.chunk, at };
                    own.map(device, id, Direction::Bidirectional, origin, &pieces);
                }
                Step::Unmap(at, made) => {
                    if let Some(id) = self.live.remove(&made) {
                        live.free_id(id);
                        Out { chunk: out.chunk, at }.push(device, OpKind::Unmap { id });
                    }
                }
            }
        }
    }
}
