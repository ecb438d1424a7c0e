//! Page-table layouts against entries put together by hand from the manuals' figures.

use portcullis::SetupError;
use portcullis::addr::{PageSize, Permissions, PhysAddr};

use portcullis::pgtable::{
    ARM_MAIR, AmdV1, Arm, Attributes, Entry, Format, Layout, LeafSize, Memory, Riscv, VtdSecondStage,
    X86FirstStage,
};
use proptest::prelude::*;

const READ: Permissions = Permissions::READ;
const WRITE: Permissions = Permissions::WRITE;
const BOTH: Permissions = Permissions::READ_WRITE;

/// [`Arm::stage_1`] or [`Arm::stage_2`].
type MakeArm<const GRANULE: u32> = fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>;

/// Every mode of RISC-V.
const RISCV: [Riscv; 5] = [Riscv::sv39(), Riscv::sv48(), Riscv::sv57(), Riscv::sv39x4(), Riscv::sv48x4()];

fn plain(permissions: Permissions) -> Attributes {
    Attributes::from(permissions)
}

fn memory(memory: Memory) -> Attributes {
    Attributes { memory, ..plain(BOTH) }
}

fn execute(permissions: Permissions) -> Attributes {
    Attributes { execute: true, ..plain(permissions) }
}

fn privileged(permissions: Permissions) -> Attributes {
    Attributes { privileged: true, ..plain(permissions) }
}

fn leaf(format: impl Format, page: u64, level: u32, run: u32, attributes: Attributes) -> u64 {
    let size = LeafSize { level, run };
    assert!(format.leaf_sizes().contains(&size), "{format:?} has no {size:?}");
    format.leaf(PhysAddr::new(page), size, attributes)
}

fn table(format: impl Format, at: u64, level: u32) -> u64 {
    format.table(PhysAddr::new(at), level)
}

fn is_table(format: impl Format, entry: u64, at_level: u32, table: u64, level: u32) {
    assert_eq!(format.decode(entry, at_level), Entry::Table { table: PhysAddr::new(table), level });
}

#[test]
fn x86_leaves() {
    let x = X86FirstStage::new(4, 3, 52).unwrap();
    // P 0x01, U/S 0x04, A 0x20; XD is bit 63.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(READ)), 0x8000_0000_1234_5025);
    // And R/W 0x02, D 0x40.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(BOTH)), 0x8000_0000_1234_5067);
    // There is no writing without reading.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(WRITE)), 0x8000_0000_1234_5067);
    // Without XD.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, execute(BOTH)), 0x1234_5067);
    // Without U/S.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, privileged(READ)), 0x8000_0000_1234_5021);
    // PCD 0x10: the third entry of the PAT, UC-.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Uncached)), 0x8000_0000_1234_5077);
    // PCD 0x10 and PWT 0x08: the fourth, UC.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Device)), 0x8000_0000_1234_507f);
    // PS 0x80 from level 2 on.
    assert_eq!(leaf(x, 0x4020_0000, 2, 0, plain(BOTH)), 0x8000_0000_4020_00e7);
    assert_eq!(leaf(x, 0x1_8000_0000, 3, 0, plain(READ)), 0x8000_0001_8000_00a5);
    // All 52 address bits.
    assert_eq!(leaf(x, 0xf_ffff_ffff_f000, 1, 0, plain(BOTH)), 0x800f_ffff_ffff_f067);
    // PAT is bit 12 of a large page, no part of its address.
    assert_eq!(x.page(0x8000_0000_4020_10e7, 2), PhysAddr::new(0x4020_0000));
}

#[test]
fn x86_tables() {
    let x = X86FirstStage::new(5, 3, 52).unwrap();
    // P 0x01, R/W 0x02, U/S 0x04, A 0x20.
    assert_eq!(table(x, 0xabc_d000, 1), 0xabc_d027);
    is_table(x, 0xabc_d027, 5, 0xabc_d000, 4);
    is_table(x, 0xabc_d027, 2, 0xabc_d000, 1);
    // Bit 7 of a level-1 entry is PAT: a leaf with it and without it.
    assert_eq!(x.decode(0xabc_d0a5, 1), Entry::Leaf { run: 0 });
    assert_eq!(x.decode(0xabc_d025, 1), Entry::Leaf { run: 0 });
    // Everything but P.
    assert_eq!(x.decode(0xffff_ffff_ffff_fffe, 1), Entry::Absent);
}

#[test]
fn snooping_is_kept_where_the_hardware_has_snoop_control() {
    let plain_format = VtdSecondStage::new(4, 3, 52).unwrap();
    let snooping = Attributes { snoop: true, ..plain(BOTH) };
    for (level, large) in [(1, 0), (2, 0x80), (3, 0x80)] {
        // Bit 11, SNP, is reserved elsewhere.
        assert_eq!(leaf(plain_format, 0x4000_0000, level, 0, snooping), 0x4000_0003 | large);
        let format = plain_format.with_snoop_control(true);
        assert_eq!(leaf(format, 0x4000_0000, level, 0, snooping), 0x4000_0803 | large);
    }
    assert_eq!(plain_format.with_snoop_control(true).kept(snooping), snooping);
    assert_eq!(plain_format.kept(snooping), plain(BOTH));
    // What else a mapping is without.
    let wanted = Attributes { execute: true, ..plain(WRITE) };
    assert_eq!(plain_format.kept(wanted), plain(WRITE));
    assert_eq!(X86FirstStage::new(4, 3, 52).unwrap().kept(wanted), execute(BOTH));
}

