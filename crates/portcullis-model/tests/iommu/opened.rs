//! The library's calls in their safe form: what each opens, with which permissions.

use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, IovaRange, Permissions, PhysSegment};
use portcullis::dma::{DmaDevice, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{Gather, Invalidation, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenMapper, OpenReserved, OpenRing, OpenTable};
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use crate::common::{BOTH, DEVICE, DOMAIN, PAGE, READ, WRITE, iova, phys};

type Mapper = TableMapper<Arc<Memory>, Queue>;

/// A domain of a device.
struct Rig {
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Mapper, StdPlatform>>,
    platform: StdPlatform,
}

impl Rig {
    fn new() -> Self {
        let (memory, platform) = (Memory::new(64 << 20), StdPlatform::new());
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::new(memory, VtdSecondStage::four_level()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DOMAIN, root: table.root(), levels: 4 });
        let mapper = TableMapper::new(table, iommu.queue(), DOMAIN, Vec::new());
        let domain = Domain::new(platform.clone(), mapper, Policy::Strict).unwrap();
        Self { iommu, domain, platform }
    }

    /// The pages lead to these, with exactly the `allowed` permissions.
    #[track_caller]
    fn assert_opens(&self, at: Iova, pages: &[u64], allowed: Permissions) {
        for (number, page) in (0..).zip(pages) {
            let at = at.checked_add(number * PAGE).unwrap();
            for access in [READ, WRITE, BOTH] {
                let reached = self.iommu.probe(DEVICE, at, access);
                assert_eq!(reached, allowed.allows(access).then_some(phys(*page)), "{at:?}: {access:?}");
            }
        }
    }
}

const NEAR: [u64; 2] = [0x5000, 0x6000];
const APART: [u64; 2] = [0x5000, 0x9000];

#[test]
fn what_is_opened_is_what_was_asked_for() {
    let piece = |at, pages| PhysSegment { phys: phys(at), len: pages * PAGE };
    let list = APART.map(|at| piece(at, 1));
    let pieces = || APART.map(|at| (phys(at), PAGE));
    for (allowed, direction) in
        [(READ, Direction::ToDevice), (WRITE, Direction::FromDevice), (BOTH, Direction::Bidirectional)]
    {
        let rig = Rig::new();
        let Rig { domain, platform, .. } = &rig;
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        let at = device.open_single(phys(NEAR[0]), 2 * PAGE, direction).unwrap();
        rig.assert_opens(at, &NEAR, allowed);
        let mut view = [DmaSegment::default(); 2];
        assert_eq!(device.open_sg(&list, direction, &mut view), Ok(1));
        assert_eq!(view[0].len, 2 * PAGE);
        rig.assert_opens(view[0].iova, &APART, allowed);
        rig.assert_opens(domain.open(&list, allowed, Iova::new(u64::MAX)).unwrap().start(), &APART, allowed);
        let reserved = domain.reserve(2 * PAGE, Iova::new(u64::MAX)).unwrap();
        let linked = reserved.open(&list, allowed, &mut Gather::new());
        rig.assert_opens(linked.unwrap_or_else(|_| panic!()).into_range().start(), &APART, allowed);

        let mut ring = StrictRing::new(&device, StrictRingConfig::new(4, 4 * PAGE, 1)).unwrap();
        let mapping = ring.open(&list, direction).unwrap();
        rig.assert_opens(mapping.iova(), &APART, allowed);
        let (mapping, used) = ring.open_sg(&list, direction, &mut view).unwrap();
        assert_eq!((used, view[0].iova, view[0].len), (1, mapping.iova(), 2 * PAGE));
        rig.assert_opens(view[0].iova, &APART, allowed);

        let (mapper, table) = (domain.mapper(), domain.mapper().table());
        let places = [1_u64, 2, 3, 4, 5].map(|number| IovaRange::new(iova(number << 32), 2 * PAGE).unwrap());
        OpenMapper::open(mapper, platform, places[0], pieces(), allowed, &mut Gather::new()).unwrap();
        rig.assert_opens(places[0].start(), &APART, allowed);
        OpenTable::open(table, platform, places[1], phys(NEAR[0]), allowed).unwrap();
        rig.assert_opens(places[1].start(), &NEAR, allowed);
        table.open_list(platform, places[2], pieces(), allowed).unwrap();
        rig.assert_opens(places[2].start(), &APART, allowed);
        // In existing tables.
        for place in [places[1], places[2]] {
            assert_eq!(table.close(platform, place, &mut |_| true).bytes, 2 * PAGE);
            rig.iommu.queue().invalidate(DOMAIN, Invalidation::Domain).unwrap();
            assert_eq!(rig.iommu.probe(DEVICE, place.start(), READ), None);
        }
        let one = IovaRange::new(places[1].start(), PAGE).unwrap();
        assert!(OpenTable::open_fast(table, platform, one, phys(NEAR[0]), allowed));
        rig.assert_opens(one.start(), &NEAR[..1], allowed);
        assert!(table.close_fast(platform, one));
        assert!(OpenMapper::open_fast(mapper, platform, one, phys(NEAR[1]), allowed));
        rig.assert_opens(one.start(), &NEAR[1..], allowed);
    }
}
