//! A hostile device that reads every byte it can reach, in memory where each byte identifies its owner.
//!
//! All memory that the trace names is painted, except the bytes of live mappings: those have the [colour](super::data::colour) of their
//! device. The device remembers every address that it ever saw, and reads all of their pages in full. In a buffer of its own pool it may
//! find zeros, and its own colour: bytes of its mappings, also earlier ones. In the trace's memory it may find the bytes of its live
//! mappings. All else is counted. It also writes: anywhere that it can in bounce buffers, outside its live mappings, and none of that may
//! ever arrive beside a mapping; in the trace's memory the bytes that it could have written are counted.
//!
//! Cost: some microseconds for each page of a mapping, and for each open page at each look.

use portcullis::addr::{Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::platform::FRAME_SIZE;
use portcullis_model::{DeviceId, Iommu};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::data::{colour, mix};
use super::live::Live;
use super::memory::{TraceMemory, is_pool};

const PAGE: usize = FRAME_SIZE as usize;
/// The bit that only paint has.
const PAINT: u8 = 0x80;
const PAINTED_WORD: u64 = 0x8080_8080_8080_8080;

/// How often the device looks at everything: for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    /// Operations of the trace from one look to the next; at least 1. It also looks when the trace ends.
    pub every_ops: u64,
}

/// The device's findings, in bytes, each counted as often as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Painted {
    /// Pages that it could read, in full.
    pub pages: u64,
    /// Pages of bounce buffers among these.
    pub pool_pages: u64,
    /// Bytes of its own mappings, live or earlier.
    pub own: u64,
    /// Paint: memory that no mapping covers.
    pub paint: u64,
    /// Bytes of other devices' mappings.
    pub others: u64,
    /// Bytes outside its mappings that it could have changed.
    pub writable: u64,
    /// Bytes beside a mapping that changed during its life.
    pub spoiled: u64,
}

impl Painted {
    /// Bytes that a device wrongly saw, or changed, or could have changed.
    pub fn shown(&self) -> u64 {
        self.paint + self.others + self.writable + self.spoiled
    }
}

/// A part of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    device: usize,
    start: usize,
    end: usize,
}

type Spans = SmallVec<[Span; 2]>;

/// The painter and the device.
#[derive(Debug)]
pub(super) struct Painter {
    paint: Paint,
    until_look: u64,
    /// Live mappings, by physical page.
    live: FxHashMap<u64, Spans>,
    /// Live mappings, by device page; empty for earlier addresses.
    seen: FxHashMap<(usize, u64), Spans>,
    pub found: Painted,
}

impl Painter {
    pub(super) fn new(paint: Paint) -> Self {
        let until_look = paint.every_ops.max(1);
        Self {
            paint,
            until_look,
            live: FxHashMap::default(),
            seen: FxHashMap::default(),
            found: Painted::default(),
        }
    }

    pub(super) fn is_due(&mut self) -> bool {
        self.until_look -= 1;
        let due = self.until_look == 0;
        if due {
            self.until_look = self.paint.every_ops.max(1);
        }
        due
    }

    /// A mapping has begun, with its device's colour in it.
    pub(super) fn mapped(&mut self, live: &Live) {
        for part in &live.memory {
            for (page, start, end) in parts(part.phys.get(), part.len) {
                self.live.entry(page).or_default().push(Span { device: live.device, start, end });
            }
        }
        for piece in live.pieces() {
            for (page, start, end) in parts(piece.iova.get(), piece.len) {
                let span = Span { device: live.device, start, end };
                self.seen.entry((live.device, page)).or_default().push(span);
            }
        }
    }

