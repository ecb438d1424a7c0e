//! How to drive each kind of unit, and how it reports.

use portcullis::addr::PhysAddr;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, VtD};

use super::Unit;

pub trait Told: Kind {
    /// The doorbell of commands.
    const DOORBELL: usize;

    /// 32-bit capability registers.
    const CAPABILITIES: &'static [usize];

    /// It stops with an error.
    fn stop(unit: &Unit<Self>);

    /// It reports a fault with these words.
    fn report(unit: &Unit<Self>, words: [u64; 4]);

    /// Records of each code with each flag individually, none and all: code, and words.
    fn records() -> Vec<(u64, [u64; 4])>;
}

/// Each bit of `mask` individually, none, and all.
fn flags(mask: u64) -> impl Iterator<Item = u64> {
    (0..64).map(move |bit| mask & 1 << bit).filter(|bit| *bit != 0).chain([0, mask])
}

fn put(unit: &Unit<impl Kind>, at: u64, words: &[u64]) {
    for (index, word) in words.iter().enumerate() {
        unit.frames().write(PhysAddr::new(at + index as u64 * 8), &word.to_le_bytes()).unwrap();
    }
}

impl Told for VtD {
    const DOORBELL: usize = 0x88;
    const CAPABILITIES: &'static [usize] = &[0x08, 0x0c, 0x10, 0x14];

    fn stop(unit: &Unit<Self>) {
        unit.set(0xb0, 3);
        unit.set(0x34, unit.get(0x34) | 1 << 4);
    }

    fn report(unit: &Unit<Self>, [low, high, ..]: [u64; 4]) {
        unit.set64(0x220, low);
        unit.set64(0x228, high | 1 << 63);
        unit.set(0x34, unit.get(0x34) | 1 << 1);
    }

    fn records() -> Vec<(u64, [u64; 4])> {
        let record = |code: u64| {
            flags(0x4ff_fff0_f000_0000 & !(0xff << 32))
                .map(move |flags: u64| (code, [0x5678_9abc, flags | code << 32 | 0x28, 0, 0]))
        };
        (0..0x100_u64).flat_map(record).collect()
    }
}

impl Told for AmdVi {
    const DOORBELL: usize = 0x2008;
    const CAPABILITIES: &'static [usize] = &[0x30, 0x34];

    fn stop(unit: &Unit<Self>) {
        unit.set(0x2020, unit.get(0x2020) & !(1 << 4));
    }

    fn report(unit: &Unit<Self>, [first, second, ..]: [u64; 4]) {
        let tail = unit.get64(0x2018);
        put(unit, (unit.get64(0x10) & 0x000f_ffff_ffff_f000) + tail, &[first, second]);
        unit.set64(0x2018, (tail + 16) % 4096);
    }

    fn records() -> Vec<(u64, [u64; 4])> {
        let record = |code: u64| {
            flags(0x0fff_0007_000f_0000)
                .map(move |flags: u64| (code, [code << 60 | flags | 0x28, 0x5678_9abc, 0, 0]))
        };
        (0..0x10_u64).flat_map(record).collect()
    }
}

impl Told for RiscV {
    const DOORBELL: usize = 0x24;
    const CAPABILITIES: &'static [usize] = &[0x00, 0x04, 0x08];

    fn stop(unit: &Unit<Self>) {
        unit.set(0x48, unit.get(0x48) | 1 << 10);
    }

    fn report(unit: &Unit<Self>, words: [u64; 4]) {
        let tail = unit.get(0x34);
        put(unit, ((unit.get64(0x28) & 0x003f_ffff_ffff_fc00) << 2) + u64::from(tail) * 32, &words);
        unit.set(0x34, (tail + 1) % 128);
    }

    fn records() -> Vec<(u64, [u64; 4])> {
        let record = |code: u64| {
            let kinds = (0..10).map(|kind| kind << 34).chain([7 << 12 | 1 << 32, 7 << 12, 1 << 33]);
            kinds.map(move |kind| (code, [code | kind | 0x28 << 40, 0, 0x5678_9abc, 0x9999_9999]))
        };
        (0..30_u64).chain(250..280).flat_map(record).collect()
    }
}

impl Told for SmmuV3 {
    const DOORBELL: usize = 0x98;
    const CAPABILITIES: &'static [usize] = &[0x00, 0x04, 0x0c, 0x14];

    fn stop(unit: &Unit<Self>) {
        unit.set(0x9c, unit.get(0x9c) & 0xf_ffff | 1 << 24);
        unit.set(0x60, unit.get(0x60) ^ 1);
    }

    fn report(unit: &Unit<Self>, words: [u64; 4]) {
        let produced = unit.get(0x100a8);
        put(unit, (unit.get64(0xa0) & 0x000f_ffff_ffff_ffe0) + u64::from(produced % 128) * 32, &words);
        unit.set(0x100a8, (produced + 1) % 256);
    }

    fn records() -> Vec<(u64, [u64; 4])> {
        let record = |code: u64| {
            let flagged =
                flags(0xff << 32).map(move |flags: u64| [code | 0x28 << 32, flags, 0x5678_9abc, 0x9999_9999]);
            flagged
                .chain([[code | 7 << 12 | 1 << 11 | 0x28 << 32, 0, 0x5678_9abc, 0]])
                .map(move |words| (code, words))
        };
        (0..0x30_u64).chain([0xff]).flat_map(record).collect()
    }
}
