//! Every geometry that a constructor makes, and what the manuals say of it.
//!
//! The constructors are called with all arguments that could mean something and a few more, and what they accept is a
//! case: a geometry that is added is walked without a word here. What the walker is to find in an entry stands here in
//! the manuals' terms, not in the engine's.

use portcullis::addr::Permissions;
use portcullis::pgtable::{AmdV1, Arm, Attributes, Format, Memory, Riscv, VtdSecondStage, X86FirstStage};
use portcullis_model::walker::Rights;
use portcullis_model::{ArmStage, ArmTables, Granule, RiscvMode, TableFormat};

/// A family of formats, by what its entries hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Vtd,
    X86,
    Amd,
    ArmOne,
    ArmTwo,
    RiscvOne,
    RiscvTwo,
}

/// A geometry, and the walker for it.
#[derive(Debug, Clone, Copy)]
pub struct Case<X> {
    pub format: X,
    pub walker: TableFormat,
    family: Family,
}

impl<X: Format> Case<X> {
    /// What the format's documentation says it keeps of `attributes`.
    pub fn kept(&self, attributes: Attributes) -> Attributes {
        use Family::{Amd, ArmOne, ArmTwo, RiscvOne, RiscvTwo, Vtd, X86};
        let family = self.family;
        let has_write_only = matches!(family, Vtd | Amd | ArmTwo);
        let permissions = match attributes.permissions {
            Permissions::WRITE if !has_write_only => Permissions::READ_WRITE,
            permissions => permissions,
        };
        let has_memory = !matches!(family, Vtd | Amd);
        Attributes {
            permissions,
            memory: if has_memory { attributes.memory } else { Memory::WriteBack },
            snoop: attributes.snoop && matches!(family, Vtd | Amd),
            privileged: attributes.privileged && matches!(family, X86 | ArmOne | RiscvOne),
            execute: attributes.execute && matches!(family, X86 | ArmOne | ArmTwo | RiscvOne | RiscvTwo),
        }
    }

    /// What a walk finds that a leaf of these attributes allows. What a format has no bit for is allowed.
    pub fn rights(&self, attributes: Attributes) -> Rights {
        let kept = self.kept(attributes);
        let mut rights = Rights::ALL;
        let mut take = |right, granted: bool| {
            if !granted {
                rights = rights.without(right);
            }
        };
        take(Rights::READ, kept.permissions.allows(Permissions::READ));
        take(Rights::WRITE, kept.permissions.allows(Permissions::WRITE));
        take(Rights::USER, !kept.privileged);
        if !matches!(self.family, Family::Vtd | Family::Amd) {
            // Arm's UXN denies it to requests without privilege, which is what the walker tells.
            take(Rights::EXECUTE, kept.execute && !(self.family == Family::ArmOne && kept.privileged));
        }
        rights
    }

    /// The bits of a leaf for the memory type, as [`portcullis_model::walker::Leaf::attributes`] has them.
    pub fn memory_bits(&self, attributes: Attributes) -> u8 {
        let of = |cached, uncached, device| match attributes.memory {
            Memory::WriteBack => cached,
            Memory::Uncached => uncached,
            Memory::Device => device,
        };
        let snoop = u8::from(attributes.snoop);
        match self.family {
            // SNP.
            Family::Vtd => snoop,
            // FC above U.
            Family::Amd => snoop << 1,
            // PAT, PCD, PWT: WB, UC-, UC of the power-on PAT.
            Family::X86 => of(0b000, 0b010, 0b011),
            // SH (3 is inner shareable, 2 outer) above AttrIndx, an index into `ARM_MAIR`.
            Family::ArmOne => of(0b11_001, 0b10_000, 0b10_010),
            // SH above MemAttr.
            Family::ArmTwo => of(0b11_1111, 0b10_0101, 0b10_0001),
            // PBMT: PMA, NC, IO.
            Family::RiscvOne | Family::RiscvTwo => of(0, 1, 2),
        }
    }
}

/// What is to be done with each geometry.
pub trait Visit {
    fn visit<X: Format>(&mut self, case: Case<X>);
}

/// More bits, levels and leaf levels than anything has.
const BITS: u32 = 66;
const LEVELS: u32 = 9;

/// The levels of a context entry's AW: VT-d, section 9.3, "39-bit AGAW (3-level)", "48-bit AGAW (4-level)" and "57-bit AGAW
/// (5-level)"; other values are reserved.
fn vtd_levels(aw: u32) -> u32 {
    match aw {
        0b001 => 3,
        0b010 => 4,
        0b011 => 5,
        _ => panic!("AW {aw} is reserved"),
    }
}

pub fn vtd_case(format: VtdSecondStage) -> Case<VtdSecondStage> {
    let (walker, format) =
        (TableFormat::VtdSecondStage { levels: vtd_levels(format.aw()) }, format.with_snoop_control(true));
    Case { format, walker, family: Family::Vtd }
}

pub fn x86_case(format: X86FirstStage) -> Case<X86FirstStage> {
    // VT-d, section 9.6: FSPM is 00b for 4-level paging, 01b for 5-level paging.
    let walker = TableFormat::X86FirstStage { levels: [4, 5][format.fspm() as usize] };
    Case { format, walker, family: Family::X86 }
}

