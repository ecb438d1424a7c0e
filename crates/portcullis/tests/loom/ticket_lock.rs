//! Callers of a lock that are served in the order in which they came: one at a time, each, and none before its turn.

use ::loom::cell::UnsafeCell;
use ::loom::thread;
use portcullis::sync::{Served, TicketLock};

/// A lock, and the numbers of those that it has served, whose simultaneous use loom reports.
struct Line {
    lock: TicketLock,
    served: UnsafeCell<Vec<usize>>,
}

// SAFETY: that it is not used by two at once is what the tests check; loom's cell panics if it is.
unsafe impl Sync for Line {}

impl Line {
    /// For threads of one model; it is never freed.
    fn new() -> &'static Self {
        Box::leak(Box::new(Self { lock: TicketLock::default(), served: UnsafeCell::new(Vec::new()) }))
    }

    fn serve(&self, number: usize, _: &Served<'_>) {
        // SAFETY: the pointer is used inside the closure only, and loom watches for others.
        self.served.with_mut(|served| unsafe { (*served).push(number) });
    }

    fn served(&self) -> Vec<usize> {
        let _served = self.lock.lock();
        // SAFETY: as above.
        self.served.with(|served| unsafe { (*served).clone() })
    }
}

fn model(body: fn()) {
    let mut model = ::loom::model::Builder::new();
    model.max_branches = 20_000;
    model.preemption_bound = Some(4);
    model.check(body);
}

#[test]
fn three_are_served_in_the_order_in_which_they_came_and_the_first_again_last() {
    model(|| {
        let line = Line::new();
        let first = line.lock.draw();
        let others = [1, 2].map(|number| {
            let ticket = line.lock.draw();
            thread::spawn(move || line.serve(number, &ticket.wait()))
        });
        let first = first.wait();
        line.serve(0, &first);
        drop(first);
        line.serve(3, &line.lock.lock());
        assert_eq!(line.served(), [0, 1, 2, 3]);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn three_that_come_at_any_time_are_all_served_one_at_a_time() {
    model(|| {
        let line = Line::new();
        let serve = move |number| line.serve(number, &line.lock.lock());
        let others = [1, 2].map(|number| thread::spawn(move || serve(number)));
        serve(0);
        serve(0);
        others.into_iter().for_each(|other| other.join().unwrap());
        let mut served = line.served();
        served.sort_unstable();
        assert_eq!(served, [0, 0, 1, 2]);
    });
}

#[test]
fn one_that_does_not_wait_is_served_alone_or_not_at_all() {
    model(|| {
        let line = Line::new();
        let attempt = move |number| {
            let served = line.lock.try_lock();
            served.inspect(|served| line.serve(number, served)).is_some()
        };
        let other = thread::spawn(move || line.serve(1, &line.lock.lock()));
        let third = thread::spawn(move || attempt(2));
        let mine = attempt(0);
        other.join().unwrap();
        let expected = 1 + usize::from(mine) + usize::from(third.join().unwrap());
        assert_eq!(line.served().len(), expected);
        assert!(attempt(3), "nobody is there");
    });
}

#[test]
fn a_ticket_that_is_thrown_away_keeps_its_place_and_stops_nobody() {
    model(|| {
        let line = Line::new();
        let first = line.lock.draw().wait();
        let thrown = line.lock.draw();
        let last = line.lock.draw();
        let thrower = thread::spawn(move || drop(thrown));
        let other = thread::spawn(move || line.serve(1, &last.wait()));
        line.serve(0, &first);
        drop(first);
        thrower.join().unwrap();
        other.join().unwrap();
        assert_eq!(line.served(), [0, 1]);
    });
}
