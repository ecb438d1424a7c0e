//! A mapping by number is its maker's alone, and says what became of it in the same words whatever made it.

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, PageSize, PhysSegment};
use portcullis::dma::{
    AnyQueue, Device, DmaDevice, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, Ended, NotUnmapped,
    QueueConfig, RawMapping, StrictRing, StrictRingConfig,
};
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::InvalidationError;
use portcullis::std_platform::StdPlatform;
use portcullis_model::Memory;
use portcullis_model::open::OpenRing;

use crate::ends::bench::{Bench, Mapper, PAGE, page};

type Machine = (Mapper, StdPlatform, Arc<Memory>);
type Unmapped = Result<Ended<(), ()>, NotUnmapped<RawMapping>>;

const BROKEN: InvalidationError = InvalidationError::Rejected { code: 9 };

/// Whatever makes mappings by number.
trait Maker {
    fn map(&mut self, list: &[PhysSegment]) -> Result<RawMapping, DmaMapError>;
    fn unmap(&mut self, mapping: RawMapping) -> Unmapped;
    /// `None` where there is no sync.
    fn sync(&self, mapping: &RawMapping) -> Option<Result<(), DmaUnmapError>>;
}

impl Maker for Box<dyn AnyQueue> {
    fn map(&mut self, list: &[PhysSegment]) -> Result<RawMapping, DmaMapError> {
        let mut view = vec![DmaSegment::default(); list.len()];
        // SAFETY: the memory is simulated, every access to it atomic, and nothing but the test uses it.
        unsafe { self.map_raw(list, Direction::FromDevice, &mut view) }.map(|(mapping, _)| mapping)
    }

    fn unmap(&mut self, mapping: RawMapping) -> Unmapped {
        self.unmap_raw(mapping)
    }

    fn sync(&self, mapping: &RawMapping) -> Option<Result<(), DmaUnmapError>> {
        assert_eq!(self.sync_raw_for_cpu(mapping, 0, 1), self.sync_raw_for_device(mapping, 0, 1));
        Some(self.sync_raw_for_cpu(mapping, 0, 1))
    }
}

impl Maker for StrictRing<Mapper, StdPlatform> {
    fn map(&mut self, list: &[PhysSegment]) -> Result<RawMapping, DmaMapError> {
        self.open(list, Direction::FromDevice)
    }

    fn unmap(&mut self, mapping: RawMapping) -> Unmapped {
        StrictRing::unmap(self, mapping)
    }

    fn sync(&self, _: &RawMapping) -> Option<Result<(), DmaUnmapError>> {
        None
    }
}

/// A device of the bench's domain whose queues may copy.
fn copying(bench: &Bench) -> Device<Machine> {
    let domain = DmaDomain::<Machine>::over(bench.domain.clone(), Some(Arc::clone(&bench.memory))).unwrap();
    domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap()
}

fn makers(bench: &Bench, device: &DmaDevice<Mapper, StdPlatform>) -> Vec<(&'static str, Box<dyn Maker>)> {
    let of = copying(bench);
    let queue = |config: QueueConfig| -> Box<dyn Maker> {
        let queue: Box<dyn AnyQueue> = Box::new(of.queue::<std::convert::Infallible>(config).unwrap());
        Box::new(queue)
    };
    let ring = || -> Box<dyn Maker> {
        Box::new(StrictRing::new(device, StrictRingConfig::new(64, PAGE, 2)).unwrap())
    };
    vec![
        ("direct", queue(QueueConfig::direct())),
        ("another", queue(QueueConfig::direct())),
        ("batched", queue(QueueConfig::batched(2))),
        ("ring", queue(QueueConfig::ring(8, PAGE).batch(2))),
        ("auto", queue(QueueConfig::auto(64, PAGE).batch(2))),
        ("bounce", queue(QueueConfig::bounce())),
        ("a ring by itself", ring()),
        ("another ring by itself", ring()),
    ]
}

