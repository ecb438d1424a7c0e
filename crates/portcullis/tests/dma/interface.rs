//! The interface that drivers use: scatter-gather layout, limits, coherent memory, bad input.

use std::sync::Arc;

use crate::common::{Bench, DEVICE, PAGE};
use crate::queued::{direct, end};
use portcullis::addr::{Direction, DmaSegment, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{DeviceProfile, PoolConfig};
use portcullis::bounce::swiotlb::SwiotlbConfig;
use portcullis::dma::{CoherentMemory, DmaBuffer, DmaDevice};
use portcullis::domain::{MapListError, Policy, UnmapError};
use portcullis::iova::IovaError;
use portcullis::pgtable::MapError;
use portcullis::platform::Frames;
use portcullis_model::open::{OpenDevice, OpenDomain};
use portcullis_model::{Buffer, Memory};
use proptest::prelude::*;

fn segment(phys: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(phys), len }
}

/// Several buffers as one, in pieces that the test chooses.
struct Pieces {
    buffers: Vec<Buffer>,
    segments: Vec<PhysSegment>,
}

// SAFETY: the segments are parts of the buffers, which are atomic memory and live as long as this does.
unsafe impl DmaBuffer for Pieces {
    fn segments(&self) -> &[PhysSegment] {
        &self.segments
    }
}

impl Pieces {
    /// A piece of `len` bytes at `offset` into its first page, for each of `places`.
    fn new(bench: &Bench, places: &[(u64, u64)]) -> Self {
        let buffers: Vec<_> =
            places.iter().map(|(offset, len)| bench.memory.buffer(offset + len).unwrap()).collect();
        let segments = buffers
            .iter()
            .zip(places)
            .map(|(buffer, (offset, len))| segment(buffer.phys().get() + offset, *len))
            .collect();
        Self { buffers, segments }
    }