    /// A mapping has ended: the bytes beside it must be unchanged. Paints its memory.
    pub(super) fn ended(&mut self, memory: &TraceMemory, live: &Live) {
        for piece in live.pieces() {
            for (page, start, end) in parts(piece.iova.get(), piece.len) {
                let span = Span { device: live.device, start, end };
                forget(self.seen.entry((live.device, page)).or_default(), span);
            }
        }
        for part in &live.memory {
            for (page, start, end) in parts(part.phys.get(), part.len) {
                let spans = self.live.entry(page).or_default();
                let mut bytes = read(memory, page);
                let expected = painted(page);
                let mut covered = [false; PAGE];
                for span in spans.iter() {
                    covered[span.start..span.end].fill(true);
                }
                let changed = |at: &usize| !covered[*at] && bytes[*at] != expected[*at];
                self.found.spoiled += (0..PAGE).filter(changed).count() as u64;
                forget(spans, Span { device: live.device, start, end });
                covered.fill(false);
                for span in spans.iter() {
                    covered[span.start..span.end].fill(true);
                }
                for at in (0..PAGE).filter(|at| !covered[*at]) {
                    bytes[at] = expected[at];
                }
                memory.write(PhysAddr::new(page * FRAME_SIZE), &bytes);
                if spans.is_empty() {
                    self.live.remove(&page);
                }
            }
        }
    }

    /// A mapping was not made: paints its memory again.
    pub(super) fn refused(&self, memory: &TraceMemory, list: &[PhysSegment]) {
        for part in list {
            for (page, start, end) in parts(part.phys.get(), part.len) {
                let spans = self.live.get(&page);
                for (at, byte) in painted(page).iter().enumerate().take(end).skip(start) {
                    let is_live = |span: &Span| (span.start..span.end).contains(&at);
                    if !spans.is_some_and(|spans| spans.iter().any(is_live)) {
                        memory.write(PhysAddr::new(page * FRAME_SIZE + at as u64), &[*byte]);
                    }
                }
            }
        }
    }

    /// The device `device` reads, and writes where it may, at every address that it ever saw.
    pub(super) fn look(&mut self, iommu: &Iommu, memory: &TraceMemory, device: usize) {
        let Self { seen, live, found, .. } = self;
        let id = DeviceId(device as u32);
        let own = colour(device);
        for (&(_, page), spans) in seen.iter().filter(|((of, _), _)| *of == device) {
            let at = Iova::new(page * FRAME_SIZE);
            let write = iommu.probe(id, at, Permissions::WRITE);
            if let Some(phys) = iommu.probe(id, at, Permissions::READ) {
                found.pages += 1;
                if !is_pool(phys) {
                    // With a large granule also memory that the trace never names.
                    back(memory, &[PhysSegment { phys, len: 1 }]);
                }
                let bytes = read(memory, phys.get() / FRAME_SIZE);
                found.pool_pages += u64::from(is_pool(phys));
                let mine = meant_for(live, phys, device);
                for at in 0..PAGE {
                    match bytes[at] {
                        _ if mine[at] => found.own += 1,
                        byte if byte & PAINT != 0 => found.paint += 1,
                        0 if is_pool(phys) => {}
                        byte if byte >> 4 == own && is_pool(phys) => found.own += 1,
                        _ => found.others += 1,
                    }
                }
            }
            let Some(phys) = write else { continue };
            if !is_pool(phys) {
                let mine = meant_for(live, phys, device);
                found.writable += mine.iter().filter(|mine| !**mine).count() as u64;
                continue;
            }
            // Outside its live mappings: inside, its writes belong to the driver.
            let mut at = 0;
            while at < PAGE {
                let inside = spans.iter().find(|span| (span.start..span.end).contains(&at));
                let end = inside.map_or_else(
                    || spans.iter().map(|span| span.start).filter(|start| *start > at).min().unwrap_or(PAGE),
                    |span| span.end,
                );
                if inside.is_none() {
                    let garbage = [(own << 4) | 0xf; PAGE];
                    memory.write(PhysAddr::new(phys.get() + at as u64), &garbage[at..end]);
                }
                at = end;
            }
        }
    }
}

/// The bytes of the page at `phys` in live mappings of the device: none in its bounce buffers.
fn meant_for(live: &FxHashMap<u64, Spans>, phys: PhysAddr, device: usize) -> [bool; PAGE] {
    let mut mine = [false; PAGE];
    let spans = live.get(&(phys.get() / FRAME_SIZE));
    for span in spans.into_iter().flatten().filter(|span| span.device == device) {
        mine[span.start..span.end].fill(true);
    }
    mine
}