pub fn amd_case(format: AmdV1) -> Case<AmdV1> {
    // A device table entry's Mode: the levels; 0 translates nothing, and 7 is reserved.
    assert!((1..=6).contains(&format.mode()));
    let walker = TableFormat::AmdV1 { levels: format.mode() };
    Case { format, walker, family: Family::Amd }
}

/// For tables of `input` bits and hardware of `output` bits of physical address.
pub fn arm_case<const GRANULE: u32>(format: Arm<GRANULE>, input: u32, output: u32) -> Case<Arm<GRANULE>> {
    let (stage, family) = match format.is_stage_2() {
        false => (ArmStage::One, Family::ArmOne),
        true => (ArmStage::Two, Family::ArmTwo),
    };
    // What hardware reads in the registers: IHI 0070, sections 5.2 and 5.4.
    let granule = [Granule::Size4K, Granule::Size64K, Granule::Size16K][format.tg0() as usize];
    let output_bits = [32, 36, 40, 42, 44, 48, 52][format.ps() as usize];
    assert!(output_bits >= output);
    let input_bits = 64 - format.t0sz();
    let levels = arm_levels(stage, GRANULE, input);
    // The start of stage 2, counted from the root as the manual does: 2 to 0 with 4 KiB granules, 3 to 1 with others.
    let last = if GRANULE == 12 { 2 } else { 3 };
    assert_eq!(format.sl0().map(|sl0| 4 - (last - sl0)), (stage == ArmStage::Two).then_some(levels));
    let tables = ArmTables { stage, granule, input_bits, levels, output_bits };
    Case { format, walker: TableFormat::Arm(tables), family }
}

/// The levels that a lookup of `input` bits has, from the tables of "Translation process" in DDI 0487, D8.2: in stage 1
/// TxSZ alone decides; in stage 2 the start is the lowest level at which at most 16 tables are concatenated, and
/// with the 4 KiB granule (without FEAT_TTST) not the last.
fn arm_levels(stage: ArmStage, granule: u32, input: u32) -> u32 {
    let tables = if stage == ArmStage::Two { 16 } else { 1 };
    let covered = |levels: u32| u128::from(tables as u32) << (granule + (granule - 3) * levels);
    let lowest = if granule == 12 { 2 } else { 1 };
    (lowest..=4).find(|levels| covered(*levels) >= 1 << input).unwrap()
}

pub fn riscv_case(format: Riscv) -> Case<Riscv> {
    // Privileged Architecture, the tables "Encoding of satp MODE field" and "Encoding of hgatp MODE field".
    let (mode, family) = match (format.is_second_stage(), format.mode()) {
        (false, 8) => (RiscvMode::Sv39, Family::RiscvOne),
        (false, 9) => (RiscvMode::Sv48, Family::RiscvOne),
        (false, 10) => (RiscvMode::Sv57, Family::RiscvOne),
        (true, 8) => (RiscvMode::Sv39x4, Family::RiscvTwo),
        (true, 9) => (RiscvMode::Sv48x4, Family::RiscvTwo),
        (_, code) => panic!("MODE {code} is reserved"),
    };
    Case { format, walker: TableFormat::RiscV(mode), family }
}

/// What `new` makes of all numbers of levels, of levels with leaves and of address bits.
fn dimensions<X>(new: impl Fn(u32, u32, u32) -> Option<X>) -> impl Iterator<Item = X> {
    let all = (0..LEVELS).flat_map(|levels| (0..LEVELS).map(move |large| (levels, large)));
    let all = all.flat_map(|(levels, large)| (0..BITS).map(move |bits| (levels, large, bits)));
    all.filter_map(move |(levels, large, bits)| new(levels, large, bits))
}

pub fn every_vtd(visitor: &mut impl Visit) {
    let all = dimensions(|levels, large, bits| VtdSecondStage::new(levels, large, bits).ok());
    all.for_each(|format| visitor.visit(vtd_case(format)));
}

pub fn every_x86(visitor: &mut impl Visit) {
    let all = dimensions(|levels, large, bits| X86FirstStage::new(levels, large, bits).ok());
    all.for_each(|format| visitor.visit(x86_case(format)));
}

pub fn every_amd(visitor: &mut impl Visit) {
    let all = dimensions(|levels, large, bits| AmdV1::new(levels, large, bits).ok());
    all.for_each(|format| visitor.visit(amd_case(format)));
}

pub fn every_arm<const GRANULE: u32>(visitor: &mut impl Visit) {
    for new in [Arm::<GRANULE>::stage_1, Arm::stage_2] {
        for (input, output) in (0..BITS).flat_map(|input| (0..BITS).map(move |output| (input, output))) {
            if let Ok(format) = new(input, output) {
                visitor.visit(arm_case(format, input, output));
            }
        }
    }
}

pub fn every_riscv(visitor: &mut impl Visit) {
    for mode in [Riscv::sv39(), Riscv::sv48(), Riscv::sv57(), Riscv::sv39x4(), Riscv::sv48x4()] {
        let all = dimensions(|levels, large, bits| mode.within(large, bits).ok().filter(|_| levels == 0));
        all.for_each(|format| visitor.visit(riscv_case(format)));
    }
}
