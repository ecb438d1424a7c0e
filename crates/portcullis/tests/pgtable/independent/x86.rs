//! First-stage tables of x86: the crate `x86_64` translates by four levels and tells an entry's
//! flags; `page-walker` walks four and five levels.

use std::cell::RefCell;

use page_walker::walker::{PageWalker, PteType};
use page_walker::{PageFormat, arch};
use portcullis::pgtable::X86FirstStage;

use super::*;

/// A walk that ends at the page, or where there is none.
pub struct Walk<'a, X: Format> {
    pub bench: &'a Bench<X>,
    /// The page's entry, and its level from 0 on.
    pub found: Option<(u64, usize)>,
}

impl<X: Format> PageWalker<u64, ()> for Walk<'_, X> {
    fn read_pte(&self, address: u64) -> Result<u64, ()> {
        Ok(self.bench.word(address))
    }

    fn handle_pte(&mut self, kind: PteType, _: std::ops::Range<usize>, entry: &u64) -> Result<(), ()> {
        if let PteType::Page(level) = kind {
            self.found = Some((*entry, level));
        }
        Ok(())
    }

    /// (It would go on with the table at address 0.)
    fn handle_pte_hole(&mut self, _: usize, _: std::ops::Range<usize>, _: &u64) -> Result<(), ()> {
        self.found = None;
        Err(())
    }
}

/// Where `at` leads by `format`: the address, and the page's entry.
pub fn walk<X: Format>(bench: &Bench<X>, format: &PageFormat<'_, u64>, at: u64) -> Option<(u64, u64)> {
    let mut walk = Walk { bench, found: None };
    let _ = format.walk(bench.table.root().get(), at as usize..at as usize, &mut walk);
    let (entry, level) = walk.found?;
    let size = 1_u64 << format.levels[level].shift_bits;
    Some((entry & format.physical_mask & !(size - 1) | at & (size - 1), entry))
}

fn bench(levels: u32) -> Bench<X86FirstStage> {
    let memory = Memory::with_base(PhysAddr::new(1 << 32), 64 << 20);
    Bench::new(memory, X86FirstStage::new(levels, 3, 46).unwrap(), (1 << 40, 1 << 40))
}

#[test]
fn page_walker_finds_every_page() {
    for (levels, bits, format) in
        [(4, 47, &*arch::x86_64::PAGE_FORMAT_4K_L4), (5, 56, &*arch::x86_64::PAGE_FORMAT_4K_L5)]
    {
        let mut bench = bench(levels);
        let mut found = 0;
        for _ in 0..ROUNDS {
            (0..8).for_each(|_| bench.step(bits, 30, rights));
            for (at, expected) in bench.looks(bits) {
                let walked = walk(&bench, format, at);
                assert_eq!(walked.map(|walked| walked.0), expected.map(|found| found.0), "{levels} {at:#x}");
                found += u64::from(walked.is_some());
            }
        }
        assert!(found > ROUNDS * 10, "{found}");
    }
}

#[cfg(target_arch = "x86_64")]
mod translated {
    use x86_64::VirtAddr;
    use x86_64::structures::paging::mapper::{MappedPageTable, PageTableFrameMapping, TranslateResult};
    use x86_64::structures::paging::{PageTable as Table, PageTableFlags as Flags, PhysFrame, Translate};

    use super::*;

    /// Copies of our tables, at addresses of the process.
    struct Copies<'a>(&'a Bench<X86FirstStage>, RefCell<Vec<Box<Table>>>);

    impl Copies<'_> {
        fn copy(&self, address: u64) -> *mut Table {
            let mut table = Box::new(Table::new());
            let first = (&raw mut *table).cast::<u64>();
            for index in 0..512 {
                // SAFETY: a table is 512 entries, each of which is its word.
                unsafe { first.add(index).write(self.0.word(address + index as u64 * 8)) };
            }
            let mut all = self.1.borrow_mut();
            all.push(table);
            all.last_mut().map_or(std::ptr::null_mut(), |table| &raw mut **table)
        }
    }

    // SAFETY: each call returns another table, which lives as long as this.
    unsafe impl PageTableFrameMapping for &Copies<'_> {
        fn frame_to_pointer(&self, frame: PhysFrame) -> *mut Table {
            self.copy(frame.start_address().as_u64())
        }
    }

    #[test]
    fn x86_64_translates_every_page_by_the_right_flags() {
        let mut bench = bench(4);
        let execute = |dice: &mut Dice| Attributes {
            execute: dice.below(2) == 0,
            privileged: dice.below(2) == 0,
            ..rights(dice)
        };
        let mut found = 0;
        for _ in 0..ROUNDS / 4 {
            (0..16).for_each(|_| bench.step(47, 30, execute));
            for (at, expected) in bench.looks(47) {
                let copies = Copies(&bench, RefCell::default());
                // SAFETY: the copy lives as long as `copies`, and nothing else refers to it.
                let root = unsafe { &mut *copies.copy(bench.table.root().get()) };
                // SAFETY: `copies` leads to a copy of each table.
                let mapper = unsafe { MappedPageTable::new(root, &copies) };
                match (mapper.translate(VirtAddr::new(at)), expected) {
                    (TranslateResult::NotMapped, None) => {}
                    (TranslateResult::Mapped { frame, offset, flags }, Some((phys, attributes))) => {
                        assert_eq!(frame.start_address().as_u64() + offset, phys);
                        let is = |flag| flags.contains(flag);
                        assert!(is(Flags::PRESENT | Flags::ACCESSED), "{flags:?}");
                        assert_eq!(is(Flags::WRITABLE), writes(&attributes));
                        assert_eq!(is(Flags::DIRTY), writes(&attributes), "no walker has to set it");
                        assert_eq!(is(Flags::USER_ACCESSIBLE), !attributes.privileged);
                        assert_eq!(is(Flags::NO_EXECUTE), !attributes.execute);
                        assert!(!flags.intersects(Flags::GLOBAL | Flags::NO_CACHE | Flags::WRITE_THROUGH));
                        found += 1;
                    }
                    (other, expected) => panic!("{at:#x}: {other:?}, expected {expected:?}"),
                }
            }
        }
        assert!(found > ROUNDS, "{found}");
    }
}