#[test]
fn amd_leaves() {
    let x = AmdV1::new(6, 3, 52).unwrap();
    // PR 0x1; IR bit 61, IW bit 62, FC bit 60.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(READ)), 0x2000_0000_1234_5001);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(WRITE)), 0x4000_0000_1234_5001);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(BOTH)), 0x6000_0000_1234_5001);
    let coherent = Attributes { snoop: true, ..plain(BOTH) };
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, coherent), 0x7000_0000_1234_5001);
    assert_eq!(leaf(x, 0xf_ffff_ffff_f000, 1, 0, plain(BOTH)), 0x600f_ffff_ffff_f001);
    // The levels' own sizes, 2 MiB and 1 GiB: next level 0.
    assert_eq!(leaf(x, 0x4020_0000, 2, 0, plain(BOTH)), 0x6000_0000_4020_0001);
    assert_eq!(leaf(x, 0x1_8000_0000, 3, 0, plain(BOTH)), 0x6000_0001_8000_0001);
    // Next level 7 is 0xe00. 8 KiB: bit 12 is clear. 16 KiB: 12 set, 13 clear. 64 KiB: 12 to 14 set.
    assert_eq!(leaf(x, 0x1234_4000, 1, 1, plain(BOTH)), 0x6000_0000_1234_4e01);
    assert_eq!(leaf(x, 0x1234_4000, 1, 2, plain(BOTH)), 0x6000_0000_1234_5e01);
    assert_eq!(leaf(x, 0x1235_0000, 1, 4, plain(BOTH)), 0x6000_0000_1235_7e01);
    // 1 MiB: bits 12 to 18 set (0x7f000).
    assert_eq!(leaf(x, 0x1230_0000, 1, 8, plain(BOTH)), 0x6000_0000_1237_fe01);
    // 4 MiB: bits 12 to 20 set. 512 MiB: bits 12 to 27.
    assert_eq!(leaf(x, 0x4000_0000, 2, 1, plain(BOTH)), 0x6000_0000_401f_fe01);
    assert_eq!(leaf(x, 0x4000_0000, 2, 8, plain(BOTH)), 0x6000_0000_4fff_fe01);
    // 4 GiB: bits 12 to 30. 256 GiB: bits 12 to 36.
    assert_eq!(leaf(x, 0x3_0000_0000, 3, 2, plain(BOTH)), 0x6000_0003_7fff_fe01);
    assert_eq!(leaf(x, 0x40_0000_0000, 3, 8, plain(BOTH)), 0x6000_005f_ffff_fe01);
    // And back.
    assert_eq!(x.decode(0x6000_0003_7fff_fe01, 3), Entry::Leaf { run: 2 });
    assert_eq!(x.page(0x6000_0003_7fff_fe01, 3), PhysAddr::new(0x3_0000_0000));
    // The entries of such a page are all the same.
    assert_eq!(x.stride(LeafSize { level: 3, run: 2 }), 0);
    assert_eq!(x.stride(LeafSize { level: 3, run: 0 }), 1 << 30);
}

#[test]
fn amd_tables() {
    let x = AmdV1::new(6, 3, 52).unwrap();
    // PR 0x1, next level from bit 9 on: 0x200 for level 1, 0x600 for level 3; IR and IW.
    assert_eq!(table(x, 0xabc_d000, 1), 0x6000_0000_0abc_d201);
    assert_eq!(table(x, 0xabc_d000, 3), 0x6000_0000_0abc_d601);
    assert_eq!(table(x, 0xabc_d000, 5), 0x6000_0000_0abc_da01);
    is_table(x, 0x6000_0000_0abc_d601, 4, 0xabc_d000, 3);
    // A way that passes over levels.
    is_table(x, 0x6000_0000_0abc_d201, 6, 0xabc_d000, 1);
    // One that does not lead down.
    assert_eq!(x.decode(0x6000_0000_0abc_d601, 3), Entry::Absent);
    assert_eq!(x.decode(0x6000_0000_0abc_d201, 1), Entry::Absent);
    // Everything but PR.
    assert_eq!(x.decode(0xffff_ffff_ffff_fffe, 4), Entry::Absent);
    // No size at all, as hardware would never be given: an answer, though no matter which.
    assert!(matches!(x.decode(0x600f_ffff_ffff_fe01, 6), Entry::Leaf { .. }));
    assert_eq!(x.page(0x600f_ffff_ffff_fe01, 6), PhysAddr::new(0));
}

