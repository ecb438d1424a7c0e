//! VMSAv8-64 with pages of 4 KiB: beside the tables that `aarch64-paging` builds for the same
//! mappings, in both stages, entry by entry; and walked by `page-walker`, which has three levels of
//! the first stage.

use aarch64_paging::descriptor::{Descriptor, El1Attributes, PagingAttributes, Stage2Attributes};
use aarch64_paging::linearmap::LinearMap;
use aarch64_paging::paging::{El1And0, MemoryRegion, Stage2, TranslationRegime, VaRange};
use page_walker::arch;
use portcullis::pgtable::{Arm, Memory as Kind};

use super::x86::walk;
use super::*;

const CONTIGUOUS: u64 = 1 << 52;

/// Four levels, as both have them.
const BITS: u32 = 48;

/// How far memory lies from the addresses that lead to it.
const OFFSET: u64 = 1 << 40;

#[test]
fn page_walker_finds_every_page_of_three_levels() {
    let memory = Memory::with_base(PhysAddr::new(1 << 32), 64 << 20);
    let mut bench = Bench::new(memory, Arm::<12>::stage_1(39, 48).unwrap(), (1 << 40, 1 << 40));
    let mut found = 0;
    for _ in 0..ROUNDS {
        // It takes addresses with the highest bit for negative ones.
        (0..8).for_each(|_| bench.step(38, 30, rights));
        for (at, expected) in bench.looks(38) {
            let walked = walk(&bench, &arch::aarch64::PAGE_FORMAT_4K_L3, at);
            assert_eq!(walked.map(|walked| walked.0), expected.map(|found| found.0), "{at:#x}");
            found += u64::from(walked.is_some());
        }
    }
    assert!(found > ROUNDS * 10, "{found}");
}

/// The entry for `at` at the level that the manual calls `level`, and whether it is the leaf.
fn entry(bench: &Bench<Arm<12>>, at: u64, level: usize) -> (u64, bool) {
    let mut table = bench.table.root().get();
    for walked in 0..4 {
        let entry = bench.word(table + (at >> (39 - walked * 9) & 0x1ff) * 8);
        let is_leaf = entry & 1 != 0 && (walked == 3 || entry & 2 == 0);
        if walked as usize == level || is_leaf || entry & 1 == 0 {
            return (entry, is_leaf && walked as usize == level);
        }
        table = entry & 0x0000_ffff_ffff_f000;
    }
    (0, false)
}

/// Maps the same in their tables, and compares all leaves.
fn same<R: TranslationRegime>(
    format: Arm<12>,
    theirs: impl Fn() -> LinearMap<R>,
    flags: impl Fn(&Attributes) -> R::Attributes,
    bits: fn(R::Attributes) -> u64,
) {
    let mut compared = 0;
    for round in 0..ROUNDS / 4 {
        let memory = Memory::with_base(PhysAddr::new(1 << 32), 64 << 20);
        let mut bench = Bench::new(memory, format, (0, 1 << 46));
        bench.dice = Dice::new(round);
        let mut theirs = theirs();
        for _ in 0..6 {
            // An address, and memory at the same distance, as theirs is a linear map.
            let unit = 1 << (12 + bench.dice.below(20));
            let start = bench.dice.below((1 << 46) / unit) * unit;
            let len = (bench.dice.below(3) + 1) * unit + (bench.dice.below(4) << 12);
            let attributes = any(&mut bench.dice);
            if !bench.is_free(start, len) {
                continue;
            }
            let phys = start + OFFSET;
            let range = IovaRange::new(Iova::new(start), len).unwrap();
            // SAFETY: no device uses the memory.
            unsafe { bench.table.map(&*PLATFORM, range, PhysAddr::new(phys), attributes) }.unwrap();
            bench.plain.insert(start, Mapped { len, phys, attributes });
            let region = MemoryRegion::new(start as usize, (start + len) as usize);
            theirs.map_range(&region, flags(&attributes)).unwrap();
            let mut covered = 0;
            let visit = &mut |region: &MemoryRegion, theirs: &Descriptor<R::Attributes>, level| {
                let at = region.start().0 as u64;
                let (ours, is_leaf) = entry(&bench, at, level);
                let flags: R::Attributes = theirs.flags();
                let theirs = theirs.output_address().0 as u64 | bits(flags);
                assert!(is_leaf, "{at:#x}: {ours:#x} at level {level}, theirs is {theirs:#x}");
                assert_eq!(ours & !CONTIGUOUS, theirs, "{at:#x} at level {level}");
                covered += region.len() as u64;
                Ok(())
            };
            theirs.walk_range(&region, visit).unwrap();
            assert_eq!(covered, len);
            compared += 1;
        }
    }
    assert!(compared > ROUNDS, "{compared}");
}

