//! A page table, a walker over its memory, and a plain list of what must be found there.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use portcullis::addr::{Iova, IovaRange, PhysAddr};
use portcullis::pgtable::{Attributes, Format, Layout, MapError, PageTable, Unmapped};
use portcullis::platform::{FRAME_SIZE, Frames, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenTable, Simulated};
use portcullis_model::walker::{Rights, TablePointer, Walk, walk};
use portcullis_model::{FaultReason, Memory};

use super::cases::Case;
use super::plain::{Piece, Plain};

/// For the threads of all tests.
pub static PLATFORM: LazyLock<Arc<StdPlatform>> = LazyLock::new(|| Arc::new(StdPlatform::with_cpus(32)));

/// As much as any test needs, where addresses are wide enough.
const CAPACITY: u64 = 64 << 20;

pub fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), len).unwrap()
}

fn covers(range: IovaRange, first: u64, last: u64) -> bool {
    range.start().get() <= first && last <= range.last().get()
}

/// Frames for tables, by the walker's way to see them.
pub trait Backing: Frames + Simulated + Sized {
    /// Frames of `memory` for tables of `format`, and the memory as the walker sees it.
    fn of<X: Format>(memory: &Arc<Memory>, format: &X) -> (Self, Arc<Memory>);
}

impl Backing for Arc<Memory> {
    fn of<X: Format>(memory: &Arc<Memory>, _: &X) -> (Self, Arc<Memory>) {
        (Arc::clone(memory), Arc::clone(memory))
    }
}

/// A way to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Whole,
    List,
    AtHand,
    ListAtHand,
}

pub struct Machine<F: Backing, X: Format> {
    pub case: Case<X>,
    pub table: PageTable<F, X>,
    pub plain: Plain,
    memory: Arc<Memory>,
    seen: Arc<Memory>,
    /// Addresses are so narrow that memory for tables may run out.
    pub is_scarce: bool,
    empty: usize,
    /// Large pages that the walker has found, and may have cached: their first addresses and their last ones.
    held: RefCell<BTreeMap<u64, u64>>,
    /// Some of the addresses that were unmapped since the last reclaim.
    unmapped: Vec<u64>,
    /// What the last unmaps said is to be invalidated, and was not yet.
    stale: Vec<IovaRange>,
}

impl<F: Backing, X: Format> Machine<F, X> {
    /// Tables in memory at one of several places: from 4 GiB on, from 2^48 on, the highest. `None` where addresses are
    /// too narrow for the root.
    pub fn new(case: Case<X>, place: u64) -> Option<Self> {
        let format = case.format;
        let end = (format.last_phys().get() + 1).min(1 << 52);
        let capacity = CAPACITY.min(end);
        let base = match place % 3 {
            0 if (1 << 32) + capacity <= end => 1 << 32,
            1 if (1 << 48) + capacity <= end => (1 << 48) - 0x4000,
            _ => end - capacity,
        };
        let memory = Memory::with_base(PhysAddr::new(base), capacity);
        let (frames, seen) = F::of(&memory, &format);
        let root_bytes = 8 << format.root_bits();
        let Ok(table) = PageTable::for_cpus(frames, format, PLATFORM.cpus()) else {
            assert!(root_bytes > capacity, "{format:?}: no root");
            return None;
        };
        let walker = case.walker;
        assert!(walker.is_valid(), "{format:?}: hardware has no {walker:?}");
        assert_eq!(walker.levels(), format.levels(), "{format:?}");
        assert!(walker.is_root(table.root()), "{format:?}: {walker:?} has no root at {}", table.root());
        assert!(walker.in_width(format.last_iova()), "{format:?}");
        // (AMD's six levels have a bit more than the engine uses.)
        let beyond = format.last_iova().checked_add(1).unwrap();
        assert!(!walker.in_width(beyond) || format.input_bits() == 63, "{format:?}");
        let (plain, empty) = (Plain::default(), table.table_bytes());
        assert!(empty >= root_bytes as usize);
        let (is_scarce, held) = (capacity < CAPACITY, RefCell::default());
        let (unmapped, stale) = (Vec::new(), Vec::new());
        Some(Self { case, table, plain, memory, seen, is_scarce, empty, held, unmapped, stale })
    }

