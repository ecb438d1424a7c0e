//! A batch against a plain list of its requests; who gets which result; queues that fail and panic.

use alloc::vec;
use alloc::vec::Vec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::Scope;

use core::cell::Cell;

use super::super::batch::Batch;
use super::super::{SHARED_FROM_NS, SharedQueue};
use super::*;
use crate::addr::{DomainId, Iova, IovaRange};
use crate::dice::Dice;
use crate::invalidation::{Costs, InvalidationQueue};
use crate::sync::Mutex;

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

/// Whether carrying out `batch` does what was `asked`.
fn covers(batch: &[Request], asked: &Request) -> bool {
    batch.contains(asked) || batch.contains(&whole(asked.domain.0))
}

fn domains(requests: &[Request]) -> usize {
    let mut domains: Vec<_> = requests.iter().map(|request| request.domain).collect();
    domains.sort();
    domains.dedup();
    domains.len()
}

#[test]
fn a_batch_covers_all_that_was_added_to_it_and_names_nobody_else() {
    // Few domains fill batches with ranges; many fill them up for other domains.
    for (seed, different) in [(1, 1), (2, 3), (3, 20), (4, BATCH as u64 - 1), (5, BATCH as u64 + 30)] {
        let mut dice = Dice(seed);
        let mut refused = 0;
        for _ in 0..if cfg!(debug_assertions) { 10 } else { 40 } {
            let (mut batch, mut asked) = (Batch::default(), Vec::<Request>::new());
            let is_named =
                |requests: &[Request], one: &Request| requests.iter().any(|other| other.domain == one.domain);
            for _ in 0..dice.below(3 * BATCH as u64) {
                let most = if dice.below(4) == 0 { 40 } else { 3 };
                let requests: Vec<_> = (0..dice.below(most)).map(|_| random(&mut dice, different)).collect();
                let before = batch.requests().to_vec();
                if batch.add_all(&requests) {
                    asked.extend(requests);
                } else {
                    refused += 1;
                    assert_eq!(batch.requests(), before, "all of them or none");
                    let fit = requests.iter().all(|request| is_named(&before, request));
                    assert!(!fit, "a whole domain takes no more room than a part of it");
                }
                assert!(asked.iter().all(|request| covers(batch.requests(), request)));
                assert!(
                    batch.requests().iter().all(|request| is_named(&asked, request)),
                    "nobody asked for it"
                );
            }
            assert_eq!(domains(batch.requests()), domains(&asked));
        }
        assert!(refused > 0 || different < BATCH as u64 / 2, "{different} domains all found room");
    }
}

#[test]
fn a_request_for_a_domain_takes_the_place_of_its_own_ranges_only() {
    let mut batch = Batch::default();
    assert!(batch.add_all(&[page(1, 1, true), page(2, 2, false), page(1, 3, true)]));
    assert!(batch.add_all(&[whole(1)]));
    assert_eq!(batch.requests(), [page(2, 2, false), whole(1)]);
    // It also makes later ranges of its domain superfluous.
    assert!(batch.add_all(&[page(1, 4, false)]));
    assert_eq!(batch.requests().len(), 2);
}

#[test]
fn a_full_batch_makes_room_by_asking_for_the_newcomers_domain_alone() {
    let mut batch = Batch::default();
    let last = BATCH as u16 - 1;
    (0..last).for_each(|domain| assert!(batch.add_all(&[page(domain, 1, true)])));
    assert!(batch.add_all(&[page(0, 2, true)]));
    assert_eq!(batch.requests().len(), BATCH);
    // A further domain finds no room, and takes none, though its first request alone would have found some.
    let before = batch.requests().to_vec();
    assert!(!batch.add_all(&[page(last, 1, true)]));
    assert!(!batch.add_all(&[whole(last)]));
    assert!(!batch.add_all(&[page(0, 3, true), page(last, 1, true), page(last + 1, 1, true)]));
    assert_eq!(batch.requests(), before);
    // A refused call leaves nothing behind: no request for a whole domain.
    assert!(batch.add_all(&[page(0, 3, true)]));
    assert!(batch.requests().contains(&whole(0)) && batch.requests().len() == BATCH - 1);
    assert!((1..last).all(|domain| batch.requests().contains(&page(domain, 1, true))));
    assert!(batch.add_all(&[page(last, 1, true)]));
}

fn error(number: u64) -> InvalidationError {
    InvalidationError::TimedOut { waited_ns: number }
}