/// Timed mappings of `auto` and cut ones are among them.
#[test]
fn a_mapping_is_ended_and_synced_by_its_maker_alone() {
    let bench = Bench::new(Policy::Strict);
    let buffer = bench.memory.buffer(32 * PAGE).unwrap();
    let mut makers = makers(&bench, &bench.device);
    for (offset, len) in [(0, PAGE), (100, 200), (100, 20 * PAGE)] {
        let list = [PhysSegment { phys: buffer.phys().checked_add(offset).unwrap(), len }];
        for round in 0..20 {
            for maker in 0..makers.len() {
                let mut mapping = makers[maker].1.map(&list).unwrap();
                for other in (0..makers.len()).filter(|other| *other != maker) {
                    let (of, by) = (makers[maker].0, makers[other].0);
                    let synced = makers[other].1.sync(&mapping);
                    assert!(
                        synced.is_none_or(|synced| synced == Err(DmaUnmapError::OtherQueue)),
                        "{of} {by}"
                    );
                    let before = format!("{mapping:?}");
                    let failed = makers[other].1.unmap(mapping).unwrap_err();
                    assert_eq!((failed.error, failed.waits), (DmaUnmapError::OtherQueue, false), "{of} {by}");
                    mapping = failed.mapping.unwrap();
                    assert_eq!(format!("{mapping:?}"), before, "{of} {by}, round {round}");
                }
                assert!(makers[maker].1.unmap(mapping).is_ok(), "{}", makers[maker].0);
            }
        }
    }
}

/// Nor does one ring end another's where all addresses are the memory's own, and the numbers alone tell them apart.
#[test]
fn without_translation_a_ring_refuses_another_s_mapping() {
    let bench = Bench::new(Policy::Passthrough);
    let mut rings =
        [(); 2].map(|()| StrictRing::new(&bench.device, StrictRingConfig::new(8, PAGE, 2)).unwrap());
    let mapping = rings[0].open(&[page(1)], Direction::ToDevice).unwrap();
    let failed = rings[1].unmap(mapping).unwrap_err();
    assert_eq!((failed.error, failed.waits, rings[1].waiting()), (DmaUnmapError::OtherQueue, false, 0));
    assert_eq!(rings[0].unmap(failed.mapping.unwrap()).unwrap(), Ended::Pending);
}

/// What waits, what comes back, and what does neither.
#[test]
fn a_ring_says_whether_a_mapping_waits() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(8, PAGE, 1)).unwrap();
    let [first, second] = [1, 3].map(|number| ring.open(&[page(number)], Direction::ToDevice).unwrap());
    bench.iommu.queue().fail_next(2, BROKEN);
    let failed = ring.unmap(first).unwrap_err();
    assert!(failed.mapping.is_none() && failed.waits, "{failed}");
    let failed = ring.unmap(second).unwrap_err();
    assert!(failed.mapping.is_some() && !failed.waits, "{failed}");
    assert_eq!(failed.error, DmaUnmapError::Unconfirmed { error: BROKEN });
    assert_eq!(ring.unmap(failed.mapping.unwrap()).unwrap(), Ended::Flushed(()));
}

/// Each of these pieces is a few bytes of a granule: the bytes beside them have no room in a mapping.
#[test]
fn what_a_mapping_has_no_words_for_is_an_error_and_leaves_nothing() {
    let bench = Bench::new(Policy::Strict);
    let piece = PhysSegment { len: 1, ..page(1) };
    let list = vec![piece; (1 << 20) + 300];
    let (bytes, used) = ((list.len() as u64) * PAGE, list.len() as u64);
    let too_large = MapListError::TooLarge { bytes, beside: bytes - used };
    let mut makers = makers(&bench, &bench.device);
    let before = bench.domain.stats();
    for (name, maker) in &mut makers[..3] {
        assert_eq!(maker.map(&list), Err(DmaMapError::List(too_large)), "{name}");
    }
    // A ring has no room for the list either, and says that.
    let most = 64 * PAGE;
    for (name, maker) in &mut makers[6..] {
        let error = maker.map(&list).unwrap_err();
        assert!(
            matches!(error, DmaMapError::TooLong { len, most: at_most } if len == bytes && at_most >= most),
            "{name}"
        );
    }
    let after = bench.domain.stats();
    assert_eq!((after.maps, after.taken_iova_bytes), (before.maps, before.taken_iova_bytes));
    assert_eq!(bench.domain.granule(), PageSize::SIZE_4K);
}
