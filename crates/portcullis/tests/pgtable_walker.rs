//! Every page-table format: the engine writes, and a walker that was written from the manuals alone reads.
//!
//! Random maps and unmaps of all sizes, parts of large pages among them, beside a plain list of what is mapped.
//! After each of them the walker looks at addresses in and around it.

use std::collections::BTreeMap;
use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::DomainId;
use portcullis::pgtable::{
    AmdV1, Arm, ArmStage, Format, Layout, MapError, PageTable, Riscv, RiscvMode, VtdSecondStage,
    X86FirstStage,
};
use portcullis::platform::{FRAME_SIZE, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{
    ArmStage as ModelStage, ArmTables, Context, DeviceId, Granule, Iommu, IommuConfig, Memory,
    RiscvMode as ModelMode, TableFormat,
};

const DEVICE: DeviceId = DeviceId(1);

/// Operations on each of the fifteen formats; each is followed by 16 walks.
const OPERATIONS: u64 = if cfg!(debug_assertions) { 2_000 } else { 20_000 };

struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % end
    }
}

/// What is mapped: by first address, the length, the memory behind and the permissions.
#[derive(Default)]
struct Plain(BTreeMap<u64, (u64, u64, Permissions)>);

impl Plain {
    /// The lowest piece that overlaps.
    fn first_in(&self, start: u64, len: u64) -> Option<u64> {
        let (&at, &(piece, ..)) = self.0.range(..start + len).rev().find(|_| true)?;
        let mut lowest = (at + piece > start).then_some(at)?;
        for (&at, &(piece, ..)) in self.0.range(..lowest).rev() {
            if at + piece <= start {
                break;
            }
            lowest = at;
        }
        Some(lowest.max(start))
    }

    /// Takes out what lies in the range. How many bytes that was.
    fn remove(&mut self, start: u64, len: u64) -> u64 {
        let end = start + len;
        let mut removed = 0;
        let pieces: Vec<_> = self.0.range(..end).rev().map(|(at, piece)| (*at, *piece)).collect();
        for (at, (piece, phys, permissions)) in
            pieces.into_iter().take_while(|(at, (len, ..))| at + len > start)
        {
            self.0.remove(&at);
            let (from, to) = (at.max(start), (at + piece).min(end));
            removed += to - from;
            if at < from {
                self.0.insert(at, (from - at, phys, permissions));
            }
            if to < at + piece {
                self.0.insert(to, (at + piece - to, phys + (to - at), permissions));
            }
        }
        removed
    }

    fn find(&self, at: u64) -> Option<(u64, Permissions)> {
        let (&first, &(len, phys, permissions)) = self.0.range(..=at).next_back()?;
        (at < first + len).then(|| (phys + (at - first), permissions))
    }
}

