//! The cases. Each runs on all configurations of an IOMMU, each on a machine of its own.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portcullis::addr::{
    DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr, PhysSegment,
};
use portcullis::dma::{CoherentMemory, DmaMask, Ended, Queue, QueueConfig, RawMapping};
use portcullis::domain::Policy;
use portcullis::invalidation::{Gather, Invalidation, Request};
use portcullis::mapper::Mapper;
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::{Access, Fault, Reason, UnitDomain};

use super::kind::Kind;
use super::machine::{EDU, Edu, Machine, Ram, Result};

type Kernel<K> = (<K as Kind>::Mapper, StdPlatform, Infallible);

/// A machine with a unit that is on, and two unattached devices.
struct Rig<K> {
    kind: K,
    devices: [Edu; 2],
    machine: Machine,
}

/// A domain.
struct Space<K: Kind> {
    domain: UnitDomain<Kernel<K>>,
}

/// A device in a domain: one direct queue.
struct Card<K: Kind> {
    queue: Queue<Kernel<K>>,
}

/// A page that a device may always read and write: its IOVA, and its physical address.
type Window = (Iova, PhysAddr);

fn id(device: usize) -> DeviceId {
    DeviceId(EDU[device] << 3)
}

/// A machine whose devices have addresses up to `mask`: they drop higher bits.
fn machine<K: Kind>(unit: &str, mask: DmaMask) -> Result<Machine> {
    let [first, second] = EDU.map(|slot| format!("edu,addr={slot:02x}.0,dma_mask={:#x}", mask.last()));
    K::machine(unit, &[&first, &second])
}

impl<K: Kind> Rig<K> {
    fn new(unit: &str) -> Result<Self> {
        let rig = Self::started(unit, DmaMask::BITS_64)?;
        rig.kind.enable()?;
        Ok(rig)
    }

    /// The same with a unit that is not on yet.
    fn started(unit: &str, mask: DmaMask) -> Result<Self> {
        let machine = machine::<K>(unit, mask)?;
        let devices = EDU.map(|slot| machine.edu(slot));
        Ok(Self { kind: K::start(&machine)?, devices, machine })
    }

    fn ram(&self) -> &Ram {
        self.machine.ram()
    }

    /// A domain without devices.
    fn space(&self, number: u16, policy: Policy) -> Result<Space<K>> {
        let domain = self.kind.domain(DomainId(number))?.policy(policy).build(StdPlatform::new())?;
        Ok(Space { domain })
    }

    fn attach(&self, device: usize, space: &Space<K>, mask: DmaMask) -> Result<Card<K>> {
        Ok(Card { queue: space.domain.attach(id(device), mask)?.queue(QueueConfig::direct())? })
    }

    /// Attaches a device to a domain of its own, with a [window](Card::window) there.
    fn card(&self, device: usize, number: u16, policy: Policy) -> Result<(Space<K>, Card<K>, Window)> {
        let space = self.space(number, policy)?;
        let mut card = self.attach(device, &space, DmaMask::BITS_64)?;
        let window = card.window(self)?;
        Ok((space, card, window))
    }

    fn lead(&self, device: usize, space: &Space<K>) -> Result<()> {
        space.domain.attach(id(device), DmaMask::BITS_64)?;
        Ok(())
    }

    /// Memory whose first granule, at least, has no other use.
    fn memory(&self, bytes: u64) -> PhysSegment {
        let frames = usize::try_from(bytes.max(K::GRANULE).div_ceil(4096)).unwrap_or(usize::MAX);
        PhysSegment { phys: self.ram().alloc(frames).expect("memory"), len: bytes }
    }

    /// A device reads the 8 bytes at `from`; returns the result, through `to`.
    fn fetch(&self, device: usize, from: Iova, (to, at): Window) -> [u8; 8] {
        self.devices[device].fetch(from, 0, 8);
        self.devices[device].store(0, to, 8);
        self.ram().read(at)
    }

    /// A device writes `bytes` to `to`: it reads them at `from`, which is memory at `at`.
    fn store(&self, device: usize, bytes: [u8; 8], (from, at): Window, to: Iova) {
        self.ram().write(at, &bytes);
        self.devices[device].fetch(from, 0, 8);
        self.devices[device].store(0, to, 8);
    }

    /// Faults since the last call, if the model records them.
    fn faults(&self) -> Option<Vec<Fault>> {
        let faults = self.kind.faults();
        match K::RECORDS {
            Ok(()) => Some(faults),
            Err(why) => {
                not_covered::<K>("what is recorded of an access that is refused", why);
                None
            }
        }
    }

    /// No faults since the last call, as far as the model records them.
    fn assert_no_fault(&self) {
        let faults = self.faults();
        assert!(faults.as_ref().is_none_or(Vec::is_empty), "{faults:?}");
    }

    /// An access of `device` was refused, as far as the model records it.
    fn assert_fault(&self, device: usize, access: Access, address: Option<Iova>, reasons: &[Reason]) {
        self.assert_fault_of(device, Some(access), address, reasons);
    }

    fn assert_fault_of(
        &self,
        device: usize,
        access: Option<Access>,
        address: Option<Iova>,
        reasons: &[Reason],
    ) {
        let Some(faults) = self.faults() else { return };
        let fault = faults.first().expect("a fault is recorded");
        assert_eq!(fault.device, id(device), "{fault}");
        let told = fault.access.or(access.filter(|_| !K::TELLS_ACCESS));
        assert_eq!(told, access, "{fault}");
        assert!(reasons.contains(&fault.reason), "{fault}");
        assert!(address.is_none_or(|address| fault.address == Some(address)), "{fault}");
    }
}