fn any(dice: &mut Dice) -> Attributes {
    let memory = [Kind::WriteBack, Kind::Uncached, Kind::Device][dice.below(3) as usize];
    Attributes { memory, execute: dice.below(2) == 0, privileged: dice.below(2) == 0, ..rights(dice) }
}

#[test]
fn stage_1_beside_the_tables_of_aarch64_paging() {
    let flags = |attributes: &Attributes| {
        // By ARM_MAIR: 0 is not cached, 1 is write-back, 2 is a device's.
        let memory = match attributes.memory {
            Kind::WriteBack => El1Attributes::ATTRIBUTE_INDEX_1 | El1Attributes::INNER_SHAREABLE,
            Kind::Uncached => El1Attributes::ATTRIBUTE_INDEX_0 | El1Attributes::OUTER_SHAREABLE,
            Kind::Device => El1Attributes::ATTRIBUTE_INDEX_2 | El1Attributes::OUTER_SHAREABLE,
        };
        let mut flags = El1Attributes::VALID | El1Attributes::ACCESSED | El1Attributes::NON_GLOBAL | memory;
        flags.set(El1Attributes::READ_ONLY, !writes(attributes));
        flags.set(El1Attributes::USER, !attributes.privileged);
        // What devices of processes may write, the privileged never execute anyway.
        flags.set(El1Attributes::UXN, !attributes.execute || attributes.privileged);
        flags.set(El1Attributes::PXN, !attributes.execute);
        flags
    };
    let format = Arm::<12>::stage_1(BITS, BITS).unwrap();
    let theirs = || LinearMap::with_asid(1, 0, OFFSET as isize, El1And0, VaRange::Lower);
    same(format, theirs, flags, |flags| flags.bits() as u64);
}

#[test]
fn stage_2_beside_the_tables_of_aarch64_paging() {
    type Flags = Stage2Attributes;
    let flags = |attributes: &Attributes| {
        let memory = match attributes.memory {
            Kind::WriteBack => {
                Flags::MEMATTR_NORMAL_INNER_WB | Flags::MEMATTR_NORMAL_OUTER_WB | Flags::SH_INNER
            }
            Kind::Uncached => {
                Flags::MEMATTR_NORMAL_INNER_NC | Flags::MEMATTR_NORMAL_OUTER_NC | Flags::SH_OUTER
            }
            Kind::Device => Flags::MEMATTR_DEVICE_nGnRE | Flags::SH_OUTER,
        };
        let access = if writes(attributes) { Flags::S2AP_ACCESS_RW } else { Flags::S2AP_ACCESS_RO };
        let mut flags = <Flags as PagingAttributes>::VALID | Flags::ACCESS_FLAG | access | memory;
        flags.set(Flags::XN, !attributes.execute);
        flags
    };
    let format = Arm::<12>::stage_2(BITS, BITS).unwrap();
    same(format, || LinearMap::new(0, OFFSET as isize, Stage2), flags, |flags| flags.bits() as u64);
}
