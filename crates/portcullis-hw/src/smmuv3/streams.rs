//! Stream tables: linear, or of two levels if the unit supports them.
//!
//! On a unit with the first stage, each piece of the stream table has a table of context descriptors, one for each stream.

use alloc::vec::Vec;

use portcullis::addr::DomainId;
use portcullis::platform::{FRAME_SIZE, Frames};

use super::Stage;
use super::layout::{cd, linear_table, second_level, ste, two_level_table};
use crate::frames::Words;
use crate::heap::{Map, filled};
use crate::host::UnitError;

/// Streams of a second-level table, as a power of two: those of a PCI bus.
const SPLIT: u32 = 8;

/// The widest stream IDs that tables are made for: with two levels, where the first takes half a MiB, and linear (architecturally, units
/// with more than 6 bits support two levels).
const MOST_TWO_LEVELS: u32 = 24;
const MOST_LINEAR: u32 = 16;

const ENTRY_BYTES: u64 = 8 * ste::WORDS as u64;
const CONTEXT_BYTES: u64 = 8 * cd::WORDS as u64;

/// What a stream is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    Nothing,
    Table(Stage, DomainId),
    Everything,
}

/// Entries of consecutive streams.
#[derive(Debug)]
pub(super) struct Piece {
    entries: Words,
    contexts: Option<Words>,
    held: Vec<Held>,
}

/// The entry and context descriptor of a stream.
#[derive(Debug)]
pub(super) struct Stream<'a> {
    piece: &'a mut Piece,
    index: usize,
}

#[derive(Debug)]
enum Table {
    Linear(Piece),
    TwoLevels { first: Words, pieces: Map<u32, Piece> },
}

#[derive(Debug)]
pub(super) struct Streams {
    table: Table,
    /// Width of stream IDs.
    bits: u32,
    has_contexts: bool,
}

impl Streams {
    /// Tables for stream IDs of `bits` bits, or of the most that tables are made for, with no stream attached.
    pub fn new<F: Frames>(
        frames: &F,
        bits: u32,
        two_levels: bool,
        has_contexts: bool,
    ) -> Result<Self, UnitError> {
        let (table, bits) = if two_levels && bits > SPLIT {
            let bits = bits.min(MOST_TWO_LEVELS);
            let first = Words::new(frames, frames_for(8 << (bits - SPLIT)))?;
            (Table::TwoLevels { first, pieces: Map::new() }, bits)
        } else {
            let bits = bits.min(MOST_LINEAR);
            (Table::Linear(Piece::new(frames, bits, has_contexts)?), bits)
        };
        Ok(Self { table, bits, has_contexts })
    }

    /// The values of the unit's two registers.
    pub fn registers(&self) -> (u64, u32) {
        match &self.table {
            Table::Linear(piece) => (piece.entries.phys().get(), linear_table(self.bits)),
            Table::TwoLevels { first, .. } => (first.phys().get(), two_level_table(self.bits, SPLIT)),
        }
    }

    fn check(&self, stream: u32) -> Result<(), UnitError> {
        let last = (1 << self.bits) - 1;
        if stream <= last { Ok(()) } else { Err(UnitError::NoSuchDevice { device: stream, last }) }
    }

    /// The entry of a stream, made if it is missing.
    pub fn make<F: Frames>(&mut self, frames: &F, stream: u32) -> Result<Stream<'_>, UnitError> {
        self.check(stream)?;
        if let Table::TwoLevels { first, pieces } = &mut self.table {
            let number = stream >> SPLIT;
            pieces.get_or_insert(number, || {
                let piece = Piece::new(frames, SPLIT, self.has_contexts)?;
                first.store(frames, number as usize, second_level(piece.entries.phys().get(), SPLIT));
                Ok(piece)
            })?;
        }
        self.find(stream)
    }

    /// The entry of a stream, if there is one.
    pub fn find(&mut self, stream: u32) -> Result<Stream<'_>, UnitError> {
        self.check(stream)?;
        let (piece, index) = match &mut self.table {
            Table::Linear(piece) => (Some(piece), stream),
            Table::TwoLevels { pieces, .. } => (pieces.get_mut(stream >> SPLIT), stream & ((1 << SPLIT) - 1)),
        };
        let piece = piece.ok_or(UnitError::NotAttached { device: stream })?;
        Ok(Stream { piece, index: index as usize })
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2, for all of it.
        unsafe {
            match self.table {
                Table::Linear(piece) => piece.free(frames),
                Table::TwoLevels { first, pieces } => {
                    first.free(frames);
                    pieces.into_values().for_each(|piece| piece.free(frames));
                }
            }
        }
    }
}

impl Piece {
    fn new<F: Frames>(frames: &F, bits: u32, has_contexts: bool) -> Result<Self, UnitError> {
        let held = filled(1 << bits, || Held::Nothing)?;
        let entries = Words::new(frames, frames_for(ENTRY_BYTES << bits))?;
        let contexts = has_contexts.then(|| Words::new(frames, frames_for(CONTEXT_BYTES << bits)));
        match contexts.transpose() {
            Ok(contexts) => Ok(Self { entries, contexts, held }),
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: the unit was not told of it.
                unsafe { entries.free(frames) };
                Err(error)
            }
        }
    }

    /// # Safety
    /// Those of [`Streams::free`].
    unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe {
            self.entries.free(frames);
            if let Some(contexts) = self.contexts {
                contexts.free(frames);
            }
        }
    }
}

impl Stream<'_> {
    pub fn held(&self) -> Held {
        self.piece.held.get(self.index).copied().unwrap_or(Held::Nothing)
    }

    pub fn hold(&mut self, what: Held) {
        if let Some(held) = self.piece.held.get_mut(self.index) {
            *held = what;
        }
    }

    /// Stores the first word of the stream's entry, which makes it valid or not.
    pub fn store_first<F: Frames>(&self, frames: &F, word: u64) {
        self.piece.entries.store(frames, self.index * ste::WORDS, word);
    }

    /// Stores the other words of the entry, while the first says that it is not valid.
    pub fn store_rest<F: Frames>(&self, frames: &F, words: [u64; 3]) {
        for (word, value) in (1..).zip(words.into_iter().chain([0; ste::WORDS - 4])) {
            self.piece.entries.store(frames, self.index * ste::WORDS + word, value);
        }
    }

    /// Stores the stream's context descriptor, while no entry leads to it, and returns its address.
    pub fn store_context<F: Frames>(&self, frames: &F, words: [u64; 4]) -> Result<u64, UnitError> {
        let lacks = UnitError::Lacks { what: "the first stage", register: "IDR0", value: 0 };
        let contexts = self.piece.contexts.as_ref().ok_or(lacks)?;
        for (word, value) in words.into_iter().chain([0; cd::WORDS - 4]).enumerate() {
            contexts.store(frames, self.index * cd::WORDS + word, value);
        }
        Ok(contexts.phys().get() + self.index as u64 * CONTEXT_BYTES)
    }
}

fn frames_for(bytes: u64) -> usize {
    // No truncation: at most 4 MiB.
    bytes.div_ceil(FRAME_SIZE) as usize
}
