//! Drivers' commands for random ranges against the software IOMMU's. The test decodes the commands in the rings by the manuals,
//! independently of the drivers.
//!
//! Each command covers pages (first address, and bytes); all of a domain or device is every address.

use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationQueue, Request};
use portcullis::pgtable::Format;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Iommu, amdvi, riscv, smmuv3, vtd};
use portcullis_model::{Descriptor, IommuConfig, Memory};

use super::{Behind, CPU, DEVICE, MEMORY, host, lead_device};

const DOMAIN: DomainId = DomainId(7);

/// Every address.
const ALL: (u64, u128) = (0, 1 << 64);

/// First address, and bytes.
type Named = (u64, u128);

/// A unit's ring: its base, the bytes of a command in its tail, and the decoder of its commands.
struct Ring<K> {
    base: fn(&Software<K, Arc<Memory>>) -> u64,
    tail: fn(&Software<K, Arc<Memory>>) -> u32,
    /// The addresses that a command invalidates: `None` for another command.
    named: fn([u64; 2]) -> Option<Named>,
}

struct Rig<U, K> {
    unit: U,
    of: fn(&U) -> &Behind<K>,
    ring: Ring<K>,
    memory: Arc<Memory>,
}

impl<U, K: Kind> Rig<U, K> {
    /// `change` alters the unit's capabilities.
    fn new<X: Format + Copy>(
        change: impl Fn(&Software<K, Arc<Memory>>),
        start: impl Fn(Behind<K>) -> U,
        of: fn(&U) -> &Behind<K>,
        ring: Ring<K>,
    ) -> Self
    where
        U: Iommu<X>,
    {
        let with = |unit| {
            change(&unit);
            unit
        };
        Self::with(with, start, of, ring)
    }

    /// `change` alters the unit.
    fn with<X: Format + Copy>(
        change: impl Fn(Software<K, Arc<Memory>>) -> Software<K, Arc<Memory>>,
        start: impl Fn(Behind<K>) -> U,
        of: fn(&U) -> &Behind<K>,
        ring: Ring<K>,
    ) -> Self
    where
        U: Iommu<X>,
    {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
        let mut host = host(&memory);
        host.unit = change(host.unit);
        let unit = start(host);
        unit.enable().unwrap();
        lead_device(&unit);
        Self { unit, of, ring, memory }
    }

    /// The addresses that the unit's commands cover for `invalidation`.
    fn received(&self, invalidation: Invalidation) -> Vec<Named>
    where
        U: InvalidationQueue,
    {
        let unit = &(self.of)(&self.unit).unit;
        let (base, before) = ((self.ring.base)(unit), (self.ring.tail)(unit));
        self.unit.invalidate(DOMAIN, invalidation).unwrap();
        let after = (self.ring.tail)(unit);
        let count = after.wrapping_sub(before) % 256;
        let word = |index: u32, word: u64| {
            let at = base + u64::from((before + index) % 256) * 16 + word * 8;
            self.memory.read_u64(PhysAddr::new(at)).unwrap()
        };
        (0..count).filter_map(|index| (self.ring.named)([word(index, 0), word(index, 1)])).collect()
    }
}

/// A size encoded in the address, as in PCIe's Invalidate Request: the lowest bit from 12 on that is 0 has the weight of half the size.
fn sized(address: u64, says_size: bool) -> Named {
    if !says_size {
        return (address & !0xfff, 4096);
    }
    let size = 2_u128 << (12 + (!(address >> 12)).trailing_zeros());
    ((u128::from(address & !0xfff) & !(size - 1)) as u64, size)
}

fn vtd_named([low, high]: [u64; 2]) -> Option<Named> {
    match (low & 0xf, low >> 4 & 3) {
        // IOTLB Invalidate, page-selective: AM. (Section 6.5.2.3)
        (2, 3) => Some((high & !0xfff, 4096 << (high & 0x3f))),
        (2, _) => Some(ALL),
        // Device-TLB Invalidate: S. (6.5.2.5)
        (3, _) => Some(sized(high, high & 1 != 0)),
        _ => None,
    }
}