    pub fn granule(&self) -> u64 {
        1 << X::GRANULE_SHIFT
    }

    /// The highest address.
    pub fn top(&self) -> u64 {
        self.case.format.last_iova().get()
    }

    pub fn last_phys(&self) -> u64 {
        self.case.format.last_phys().get()
    }

    /// Bytes of the leaves that the format has, the smallest first.
    pub fn sizes(&self) -> Vec<u64> {
        let format = self.case.format;
        format.leaf_sizes().iter().map(|size| format.page_size(*size).bytes()).collect()
    }

    /// Maps the pieces of memory in `list` from `start` on, and looks at all the places that it is about. Whether it
    /// did; if not, there was a reason.
    pub fn map(&mut self, way: Way, start: u64, list: &[(u64, u64)], attributes: Attributes) -> bool {
        let len = list.iter().map(|piece| piece.1).sum();
        // Addresses are not used again before.
        self.invalidate();
        let Ok(range) = IovaRange::new(Iova::new(start), len) else {
            return false;
        };
        let first = PhysAddr::new(list[0].0);
        let pieces = list.iter().map(|(phys, len)| (PhysAddr::new(*phys), *len));
        let result = match way {
            Way::Whole => {
                assert_eq!(list.len(), 1);
                self.table.open(&*PLATFORM, range, first, attributes).map(|()| true)
            }
            Way::List => self.table.open_list(&*PLATFORM, range, pieces, attributes).map(|()| true),
            Way::ListAtHand => Ok(self.table.open_list_fast(&*PLATFORM, range, pieces, attributes)),
            Way::AtHand => {
                assert_eq!(list.len(), 1);
                Ok(self.table.open_fast(&*PLATFORM, range, first, attributes))
            }
        };
        let bits = list.iter().fold(start, |bits, (phys, len)| bits | phys | len);
        let is_aligned = bits.is_multiple_of(self.granule());
        let is_inside = range.last().get() <= self.top();
        let last = |(phys, len): &(u64, u64)| phys.checked_add(len - 1);
        let is_memory = list.iter().all(|piece| last(piece).is_some_and(|last| last <= self.last_phys()));
        let taken = if is_inside { self.plain.first_in(start, len) } else { None };
        let name = self.case.format;
        match result.map_err(|(error, _)| error) {
            Ok(true) => {
                assert!(is_aligned && is_inside && is_memory, "{name:?}: {way:?} {range} to {list:x?}");
                assert_eq!(taken, None, "{name:?}: {way:?} {range}");
                let mut at = start;
                for &(phys, len) in list {
                    self.plain.insert(at, Piece { len, phys, attributes });
                    at += len;
                }
            }
            Ok(false) => {}
            Err(MapError::Misaligned { .. }) => assert!(!is_aligned, "{name:?}: {range} to {list:x?}"),
            Err(MapError::BeyondAperture { .. }) => assert!(!is_inside, "{name:?}: {range}"),
            Err(MapError::BeyondPhysical { .. }) => assert!(!is_memory, "{name:?}: {range} to {list:x?}"),
            Err(MapError::AlreadyMapped { at }) => assert_eq!(Some(at.get()), taken, "{name:?}: {range}"),
            Err(error) => assert!(self.is_scarce, "{name:?}: {range} to {list:x?}: {error}"),
        }
        self.look(start, len);
        result == Ok(true)
    }