    /// All bytes of the pieces, one after another.
    fn bytes(&self, places: &[(u64, u64)]) -> Vec<u8> {
        let mut all = Vec::new();
        for (buffer, (offset, len)) in self.buffers.iter().zip(places) {
            let mut bytes = vec![0; *len as usize];
            buffer.read(*offset, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }
}

#[test]
fn a_list_is_one_range_and_pieces_that_touch_are_one_segment() {
    let bench = Bench::new(Policy::Strict);
    // Ends at a page's end, fills pages, begins at a page's start: one piece for the device.
    let places = [(PAGE - 100, 100), (0, 2 * PAGE), (0, 50)];
    let mut queue = direct(&bench.device);
    let mapping = queue.map(Pieces::new(&bench, &places), Direction::FromDevice).unwrap();
    let whole = DmaSegment { iova: mapping.iova(), len: 100 + 2 * PAGE + 50 };
    assert_eq!(queue.segments(&mapping).collect::<Vec<_>>(), [whole]);
    // A gap inside a page: two segments, the pages still in a row.
    let places = [(0, 100), (8, 100)];
    let mapping = queue.map(Pieces::new(&bench, &places), Direction::FromDevice).unwrap();
    let first = mapping.iova();
    let second = Iova::new(first.get() + PAGE + 8);
    let expected = [DmaSegment { iova: first, len: 100 }, DmaSegment { iova: second, len: 100 }];
    assert_eq!(queue.segments(&mapping).collect::<Vec<_>>(), expected);
}

#[test]
fn passthrough_merges_what_touches_in_memory() {
    let bench = Bench::new(Policy::Passthrough);
    let list = [segment(0x1000, 0x800), segment(0x1800, 0x100), segment(0x3000, 8)];
    let mut out = [DmaSegment::default(); 3];
    let used = bench.device.open_sg(&list, Direction::ToDevice, &mut out).unwrap();
    let expected =
        [DmaSegment { iova: Iova::new(0x1000), len: 0x900 }, DmaSegment { iova: Iova::new(0x3000), len: 8 }];
    assert_eq!(&out[..used], expected);
    bench.device.unmap_sg(&out[..used]).unwrap();
    // In any order of memory.
    let used = bench.device.open_sg(&[list[2], list[0]], Direction::ToDevice, &mut out).unwrap();
    bench.device.unmap_sg(&out[..used]).unwrap();
}

#[test]
fn a_device_s_mask_is_obeyed() {
    let bench = Bench::new(Policy::Strict);
    let narrow = DmaDevice::new(bench.domain.clone(), 0xff_ffff).unwrap();
    let iova = narrow.open_single(PhysAddr::new(0x5_0000_0000), 0x10_0000, Direction::ToDevice).unwrap();
    assert!(iova.get() + 0xf_ffff <= 0xff_ffff);
    let error = narrow.open_single(PhysAddr::new(0), 0x100_0000, Direction::ToDevice).unwrap_err();
    // It speaks of what the device reaches, and not of the 48 bits that there are.
    let MapListError::Iova(IovaError::Exhausted { len: 0x100_0000, free, largest, .. }) = error else {
        panic!("{error}");
    };
    assert!(0 < largest && largest <= free && free < 0xf0_0000, "{error}");
    // Without translation nothing can be done about it, but it is said.
    let bench = Bench::new(Policy::Passthrough);
    let narrow = DmaDevice::new(bench.domain.clone(), u32::MAX.into()).unwrap();
    let error = narrow.open_single(PhysAddr::new(0xffff_f000), 0x2000, Direction::ToDevice).unwrap_err();
    assert_eq!(error, MapListError::BeyondMask { last: PhysAddr::new(0x1_0000_0fff), mask: 0xffff_ffff });
}

#[test]
fn bad_input_is_an_error_that_names_it_and_changes_nothing() {
    let mut out = [DmaSegment::default(); 4];
    for policy in [Policy::Strict, Policy::LAZY, Policy::Passthrough] {
        let bench = Bench::new(policy);
        let mut map =
            |list: &[PhysSegment]| bench.device.open_sg(list, Direction::ToDevice, &mut out).unwrap_err();
        assert_eq!(map(&[]), MapListError::EmptyList);
        let anywhere = Iova::new(u64::MAX);
        assert_eq!(bench.domain.open(&[], Permissions::READ, anywhere), Err(MapListError::EmptyList));
        let empty = MapListError::EmptySegment { index: 1, phys: PhysAddr::new(0x2000) };
        assert_eq!(map(&[segment(0x1000, 1), segment(0x2000, 0)]), empty);
        let wraps = MapListError::Wraps { index: 0, phys: PhysAddr::new(u64::MAX), len: 2 };
        assert_eq!(map(&[segment(u64::MAX, 2)]), wraps);
        assert_eq!(map(&[segment(0, 8); 5]), MapListError::NoRoom { needed: 5, room: 4 });
        if policy != Policy::Passthrough {
            let beyond = map(&[segment(0x1000, 1), segment(1 << 52, PAGE)]);
            assert!(matches!(beyond, MapListError::Map(MapError::BeyondPhysical { .. })), "{beyond}");
            let huge = map(&[segment(0, u64::MAX)]);
            assert!(matches!(huge, MapListError::Wraps { .. }), "{huge}");
            let large = map(&[segment(0, 1 << 60)]);
            assert!(matches!(large, MapListError::Iova(IovaError::Exhausted { .. })), "{large}");
            for (iova, len) in [(0, 0), (u64::MAX, 2), (u64::MAX - 5, 1)] {
                let error = bench.device.unmap_single(Iova::new(iova), len).unwrap_err();
                assert!(matches!(
                    error,
                    UnmapError::NoSuchRange { .. } | UnmapError::NotMapped { unmapped: 0, .. }
                ));
            }
            let reversed = [
                DmaSegment { iova: Iova::new(0x9000), len: 1 },
                DmaSegment { iova: Iova::new(0x1000), len: 1 },
            ];
            assert!(matches!(bench.device.unmap_sg(&reversed), Err(UnmapError::NoSuchRange { .. })));
        }
        bench.device.unmap_sg(&[]).unwrap();
        assert_eq!(
            bench.domain.stats().taken_iova_bytes,
            bench.domain.stats().cached_iova_bytes,
            "nothing is handed out"
        );
    }
}

#[test]
fn a_list_that_fails_in_the_middle_leaves_nothing() {
    let bench = Bench::new(Policy::Strict);
    // Frames for the first table path exist after this; then the tenth allocation fails.
    let list: Vec<_> = (0..1200).map(|n| segment(0x9_0000_0000 + n * 2 * PAGE, PAGE)).collect();
    let mut out = vec![DmaSegment::default(); list.len()];
    for nth in 1..=3 {
        let frames = bench.memory.frames_in_use();
        bench.memory.fail_after(nth);
        let error = bench.device.open_sg(&list, Direction::ToDevice, &mut out);
        let Err(error) = error else { break };
        assert_eq!(error, MapListError::Map(MapError::OutOfMemory));
        assert!(nth > 1 || bench.memory.frames_in_use() == frames);
    }
    bench.memory.fail_after(0);
    let used = bench.device.open_sg(&list, Direction::ToDevice, &mut out).unwrap();
    assert_eq!(used, 1, "whole pages of one list touch");
    assert!(bench.reads(out[0].iova));
    bench.device.unmap_sg(&out[..used]).unwrap();
    assert!(!bench.reads(out[0].iova));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn coherent_memory_is_shared_and_goes_for_good() {
    for policy in [Policy::Strict, Policy::Lazy { window_ns: u64::MAX }] {
        let bench = Bench::new(policy);
        let frames = bench.memory.frames_in_use();
        let ring = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 5000).unwrap();
        assert_eq!(ring.words(), 1024);
        let iova = ring.iova();
        bench.iommu.dma_write(DEVICE, Iova::new(iova.get() + PAGE), &7u64.to_ne_bytes()).unwrap();
        use portcullis::sync::Ordering;
        assert_eq!(ring.word(512).unwrap().load(Ordering::Relaxed), 7);
        assert!(ring.word(1024).is_none());
        ring.word(3).unwrap().store(9, Ordering::Relaxed);
        let mut bytes = [0; 8];
        bench.iommu.dma_read(DEVICE, Iova::new(iova.get() + 24), &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 9);
        ring.free().unwrap();
        assert!(!bench.writes(iova), "strict, whatever the policy: the frames may be anybody's now");
        let tables = bench.domain.mapper().table().table_bytes() as u64 / PAGE;
        assert_eq!(bench.memory.frames_in_use() - frames, tables - 1, "only new tables stay");
    }
}

#[test]
fn coherent_memory_gives_its_bytes_and_its_address() {
    let bench = Bench::new(Policy::Strict);
    let ring = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 2 * PAGE as usize).unwrap();
    assert_eq!(ring.size(), 8192);
    let at = |offset: usize| Iova::new(ring.iova().get() + offset as u64);
    // Across the border of two frames, and of words; what is beside it stays.
    for (offset, len) in [(0, 8), (3, 2), (5, 20), (4090, 13), (8191, 1), (8192, 0)] {
        bench.iommu.dma_write(DEVICE, at(0), &[0xee; 8192]).unwrap();
        let data: Vec<u8> = (1..=len as u8).collect();
        ring.write(offset, &data).unwrap();
        let mut seen = [0; 8192];
        bench.iommu.dma_read(DEVICE, at(0), &mut seen).unwrap();
        let mut expected = [0xee; 8192];
        expected[offset..offset + len].copy_from_slice(&data);
        assert_eq!(seen, expected, "{len} bytes at {offset}");
        let mut back = vec![0; len];
        ring.read(offset, &mut back).unwrap();
        assert_eq!(back, data);
    }
    // The memory that the device reaches is at the address that is given.
    let word = ring.word(512).unwrap();
    word.store(0x0123_4567_89ab_cdef, portcullis::sync::Ordering::Relaxed);
    // SAFETY: the frame is the memory's, which lives on.
    let frame = unsafe { bench.memory.table(PhysAddr::new(ring.phys().get() + PAGE)) };
    assert!(core::ptr::eq(word, &frame[0]));
    // Past the end nothing is copied.
    let mut out = [7; 2];
    assert_eq!(ring.read(8191, &mut out), None);
    assert_eq!(out, [7; 2]);
    assert_eq!(ring.write(8191, &[1, 2]), None);
    assert_eq!(ring.read(usize::MAX, &mut out), None);
    ring.read(8191, &mut out[..1]).unwrap();
    assert_eq!(out, [0xee, 7]);
}

/// Frames that lie side by side in the machine, and not where the CPU finds them.
struct Scattered(Arc<Memory>);

// SAFETY: as `Memory`, but that each frame's words are those of another, by turns.
unsafe impl Frames for Scattered {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &portcullis::platform::Table {
        // SAFETY: the caller's promise, as two frames are allocated together.
        unsafe { self.0.table(PhysAddr::new(frame.get() ^ PAGE)) }
    }
}

#[test]
fn coherent_memory_has_a_pointer_where_it_is_in_one_piece() {
    let bench = Bench::new(Policy::Strict);
    let ring = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 2 * PAGE as usize).unwrap();
    let first = ring.as_ptr().unwrap();
    ring.write(4094, &[1, 2, 3, 4]).unwrap();
    // SAFETY: inside the memory, which lives on; no device writes now.
    let seen = [4094, 4095, 4096, 4097].map(|at| unsafe { first.add(at).read_volatile() });
    assert_eq!(seen, [1, 2, 3, 4]);
    let scattered = Scattered(Arc::clone(&bench.memory));
    let ring = CoherentMemory::new(&bench.device, scattered, 2 * PAGE as usize).unwrap();
    assert_eq!(ring.as_ptr(), None);
}