fn amd_named([first, second]: [u64; 2]) -> Option<Named> {
    // INVALIDATE_IOMMU_PAGES, INVALIDATE_IOTLB_PAGES: S. (2.4.3, 2.4.4)
    matches!(first >> 60, 3 | 4).then(|| sized(second, second & 1 != 0))
}

fn riscv_named([first, second]: [u64; 2]) -> Option<Named> {
    match first & 0x7f {
        // IOTINVAL: AV (bit 10), and S (bit 73) of section 9.3.
        1 if first >> 10 & 1 == 0 => Some(ALL),
        1 => Some(sized(second >> 10 << 12, second >> 9 & 1 != 0)),
        // ATS.INVAL.
        4 => Some(sized(second, second >> 11 & 1 != 0)),
        _ => None,
    }
}

fn smmu_named([first, second]: [u64; 2]) -> Option<Named> {
    match first & 0xff {
        // TLBI_NH_VA, TLBI_S2_IPA: NUM, SCALE and TG, or the page that holds an address. (4.4.1.1)
        0x12 | 0x2a => {
            let (num, scale) = (first >> 12 & 0x1f, first >> 20 & 0x1f);
            let bytes = match second >> 10 & 3 {
                0 => 4096,
                tg => (u128::from(num) + 1) << scale << (10 + 2 * tg),
            };
            Some((second & !0xfff, bytes))
        }
        0x11 | 0x28 => Some(ALL),
        _ => None,
    }
}

/// The address bits of a base register or a command.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

fn vtd(mamv: u32) -> Rig<vtd::Unit<Behind<VtD>>, VtD> {
    let ring =
        Ring { base: |unit| unit.get64(0x90) & ADDRESS, tail: |unit| unit.get(0x88) >> 4, named: vtd_named };
    let change = |unit: &Software<VtD, _>| {
        // CAP.MAMV; ECAP.DT.
        unit.set(0x0c, unit.get(0x0c) & !(0x3f << 16) | mamv << 16);
        unit.set(0x10, unit.get(0x10) | 1 << 2);
    };
    Rig::new(change, |host| vtd::Unit::start(host).unwrap(), vtd::Unit::host, ring)
}

fn amdvi() -> Rig<amdvi::Unit<Behind<AmdVi>>, AmdVi> {
    let ring = Ring {
        base: |unit| unit.get64(0x08) & ADDRESS,
        tail: |unit| unit.get(0x2008) >> 4,
        named: amd_named,
    };
    let config = amdvi::Config { last_device: 0xff, capability: None };
    Rig::new(|_| (), |host| amdvi::Unit::start(host, config).unwrap(), amdvi::Unit::host, ring)
}

fn riscv(has_ranges: bool) -> Rig<riscv::Unit<Behind<RiscV>>, RiscV> {
    let ring =
        Ring { base: |unit| (unit.get64(0x18) >> 10) << 12, tail: |unit| unit.get(0x24), named: riscv_named };
    let change = |unit: &Software<RiscV, _>| {
        // ATS; S.
        unit.set(0, unit.get(0) | 1 << 25);
        unit.set(4, unit.get(4) | u32::from(has_ranges) << 11);
    };
    Rig::new(change, |host| riscv::Unit::start(host).unwrap(), riscv::Unit::host, ring)
}

fn smmuv3<const GRANULE: u32>(has_ranges: bool) -> Rig<smmuv3::Unit<Behind<SmmuV3>, GRANULE>, SmmuV3> {
    let ring = Ring {
        base: |unit| unit.get64(0x90) & ADDRESS,
        tail: |unit| unit.get(0x98) & 0xff,
        named: smmu_named,
    };
    // IDR3.RIL.
    let change = |unit: &Software<SmmuV3, _>| unit.set(0x0c, u32::from(has_ranges) << 10);
    Rig::new(change, |host| smmuv3::Unit::start(host).unwrap(), smmuv3::Unit::host, ring)
}

