//! CPUs that share hardware waits: each comes back after a submission that began when its request was staged.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize as Plain;
use std::sync::atomic::Ordering as PlainOrdering;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange};
use portcullis::invalidation::{
    DomainId, Invalidation, InvalidationError, InvalidationQueue, Request, SharedQueue,
};
use portcullis::sync::{AtomicU64, Ordering};

/// A page-table entry for each CPU, and what the hardware has cached of it.
struct Hardware {
    tables: [AtomicU64; 3],
    cached: Mutex<[u64; 3]>,
    submissions: Plain,
    /// Which submission fails, counting from 1; 0 for none.
    fails: usize,
    failed: Mutex<Vec<u64>>,
}

impl Hardware {
    fn new(fails: usize) -> Self {
        Self {
            tables: [1, 1, 1].map(AtomicU64::new),
            cached: Mutex::new([1; 3]),
            submissions: Plain::new(0),
            fails,
            failed: Mutex::new(Vec::new()),
        }
    }
}

// SAFETY: the cache is brought up to date before `Ok`; no memory is behind it.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, request: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation: request }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let number = self.submissions.fetch_add(1, PlainOrdering::Relaxed) + 1;
        let whose = requests.iter().map(|request| u64::from(request.domain.0));
        if number == self.fails {
            self.failed.lock().unwrap().extend(whose);
            return Err(InvalidationError::TimedOut { waited_ns: 7 });
        }
        for cpu in whose {
            // What it forgets it may fetch again at once.
            let entry = self.tables[cpu as usize].load(Ordering::Relaxed);
            self.cached.lock().unwrap()[cpu as usize] = entry;
        }
        Ok(())
    }
}

fn unmap(queue: &SharedQueue<Hardware>, cpu: u16) -> Result<(), InvalidationError> {
    queue.queue().tables[cpu as usize].store(0, Ordering::Relaxed);
    let range = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
    let result = queue.invalidate(DomainId(cpu), Invalidation::Range { range, leaf_only: true });
    match result {
        Ok(()) => assert_eq!(queue.queue().cached.lock().unwrap()[cpu as usize], 0, "forgotten"),
        Err(_) => assert!(queue.queue().failed.lock().unwrap().contains(&cpu.into()), "it failed"),
    }
    result
}

fn cpus(fails: usize, count: u16) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(if count > 2 { 1 } else { 3 });
    // Who waits looks again and again.
    model.max_branches = 100_000;
    model.check(move || {
        let queue = Arc::new(SharedQueue::new(Hardware::new(fails)));
        let others: Vec<_> = (1..count)
            .map(|cpu| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || unmap(&queue, cpu).is_err())
            })
            .collect();
        let mut failures = usize::from(unmap(&queue, 0).is_err());
        for other in others {
            failures += usize::from(other.join().unwrap());
        }
        assert_eq!(failures, queue.queue().failed.lock().unwrap().len(), "each failure is told once");
        assert!(queue.submissions() <= count.into());
    });
}

#[test]
fn whoever_comes_back_is_forgotten() {
    cpus(0, 2);
}

#[test]
fn a_failed_batch_fails_for_all_in_it_and_for_nobody_else() {
    cpus(1, 2);
}

/// Batches hold two requests here, so three CPUs also meet a full one.
#[test]
fn a_full_batch_is_waited_for() {
    cpus(0, 3);
}