std::thread_local! {
    static CPU: Cell<Option<usize>> = const { Cell::new(Some(0)) };
}

/// Records its requests, fails for domain 666, panics for 667, and stays in a submission with 668 until it may go on.
struct Told {
    submission_ns: u32,
    log: Mutex<Vec<Vec<Request>>>,
    may_go_on: AtomicBool,
}

impl Told {
    fn queue(submission_ns: u32) -> SharedQueue<Self> {
        let (log, may_go_on) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        SharedQueue::with_cores(Self { submission_ns, log, may_go_on }, || CPU.get(), 64)
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
        while requests.contains(&whole(668)) && !self.may_go_on.load(Ordering::Acquire) {
            pause();
        }
        assert!(!requests.contains(&whole(667)), "a driver's bug");
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
    // The same without the device-TLB invalidation is in a batch.
    assert_eq!(together(&queue, &[(1, requests[..3].to_vec())]), [Some(Ok(())); 2]);
    assert_eq!(queue.queue().take(), [[whole(668)], [whole(1)]]);
}

#[test]
fn what_costs_next_to_nothing_is_not_shared() {
    for (submission_ns, shared) in [(SHARED_FROM_NS - 1, false), (SHARED_FROM_NS, true)] {
        let queue = Told::queue(submission_ns);
        assert_eq!(queue.waits.fixed.0.levels.is_some(), shared);
        assert_eq!(queue.submit(&[whole(1), page(1, 1, true)]), Ok(()));
        assert_eq!(queue.queue().take(), [[whole(1), page(1, 1, true)]], "as it was: it is alone");
    }
}

#[test]
fn more_than_a_batch_holds_goes_by_itself_and_its_failure_is_told() {
    for bad in [None, Some(0), Some(2 * BATCH)] {
        let queue = Told::queue(1000);
        let mut requests: Vec<_> = (0..=2 * BATCH).map(|number| page(number as u16, 1, true)).collect();
        if let Some(bad) = bad {
            requests[bad] = whole(666);
        }
        assert_eq!(queue.submit(&requests).err(), bad.map(|_| error(666)));
        assert_eq!(queue.queue().take(), vec![requests]);
    }
}

/// A leader lingers for callers of the last rounds: half as long after each wait in vain, and for as long as it may in every eighth round.
#[test]
fn a_leader_lingers_less_after_waits_in_vain_and_tries_again_once_in_some_rounds() {
    let queue = Told::queue(1000);
    CPU.set(Some(0));
    let group = &queue.waits.fixed.0.levels.as_ref().unwrap().groups[0];
    let lingers: Vec<_> = (0..=2 * PROBE)
        .map(|_| {
            // Another caller was in the last round, and does not come again.
            group.expect(0b11);
            assert_eq!(queue.submit(&[whole(1)]), Ok(()));
            group.linger()
        })
        .collect();
    let halves = [LINGER / 2, LINGER / 4, LINGER / 8, LINGER / 16, 0, 0, 0, 0];
    assert_eq!(lingers, [&halves[..], &halves, &halves[..1]].concat());
    // All callers of the last round are in this one: so it pays.
    group.expect(0b1);
    assert_eq!(queue.submit(&[whole(1)]), Ok(()));
    assert_eq!((group.linger(), group.state().had_several()), (LINGER, false));
}

/// If not all fit, callers are served in turn: the first slot that was left out leads next, and collects the slots after it first.
#[test]
fn what_was_left_goes_before_what_came_later() {
    let group = Group::new().unwrap();
    // Two of these fit into a batch.
    let half: Vec<_> = (0..BATCH as u16 / 2).map(whole).collect();
    let other =
        |number: u16| half.iter().map(move |request| whole(request.domain.0 + 1000 * number)).collect();
    let asked: [Vec<_>; 5] = [1, 2, 3, 4, 5].map(other);
    let hold = |number: usize| Waiter::new(&group, number).unwrap();
    let round = |waiter: &Waiter<'_>| {
        assert!(group.state().may_lead(waiter.number));
        let mut leader = waiter.try_lead().unwrap();
        leader.begin();
        leader.collect_more();
        leader.finish(Ok(()), false)
    };
    let is_there = |waiter: &Waiter<'_>| waiter.answer().is_some();
    hold(1).publish(&asked[1], |first| {
        hold(2).publish(&asked[2], |second| {
            hold(3).publish(&asked[3], |third| {
                hold(4).publish(&asked[4], |fourth| {
                    assert_eq!(round(first), 2);
                    assert_eq!([first, second, third, fourth].map(is_there), [true, true, false, false]);
                    // The answers say who leads next, and that there were two.
                    assert_eq!(first.last(), group.state());
                    assert_eq!(second.last(), group.state());
                    assert!(first.last().may_lead(third.number) && first.last().had_several());
                    // A caller with a lower number comes late, as one does that was just answered.
                    hold(0).publish(&asked[0], |late| {
                        assert!(!group.state().may_lead(late.number));
                        assert_eq!(round(third), 2);
                        assert_eq!([third, fourth, late].map(is_there), [true, true, false]);
                        assert_eq!(round(late), 1);
                        assert!(!late.last().had_several() && third.last().had_several());
                    });
                });
            });
        });
    });
}

