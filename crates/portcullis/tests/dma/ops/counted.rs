//! What a handle and its domain say is exact after every call: mappings, bytes that are open, and bytes beside these times the
//! nanoseconds for which they were.

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaAttributes, DmaDevice, DmaMask, DmaOps, OpsConfig};
use portcullis::domain::Domain;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis_model::open::OpenDevice;
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory, Queue};

use super::support::{CONFIGS, Calls, THRESHOLD, part, whole};
use crate::queue::world::{BROKEN, CARD, PAGE};
use crate::rig::Clocked;

type Ops = DmaOps<(TableMapper<Arc<Memory>, Queue>, Arc<Clocked>, Arc<Memory>)>;

struct Machine {
    clock: Arc<Clocked>,
    iommu: Arc<Iommu>,
    ops: Ops,
    buffer: Buffer,
}

impl Machine {
    fn new(config: OpsConfig) -> Self {
        let (clock, memory) = (Clocked::new(2), Memory::new(16 << 20));
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table =
            PageTable::for_cpus(Arc::clone(&memory), VtdSecondStage::new(4, 3, 48).unwrap(), 2).unwrap();
        iommu.attach(CARD, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let domain = Domain::builder(table, iommu.queue(), DomainId(1))
            .bounce(Arc::clone(&memory), PoolConfig { idle_ns: u64::MAX, ..PoolConfig::default() })
            .build(Arc::clone(&clock))
            .unwrap();
        let ops = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap().ops(config).unwrap();
        let buffer = memory.buffer(64 * PAGE).unwrap();
        // The first reading of the clock, and the timers that were asked for.
        clock.go_to(1_000_000_000);
        Self { clock, iommu, ops, buffer }
    }

    /// The bytes that count as exposed, those of buffers that were unmapped and those beside buffers, by what they add in a second.
    fn exposed(&self, now: usize) -> (u64, u64) {
        // Each CPU reads the clock at every 64th change at the latest, and after a pause at the next again.
        for cpu in [0, 1] {
            self.clock.be(cpu);
            for change in [1, -1].repeat(34) {
                self.clock.take(1_000_000_000);
                self.ops.domain().count_neighbours(change);
            }
        }
        self.clock.be(now);
        let before = self.ops.domain().exposure();
        self.clock.take(1_000_000_000);
        let after = self.ops.domain().exposure();
        let bytes = |before: u128, after: u128| ((after - before) / 1_000_000_000).try_into().unwrap();
        (
            bytes(before.stale_byte_ns, after.stale_byte_ns),
            bytes(before.neighbour_byte_ns, after.neighbour_byte_ns),
        )
    }

    fn map(&self, kind: Kind) -> (Iova, u64) {
        let at = |page: u64, offset, len| part(&self.buffer, page * PAGE + offset, len);
        let lasting = DmaAttributes { lasting: true, ..DmaAttributes::default() };
        let both = Direction::Bidirectional;
        let one =
            |piece: PhysSegment, attributes| (self.ops.maps_as(piece, both, attributes).unwrap(), piece.len);
        match kind {
            Kind::Small => one(at(0, 16, 64), DmaAttributes::default()),
            Kind::Large => one(at(0, 8, 3 * THRESHOLD), DmaAttributes::default()),
            Kind::Whole => one(at(0, 0, 2 * THRESHOLD), DmaAttributes::default()),
            Kind::List => {
                let list = [at(1, 8, 64), at(3, 16, 65), at(5, 0, PAGE)];
                whole(&self.ops.maps_list(&list, both).unwrap())
            }
            Kind::Lasting => one(at(0, 32, 100), lasting),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Small,
    Large,
    Whole,
    List,
    Lasting,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Small, Self::Large, Self::Whole, Self::List, Self::Lasting];

    /// Bytes that are open while it is mapped, and bytes beside them.
    fn opens(self, config: OpsConfig) -> (u64, u64) {
        let is_copied = matches!(config, OpsConfig::Bounce { .. });
        match self {
            Self::Small | Self::Large | Self::List if is_copied => (0, 0),
            Self::Small => (64, PAGE - 64),
            Self::Large => (3 * THRESHOLD, PAGE),
            Self::Whole => (2 * THRESHOLD, 0),
            Self::List => (64 + 65 + PAGE, 2 * PAGE - 64 - 65),
            Self::Lasting => (100, PAGE - 100),
        }
    }
}

/// What still counts after an end, as devices may reach it: bytes of buffers, and bytes beside them.
fn stays(kind: Kind, config: OpsConfig, confirmed: bool) -> (u64, u64) {
    let opened = kind.opens(config);
    match kind {
        // By its policy, with all that it had.
        _ if matches!(config, OpsConfig::Lazy { .. }) && !matches!(kind, Kind::Lasting) => opened,
        _ if confirmed => (0, 0),
        // Its ends are copies, and what lies between them is the driver's.
        Kind::Large if opened == (0, 0) => (3 * THRESHOLD - PAGE, 0),
        // Whole granules.
        _ => (opened.0 + opened.1, 0),
    }
}

fn sum(all: impl Iterator<Item = (u64, u64)>) -> (u64, u64) {
    all.fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1))
}

