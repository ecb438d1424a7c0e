//! The machine of all scripts: a domain in a table of four levels, a pool, caches, and memory that is the driver's.

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{Device, DmaDomain, DmaMask, DomainBuilder};
use portcullis::domain::{Domain, Policy};
use portcullis::invalidation::Costs;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Frames;
use portcullis_model::Memory;

use crate::rig::Clocked;
use crate::transcript::{Asked, Caches, Copies, Cpus, Tables, Transcript, transcript};

pub type Mapper = TableMapper<Tables<true>, Asked>;
pub type Machine = (Mapper, Cpus, Copies);
pub type Builder = DomainBuilder<Mapper, Cpus, Copies>;

pub const PAGE: u64 = 4096;
/// Directions, as mappings take turns.
pub const TURNS: [Direction; 3] = [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];
/// Nobody is given these.
pub const KEPT: u64 = 0xfee0_0000;

pub struct World {
    pub memory: Arc<Memory>,
    pub clock: Arc<Clocked>,
    pub domain: DmaDomain<Machine>,
    /// 8 MiB of the driver's.
    pub own: PhysAddr,
}

impl World {
    pub fn new(about: &str, policy: Policy, change: impl FnOnce(Builder) -> Builder) -> (Self, Transcript) {
        Self::asking(about, policy, Asked::default(), change)
    }

    /// Whose queue is like that.
    pub fn asking(
        about: &str,
        policy: Policy,
        queue: Asked,
        change: impl FnOnce(Builder) -> Builder,
    ) -> (Self, Transcript) {
        Self::made(about, policy, (queue, false), change)
    }

    /// A strict one, whose pool zeroes each buffer when its mapping ends.
    pub fn wiping(about: &str) -> (Self, Transcript) {
        Self::made(about, Policy::Strict, (Asked::default(), true), |builder| builder)
    }

    fn made(
        about: &str,
        policy: Policy,
        (queue, wipe): (Asked, bool),
        change: impl FnOnce(Builder) -> Builder,
    ) -> (Self, Transcript) {
        let (clock, memory) = (Clocked::new(2), Memory::new(24 << 20));
        let mut said = transcript(about, &memory, &clock);
        let own = memory.alloc(2048).unwrap();
        let table = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(Tables(Arc::clone(&memory)), table, 2).unwrap();
        let builder = Domain::builder(table, queue, DomainId(1))
            .policy(policy)
            .cache_maintenance(Arc::new(Caches))
            .reserve(IovaRange::new(Iova::new(KEPT), 16 * PAGE).unwrap());
        let (cpus, copies) = (|| Cpus(Arc::clone(&clock)), Copies(Arc::clone(&memory)));
        let builder = match policy {
            Policy::Passthrough => {
                let config =
                    SwiotlbConfig { area_bytes: 512 << 10, min_bytes: 512 << 10, ..SwiotlbConfig::default() };
                builder.swiotlb(Swiotlb::new(cpus(), copies, &config).unwrap())
            }
            _ => builder.bounce(copies, PoolConfig { idle_ns: 5_000_000, wipe, ..PoolConfig::default() }),
        };
        let domain = change(builder).build(cpus()).unwrap();
        said.note("own memory", own);
        (Self { memory, clock, domain, own }, said)
    }

    pub fn device(&self, mask: DmaMask) -> Device<Machine> {
        self.domain.attach(DeviceId(7), mask).unwrap()
    }

    /// A piece of the driver's memory.
    pub fn piece(&self, offset: u64, len: u64) -> PhysSegment {
        PhysSegment { phys: PhysAddr::new(self.own.get() + offset), len }
    }

    pub fn pieces(&self, list: &[(u64, u64)]) -> Vec<PhysSegment> {
        list.iter().map(|(offset, len)| self.piece(*offset, *len)).collect()
    }

    /// All that is counted.
    pub fn counts(&self, said: &mut Transcript) {
        let mut stats = self.domain.space().stats();
        // Not how large values are, which is the compiler's affair.
        stats.iova_memory = 0;
        said.note("domain", stats);
        said.note("exposure", self.domain.space().exposure());
        if let Some(mut usage) = self.domain.pool_usage() {
            usage.bookkeeping_bytes = 0;
            said.note("pool", usage);
        }
    }
}

/// Where waits are so dear that all CPUs share a queue of them.
pub const DEAR: Costs = Costs { submission_ns: 100_000, request_ns: 400, refill_ns: 30_000 };

pub fn shown(segments: &[DmaSegment]) -> String {
    let segments: Vec<_> = segments.iter().map(|at| format!("{:#x}+{:#x}", at.iova, at.len)).collect();
    segments.join(" ")
}