fn check<X: Format>(format: X, read: TableFormat, always_readable: bool) {
    let memory = Memory::new(64 << 20);
    let platform = StdPlatform::with_slots(1);
    let table = PageTable::new(Arc::clone(&memory), format, platform.slots()).unwrap();
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    iommu.attach(DEVICE, Context::Translated { domain: DomainId(1), root: table.root(), format: read });
    let empty = table.table_bytes();
    let name = format.name();
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15 ^ name.len() as u64);
    let mut plain = Plain::default();
    let granule = 1_u64 << X::GRANULE_SHIFT;
    let sizes: Vec<u64> = format.leaf_sizes().iter().map(|size| format.page_size(*size).bytes()).collect();
    let top = table.last_iova().get();
    // Where tables of several levels meet, and the end of the space.
    let places =
        [0, top / 2 + 1, top - (top >> 3), (1_u64 << format.shift(3).min(format.input_bits() - 1)) % top];
    let (mut maps, mut used) = (0_u64, vec![false; sizes.len()]);
    for _ in 0..OPERATIONS {
        let place = places[rng.below(4) as usize];
        let index = rng.below(sizes.len() as u64) as usize;
        let size = sizes[index];
        // Whole pages of some size, or a few granules somewhere.
        let (start, len, align) = if rng.below(2) == 0 {
            (place / size * size + rng.below(3) * size, size * (1 + rng.below(2)), size)
        } else {
            let page = granule * (1 << rng.below(12));
            (place / page * page + rng.below(2048) * granule, granule * (1 + rng.below(600)), granule)
        };
        let Some(range) =
            IovaRange::new(Iova::new(start), len).ok().filter(|range| range.last().get() <= top)
        else {
            continue;
        };
        match rng.below(5) {
            0..3 => {
                let span = format.last_phys().get() / 2;
                let phys = rng.below(span / align) * align;
                let permissions = [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE];
                let permissions = permissions[rng.below(3) as usize];
                let mapped = table.map(&platform, range, PhysAddr::new(phys), permissions, &mut None);
                match plain.first_in(start, len) {
                    None => {
                        assert_eq!(mapped, Ok(()), "{name}: {range}");
                        plain.0.insert(start, (len, phys, permissions));
                        maps += 1;
                        used[index] |= align == size;
                    }
                    Some(_) => {
                        let in_use = matches!(mapped, Err(MapError::AlreadyMapped { .. }));
                        assert!(in_use, "{name}: {range}: {mapped:?}");
                    }
                }
            }
            3 => {
                let unmapped = table.unmap(&platform, range, &mut |_| true).bytes;
                assert_eq!(unmapped, plain.remove(start, len), "{name}: {range}");
            }
            _ if rng.below(50) == 0 => {
                table.reclaim(&platform, || Ok::<(), ()>(())).unwrap();
            }
            _ => {}
        }
        for probe in 0..16 {
            let near = match probe % 4 {
                0 => start,
                1 => range.last().get(),
                2 => start + rng.below(len),
                _ => (start + rng.below(4 * len)).saturating_sub(len),
            };
            let near = near.min(top);
            let expected = plain.find(near);
            for access in [Permissions::READ, Permissions::WRITE] {
                let allowed = expected.filter(|(_, permissions)| {
                    permissions.allows(access) || (always_readable && access == Permissions::READ)
                });
                let walked = iommu.probe(DEVICE, Iova::new(near), access);
                assert_eq!(
                    walked,
                    allowed.map(|(phys, _)| PhysAddr::new(phys)),
                    "{name}: {near:#x} {access:?}"
                );
            }
            let found = table.iova_to_phys(&platform, Iova::new(near));
            assert_eq!(found, expected.map(|(phys, _)| PhysAddr::new(phys)), "{name}: {near:#x}");
        }
    }
    assert!(maps > OPERATIONS / 20, "{name}: only {maps} maps");
    assert!(used.iter().all(|used| *used), "{name}: sizes mapped: {used:?} of {sizes:x?}");
    let visited = std::cell::Cell::new(0);
    table.visit(&platform, |mapping| {
        visited.set(visited.get() + mapping.range.len());
        assert_eq!(plain.find(mapping.range.start().get()).map(|found| found.0), Some(mapping.phys.get()));
    });
    assert_eq!(visited.get(), plain.0.values().map(|piece| piece.0).sum::<u64>(), "{name}");
    for (start, (len, ..)) in std::mem::take(&mut plain.0) {
        let range = IovaRange::new(Iova::new(start), len).unwrap();
        assert_eq!(table.unmap(&platform, range, &mut |_| true).bytes, len);
    }
    table.reclaim(&platform, || Ok::<(), ()>(())).unwrap();
    assert_eq!(table.table_bytes(), empty, "{name}: everything is unmapped");
    assert_eq!(memory.frames_in_use() * FRAME_SIZE, empty as u64);
    drop(table);
    assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
}

fn arm<const GRANULE: u32>(stage: ArmStage, input_bits: u32, granule: Granule) {
    let format = Arm::<GRANULE>::new(stage, input_bits, 48).unwrap();
    let model = if stage == ArmStage::One { ModelStage::One } else { ModelStage::Two };
    let levels = format.levels();
    let tables = ArmTables { stage: model, granule, input_bits, levels, output_bits: 48 };
    check(format, TableFormat::Arm(tables), stage == ArmStage::One);
}

#[test]
fn vtd() {
    for levels in 3..=5 {
        let format = VtdSecondStage::new(levels, 3, 46).unwrap();
        check(format, TableFormat::VtdSecondStage { levels }, false);
    }
}

#[test]
fn x86() {
    for levels in 4..=5 {
        let format = X86FirstStage::new(levels, 3, 46).unwrap();
        check(format, TableFormat::X86FirstStage { levels }, true);
    }
}

#[test]
fn amd() {
    for levels in 4..=6 {
        check(AmdV1::new(levels, 3, 46).unwrap(), TableFormat::AmdV1 { levels }, false);
    }
}

#[test]
fn arm_stage_1() {
    arm::<12>(ArmStage::One, 48, Granule::Size4K);
    arm::<14>(ArmStage::One, 48, Granule::Size16K);
    arm::<16>(ArmStage::One, 48, Granule::Size64K);
    arm::<12>(ArmStage::One, 39, Granule::Size4K);
}

#[test]
fn arm_stage_2() {
    arm::<12>(ArmStage::Two, 48, Granule::Size4K);
    arm::<14>(ArmStage::Two, 48, Granule::Size16K);
    arm::<16>(ArmStage::Two, 48, Granule::Size64K);
    // Concatenated roots.
    arm::<12>(ArmStage::Two, 42, Granule::Size4K);
    arm::<14>(ArmStage::Two, 40, Granule::Size16K);
}

#[test]
fn riscv() {
    let modes = [
        (RiscvMode::Sv39, ModelMode::Sv39, true),
        (RiscvMode::Sv48, ModelMode::Sv48, true),
        (RiscvMode::Sv57, ModelMode::Sv57, true),
        (RiscvMode::Sv39x4, ModelMode::Sv39x4, true),
        (RiscvMode::Sv48x4, ModelMode::Sv48x4, true),
    ];
    for (mode, model, readable) in modes {
        check(Riscv::new(mode, 3, 46).unwrap(), TableFormat::RiscV(model), readable);
    }
}
