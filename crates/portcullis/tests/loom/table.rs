//! Two CPUs map neighbouring pages of an empty table: each needs the same missing tables at the same time.

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::FRAME_SIZE;

use super::frames::{Cpu, LoomFrames};

type Vtd = PageTable<LoomFrames, VtdSecondStage>;

fn page(number: u64) -> IovaRange {
    IovaRange::new(Iova::new(number * FRAME_SIZE), FRAME_SIZE).unwrap()
}

fn memory(number: u64) -> PhysAddr {
    PhysAddr::new((0x100 + number) * FRAME_SIZE)
}

fn translate(table: &Vtd, cpu: &Cpu, number: u64) -> Option<(PhysAddr, Permissions)> {
    let (phys, attributes) = table.translate(cpu, page(number).start())?;
    Some((phys, attributes.permissions))
}

#[test]
fn racing_maps_share_the_tables_that_one_of_them_installs() {
    let mut model = ::loom::model::Builder::new();
    // Freeing the tables at the end reads each of their entries.
    model.max_branches = 20_000;
    model.check(|| {
        // Root, one middle and one leaf table are needed; each CPU may take two that it then gives back.
        let frames = LoomFrames::new(5, false);
        let format = VtdSecondStage::new(3, 1, 52).unwrap();
        let table = Arc::new(PageTable::for_cpus(frames.clone(), format, 2).unwrap());
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let cpu = Cpu(Some(1));
                // SAFETY: no hardware walks the table.
                unsafe { table.map(&cpu, page(1), memory(1), Permissions::READ) }.unwrap();
                assert_eq!(translate(&table, &cpu, 1), Some((memory(1), Permissions::READ)));
                // SAFETY: as above.
                let unmapped = unsafe { table.unmap(&cpu, page(1), &mut |_| false) };
                assert_eq!(unmapped.bytes, FRAME_SIZE);
            })
        };
        let cpu = Cpu(Some(0));
        // SAFETY: no hardware walks the table.
        unsafe { table.map(&cpu, page(0), memory(0), Permissions::WRITE) }.unwrap();
        assert_eq!(translate(&table, &cpu, 0), Some((memory(0), Permissions::WRITE)));
        other.join().unwrap();
        // The other's page came and went; ours is untouched, and only three tables are in use.
        assert_eq!(translate(&table, &cpu, 0), Some((memory(0), Permissions::WRITE)));
        assert_eq!(translate(&table, &cpu, 1), None);
        assert_eq!(frames.free_frames(), 2);
    });
}