#[test]
fn arm_stage_1_leaves() {
    let x = Arm::<12>::stage_1(48, 48).unwrap();
    // Valid and page 0x3, AttrIndx 1 0x4, AP[1] 0x40, inner shareable 0x300, AF 0x400, nG 0x800; PXN is bit 53,
    // UXN 54.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(BOTH)), 0x0060_0000_1234_5f47);
    // AP[2] 0x80.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(READ)), 0x0060_0000_1234_5fc7);
    // There is no writing without reading.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(WRITE)), 0x0060_0000_1234_5f47);
    // Without AP[1].
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, privileged(BOTH)), 0x0060_0000_1234_5f07);
    // Without PXN, and unless it is privileged, without UXN.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, execute(BOTH)), 0x1234_5f47);
    let both = Attributes { execute: true, ..privileged(BOTH) };
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, both), 0x0040_0000_1234_5f07);
    // Outer shareable 0x200; AttrIndx 0, and 2: 0x8.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Uncached)), 0x0060_0000_1234_5e43);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Device)), 0x0060_0000_1234_5e4b);
    // The contiguous bit, 52.
    assert_eq!(leaf(x, 0x1234_0000, 1, 4, plain(BOTH)), 0x0070_0000_1234_0f47);
    // Blocks: 0x1 instead of 0x3.
    assert_eq!(leaf(x, 0x4020_0000, 2, 0, plain(BOTH)), 0x0060_0000_4020_0f45);
    assert_eq!(leaf(x, 0x4200_0000, 2, 4, plain(BOTH)), 0x0070_0000_4200_0f45);
    assert_eq!(leaf(x, 0x1_8000_0000, 3, 0, plain(BOTH)), 0x0060_0001_8000_0f45);
    assert_eq!(leaf(x, 0x4_0000_0000, 3, 4, plain(BOTH)), 0x0070_0004_0000_0f45);
    assert_eq!(leaf(x, 0xffff_ffff_f000, 1, 0, plain(BOTH)), 0x0060_ffff_ffff_ff47);
    // The last of sixteen entries has the address of its own page, and is part of the large one.
    assert_eq!(x.stride(LeafSize { level: 1, run: 4 }), 0x1000);
    assert_eq!(x.decode(0x0070_0000_1234_ff47, 1), Entry::Leaf { run: 4 });
    assert_eq!(x.page(0x0070_0000_1234_ff47, 1), PhysAddr::new(0x1234_0000));
    // What the three values of AttrIndx stand for.
    assert_eq!(ARM_MAIR.to_le_bytes(), [0x44, 0xff, 0x04, 0, 0, 0, 0, 0]);
}

#[test]
fn arm_stage_2_leaves() {
    let x = Arm::<12>::stage_2(40, 48).unwrap();
    // Valid and page 0x3, MemAttr 0b1111 0x3c, S2AP 0xc0, inner shareable 0x300, AF 0x400; XN bit 54.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(BOTH)), 0x0040_0000_1234_57ff);
    // S2AP 0b01 0x40, 0b10 0x80.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(READ)), 0x0040_0000_1234_577f);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(WRITE)), 0x0040_0000_1234_57bf);
    // MemAttr 0b0101 0x14, 0b0001 0x04; outer shareable 0x200.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Uncached)), 0x0040_0000_1234_56d7);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Device)), 0x0040_0000_1234_56c7);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, execute(BOTH)), 0x1234_57ff);
    // Nothing says "privileged".
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, privileged(BOTH)), 0x0040_0000_1234_57ff);
    assert_eq!(leaf(x, 0x4020_0000, 2, 0, plain(BOTH)), 0x0040_0000_4020_07fd);
    assert_eq!(leaf(x, 0x4000_0000, 3, 0, plain(BOTH)), 0x0040_0000_4000_07fd);
    assert_eq!(leaf(x, 0x4_0000_0000, 3, 4, plain(BOTH)), 0x0050_0004_0000_07fd);
}

#[test]
fn arm_granules() {
    let x = Arm::<14>::stage_1(48, 48).unwrap();
    // 16 KiB; 2 MiB, 128 of them; 32 MiB; 1 GiB, 32 of them.
    assert_eq!(leaf(x, 0x1234_4000, 1, 0, plain(BOTH)), 0x0060_0000_1234_4f47);
    assert_eq!(leaf(x, 0x1220_0000, 1, 7, plain(BOTH)), 0x0070_0000_1220_0f47);
    assert_eq!(leaf(x, 0x1200_0000, 2, 0, plain(BOTH)), 0x0060_0000_1200_0f45);
    assert_eq!(leaf(x, 0x4000_0000, 2, 5, plain(BOTH)), 0x0070_0000_4000_0f45);
    assert_eq!(table(x, 0xabc_c000, 3), 0xabc_c003);
    let x = Arm::<14>::stage_2(48, 48).unwrap();
    assert_eq!(leaf(x, 0x1234_4000, 1, 0, plain(READ)), 0x0040_0000_1234_477f);
    assert_eq!(leaf(x, 0x4000_0000, 2, 5, plain(BOTH)), 0x0050_0000_4000_07fd);
    // 64 KiB; 2 MiB, 32 of them; 512 MiB; 16 GiB, 32 of them.
    let x = Arm::<16>::stage_1(52, 52).unwrap();
    assert_eq!(leaf(x, 0x1235_0000, 1, 0, plain(BOTH)), 0x0060_0000_1235_0f47);
    assert_eq!(leaf(x, 0x1220_0000, 1, 5, plain(BOTH)), 0x0070_0000_1220_0f47);
    assert_eq!(leaf(x, 0x2000_0000, 2, 0, plain(BOTH)), 0x0060_0000_2000_0f45);
    assert_eq!(leaf(x, 0x4_0000_0000, 2, 5, plain(BOTH)), 0x0070_0004_0000_0f45);
    // Bits 51:48 of an address stand in bits 15:12.
    assert_eq!(leaf(x, 0xf_edcb_a987_0000, 1, 0, plain(BOTH)), 0x0060_edcb_a987_ff47);
    assert_eq!(leaf(x, 0x9_0000_2000_0000, 2, 0, plain(BOTH)), 0x0060_0000_2000_9f45);
    assert_eq!(table(x, 0xa_0000_0001_0000, 1), 0x0001_a003);
    is_table(x, 0x0001_a003, 3, 0xa_0000_0001_0000, 2);
    let x = Arm::<16>::stage_2(52, 52).unwrap();
    assert_eq!(leaf(x, 0xf_edcb_a987_0000, 1, 0, plain(READ)), 0x0040_edcb_a987_f77f);
}

