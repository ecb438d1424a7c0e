//! Ranges that are not whole granules: nothing is said to be gone that is still reached.

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::pgtable::{Arm, Format, PageTable, Riscv};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::Memory;
use portcullis_model::open::{OpenDomain, OpenTable};

use crate::reviewed::machine::{Machine, PAGE, vtd};

const BOTH: Permissions = Permissions::READ_WRITE;
const LIST: [PhysSegment; 1] = [PhysSegment { phys: PhysAddr::new(0x9_0000_0000), len: 4 * PAGE }];

fn part(range: IovaRange, offset: u64, len: u64) -> IovaRange {
    IovaRange::new(range.start().checked_add(offset).unwrap(), len).unwrap()
}

/// Ranges that begin, or end, or both, inside a granule.
const PARTS: [(u64, u64); 5] =
    [(0x800, 0x2000), (0, 0x1800), (0x1800, 0x1800), (0x800, 0x800), (0x1000, 0x1001)];

#[test]
fn what_is_unmapped_in_parts_of_granules_is_refused_or_out_of_reach() {
    for (offset, len) in PARTS {
        let machine = Machine::<true>::new();
        let domain = machine.device.domain();
        let range = domain.open(&LIST, BOTH, Iova::new(u64::MAX)).unwrap();
        let part = part(range, offset, len);
        let reached = || {
            (offset / PAGE..(offset + len).div_ceil(PAGE))
                .map(|page| machine.reached(Iova::new(range.start().get() + page * PAGE), PAGE))
                .sum::<usize>()
        };
        assert!(reached() > 0);
        let unmapped = domain.unmap(part);
        assert!(unmapped.is_err() || reached() == 0, "{part}: {unmapped:?}, and {} reached", reached());
    }
}

/// Two tables, to which the same is done: the one by CPUs that it is at home with, the other by those it is not.
fn compare<X: Format + Copy>(format: X, seed: u64) {
    let platforms = [(); 3].map(|()| StdPlatform::with_cpus(1));
    platforms.iter().for_each(|platform| platform.with_cpu(|_| ()));
    let [home, elsewhere, strange] = &platforms;
    let [near, far] = [(); 2].map(|()| {
        let memory: Arc<Memory> = Memory::new(16 << 20);
        PageTable::for_cpus(memory, format, 1).unwrap()
    });
    let granule = near.granule().bytes();
    let range = |start, len| IovaRange::new(Iova::new(start), len).unwrap();
    // The first platform that is met is home.
    let _ = near.close(home, range(granule, granule), &mut |_| true);
    let _ = far.close(strange, range(granule, granule), &mut |_| true);
    let mut state = seed;
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    let base = 0x1ff_0000_0000 & !(granule * 1024 - 1);
    for step in 0..400 {
        let (start, len) = (base + below(64) * granule, (1 + below(40)) * granule);
        let name = format.name();
        if below(2) == 0 {
            let phys = PhysAddr::new((1 << 36) + below(4) * 64 * granule + start - base);
            let permissions = [Permissions::READ, BOTH][below(2) as usize];
            home.with_cpu(|_| ());
            let by_near = near.open(home, range(start, len), phys, permissions);
            elsewhere.with_cpu(|_| ());
            let by_far = far.open(elsewhere, range(start, len), phys, permissions);
            assert_eq!(by_near, by_far, "{name}, step {step}");
        } else {
            let range = range(start + below(2) * granule / 2, len - below(2) * granule / 2);
            home.with_cpu(|_| ());
            let by_near = near.close(home, range, &mut |_| true);
            elsewhere.with_cpu(|_| ());
            let by_far = far.close(elsewhere, range, &mut |_| true);
            assert_eq!(by_near, by_far, "{name}, step {step}: {range}");
        }
        for iova in (0..110).map(|page| Iova::new(base + page * granule)) {
            let found = (near.translate(home, iova), far.translate(elsewhere, iova));
            assert_eq!(found.0, found.1, "{name}, step {step}: {iova}");
        }
    }
}

#[test]
fn the_short_way_of_an_unmap_removes_what_the_long_one_does() {
    for seed in (1..4).map(|seed: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
        compare(vtd().0, seed);
        compare(Arm::<12>::stage_2(41, 48).unwrap(), seed);
        compare(Arm::<14>::stage_2(41, 48).unwrap(), seed);
        compare(Arm::<16>::stage_1(48, 48).unwrap(), seed);
        compare(Riscv::sv48x4().within(3, 56).unwrap(), seed);
    }
}
