//! Page tables of each format: the entries of what is mapped, and of what is left when a part is unmapped.

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, PageSize, Permissions, PhysAddr};
use portcullis::pgtable::{
    AmdV1, Arm, Attributes, Format, Leaf, Memory as Kind, PageTable, Riscv, VtdSecondStage, X86FirstStage,
};
use portcullis_model::Memory;
use portcullis_model::open::OpenTable;

use crate::rig::Clocked;
use crate::transcript::{Cpus, FOLDER, Tables, Transcript, transcript};

struct Script<const COHERENT: bool, X: Format> {
    said: Transcript,
    memory: Arc<Memory>,
    cpus: Cpus,
    table: PageTable<Tables<COHERENT>, X>,
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), len).unwrap()
}

/// The permissions, and the attributes that are not the usual ones: so a transcript stays as it is where leaves get one more attribute.
fn shown(attributes: Attributes) -> String {
    let all = |attributes: Attributes| format!("{attributes:?}").replace(" }", "");
    let usual = all(attributes.permissions.into());
    let special = all(attributes);
    let special =
        special.split(", ").filter(|field| !usual.contains(field)).map(|field| format!(", {field}"));
    format!("{:?}{}", attributes.permissions, special.collect::<String>())
}

impl<const COHERENT: bool, X: Format> Script<COHERENT, X> {
    fn map(&mut self, start: u64, phys: u64, len: u64, attributes: impl Into<Attributes>) {
        let attributes = attributes.into();
        let map = || self.table.open(&self.cpus, range(start, len), PhysAddr::new(phys), attributes);
        let said = |(error, undone): (_, Option<IovaRange>)| {
            format!("{error}{}", undone.map_or(String::new(), |undone| format!(", undone {undone}")))
        };
        let _ = self.said.call(format_args!("map {start:#x}+{len:#x} to {phys:#x}"), || map().map_err(said));
    }

    /// `answers` are what is said where hardware is to forget something; then nothing more is forgotten.
    fn unmap(&mut self, start: u64, len: u64, answers: &[bool]) {
        let mut answers = answers.iter().copied();
        let mut forgets = Vec::new();
        let unmap = || {
            let unmapped = self.table.close(&self.cpus, range(start, len), &mut |range| {
                forgets.push(range.to_string());
                answers.next().unwrap_or(false)
            });
            let (bytes, kept, stale) = (unmapped.bytes, unmapped.kept, unmapped.stale);
            Ok::<_, String>(format!("{bytes:#x}, kept {kept:#x}, stale {stale}, forgets {forgets:?}"))
        };
        let _ = self.said.call_as(format_args!("unmap {start:#x}+{len:#x}"), unmap, String::clone);
    }

    fn look(&mut self, at: u64) {
        let found = self.table.translate(&self.cpus, Iova::new(at));
        let found = found.map(|(phys, attributes)| format!("{phys:#x} {}", shown(attributes)));
        self.said.note(format_args!("at {at:#x}"), found);
    }

    fn entries(&mut self, start: u64, len: u64) {
        let leaves = self.table.entries(&self.cpus, range(start, len));
        let show = |leaf: Leaf| format!("{} to {:#x} {}", leaf.range, leaf.phys, shown(leaf.attributes));
        self.said.note("entries", leaves.map(show).collect::<Vec<_>>());
    }
}