#[test]
fn arm_tables() {
    for new in [Arm::<12>::stage_1, Arm::stage_2] {
        let x = new(48, 48).unwrap();
        // Valid and table.
        assert_eq!(table(x, 0xabc_d000, 3), 0xabc_d003);
        is_table(x, 0xabc_d003, 4, 0xabc_d000, 3);
        // A block where there is none, and the reserved type without the valid bit.
        assert_eq!(x.decode(0xabc_d001, 1), Entry::Absent);
        assert_eq!(x.decode(0xffff_ffff_ffff_fffe, 2), Entry::Absent);
    }
}

#[test]
fn arm_roots() {
    fn shape<const GRANULE: u32>(new: MakeArm<GRANULE>, input: u32) -> (u32, u32) {
        let most = if GRANULE == 16 { 52 } else { 48 };
        let format = new(input, most).unwrap();
        (format.levels(), format.root_bits())
    }
    // Levels, and the binary logarithm of the root's entries, of which a table has 9, 11 or 13.
    assert_eq!(shape(Arm::<12>::stage_1, 48), (4, 9));
    assert_eq!(shape(Arm::<12>::stage_1, 40), (4, 1));
    assert_eq!(shape(Arm::<12>::stage_1, 39), (3, 9));
    assert_eq!(shape(Arm::<12>::stage_1, 25), (2, 4));
    // Stage 2 with 40 bits: two tables at level 1 (as the manual counts), with 43: sixteen.
    assert_eq!(shape(Arm::<12>::stage_2, 48), (4, 9));
    assert_eq!(shape(Arm::<12>::stage_2, 44), (4, 5));
    assert_eq!(shape(Arm::<12>::stage_2, 43), (3, 13));
    assert_eq!(shape(Arm::<12>::stage_2, 40), (3, 10));
    assert_eq!(shape(Arm::<12>::stage_2, 34), (2, 13));
    assert_eq!(shape(Arm::<12>::stage_2, 25), (2, 4));
    assert_eq!(shape(Arm::<14>::stage_1, 48), (4, 1));
    assert_eq!(shape(Arm::<14>::stage_1, 47), (3, 11));
    assert_eq!(shape(Arm::<14>::stage_1, 25), (1, 11));
    assert_eq!(shape(Arm::<14>::stage_2, 48), (3, 12));
    assert_eq!(shape(Arm::<14>::stage_2, 40), (2, 15));
    assert_eq!(shape(Arm::<14>::stage_2, 29), (1, 15));
    assert_eq!(shape(Arm::<16>::stage_1, 52), (3, 10));
    assert_eq!(shape(Arm::<16>::stage_1, 42), (2, 13));
    assert_eq!(shape(Arm::<16>::stage_2, 48), (3, 6));
    assert_eq!(shape(Arm::<16>::stage_2, 46), (2, 17));
    assert_eq!(shape(Arm::<16>::stage_2, 33), (1, 17));
    // Leaves that are larger than all that is translated are not there.
    let small = Arm::<12>::stage_1(25, 48).unwrap();
    assert_eq!(small.page_size(*small.leaf_sizes().last().unwrap()), PageSize::from_shift(25).unwrap());
    // Nor leaves of a level that is not there: 34 bits hold 1 GiB, but two levels do not.
    let small = Arm::<12>::stage_2(34, 48).unwrap();
    assert_eq!(small.leaf_sizes().last(), Some(&LeafSize { level: 2, run: 4 }));
}

#[test]
fn riscv_leaves() {
    let x = Riscv::sv57().within(5, 56).unwrap();
    // V 0x01, R 0x02, U 0x10, A 0x40; the page number 0x12345 from bit 10 on is 0x48d_1400.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(READ)), 0x048d_1453);
    // And W 0x04, D 0x80.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(BOTH)), 0x048d_14d7);
    // There is no writing without reading.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, plain(WRITE)), 0x048d_14d7);
    // And X 0x08.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, execute(BOTH)), 0x048d_14df);
    // Without U.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, privileged(READ)), 0x048d_1443);
    // PBMT, bits 62:61: 1 and 2.
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Uncached)), 0x2000_0000_048d_14d7);
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, memory(Memory::Device)), 0x4000_0000_048d_14d7);
    // Page numbers 0x4_0200, 0x18_0000, 0x800_0000 and 2^36, all times 2^10.
    assert_eq!(leaf(x, 0x4020_0000, 2, 0, plain(BOTH)), 0x1008_00d7);
    assert_eq!(leaf(x, 0x1_8000_0000, 3, 0, plain(BOTH)), 0x6000_00d7);
    assert_eq!(leaf(x, 0x80_0000_0000, 4, 0, plain(BOTH)), 0x20_0000_00d7);
    assert_eq!(leaf(x, 0x1_0000_0000_0000, 5, 0, plain(BOTH)), 0x4000_0000_00d7);
    // All 44 bits of the page number.
    assert_eq!(leaf(x, 0xff_ffff_ffff_f000, 1, 0, plain(BOTH)), 0x3f_ffff_ffff_fcd7);
    // The second stage always has U.
    let x = Riscv::sv39x4().within(3, 56).unwrap();
    assert_eq!(leaf(x, 0x1234_5000, 1, 0, privileged(READ)), 0x048d_1453);
    assert_eq!(leaf(x, 0x1_8000_0000, 3, 0, plain(BOTH)), 0x6000_00d7);
}