#[test]
fn coherent_memory_that_cannot_be_had_says_so() {
    let bench = Bench::new(Policy::Strict);
    let too_much = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 1 << 40).err();
    assert_eq!(too_much, Some(MapListError::NoFrames { frames: 1 << 28 }));
    let none = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 0).err();
    assert_eq!(none, Some(MapListError::NoFrames { frames: 0 }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever the pieces: the device writes through its segments, and the bytes arrive in order.
    #[test]
    fn what_the_device_writes_arrives_in_the_buffer(
        places in proptest::collection::vec((0..PAGE, 1..3 * PAGE), 1..8),
        policy in prop_oneof![Just(Policy::Strict), Just(Policy::LAZY), Just(Policy::Passthrough)],
    ) {
        let bench = Bench::new(policy);
        let mut queue = direct(&bench.device);
        let mapping = queue.map(Pieces::new(&bench, &places), Direction::FromDevice).unwrap();
        let segments: Vec<_> = queue.segments(&mapping).collect();
        let total: u64 = places.iter().map(|(_, len)| len).sum();
        prop_assert_eq!(segments.iter().map(|segment| segment.len).sum::<u64>(), total);
        let data: Vec<u8> = (0..total).map(|n| (n * 7 + n / 256) as u8).collect();
        let mut rest = &data[..];
        for segment in &segments {
            let (now, later) = rest.split_at(segment.len as usize);
            bench.iommu.dma_write(DEVICE, segment.iova, now).unwrap();
            rest = later;
        }
        queue.sync_for_cpu(&mapping, 0, total).unwrap();
        let pieces = end(&mut queue, mapping);
        prop_assert_eq!(pieces.bytes(&places), data);
        prop_assert_eq!(bench.iommu.fault_count(), 0);
    }

    /// No range, however odd, makes an unmap of the raw interface panic or touch a mapping it does not name.
    #[test]
    fn any_unmap_is_survived(starts in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..20)) {
        let bench = Bench::new(Policy::Strict);
        let list = [segment(0x7000, PAGE)];
        let kept = bench.domain.open(&list, Permissions::READ, Iova::new(u64::MAX)).unwrap();
        for (start, len) in starts {
            if let Ok(range) = IovaRange::new(Iova::new(start), len.min(1 << 20))
                && (range.last() < kept.start() || kept.last() < range.start())
            {
                prop_assert!(bench.domain.unmap(range).is_err());
            }
            let _ = bench.device.unmap_single(Iova::new(start), 0);
        }
        prop_assert!(bench.reads(kept.start()));
    }
}

