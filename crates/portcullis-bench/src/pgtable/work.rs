//! What is done: the workloads by name, and which addresses they touch.
//!
//! A thread works on its own quarter or half of some tables, again and again: few enough that the entries and
//! all that leads to them stay in the processor's first-level cache (4 KiB granules) or its second-level one.

use portcullis::addr::PhysAddr;

use super::format::Geometry;
use crate::runner::Failure;

/// What is timed of a turn; a map's unmap, or an unmap's map, is done without being timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// The maps.
    Map,
    /// The unmaps.
    Unmap,
    /// Looking pages up that stay mapped.
    Translate,
}

/// What one operation is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One page in one entry of a table of `level`, 1 for the lowest.
    Page {
        /// The level.
        level: u32,
    },
    /// 256 granules one after the other, whose memory is so aligned that nothing larger fits.
    Run,
    /// A list of 64 KiB in single granules that are not neighbours in memory.
    Scattered,
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What an operation is about.
    pub shape: Shape,
    /// What an operation is.
    pub operation: Operation,
}

const fn workload(name: &'static str, shape: Shape, operation: Operation) -> Workload {
    Workload { name, shape, operation }
}

/// All workloads, in the order in which they are reported. Named for a granule of 4 KiB: with others, `4k`
/// stands for the granule, `2m` and `1g` for a single entry one and two levels up.
pub const WORKLOADS: [Workload; 10] = [
    workload("map-4k", Shape::Page { level: 1 }, Operation::Map),
    workload("unmap-4k", Shape::Page { level: 1 }, Operation::Unmap),
    workload("map-256x4k", Shape::Run, Operation::Map),
    workload("unmap-256x4k", Shape::Run, Operation::Unmap),
    workload("map-2m", Shape::Page { level: 2 }, Operation::Map),
    workload("unmap-2m", Shape::Page { level: 2 }, Operation::Unmap),
    workload("map-1g", Shape::Page { level: 3 }, Operation::Map),
    workload("unmap-1g", Shape::Page { level: 3 }, Operation::Unmap),
    workload("map-sg-64k", Shape::Scattered, Operation::Map),
    workload("iova-to-phys", Shape::Page { level: 1 }, Operation::Translate),
];

/// The numbers of threads with which every workload makes sense.
pub const THREADS: [usize; 2] = [1, 2];

/// Tables that single pages, or lists of them, are mapped in, and entries used of each by one thread.
const TABLES: u64 = 4;
const ENTRIES: u64 = 256;
/// Granules of a run, and tables in which there is one for each thread.
const RUN: u64 = 256;
const RUN_TABLES: u64 = 8;
/// The binary logarithm of the bytes in a list.
const LIST_SHIFT: u32 = 16;

/// What one thread does in a turn: `entries` operations in each of `tables` tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Work {
    first: u64,
    table_step: u64,
    /// Tables to go through.
    pub tables: u64,
    /// Operations in each.
    pub entries: u64,
    /// From the address of one operation in a table to that of the next.
    pub step: u64,
    /// What to add to an address for the memory behind, where that is not in `pieces`.
    pub to_phys: u64,
    /// Bytes of a page.
    pub page: u64,
    /// Pages of an operation.
    pub pages: u64,
    /// The memory of each page of the operations of one table; empty where it is simply one after the other.
    pub pieces: Vec<(PhysAddr, u64)>,
}

impl Work {
    /// The address that operation `entry` of a table is about.
    #[inline]
    pub(crate) fn iova(&self, table: u64, entry: u64) -> u64 {
        self.first + table * self.table_step + entry * self.step
    }

    /// Where page `page` of that operation lies in memory.
    pub(crate) fn phys(&self, table: u64, entry: u64, page: u64) -> u64 {
        match self.pieces.get((entry * self.pages + page) as usize) {
            Some((phys, _)) => phys.get(),
            None => (self.iova(table, entry) + page * self.page).wrapping_add(self.to_phys),
        }
    }

    /// Operations of a turn.
    pub(crate) fn ops(&self) -> u64 {
        self.tables * self.entries
    }
}

/// What all threads do, and where the entries are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    /// The level of the entries.
    pub level: u32,
    /// The binary logarithm of what an entry translates.
    pub shift: u32,
    /// The address of the first entry.
    pub first: u64,
    /// Entries from there to the last.
    pub entries: u64,
    /// The work of each thread.
    pub threads: Vec<Work>,
}

