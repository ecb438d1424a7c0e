//! A batch and the memory of failed ones, beside plain lists of what was asked for and what became of it.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::addr::{Iova, IovaRange};
use crate::dice::Dice;

fn state() -> State {
    State { open: 1, staged: ArrayVec::new(), failed: ArrayVec::new() }
}

fn whole(domain: u16) -> Request {
    Request { domain: DomainId(domain), invalidation: Invalidation::Domain }
}

fn page(domain: u16, number: u64, leaf_only: bool) -> Request {
    let range = IovaRange::new(Iova::new(number << 12), 4096).unwrap();
    Request { domain: DomainId(domain), invalidation: Invalidation::Range { range, leaf_only } }
}

fn random(dice: &mut Dice, domains: u64) -> Request {
    let domain = dice.below(domains) as u16;
    if dice.below(8) == 0 { whole(domain) } else { page(domain, dice.below(1000), dice.below(2) == 0) }
}

/// Whether carrying out `staged` does what was `asked`.
fn covers(staged: &[Request], asked: &Request) -> bool {
    staged.contains(asked) || staged.contains(&whole(asked.domain.0))
}

fn domains(requests: &[Request]) -> usize {
    let mut domains: Vec<_> = requests.iter().map(|request| request.domain).collect();
    domains.sort();
    domains.dedup();
    domains.len()
}

#[test]
fn a_batch_covers_all_that_was_staged_in_it_and_names_nobody_else() {
    // Few domains make batches full of ranges, many such without room for another domain.
    for (seed, different) in [(1, 1), (2, 3), (3, 20), (4, BATCH as u64 - 1), (5, BATCH as u64 + 30)] {
        let mut dice = Dice(seed);
        let mut refused = 0;
        for _ in 0..if cfg!(debug_assertions) { 10 } else { 40 } {
            let (mut state, mut asked) = (state(), Vec::<Request>::new());
            let is_named =
                |requests: &[Request], one: &Request| requests.iter().any(|other| other.domain == one.domain);
            for _ in 0..dice.below(3 * BATCH as u64) {
                let most = if dice.below(4) == 0 { 40 } else { 3 };
                let requests: Vec<_> = (0..dice.below(most)).map(|_| random(&mut dice, different)).collect();
                let before = state.staged.clone();
                if state.stage(&requests) {
                    asked.extend(requests);
                } else {
                    refused += 1;
                    assert_eq!(state.staged, before, "all of them or none");
                    let fit = requests.iter().all(|request| is_named(&before, request));
                    assert!(!fit, "a whole domain takes no more room than a part of it");
                }
                assert!(asked.iter().all(|request| covers(&state.staged, request)));
                assert!(state.staged.iter().all(|request| is_named(&asked, request)), "nobody asked for it");
            }
            assert_eq!(domains(&state.staged), domains(&asked));
        }
        assert!(refused > 0 || different < BATCH as u64 / 2, "{different} domains all found room");
    }
}

#[test]
fn a_request_for_a_domain_takes_the_place_of_its_own_ranges_only() {
    let mut state = state();
    assert!(state.stage(&[page(1, 1, true), page(2, 2, false), page(1, 3, true)]));
    assert!(state.stage(&[whole(1)]));
    assert_eq!(state.staged[..], [page(2, 2, false), whole(1)]);
    // And makes a range of it superfluous from then on.
    assert!(state.stage(&[page(1, 4, false)]));
    assert_eq!(state.staged.len(), 2);
}

#[test]
fn a_full_batch_makes_room_by_asking_for_the_newcomers_domain_alone() {
    let mut state = state();
    let last = BATCH as u16 - 1;
    (0..last).for_each(|domain| assert!(state.stage(&[page(domain, 1, true)])));
    assert!(state.stage(&[page(0, 2, true)]));
    assert!(state.staged.is_full());
    // A stranger finds no room, and leaves none, though its first request would have found some.
    let before = state.staged.clone();
    assert!(!state.stage(&[page(last, 1, true)]));
    assert!(!state.stage(&[whole(last)]));
    assert!(!state.stage(&[page(0, 3, true), page(last, 1, true), page(last + 1, 1, true)]));
    assert_eq!(state.staged, before);
    // Two requests of one domain become one.
    assert!(state.stage(&[page(0, 3, true)]));
    assert!(state.staged.contains(&whole(0)) && state.staged.len() == BATCH - 1);
    assert!((1..last).all(|domain| state.staged.contains(&page(domain, 1, true))));
    assert!(state.stage(&[page(last, 1, true)]));
}