/// The defaults, as the documentation gives them.
#[test]
fn what_is_not_configured_is_as_documented() {
    let everywhere = u64::MAX;
    let PoolConfig { threshold, class_bytes, limit, split, wipe, idle_ns, keep_bytes } =
        PoolConfig::default();
    assert_eq!((threshold, class_bytes, limit.get()), (0x2_0000, 0x200_0000, everywhere));
    assert_eq!((split, wipe, idle_ns, keep_bytes), (true, false, 1_000_000_000, 0));
    let swiotlb = SwiotlbConfig {
        slot_bytes: 0x800,
        area_bytes: 0x20_0000,
        min_bytes: 0x20_0000,
        max_bytes: 0x400_0000,
        reach: PhysAddr::new(everywhere),
        idle_ns: 1_000_000_000,
    };
    assert_eq!(SwiotlbConfig::default(), swiotlb);
    let profile = DeviceProfile { mask: everywhere, offset_mask: 0, untrusted: false, group: 0 };
    assert_eq!(DeviceProfile::default(), profile);
}

/// A driver prints what it has, or unwraps an error with a buffer in it: that is a line, not the memory and the lists of all CPUs.
#[test]
fn what_a_driver_has_is_shown_in_a_line() {
    let bench = Bench::new(Policy::Strict);
    let (device, frames) = (&bench.device, &bench.memory);
    let coherent = CoherentMemory::new(device, Arc::clone(frames), 4096).unwrap();
    let buffer = frames.buffer(PAGE).unwrap();
    for shown in [
        format!("{frames:?}"),
        format!("{buffer:?}"),
        format!("{:?}", bench.iommu),
        format!("{:?}", bench.iommu.queue()),
        format!("{:?}", bench.domain),
        format!("{:?}", bench.domain.mapper().table()),
        format!("{device:?}"),
        format!("{coherent:?}"),
    ] {
        assert!(shown.len() < 400 && !shown.contains('\n'), "{} bytes: {:.400}", shown.len(), shown);
        assert!(shown.contains(" { ") && shown.ends_with(" }"), "its name and its fields: {shown}");
    }
    assert_eq!(format!("{buffer:?}"), format!("Buffer {{ phys: {:?}, len: 4096, .. }}", buffer.phys()));
}
