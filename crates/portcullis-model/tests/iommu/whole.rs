//! Whole outputs against files in `tests/whole`: the walk with each bit of each entry flipped, in every format, and the result of each step
//! of a long random life of a unit. With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

use std::fmt::{Debug, Write};
use std::path::Path;
use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Gather, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::mapper::{Mapper as _, TableMapper};
use portcullis::pgtable::{AmdV1, Arm, Format, PageTable, Riscv, VtdSecondStage, X86FirstStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::walker::{TablePointer, Walk, walk};
use portcullis_model::{
    ArmStage, ArmTables, DeviceId, Granule, Iommu, IommuConfig, Memory, RiscvMode, Segment, TableFormat,
};

use crate::common::{DEVICE, DOMAIN, Mapper, PAGE, iova, phys};
use crate::dice::Random;
use crate::golden::is_golden;

fn is_as_before(name: &str, text: &str) {
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole").join(name), text);
}

const BITS: u32 = 48;

/// The result of a walk, without the page's number.
fn told(walk: &Walk, usual: u64) -> String {
    let result = match walk.result {
        Ok(leaf) => {
            let place = match leaf.page.get() ^ usual {
                0 => "same page",
                moved if moved >> BITS == 0 => "another page",
                _ => "far page",
            };
            format!(
                "{place} 2^{} {:?} {:?} {:#x}",
                leaf.size.shift(),
                leaf.rights,
                leaf.allowed(),
                leaf.attributes
            )
        }
        Err(reason) => {
            let reason = format!("{reason:?}");
            reason.split('(').next().unwrap().to_owned()
        }
    };
    format!(
        "{result}, {} reads, {} freed, levels {:?}",
        walk.table_reads,
        walk.freed_reads,
        walk.tables.iter().map(|table| table.level).collect::<Vec<_>>()
    )
}

/// Flips each bit of each entry of tables with a small page, a large page and a run.
fn turned<X: Format>(text: &mut String, name: &str, written: Result<X, SetupError>, read: TableFormat) {
    const PAGES: [(u64, u64, u64, Permissions); 4] = [
        (0x1_0000, 0x3_0000, 0x1_0000, Permissions::READ),
        (0x4000_0000, 0x8000_0000, 0x4000_0000, Permissions::READ_WRITE),
        (0x8020_0000, 0x20_0000, 0x20_0000, Permissions::WRITE),
        (0x1_0000_0000, 0x40_0000, 0x2_0000, Permissions::READ_WRITE),
    ];
    let memory = Memory::with_base(PhysAddr::new(0x4000_0000), 64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let table = PageTable::new(Arc::clone(&memory), written.unwrap()).unwrap();
    let root = table.root();
    let mapper = TableMapper::new(table, iommu.queue(), DOMAIN, Vec::new());
    for (at, to, len, permissions) in PAGES {
        let (range, list) = (IovaRange::new(iova(at), len).unwrap(), [(phys(to), len)]);
        // SAFETY: only a simulated device reaches it.
        let mapped =
            unsafe { mapper.map(&StdPlatform::new(), range, list, permissions.into(), &mut Gather::new()) };
        writeln!(text, "{name}: {at:#x}+{len:#x}: {mapped:?}").unwrap();
    }
    let start = TablePointer::root(root, read.levels());
    let walked = |at: u64| walk(&memory, iova(at), read, start);
    writeln!(
        text,
        "  {} levels, valid {}, by part {}, root {}",
        read.levels(),
        read.is_valid(),
        read.forgets_by_part(),
        read.is_root(root)
    )
    .unwrap();
    for (at, to, len, _) in PAGES {
        let usual = walked(at);
        let page = usual.result.map_or(0, |leaf| leaf.page.get());
        writeln!(text, "  {at:#x} to {to:#x}: {}", told(&usual, page)).unwrap();
        for beside in [at - 1, at + len - 1, at + len, at | 1 << 47, at | 1 << 48] {
            writeln!(
                text,
                "    {beside:#x}: {} in width {}",
                told(&walked(beside), page),
                read.in_width(iova(beside))
            )
            .unwrap();
        }
        // The entries on the path: each table's first present one, because these mappings begin at the start of theirs.
        let tables: Vec<TablePointer> = [start].into_iter().chain(usual.tables.iter().copied()).collect();
        for table in tables {
            let words = (0..1 << 14).map(|word| PhysAddr::new(table.table.get() + 8 * word));
            let changes = |entry: &PhysAddr| {
                let before = memory.read_u64(*entry).unwrap();
                memory.write(*entry, &0_u64.to_le_bytes()).unwrap();
                let changed = walked(at).result != usual.result;
                memory.write(*entry, &before.to_le_bytes()).unwrap();
                before != 0 && changed
            };
            let Some(entry) = words.take_while(|word| memory.is_allocated(*word)).find(changes) else {
                continue;
            };
            let before = memory.read_u64(entry).unwrap();
            let mut first: Option<(u32, String)> = None;
            for bit in 0..=64 {
                let outcome = (bit < 64).then(|| {
                    memory.write(entry, &(before ^ 1 << bit).to_le_bytes()).unwrap();
                    told(&walked(at), page)
                });
                if first.as_ref().map(|first| &first.1) != outcome.as_ref() {
                    if let Some((from, was)) = first.take().filter(|(_, was)| *was != told(&usual, page)) {
                        writeln!(text, "    level {} bits {from}-{}: {was}", table.level, bit - 1).unwrap();
                    }
                    first = outcome.map(|outcome| (bit, outcome));
                }
            }
            memory.write(entry, &before.to_le_bytes()).unwrap();
        }
    }
}

fn arm<const GRANULE: u32>(
    text: &mut String,
    name: &str,
    new: fn(u32, u32) -> Result<Arm<GRANULE>, SetupError>,
    granule: Granule,
) {
    let written = new(BITS, BITS).unwrap();
    let stage = if written.is_stage_2() { ArmStage::Two } else { ArmStage::One };
    let tables = ArmTables { stage, granule, input_bits: BITS, levels: written.levels(), output_bits: BITS };
    turned(text, name, Ok(written), TableFormat::Arm(tables));
}

#[test]
fn each_bit_of_an_entry_means_what_it_did() {
    for name in ["vtd-ss", "x86-4", "x86-5", "amd-v1", "arm-s1", "arm-s2", "riscv"] {
        let mut text = String::new();
        let all = &mut text;
        match name {
            "vtd-ss" => {
                turned(all, name, VtdSecondStage::new(4, 3, BITS), TableFormat::VtdSecondStage { levels: 4 })
            }
            "x86-4" => {
                turned(all, name, X86FirstStage::new(4, 3, BITS), TableFormat::X86FirstStage { levels: 4 })
            }
            "x86-5" => {
                turned(all, name, X86FirstStage::new(5, 3, BITS), TableFormat::X86FirstStage { levels: 5 })
            }
            "amd-v1" => turned(all, name, AmdV1::new(4, 3, BITS), TableFormat::AmdV1 { levels: 4 }),
            "arm-s1" => {
                arm(all, "4k", Arm::<12>::stage_1, Granule::Size4K);
                arm(all, "16k", Arm::<14>::stage_1, Granule::Size16K);
                arm(all, "64k", Arm::<16>::stage_1, Granule::Size64K);
            }
            "arm-s2" => {
                arm(all, "4k", Arm::<12>::stage_2, Granule::Size4K);
                arm(all, "16k", Arm::<14>::stage_2, Granule::Size16K);
                arm(all, "64k", Arm::<16>::stage_2, Granule::Size64K);
            }
            _ => {
                turned(all, "sv39", Riscv::sv39().within(3, BITS), TableFormat::RiscV(RiscvMode::Sv39));
                turned(all, "sv48", Riscv::sv48().within(3, BITS), TableFormat::RiscV(RiscvMode::Sv48));
                turned(all, "sv39x4", Riscv::sv39x4().within(3, BITS), TableFormat::RiscV(RiscvMode::Sv39x4));
            }
        }
        is_as_before(&format!("{name}.txt"), &text);
    }
}

/// Maps, accesses, invalidates and probes, at random; a line for each step.
fn life(seed: u64, steps: u32, change: impl FnOnce(&mut IommuConfig)) -> String {
    const OTHER: DeviceId = DeviceId(9);
    let memory = Memory::new(16 << 20);
    let mut config = IommuConfig {
        iotlb_entries: 8,
        iotlb_ways: 2,
        walk_cache_entries: 2,
        fault_log_entries: 5,
        ..IommuConfig::new(Arc::clone(&memory))
    };
    change(&mut config);
    let iommu = Iommu::new(config);
    let mapper = Mapper::new(&memory, 4);
    iommu.attach(DEVICE, mapper.context(DOMAIN));
    iommu.attach_with_tlb(OTHER, mapper.context(DOMAIN), 3);
    let queue = iommu.queue();
    let buffer = memory.buffer(64 * PAGE).unwrap();
    let (mut random, mut text) = (Random(seed), String::new());
    let (mut mapped, mut time) = (Vec::<(u64, u64, u64, DeviceId)>::new(), 0);
    for _ in 0..steps {
        let spot = random.below(4) * (1 << 30) + random.below(6) * (PAGE << 9) + random.below(5) * PAGE;
        let spot = match random.below(3) {
            0 if !mapped.is_empty() => mapped[random.below(mapped.len() as u64) as usize].0,
            _ => spot,
        };
        let device = [DEVICE, OTHER][random.below(2) as usize];
        let access =
            [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE][random.below(3) as usize];
        time += random.below(1000);
        let mut line = |what: &str, ended: &dyn Debug| writeln!(text, "{what} {spot:#x}: {ended:?}").unwrap();
        match random.below(12) {
            0 | 1 if mapped.iter().all(|(at, ..)| *at != spot) => {
                let to = buffer.phys().get() + random.below(60) * PAGE;
                mapper.map_at(spot, to, access, 1);
                let len = 1 + random.below(2 * PAGE);
                iommu.observe_map(device, time, [Segment { iova: iova(spot + 7), phys: phys(to + 7), len }]);
                mapped.push((spot, to, len, device));
                line("map", &(to - buffer.phys().get(), access, device.0, len));
            }
            2 | 3 if !mapped.is_empty() => {
                let (at, to, len, device) = mapped.swap_remove(random.below(mapped.len() as u64) as usize);
                mapper.unmap(at);
                iommu.observe_unmap(device, time, [Segment { iova: iova(at + 7), phys: phys(to + 7), len }]);
                line("unmap", &at);
            }
            4 => {
                let range = IovaRange::new(iova(spot), (1 + random.below(5)) * PAGE).unwrap();
                let leaf_only = random.below(2) == 0;
                line("invalidate", &queue.invalidate(DOMAIN, Invalidation::Range { range, leaf_only }));
            }
            5 if random.below(4) == 0 => {
                line("invalidate all", &queue.invalidate(DOMAIN, Invalidation::Domain))
            }
            6 => {
                let range = (random.below(3) > 0).then(|| IovaRange::new(iova(spot), PAGE).unwrap());
                let requests = [
                    Request {
                        domain: DOMAIN,
                        invalidation: Invalidation::Range {
                            range: IovaRange::new(iova(spot), 3 * PAGE).unwrap(),
                            leaf_only: true,
                        },
                    },
                    Request {
                        domain: DOMAIN,
                        invalidation: Invalidation::DeviceTlb { device: OTHER, range },
                    },
                ];
                line("descriptors", &queue.descriptors(&requests[0]).collect::<Vec<_>>());
                line("submit", &InvalidationQueue::submit(&queue, &requests));
            }
            7 if random.below(4) == 0 => {
                iommu.set_silent(OTHER, random.below(2) == 0);
                queue.fail_next(random.below(2), InvalidationError::Rejected { code: 9 });
                queue.drop_next(random.below(2));
                line("misbehave", &());
            }
            8 => line(
                "probe",
                &iommu.probe(device, iova(spot), access).map(|to| to.get() - buffer.phys().get()),
            ),
            9 => {
                let mut bytes = [0; 3];
                line("read", &(iommu.dma_read(device, iova(spot + PAGE - 2), &mut bytes), bytes));
                line("write", &iommu.dma_write(device, iova(spot), &[time as u8; 2]));
            }
            10 => {
                line("exposed", &(iommu.exposure(device), iommu.pages_observed()));
            }
            _ => {
                let mut pieces = Vec::new();
                let ended = iommu.translate_each(
                    device,
                    iova(spot + random.below(PAGE)),
                    1 + random.below(2 * PAGE),
                    access,
                    |at, to, len| {
                        pieces.push((at.get() - spot, to.get() - buffer.phys().get(), len));
                    },
                );
                line("access", &(ended, pieces));
            }
        }
    }
    iommu.set_time(time + 5000);
    writeln!(
        text,
        "{:?}\n{:?} {} {}\n{:?}",
        iommu.stats(),
        iommu.total_exposure(),
        iommu.fault_count(),
        iommu.faults_lost(),
        iommu.take_faults()
    )
    .unwrap();
    text
}

#[test]
fn a_unit_lives_as_it_did() {
    let mut text = life(0x9e37_79b9_7f4a_7c15, 400, |_| ());
    let end = |text: &str| {
        text.lines().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n")
    };
    type Change = (&'static str, fn(&mut IommuConfig));
    let changes: [Change; 7] = [
        ("no hint", |config| config.honours_leaf_only = false),
        ("absent entries are cached", |config| config.caches_absent = true),
        ("small blocks", |config| config.max_address_mask = 0),
        ("one way", |config| config.iotlb_ways = 1),
        ("one table", |config| config.walk_cache_entries = 1),
        ("larger", |config| {
            (config.iotlb_entries, config.iotlb_ways, config.walk_cache_entries) = (64, 8, 16)
        }),
        ("one fault", |config| config.fault_log_entries = 1),
    ];
    for (about, change) in changes {
        for seed in [1, 77, 12_345] {
            writeln!(text, "-- {about}, {seed}\n{}", end(&life(seed << 33 | 0x1234_5678, 3000, change)))
                .unwrap();
        }
    }
    is_as_before("life.txt", &text);
}
