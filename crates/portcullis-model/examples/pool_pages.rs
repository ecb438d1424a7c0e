//! What large pages change for a bounce pool: misses of an IOTLB of 128 entries, bytes of page tables, and memory that a
//! trim leaves. The results are the same on every machine. Run with
//! `cargo run --release --example pool_pages -p portcullis-model`.
#![allow(unsafe_code, reason = "a pool's map trusts its caller with memory, which here is simulated")]

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::domain::{Domain, PhysSegment, Policy};
use portcullis::invalidation::DomainId;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenPool;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Queue};

const DEVICE: DeviceId = DeviceId(7);
/// Mappings made in all, of which the last three quarters are counted.
const MAPPINGS: usize = 4_000;
/// From how many bytes in a class on slots come a large page at a time.
const LARGE_FROM: [u64; 4] = [u64::MAX, 1 << 20, 512 << 10, 0];

type Table = TableMapper<Arc<Memory>, Queue>;

struct Bench {
    iommu: Arc<Iommu>,
    domain: Arc<Domain<Table, Arc<StdPlatform>>>,
    pool: Arc<BouncePool<Table, Arc<StdPlatform>, Arc<Memory>>>,
    device: BounceDevice<Table, Arc<StdPlatform>, Arc<Memory>>,
    list: [PhysSegment; 1],
}

impl Bench {
    fn new(bytes: u64, large_from: u64) -> Self {
        let memory = Memory::new(512 << 20);
        let (iotlb_entries, iotlb_ways) = (128, 8);
        let config = IommuConfig { iotlb_entries, iotlb_ways, ..IommuConfig::new(Arc::clone(&memory)) };
        let iommu = Iommu::new(config);
        let platform = Arc::new(StdPlatform::with_slots(1));
        let format = VtdSecondStage::new(4, 3, 52).expect("a valid format");
        let table = PageTable::new(Arc::clone(&memory), format, 1).expect("memory for tables");
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(platform, mapper, Policy::Strict).expect("a domain");
        // No timer: when something is given back is the program's choice.
        let config = PoolConfig { large_from, idle_ns: u64::MAX, ..PoolConfig::default() };
        let pool = BouncePool::new(Arc::clone(&domain), Arc::clone(&memory), config).expect("a pool");
        let device = BounceDevice::new(Arc::clone(&pool), DeviceProfile::default()).expect("a device");
        // Only the pool's own memory is looked at: all mappings may have one original.
        let original = memory.buffer(bytes).expect("memory");
        Self { iommu, domain, pool, device, list: [PhysSegment { phys: original.phys(), len: bytes }] }
    }

    fn map(&self) -> Iova {
        // SAFETY: the memory is simulated; all access to it is atomic, and any address allowed.
        let mapped = unsafe { self.device.map(&self.list, Direction::FromDevice, Attributes::default()) };
        mapped.expect("room in the pool").iova()
    }

    fn unmap(&self, iova: Iova) {
        self.pool.close(iova, self.list[0].len).expect("it is mapped");
    }

    fn table_bytes(&self) -> usize {
        self.domain.mapper().table().table_bytes()
    }
}

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// With `depth` mappings in flight: misses per access, if they end in order and in random order.
fn misses(bytes: u64, depth: usize, large_from: u64) -> [f64; 2] {
    [false, true].map(|shuffled| {
        let bench = Bench::new(bytes, large_from);
        let mut random = Random(1);
        let mut live: Vec<_> = (0..depth).map(|_| bench.map()).collect();
        let mut before = bench.iommu.stats();
        for mapping in 0..MAPPINGS {
            if mapping == MAPPINGS / 4 {
                before = bench.iommu.stats();
            }
            let at = if shuffled { random.below(depth) } else { mapping % depth };
            bench.iommu.access(DEVICE, live[at], bytes, Permissions::WRITE).expect("it is mapped");
            bench.unmap(live[at]);
            live[at] = bench.map();
        }
        let after = bench.iommu.stats();
        (after.iotlb_misses - before.iotlb_misses) as f64 / (after.accesses - before.accesses) as f64
    })
}

/// KiB of tables and of buffers after `depth` mappings at once, and of buffers when all but 8 and all but 4 of them have
/// ended, in random order, and the rest was trimmed.
fn memory(bytes: u64, depth: usize, large_from: u64) -> [u64; 4] {
    let bench = Bench::new(bytes, large_from);
    let before = bench.table_bytes();
    let mut random = Random(1);
    let mut live: Vec<_> = (0..depth).map(|_| bench.map()).collect();
    let tables = (bench.table_bytes() - before) as u64;
    let full = bench.pool.usage().buffer_bytes;
    let mut end_but = |rest| {
        while live.len() > rest {
            let at = random.below(live.len());
            bench.unmap(live.swap_remove(at));
        }
        bench.pool.trim(0).expect("the model answers");
        bench.pool.usage().buffer_bytes
    };
    [tables, full, end_but(8), end_but(4)].map(|bytes| bytes >> 10)
}

fn main() {
    println!(
        "Misses per access to a page, mappings ending in order and at random; KiB of tables, and of buffers at the"
    );
    println!(
        "peak and after a trim with 8 and with 4 mappings left. By bytes in a class from which on pages are large."
    );
    for (bytes, depth) in
        [(4 << 10, 64), (4 << 10, 512), (64 << 10, 8), (64 << 10, 64), (128 << 10, 8), (128 << 10, 64)]
    {
        println!("\n{depth} of {} KiB", bytes >> 10);
        println!(
            "{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
            "from", "order", "random", "tables", "peak", "8 left", "4 left"
        );
        for large_from in LARGE_FROM {
            let from =
                if large_from == u64::MAX { "never".into() } else { format!("{} KiB", large_from >> 10) };
            let [order, shuffled] = misses(bytes, depth, large_from);
            print!("{from:>10}{order:>9.3}{shuffled:>9.3}");
            memory(bytes, depth, large_from).iter().for_each(|kib| print!("{kib:>9}"));
            println!();
        }
    }
}