/// Each kind by itself, and all at once, however it ends, on the CPU that made it or another.
#[test]
fn what_is_open_is_counted_from_its_map_to_its_end_or_to_the_flush_that_covers_it() {
    for config in CONFIGS {
        let (machine, mut done) = (Machine::new(config), 0);
        let check = |cpu: usize, live: &[Kind], done: u64, after: (u64, u64), says: &str| {
            let open = sum(live.iter().map(|kind| kind.opens(config)));
            let usage = machine.ops.usage();
            assert_eq!((usage.open_bytes, usage.exposed_bytes), open, "{config:?} {live:?} {says}");
            let exposed = (after.0, open.1 + after.1);
            assert_eq!(machine.exposed(cpu), exposed, "{config:?} {live:?} {says}");
            assert_eq!((usage.maps - usage.unmaps, usage.unmaps), (live.len() as u64, done), "{says}");
        };
        let flush = || machine.ops.domain().flush().unwrap();
        for cpu in [0, 1] {
            for (kind, confirmed) in Kind::ALL.iter().flat_map(|kind| [(*kind, true), (*kind, false)]) {
                check(0, &[], done, (0, 0), "before");
                let (iova, len) = machine.map(kind);
                check(cpu, &[kind], done, (0, 0), "mapped");
                if !confirmed {
                    machine.iommu.queue().fail_next(1, BROKEN);
                }
                let ended = machine.ops.ends(iova, len);
                machine.iommu.queue().fail_next(0, BROKEN);
                done += 1;
                let after = stays(kind, config, confirmed);
                let says = format!("{kind:?} ended: {ended:?}");
                check(cpu, &[], done, after, &says);
                flush();
                check(cpu, &[], done, (0, 0), &says);
            }
            // All that is left ends at once, whatever the policy.
            for confirmed in [true, false] {
                let mut live = Vec::new();
                for kind in Kind::ALL {
                    machine.map(kind);
                    live.push(kind);
                    check(cpu, &live, done, (0, 0), "one more");
                }
                if !confirmed {
                    machine.iommu.queue().fail_next(1, BROKEN);
                }
                // SAFETY: nothing else runs.
                let left = unsafe { machine.ops.unmap_all() };
                machine.iommu.queue().fail_next(0, BROKEN);
                assert_eq!(left.ok().map(|(mappings, _)| mappings), confirmed.then_some(live.len() as u64));
                done += live.len() as u64;
                let opened = sum(live.iter().map(|kind| kind.opens(config)));
                check(cpu, &[], done, if confirmed { (0, 0) } else { (opened.0 + opened.1, 0) }, "all ended");
                flush();
                check(cpu, &[], done, (0, 0), "all ended, and flushed");
            }
        }
        // A map that finds no addresses has those taken back that CPUs keep.
        let beyond = machine.ops.set_limits(PAGE, 0);
        let lasting = DmaAttributes { lasting: true, ..DmaAttributes::default() };
        let none = machine.ops.maps_as(part(&machine.buffer, 0, 2 * PAGE), Direction::ToDevice, lasting);
        assert!(beyond.is_ok() && none.is_err(), "{none:?}");
        machine.ops.maintain().unwrap();
        let (stats, pool) = (machine.ops.domain().stats(), machine.ops.usage().pool.unwrap());
        // What has copies of its ends, and was not confirmed, waits for a trim.
        let singles = 2 * u64::from(matches!(config, OpsConfig::Bounce { .. }));
        assert_eq!((pool.singles, stats.lost_iova_bytes, stats.cached_iova_bytes), (singles, 0, 0));
        assert_eq!(stats.taken_iova_bytes, pool.iova_bytes + singles * 64 * PAGE, "{config:?}");
    }
}

/// So it is with what a device's own methods map, in one piece or several.
#[test]
fn what_a_device_opens_is_counted_until_it_ends_it() {
    let machine = Machine::new(OpsConfig::Strict);
    let device = DmaDevice::new(machine.ops.domain().clone(), u64::MAX).unwrap();
    let list = [part(&machine.buffer, 8, 64), part(&machine.buffer, 2 * PAGE + 16, 100)];
    let mut out = [DmaSegment::default(); 2];
    let count = device.open_sg(&list, Direction::Bidirectional, &mut out).unwrap();
    assert_eq!(machine.exposed(0), (0, 2 * PAGE - 164));
    device.unmap_sg(&out[..count]).unwrap();
    assert_eq!(machine.exposed(0), (0, 0));
    let iova = device.open_single(list[0].phys, 64, Direction::Bidirectional).unwrap();
    assert_eq!(machine.exposed(0), (0, PAGE - 64));
    device.unmap_single(iova, 64).unwrap();
    assert_eq!(machine.exposed(0), (0, 0));
}