#[test]
fn riscv_tables() {
    let x = Riscv::sv48().within(4, 56).unwrap();
    // V alone; the page number 0xabcd from bit 10 on.
    assert_eq!(table(x, 0xabc_d000, 1), 0x2af_3401);
    is_table(x, 0x2af_3401, 4, 0xabc_d000, 3);
    // No tables below the lowest level, and nothing that can only be written.
    assert_eq!(x.decode(0x2af_3401, 1), Entry::Absent);
    assert_eq!(x.decode(0x2af_3405, 2), Entry::Absent);
    // Only to be executed: not made here, but a leaf.
    assert_eq!(x.decode(0x2af_3409, 2), Entry::Leaf { run: 0 });
    // Everything but V.
    assert_eq!(x.decode(0xffff_ffff_ffff_fffe, 2), Entry::Absent);
}

/// What stands at the seam: the name, then levels, input bits, binary logarithm of the root's entries.
/// What hardware is told, by the manuals' tables: VT-d 9.3 and 9.6, AMD 48882 2.2.2, IHI 0070 5.2 and 5.4, RISC-V IOMMU 1.0.
#[test]
fn registers() {
    assert_eq!(
        [3, 4, 5].map(|levels| VtdSecondStage::new(levels, 1, 46).unwrap().aw()),
        [0b001, 0b010, 0b011]
    );
    assert_eq!([4, 5].map(|levels| X86FirstStage::new(levels, 1, 46).unwrap().fspm()), [0b00, 0b01]);
    assert_eq!([1, 4, 6].map(|levels| AmdV1::new(levels, 1, 46).unwrap().mode()), [1, 4, 6]);
    assert_eq!(RISCV.map(|format| format.mode()), [8, 9, 10, 8, 9]);

    fn arm<const GRANULE: u32>(
        new: MakeArm<GRANULE>,
        input: u32,
        output: u32,
    ) -> (u32, u32, Option<u32>, u32) {
        let format = new(input, output).unwrap();
        (format.t0sz(), format.tg0(), format.sl0(), format.ps())
    }
    // T0SZ, TG (00 4 KiB, 01 64 KiB, 10 16 KiB), SL0, PS.
    assert_eq!(arm(Arm::<12>::stage_1, 48, 48), (16, 0b00, None, 5));
    assert_eq!(arm(Arm::<12>::stage_1, 39, 44), (25, 0b00, None, 4));
    assert_eq!(arm(Arm::<14>::stage_1, 47, 40), (17, 0b10, None, 2));
    assert_eq!(arm(Arm::<16>::stage_1, 52, 52), (12, 0b01, None, 6));
    // The manual's levels 0, 1 and 2, of which the last two have concatenated roots.
    assert_eq!(arm(Arm::<12>::stage_2, 48, 48), (16, 0b00, Some(0b10), 5));
    assert_eq!(arm(Arm::<12>::stage_2, 39, 48), (25, 0b00, Some(0b01), 5));
    assert_eq!(arm(Arm::<12>::stage_2, 42, 42), (22, 0b00, Some(0b01), 3));
    assert_eq!(arm(Arm::<12>::stage_2, 32, 32), (32, 0b00, Some(0b00), 0));
    // Its levels 1, 2 and 3.
    assert_eq!(arm(Arm::<14>::stage_2, 48, 48), (16, 0b10, Some(0b10), 5));
    assert_eq!(arm(Arm::<14>::stage_2, 40, 40), (24, 0b10, Some(0b01), 2));
    assert_eq!(arm(Arm::<14>::stage_2, 29, 36), (35, 0b10, Some(0b00), 1));
    assert_eq!(arm(Arm::<16>::stage_2, 52, 52), (12, 0b01, Some(0b10), 6));
    assert_eq!(arm(Arm::<16>::stage_2, 42, 42), (22, 0b01, Some(0b01), 3));
    assert_eq!(arm(Arm::<16>::stage_2, 33, 43), (31, 0b01, Some(0b00), 4));
}

#[test]
fn frames_in_a_row() {
    fn frames(format: impl Format) -> (usize, usize) {
        (format.root_frames(), format.table_frames())
    }
    assert_eq!(frames(VtdSecondStage::four_level()), (1, 1));
    assert_eq!(frames(AmdV1::new(6, 3, 52).unwrap()), (1, 1));
    assert_eq!(frames(X86FirstStage::five_level()), (1, 1));
    // Small roots take a frame, too.
    assert_eq!(frames(Arm::<12>::stage_1(40, 48).unwrap()), (1, 1));
    // Two, eight and sixteen tables of 4 KiB side by side.
    assert_eq!(frames(Arm::<12>::stage_2(40, 48).unwrap()), (2, 1));
    assert_eq!(frames(Arm::<12>::stage_2(42, 42).unwrap()), (8, 1));
    assert_eq!(frames(Arm::<12>::stage_2(43, 48).unwrap()), (16, 1));
    // One table of 16 KiB, and two; one of 64 KiB, and sixteen. A root of two entries takes a frame.
    assert_eq!(frames(Arm::<14>::stage_1(47, 48).unwrap()), (4, 4));
    assert_eq!(frames(Arm::<14>::stage_1(48, 48).unwrap()), (1, 4));
    assert_eq!(frames(Arm::<14>::stage_2(48, 48).unwrap()), (8, 4));
    assert_eq!(frames(Arm::<16>::stage_1(42, 48).unwrap()), (16, 16));
    assert_eq!(frames(Arm::<16>::stage_2(46, 48).unwrap()), (256, 16));
    // The second stage's root of 16 KiB.
    assert_eq!(frames(Riscv::sv48()), (1, 1));
    assert_eq!(frames(Riscv::sv48x4()), (4, 1));
}