/// One script for all: pages of each size and what lies beside them, parts of large ones, errors, attributes.
fn plays<const COHERENT: bool, X: Format>(name: &str, format: X) {
    let (clock, memory) = (Clocked::new(2), Memory::new(8 << 20));
    let said = transcript(&format!("{}: {format:?}", format.name()), &memory, &clock);
    let table = PageTable::for_cpus(Tables::<COHERENT>(Arc::clone(&memory)), format, 2).unwrap();
    let mut script = Script { said, memory, cpus: Cpus(clock), table };
    let (granule, last) = (script.table.granule().bytes(), script.table.last_iova().get());
    script.said.note(
        "made",
        (script.table.levels(), script.table.page_sizes(), script.table.aperture().to_string()),
    );
    // Memory that no table is in.
    let there = 1 << 33;
    let both = Permissions::READ_WRITE;
    script.said.part("a page, and pages");
    script.map(granule, there, granule, both);
    script.map(granule * 2, there + granule * 9, granule, Permissions::READ);
    script.map(granule * 3, there + granule, 3 * granule, Permissions::WRITE);
    script.look(granule * 4 + 5);
    script.entries(0, granule * 8);
    script.map(granule * 5, there, 2 * granule, both);
    script.unmap(granule * 2, granule, &[]);
    script.unmap(0, granule * 4, &[]);
    script.unmap(0, granule * 16, &[]);
    script.said.part("what is special");
    for (at, (memory, snoop, privileged, execute)) in [
        (Kind::Uncached, false, false, false),
        (Kind::Device, false, false, true),
        (Kind::WriteBack, true, false, false),
        (Kind::WriteBack, false, true, false),
        (Kind::WriteBack, false, true, true),
    ]
    .into_iter()
    .enumerate()
    {
        let start = (at as u64 + 1) * granule;
        let permissions = if privileged && execute { Permissions::READ } else { both };
        script.map(start, there, granule, Attributes { permissions, memory, snoop, privileged, execute });
        script.look(start);
    }
    script.unmap(granule, granule * 5, &[]);
    script.said.part("large pages");
    let is_size = |bytes: &u64| {
        PageSize::from_shift(bytes.trailing_zeros())
            .is_some_and(|size| script.table.page_sizes().contains(size))
    };
    let sizes: Vec<u64> = (12..40).map(|shift| 1 << shift).filter(is_size).collect();
    for &size in sizes.iter().filter(|size| **size > granule).take(4) {
        let at = size * 8;
        script.map(at, there.max(size), size, both);
        script.look(at + size - 1);
        // The first page of it, the last, and one in the middle; and then what is left.
        script.unmap(at, granule, &[true; 8]);
        script.unmap(at + size - granule, granule, &[false]);
        script.unmap(at + size - granule, granule, &[true; 8]);
        if size > granule * 16 {
            script.unmap(at + size / 2 - granule * 3, granule * 7, &[true; 8]);
        }
        script.unmap(at, size, &[true; 64]);
    }
    script.said.part("where a table was made for a page in the second part of a large one");
    for sizes in sizes.windows(2).take(3) {
        let at = sizes[1] * 24;
        script.map(at + sizes[0], there, granule, both);
        script.unmap(at + sizes[0], granule, &[]);
        script.map(at, there.max(sizes[1]), sizes[1], both);
        script.unmap(at, sizes[1], &[]);
    }
    script.said.part("not quite a large page");
    let large =
        sizes.iter().copied().find(|size| *size >= granule * 512).unwrap_or(granule * 512).min(2 << 20);
    script.map(large * 16 - granule, there + large - granule, large + 2 * granule, both);
    script.entries(large * 16 - granule, large + granule);
    script.unmap(large * 16, large / 2, &[true; 64]);
    script.unmap(large * 15, large * 4, &[true; 64]);
    script.said.part("borders and mistakes");
    script.map(last - granule + 1, there, granule, both);
    script.map(0, (1 << 57) - granule, granule, both);
    script.map(granule / 2, there, granule, both);
    script.map(granule, there + 8, granule, both);
    script.map(granule, there, granule / 2, both);
    if last < u64::MAX {
        script.map(last + 1 - granule, there, granule * 2, both);
        script.unmap(last + 1 - granule, granule * 2, &[]);
    }
    script.said.part("no memory");
    for fails in [1, 2] {
        script.memory.fail_after(fails);
        script.map(last / 2 + 1 - granule * 2, there, granule * 4, both);
    }
    script.memory.fail_after(0);
    script.map(last / 4, there, granule, both);
    script.said.part("all empty tables");
    for answer in [Err("no answer"), Ok(())] {
        let _ = script.said.call("reclaim", || script.table.shrink(&script.cpus, || answer));
    }
    script.said.note("bytes of tables", script.table.table_bytes());
    let Script { mut said, memory, table, .. } = script;
    drop(table);
    said.note("dropped, frames", memory.frames_in_use());
    said.assert_is(FOLDER, &format!("table-{name}"));
}

#[test]
fn of_intel_and_amd() {
    plays::<true, _>("vtd-4", VtdSecondStage::new(4, 3, 48).unwrap().with_snoop_control(true));
    plays::<false, _>("vtd-3", VtdSecondStage::new(3, 2, 39).unwrap());
    plays::<true, _>("vtd-5", VtdSecondStage::five_level());
    plays::<true, _>("x86-4", X86FirstStage::four_level());
    plays::<false, _>("x86-5", X86FirstStage::new(5, 2, 46).unwrap());
    plays::<true, _>("amd-3", AmdV1::new(3, 3, 52).unwrap());
    plays::<false, _>("amd-6", AmdV1::new(6, 3, 52).unwrap());
}

#[test]
fn of_arm() {
    plays::<true, _>("arm-4k-1", Arm::<12>::stage_1(48, 48).unwrap());
    plays::<false, _>("arm-4k-2", Arm::<12>::stage_2(40, 40).unwrap());
    plays::<false, _>("arm-16k-1", Arm::<14>::stage_1(47, 44).unwrap());
    plays::<true, _>("arm-16k-2", Arm::<14>::stage_2(48, 48).unwrap());
    plays::<true, _>("arm-64k-1", Arm::<16>::stage_1(42, 48).unwrap());
    plays::<false, _>("arm-64k-2", Arm::<16>::stage_2(48, 48).unwrap());
}

#[test]
fn of_riscv() {
    plays::<true, _>("sv39", Riscv::sv39());
    plays::<false, _>("sv48", Riscv::sv48().within(2, 44).unwrap());
    plays::<true, _>("sv57", Riscv::sv57());
    plays::<false, _>("sv39x4", Riscv::sv39x4());
    plays::<true, _>("sv48x4", Riscv::sv48x4());
}
