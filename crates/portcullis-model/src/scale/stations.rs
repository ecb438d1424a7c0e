//! Contended resources: shared state, the invalidation queue, memory, and the devices.

use std::collections::VecDeque;

/// Customers that are all served at once, each at a rate that depends on their number.
///
/// For operations of the library it is their flow-equivalent server (Chandy, Herzog and Woo, 1975): the rate that was measured with this
/// number of CPUs that do nothing else.
#[derive(Debug)]
pub(super) struct Sharing {
    /// Nanoseconds for each unit of work, by the number of customers.
    ns: Vec<f64>,
    /// The work that each present customer has got so far, and the time of that.
    given: f64,
    at: f64,
    /// Customers, and the value of `given` at their completion, in order.
    customers: VecDeque<(f64, usize)>,
}

impl Sharing {
    pub(super) fn new(ns: Vec<f64>) -> Self {
        Self { ns, given: 0.0, at: 0.0, customers: VecDeque::new() }
    }

    fn unit_ns(&self) -> f64 {
        let last = self.ns.len().saturating_sub(1);
        self.ns.get(self.customers.len().min(last)).copied().unwrap_or(0.0).max(1e-6)
    }

    fn advance(&mut self, now: f64) {
        if !self.customers.is_empty() {
            self.given += (now - self.at).max(0.0) / self.unit_ns();
        }
        self.at = now;
    }

    pub(super) fn enter(&mut self, now: f64, customer: usize, units: f64) {
        self.advance(now);
        let until = self.given + units;
        let place = self.customers.partition_point(|other| other.0 <= until);
        self.customers.insert(place, (until, customer));
    }

    /// The next completion, if no customer comes before.
    pub(super) fn next(&self) -> f64 {
        self.customers
            .front()
            .map_or(f64::INFINITY, |first| self.at + (first.0 - self.given).max(0.0) * self.unit_ns())
    }

    pub(super) fn leave(&mut self, now: f64) -> Option<usize> {
        self.advance(now);
        self.customers.pop_front().map(|first| first.1)
    }
}

/// The most requests of one submission.
pub(super) const BATCH: usize = 64;

/// The invalidation queue: customers that come while the hardware works wait for one submission together, as behind a `SharedQueue`, or
/// each for its own.
#[derive(Debug)]
pub(super) struct Commit {
    submission_ns: f64,
    request_ns: f64,
    in_flight: usize,
    /// The most requests of one submission.
    most: usize,
    /// The end of each outstanding submission, and its customers.
    busy: VecDeque<(f64, Vec<usize>)>,
    waiting: VecDeque<usize>,
    /// The hardware's working time.
    pub(super) worked: f64,
}

impl Commit {
    pub(super) fn new(submission_ns: f64, request_ns: f64, in_flight: u32, most: usize) -> Self {
        let in_flight = in_flight.max(1) as usize;
        let (busy, waiting) = (VecDeque::new(), VecDeque::new());
        Self { submission_ns, request_ns, in_flight, most, busy, waiting, worked: 0.0 }
    }

    pub(super) fn enter(&mut self, now: f64, customer: usize) {
        self.waiting.push_back(customer);
        self.submit(now);
    }

    fn submit(&mut self, now: f64) {
        while self.busy.len() < self.in_flight && !self.waiting.is_empty() {
            let count = self.waiting.len().min(self.most);
            let ns = self.submission_ns + self.request_ns * count as f64;
            self.worked += ns;
            let place = self.busy.partition_point(|other| other.0 <= now + ns);
            self.busy.insert(place, (now + ns, self.waiting.drain(..count).collect()));
        }
    }

    pub(super) fn next(&self) -> f64 {
        self.busy.front().map_or(f64::INFINITY, |first| first.0)
    }

    /// The customers of completed submissions.
    pub(super) fn leave(&mut self, now: f64) -> Vec<usize> {
        let done = self.busy.pop_front().map(|first| first.1).unwrap_or_default();
        self.submit(now);
        done
    }
}

/// A device that handles one request after the other.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Serial {
    free_at: f64,
    pub(super) worked: f64,
}

impl Serial {
    /// The completion time of a request that arrives now and takes `ns`.
    pub(super) fn serve(&mut self, now: f64, ns: f64) -> f64 {
        self.worked += ns;
        self.free_at = self.free_at.max(now) + ns;
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn customers_share_what_there_is() {
        // One unit takes 10 alone, and 30 with two customers.
        let mut sharing = Sharing::new(vec![10.0, 10.0, 30.0]);
        sharing.enter(0.0, 7, 2.0);
        assert_eq!(sharing.next(), 20.0);
        // Half of its work is left, and takes three times as long.
        sharing.enter(10.0, 8, 2.0);
        assert_eq!(sharing.next(), 40.0);
        assert_eq!(sharing.leave(40.0), Some(7));
        assert_eq!(sharing.next(), 50.0);
        assert_eq!(sharing.leave(50.0), Some(8));
        assert_eq!((sharing.next(), sharing.leave(50.0)), (f64::INFINITY, None));
        // Of two simultaneous completions the first customer goes first.
        sharing.enter(60.0, 1, 1.0);
        sharing.enter(60.0, 2, 1.0);
        assert_eq!([sharing.leave(90.0), sharing.leave(90.0)], [Some(1), Some(2)]);
    }

    #[test]
    fn a_submission_has_64_requests_at_the_most() {
        let mut commit = Commit::new(100.0, 1.0, 1, BATCH);
        (0..70).for_each(|customer| commit.enter(0.0, customer));
        assert_eq!(commit.leave(101.0), [0]);
        assert_eq!((commit.next(), commit.leave(265.0)), (265.0, (1..65).collect()));
        assert_eq!((commit.next(), commit.leave(370.0)), (370.0, (65..70).collect()));
    }

    #[test]
    fn who_comes_while_hardware_works_is_in_the_next_submission() {
        let mut commit = Commit::new(100.0, 1.0, 1, BATCH);
        commit.enter(0.0, 1);
        commit.enter(10.0, 2);
        commit.enter(50.0, 3);
        assert_eq!((commit.next(), commit.leave(101.0)), (101.0, vec![1]));
        assert_eq!((commit.next(), commit.leave(203.0)), (203.0, vec![2, 3]));
        assert_eq!((commit.next(), commit.worked), (f64::INFINITY, 203.0));
        let mut two = Commit::new(100.0, 0.0, 2, BATCH);
        two.enter(0.0, 1);
        two.enter(10.0, 2);
        assert_eq!((two.leave(100.0), two.next()), (vec![1], 110.0));
    }

    #[test]
    fn a_device_does_one_after_the_other() {
        let mut device = Serial::default();
        assert_eq!(
            [device.serve(0.0, 5.0), device.serve(1.0, 5.0), device.serve(20.0, 5.0)],
            [5.0, 10.0, 25.0]
        );
        assert_eq!(device.worked, 15.0);
    }
}