#[test]
fn layouts_by_name() {
    let vtd = [VtdSecondStage::three_level(), VtdSecondStage::four_level(), VtdSecondStage::five_level()];
    assert_eq!(vtd, [3, 4, 5].map(|levels| VtdSecondStage::new(levels, 3, 52).unwrap()));
    let x86 = [X86FirstStage::four_level(), X86FirstStage::five_level()];
    assert_eq!(x86, [4, 5].map(|levels| X86FirstStage::new(levels, 3, 52).unwrap()));
    let amd = [AmdV1::four_level(), AmdV1::five_level()];
    assert_eq!(amd, [4, 5].map(|levels| AmdV1::new(levels, 3, 52).unwrap()));
    for (format, levels) in RISCV.into_iter().zip([3, 4, 5, 3, 4]) {
        assert_eq!(format.levels(), levels);
        assert_eq!(format.within(levels, 56), Ok(format));
    }
    for (largest, large) in [(PageSize::SIZE_4K, 1), (PageSize::SIZE_2M, 2), (PageSize::SIZE_1G, 3)] {
        let vtd = VtdSecondStage::new(4, large, 52).unwrap();
        assert_eq!(VtdSecondStage::four_level().up_to(largest), vtd);
        // Never more than there were.
        assert_eq!(vtd.up_to(PageSize::SIZE_1G), vtd);
        let x86 = X86FirstStage::new(5, large, 52).unwrap();
        assert_eq!(X86FirstStage::five_level().up_to(largest), x86);
        assert_eq!(x86.up_to(PageSize::SIZE_1G), x86);
    }
}

fn seam(format: impl Format) -> (&'static str, u32, u32, u32) {
    (format.name(), format.levels(), format.input_bits(), format.root_bits())
}

#[test]
fn names_and_widths() {
    assert_eq!(seam(X86FirstStage::new(4, 3, 52).unwrap()), ("x86-4", 4, 47, 8));
    assert_eq!(seam(X86FirstStage::new(5, 3, 52).unwrap()), ("x86-5", 5, 56, 8));
    assert_eq!(seam(AmdV1::new(1, 1, 52).unwrap()), ("amd-v1", 1, 21, 9));
    assert_eq!(seam(AmdV1::new(4, 3, 52).unwrap()), ("amd-v1", 4, 48, 9));
    assert_eq!(seam(AmdV1::new(6, 3, 52).unwrap()), ("amd-v1", 6, 63, 6));
    assert_eq!(seam(Arm::<12>::stage_1(48, 48).unwrap()), ("arm-s1-4k", 4, 48, 9));
    assert_eq!(seam(Arm::<14>::stage_1(48, 48).unwrap()), ("arm-s1-16k", 4, 48, 1));
    assert_eq!(seam(Arm::<16>::stage_1(48, 48).unwrap()), ("arm-s1-64k", 3, 48, 6));
    assert_eq!(seam(Arm::<12>::stage_2(42, 42).unwrap()), ("arm-s2-4k", 3, 42, 12));
    assert_eq!(seam(Arm::<14>::stage_2(42, 42).unwrap()), ("arm-s2-16k", 3, 42, 6));
    assert_eq!(seam(Arm::<16>::stage_2(42, 42).unwrap()), ("arm-s2-64k", 2, 42, 13));
    let riscv = |mode: Riscv| seam(mode.within(3, 56).unwrap());
    assert_eq!(riscv(Riscv::sv39()), ("riscv-sv39", 3, 38, 8));
    assert_eq!(riscv(Riscv::sv48()), ("riscv-sv48", 4, 47, 8));
    assert_eq!(riscv(Riscv::sv57()), ("riscv-sv57", 5, 56, 8));
    assert_eq!(riscv(Riscv::sv39x4()), ("riscv-sv39x4", 3, 41, 11));
    assert_eq!(riscv(Riscv::sv48x4()), ("riscv-sv48x4", 4, 50, 11));
}