/// Allocates painted bytes for the pages of `list` without any. Returns whether there was enough memory.
pub(super) fn back(memory: &TraceMemory, list: &[PhysSegment]) -> bool {
    memory.back(list, |page| memory.write(PhysAddr::new(page * FRAME_SIZE), &painted(page)))
}

fn painted(page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    let (words, _) = bytes.as_chunks_mut();
    for (at, word) in (0..).zip(words) {
        *word = (mix((page << 9) | at) | PAINTED_WORD).to_le_bytes();
    }
    bytes
}

fn read(memory: &TraceMemory, page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    memory.read(PhysAddr::new(page * FRAME_SIZE), &mut bytes);
    bytes
}

fn forget(spans: &mut Spans, span: Span) {
    if let Some(at) = spans.iter().position(|other| *other == span) {
        spans.swap_remove(at);
    }
}

/// The pages of `len` bytes at `at`, and their parts.
fn parts(at: u64, len: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = at.saturating_add(len);
    (at / FRAME_SIZE..=(end - 1) / FRAME_SIZE).map(move |page| {
        let begins = page * FRAME_SIZE;
        let inside = |address: u64| address.saturating_sub(begins).min(FRAME_SIZE) as usize;
        (page, inside(at), inside(end))
    })
}

#[cfg(test)]
mod tests {
    use portcullis::addr::{Direction, DmaSegment};
    use smallvec::smallvec;

    use super::super::data::Pattern;
    use super::super::live::Copied;
    use super::*;

    fn live(phys: u64, len: u64) -> Live {
        Live {
            device: 1,
            direction: Direction::FromDevice,
            lane: None,
            memory: smallvec![PhysSegment { phys: PhysAddr::new(phys), len }],
            view: smallvec![DmaSegment { iova: Iova::new(phys), len }],
            mapping: None,
            copied: Copied::No,
            overlaps: false,
            pattern: Pattern::default(),
        }
    }

    /// Two mappings that share a page; the first may be written while it lives, and nothing beside both.
    #[test]
    fn what_is_changed_beside_mappings_is_counted_and_painted_again() {
        let memory = TraceMemory::new(16 << 20);
        let (first, second) = (live(0x5f00, 0x200), live(0x6100, 0x300));
        for list in [&first.memory, &second.memory] {
            assert!(back(&memory, list));
        }
        let mut painter = Painter::new(Paint { every_ops: 1 });
        painter.mapped(&first);
        painter.mapped(&second);
        for at in [0x5eff, 0x5f00, 0x60ff, 0x6100, 0x63ff, 0x6400, 0x6fff] {
            memory.write(PhysAddr::new(at), &[1]);
        }
        // A map of memory that is partly the second's was not made.
        let refused = PhysSegment { phys: PhysAddr::new(0x63f0), len: 0x20 };
        painter.refused(&memory, &[refused]);
        let mut bytes = [0; 2];
        memory.read(PhysAddr::new(0x63ff), &mut bytes);
        assert_eq!(bytes, [1, painted(6)[0x400]]);
        painter.ended(&memory, &first);
        // One byte before it, and one at the end of its second page.
        assert_eq!(painter.found, Painted { spoiled: 2, ..Painted::default() });
        assert_eq!(read(&memory, 5), painted(5));
        let mut expected = painted(6);
        (expected[0x100], expected[0x3ff]) = (1, 1);
        let found = read(&memory, 6);
        assert!(found[..0x100] == expected[..0x100] && found[0x400..] == expected[0x400..]);
        assert_eq!((found[0x100], found[0x3ff]), (1, 1));
        painter.ended(&memory, &second);
        assert_eq!((painter.found.spoiled, read(&memory, 6)), (2, painted(6)));
        assert!(painter.live.is_empty() && painter.seen.values().all(Spans::is_empty));
        assert_eq!(memory.strays(), 0);
        let found =
            Painted { pages: 1, pool_pages: 2, own: 4, paint: 8, others: 16, writable: 32, spoiled: 64 };
        assert_eq!(found.shown(), 8 + 16 + 32 + 64);
    }
}