fn pending(queue: &SharedQueue<Told>) -> u32 {
    let levels = queue.waits.fixed.0.levels.as_ref().unwrap();
    levels.groups.iter().map(Group::pending).sum()
}

/// Lets `others` ask, each as a CPU, in this order, while a submission of `first` is in flight. Returns the result of each call, `first`'s
/// first: `None` for one that panicked.
fn together(
    queue: &SharedQueue<Told>,
    others: &[(usize, Vec<Request>)],
) -> Vec<Option<Result<(), InvalidationError>>> {
    queue.queue().may_go_on.store(false, Ordering::Relaxed);
    let call = |cpu: usize, requests: &[Request]| {
        CPU.set(Some(cpu));
        catch_unwind(AssertUnwindSafe(|| queue.submit(requests))).ok()
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| call(0, &[whole(668)]));
        let is_in_it = || queue.queue().log.lock().last().is_some_and(|last| *last == [whole(668)]);
        while !is_in_it() {
            pause();
        }
        let (mut calls, before) = (vec![first], pending(queue));
        for (number, (cpu, requests)) in others.iter().enumerate() {
            calls.push(scope.spawn(move || call(*cpu, requests)));
            while pending(queue) <= before + number as u32 {
                pause();
            }
            // The first caller of a group leads it, before others come.
            while !queue.waits.fixed.0.levels.as_ref().unwrap().groups[cpu / SLOTS].has_leader() {
                pause();
            }
        }
        queue.queue().may_go_on.store(true, Ordering::Release);
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn beside<'env>(queue: &'env SharedQueue<Told>, f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>)) {
    queue.queue().may_go_on.store(false, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| queue.submit(&[whole(668)]).unwrap());
        while queue.queue().log.lock().is_empty() {
            pause();
        }
        f(scope);
        queue.queue().may_go_on.store(true, Ordering::Release);
    });
}

fn near<const N: usize>(requests: [Vec<Request>; N]) -> [(usize, Vec<Request>); N] {
    let mut cpu = 0;
    requests.map(|requests| {
        cpu += 1;
        (cpu, requests)
    })
}

fn asked(others: &[(usize, Vec<Request>)]) -> Vec<Request> {
    others.iter().flat_map(|other| other.1.clone()).collect()
}

#[test]
fn callers_that_come_while_hardware_works_share_the_next_submission() {
    let one = [vec![page(1, 1, true)], vec![page(2, 1, true), page(2, 2, true)], vec![], vec![whole(1)]];
    let mut two = near(one.clone());
    // CPUs of other groups, whose leaders share a wait.
    (two[1].0, two[3].0) = (SLOTS, 3 * SLOTS + 1);
    for others in [near(one), two] {
        let queue = Told::queue(1000);
        assert_eq!(together(&queue, &others), [Some(Ok(())); 5]);
        let log = queue.queue().take();
        assert_eq!(log[0], [whole(668)]);
        assert!(log.len() <= 1 + others.iter().map(|other| other.0 / SLOTS).max().unwrap().max(1), "{log:?}");
        let all = log[1..].concat();
        assert!(asked(&others).iter().all(|asked| covers(&all, asked)));
        assert_eq!(domains(&all), 2);
    }
}

