//! CPUs that share hardware waits: each comes back after a submission that began when it had asked. CPUs 0 and 1 are
//! one group here, and CPU 2 is another: they share waits one level up.
//!
//! What the hardware has cached, and what failed, is in the model checker's own words: only what the queue itself orders is
//! ordered.

use std::sync::atomic::AtomicUsize as Plain;
use std::sync::atomic::Ordering as PlainOrdering;

use std::cell::Cell;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request, SharedQueue};
use portcullis::sync::{AtomicU64, Ordering};

::loom::thread_local! {
    /// The CPU that a thread is; none in an interrupt handler.
    static CPU: Cell<Option<usize>> = Cell::new(None);
}

fn queue(hardware: Hardware) -> SharedQueue<Hardware> {
    SharedQueue::with_cpus(hardware, || CPU.with(Cell::get))
}

/// A page-table entry for each CPU, and what the hardware has cached of it.
struct Hardware {
    tables: [AtomicU64; 3],
    cached: [AtomicU64; 3],
    failed: [AtomicU64; 3],
    submissions: Plain,
    /// Clause 3 of an invalidation queue: calls are in one order.
    order: ::loom::sync::Mutex<()>,
    /// Which submission fails, counting from 1; 0 for none.
    fails: usize,
    /// Which one panics.
    panics: usize,
}

impl Hardware {
    fn new(fails: usize, panics: usize) -> Self {
        let words = |word| [word; 3].map(AtomicU64::new);
        Self {
            tables: words(1),
            cached: words(1),
            failed: words(0),
            submissions: Plain::new(0),
            order: ::loom::sync::Mutex::new(()),
            fails,
            panics,
        }
    }
}

/// The CPU whose page a request is about; all of a domain's.
fn whose(request: &Request) -> std::ops::Range<usize> {
    match request.invalidation {
        Invalidation::Range { range, .. } => {
            let cpu = (range.start().get() >> 12) as usize;
            cpu..cpu + 1
        }
        _ if request.domain == SHARED => 0..3,
        _ => request.domain.0.into()..usize::from(request.domain.0) + 1,
    }
}

/// The domain of all CPUs, where they have no domain each.
const SHARED: DomainId = DomainId(9);

// SAFETY: what it forgets is all that the test looks at.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let number = self.submissions.fetch_add(1, PlainOrdering::Relaxed) + 1;
        if number == self.panics {
            // As a panic does, without its message.
            std::panic::resume_unwind(Box::new("a driver's bug"));
        }
        let _order = self.order.lock().unwrap();
        for cpu in requests.iter().flat_map(whose) {
            if number == self.fails {
                self.failed[cpu].store(1, Ordering::Relaxed);
            } else {
                // What it forgets it may fetch again at once.
                self.cached[cpu].store(self.tables[cpu].load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        if number == self.fails { Err(InvalidationError::TimedOut { waited_ns: 7 }) } else { Ok(()) }
    }
}

/// How a CPU asks.
#[derive(Clone, Copy)]
enum Ask {
    /// For its page, in a domain of its own.
    Page,
    /// The same in an interrupt handler, which says no CPU.
    Handler,
    /// For its page, in everybody's domain.
    SharedPage,
    /// For everybody's domain.
    Shared,
}

fn unmap(queue: &SharedQueue<Hardware>, cpu: u16, ask: Ask) -> Result<(), InvalidationError> {
    CPU.with(|this| this.set((!matches!(ask, Ask::Handler)).then_some(cpu.into())));
    let hardware = queue.queue();
    hardware.tables[usize::from(cpu)].store(0, Ordering::Relaxed);
    let range = IovaRange::new(Iova::new(u64::from(cpu) << 12), 0x1000).unwrap();
    let page = Invalidation::Range { range, leaf_only: true };
    let result = match ask {
        Ask::Page | Ask::Handler => queue.invalidate(DomainId(cpu), page),
        Ask::SharedPage => queue.invalidate(SHARED, page),
        Ask::Shared => queue.invalidate(SHARED, Invalidation::Domain),
    };
    match result {
        Ok(()) => assert_eq!(hardware.cached[usize::from(cpu)].load(Ordering::Relaxed), 0, "forgotten"),
        Err(InvalidationError::Abandoned) => assert!(hardware.panics > 0, "nobody has abandoned it"),
        Err(_) => assert_eq!(hardware.failed[usize::from(cpu)].load(Ordering::Relaxed), 1, "it failed"),
    }
    result
}

/// Each of `asks` is a CPU, and how it asks. With two, all orders with up to two preemptions are tried, but none
/// from the third poll of a waiting CPU on (`pause_among`). Three have too many: the first [`SOME`] are tried.
fn cpus(fails: usize, asks: &'static [(u16, Ask)]) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_permutations = (asks.len() > 2).then_some(SOME);
    // A waiting CPU polls again and again.
    model.max_branches = 100_000;
    model.check(move || {
        let queue = Arc::new(queue(Hardware::new(fails, 0)));
        let others: Vec<_> = asks[1..]
            .iter()
            .map(|(cpu, ask)| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || unmap(&queue, *cpu, *ask).is_err())
            })
            .collect();
        let mut failures = usize::from(unmap(&queue, asks[0].0, asks[0].1).is_err());
        for other in others {
            failures += usize::from(other.join().unwrap());
        }
        // There may be no second submission to fail.
        assert!(if fails == 1 { failures > 0 } else { failures <= fails / 2 });
        assert!(queue.queue().submissions.load(PlainOrdering::Relaxed) <= asks.len());
    });
}