/// What became of a batch, and how many of its waiters have not asked yet.
#[derive(Clone, Copy)]
struct Ended {
    error: Option<InvalidationError>,
    waiting: u64,
}

fn error(number: u64) -> InvalidationError {
    InvalidationError::TimedOut { waited_ns: number }
}

#[test]
fn each_waiter_is_told_of_its_batch_s_failure() {
    for seed in 1..if cfg!(debug_assertions) { 100 } else { 400 } {
        let mut dice = Dice(seed);
        let (mut state, mut batches) = (state(), Vec::<Ended>::new());
        let (waiters, fails) = (1 + dice.below(4), 1 + dice.below(4));
        // As long as no more than so many failures are open, everybody is told exactly what was.
        let mut exact = true;
        for _ in 0..200 {
            let open: Vec<_> = (0..batches.len()).filter(|index| batches[*index].waiting > 0).collect();
            if dice.below(2 + waiters) == 0 || open.is_empty() {
                let number = batches.len() as u64 + 1;
                let waiting = dice.below(waiters + 1);
                let error = (dice.below(4) < fails).then(|| error(number));
                if let Some(error) = error {
                    state.note_failure(number, waiting, error);
                }
                batches.push(Ended { error, waiting });
                let failed = batches.iter().filter(|one| one.error.is_some() && one.waiting > 0).count();
                exact &= failed <= FAILURES;
                continue;
            }
            let index = open[dice.below(open.len() as u64) as usize];
            let told = state.outcome(index as u64 + 1);
            let Ended { error, waiting } = &mut batches[index];
            *waiting -= 1;
            if exact {
                assert_eq!(told.err(), *error);
            } else {
                assert!(told.is_err() || error.is_none(), "a failure that is not told");
            }
        }
        for (index, ended) in batches.iter().enumerate() {
            (0..ended.waiting).for_each(|_| {
                assert!(state.outcome(index as u64 + 1).is_err() || ended.error.is_none());
            });
        }
        assert!(!exact || state.failed.is_empty(), "nobody will ask for {:?} any more", state.failed);
    }
}

#[test]
fn failures_beyond_those_that_are_remembered_one_by_one_are_told_with_the_last() {
    let mut state = state();
    let last = FAILURES as u64 + 3;
    // Every second one fails; the ones in between were all right.
    (1..=last).for_each(|number| state.note_failure(2 * number, 2, error(number)));
    let exact = FAILURES as u64 - 1;
    assert!((1..=exact).all(|number| state.outcome(2 * number) == Err(error(number))));
    assert!((0..exact).all(|number| state.outcome(2 * number + 1) == Ok(())));
    for _ in 0..2 {
        assert!((2 * (exact + 1)..=2 * last).all(|number| state.outcome(number) == Err(error(last))));
    }
    assert_eq!(state.outcome(2 * last + 1), Ok(()));
    // It stands for several, and its waiters cannot be told from those of the good ones: it stays, and says so.
    assert_eq!(state.outcome(2 * last), Err(error(last)));
    assert_eq!(vec![state.failed.len()], [FAILURES]);
}

/// Remembers what it was asked, and panics if told to.
struct Told {
    submission_ns: u32,
    panics: AtomicBool,
    log: Mutex<Vec<Vec<Request>>>,
}

impl Told {
    fn queue(submission_ns: u32) -> SharedQueue<Self> {
        SharedQueue::new(Self { submission_ns, panics: AtomicBool::new(false), log: Mutex::new(Vec::new()) })
    }

    fn take(&self) -> Vec<Vec<Request>> {
        core::mem::take(&mut self.log.lock())
    }
}