#[test]
fn each_caller_is_told_of_its_own_submission() {
    // More domains than fit: two submissions for callers that came together.
    let most = BATCH as u16;
    for (bad, groups) in (0..3).flat_map(|bad| [(bad, 1), (bad, 3)]) {
        let queue = Told::queue(1000);
        let few = |from: u16| (from..from + most / 2).map(|domain| page(domain, 1, true)).collect();
        let mut others = near([few(0), few(most), few(2 * most)]);
        others[bad].1[0] = whole(666);
        others.iter_mut().enumerate().for_each(|(at, other)| other.0 += SLOTS * (at % groups));
        let told = together(&queue, &others);
        let log = queue.queue().take();
        assert!(log.len() == 3 || groups > 1 && log.len() == 4, "{}", log.len());
        assert_eq!(told[0], Some(Ok(())));
        for ((_, asked), told) in others.iter().zip(&told[1..]) {
            let mine: Vec<_> = log.iter().filter(|batch| batch.contains(&asked[1])).collect();
            assert_eq!(mine.len(), 1);
            assert!(asked.iter().all(|request| mine[0].contains(request)));
            let fails = mine[0].contains(&whole(666));
            assert_eq!(*told, Some(if fails { Err(error(666)) } else { Ok(()) }));
        }
    }
}

/// Ranges of one domain that do not fit into one submission are not read: the whole domain is invalidated.
#[test]
fn groups_that_ask_for_much_of_a_domain_ask_for_it_as_a_whole() {
    let queue = Told::queue(1000);
    let most = BATCH as u64;
    let few = |domain, from: u64| (from..from + most / 2).map(|number| page(domain, number, true)).collect();
    let others = near([few(1, 0), few(1, most), few(1, 2 * most), vec![page(2, 1, true)]]);
    assert_eq!(together(&queue, &others), [Some(Ok(())); 5]);
    let log = queue.queue().take();
    assert_eq!((log.len(), domains(&log[1])), (2, 2));
    assert!(asked(&others).iter().all(|asked| covers(&log[1], asked)));
}

#[test]
fn a_queue_that_panics_says_nothing_to_the_leader_and_to_the_others_that_it_was_abandoned() {
    let abandoned = Some(Err(InvalidationError::Abandoned));
    let others = near([vec![page(1, 1, true)], vec![whole(667)], vec![page(2, 1, true)]]);
    let queue = Told::queue(1000);
    // The first one leads.
    assert_eq!(together(&queue, &others), [Some(Ok(())), None, abandoned, abandoned]);
    // The caller that was left out leads next.
    let full: Vec<_> = (0..BATCH as u16).map(|domain| page(domain, 1, true)).collect();
    let told = together(&queue, &near([full, vec![whole(667)]]));
    assert_eq!(told, [Some(Ok(())), Some(Ok(())), None]);
    assert!(catch_unwind(AssertUnwindSafe(|| queue.submit(&[whole(667)]))).is_err());
    assert_eq!(queue.submit(&[page(1, 1, true)]), Ok(()));
    let levels = queue.waits.fixed.0.levels.as_ref().unwrap();
    assert!(pending(&queue) == 0 && levels.top.pending() == 0 && !levels.top.has_leader(), "nobody is left");
}

/// It would wait for ever for the caller that it has interrupted.
#[test]
fn an_interrupt_handler_waits_for_nobody() {
    let queue = &Told::queue(1000);
    beside(queue, |_| {
        CPU.set(None);
        assert_eq!(queue.submit(&[page(1, 1, true)]), Ok(()));
        assert_eq!(queue.submit(&[whole(666)]), Err(error(666)));
        assert_eq!(queue.queue().take().len(), 3, "the first is in flight");
    });
    CPU.set(Some(0));
    assert_eq!(queue.queue().take().len(), 0);
}

/// More callers than a group has slots: those without one submit alone.
#[test]
fn who_finds_no_room_submits_alone() {
    let queue = &Told::queue(1000);
    beside(queue, |scope| {
        for _ in 0..SLOTS {
            scope.spawn(|| queue.submit(&[page(1, 1, true)]).unwrap());
        }
        while pending(queue) < SLOTS as u32 {
            pause();
        }
        assert_eq!(queue.submit(&[whole(2)]), Ok(()), "while the first is in flight");
        assert_eq!(queue.queue().take(), [[whole(668)], [whole(2)]]);
    });
    assert_eq!(pending(queue), 0);
}

/// If there are more callers than cores, the first that runs leads.
#[test]
fn the_first_caller_that_runs_leads_if_not_all_have_a_core() {
    let mut queue = Told::queue(1000);
    queue.waits.fixed.0.cores = 0;
    let others: Vec<_> = (0..6).map(|domain| (domain + 1, vec![page(domain as u16, 1, true)])).collect();
    for _ in 0..if cfg!(miri) { 3 } else { 50 } {
        assert_eq!(together(&queue, &others), [Some(Ok(())); 7]);
    }
    assert!(queue.waits.oversubscribed.0.load(Ordering::Relaxed));
    queue.waits.fixed.0.cores = 100;
    assert_eq!(queue.submit(&[whole(1)]), Ok(()));
    assert!(!queue.waits.oversubscribed.0.load(Ordering::Relaxed));
}