impl<K: Kind> Space<K> {
    /// Maps for a device in this domain, which need not be attached.
    fn card(&self, device: usize, mask: DmaMask) -> Result<Card<K>> {
        Ok(Card { queue: self.domain.dma().attach(id(device), mask)?.queue(QueueConfig::direct())? })
    }
}

impl<K: Kind> Card<K> {
    fn map(&mut self, segment: PhysSegment, direction: Direction) -> Result<(RawMapping, Iova)> {
        let mut view = [DmaSegment::default()];
        // SAFETY: this process accesses QEMU's memory only by atomics.
        let (mapping, _) = unsafe { self.queue.map_raw(&[segment], direction, &mut view) }?;
        Ok((mapping, view[0].iova))
    }

    fn unmap(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>> {
        Ok(self.queue.unmap_raw(mapping)?)
    }

    /// A page that the device may always read and write, to pass bytes to it and back.
    fn window(&mut self, rig: &Rig<K>) -> Result<Window> {
        let page = rig.memory(4096);
        let (_, iova) = self.map(page, Direction::Bidirectional)?;
        Ok((iova, page.phys))
    }
}

/// Runs `case` on each unit, which is on.
fn on_each<K: Kind>(case: impl Fn(&Rig<K>) -> Result<()>) {
    on_each_of(Rig::<K>::new, case);
}

fn on_each_of<K: Kind>(make: impl Fn(&str) -> Result<Rig<K>>, case: impl Fn(&Rig<K>) -> Result<()>) {
    for (what, why) in K::GAPS {
        not_covered::<K>(what, why);
    }
    for unit in K::UNITS {
        let rig = make(unit).unwrap_or_else(|error| panic!("{unit}: {error}"));
        case(&rig).unwrap_or_else(|error| panic!("{unit}: {error}"));
    }
}

/// Reports that a case, or a part of it, cannot run, and why. `cargo xtask conformance` lists these.
fn not_covered<K>(what: &str, why: &str) {
    // The driver's module, or the kind's own: `portcullis_hw::vtd::..`, `conformance::virtio::..`.
    let kind = std::any::type_name::<K>();
    let path = kind.split_once("portcullis_hw::").or_else(|| kind.split_once("conformance::"));
    let name = path.and_then(|(_, path)| path.split("::").next()).unwrap_or(kind);
    println!("not covered: {name}: {what}: {why}");
}

pub fn a_device_that_is_attached_to_nothing_reaches_nothing<K: Kind>() {
    on_each::<K>(|rig| {
        let page = rig.memory(4096);
        rig.ram().write(page.phys, b"as it is");
        rig.devices[0].store(0, Iova::new(page.phys.get()), 8);
        assert_eq!(&rig.ram().read(page.phys), b"as it is");
        if K::UNATTACHED_WRITE != Some(Access::Write) {
            let says = format!("the model says {:?} of a write", K::UNATTACHED_WRITE);
            not_covered::<K>("what a device that is attached to nothing was about to do", &says);
        }
        rig.assert_fault_of(0, K::UNATTACHED_WRITE, None, &[K::NOT_ATTACHED]);
        Ok(())
    });
}

pub fn a_mapping_is_read_and_written_as_its_direction_allows<K: Kind>() {
    on_each::<K>(|rig| {
        let (_space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        let reasons = [Reason::NotMapped, Reason::Permission];
        let page = rig.memory(4096);
        // The refusal comes first: some models record no fault of a cached entry.
        let (mapping, iova) = card.map(page, Direction::ToDevice)?;
        rig.ram().write(page.phys, b"original");
        rig.store(0, *b"replaced", window, iova);
        rig.assert_fault(0, Access::Write, Some(iova), &reasons);
        assert_eq!(&rig.ram().read(page.phys), b"original");
        assert_eq!(&rig.fetch(0, iova, window), b"original");
        rig.assert_no_fault();
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));

        let (mapping, iova) = card.map(page, Direction::FromDevice)?;
        if K::WRITE_ONLY {
            assert_ne!(&rig.fetch(0, iova, window), b"original");
            rig.assert_fault(0, Access::Read, Some(iova), &reasons);
        } else {
            not_covered::<K>(
                "a read of what may only be written",
                "these tables have no entry that is written only",
            );
        }
        rig.store(0, *b"replaced", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"replaced");
        rig.assert_no_fault();
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));

        let (mapping, iova) = card.map(page, Direction::Bidirectional)?;
        assert_eq!(&rig.fetch(0, iova, window), b"replaced");
        rig.store(0, *b"and both", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"and both");
        rig.assert_no_fault();
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        Ok(())
    });
}

