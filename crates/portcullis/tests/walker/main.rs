//! Every page-table format in every geometry: the engine writes, and a walker that was written from the manuals alone
//! reads.
//!
//! Addresses at which something ends, and random maps and unmaps of all sizes by every way in, parts of large pages
//! among them, beside a plain list of what is mapped. After each of them the walker looks at addresses in and around it.

#[path = "../common/mod.rs"]
mod common;
#[path = "../dice/mod.rs"]
mod dice;
#[path = "../played/mod.rs"]
mod played;

mod cases;
mod edges;
mod machine;
mod plain;
mod random;
mod rings;
mod shown;
mod vtd;

use std::sync::Arc;

use crate::dice::Dice;
use cases::*;
use edges::walk_edges;
use machine::{Backing, Machine};
use portcullis::SetupError;
use portcullis::pgtable::{AmdV1, Arm, Format, Riscv, VtdSecondStage, X86FirstStage};
use portcullis_model::Memory;
use random::walk_randomly;
use rings::Queues;
use shown::Shown;

/// Operations on each of the usual geometries; each is followed by a dozen walks.
const MANY: u64 = if cfg!(debug_assertions) { 500 } else { 20_000 };
/// And on each of all others.
const FEW: u64 = if cfg!(debug_assertions) { 4 } else { 60 };

/// Does a little of everything with each geometry.
#[derive(Default)]
struct Everywhere {
    geometries: u64,
    walked: u64,
    mapped: u64,
}

impl Everywhere {
    fn run<F: Backing, X: Format>(&mut self, case: Case<X>) {
        if let Some(mut machine) = Machine::<F, X>::new(case, self.geometries) {
            walk_edges(&mut machine);
            let used = walk_randomly(&mut machine, FEW, &mut Dice::new(self.geometries));
            machine.end();
            self.walked += 1;
            self.mapped += used.maps;
        }
    }

    /// Says how many geometries there were, which are no fewer than were there when this was written.
    fn end(&self, name: &str, least: u64) {
        println!("{name}: {} geometries, {} maps", self.geometries, self.mapped);
        assert!(self.walked >= least, "{} of {} geometries", self.walked, self.geometries);
        assert!(self.mapped > self.walked);
    }
}

impl Visit for Everywhere {
    fn visit<X: Format>(&mut self, case: Case<X>) {
        self.geometries += 1;
        self.run::<Arc<Memory>, X>(case);
        if self.geometries.is_multiple_of(2) {
            self.run::<Arc<Shown>, X>(case);
        }
    }
}

macro_rules! every {
    ($($name:ident: $every:expr, $least:expr;)*) => {$(
        #[test]
        fn $name() {
            let mut everywhere = Everywhere::default();
            $every(&mut everywhere);
            everywhere.end(stringify!($name), $least);
        }
    )*};
}

every! {
    every_geometry_of_vtd: every_vtd, 300;
    every_geometry_of_x86: every_x86, 200;
    every_geometry_of_amd: every_amd, 600;
    every_geometry_of_arm_4k: every_arm::<12>, 600;
    every_geometry_of_arm_16k: every_arm::<14>, 600;
    every_geometry_of_arm_64k: every_arm::<16>, 900;
    every_geometry_of_riscv: every_riscv, 700;
}

/// Rings and batches, with each geometry for hardware of 44, 48 and 52 bits of physical addresses.
#[derive(Default)]
struct Rings {
    geometries: u64,
    rings: u64,
}

impl Visit for Rings {
    fn visit<X: Format>(&mut self, case: Case<X>) {
        if [44, 48, 52].iter().all(|bits| case.format.last_phys().get() != (1 << bits) - 1) {
            return;
        }
        self.geometries += 1;
        let mut queues = Queues::new(case);
        self.rings += u64::from(queues.walk(FEW, &mut Dice::new(self.geometries)));
    }
}

#[test]
fn rings_and_batches_in_every_geometry() {
    let mut rings = Rings::default();
    every_vtd(&mut rings);
    every_x86(&mut rings);
    every_amd(&mut rings);
    every_arm::<12>(&mut rings);
    every_arm::<14>(&mut rings);
    every_arm::<16>(&mut rings);
    every_riscv(&mut rings);
    println!("{} geometries, {} of them with rings", rings.geometries, rings.rings);
    assert!(rings.rings > 300);
}

/// Many operations on a usual geometry.
fn check<F: Backing, X: Format>(case: Case<X>) {
    let name = case.format.name();
    let mut machine = Machine::<F, X>::new(case, 0).unwrap();
    let used = walk_randomly(&mut machine, MANY, &mut Dice::new(name.len() as u64));
    let least = MANY / 40;
    assert!(used.maps > least && used.lists > least / 4 && used.near > least / 4, "{name}");
    assert!(used.sizes.iter().all(|used| *used), "{name}: sizes mapped: {:?}", used.sizes);
    machine.end();
}

fn check_both<X: Format>(case: Case<X>) {
    check::<Arc<Memory>, X>(case);
    check::<Arc<Shown>, X>(case);
}

#[test]
fn vtd() {
    (3..=5).for_each(|levels| check_both(vtd_case(VtdSecondStage::new(levels, 3, 46).unwrap())));
}

#[test]
fn x86() {
    (4..=5).for_each(|levels| check_both(x86_case(X86FirstStage::new(levels, 3, 46).unwrap())));
}

#[test]
fn amd() {
    (4..=6).for_each(|levels| check_both(amd_case(AmdV1::new(levels, 3, 46).unwrap())));
}

fn arm<const GRANULE: u32>(new: fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>, input: u32) {
    let output = if GRANULE == 16 { 52 } else { 48 };
    check_both(arm_case(new(input, output).unwrap(), input, output));
}

#[test]
fn arm_stage_1() {
    arm(Arm::<12>::stage_1, 48);
    arm(Arm::<14>::stage_1, 48);
    arm(Arm::<16>::stage_1, 48);
    arm(Arm::<12>::stage_1, 39);
}

#[test]
fn arm_stage_2() {
    arm(Arm::<12>::stage_2, 48);
    arm(Arm::<14>::stage_2, 48);
    arm(Arm::<16>::stage_2, 48);
    // Concatenated roots.
    arm(Arm::<12>::stage_2, 42);
    arm(Arm::<14>::stage_2, 40);
}

#[test]
fn riscv() {
    for mode in [Riscv::sv39(), Riscv::sv48(), Riscv::sv57(), Riscv::sv39x4(), Riscv::sv48x4()] {
        check_both(riscv_case(mode.within(3, 46).unwrap()));
    }
}
