//! The producers' side of a ring of commands: many CPUs fill it, one unit empties it.
//!
//! A CPU *reserves* places in a row, writes its commands there, and *publishes* them. The doorbell takes one number: all
//! commands below it are complete. So the CPU whose commands come next rings, for its own and for all complete ones that
//! follow. No CPU waits for another's doorbell: one that finds a CPU ringing leaves its commands to that one, which looks
//! again when it has rung. A CPU waits only where the ring is full, and where a CPU before it has reserved and not yet
//! published: then for its own commands' confirmation, which comes later.
//!
//! Where the ring is full, one of the CPUs that find it so comes *first*: no other reserves anything
//! until that one has its places. So a submission of many commands waits for those that were there
//! when it came first, and not for small ones that take each place that comes free.
//!
//! Places are counted from 0 and never wrap; an index into the ring is a place modulo its size, a
//! power of two. Some units count by one bit more (*wrap bit*), which tells a full ring from an
//! empty one: see [`CommandRing::with_wrap_bit`].
//!
//! Units that confirm a command by consuming it are asked by [`CommandRing::has_consumed`]; for all
//! others their drivers have words in memory.
//!
//! Memory ordering. What a CPU has stored before it publishes, its commands included, is before its store to `written`
//! (release), which the ringing CPU loads (acquire) before it writes the doorbell: so the unit sees the commands, by the
//! contract of [`Registers`](crate::Registers). `ringing` changes by exchanges alone, each of which acquires and releases,
//! so they are in one order and each sees what came before those before it. `rung` is only used by the CPU that holds
//! `ringing`. No doorbell is lost: a publisher stores `written` and then sets `ringing`; the ringing CPU clears `ringing` and
//! then loads `written`. So either the publisher sets it after it was cleared, and rings; or before, and the other one
//! finds `written`. `again`, which asks for one more doorbell, is handed over in the same way.

use alloc::vec::Vec;

use crate::heap::filled;
use crate::host::UnitError;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// The unit's side. Indices have the wrap bit, if there is one.
pub(crate) trait Doorbell {
    /// Tells the unit that all commands before index `tail` are complete.
    fn ring(&self, tail: u32);

    /// The index of the first command that the unit has not consumed; anything else where it does not answer.
    fn head(&self) -> u32;
}

/// Who has written what, of a ring whose commands lie in memory of its owner's.
#[derive(Debug)]
pub(crate) struct CommandRing {
    /// The first place that no CPU has reserved.
    reserved: AtomicU64,
    /// Places below this have been consumed, and may be reserved again. At most `reserved`; the
    /// difference is at most the room.
    consumed: AtomicU64,
    /// A CPU waits for room, and no other reserves before it. Says who may try, and nothing about
    /// memory: places are handed out by the exchanges of `reserved` alone.
    waiting: AtomicBool,
    /// All below has been rung. Of the CPU that holds `ringing`.
    rung: AtomicU64,
    ringing: AtomicBool,
    /// The CPU that rings next is to ring even where nothing is new.
    again: AtomicBool,
    /// For each index, one more than the last place there that was published.
    written: Vec<AtomicU64>,
    /// The unit counts places modulo this: the size, or twice that.
    modulus: u64,
}

impl CommandRing {
    /// A ring of `size` commands, a power of two of at least 2, which the unit takes to be empty at index 0.
    ///
    /// # Errors
    /// [`UnitError::OutOfMemory`].
    pub fn new(size: u32) -> Result<Self, UnitError> {
        Ok(Self {
            reserved: AtomicU64::new(0),
            consumed: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
            rung: AtomicU64::new(0),
            ringing: AtomicBool::new(false),
            again: AtomicBool::new(false),
            // No truncation where the ring is in memory.
            written: filled(size as usize, || AtomicU64::new(0))?,
            modulus: u64::from(size),
        })
    }

    /// A ring of `size` commands, a power of two of at least 2 and at most 2^31, whose unit counts
    /// modulo twice that.
    ///
    /// # Errors
    /// [`UnitError::OutOfMemory`].
    pub fn with_wrap_bit(size: u32) -> Result<Self, UnitError> {
        Ok(Self { modulus: u64::from(size) * 2, ..Self::new(size)? })
    }