#[test]
fn limits() {
    let levels = |levels, min, max| SetupError::Levels { levels, min, max };
    let leaves = |levels, max| SetupError::LeafLevels { levels, max };
    let bits = |bits, min, max| SetupError::AddressBits { bits, min, max };

    assert_eq!(X86FirstStage::new(3, 1, 52), Err(levels(3, 4, 5)));
    assert_eq!(X86FirstStage::new(6, 1, 52), Err(levels(6, 4, 5)));
    assert_eq!(X86FirstStage::new(4, 0, 52), Err(leaves(0, 3)));
    assert_eq!(X86FirstStage::new(4, 4, 52), Err(leaves(4, 3)));
    assert_eq!(X86FirstStage::new(4, 3, 53), Err(bits(53, 12, 52)));
    assert_eq!(X86FirstStage::new(4, 3, 11), Err(bits(11, 12, 52)));
    assert_eq!(X86FirstStage::new(4, 1, 46).unwrap().leaf_sizes(), &[LeafSize { level: 1, run: 0 }]);

    assert_eq!(AmdV1::new(0, 1, 52), Err(levels(0, 1, 6)));
    assert_eq!(AmdV1::new(7, 1, 52), Err(levels(7, 1, 6)));
    assert_eq!(AmdV1::new(4, 0, 52), Err(leaves(0, 3)));
    assert_eq!(AmdV1::new(6, 4, 52), Err(leaves(4, 3)));
    assert_eq!(AmdV1::new(2, 3, 52), Err(leaves(3, 2)));
    assert_eq!(AmdV1::new(4, 3, 53), Err(bits(53, 12, 52)));
    assert_eq!(AmdV1::new(4, 3, 11), Err(bits(11, 12, 52)));
    assert_eq!(AmdV1::new(4, 1, 48).unwrap().leaf_sizes().len(), 9);
    assert_eq!(AmdV1::new(4, 3, 48).unwrap().leaf_sizes().len(), 27);
    assert_eq!(AmdV1::new(3, 3, 48).unwrap().leaf_sizes().len(), 19);

    assert_eq!(Arm::<12>::stage_1(48, 49), Err(bits(49, 32, 48)));
    assert_eq!(Arm::<12>::stage_1(48, 31), Err(bits(31, 32, 48)));
    assert_eq!(Arm::<12>::stage_1(49, 48), Err(bits(49, 25, 48)));
    assert_eq!(Arm::<14>::stage_2(24, 48), Err(bits(24, 25, 48)));
    assert_eq!(Arm::<14>::stage_2(49, 48), Err(bits(49, 25, 48)));
    assert_eq!(Arm::<16>::stage_1(53, 52), Err(bits(53, 25, 52)));
    assert_eq!(Arm::<16>::stage_1(48, 53), Err(bits(53, 32, 52)));
    // Stage 2 translates no more than there are physical bits.
    assert_eq!(Arm::<12>::stage_2(45, 44), Err(bits(45, 25, 44)));
    assert_eq!(Arm::<12>::stage_2(37, 36), Err(bits(37, 25, 36)));
    // Unless the SMMU says so: 40 at the most.
    assert_eq!(Arm::<12>::stage_2_with_ias(41, 36, 44), Err(bits(41, 25, 40)));
    assert_eq!(Arm::<12>::stage_2_with_ias(39, 36, 38), Err(bits(39, 25, 38)));
    assert_eq!(Arm::<12>::stage_2_with_ias(45, 44, 48), Err(bits(45, 25, 44)));
    assert!(Arm::<12>::stage_2_with_ias(40, 36, 40).is_ok());
    assert_eq!(Arm::<12>::stage_2_with_ias(40, 40, 32), Arm::<12>::stage_2(40, 40));

    assert_eq!(Riscv::sv39().within(0, 56), Err(leaves(0, 3)));
    assert_eq!(Riscv::sv39x4().within(4, 56), Err(leaves(4, 3)));
    assert_eq!(Riscv::sv57().within(6, 56), Err(leaves(6, 5)));
    assert_eq!(Riscv::sv48().within(4, 57), Err(bits(57, 12, 56)));
    assert_eq!(Riscv::sv48().within(4, 11), Err(bits(11, 12, 56)));
    assert_eq!(Riscv::sv48().within(4, 44).unwrap().last_phys(), PhysAddr::new(0xfff_ffff_ffff));
}

#[test]
fn leaves_are_at_as_many_levels_as_was_asked_for() {
    fn are_at(format: impl Format, levels: u32) {
        let wanted: Vec<_> = (1..=levels).map(|level| LeafSize { level, run: 0 }).collect();
        assert_eq!(format.leaf_sizes(), wanted, "{format:?}");
    }
    for large in 1..=3 {
        (3..=5).for_each(|levels| are_at(VtdSecondStage::new(levels, large, 52).unwrap(), large));
        (4..=5).for_each(|levels| are_at(X86FirstStage::new(levels, large, 52).unwrap(), large));
        for mode in [Riscv::sv39(), Riscv::sv39x4()] {
            are_at(mode.within(large, 56).unwrap(), large);
        }
    }
    (1..=4).for_each(|large| are_at(Riscv::sv48().within(large, 56).unwrap(), large));
    (1..=4).for_each(|large| are_at(Riscv::sv48x4().within(large, 56).unwrap(), large));
    (1..=5).for_each(|large| are_at(Riscv::sv57().within(large, 56).unwrap(), large));
}

/// Every combination of attributes.
fn all_attributes() -> impl Iterator<Item = Attributes> {
    (0..72_u32).map(|n| Attributes {
        permissions: [READ, WRITE, BOTH][n as usize % 3],
        memory: [Memory::WriteBack, Memory::Uncached, Memory::Device][n as usize / 3 % 3],
        snoop: (n / 9) & 1 != 0,
        privileged: (n / 9) & 2 != 0,
        execute: (n / 9) & 4 != 0,
    })
}

/// What a format keeps.
struct Keeps {
    write_only: bool,
    memory: bool,
    snoop: bool,
    privileged: bool,
    execute: bool,
}

