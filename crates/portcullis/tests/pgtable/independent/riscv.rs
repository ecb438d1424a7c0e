//! Sv39 by the MMU of `riscv_emu_rust`, an emulator that boots Linux: each access goes through its
//! walk of our tables, to memory that holds its own address.

use portcullis::pgtable::Riscv;
use riscv_emu_rust::cpu::{PrivilegeMode, Xlen};
use riscv_emu_rust::mmu::{AddressingMode, Mmu};
use riscv_emu_rust::terminal::Terminal;

use super::*;

/// Where its memory begins: tables first, and then what is mapped, up to its end.
const DRAM: u64 = 0x8000_0000;
const TABLES: u64 = 4 << 20;
const CAPACITY: u64 = 16 << 20;

/// Bits of addresses that are not negative.
const BITS: u32 = 38;

/// Bits of an entry.
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const DIRTY: u64 = 1 << 7;

struct Nothing;

impl Terminal for Nothing {
    fn put_byte(&mut self, _: u8) {}

    fn get_output(&mut self) -> u8 {
        0
    }

    fn put_input(&mut self, _: u8) {}

    fn get_input(&mut self) -> u8 {
        0
    }
}

fn store(mmu: &mut Mmu, address: u64, word: u64) {
    (address..).zip(word.to_le_bytes()).for_each(|(at, byte)| mmu.store_raw(at, byte));
}

/// Copies the tables, as far as there are any.
fn copy(bench: &Bench<Riscv>, mmu: &mut Mmu) {
    for frame in
        (DRAM..DRAM + TABLES).step_by(4096).filter(|at| bench.memory.is_allocated(PhysAddr::new(*at)))
    {
        (frame..frame + 4096).step_by(8).for_each(|at| store(mmu, at, bench.word(at)));
    }
}

#[test]
fn every_access_reaches_what_is_mapped_and_is_refused_elsewhere() {
    let memory = Memory::with_base(PhysAddr::new(DRAM), TABLES);
    let mut bench = Bench::new(memory, Riscv::sv39(), (DRAM + TABLES, CAPACITY - TABLES));
    let mut mmu = Mmu::new(Xlen::Bit64, Box::new(Nothing));
    mmu.init_memory(CAPACITY);
    mmu.update_addressing_mode(AddressingMode::SV39);
    mmu.update_ppn(bench.table.root().get() >> 12);
    mmu.update_privilege_mode(PrivilegeMode::User);
    for page in (DRAM + TABLES..DRAM + CAPACITY).step_by(4096) {
        store(&mut mmu, page, page);
    }
    let attributes = |dice: &mut Dice| Attributes { execute: dice.below(2) == 0, ..rights(dice) };
    let (mut reached, mut refused) = (0, 0);
    for _ in 0..ROUNDS / 4 {
        (0..16).for_each(|_| bench.step(BITS, 21, attributes));
        copy(&bench, &mut mmu);
        for (at, expected) in bench.looks(BITS) {
            let page = at & !0xfff;
            let read = mmu.load_doubleword(page).ok();
            assert_eq!(read, expected.map(|(phys, _)| phys & !0xfff), "{at:#x}");
            // Beside the page's address.
            let may_write = expected.is_some_and(|(_, attributes)| writes(&attributes));
            assert_eq!(mmu.store_doubleword(page + 8, 7).is_ok(), may_write, "{at:#x}");
            let may_fetch = expected.is_some_and(|(_, attributes)| attributes.execute);
            assert_eq!(mmu.fetch_word(page).is_ok(), may_fetch, "{at:#x}");
            reached += u64::from(read.is_some());
            refused += u64::from(read.is_none());
        }
        // It had nothing to write back: accessed and dirty are set from the beginning. (It sets the
        // dirty bit of a page that it then refuses to write.)
        for frame in
            (DRAM..DRAM + TABLES).step_by(4096).filter(|at| bench.memory.is_allocated(PhysAddr::new(*at)))
        {
            for at in (frame..frame + 4096).step_by(8) {
                let halves = [mmu.load_word_raw(at), mmu.load_word_raw(at + 4)].map(u64::from);
                let (ours, theirs) = (bench.word(at), halves[0] | halves[1] << 32);
                let refused = if ours & WRITE == 0 && ours & READ != 0 { DIRTY } else { 0 };
                assert_eq!(theirs & !refused, ours & !refused, "it has changed {at:#x}");
            }
        }
    }
    assert!(reached > ROUNDS && refused > ROUNDS / 4, "{reached} {refused}");
}

/// A gigabyte in one entry; the emulator has the first megabytes of it.
#[test]
fn the_largest_page() {
    let memory = Memory::with_base(PhysAddr::new(DRAM), TABLES);
    let bench = Bench::new(memory, Riscv::sv39(), (DRAM, 1 << 30));
    let range = IovaRange::new(Iova::new(5 << 30), 1 << 30).unwrap();
    // SAFETY: no device uses the memory.
    unsafe { bench.table.map(&*PLATFORM, range, PhysAddr::new(DRAM), Permissions::READ) }.unwrap();
    let mut mmu = Mmu::new(Xlen::Bit64, Box::new(Nothing));
    mmu.init_memory(CAPACITY);
    mmu.update_addressing_mode(AddressingMode::SV39);
    mmu.update_ppn(bench.table.root().get() >> 12);
    mmu.update_privilege_mode(PrivilegeMode::User);
    copy(&bench, &mut mmu);
    store(&mut mmu, DRAM + TABLES + 0x12340, 0x5566);
    assert_eq!(mmu.load_doubleword((5 << 30) + TABLES + 0x12340).ok(), Some(0x5566));
    assert!(mmu.store((5 << 30) + TABLES, 1).is_err() && mmu.load(6 << 30).is_err());
}
