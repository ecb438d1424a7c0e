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
//! A published command is changed only while its place is [held](CommandRing::hold). Then no CPU is given the place once
//! more, whatever the unit says that it has consumed: so the command that is changed is no other's.
//!
//! Memory ordering. What a CPU has stored before it publishes, its commands included, is before its store to `written`
//! (release), which the ringing CPU loads (acquire) before it writes the doorbell: so the unit sees the commands, by the
//! contract of [`Registers`](crate::Registers). `ringing` changes by exchanges alone, each of which acquires and releases,
//! so they are in one order and each sees what came before those before it. `rung` is only used by the CPU that holds
//! `ringing`. No doorbell is lost: a publisher stores `written` and then sets `ringing`; the ringing CPU clears `ringing` and
//! then loads `written`. So either the publisher sets it after it was cleared, and rings; or before, and the other one
//! finds `written`. `again`, which asks for one more doorbell, is handed over in the same way.
//!
//! **Panics.** The unit's side and `waits` are the host's code. If that panics, the guards here give back what the call
//! has: it waits for room no more, and rings no more. What it was about to ring is rung with the next commands. A caller that
//! panics between `reserve` and `publish` must publish all the same.

use alloc::vec::Vec;

use crate::heap::filled;
use crate::host::UnitError;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// In `consumed`: a place is held, and this does not rise.
const HELD: u64 = 1 << 63;

/// The unit's side. Indices have the wrap bit, if there is one.
pub(crate) trait Doorbell {
    /// Tells the unit that all commands before index `tail` are complete.
    fn ring(&self, tail: u32);

    /// The index of the first command that the unit has not consumed; anything else where it does not answer.
    fn head(&self) -> u32;
}

/// Who has written what, of a ring whose commands lie in memory of its owner's. It is alone on its cache lines: each submission writes it, and of the
/// unit around it each CPU reads something.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct CommandRing {
    /// The first place that no CPU has reserved.
    reserved: AtomicU64,
    /// Places below this have been consumed, and may be reserved again. At most `reserved`; the
    /// difference is at most the room. With [`HELD`], which is no part of the number.
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

/// A place that no CPU is given until this is dropped. See [`CommandRing::hold`].
#[derive(Debug)]
pub(crate) struct Held<'a> {
    ring: &'a CommandRing,
    place: u64,
}

impl Held<'_> {
    /// The place's index.
    pub fn index(&self) -> usize {
        self.ring.index(self.place)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Release: what the holder has stored there is before what is stored by a CPU that has the place next, which acquires
        // a later value of `consumed`; nothing but exchanges changes that.
        self.ring.consumed.fetch_and(!HELD, Ordering::AcqRel);
    }
}

/// Clears a flag that its maker has set, also where the host panics.
struct Set<'a>(&'a AtomicBool);

