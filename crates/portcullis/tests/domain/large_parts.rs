//! Parts of large pages, whose translation the hardware holds as one: it forgets them only when it is told to forget all of
//! the page, whoever has split it, and whether or not that has been confirmed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{Domain, Policy, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::{InvalidationError, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{AmdV1, Arm, Format, PageTable, Riscv, VtdSecondStage, X86FirstStage};
use portcullis::platform::Platform;
use portcullis_model::{ArmTables, Context, Granule, Iommu, IommuConfig, Memory, Queue, TableFormat};

use crate::played::Played;
use crate::rig::{ANYWHERE, Clocked, DEVICE, Hooked, LAZY_FOREVER, PAGE};

/// Pages of one entry, in all formats.
const LARGE: u64 = 2 << 20;
const HUGE: u64 = 1 << 30;
const BOTH: Permissions = Permissions::READ_WRITE;
const BROKEN: InvalidationError = InvalidationError::Rejected { code: 9 };
/// Where the memory is: a multiple of the largest page.
const PHYS: u64 = 4 << 30;
/// Translations in the device's own TLB, where it has one.
const TLB: usize = 64;

type Tables<X> = TableMapper<Arc<Memory>, Arc<dyn InvalidationQueue>, X>;

struct Machine<X: Format> {
    iommu: Arc<Iommu>,
    queue: Arc<Hooked<Queue>>,
    platform: Arc<Clocked>,
    domain: Shared<Domain<Tables<X>, Played>>,
    /// The page.
    range: IovaRange,
}

impl<X: Format> Machine<X> {
    /// With a page of `bytes`, which the device has used.
    fn new(format: X, tables: TableFormat, bytes: u64, device_tlb: bool) -> Self {
        let memory = Memory::new(16 << 20);
        let iommu =
            Iommu::new(IommuConfig { iotlb_entries: 1 << 12, ..IommuConfig::new(Arc::clone(&memory)) });
        let (queue, platform) = (Arc::new(Hooked::new(iommu.queue())), Clocked::new(2));
        let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
        let context = Context::Translated { domain: DomainId(1), root: table.root(), format: tables };
        let mapper = TableMapper::new(table, Arc::clone(&queue) as _, DomainId(1), Vec::new());
        if device_tlb {
            mapper.add_device_tlb(DEVICE).unwrap();
            iommu.attach_with_tlb(DEVICE, context, TLB);
        } else {
            iommu.attach(DEVICE, context);
        }
        let domain = Domain::new(Played::new(Arc::clone(&platform)), mapper, Policy::Strict).unwrap();
        let list = [PhysSegment { phys: PhysAddr::new(PHYS), len: bytes }];
        // SAFETY: the memory is the device's alone.
        let range = unsafe { domain.map(&list, BOTH, ANYWHERE) }.unwrap();
        assert_eq!(range.start().get() % bytes, 0);
        let machine = Self { iommu, queue, platform, domain, range };
        assert!(machine.reaches(machine.part(bytes - PAGE, PAGE)));
        machine
    }

    fn part(&self, offset: u64, len: u64) -> IovaRange {
        IovaRange::new(self.range.start().checked_add(offset).unwrap(), len).unwrap()
    }

    /// Whether the device gets anywhere in the range, tried at its first page, its last, and one in the middle.
    fn reaches(&self, range: IovaRange) -> bool {
        let middle = Iova::new((range.start().get() + range.len() / 2) & !(PAGE - 1));
        let try_one = |at| self.iommu.access(DEVICE, at, 1, Permissions::WRITE).is_ok();
        [range.start(), middle, range.last()].map(try_one) != [false; 3]
    }

    /// Calls `hook` when the next submission is about to be carried out.
    fn before_next(self: &Arc<Self>, hook: impl Fn(&Self) + Send + Sync + 'static) {
        let (machine, done) = (Arc::downgrade(self), AtomicBool::new(false));
        self.queue.set(move || {
            if !done.swap(true, Ordering::Relaxed) {
                hook(&machine.upgrade().unwrap());
            }
        });
    }
}

/// What is done with a fresh page of so many bytes.
trait Try {
    fn try_it<X: Format>(&self, machine: Arc<Machine<X>>, bytes: u64);
}

/// In every format, with every size of page but the smallest, with and without a TLB in the device.
fn everywhere(what: &impl Try) {
    fn with<X: Format>(format: X, tables: TableFormat, sizes: &[u64], what: &impl Try) {
        for (bytes, device_tlb) in sizes.iter().flat_map(|bytes| [(*bytes, false), (*bytes, true)]) {
            what.try_it(Arc::new(Machine::new(format, tables, bytes, device_tlb)), bytes);
        }
    }
    const SIZES: &[u64] = &[LARGE, HUGE];
    with(VtdSecondStage::new(4, 3, 48).unwrap(), TableFormat::VtdSecondStage { levels: 4 }, SIZES, what);
    with(X86FirstStage::new(4, 3, 48).unwrap(), TableFormat::X86FirstStage { levels: 4 }, SIZES, what);
    let sizes = &[8 << 10, 64 << 10, 1 << 20, 2 << 20, 4 << 20, 512 << 20, 1 << 30];
    with(AmdV1::new(4, 3, 48).unwrap(), TableFormat::AmdV1 { levels: 4 }, sizes, what);
    let mode = portcullis_model::RiscvMode::Sv48;
    let riscv = Riscv::sv48().within(3, 48).unwrap();
    with(riscv, TableFormat::RiscV(mode), SIZES, what);
    let tables = TableFormat::Arm(ArmTables::stage2(Granule::Size4K, 48, 4));
    let arm = Arm::<12>::stage_2(48, 48).unwrap();
    with(arm, tables, &[64 << 10, 2 << 20, 32 << 20, 1 << 30], what);
}

