//! Operations of direct mappings, until nothing can precede them.
//!
//! A run becomes a mapping, alone or with others, when an unmap touches it, with the time of its own event. So operations behind an *open*
//! run are held back until that is settled. They are emitted in the order of their events.
//!
//! In a recording with `dma_*` events nothing is held back: their operations would have to wait, too.

use std::collections::BTreeMap;

use portcullis::addr::Direction;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::live::Live;
use super::op::{At, DeviceId, MapId, OpKind, Origin, Out, Segment};

/// The most operations, pieces and open runs: some 30 MB.
const MOST: usize = 1 << 18;

/// A mapping, by the number of its map step. (Live mappings are numbered in the order of operations, in which an older mapping may be
/// inserted before this one.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Made(u64);

pub(super) type Pieces = SmallVec<[Segment; 1]>;

#[derive(Debug)]
enum Step {
    /// A run that begins here, whose mapping is not settled.
    Open(u64),
    Map(At, Pieces, Origin),
    Unmap(At, Made),
}

/// The held steps.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By event, and by step number.
    steps: BTreeMap<(u64, u64), Step>,
    number: u64,
    /// Pieces beyond one for each step.
    pieces: usize,
    live: FxHashMap<Made, MapId>,
    /// Nothing is held any more.
    off: bool,
}

impl Held {
    /// Holds back everything after event `seq`, the run at `iova`.
    pub(super) fn open(&mut self, seq: u64, iova: u64) {
        if !self.off {
            self.steps.insert((seq, 0), Step::Open(iova));
        }
    }

    /// The run at event `seq` is settled.
    pub(super) fn close(&mut self, seq: u64) {
        self.steps.remove(&(seq, 0));
    }

    /// Makes a mapping at an event, or, if nothing is held, `now`.
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

    pub(super) fn first_open(&self) -> Option<u64> {
        match self.steps.first_key_value()?.1 {
            Step::Open(iova) => Some(*iova),
            Step::Map(..) | Step::Unmap(..) => None,
        }
    }

    /// From now on nothing is held back. The next [`release`](Self::release) emits the rest.
    pub(super) fn turn_off(&mut self) {
        self.off = true;
        self.steps.retain(|_, step| !matches!(step, Step::Open(_)));
    }

    /// Emits everything before the first open run, for `device`.
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
