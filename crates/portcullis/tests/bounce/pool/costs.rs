//! A clock that stands still but for what hardware and copies are said to cost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::Direction;
use portcullis::dma::Explained;
use portcullis::platform::Platform;

use crate::pool::support::Bench;

/// Nanoseconds that the hardware makes an unmap wait, and that a copy takes.
#[derive(Clone, Default)]
pub struct Costs(Arc<[AtomicU64; 2]>);

pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

impl Costs {
    pub fn new(wait_ns: u64, copy_ns: u64) -> Self {
        let costs = Self::default();
        costs.set(wait_ns, copy_ns);
        costs
    }

    pub fn set(&self, wait_ns: u64, copy_ns: u64) {
        self.0[0].store(wait_ns, Ordering::Relaxed);
        self.0[1].store(copy_ns, Ordering::Relaxed);
    }

    /// Time that passes by what has happened since the clock was read last, at the prices of now.
    pub fn clock<P: Platform + Clone>(&self, bench: &Bench<P>) -> Clock {
        let (iommu, pool, prices) = (Arc::clone(&bench.iommu), bench.pool.clone(), self.clone());
        let last = Mutex::new((0, [0; 2]));
        Box::new(move || {
            let mut last = last.lock().unwrap();
            let events = [iommu.stats().submissions, pool.usage().bounced];
            for (event, price) in [0, 1].map(|n| (events[n] - last.1[n], prices.0[n].load(Ordering::Relaxed)))
            {
                last.0 += event * price;
            }
            last.1 = events;
            last.0
        })
    }
}

pub fn row(rows: &[Explained], most_bytes: u64, direction: Direction) -> Explained {
    *rows.iter().find(|row| (row.most_bytes, row.direction) == (most_bytes, direction)).unwrap()
}
