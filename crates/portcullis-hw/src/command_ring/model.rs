//! CPUs that reserve, publish and ring concurrently.

use alloc::sync::Arc;
use loom::sync::atomic::AtomicU64 as Word;
use loom::thread;

use super::*;

/// A unit that reads all commands in the doorbell.
struct Unit {
    /// Commands of the ring.
    size: u64,
    commands: [Word; 4],
    seen: Word,
    head: Word,
}

impl Doorbell for Unit {
    fn ring(&self, tail: u32) {
        let mut at = self.head.load(Ordering::Relaxed);
        while at != u64::from(tail) {
            // The command is there, of this lap.
            let command = self.commands[at as usize].load(Ordering::Relaxed);
            assert_ne!(command, 0, "a command that was not written was rung");
            self.commands[at as usize].store(0, Ordering::Relaxed);
            self.seen.store(self.seen.load(Ordering::Relaxed) + command, Ordering::Relaxed);
            at = (at + 1) % self.size;
        }
        self.head.store(at, Ordering::Relaxed);
    }

    fn head(&self) -> u32 {
        self.head.load(Ordering::Relaxed) as u32
    }
}

fn unit_of(size: u64) -> Unit {
    let word = || Word::new(0);
    Unit { size, commands: [word(), word(), word(), word()], seen: word(), head: word() }
}

/// A unit that executes all commands in the doorbell, and then updates its head.
struct Confirming {
    done: [Word; 2],
    head: Word,
}

impl Doorbell for Confirming {
    fn ring(&self, tail: u32) {
        for place in self.head.load(Ordering::Relaxed)..u64::from(tail) {
            self.done[place as usize].store(1, Ordering::Relaxed);
        }
        // Like a register: after the effects of the commands.
        self.head.store(u64::from(tail), Ordering::Release);
    }

    fn head(&self) -> u32 {
        self.head.load(Ordering::Acquire) as u32
    }
}

/// A stopped unit, which misses doorbells.
struct Stopped {
    runs: Word,
    tail: Word,
}

impl Doorbell for Stopped {
    fn ring(&self, tail: u32) {
        if self.runs.load(Ordering::Acquire) != 0 {
            self.tail.store(u64::from(tail), Ordering::Relaxed);
        }
    }

    fn head(&self) -> u32 {
        0
    }
}

/// One CPU submits while another resumes the unit: one of the two then tells the unit of the command, and neither waits for the other.
#[test]
fn a_unit_that_goes_on_is_told_again_whichever_cpu_rings() {
    loom::model(|| {
        let unit = Stopped { runs: Word::new(0), tail: Word::new(0) };
        let shared = Arc::new((CommandRing::new(4).unwrap(), unit));
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            let (ring, unit) = &*other;
            let first = ring.reserve(1, unit, || true).unwrap();
            ring.publish(first, 1, unit);
        });
        let (ring, unit) = &*shared;
        unit.runs.store(1, Ordering::Release);
        ring.ring_again(unit);
        thread.join().unwrap();
        assert_eq!(unit.tail.load(Ordering::Relaxed), 1);
    });
}

/// A CPU that learns that its command was consumed sees its effects, whichever CPU read the head.
#[test]
fn what_was_consumed_was_carried_out() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let words = || Word::new(0);
        let unit = Confirming { done: [words(), words()], head: words() };
        let shared = Arc::new((CommandRing::with_wrap_bit(2).unwrap(), unit));
        let submit = |shared: &(CommandRing, Confirming)| {
            let (ring, unit) = shared;
            let place = ring.reserve(1, unit, || true).unwrap();
            ring.publish(place, 1, unit);
            // The unit may not know of it yet, because another CPU rings.
            if ring.has_consumed(place, unit) {
                assert_eq!(unit.done[place as usize].load(Ordering::Relaxed), 1);
            }
        };
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || submit(&other));
        submit(&shared);
        thread.join().unwrap();
        let (ring, unit) = &*shared;
        assert!(ring.has_consumed(1, unit), "both were rung");
    });
}

/// Two CPUs submit to a ring of one command: one that finds it full comes first, until it has its place.
#[test]
fn a_cpu_that_waits_for_room_gets_it_and_lets_others_in() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let unit = unit_of(2);
        let shared = Arc::new((CommandRing::new(2).unwrap(), unit));
        let submit = |shared: &(CommandRing, Unit), value| {
            let (ring, unit) = shared;
            let waits = || {
                thread::yield_now();
                true
            };
            let first = ring.reserve(1, unit, waits).unwrap();
            unit.commands[ring.index(first)].store(value, Ordering::Relaxed);
            ring.publish(first, 1, unit);
        };
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || submit(&other, 1));
        submit(&shared, 10);
        thread.join().unwrap();
        let (ring, unit) = &*shared;
        assert_eq!(unit.seen.load(Ordering::Relaxed), 11);
        assert!(!ring.waiting.load(Ordering::Relaxed), "nobody waits");
    });
}

/// Two CPUs submit two commands each: all are rung, each once, and complete.
#[test]
fn no_doorbell_is_lost_and_none_is_early() {
    loom::model(|| {
        let unit = unit_of(4);
        let shared = Arc::new((CommandRing::new(4).unwrap(), unit));
        let submit = |shared: &(CommandRing, Unit), value| {
            let (ring, unit) = shared;
            let first = ring.reserve(1, unit, || true).unwrap();
            unit.commands[ring.index(first)].store(value, Ordering::Relaxed);
            ring.publish(first, 1, unit);
        };
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            submit(&other, 1);
            submit(&other, 10);
        });
        submit(&shared, 100);
        thread.join().unwrap();
        assert_eq!(shared.1.seen.load(Ordering::Relaxed), 111);
    });
}