pub fn a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not<K: Kind>() {
    on_each::<K>(|rig| {
        let (_space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        for neglect in [false, true] {
            let page = rig.memory(4096);
            let (mapping, iova) = card.map(page, Direction::Bidirectional)?;
            rig.store(0, *b"mapped..", window, iova);
            assert_eq!(&rig.ram().read(page.phys), b"mapped..");
            if !rig.kind.neglect(neglect) && neglect {
                not_covered::<K>(
                    "an unmap without its invalidation",
                    "this IOMMU has none: an unmap is a request",
                );
                return Ok(());
            }
            assert_eq!(card.unmap(mapping)?, Ended::Done(()));
            let _ = rig.kind.neglect(false);
            rig.store(0, *b"unmapped", window, iova);
            // The second run shows that the first can fail.
            assert_eq!(&rig.ram().read(page.phys), if neglect { b"unmapped" } else { b"mapped.." });
            if neglect {
                rig.assert_no_fault();
            } else {
                rig.assert_fault(0, Access::Write, Some(iova), &[Reason::NotMapped]);
            }
        }
        Ok(())
    });
}

pub fn a_lazy_unmap_ends_access_with_its_flush<K: Kind>() {
    on_each::<K>(|rig| {
        let (space, mut card, window) = rig.card(0, 1, Policy::Lazy { window_ns: 3_600_000_000_000 })?;
        let page = rig.memory(4096);
        let (mapping, iova) = card.map(page, Direction::Bidirectional)?;
        rig.store(0, *b"mapped..", window, iova);
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        rig.store(0, *b"too late", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"too late", "inside the window");
        space.domain.dma().space().flush()?;
        rig.store(0, *b"too much", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"too late", "after the flush");

        // The platform's timer ends the window, too.
        let (_space, mut card, window) = rig.card(1, 2, Policy::Lazy { window_ns: 10_000_000 })?;
        let page = rig.memory(4096);
        let (mapping, iova) = card.map(page, Direction::Bidirectional)?;
        rig.store(1, *b"mapped..", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"mapped..");
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        let began = Instant::now();
        for round in 0_u64.. {
            assert!(began.elapsed() < Duration::from_secs(30), "the window stays open");
            rig.store(1, round.to_le_bytes(), window, iova);
            if rig.ram().read(page.phys) != round.to_le_bytes() {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    });
}

/// In caching mode, each map invalidates.
pub fn what_was_absent_is_reached_once_it_is_mapped<K: Kind>() {
    on_each::<K>(|rig| {
        let (_space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        for neglect in [false, true] {
            let page = rig.memory(4096);
            let (mapping, iova) = card.map(page, Direction::Bidirectional)?;
            assert_eq!(card.unmap(mapping)?, Ended::Done(()));
            rig.store(0, *b"too soon", window, iova);
            assert_ne!(&rig.ram().read(page.phys), b"too soon", "the unit has seen that it is absent");
            let _ = rig.kind.neglect(neglect);
            let (mapping, same) = card.map(page, Direction::Bidirectional)?;
            assert_eq!(same, iova, "the same address again, or this shows nothing");
            let _ = rig.kind.neglect(false);
            rig.store(0, *b"mapped..", window, iova);
            // The second run shows that the first can fail.
            let is_absent = neglect && rig.kind.caches_absent();
            match K::CACHES_ABSENT {
                Err(why) if is_absent => not_covered::<K>("a map without its invalidation", why),
                _ => assert_eq!(&rig.ram().read(page.phys) != b"mapped..", is_absent, "{neglect}"),
            }
            let _ = card.unmap(mapping)?;
        }
        Ok(())
    });
}

pub fn large_pages_are_walked_to_their_ends<K: Kind>() {
    on_each::<K>(|rig| {
        let (space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        let huge = PhysSegment { phys: rig.ram().alloc(1024).ok_or("memory")?, len: 4 << 20 };
        // A GiB of addresses; the machine has the first quarter.
        let giant = PhysSegment { phys: rig.ram().base(), len: 1 << 30 };
        for (segment, offsets) in [
            (huge, [0, (2 << 20) - 8, 2 << 20, (4 << 20) - 8]),
            (giant, [16 << 20, 40 << 20, 100 << 20, (256 << 20) - 8]),
        ] {
            let tables = K::table_bytes(space.domain.dma().space().mapper());
            let (mapping, iova) = card.map(segment, Direction::Bidirectional)?;
            let grown =
                K::table_bytes(space.domain.dma().space().mapper()).zip(tables).map(|(now, then)| now - then);
            // A page of 1 GiB needs no table beside the window's own.
            let sizes = space.domain.dma().space().mapper().geometry().page_sizes;
            let gib = PageSize::SIZE_1G;
            let is_one = segment.len == gib.bytes() && sizes.contains(gib) && segment.phys.is_aligned(gib);
            let most = if is_one { 0 } else { 2 * 4096 };
            assert!(grown.is_none_or(|grown| grown <= most), "{grown:?} bytes of tables for {segment:?}");
            for offset in offsets {
                let at = PhysAddr::new(segment.phys.get() + offset);
                let kept = rig.ram().read::<8>(at);
                rig.store(0, *b"in large", window, Iova::new(iova.get() + offset));
                assert_eq!(&rig.ram().read(at), b"in large");
                rig.ram().write(at, &kept);
            }
            let _ = card.unmap(mapping)?;
            rig.store(0, *b"too late", window, Iova::new(iova.get() + offsets[3]));
            assert_ne!(&rig.ram().read(PhysAddr::new(segment.phys.get() + offsets[3])), b"too late");
        }
        Ok(())
    });
}

/// The rest of a large page stays mapped while a part of it is unmapped; and an IOTLB entry of the whole page is invalidated as a whole
/// (VT-d: by a mask of at least the page's size).
pub fn a_part_of_a_large_page_ends_alone<K: Kind>() {
    on_each::<K>(|rig| {
        let (platform, granule) = (StdPlatform::new(), K::GRANULE);
        let space = rig.space(1, Policy::Strict)?;
        let mapper = space.domain.dma().space().mapper();
        let sizes = mapper.geometry().page_sizes;
        let large = (21..40).filter_map(PageSize::from_shift).find(|size| sizes.contains(*size));
        let large = large.ok_or("large pages")?.bytes();
        // If memory is smaller than a page, the device stays inside it.
        let reach = large.min(256 << 20);
        let phys = if large <= 32 << 20 { rig.memory(large).phys } else { rig.ram().base() };
        let place = |offset: u64| (Iova::new(2 * large + offset), PhysAddr::new(phys.get() + offset));
        let page = rig.memory(granule);
        let window = (Iova::new(large), page.phys);
        let map = |at: Iova, phys, len| -> Result<IovaRange> {
            let range = IovaRange::new(at, len)?;
            let list = [(phys, len)];
            // SAFETY: this process accesses QEMU's memory only by atomics.
            unsafe {
                mapper.map(&platform, range, list, Permissions::READ_WRITE.into(), &mut Gather::new())
            }?;
            Ok(range)
        };
        map(window.0, window.1, granule)?;
        map(place(0).0, phys, large)?;
        rig.lead(0, &space)?;
        let reaches = |offset: u64, bytes: &[u8; 8]| {
            rig.store(0, *bytes, window, place(offset).0);
            rig.ram().read(place(offset).1) == *bytes
        };
        let middle = reach / 2;
        let beside = [middle - 8, middle + 2 * granule, reach - 8];
        for (part, neglect) in [(middle, false), (middle + granule, true)] {
            assert!(beside.iter().all(|at| reaches(*at, b"before..")) && reaches(part, b"as it is"));
            let _ = rig.kind.neglect(neglect);
            let mut gather = Gather::new();
            let unmapped = mapper.unmap(&platform, IovaRange::new(place(part).0, granule)?, &mut gather);
            if unmapped.kept > 0 {
                not_covered::<K>(
                    "a part of a large page",
                    "this IOMMU removes what was mapped as a whole only",
                );
                return Ok(());
            }
            assert_eq!(unmapped.bytes, granule);
            mapper.sync(&gather)?;
            let _ = rig.kind.neglect(false);
            let _ = rig.faults();
            assert!(beside.iter().all(|at| reaches(*at, b"after...")), "the rest of the page");
            rig.assert_no_fault();
            // The second run shows that the first can fail.
            assert_eq!(reaches(part, b"too late"), neglect, "the part that is unmapped");
            let _ = rig.faults();
        }
        Ok(())
    });
}

/// 64 pages across a multiple of a large page's size, as of an unaligned ring, are invalidated on both sides of it, however many commands
/// that takes.
pub fn a_run_across_a_large_border_ends_on_both_sides<K: Kind>() {
    on_each::<K>(|rig| {
        let (platform, granule) = (StdPlatform::new(), K::GRANULE);
        let space = rig.space(1, Policy::Strict)?;
        let mapper = space.domain.dma().space().mapper();
        let sizes = mapper.geometry().page_sizes;
        let large = (21..40).filter_map(PageSize::from_shift).find(|size| sizes.contains(*size));
        let border = 2 * large.ok_or("large pages")?.bytes();
        // Page 1 is the first of the run, and page 28 is the first behind the boundary.
        let memory = rig.memory(66 * granule).phys;
        let place = |page: u64| {
            (Iova::new(border + page * granule - 28 * granule), PhysAddr::new(memory.get() + page * granule))
        };
        let window = (Iova::new(border / 2), rig.memory(granule).phys);
        let map = |(at, phys): Window, len| -> Result<IovaRange> {
            let range = IovaRange::new(at, len)?;
            let list = [(phys, len)];
            // SAFETY: this process accesses QEMU's memory only by atomics.
            unsafe {
                mapper.map(&platform, range, list, Permissions::READ_WRITE.into(), &mut Gather::new())
            }?;
            Ok(range)
        };
        map(window, granule)?;
        [0, 65].into_iter().try_for_each(|beside| map(place(beside), granule).map(drop))?;
        rig.lead(0, &space)?;
        let reaches = |page: u64, bytes: &[u8; 8]| {
            rig.store(0, *bytes, window, place(page).0);
            rig.ram().read(place(page).1) == *bytes
        };
        let ends = [1, 2, 27, 28, 63, 64];
        for neglect in [false, true] {
            let run = map(place(1), 64 * granule)?;
            assert!((0..66).all(|page| reaches(page, b"as it is")));
            rig.assert_no_fault();
            let is_neglected = rig.kind.neglect(neglect) && neglect;
            let mut gather = Gather::new();
            assert_eq!(mapper.unmap(&platform, run, &mut gather).bytes, run.len());
            mapper.sync(&gather)?;
            let _ = rig.kind.neglect(false);
            // The second run shows that the first can fail.
            assert!(ends.iter().all(|page| reaches(*page, b"too late") == is_neglected));
            let _ = rig.faults();
            assert!([0, 65].iter().all(|page| reaches(*page, b"after...")), "what lies beside it");
            rig.assert_no_fault();
        }
        Ok(())
    });
}

pub fn a_list_is_one_piece_for_the_device<K: Kind>() {
    on_each::<K>(|rig| {
        let (_space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        let mut list: Vec<_> = (0..9).map(|_| rig.memory(K::GRANULE)).collect();
        // No piece is physically behind its predecessor.
        list.reverse();
        let mut view = [DmaSegment::default(); 9];
        // SAFETY: as in `Card::map`.
        let (mapping, pieces) = unsafe { card.queue.map_raw(&list, Direction::FromDevice, &mut view) }?;
        assert_eq!((pieces, view[0].len), (1, 9 * K::GRANULE));
        for (index, segment) in list.iter().enumerate() {
            let bytes = [index as u8 + 1; 8];
            rig.store(0, bytes, window, Iova::new(view[0].iova.get() + index as u64 * K::GRANULE + 24));
            assert_eq!(rig.ram().read(PhysAddr::new(segment.phys.get() + 24)), bytes);
        }
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        rig.assert_no_fault();
        Ok(())
    });
}

pub fn a_list_of_odd_pieces_is_reached_piece_by_piece<K: Kind>() {
    on_each::<K>(|rig| {
        let (_space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        let granule = K::GRANULE;
        let memory: Vec<_> = (0..3).map(|_| rig.memory(3 * granule)).collect();
        // Inside a page, across a boundary, and across two.
        let odd = [(2, 24, 40), (0, granule - 8, 16), (1, 8, 2 * granule)];
        let list = odd.map(|(of, offset, len): (usize, u64, u64)| PhysSegment {
            phys: PhysAddr::new(memory[of].phys.get() + offset),
            len,
        });
        let mut view = [DmaSegment::default(); 3];
        // SAFETY: as in `Card::map`.
        let (mapping, pieces) = unsafe { card.queue.map_raw(&list, Direction::FromDevice, &mut view) }?;
        assert_eq!((pieces, view.map(|piece| piece.len)), (3, list.map(|piece| piece.len)));
        let mut wanted: Vec<_> =
            memory.iter().map(|memory| rig.ram().read_all(memory.phys, memory.len)).collect();
        for ((piece, (of, offset, len)), byte) in view.iter().zip(odd).zip(1_u8..) {
            for at in [0, len - 8] {
                rig.store(0, [byte; 8], window, Iova::new(piece.iova.get() + at));
                wanted[of][(offset + at) as usize..][..8].fill(byte);
            }
        }
        rig.assert_no_fault();
        let all = || memory.iter().map(|memory| rig.ram().read_all(memory.phys, memory.len));
        assert!(all().eq(wanted.iter().cloned()), "the bytes of the list, and no others");
        assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        for piece in view {
            rig.store(0, [0x55; 8], window, Iova::new(piece.iova.get() + piece.len - 8));
        }
        assert!(all().eq(wanted), "nothing after it is unmapped");
        Ok(())
    });
}

pub fn devices_of_two_domains_do_not_reach_each_others_memory<K: Kind>() {
    on_each::<K>(|rig| {
        let spaces = [rig.space(1, Policy::Strict)?, rig.space(2, Policy::Strict)?];
        let mut cards =
            [rig.attach(0, &spaces[0], DmaMask::BITS_64)?, rig.attach(1, &spaces[1], DmaMask::BITS_64)?];
        let windows = [cards[0].window(rig)?, cards[1].window(rig)?];
        let pages = [rig.memory(4096), rig.memory(4096)];
        let (_, first) = cards[0].map(pages[0], Direction::FromDevice)?;
        let (_, second) = cards[1].map(pages[1], Direction::FromDevice)?;
        assert_eq!(first, second, "the same address in both, or this shows nothing");
        rig.store(0, *b"of first", windows[0], first);
        rig.store(1, *b"secondly", windows[1], second);
        assert_eq!(
            (&rig.ram().read(pages[0].phys), &rig.ram().read(pages[1].phys)),
            (b"of first", b"secondly")
        );
        rig.assert_no_fault();
        Ok(())
    });
}

pub fn a_device_moves_between_domains_and_leaves_nothing_behind<K: Kind>() {
    on_each::<K>(|rig| {
        let (old, new) = (rig.space(1, Policy::Strict)?, rig.space(2, Policy::Strict)?);
        let mut card = rig.attach(0, &old, DmaMask::BITS_64)?;
        let (window, page) = (card.window(rig)?, rig.memory(4096));
        let (_, iova) = card.map(page, Direction::Bidirectional)?;
        rig.store(0, *b"in first", window, iova);
        assert!(
            matches!(rig.attach(0, &new, DmaMask::BITS_64), Err(error) if error.to_string().contains("attached already"))
        );
        assert!(new.domain.detach(id(0)).is_err(), "it is none of its devices");
        old.domain.detach(id(0))?;
        rig.store(0, *b"nowhere.", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"in first", "detached");
        let access = K::UNATTACHED_WRITE.and(Some(Access::Read));
        rig.assert_fault_of(0, access, None, &[K::NOT_ATTACHED]);
        assert!(old.domain.detach(id(0)).is_err(), "it is detached already");
        assert!(rig.kind.detach(id(0)).is_err(), "and the unit knows");
        let mut card = rig.attach(0, &new, DmaMask::BITS_64)?;
        let window = card.window(rig)?;
        rig.store(0, *b"nowhere.", window, iova);
        assert_eq!(&rig.ram().read(page.phys), b"in first", "the old domain's address in the new one");
        let other = rig.memory(4096);
        let (_, iova) = card.map(other, Direction::FromDevice)?;
        rig.store(0, *b"in other", window, iova);
        assert_eq!(&rig.ram().read(other.phys), b"in other");
        Ok(())
    });
}

/// The device writes without a pause while it moves from one domain to the other: each byte reaches the memory of its current domain, or is
/// refused. After a detach has returned, no earlier write arrives.
pub fn a_device_that_moves_while_it_writes_reaches_one_domain_or_none<K: Kind>() {
    const LEN: u64 = 4096;
    on_each::<K>(|rig| {
        let spaces = [rig.space(1, Policy::Strict)?, rig.space(2, Policy::Strict)?];
        let mut cards = [spaces[0].card(0, DmaMask::BITS_64)?, spaces[1].card(0, DmaMask::BITS_64)?];
        let granule = K::GRANULE;
        // Two granules, between two that no domain maps.
        let memory = [rig.memory(4 * granule), rig.memory(4 * granule)];
        let mut places = Vec::new();
        for (card, memory) in cards.iter_mut().zip(&memory) {
            let phys = PhysAddr::new(memory.phys.get() + granule);
            places.push(card.map(PhysSegment { phys, len: 2 * granule }, Direction::Bidirectional)?.1);
        }
        assert_eq!(places[0], places[1], "the same address in both, or this shows little");
        let clear =
            || memory.iter().for_each(|memory| rig.ram().write(memory.phys, &vec![0; 4 * granule as usize]));
        // Across the boundary of the two.
        let to = Iova::new(places[0].get() + granule - LEN / 2);
        let landed: Vec<u8> = (0..4 * granule)
            .map(|at| if (2 * granule - LEN / 2..2 * granule + LEN / 2).contains(&at) { 0xa5 } else { 0 })
            .collect();
        let nothing = vec![0; landed.len()];

        rig.ram().write(PhysAddr::new(memory[0].phys.get() + granule), &vec![0xa5; LEN as usize]);
        rig.lead(0, &spaces[0])?;
        rig.devices[0].fetch(places[0], 0, LEN);
        spaces[0].domain.detach(id(0))?;
        clear();
        let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            // Even if an assertion fails.
            let _stop = OnDrop(|| stop.store(true, Ordering::Relaxed));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    rig.devices[0].store(0, to, LEN);
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
            let writes = |count: u64| {
                let (first, began) = (written.load(Ordering::Relaxed), Instant::now());
                while written.load(Ordering::Relaxed) < first + count {
                    assert!(began.elapsed() < Duration::from_secs(30), "the device has stopped");
                    std::thread::yield_now();
                }
            };
            let reached = || [0, 1].map(|of| rig.ram().read_all(memory[of].phys, 4 * granule));
            for round in 0..16 {
                let now = round % 2;
                rig.lead(0, &spaces[now])?;
                // One may have begun before.
                writes(2);
                let found = reached();
                assert!(found[now] == landed && found[1 - now] == nothing, "round {round}: attached");
                spaces[now].domain.detach(id(0))?;
                clear();
                writes(2);
                assert!(reached() == [nothing.clone(), nothing.clone()], "round {round}: detached");
            }
            Ok(())
        })
    });
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Nothing is unmapped here: a number's translations end with the attachment, and with the driver.
pub fn a_number_that_is_used_again_brings_nothing_back<K: Kind>() {
    on_each::<K>(|rig| {
        let old = rig.space(1, Policy::Strict)?;
        let mut card = rig.attach(0, &old, DmaMask::BITS_64)?;
        let (window, page) = (card.window(rig)?, rig.memory(4096));
        let (_, iova) = card.map(page, Direction::Bidirectional)?;
        rig.store(0, *b"in first", window, iova);
        assert!(
            matches!(rig.space(1, Policy::Strict), Err(error) if error.to_string().contains("is in use")),
            "one number is one domain"
        );
        // Its drop detaches its device.
        drop((old, card));

        let new = rig.space(1, Policy::Strict)?;
        let mut card = rig.attach(0, &new, DmaMask::BITS_64)?;
        let (window, other) = (card.window(rig)?, rig.memory(4096));
        rig.store(0, *b"nowhere.", window, iova);
        let (_, same) = card.map(other, Direction::Bidirectional)?;
        assert_eq!(same, iova, "the same address in both, or this shows nothing");
        rig.store(0, *b"in other", window, iova);
        assert_eq!((&rig.ram().read(page.phys), &rig.ram().read(other.phys)), (b"in first", b"in other"));

        let second = K::start(&rig.machine)?;
        second.enable()?;
        let next = second.domain(DomainId(1))?.build(StdPlatform::new())?;
        next.attach(id(0), DmaMask::BITS_64)?;
        rig.ram().write(other.phys, b"it stays");
        rig.devices[0].store(0, iova, 8);
        assert_eq!(&rig.ram().read(other.phys), b"it stays", "the next driver's domain has the number");
        // The first driver no longer has the unit.
        std::mem::forget(new);
        Ok(())
    });
}

pub fn a_trusted_device_passes_through<K: Kind>() {
    on_each::<K>(|rig| {
        let page = rig.memory(4096);
        let to = Iova::new(page.phys.get());
        rig.kind.pass_through(id(0))?;
        rig.store(
            0,
            *b"directly",
            (Iova::new(page.phys.get() + 64), PhysAddr::new(page.phys.get() + 64)),
            to,
        );
        assert_eq!(&rig.ram().read(page.phys), b"directly");
        rig.kind.detach(id(0))?;
        rig.devices[0].store(8, to, 8);
        assert_eq!(&rig.ram().read(page.phys), b"directly");
        Ok(())
    });
}

pub fn addresses_stay_within_what_a_device_can_say<K: Kind>() {
    let mask = DmaMask::bits(28);
    on_each_of::<K>(
        |unit| Rig::started(unit, mask),
        |rig| {
            rig.kind.enable()?;
            let space = rig.space(1, Policy::Strict)?;
            let mut card = rig.attach(0, &space, mask)?;
            let window = card.window(rig)?;
            for round in 0..200_u8 {
                let memory = rig.memory(8192);
                let (_, iova) = card.map(memory, Direction::FromDevice)?;
                assert!(iova.get() + 8192 <= 1 << 28);
                rig.store(0, [round; 8], window, Iova::new(iova.get() + 8184));
                assert_eq!(rig.ram().read(PhysAddr::new(memory.phys.get() + 8184)), [round; 8]);
            }
            rig.assert_no_fault();
            Ok(())
        },
    );
}

/// A 64-bit device gets the highest addresses of its domain: the unit translates the first and the last byte of all mappings, of rings, and
/// of persistent mappings, however few bits of its tables it uses.
pub fn the_highest_addresses_of_a_64_bit_device_are_translated<K: Kind>() {
    on_each::<K>(|rig| {
        let (space, granule) = (rig.space(1, Policy::Strict)?, K::GRANULE);
        let device = space.domain.attach(id(0), DmaMask::BITS_64)?;
        let window = Card::<K> { queue: device.queue(QueueConfig::direct())? }.window(rig)?;
        let reaches = |iova: Iova, phys: PhysAddr, len: u64, byte: u8| {
            for offset in [0, len - 8] {
                rig.store(0, [byte; 8], window, Iova::new(iova.get() + offset));
                let landed = rig.ram().read(PhysAddr::new(phys.get() + offset));
                assert_eq!(landed, [byte; 8], "{iova:?} and {offset:#x}: {:?}", rig.faults());
            }
        };
        for config in
            [QueueConfig::direct(), QueueConfig::batched(4), QueueConfig::ring(64, 2 * granule).batch(4)]
        {
            let (mut card, mut held) = (Card::<K> { queue: device.queue(config)? }, Vec::new());
            for round in 1..24 {
                let memory = rig.memory(2 * granule);
                let (mapping, iova) = card.map(memory, Direction::FromDevice)?;
                reaches(iova, memory.phys, memory.len, round);
                held.push(mapping);
            }
            for mapping in held {
                let _ = card.unmap(mapping)?;
            }
            card.queue.commit_raw()?;
        }
        let ring = CoherentMemory::new(device.dma(), rig.ram().clone(), 64 << 10)?;
        reaches(ring.iova(), ring.phys(), 64 << 10, 0x77);
        rig.assert_no_fault();
        Ok(())
    });
}

/// Regions that firmware reserves for a device are mapped when the unit is on. All other 32-bit addresses are allocated, except those that
/// the unit, or a device behind it, reserves.
pub fn what_firmware_reserves_is_mapped_one_to_one_and_never_handed_out<K: Kind>() {
    on_each_of::<K>(
        |unit| Rig::started(unit, DmaMask::BITS_64),
        |rig| {
            let granule = K::GRANULE;
            let memory = rig.memory(4 * granule);
            let at = |offset: u64| {
                (Iova::new(memory.phys.get() + offset), PhysAddr::new(memory.phys.get() + offset))
            };
            // Only a part of its second page with a larger granule.
            let range = IovaRange::new(at(granule).0, granule + 4096)?;
            let region = K::firmware(id(0), range)?;
            assert_eq!((region.range, region.permissions), (range, Permissions::READ_WRITE));
            let builder = rig.kind.domain(DomainId(1))?;
            // SAFETY: this process accesses QEMU's memory only by atomics.
            let builder = unsafe { builder.regions([region]) };
            let space = Space { domain: builder.build(StdPlatform::new())? };
            rig.lead(0, &space)?;
            rig.kind.enable()?;
            let works = |round: u8| {
                for offset in [granule + 8, 3 * granule - 8] {
                    rig.store(0, [round; 8], at(granule), at(offset).0);
                    assert_eq!(rig.ram().read(at(offset).1), [round; 8], "{round}: {offset:#x}");
                }
                rig.assert_no_fault();
                for offset in [granule - 8, 3 * granule] {
                    rig.store(0, [0x55; 8], at(granule), at(offset).0);
                    assert_eq!(rig.ram().read(at(offset).1), [0; 8], "{round}: beside it");
                }
                let _ = rig.faults();
            };
            works(1);
            // The other device's domain has no such region.
            let other = rig.space(2, Policy::Strict)?;
            let mut card = rig.attach(1, &other, DmaMask::BITS_64)?;
            let window = card.window(rig)?;
            let before = rig.ram().read::<8>(at(granule).1);
            rig.store(1, [0x55; 8], window, at(granule).0);
            assert_eq!(rig.ram().read(at(granule).1), before);
            let _ = rig.faults();

            let page = |address: u64| address / granule * granule;
            let mut kept: Vec<_> = rig.kind.reserved()?.iter().chain([&range]).copied().collect();
            kept.retain(|range| range.start().get() < 1 << 32);
            // Both devices report their own.
            kept.sort_by_key(|range| range.start());
            kept.dedup();
            let mut card = space.card(0, DmaMask::BITS_32)?;
            let (target, mut handed_out) = (rig.memory(16 << 20), 0);
            // Where a PC has them, whatever the driver says.
            let interrupts = 0xfee0_0000_u64;
            for len in [16 << 20, 1 << 20, 1 << 16, granule] {
                while let Ok((_, iova)) = card.map(PhysSegment { len, ..target }, Direction::Bidirectional) {
                    handed_out += len;
                    for offset in [Some(0), interrupts.checked_sub(iova.get()), Some(len - 8)] {
                        let Some(offset) = offset.filter(|offset| *offset < len) else { continue };
                        let bytes = (iova.get() + offset).to_le_bytes();
                        rig.store(0, bytes, at(granule), Iova::new(iova.get() + offset));
                        let landed = rig.ram().read(PhysAddr::new(target.phys.get() + offset));
                        assert_eq!(bytes, landed, "{iova:?} is memory for the device");
                    }
                    for range in &kept {
                        let apart = iova.get() + len <= page(range.start().get())
                            || iova.get() > page(range.last().get()) + granule - 1;
                        assert!(apart, "{iova:?} of {len:#x} bytes was handed out, and {range} is kept");
                    }
                }
            }
            // The first page is never allocated.
            let kept =
                kept.iter().map(|range| page(range.last().get()) + granule - page(range.start().get()));
            assert_eq!(handed_out + kept.sum::<u64>() + granule, 1 << 32, "all the rest was handed out");
            works(2);
            Ok(())
        },
    );
}

pub fn the_invalidation_queue_wraps_and_many_cpus_share_it<K: Kind>() {
    on_each::<K>(|rig| {
        let kind = &rig.kind;
        if !kind.neglect(false) {
            not_covered::<K>("invalidations that many CPUs submit", "this IOMMU has none");
            return Ok(());
        }
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..=4_u16)
                .map(|number| {
                    scope.spawn(move || {
                        let page = |at: u64| Invalidation::Range {
                            range: IovaRange::new(Iova::new(at << 12), 4096).expect("a page"),
                            leaf_only: true,
                        };
                        let requests: Vec<_> = (0..u64::from(number) * 40)
                            .map(|at| Request { domain: DomainId(number), invalidation: page(at) })
                            .collect();
                        (0..20).try_for_each(|_| kind.submit(&requests))
                    })
                })
                .collect();
            for worker in workers {
                worker.join().expect("no panic")?;
            }
            Ok(())
        })
    });
}

pub fn a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out<K: Kind>() {
    on_each::<K>(|rig| {
        let all = || rig.kind.submit(&[Request { domain: DomainId(1), invalidation: Invalidation::Domain }]);
        (0..300).try_for_each(|_| all())?;
        if K::confuse(&rig.machine) {
            let error = all().expect_err("the unit has stopped").to_string();
            assert!(error.contains("reported an error"), "{error}");
        } else {
            not_covered::<K>(
                "a command that the unit does not know",
                "the model has none, or none from outside",
            );
        }
        all()
    });
}

/// Thousands of maps, writes and unmaps of random sizes, with tables reclaimed now and then: each write reaches its page, and in the end
/// all memory has exactly these writes. Tables are freed.
pub fn thousands_of_mappings_land_where_they_should<K: Kind>() {
    on_each::<K>(|rig| {
        let (space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
        let empty = K::table_bytes(space.domain.dma().space().mapper()).unwrap_or(0);
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let memory = rig.memory(32 << 20);
        let mut shadow = vec![0; 32 << 20];
        let mut live: Vec<(RawMapping, Iova, PhysSegment)> = Vec::new();
        let mut gone: Vec<(Iova, PhysAddr)> = Vec::new();
        for step in 0..1500_u64 {
            if live.len() < 24 && next(3) > 0 {
                let pages = 1 << next(8);
                let first = next((32 << 8) - pages);
                let segment =
                    PhysSegment { phys: PhysAddr::new(memory.phys.get() + first * 4096), len: pages * 4096 };
                let (mapping, iova) = card.map(segment, Direction::Bidirectional)?;
                live.push((mapping, iova, segment));
            } else if let Some(index) = (!live.is_empty()).then(|| next(live.len() as u64) as usize) {
                let (mapping, iova, segment) = live.swap_remove(index);
                assert_eq!(card.unmap(mapping)?, Ended::Done(()));
                gone.push((iova, segment.phys));
            }
            if step % 3 == 0
                && let Some((_, iova, segment)) = live.last()
            {
                let offset = next(segment.len / 8) * 8;
                let bytes = (step << 8 | 0xff).to_le_bytes();
                rig.store(0, bytes, window, Iova::new(iova.get() + offset));
                let at = segment.phys.get() + offset;
                assert_eq!(rig.ram().read(PhysAddr::new(at)), bytes, "step {step}");
                shadow[(at - memory.phys.get()) as usize..][..8].copy_from_slice(&bytes);
            }
            if step % 7 == 0
                && let Some((iova, phys)) = gone.pop()
            {
                // The unit opens whole granules.
                let granule = |address: u64| address / K::GRANULE;
                let reached = |(_, from, segment): &(RawMapping, Iova, PhysSegment)| {
                    (granule(from.get())..=granule(from.get() + segment.len - 1))
                        .contains(&granule(iova.get()))
                };
                if !live.iter().any(reached) {
                    let before = rig.ram().read::<8>(phys);
                    rig.store(0, [0x55; 8], window, iova);
                    assert_eq!(rig.ram().read(phys), before, "step {step}: {iova:?} is unmapped");
                }
            }
            if step % 100 == 0 {
                space.domain.dma().space().reclaim()?;
            }
        }
        for (mapping, ..) in live {
            assert_eq!(card.unmap(mapping)?, Ended::Done(()));
        }
        space.domain.dma().space().reclaim()?;
        let tables = K::table_bytes(space.domain.dma().space().mapper());
        assert!(tables.is_none_or(|tables| tables <= empty), "{tables:?} bytes of tables, {empty} at first");
        let found = rig.ram().read_all(memory.phys, memory.len);
        let differs = || found.iter().zip(&shadow).position(|(found, wanted)| found != wanted);
        // Compared as a whole first, because this is compiled without optimisation.
        assert!(found == shadow, "a write that nothing asked for: {:?}", differs());
        Ok(())
    });
}

pub fn a_unit_that_was_left_on_is_taken_over_and_shut_down<K: Kind>() {
    for unit in K::UNITS {
        take_over::<K>(unit).unwrap_or_else(|error| panic!("{unit}: {error}"));
    }
}

fn take_over<K: Kind>(unit: &str) -> Result<()> {
    let rig = Rig::<K>::new(unit)?;
    let (space, mut card, window) = rig.card(0, 1, Policy::Strict)?;
    let page = rig.memory(4096);
    let (_, iova) = card.map(page, Direction::Bidirectional)?;
    rig.store(0, *b"of first", window, iova);
    // As after kexec: the previous kernel never detaches.
    std::mem::forget(space);
    let taken = rig.ram().taken();
    let second = K::start(&rig.machine)?;
    rig.store(0, *b"meantime", window, iova);
    if K::KEEPS_UNTIL_ENABLED {
        assert_eq!(&rig.ram().read(page.phys), b"meantime", "until it is enabled, nothing changes");
    }
    let before = rig.ram().read::<8>(page.phys);
    let _ = second.faults();
    second.enable()?;
    rig.store(0, *b"too late", window, iova);
    assert_eq!(rig.ram().read::<8>(page.phys), before, "the first one's tables are forgotten");
    let fault = second.faults().first().copied();
    assert!(K::RECORDS.is_err() || fault.is_some_and(|fault| fault.device == id(0)), "{fault:?}");
    second.shut_down()?;
    assert_eq!(rig.ram().taken(), taken, "its memory is given back");
    rig.devices[0].store(0, Iova::new(page.phys.get()), 8);
    assert_ne!(rig.ram().read::<8>(page.phys), before, "the unit is off: devices reach memory");
    Ok(())
}

pub fn where_no_unit_is_there_is_an_error<K: Kind>() {
    let Some(machine) = K::machine_without() else {
        not_covered::<K>("a machine without a unit", "the software IOMMU is always there");
        return;
    };
    assert!(K::start(&machine.expect("a machine")).is_err());
}