    /// Unmaps, and looks at all the places that it is about.
    pub fn unmap(&mut self, start: u64, len: u64) {
        let name = self.case.format;
        let Ok(range) = IovaRange::new(Iova::new(start), len) else {
            return;
        };
        let forget = &mut |broken| {
            self.held.borrow_mut().retain(|first, last| !covers(broken, *first, *last));
            true
        };
        // By the short way as often as not, where that does it.
        let is_tried = (start / self.granule()).count_ones().is_multiple_of(2);
        let unmapped = match is_tried && self.table.close_fast(&*PLATFORM, range) {
            true => Unmapped { bytes: len, kept: 0, stale: range },
            false => self.table.close(&*PLATFORM, range, forget),
        };
        // What is beyond the aperture is not there.
        let inside = len.min((self.top() + 1).saturating_sub(start));
        let removed = self.plain.remove(start, inside);
        let expected: u64 = removed.iter().map(|(_, piece)| piece.len).sum();
        assert_eq!(unmapped.bytes + unmapped.kept, expected, "{name:?}: {range}");
        assert!(unmapped.kept == 0 || self.is_scarce, "{name:?}: {range}: {unmapped:?}");
        let mut stayed = 0;
        if unmapped.kept > 0 {
            // A large page stays, as a whole or in parts, where there is no memory for smaller ones.
            let leaves = self.table.entries(&*PLATFORM, self.table.aperture()).map(|leaf| leaf.range);
            let large = leaves.filter(|leaf| leaf.len() > self.granule());
            let large: Vec<_> = large.map(|leaf| (leaf.start().get(), leaf.last().get())).collect();
            for &(at, piece) in &removed {
                for (first, last) in &large {
                    let (from, to) = (at.max(*first), (at + piece.len).min(last + 1));
                    if from < to {
                        let phys = piece.phys + (from - at);
                        self.plain.insert(from, Piece { len: to - from, phys, ..piece });
                        stayed += to - from;
                    }
                }
            }
        }
        assert_eq!(stayed, unmapped.kept, "{name:?}: {range}");
        // Hardware that holds a large page lets go of it where a request covers the whole of it.
        for (&first, &last) in &*self.held.borrow() {
            let is_gone = |(at, piece): &(u64, Piece)| {
                *at <= last && first < at + piece.len && self.plain.find((*at).max(first)).is_none()
            };
            let is_covered = covers(unmapped.stale, first, last);
            let must = removed.iter().any(is_gone);
            assert!(is_covered || !must, "{name:?}: {range}: {first:#x} to {last:#x}, {unmapped:?}");
        }
        self.stale.push(unmapped.stale);
        if self.unmapped.len() < 64 && inside > 0 {
            self.unmapped.push(start);
        }
        // As often as not another unmap comes before the invalidation.
        if !(start / self.granule()).is_multiple_of(2) {
            self.invalidate();
        }
        self.look(start, len);
    }

    /// The hardware forgets what it was told to.
    fn invalidate(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        self.held.borrow_mut().retain(|first, last| !stale.iter().any(|range| covers(*range, *first, *last)));
    }

    /// Frees what is empty. Hardware walks tables that are empty, too, and keeps the way to them until it is told; so
    /// what it comes to once it was told is not freed. It does not confirm where it must not, and then nothing is.
    pub fn reclaim(&mut self, confirms: bool) {
        self.invalidate();
        let (unmapped, mut ways) = (std::mem::take(&mut self.unmapped), Vec::new());
        let result = self.table.shrink(&**PLATFORM, || {
            ways.clear();
            ways.extend(unmapped.iter().flat_map(|at| self.find(*at).tables));
            if confirms { Ok(()) } else { Err(()) }
        });
        assert!(result.is_ok() || !confirms);
        for way in ways {
            assert!(self.memory.is_allocated(way.table), "{:?}: {way:?} was freed", self.case.format);
        }
        unmapped.into_iter().for_each(|at| self.probe(at));
    }

    /// Looks at a range's ends, and around it.
    pub fn look(&self, start: u64, len: u64) {
        let last = start.saturating_add(len - 1);
        let around = [
            Some(start),
            Some(last),
            Some(start + len / 2),
            start.checked_sub(1),
            start.checked_add(self.granule()),
            last.checked_sub(self.granule()),
            last.checked_add(1),
        ];
        around.into_iter().flatten().for_each(|at| self.probe(at));
    }