// SAFETY: there is no hardware behind it.
unsafe impl InvalidationQueue for Told {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.log.lock().push(requests.to_vec());
        assert!(!self.panics.load(Ordering::Relaxed), "a driver's bug");
        if requests.contains(&whole(666)) { Err(error(666)) } else { Ok(()) }
    }

    fn costs(&self) -> Costs {
        Costs { submission_ns: self.submission_ns, ..Costs::BARE_METAL }
    }
}

#[test]
fn what_asks_a_device_is_in_no_batch() {
    let queue = Told::queue(1000);
    let device = |number| Invalidation::DeviceTlb { device: crate::addr::DeviceId(number), range: None };
    let devices = |domain, number| Request { domain: DomainId(domain), invalidation: device(number) };
    let requests = [page(1, 1, true), whole(1), page(1, 2, true), devices(1, 7)];
    assert_eq!(queue.submit(&requests), Ok(()));
    assert_eq!(queue.submit(&[devices(1, 8)]), Ok(()));
    assert_eq!(queue.queue().take(), [requests.to_vec(), vec![devices(1, 8)]], "as it was, in its order");
    // What asks none is.
    assert_eq!(queue.submit(&requests[..3]), Ok(()));
    assert_eq!(queue.queue().take(), [[whole(1)]]);
    assert_eq!(queue.submissions(), 3);
}

#[test]
fn what_costs_next_to_nothing_is_not_shared() {
    let requests = [whole(1), page(1, 1, true)];
    for (submission_ns, shared) in [(SHARED_FROM_NS - 1, false), (SHARED_FROM_NS, true)] {
        let queue = Told::queue(submission_ns);
        assert_eq!(queue.submit(&requests), Ok(()));
        assert_eq!(queue.queue().take(), [requests[..if shared { 1 } else { 2 }].to_vec()]);
    }
}

#[test]
fn more_domains_than_a_batch_holds_are_all_asked_for_and_a_failure_of_any_is_told() {
    for bad in [None, Some(0), Some(2 * BATCH)] {
        let queue = Told::queue(1000);
        let mut requests: Vec<_> = (0..=2 * BATCH).map(|number| page(number as u16, 1, true)).collect();
        if let Some(bad) = bad {
            requests[bad] = whole(666);
        }
        assert_eq!(queue.submit(&requests).err(), bad.map(|_| error(666)));
        let log = queue.queue().take();
        assert_eq!(queue.submissions(), log.len() as u64);
        assert!(bad.is_some() || log.concat() == requests);
    }
}

/// A queue that panics says nothing to the leader, who goes on unwinding; to all others of the batch, that it was abandoned.
#[test]
fn who_leads_a_batch_that_panics_does_not_ask_and_all_others_do() {
    let abandoned = Err(InvalidationError::Abandoned);
    let panics = |queue: &SharedQueue<Told>, call: &dyn Fn() -> bool| {
        queue.queue().panics.store(true, Ordering::Relaxed);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err());
        queue.queue().panics.store(false, Ordering::Relaxed);
    };
    let queue = Told::queue(1000);
    panics(&queue, &|| queue.submit(&[page(1, 1, true)]).is_ok());
    assert!(queue.state.lock().failed.is_empty(), "nobody is left to ask");
    // The leader is one of three.
    (0..2).for_each(|number| assert_eq!(queue.stage(&[page(number, 1, true)]), (Some(2), 2)));
    panics(&queue, &|| queue.submit(&[page(2, 1, true)]).is_ok());
    assert_eq!([(); 3].map(|()| queue.state.lock().outcome(2)), [abandoned, abandoned, Ok(())]);
    // The leader found no room in it.
    (0..BATCH as u16).for_each(|number| assert_eq!(queue.stage(&[page(number, 1, true)]), (Some(3), 3)));
    panics(&queue, &|| queue.submit(&[page(BATCH as u16, 1, true)]).is_ok());
    (0..BATCH).for_each(|_| assert_eq!(queue.state.lock().outcome(3), abandoned));
    assert_eq!(queue.state.lock().outcome(3), Ok(()));
    assert_eq!(queue.submit(&[page(1, 1, true)]), Ok(()));
}