impl Drop for Set<'_> {
    fn drop(&mut self) {
        self.0.swap(false, Ordering::AcqRel);
    }
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

    /// How many places have been consumed, as far as a CPU knows.
    fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Acquire) & !HELD
    }

    /// The first place from `consumed` on with this index, its wrap bit included; `None` if the unit has no such index.
    fn place_from(&self, consumed: u64, index: u32) -> Option<u64> {
        let index = Some(u64::from(index)).filter(|index| *index < self.modulus)?;
        Some(consumed + (index.wrapping_sub(consumed) & (self.modulus - 1)))
    }

    /// Holds the place of the command that the unit says to have stopped at: `index`, with the wrap bit. `None` where no
    /// command is there that was published before this call, and that the unit may have yet to consume; or where another holds one.
    ///
    /// Until the guard is dropped, the command is the one that was published there, whatever the unit does. The place was
    /// not given out again before: that takes a `consumed` beyond it, which only rises, and which the exchange has found
    /// not to be. And it is not given out meanwhile, as `consumed` rises no more.
    ///
    /// What its owner did before it published is before what the caller does next (by the load in `is_written`).
    pub fn hold(&self, index: u32) -> Option<Held<'_>> {
        // Ends: `consumed` has risen each time, and the unit stands at one place; if it does not, the place is soon not written.
        loop {
            let consumed = self.consumed.load(Ordering::Acquire);
            if consumed & HELD != 0 {
                return None;
            }
            let place = self.place_from(consumed, index)?;
            if !self.is_written(place) {
                return None;
            }
            let held = self.consumed.compare_exchange(
                consumed,
                consumed | HELD,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if held.is_ok() {
                return Some(Held { ring: self, place });
            }
        }
    }

    /// Reserves `count` places in a row, at most [`room`](Self::room), and returns the first. They must be published, else no later
    /// command is ever rung. Where the ring is full, waits for the unit, for as long as `waits` says; `None` after that.
    pub fn reserve(&self, count: u64, bell: &impl Doorbell, mut waits: impl FnMut() -> bool) -> Option<u64> {
        if count > self.room() {
            return None;
        }
        let (mut is_first, mut gains) = (None, 0_u32);
        loop {
            // `consumed` is read first. It never falls, so `reserved`, read later, is at least as large.
            let consumed = self.consumed();
            let first = self.reserved.load(Ordering::Relaxed);
            // Where `consumed` has risen since, the ring seems fuller than it is, and the next turn reads both anew.
            let fits = first.wrapping_sub(consumed).wrapping_add(count) <= self.room();
            if fits && (is_first.is_some() || !self.waiting.load(Ordering::Relaxed)) {
                // Release and acquire, and nothing but exchanges ever changes it: submissions are in one order, and each sees
                // what was stored before those before it, as `InvalidationQueue` promises.
                let reserved = self.reserved.compare_exchange_weak(
                    first,
                    first + count,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if reserved.is_ok() {
                    return Some(first);
                }
            } else if fits {
                if !waits() {
                    return None;
                }
            } else {
                if is_first.is_none() && !self.waiting.swap(true, Ordering::Relaxed) {
                    is_first = Some(Set(&self.waiting));
                }
                // Those that had read that nobody waits may still take some of what comes free.
                gains = gains.wrapping_add(1);
                if (!self.look(consumed, bell) || gains.is_multiple_of(64)) && !waits() {
                    return None;
                }
            }
        }
    }

    /// Asks the unit how far it has come. Whether that is further than `consumed`, as was known.
    fn look(&self, consumed: u64, bell: &impl Doorbell) -> bool {
        // No index: the unit does not answer.
        let Some(gained) = self.place_from(consumed, bell.head()) else { return false };
        if gained > self.reserved.load(Ordering::Relaxed) {
            // It cannot have consumed what was never there: this is no answer, or the load came too
            // early, and the next will do.
            return false;
        }
        if gained == consumed {
            return self.consumed() != consumed;
        }
        // If the exchange succeeds, `consumed` had not changed, as it never falls; so the unit's head was at most a size beyond
        // it when the unit answered.
        // Release, for the acquire in `reserve`: what the unit has consumed, it has read, before the place is written again.
        match self.consumed.compare_exchange(consumed, gained, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => true,
            // Another CPU has found at least some of them; or a place is held, and nothing is gained until it is not.
            Err(now) => now & !HELD != consumed,
        }
    }

    /// Whether the unit has consumed the command at `place`, which is published. Asks it where no
    /// CPU knows yet.
    ///
    /// What the unit did before it consumed is before what the caller does after `true`: for the
    /// CPU that asked the unit by the contract of [`Registers`](crate::Registers), and for all
    /// others because that CPU's exchange in `look` releases, and the loads here acquire.
    pub fn has_consumed(&self, place: u64, bell: &impl Doorbell) -> bool {
        let consumed = self.consumed();
        if consumed > place {
            return true;
        }
        self.look(consumed, bell);
        self.consumed() > place
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
            let ringing = Set(&self.ringing);
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
            drop(ringing);
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
mod tests;

#[cfg(all(test, loom))]
mod model;