    /// The walker, the table and the list say the same of `at`.
    pub fn probe(&self, at: u64) {
        let (case, expected) = (&self.case, self.plain.find(at));
        let wanted =
            expected.map(|(phys, attributes)| (phys, case.rights(attributes), case.memory_bits(attributes)));
        assert_eq!(self.walk(at), wanted, "{:?}: a device's walk for {at:#x}", case.format);
        let found = self.table.translate(&*PLATFORM, Iova::new(at));
        let found = found.map(|(phys, attributes)| (phys.get(), attributes));
        let kept = expected.map(|(phys, attributes)| (phys, case.kept(attributes)));
        assert_eq!(found, kept, "{:?}: translation of {at:#x}", case.format);
        let phys = self.table.iova_to_phys(&*PLATFORM, Iova::new(at));
        assert_eq!(phys.map(PhysAddr::get), kept.map(|kept| kept.0), "{:?}: {at:#x}", case.format);
    }

    fn find(&self, at: u64) -> Walk {
        let walker = self.case.walker;
        walk(&self.seen, Iova::new(at), walker, TablePointer::root(self.table.root(), walker.levels()))
    }

    /// Where a device comes to by the tables, as hardware walks them.
    fn walk(&self, at: u64) -> Option<(u64, Rights, u8)> {
        if !self.case.walker.in_width(Iova::new(at)) {
            return None;
        }
        let found = self.find(at);
        if F::COHERENT {
            assert_eq!(found.freed_reads, 0, "{:?}: {at:#x}", self.case.format);
        }
        match found.result {
            Ok(leaf) => {
                let offset = leaf.size.offset_mask();
                if leaf.size.bytes() > self.granule() {
                    self.held.borrow_mut().insert(at & !offset, at | offset);
                }
                Some((leaf.page.get() | at & offset, leaf.rights, leaf.attributes))
            }
            // Not an entry that hardware would stumble over.
            Err(FaultReason::NotPresent { .. }) => None,
            Err(fault) => panic!("{:?}: a device's walk for {at:#x}: {fault:?}", self.case.format),
        }
    }

    /// Looks at everything. How many leaves there are.
    pub fn look_at_all(&self) -> u64 {
        for (at, Piece { len, .. }) in self.plain.pieces() {
            self.look(at, len);
        }
        let (mut bytes, mut leaves) = (0, 0);
        self.table.entries(&*PLATFORM, self.table.aperture()).for_each(|leaf| {
            bytes += leaf.range.len();
            leaves += 1;
            let found = Some((leaf.phys.get(), leaf.attributes));
            for (at, offset) in [(leaf.range.start(), 0), (leaf.range.last(), leaf.range.len() - 1)] {
                let expected = self.plain.find(at.get());
                let kept = expected.map(|(phys, attributes)| (phys - offset, self.case.kept(attributes)));
                assert_eq!(kept, found, "{:?}: {leaf:?}", self.case.format);
            }
        });
        assert_eq!(bytes, self.plain.bytes(), "{:?}", self.case.format);
        self.assert_accounted();
        leaves
    }

    /// Unmaps everything and frees the tables: what is left is the root.
    pub fn clear(&mut self) {
        for (at, Piece { len, .. }) in self.plain.pieces() {
            self.unmap(at, len);
        }
        self.reclaim(true);
        assert_eq!(self.table.table_bytes(), self.empty, "{:?}", self.case.format);
        self.assert_accounted();
    }

    fn assert_accounted(&self) {
        let name = self.case.format;
        assert_eq!(self.memory.frames_in_use() * FRAME_SIZE, self.table.table_bytes() as u64, "{name:?}");
        assert_eq!((self.memory.bad_frees(), self.memory.stray_tables()), (0, 0), "{name:?}");
    }

    /// Everything goes, down to the last frame.
    pub fn end(mut self) {
        self.look_at_all();
        self.clear();
        let memory = Arc::clone(&self.memory);
        drop(self);
        assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
    }
}