/// Parts: where they begin, and how long they are, of a page of `bytes`.
fn parts(bytes: u64) -> [(u64, u64); 5] {
    [(0, PAGE), (bytes / 2, PAGE), (bytes - PAGE, PAGE), (PAGE, bytes - PAGE), (bytes / 2, bytes / 2)]
}

struct OnePart(fn(u64) -> (u64, u64));

impl Try for OnePart {
    fn try_it<X: Format>(&self, machine: Arc<Machine<X>>, bytes: u64) {
        let (offset, len) = (self.0)(bytes);
        let part = machine.part(offset, len);
        machine.domain.unmap_strictly(part).unwrap();
        assert!(!machine.reaches(part), "{offset:#x} of {bytes:#x}");
        // What is left is as it was, and goes as well.
        let before = offset.checked_sub(PAGE).map(|before| machine.part(before, PAGE));
        let after = (offset + len < bytes).then(|| machine.part(offset + len, PAGE));
        for rest in [before, after].into_iter().flatten() {
            assert!(machine.reaches(rest), "{bytes:#x}");
            machine.domain.unmap_strictly(rest).unwrap();
            assert!(!machine.reaches(rest) && !machine.reaches(part), "{bytes:#x}");
        }
    }
}

#[test]
fn a_part_that_is_unmapped_strictly_is_out_of_reach() {
    for number in 0..5 {
        let part: fn(u64) -> (u64, u64) = [
            |bytes| parts(bytes)[0],
            |bytes| parts(bytes)[1],
            |bytes| parts(bytes)[2],
            |bytes| parts(bytes)[3],
            |bytes| parts(bytes)[4],
        ][number];
        everywhere(&OnePart(part));
    }
}

/// While the first CPU waits for the hardware, which has not begun with it, another unmaps a neighbouring part of the page.
struct AnotherCpu;

impl Try for AnotherCpu {
    fn try_it<X: Format>(&self, machine: Arc<Machine<X>>, bytes: u64) {
        if X::BREAK_BEFORE_MAKE || !matches!(bytes, LARGE | HUGE) {
            // The other waits until the page is in pieces, and the hardware has forgotten it.
            return;
        }
        machine.before_next(move |machine| {
            machine.platform.be(1);
            let sibling = machine.part(bytes / 2, PAGE);
            match machine.domain.unmap_strictly(sibling) {
                Ok(()) => assert!(!machine.reaches(sibling), "{bytes:#x}"),
                Err(error) => panic!("{error}"),
            }
            machine.platform.be(0);
        });
        let first = machine.part(0, PAGE);
        machine.domain.unmap_strictly(first).unwrap();
        machine.queue.clear();
        assert!(!machine.reaches(first));
        assert!(machine.reaches(machine.part(PAGE, PAGE)) || bytes == 2 * PAGE);
    }
}

#[test]
fn a_neighbouring_part_that_another_cpu_unmaps_before_the_first_is_confirmed_is_out_of_reach() {
    everywhere(&AnotherCpu);
}

/// The hardware never confirms the first: it does the second.
struct NeverConfirmed;

impl Try for NeverConfirmed {
    fn try_it<X: Format>(&self, machine: Arc<Machine<X>>, bytes: u64) {
        if X::BREAK_BEFORE_MAKE {
            // The page stays whole.
            return;
        }
        machine.iommu.queue().fail_next(1, BROKEN);
        let (first, second) = (machine.part(0, PAGE), machine.part(bytes - PAGE, PAGE));
        // A page of several entries is not split where that is not confirmed.
        let refused = machine.domain.unmap_strictly(first).unwrap_err();
        assert!(matches!(refused, UnmapError::Unconfirmed { .. } | UnmapError::StillMapped { .. }));
        machine.domain.unmap_strictly(second).unwrap();
        assert!(!machine.reaches(second), "{bytes:#x}");
    }
}

#[test]
fn nor_does_it_matter_that_the_first_never_is() {
    everywhere(&NeverConfirmed);
}

/// The first part waits for a flush; the second does not.
struct Lazily;

impl Try for Lazily {
    fn try_it<X: Format>(&self, machine: Arc<Machine<X>>, bytes: u64) {
        machine.domain.set_policy(LAZY_FOREVER).unwrap();
        let (first, second) = (machine.part(bytes / 2, PAGE), machine.part(0, PAGE));
        machine.domain.unmap(first).unwrap();
        machine.domain.unmap_strictly(second).unwrap();
        assert!(!machine.reaches(second), "{bytes:#x}");
        machine.domain.flush().unwrap();
        assert!(!machine.reaches(first), "{bytes:#x}");
    }
}

#[test]
fn nor_that_it_waits_for_a_flush() {
    everywhere(&Lazily);
}