/// The same, on the queue of the calling CPU, which is the second.
fn smmuv3_own(has_ranges: bool) -> Rig<smmuv3::Unit<Behind<SmmuV3>, 12>, SmmuV3> {
    const QUEUE: usize = 0x2_4000;
    let ring = Ring {
        base: |unit| unit.get64(QUEUE) & ADDRESS,
        tail: |unit| unit.get(QUEUE + 8) & 0xff,
        named: smmu_named,
    };
    CPU.set(Some(1));
    let change = |unit: Software<SmmuV3, _>| {
        unit.set(0x0c, u32::from(has_ranges) << 10);
        unit.with_own_queues(0, 2)
    };
    Rig::with(change, |host| smmuv3::Unit::start(host).unwrap(), smmuv3::Unit::host, ring)
}

/// Ranges of up to some thousand pages, most of them across a multiple of a large power of two.
fn ranges() -> impl Iterator<Item = IovaRange> {
    let mut dice = 1_u64;
    let mut below = move |bound: u64| {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        (dice >> 32) % bound
    };
    let across = |page: u64, len: u64| IovaRange::new(Iova::new(page << 12), len << 12).unwrap();
    // 64 pages of a ring of colour 1 across 2 MiB, and ranges without a boundary.
    let known = [across(453, 64), across(448, 64), across(512, 512), across(1 << 18, 1 << 18), across(7, 1)];
    let random = (0..1500).map(move |_| {
        let most = [1, 4, 64, 70, 600, 3000][below(6) as usize];
        let (len, border) = ((1 + below(most)) << 12, (1 + below(500)) << (12 + below(14)));
        let start = (border + 4096 * below(3)).saturating_sub(below(len + 4096));
        // Also ranges that begin or end inside a page.
        let mut odd = |bound| if below(2) == 0 { 0 } else { bound & 0xff0 };
        IovaRange::new(Iova::new(start & !0xfff | odd(start)), len).unwrap()
    });
    known.into_iter().chain(random)
}

/// Checks that `received` covers each page of `asked`, of 2^`granule` bytes, in order and without a gap. Returns n, the pages asked for,
/// and the surplus pages.
fn assert_holds(received: &[Named], asked: IovaRange, granule: u32) -> (u128, u128) {
    let first = asked.start().get() >> granule << granule;
    let end = u128::from((asked.last().get() >> granule) + 1) << granule;
    let mut at = u128::from(first);
    for &(start, bytes) in received {
        assert!(u128::from(start) <= at, "{asked:?}: {received:x?}");
        at = u128::from(start) + bytes;
    }
    assert!(at >= end, "{asked:?}: {received:x?}");
    let pages = (end - u128::from(first)) >> granule;
    let held: u128 = received.iter().map(|(_, bytes)| bytes >> granule).sum();
    (pages, held - pages)
}

/// The software IOMMU's blocks, with the largest mask `max_mask`.
fn of_model(max_mask: u32, invalidation: Invalidation) -> Vec<Named> {
    let memory = Memory::new(1 << 20);
    let config = IommuConfig { max_address_mask: max_mask, ..IommuConfig::new(memory) };
    let queue = portcullis_model::Iommu::new(config).queue();
    let named = |descriptor| match descriptor {
        Descriptor::PageSelective { address, address_mask, .. } => (address.get(), 4096_u128 << address_mask),
        Descriptor::DeviceTlb { range: Some(range), .. } => (range.start().get(), range.len().into()),
        _ => ALL,
    };
    queue.descriptors(&Request { domain: DOMAIN, invalidation }).map(named).collect()
}