const SOME: usize = 50_000;

/// CPUs of one group, and of two.
const NEAR: [u16; 2] = [0, 1];
const FAR: [u16; 2] = [0, 2];

#[test]
fn a_cpu_comes_back_when_its_page_is_forgotten() {
    cpus(0, &[(NEAR[0], Ask::Page), (NEAR[1], Ask::Page)]);
    cpus(0, &[(FAR[0], Ask::Page), (FAR[1], Ask::Page)]);
}

#[test]
fn a_failed_batch_fails_for_all_in_it_and_for_nobody_else() {
    cpus(1, &[(NEAR[0], Ask::Page), (NEAR[1], Ask::Page)]);
    cpus(2, &[(NEAR[0], Ask::Page), (NEAR[1], Ask::Page)]);
    cpus(1, &[(FAR[0], Ask::Page), (FAR[1], Ask::Page)]);
    cpus(2, &[(FAR[0], Ask::Page), (FAR[1], Ask::Page)]);
}

#[test]
fn a_cpu_that_asks_for_a_domain_serves_one_that_asks_for_a_page_of_it() {
    cpus(0, &[(NEAR[0], Ask::SharedPage), (NEAR[1], Ask::Shared)]);
    cpus(0, &[(FAR[0], Ask::SharedPage), (FAR[1], Ask::Shared)]);
}

/// An interrupt handler on a CPU whose task may lead or wait: it has no number, and waits for nobody.
#[test]
fn a_handler_beside_callers_is_forgotten_too() {
    cpus(0, &[(0, Ask::Page), (1, Ask::Handler)]);
    cpus(1, &[(0, Ask::Page), (1, Ask::Handler)]);
}

/// Batches hold two requests here, so three CPUs that come at once take two submissions.
#[test]
fn what_does_not_fit_goes_in_another_submission() {
    cpus(0, &[(0, Ask::Page), (1, Ask::Page), (2, Ask::Page)]);
}

#[test]
fn nor_does_a_domain_make_others_pages_be_forgotten_about() {
    cpus(0, &[(0, Ask::Page), (1, Ask::Page), (2, Ask::Shared)]);
}

/// CPUs come again: a leader ends its round while another CPU publishes, and a caller takes the same slot again.
fn again(times: u64, fails: usize, panics: usize, preemptions: usize) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 100_000;
    model.check(move || {
        let queue = Arc::new(queue(Hardware::new(fails, panics)));
        let calls = move |queue: &SharedQueue<Hardware>, cpu: u16| {
            for _ in 0..times {
                queue.queue().tables[usize::from(cpu)].store(1, Ordering::Relaxed);
                let call = || unmap(queue, cpu, Ask::Page);
                let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
                // The one that leads unwinds, and one that was in its batch is told so.
                match told {
                    Ok(told) => assert!(told.is_ok() || fails + panics > 0),
                    Err(panic) => assert_eq!(panic.downcast_ref(), Some(&"a driver's bug")),
                }
            }
        };
        let other = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || calls(&queue, 1))
        };
        calls(&queue, 0);
        other.join().unwrap();
        assert!(queue.queue().submissions.load(PlainOrdering::Relaxed) as u64 <= 2 * times);
        // No leader is left.
        assert!(panics > 1 || fails > 1 || unmap(&queue, 2, Ask::Page).is_ok());
    });
}

#[test]
fn a_caller_that_publishes_while_a_leader_ends_its_round_is_served() {
    again(2, 0, 0, 1);
}

#[test]
fn a_queue_that_panics_abandons_its_batch_and_another_caller_leads() {
    again(1, 0, 1, 2);
    again(1, 0, 2, 2);
    again(2, 0, 2, 1);
}

/// A slot passes from one caller to the next, which finds the last one's answer there and waits for its own.
#[test]
fn a_slot_that_two_callers_use_in_turn_answers_each() {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 100_000;
    model.check(|| {
        let queue = Arc::new(SharedQueue::with_cpus(Hardware::new(0, 0), || Some(0)));
        let calls = |queue: &SharedQueue<Hardware>, page: u16| {
            for _ in 0..2 {
                queue.queue().tables[usize::from(page)].store(1, Ordering::Relaxed);
                assert!(unmap(queue, page, Ask::Page).is_ok());
            }
        };
        let other = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || calls(&queue, 1))
        };
        calls(&queue, 0);
        other.join().unwrap();
    });
}