impl Pattern {
    /// The work of `threads` threads, 1 or 2; each on no more than `most` operations in each table.
    pub(crate) fn new(
        shape: Shape,
        geometry: &Geometry,
        threads: usize,
        most: Option<usize>,
    ) -> Result<Self, Failure> {
        let most = most.map_or(u64::MAX, |most| most as u64).max(1);
        let level = if let Shape::Page { level } = shape { level } else { 1 };
        if level > 1 && !geometry.large.get(level as usize - 2).is_some_and(|has| *has) {
            return Err(Failure::Unsupported("the format has no such page".into()));
        }
        let shift = geometry.granule + geometry.index * (level - 1);
        // Below 2^47, so that nothing is the sign of an address; far from 0, so that Linux's tables that grow
        // have grown.
        let first = 1_u64 << (geometry.input.min(47) - 2);
        let room = (3 * first) >> shift;
        // A thread's part of a table, and what is between two tables, in entries.
        let part = (1 << (geometry.index - 1)).min(room / 2);
        let table = 1_u64 << geometry.index;
        let count = if shape == Shape::Run { RUN_TABLES } else { TABLES };
        let count = if table * count <= room { count } else { 1 };
        let page = 1_u64 << shift;
        let phys = page.max(1 << 40) + if shape == Shape::Run { page } else { 0 };
        let entries = (count - 1) * table + 2 * part;
        if part == 0 || geometry.last_phys < phys + (entries << shift) {
            return Err(Failure::Unsupported("addresses of this format are too narrow".into()));
        }
        let used = ENTRIES.min(part);
        // Pages of an operation; how many of these follow one another, and how far apart.
        let (pages, each, step) = match shape {
            Shape::Page { .. } => (1, used, 1),
            // The tables are gone through as if they were entries.
            Shape::Run => (RUN.min(part), count, table),
            Shape::Scattered => {
                let pages = 1 << LIST_SHIFT.saturating_sub(geometry.granule);
                (pages, used / pages, pages)
            }
        };
        let work = |thread: usize| Work {
            first: first + ((thread as u64 * part) << shift),
            table_step: table << shift,
            tables: if shape == Shape::Run { 1 } else { count.min(most) },
            entries: each.min(most),
            step: step << shift,
            to_phys: phys.wrapping_sub(first),
            page,
            pages,
            pieces: match shape {
                Shape::Scattered => scattered(phys + (thread as u64) * page, page, used),
                _ => Vec::new(),
            },
        };
        Ok(Self { level, shift, first, entries, threads: (0..threads).map(work).collect() })
    }
}