    /// The most commands that there can be at once. Without a wrap bit one index stays free, as the
    /// unit would take a full ring for an empty one.
    pub fn room(&self) -> u64 {
        if self.modulus > self.size() { self.size() } else { self.size() - 1 }
    }

    fn size(&self) -> u64 {
        self.written.len() as u64
    }

    /// The index of a place.
    pub fn index(&self, place: u64) -> usize {
        // No truncation: the size is a length.
        (place & (self.size() - 1)) as usize
    }

    /// The least place with this index, its wrap bit included; `None` if the unit has no such index.
    pub fn place_of(&self, index: u32) -> Option<u64> {
        Some(u64::from(index)).filter(|place| *place < self.modulus)
    }

    /// Reserves `count` places in a row, at most [`room`](Self::room), and returns the first. They must be published, else no later
    /// command is ever rung. Where the ring is full, waits for the unit, for as long as `waits` says; `None` after that.
    pub fn reserve(&self, count: u64, bell: &impl Doorbell, mut waits: impl FnMut() -> bool) -> Option<u64> {
        if count > self.room() {
            return None;
        }
        let (mut is_first, mut gains) = (false, 0_u32);
        let reserved = loop {
            // `consumed` is read first. It never falls, so `reserved`, read later, is at least as large.
            let consumed = self.consumed.load(Ordering::Acquire);
            let first = self.reserved.load(Ordering::Relaxed);
            // Where `consumed` has risen since, the ring seems fuller than it is, and the next turn reads both anew.
            let fits = first.wrapping_sub(consumed).wrapping_add(count) <= self.room();
            if fits && (is_first || !self.waiting.load(Ordering::Relaxed)) {
                // Release and acquire, and nothing but exchanges ever changes it: submissions are in one order, and each sees
                // what was stored before those before it, as `InvalidationQueue` promises.
                let reserved = self.reserved.compare_exchange_weak(
                    first,
                    first + count,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if reserved.is_ok() {
                    break Some(first);
                }
            } else if fits {
                if !waits() {
                    break None;
                }
            } else {
                is_first = is_first || !self.waiting.swap(true, Ordering::Relaxed);
                // Those that had read that nobody waits may still take some of what comes free.
                gains = gains.wrapping_add(1);
                if (!self.look(consumed, bell) || gains.is_multiple_of(64)) && !waits() {
                    break None;
                }
            }
        };
        if is_first {
            self.waiting.store(false, Ordering::Relaxed);
        }
        reserved
    }

    /// Asks the unit how far it has come. Whether that is further than `consumed`, as was known.
    fn look(&self, consumed: u64, bell: &impl Doorbell) -> bool {
        // No index: the unit does not answer.
        let Some(head) = self.place_of(bell.head()) else { return false };
        let more = head.wrapping_sub(consumed) & (self.modulus - 1);
        if more > self.reserved.load(Ordering::Relaxed).wrapping_sub(consumed) {
            // It cannot have consumed what was never there: this is no answer, or the load came too
            // early, and the next will do.
            return false;
        }
        if more == 0 {
            return self.consumed.load(Ordering::Relaxed) != consumed;
        }
        // If the exchange succeeds, `consumed` had not changed, as it never falls; so the unit's head was at most a size beyond
        // it when the unit answered.
        // Release, for the acquire in `reserve`: what the unit has consumed, it has read, before the place is written again.
        // Where it fails, another CPU has found at least some of them.
        let gained = consumed.wrapping_add(more);
        let _ = self.consumed.compare_exchange(consumed, gained, Ordering::AcqRel, Ordering::Relaxed);
        true
    }

    /// Whether the unit has consumed the command at `place`, which is published. Asks it where no
    /// CPU knows yet.
    ///
    /// What the unit did before it consumed is before what the caller does after `true`: for the
    /// CPU that asked the unit by the contract of [`Registers`](crate::Registers), and for all
    /// others because that CPU's exchange in `look` releases, and the loads here acquire.
    pub fn has_consumed(&self, place: u64, bell: &impl Doorbell) -> bool {
        let consumed = self.consumed.load(Ordering::Acquire);
        if consumed > place {
            return true;
        }
        self.look(consumed, bell);
        self.consumed.load(Ordering::Acquire) > place
    }

    /// Publishes the `count` places from `first` on, which the caller has reserved and written, and sees to it that the unit is
    /// told of them.
    pub fn publish(&self, first: u64, count: u64, bell: &impl Doorbell) {
        for place in first..first + count {
            self.written[self.index(place)].store(place + 1, Ordering::Release);
        }
        self.ring_what_is_written(bell);
    }

    /// Has the unit told once more of all that it was told of: it had stopped, and may have missed that. Waits for no CPU, so an
    /// interrupt handler may call it: where another CPU, or the code that was interrupted, is ringing, that one rings once more.
    pub fn ring_again(&self, bell: &impl Doorbell) {
        self.again.store(true, Ordering::Release);
        self.ring_what_is_written(bell);
    }

    /// Rings for all that is complete, and where it was asked for once more; leaves that to a CPU that is ringing. Ends when nothing
    /// more is complete: a CPU may ring for the others for as long as they go on.
    fn ring_what_is_written(&self, bell: &impl Doorbell) {
        loop {
            if self.ringing.swap(true, Ordering::AcqRel) {
                return;
            }
            // Before the doorbell; the exchange acquires, so the doorbell is after all that came before the request.
            let again = self.again.load(Ordering::Relaxed) && self.again.swap(false, Ordering::AcqRel);
            let from = self.rung.load(Ordering::Relaxed);
            let mut to = from;
            // Ends: no more than a size of places is published beyond what was rung.
            while self.is_written(to) {
                to += 1;
            }
            if to != from || again {
                // No truncation: an index, with the wrap bit at most.
                bell.ring((to & (self.modulus - 1)) as u32);
                self.rung.store(to, Ordering::Relaxed);
            }
            self.ringing.swap(false, Ordering::AcqRel);
            if !self.is_written(to) && !self.again.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    fn is_written(&self, place: u64) -> bool {
        self.written[self.index(place)].load(Ordering::Acquire) == place + 1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A unit that consumes what it is told to.
    #[derive(Default)]
    struct Unit {
        head: core::cell::Cell<u32>,
        tail: core::cell::Cell<u32>,
        rings: core::cell::Cell<u32>,
    }

    impl Doorbell for Unit {
        fn ring(&self, tail: u32) {
            self.tail.set(tail);
            self.rings.set(self.rings.get() + 1);
        }

        fn head(&self) -> u32 {
            self.head.get()
        }
    }

    #[test]
    fn places_come_back_when_the_unit_has_consumed_them_and_not_before() {
        let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
        for round in 0..100_u64 {
            let first = ring.reserve(5, &unit, || panic!("there is room")).unwrap();
            assert_eq!(first, round * 5);
            ring.publish(first, 5, &unit);
            assert_eq!(u64::from(unit.tail.get()), (first + 5) % 8);
            // Two more fit, five do not.
            assert_eq!(ring.reserve(5, &unit, || false), None);
            unit.head.set(unit.tail.get());
        }
        assert_eq!(ring.reserve(8, &unit, || panic!("it never fits")), None);
    }

    #[test]
    fn many_places_are_not_kept_from_a_cpu_by_others_that_take_one_at_a_time() {
        let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
        let all = ring.reserve(7, &unit, || panic!("there is room")).unwrap();
        ring.publish(all, 7, &unit);
        let mut turns = 0;
        let first = ring.reserve(6, &unit, || {
            turns += 1;
            if unit.head != unit.tail {
                unit.head.set((unit.head.get() + 1) % 8);
            }
            // Another CPU, which has something to submit each time that a place comes free.
            if let Some(place) = ring.reserve(1, &unit, || false) {
                ring.publish(place, 1, &unit);
            }
            turns < 1000
        });
        assert_eq!((first, turns), (Some(7), 6));
    }

    #[test]
    fn what_was_reserved_first_is_rung_first() {
        let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
        let first = ring.reserve(2, &unit, || false).unwrap();
        let second = ring.reserve(3, &unit, || false).unwrap();
        ring.publish(second, 3, &unit);
        assert_eq!(unit.rings.get(), 0, "the first two are not written yet");
        ring.publish(first, 2, &unit);
        assert_eq!((unit.rings.get(), unit.tail.get()), (1, 5), "one doorbell for both");
    }

    #[test]
    fn a_unit_that_says_it_is_beyond_what_it_was_given_frees_nothing() {
        let (ring, unit) = (CommandRing::new(4).unwrap(), Unit::default());
        let first = ring.reserve(2, &unit, || false).unwrap();
        ring.publish(first, 2, &unit);
        unit.head.set(3);
        assert_eq!(ring.reserve(2, &unit, || false), None);
        unit.head.set(2);
        assert_eq!(ring.reserve(2, &unit, || false), Some(2));
    }

    #[test]
    fn a_unit_that_missed_a_doorbell_is_told_again() {
        let (ring, unit) = (CommandRing::new(8).unwrap(), Unit::default());
        let first = ring.reserve(3, &unit, || false).unwrap();
        ring.publish(first, 3, &unit);
        unit.tail.set(0);
        ring.ring_again(&unit);
        assert_eq!((unit.tail.get(), unit.rings.get()), (3, 2));
    }

    #[test]
    fn with_a_wrap_bit_a_ring_is_filled_to_the_last_place() {
        let (ring, unit) = (CommandRing::with_wrap_bit(4).unwrap(), Unit::default());
        for round in 0..100_u64 {
            let first = ring.reserve(4, &unit, || panic!("there is room")).unwrap();
            assert!(!ring.has_consumed(first, &unit), "it is not even published");
            ring.publish(first, 4, &unit);
            assert_eq!(u64::from(unit.tail.get()), (round + 1) * 4 % 8);
            assert_eq!(ring.reserve(1, &unit, || false), None, "full, and not taken for empty");
            for place in first..first + 4 {
                assert!(!ring.has_consumed(place, &unit));
                unit.head.set((place + 1) as u32 % 8);
                assert!(ring.has_consumed(place, &unit));
                assert_eq!(place == first + 3, ring.has_consumed(first + 3, &unit));
            }
        }
    }

    #[test]
    fn a_unit_that_claims_to_have_consumed_what_was_never_there_is_not_believed() {
        let (ring, unit) = (CommandRing::with_wrap_bit(4).unwrap(), Unit::default());
        let first = ring.reserve(2, &unit, || false).unwrap();
        ring.publish(first, 2, &unit);
        for nonsense in [3, 4, 5, 6, 7, 8, u32::MAX] {
            unit.head.set(nonsense);
            assert!(!ring.has_consumed(first, &unit), "{nonsense}");
        }
        unit.head.set(2);
        assert!(ring.has_consumed(first + 1, &unit));
    }

    #[test]
    fn a_unit_that_does_not_answer_frees_nothing() {
        let (ring, unit) = (CommandRing::new(4).unwrap(), Unit::default());
        let first = ring.reserve(3, &unit, || false).unwrap();
        ring.publish(first, 3, &unit);
        unit.head.set(u32::MAX);
        let mut looks = 0;
        let full = ring.reserve(1, &unit, || {
            looks += 1;
            looks < 5
        });
        assert_eq!((full, looks), (None, 5));
    }
}

#[cfg(all(test, loom))]
mod model {
    use alloc::sync::Arc;
    use loom::sync::atomic::AtomicU64 as Word;
    use loom::thread;

    use super::*;

    /// A unit that reads each command when it is told of it, at once.
    struct Unit {
        /// Of the ring, in commands.
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

    /// A unit that carries out each command when it is told of it, and then says so.
    struct Confirming {
        done: [Word; 2],
        head: Word,
    }

    impl Doorbell for Confirming {
        fn ring(&self, tail: u32) {
            for place in self.head.load(Ordering::Relaxed)..u64::from(tail) {
                self.done[place as usize].store(1, Ordering::Relaxed);
            }
            // As registers are seen: after what the unit has done before it answers.
            self.head.store(u64::from(tail), Ordering::Release);
        }

        fn head(&self) -> u32 {
            self.head.load(Ordering::Acquire) as u32
        }
    }

    /// A unit that has stopped misses doorbells.
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

    /// One CPU submits while another has the unit go on: the unit is told of the command after that, by one of the two, and neither
    /// waits for the other.
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

    /// A CPU that is told that its command was consumed sees what that did, whichever CPU has
    /// asked the unit.
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
                // It may not be told of it yet, as another CPU rings.
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

    /// Two CPUs submit to a ring of one command: where one finds it full, it comes first, and that
    /// ends when it has its place.
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
}