/// Callers of two groups that overlap take slots for some rounds, and submit without again when one has left.
#[test]
fn a_group_is_contended_while_others_submit_and_not_for_long_after() {
    let queue = Told::queue(1000);
    let levels = queue.waits.fixed.0.levels.as_ref().unwrap();
    let are_uncontended = || (levels.top.is_uncontended(), levels.groups[1].is_uncontended());
    assert_eq!(are_uncontended(), (true, true));
    assert_eq!(together(&queue, &[(SLOTS, vec![whole(1)])]), [Some(Ok(())); 2]);
    assert_eq!(are_uncontended(), (false, false), "its leader has seen the first one's submission");
    CPU.set(Some(SLOTS));
    let rounds =
        (0..8).take_while(|_| are_uncontended() != (true, true)).map(|_| queue.submit(&[whole(1)]).unwrap());
    assert!((1..=4).contains(&rounds.count()));
    // Without a slot nobody leads.
    let rounds = || (levels.top.rounds(), levels.groups[1].rounds());
    let before = rounds();
    assert_eq!(queue.submit(&[whole(1)]), Ok(()));
    assert_eq!(rounds(), before);
    // If others are expected, both groups have a leader.
    levels.top.mark_contended();
    assert_eq!(queue.submit(&[whole(1)]), Ok(()));
    assert_eq!(rounds(), (before.0 + 1, before.1 + 1));
}

/// Others see each kind of submission in flight: of a caller without a slot, of a group's leader, and of the leaders' group.
#[test]
fn each_submission_says_that_it_is_in_flight() {
    let waits = SharedWaits::new(64);
    let levels = waits.fixed.0.levels.as_ref().unwrap();
    for (group, top) in [(1, 1), (0b11, 1), (0b11, 0b11)] {
        let seen = Cell::new(false);
        if group > 1 {
            levels.groups[0].expect(group);
        }
        if top > 1 {
            levels.top.expect(top);
        }
        let told = waits.submit(
            &[whole(1)],
            || Some(0),
            |_| {
                seen.set(levels.in_flight.now().is_some());
                Ok(())
            },
        );
        assert!(told.is_ok() && seen.get(), "{group:b} {top:b}");
        assert_eq!(levels.in_flight.now(), None);
    }
}

/// After a submission that overlapped with another one, callers take slots.
#[test]
fn a_submission_that_overlaps_marks_the_groups_contended() {
    let waits = SharedWaits::new(64);
    let levels = waits.fixed.0.levels.as_ref().unwrap();
    let told = waits.submit(
        &[whole(1)],
        || Some(0),
        |_| {
            drop(levels.in_flight.begin());
            Ok(())
        },
    );
    assert!(told.is_ok() && !levels.top.is_uncontended());
}

/// One that unwinds while it waits has its request answered first: a leader reads it until then.
#[test]
fn a_caller_that_unwinds_waits_for_its_answer() {
    let group = Group::new().unwrap();
    let asked = [page(1, 1, true), page(2, 1, true)];
    let waiter = Waiter::new(&group, 1).unwrap();
    let told = catch_unwind(AssertUnwindSafe(|| waiter.publish(&asked, |_| -> () { panic!("a bug") })));
    assert!(told.is_err() && group.pending() == 0 && !group.has_leader());
    // Another leader has collected it.
    let (has_panicked, is_answered) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        Waiter::new(&group, 1).unwrap().publish(&asked[..1], |first| {
            let mut leader = first.try_lead().unwrap();
            let other = Waiter::new(&group, 2).unwrap();
            scope.spawn(|| {
                let call = || {
                    other.publish(&asked, |_| -> () {
                        has_panicked.store(true, Ordering::Release);
                        panic!("a bug")
                    })
                };
                assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
                assert!(is_answered.load(Ordering::Acquire));
            });
            while !has_panicked.load(Ordering::Acquire) {
                pause();
            }
            leader.begin();
            assert!(leader.collect_more());
            is_answered.store(true, Ordering::Release);
            assert_eq!(leader.finish(Ok(()), false), 2);
        });
    });
    assert!(group.pending() == 0 && !group.has_leader());
}