/// A unit that supports blocks gets the software IOMMU's one or two blocks.
fn as_the_model<U: InvalidationQueue, K: Kind>(rig: &Rig<U, K>, max_mask: u32) {
    for range in ranges() {
        let invalidation = Invalidation::Range { range, leaf_only: true };
        let received = rig.received(invalidation);
        assert_eq!(received, of_model(max_mask, invalidation), "{range:?} of {max_mask}");
        let (pages, besides) = assert_holds(&received, range, 12);
        if received != [ALL] {
            assert!(received.len() <= 2 && besides < 3 * pages, "{range:?}: {received:x?}");
        }
    }
}

/// A device TLB takes blocks of any size, whatever the unit supports.
fn devices_as_the_model<U: InvalidationQueue, K: Kind>(rig: &Rig<U, K>) {
    for range in ranges().map(Some).chain([None]) {
        let invalidation = Invalidation::DeviceTlb { device: DeviceId(DEVICE.0), range };
        let received = rig.received(invalidation);
        assert_eq!(received, of_model(9, invalidation), "{range:?}");
        let Some(range) = range else {
            assert_eq!(received, [ALL]);
            continue;
        };
        let (pages, besides) = assert_holds(&received, range, 12);
        assert!(received.len() <= 2 && besides < 3 * pages, "{range:?}: {received:x?}");
    }
}

#[test]
fn vtd_writes_the_blocks_of_the_model() {
    let invalidation = |page: u64, pages: u64| {
        let range = IovaRange::new(Iova::new(page << 12), pages << 12).unwrap();
        Invalidation::Range { range, leaf_only: true }
    };
    for mamv in [0, 5, 9, 18, 36] {
        as_the_model(&vtd(mamv), mamv);
    }
    // 64 pages across 2 MiB do not become the domain, and aligned 2 MiB may become a page.
    assert_eq!(vtd(9).received(invalidation(453, 64)), [(448 << 12, 64 << 12), (512 << 12, 8 << 12)]);
    assert_eq!(vtd(8).received(invalidation(512, 512)), [ALL]);
    devices_as_the_model(&vtd(9));
}

#[test]
fn amdvi_writes_the_blocks_of_the_model() {
    as_the_model(&amdvi(), 52);
    devices_as_the_model(&amdvi());
}

#[test]
fn riscv_writes_the_blocks_of_the_model_or_its_pages() {
    as_the_model(&riscv(true), 52);
    devices_as_the_model(&riscv(true));
    pages_or_all(&riscv(false), 12);
}

#[test]
fn smmuv3_writes_a_run_or_its_pages() {
    pages_or_all(&smmuv3::<12>(false), 12);
    pages_or_all(&smmuv3::<16>(false), 16);
    runs(&smmuv3::<12>(true), 12);
    runs(&smmuv3::<16>(true), 16);
    pages_or_all(&smmuv3_own(false), 12);
    runs(&smmuv3_own(true), 12);
    CPU.set(None);
}

/// Each page once, and nothing else; more than 64 become the domain.
fn pages_or_all<U: InvalidationQueue, K: Kind>(rig: &Rig<U, K>, granule: u32) {
    for range in ranges() {
        let received = rig.received(Invalidation::Range { range, leaf_only: true });
        let pages =
            (range.start().get() >> granule..=range.last().get() >> granule).map(|page| page << granule);
        let pages: Vec<Named> = pages.map(|page| (page, 4096)).collect();
        assert_eq!(received, if pages.len() > 64 { vec![ALL] } else { pages }, "{range:?}");
    }
}

/// One command, with a surplus of at most a sixteenth.
fn runs<U: InvalidationQueue, K: Kind>(rig: &Rig<U, K>, granule: u32) {
    for range in ranges() {
        let received = rig.received(Invalidation::Range { range, leaf_only: true });
        let first = range.start().get() >> granule;
        assert_eq!(received.len(), 1, "{range:?}: {received:x?}");
        if first == range.last().get() >> granule {
            assert_eq!(received, [(first << granule, 4096)], "{range:?}");
            continue;
        }
        let (pages, besides) = assert_holds(&received, range, granule);
        assert!(besides <= pages / 16, "{range:?}: {received:x?}");
    }
}
