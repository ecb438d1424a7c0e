//! Requests reach the unit complete and in order, in however many submissions.

use core::cell::{Cell, RefCell};

use alloc::vec::Vec;

use super::*;
use crate::command_ring::Doorbell;
use crate::fake::{FakeHost, Memory};
use crate::sync::Ordering;

/// A host needs registers: these do nothing.
struct NoRegisters;

impl crate::fake::Unit for NoRegisters {
    fn read(&self, _: usize, _: u32) -> u64 {
        0
    }

    fn write(&self, _: usize, _: u32, _: u64) {}
}

/// A unit that executes all commands in the doorbell.
struct Unit {
    memory: Memory,
    commands: u64,
    /// Its head, and its executed commands.
    done: RefCell<(u32, Vec<Command>)>,
    /// It ignores doorbells. Its answer after a number of error checks; and the checks so far.
    late: Option<u64>,
    tail: Cell<u32>,
    asked: Cell<u64>,
}

/// Other commands have a first word below this.
const WAIT: u64 = 1 << 40;

impl Doorbell for Unit {
    fn ring(&self, tail: u32) {
        self.tail.set(tail);
        if self.late.is_none() {
            self.run();
        }
    }

    fn head(&self) -> u32 {
        self.done.borrow().0
    }
}

impl Unit {
    fn run(&self) {
        let tail = self.tail.get();
        let (head, done) = &mut *self.done.borrow_mut();
        while *head != tail {
            let word = |at: u64| {
                self.memory.word(self.commands + u64::from(*head) * 16 + at).load(Ordering::Relaxed)
            };
            let command = [word(0), word(8)];
            if command[0] >= WAIT {
                self.memory.word(command[1]).store(command[0] - WAIT, Ordering::Release);
            }
            done.push(command);
            *head = (*head + 1) % COMMANDS;
        }
    }
}

impl Port for Unit {
    const NOTHING: Command = [0; 2];

    fn wait(number: u32, address: u64) -> Command {
        [WAIT + u64::from(number), address]
    }

    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        self.asked.set(self.asked.get() + 1);
        if self.late.is_some_and(|late| self.asked.get() >= late) {
            self.run();
        }
        None
    }

    fn go_on(&self, _: &Failure) {}
}

fn queue() -> (FakeHost<NoRegisters>, Queue, Unit) {
    let memory = Memory::new(4);
    let host = FakeHost::new(NoRegisters, &memory);
    let queue = Queue::new(&memory).unwrap();
    let commands = queue.address();
    (
        host,
        queue,
        Unit {
            memory,
            commands,
            done: RefCell::default(),
            late: None,
            tail: Cell::new(0),
            asked: Cell::new(0),
        },
    )
}

/// A request is a number of commands.
fn describe(commands: &mut Commands, (count, number): (usize, u64)) -> Result<bool, InvalidationError> {
    if commands.remaining_capacity() < count {
        return Ok(false);
    }
    commands.extend((0..count as u64).map(|at| [number, at]));
    Ok(true)
}

#[test]
fn what_does_not_fit_into_one_submission_goes_in_the_next_and_nothing_twice() {
    let (host, queue, unit) = queue();
    for requests in
        [&[(60, 1), (60, 2), (60, 3), (7, 4)][..], &[(MOST, 5), (MOST, 6), (1, 7)], &[(3, 8)], &[]]
    {
        unit.done.borrow_mut().1.clear();
        assert_eq!(queue.carry_out(&host, &unit, requests.iter().copied(), describe), Ok(()));
        let done = unit.done.borrow();
        let asked: Vec<Command> = done.1.iter().copied().filter(|command| command[0] < WAIT).collect();
        let wanted: Vec<Command> =
            requests.iter().flat_map(|(count, number)| (0..*count as u64).map(|at| [*number, at])).collect();
        assert_eq!(asked, wanted);
        let runs: Vec<usize> = done.1.split(|command| command[0] >= WAIT).map(<[Command]>::len).collect();
        let expected: &[usize] = match requests.len() {
            4 => &[120, 67, 0],
            3 => &[127, 127, 1, 0],
            1 => &[3, 0],
            _ => &[0, 0],
        };
        assert_eq!(runs, expected, "each submission ends with its wait");
    }
    // The queue carries out requests before the one that it cannot describe, and none after it.
    unit.done.borrow_mut().1.clear();
    let too_much = [(2, 1), (MOST + 1, 2), (1, 3)];
    assert_eq!(queue.carry_out(&host, &unit, too_much, describe), Err(REFUSED));
    assert_eq!(unit.done.borrow().1[..2], [[1, 0], [1, 1]]);
    assert_eq!(unit.done.borrow().1.len(), 3);
}

#[test]
fn a_ring_that_is_full_is_waited_for() {
    let (host, queue, mut unit) = queue();
    unit.late = Some(u64::MAX);
    for _ in 0..2 {
        let late = queue.submit(&host, &unit, &[[1, 1]; 100]);
        assert!(matches!(late, Err(InvalidationError::TimedOut { .. })));
    }
    unit.late = Some(unit.asked.get() + 3);
    assert_eq!(queue.submit(&host, &unit, &[[2, 2]; 100]), Ok(()));
    assert_eq!(unit.done.borrow().1.len(), 303);
}

/// As after a panic of the host: reserved places do not keep commands of an earlier lap.
#[test]
fn places_that_are_given_up_ask_for_nothing() {
    let (host, queue, unit) = queue();
    (0..3).for_each(|_| queue.submit(&host, &unit, &[[1, 1]; 100]).unwrap());
    unit.done.borrow_mut().1.clear();
    let (frames, port, count) = (host.frames(), &unit, 3);
    let first = queue.ring.reserve(count, port, || false).unwrap();
    drop(Reserved { queue: &queue, frames, port, first, count });
    assert_eq!(unit.done.borrow().1, [Unit::NOTHING; 3]);
    assert_eq!(queue.submit(&host, &unit, &[[1, 1]]), Ok(()));
}

#[test]
fn where_512_wait_one_more_waits_as_long_as_the_host_has_patience() {
    let (host, queue, unit) = queue();
    let answers = queue.answers.as_ref().unwrap();
    let mut others: Vec<_> = (0..512).map(|hint| answers.claim(hint).unwrap()).collect();
    let before = host.now_ns();
    let Err(InvalidationError::TimedOut { waited_ns }) = queue.submit(&host, &unit, &[[1, 1]]) else {
        panic!("no word is free")
    };
    let patience = host.patience_ns();
    assert!((patience + 1..=patience + 2_000).contains(&waited_ns), "{waited_ns}");
    assert!(host.relaxed() >= 90, "it lets others go on between its looks at the clock");
    assert!(host.now_ns() - before <= patience + 10_000 && unit.done.borrow().1.is_empty());
    others.pop();
    assert_eq!(queue.submit(&host, &unit, &[[1, 1]]), Ok(()));
    assert_eq!(unit.done.borrow().1[0], [1, 1]);
}

/// The CPU may have been interrupted between polling and reading the clock.
#[test]
fn what_is_confirmed_when_patience_ends_is_confirmed() {
    let submitted = |late| {
        let (host, queue, unit) = queue();
        let unit = Unit { late: Some(late), ..unit };
        (queue.submit(&host, &unit, &[[1, 1]]), unit.asked.get())
    };
    let (never, last) = submitted(u64::MAX);
    assert!(matches!(never, Err(InvalidationError::TimedOut { .. })) && last > 1, "{never:?}");
    assert_eq!((submitted(last), submitted(last - 1)), ((Ok(()), last), (Ok(()), last - 1)));
}