impl Keeps {
    fn of(&self, attributes: Attributes) -> Attributes {
        let permissions = match attributes.permissions {
            WRITE if !self.write_only => BOTH,
            permissions => permissions,
        };
        Attributes {
            permissions,
            memory: if self.memory { attributes.memory } else { Memory::WriteBack },
            snoop: attributes.snoop && self.snoop,
            privileged: attributes.privileged && self.privileged,
            execute: attributes.execute && self.execute,
        }
    }
}

/// What holds for every format, with the addresses that `bits` gives.
fn round_trip<X: Format>(format: X, keeps: &Keeps, bits: u64) {
    let entries = |level| if level == format.levels() { format.root_bits() } else { X::INDEX_BITS };
    let sizes: Vec<_> = format.leaf_sizes().iter().map(|size| format.page_size(*size)).collect();
    assert!(sizes.is_sorted_by(|a, b| a < b));
    assert_eq!(sizes.first().map(|size| size.shift()), Some(X::GRANULE_SHIFT));
    assert!(format.last_phys().get() < 1 << 56 && format.input_bits() < 64);
    for size in format.leaf_sizes().iter().copied() {
        assert!(size.level <= format.levels() && size.run <= entries(size.level), "{format:?} {size:?}");
        let bytes = format.page_size(size).bytes();
        let page = bits & format.last_phys().get() & !(bytes - 1);
        for attributes in all_attributes() {
            let first = format.leaf(PhysAddr::new(page), size, attributes);
            for n in [0, 1, (1 << size.run) - 1].into_iter().filter(|n| *n < 1 << size.run) {
                let entry = first + n * format.stride(size);
                assert_ne!(entry & X::PRESENT, 0);
                assert_eq!(entry & X::KIND, first & X::KIND);
                assert_eq!(format.decode(entry, size.level), Entry::Leaf { run: size.run }, "{entry:#x}");
                assert_eq!(format.page(entry, size.level), PhysAddr::new(page), "{entry:#x} {size:?}");
                assert_eq!(format.attributes(entry, size.level), keeps.of(attributes), "{entry:#x}");
            }
            // The leaf after this one, unless a multiple of 2^48 comes first.
            let next = page + bytes;
            if format.stride(size) != 0 && next <= format.last_phys().get() && page >> 48 == next >> 48 {
                let after = first + (format.stride(size) << size.run);
                assert_eq!(after, format.leaf(PhysAddr::new(next), size, attributes));
            }
        }
    }
    for level in 1..format.levels() {
        let at = PhysAddr::new(bits & format.last_phys().get() & !((1 << X::GRANULE_SHIFT) - 1));
        let entry = format.table(at, level);
        assert_ne!(entry & X::PRESENT, 0);
        assert_eq!(entry & X::MARK, 0);
        for entry in [entry, entry | X::MARK] {
            assert_eq!(format.decode(entry, level + 1), Entry::Table { table: at, level });
        }
    }
    for level in 1..=format.levels() {
        for absent in [0, X::MARK, bits & !X::PRESENT] {
            assert_eq!(format.decode(absent, level), Entry::Absent);
        }
    }
    assert_eq!(X::MARK & X::PRESENT, 0);
    assert_eq!(X::MARK & X::KIND, 0);
    assert_eq!(X::MARK.count_ones(), 1);
}

fn arm_round_trips<const GRANULE: u32>(bits: u64) {
    let most = if GRANULE == 16 { 52 } else { 48 };
    for (input, address) in [(25, 32), (33, 36), (40, 40), (42, 42), (43, 44), (48, 48), (most, most)] {
        let keeps = Keeps { write_only: false, memory: true, snoop: false, privileged: true, execute: true };
        round_trip(Arm::<GRANULE>::stage_1(input, address).unwrap(), &keeps, bits);
        let keeps = Keeps { write_only: true, privileged: false, ..keeps };
        round_trip(Arm::<GRANULE>::stage_2(input, address).unwrap(), &keeps, bits);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn x86_round_trips(bits: u64) {
        let keeps = Keeps { write_only: false, memory: true, snoop: false, privileged: true, execute: true };
        for (levels, large, address) in [(4, 3, 52), (5, 3, 52), (5, 2, 46), (4, 1, 39)] {
            round_trip(X86FirstStage::new(levels, large, address).unwrap(), &keeps, bits);
        }
    }

    #[test]
    fn amd_round_trips(bits: u64) {
        let keeps = Keeps { write_only: true, memory: false, snoop: true, privileged: false, execute: false };
        for levels in 1..=6 {
            for address in [40, 48, 52] {
                round_trip(AmdV1::new(levels, levels.min(3), address).unwrap(), &keeps, bits);
            }
        }
    }

    #[test]
    fn arm_4k_round_trips(bits: u64) {
        arm_round_trips::<12>(bits);
    }

    #[test]
    fn arm_16k_round_trips(bits: u64) {
        arm_round_trips::<14>(bits);
    }

    #[test]
    fn arm_64k_round_trips(bits: u64) {
        arm_round_trips::<16>(bits);
    }

    #[test]
    fn riscv_round_trips(bits: u64) {
        for format in RISCV {
            let privileged = !format.is_second_stage();
            let keeps = Keeps { write_only: false, memory: true, snoop: false, privileged, execute: true };
            for address in [44, 56] {
                round_trip(format.within(format.levels(), address).unwrap(), &keeps, bits);
            }
        }
    }
}
