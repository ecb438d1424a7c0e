//! Model-checked: one CPU handles a stop while the unit resumes by itself and another CPU submits a command.

use alloc::sync::Arc;
use loom::sync::atomic::AtomicU64 as Word;
use loom::thread;

use super::*;

/// A unit that is off, or stopped, until it resumes by itself. It then executes published commands.
struct Unit {
    runs: Word,
    head: Word,
    tail: Word,
    modulus: u64,
    /// For each index, a bit that no other command has; 0 is the no-op.
    commands: [Word; 4],
    /// Executed commands.
    done: Word,
}

impl Unit {
    fn new(modulus: u64) -> Self {
        let word = || Word::new(0);
        let commands = [word(), word(), word(), word()];
        Self { runs: word(), head: word(), tail: word(), modulus, commands, done: word() }
    }

    /// Resumes, and executes all published commands. One caller at a time.
    fn go(&self, size: u64) {
        self.runs.store(1, Ordering::Release);
        let tail = self.tail.load(Ordering::Acquire);
        let mut head = self.head.load(Ordering::Relaxed);
        while head != tail {
            let command = self.commands[(head % size) as usize].load(Ordering::Acquire);
            self.done.store(self.done.load(Ordering::Relaxed) | command, Ordering::Relaxed);
            head = (head + 1) % self.modulus;
            self.head.store(head, Ordering::Release);
        }
    }
}

impl Doorbell for Unit {
    fn ring(&self, tail: u32) {
        self.tail.store(tail.into(), Ordering::Release);
    }

    fn head(&self) -> u32 {
        self.head.load(Ordering::Acquire) as u32
    }
}

impl Port for Unit {
    const NOTHING: Command = [0; 2];

    fn wait(_: u32, _: u64) -> Command {
        [0; 2]
    }

    /// Two reads; it may resume between them.
    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        (self.runs.load(Ordering::Acquire) == 0).then(|| Failure {
            error: Some(InvalidationError::Abandoned),
            bad: Some(self.head()),
            drops_waits: false,
            status: 0,
        })
    }

    fn go_on(&self, _: &Failure) {}
}

struct Shared {
    failures: Failures,
    ring: CommandRing,
    unit: Unit,
}

impl Shared {
    /// A ring with one command, and a unit that has not run yet.
    fn new(ring: CommandRing, modulus: u64) -> Arc<Self> {
        let shared = Self { failures: Failures::new(), ring, unit: Unit::new(modulus) };
        assert!(shared.submit(1, 1));
        Arc::new(shared)
    }

    fn submit(&self, first_command: u64, count: u64) -> bool {
        let Some(first) = self.ring.reserve(count, &self.unit, || false) else { return false };
        for (number, place) in (first..first + count).enumerate() {
            self.unit.commands[self.ring.index(place)].store(first_command << number, Ordering::Release);
        }
        self.ring.publish(first, count, &self.unit);
        true
    }

    fn look(&self) {
        self.failures.look(&self.ring, &self.unit, &|_| 0, |index| {
            self.unit.commands[index].store(0, Ordering::Release);
        });
    }
}

/// In any interleaving: what is confirmed without an error was executed.
fn check(shared: &Arc<Shared>, size: u64, count: u64) {
    let (unit, mender) = (Arc::clone(shared), Arc::clone(shared));
    let unit = thread::spawn(move || unit.unit.go(size));
    let mender = thread::spawn(move || mender.look());
    let before = shared.failures.so_far();
    let submitted = shared.submit(2, count);
    unit.join().unwrap();
    mender.join().unwrap();
    shared.unit.go(size);
    let commands = ((1 << count) - 1) << 1;
    let done = shared.unit.done.load(Ordering::Relaxed);
    assert!(!submitted || shared.failures.since(before).is_err() || done & commands == commands, "{done:#b}");
}

/// The unit is being turned on: the other CPU's command is at the index where the looking CPU finds it stopped.
#[test]
fn a_command_that_was_not_there_yet_is_not_replaced() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| check(&Shared::new(CommandRing::new(4).unwrap(), 4), 4, 1));
}

/// The unit resumes by itself, and has consumed the command that is about to be replaced: the other CPU then reserves its place.
#[test]
fn a_place_that_has_another_command_by_now_is_left_alone() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| check(&Shared::new(CommandRing::with_wrap_bit(2).unwrap(), 4), 2, 2));
}
