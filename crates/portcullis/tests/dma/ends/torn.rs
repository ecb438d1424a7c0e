//! Rings whose mapper panics: what nobody knows of any more goes with the next commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use portcullis::addr::{DeviceId, Direction, DomainId, Iova, Permissions};
use portcullis::dma::{DmaDevice, Ended, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::PageTable;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenRing;
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

use crate::common::vtd;
use crate::ends::bench::{Mapper, PAGE, page};
use crate::rig::{Moment, Observed};

const DEVICE: DeviceId = DeviceId(7);

struct Bench {
    iommu: Arc<Iommu>,
    device: DmaDevice<Observed<Mapper>, StdPlatform>,
    ring: StrictRing<Observed<Mapper>, StdPlatform>,
    /// Where the mapper panics.
    panics_at: Arc<Mutex<Option<Moment>>>,
}

impl Bench {
    fn new(batch: usize) -> Self {
        let panics_at = Arc::new(Mutex::new(None));
        let asked = Arc::clone(&panics_at);
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::new(memory, vtd(4)).unwrap();
        let domain = DomainId(1);
        iommu.attach(DEVICE, Context::SecondStage { domain, root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), domain, Vec::new());
        let mapper = Observed::new(inner, move |moment| {
            let asked = *asked.lock().unwrap();
            assert!(asked != Some(moment), "as asked for");
        });
        let domain = Domain::new(StdPlatform::new(), mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        let ring = StrictRing::new(&device, StrictRingConfig::new(64, PAGE, batch)).unwrap();
        Self { iommu, device, ring, panics_at }
    }

    /// Calls `f`, in which the mapper panics at `moment`.
    fn torn(&mut self, moment: Moment, f: impl FnOnce(&mut Self)) {
        *self.panics_at.lock().unwrap() = Some(moment);
        assert!(catch_unwind(AssertUnwindSafe(|| f(self))).is_err());
        *self.panics_at.lock().unwrap() = None;
    }

    fn reaches(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }

    fn ends_with_nothing_lost(mut self) {
        self.ring.commit().unwrap();
        drop(self.ring);
        let stats = self.device.domain().stats();
        assert_eq!((stats.lost_iova_bytes, stats.taken_iova_bytes), (0, stats.cached_iova_bytes));
    }
}

#[test]
fn a_descriptor_whose_unmap_panics_ends_with_the_next_commit() {
    let mut bench = Bench::new(2);
    let live = [0, 1, 2].map(|number| bench.ring.open(&[page(2 * number)], Direction::FromDevice).unwrap());
    let iovas = [0, 1, 2].map(|number: usize| live[number].iova());
    assert!(iovas.iter().all(|iova| bench.reaches(*iova)));
    let [first, second, third] = live;
    assert_eq!(bench.ring.unmap(first).unwrap(), Ended::Pending);
    // The last of its batch, and one that comes while a whole batch waits.
    for mapping in [second, third] {
        bench.torn(Moment::Sync, |bench| _ = bench.ring.unmap(mapping));
    }
    assert_eq!(bench.ring.commit(), Ok(3));
    assert_eq!(iovas.map(|iova| bench.reaches(iova)), [false; 3]);
    bench.ends_with_nothing_lost();
}

#[test]
fn a_descriptor_whose_map_panics_is_not_reached_after_the_next_commit() {
    let mut bench = Bench::new(8);
    let before = bench.ring.open(&[page(0)], Direction::FromDevice).unwrap();
    bench.torn(Moment::Mapped, |bench| _ = bench.ring.open(&[page(2)], Direction::FromDevice));
    // The ring has all of its addresses in 4 MiB around this one's.
    let near = before.iova().get().saturating_sub(2 << 20) / PAGE
        ..before.iova().get().saturating_add(2 << 20) / PAGE;
    let reached = |bench: &Bench| near.clone().filter(|page| bench.reaches(Iova::new(page * PAGE))).count();
    assert_eq!(reached(&bench), 2);
    assert_eq!(bench.ring.commit(), Ok(0), "it is no caller's");
    assert!(reached(&bench) == 1 && bench.reaches(before.iova()));
    assert_eq!(bench.ring.unmap(before).unwrap(), Ended::Pending);
    assert_eq!(bench.ring.commit(), Ok(1));
    bench.ends_with_nothing_lost();
}