/// So many pages, no two of them neighbours in memory, in an order in which none follows the one before.
fn scattered(first: u64, page: u64, count: u64) -> Vec<(PhysAddr, u64)> {
    // 37 is odd, so every one of a power of two is met once.
    let place = |index: u64| (index * 37 % count.next_power_of_two()) * 4;
    (0..count).map(|index| (PhysAddr::new(first + place(index) * page), page)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry =
        Geometry { granule: 12, index: 9, large: [true, false], input: 48, last_phys: (1 << 48) - 1 };

    /// What is timed, the bytes of a page, the pages of an operation, and the operations of a turn.
    #[test]
    fn names_tell_what_is_done() {
        let (k, m, g) = (1 << 12, 1 << 21, 1 << 30);
        let expected = [
            ("map-4k", Operation::Map, k, 1, 1024),
            ("unmap-4k", Operation::Unmap, k, 1, 1024),
            ("map-256x4k", Operation::Map, k, 256, 8),
            ("unmap-256x4k", Operation::Unmap, k, 256, 8),
            ("map-2m", Operation::Map, m, 1, 1024),
            ("unmap-2m", Operation::Unmap, m, 1, 1024),
            ("map-1g", Operation::Map, g, 1, 1024),
            ("unmap-1g", Operation::Unmap, g, 1, 1024),
            ("map-sg-64k", Operation::Map, k, 16, 64),
            ("iova-to-phys", Operation::Translate, k, 1, 1024),
        ];
        let geometry = Geometry { large: [true; 2], ..GEOMETRY };
        let found = WORKLOADS.map(|Workload { name, shape, operation }| {
            let work = &Pattern::new(shape, &geometry, 1, None).unwrap().threads[0];
            // A list's pieces are apart. A run's are not, but no larger page fits.
            let of = |page| (work.iova(1, 0) + page * work.page, work.phys(1, 0, page));
            let apart = work.pages > 1 && of(1).1 - of(0).1 != work.page;
            assert_eq!(apart, shape == Shape::Scattered, "{name}");
            let fits = |bytes| (of(0).0 | of(0).1).is_multiple_of(bytes);
            assert!(fits(work.page) && (shape != Shape::Run || !fits(1 << 21)), "{name}");
            (name, operation, work.page, work.pages, work.ops())
        });
        assert_eq!(found, expected);
    }

    /// Of a list each piece has a place of its own, which every table has again; of all else the memory follows the addresses.
    #[test]
    fn each_page_has_its_memory() {
        const BASE: u64 = 1 << 40;
        for thread in 0..2_u64 {
            let of =
                |shape| Pattern::new(shape, &GEOMETRY, 2, None).unwrap().threads.swap_remove(thread as usize);
            let list = of(Shape::Scattered);
            for (table, entry, page) in [(0, 0, 0), (0, 0, 1), (1, 0, 15), (2, 3, 0), (3, 15, 15)] {
                let place = (entry * 16 + page) * 37 % 256 * 4;
                let expected = BASE + ((thread + place) << 12);
                assert_eq!(
                    list.phys(table, entry, page),
                    expected,
                    "table {table}, entry {entry}, page {page}"
                );
            }
            let single = of(Shape::Page { level: 1 });
            assert_eq!(single.phys(2, 3, 0), BASE + ((thread * 256 + 2 * 512 + 3) << 12));
            // A run's memory begins one page later, and so no larger page fits.
            let run = of(Shape::Run);
            assert_eq!(run.phys(0, 5, 7), BASE + ((1 + thread * 256 + 5 * 512 + 7) << 12));
        }
    }

    #[test]
    fn threads_work_on_parts_of_the_same_tables() {
        for shape in [Shape::Page { level: 1 }, Shape::Page { level: 2 }, Shape::Run, Shape::Scattered] {
            let pattern = Pattern::new(shape, &GEOMETRY, 2, None).unwrap();
            let table = pattern.shift + GEOMETRY.index;
            let mut pages = Vec::new();
            for work in &pattern.threads {
                for (table, entry) in (0..work.tables).flat_map(|t| (0..work.entries).map(move |e| (t, e))) {
                    pages.extend((0..work.pages).map(|page| work.iova(table, entry) + page * work.page));
                }
            }
            let mut tables: Vec<u64> = pages.iter().map(|iova| iova >> table).collect();
            let half = tables.len() / 2;
            assert_eq!(tables[..half], tables[half..], "{shape:?}");
            tables.dedup();
            assert!(tables.len() == 2 * TABLES as usize || tables.len() == 2 * RUN_TABLES as usize);
            pages.sort_unstable();
            assert!(pages.windows(2).all(|pair| pair[0] + (1 << pattern.shift) <= pair[1]), "{shape:?}");
            let last = pages[pages.len() - 1];
            assert!((last - pattern.first) >> pattern.shift < pattern.entries, "{shape:?}");
        }
    }

    #[test]
    fn larger_granules_have_the_same_bytes_in_a_list() {
        for (granule, index) in [(12, 9), (14, 11), (16, 13)] {
            let geometry = Geometry { granule, index, ..GEOMETRY };
            let work = &Pattern::new(Shape::Scattered, &geometry, 1, None).unwrap().threads[0];
            assert_eq!(work.page * work.pages, 1 << 16);
            assert_eq!(work.pieces.len() as u64, work.entries * work.pages);
            let mut pieces: Vec<u64> = work.pieces.iter().map(|(phys, _)| phys.get()).collect();
            assert!(pieces.windows(2).all(|pair| pair[0] + work.page != pair[1]));
            pieces.sort_unstable();
            assert!(pieces.windows(2).all(|pair| pair[0] + work.page < pair[1]));
        }
    }

    #[test]
    fn what_a_format_has_not_is_refused() {
        let large = |geometry: &Geometry| Pattern::new(Shape::Page { level: 3 }, geometry, 1, None);
        assert!(matches!(large(&GEOMETRY), Err(Failure::Unsupported(_))));
        // A page of 4 TiB, of which there are few.
        let wide = Geometry { granule: 16, index: 13, large: [true; 2], input: 48, ..GEOMETRY };
        let pattern = large(&wide).unwrap();
        assert_eq!((pattern.threads[0].tables, pattern.threads[0].entries), (1, 12));
        assert!(matches!(large(&Geometry { last_phys: 1 << 42, ..wide }), Err(Failure::Unsupported(_))));
    }
}
