//! The producer side of a command ring: many CPUs fill it, one unit drains it.
//!
//! A CPU *reserves* consecutive places, writes its commands there, and *publishes* them. The doorbell takes one index: all commands below
//! it are complete. So the CPU whose commands come next rings, for its own and for all complete commands after them. No CPU waits for
//! another's doorbell: a CPU that finds another one ringing leaves its commands to that one, which checks again after it has rung. A CPU
//! waits for others only in two cases: for room in a full ring; and, longer than otherwise, for its confirmation, if a CPU that reserved
//! before it has not yet published.
//!
//! If the ring is full, one waiting CPU comes *first*: no other reserves until it has its places. So a submission of many commands waits
//! for the commands that were there when it came first, and cannot be starved by small ones.
//!
//! Places count from 0 and never wrap; a ring index is a place modulo the size, a power of two. Some units count one bit more (*wrap bit*),
//! which distinguishes a full ring from an empty one: see [`CommandRing::with_wrap_bit`].
//!
//! For units that confirm a command by consuming it there is [`CommandRing::has_consumed`]; the drivers of all others have status words in
//! memory.
//!
//! A published command changes only while its place is [held](CommandRing::hold). A held place is not reserved again, whatever the unit
//! says that it has consumed: so the changed command belongs to no other submission.
//!
//! Memory ordering. What a CPU stores before it publishes, its commands included, happens before its store to `written` (release), which
//! the ringing CPU loads (acquire) before it writes the doorbell: so the unit sees the commands, by the contract of
//! [`Registers`](crate::Registers). `ringing` changes only by exchanges that acquire and release, so they have one order and each sees what
//! came before the earlier ones. Only the CPU that holds `ringing` uses `rung`. No doorbell is lost: a publisher stores `written` and then
//! sets `ringing`; the ringing CPU clears `ringing` and then loads `written`. So either the publisher sets it after the clear, and rings;
//! or before, and the other one finds `written`. `again`, which requests one more doorbell, is handed over in the same way.
//!
//! **Panics.** The unit's side and `waits` are the host's code. If it panics, the guards here release what the call holds: it no longer
//! waits for room, and no longer rings. The next commands ring for what it was about to ring. A caller that panics between `reserve` and
//! `publish` must still publish.

use alloc::vec::Vec;

use crate::heap::filled;
use crate::host::UnitError;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// In `consumed`: a place is held, and `consumed` does not rise.
const HELD: u64 = 1 << 63;

/// The unit's side. Indices include the wrap bit, if there is one.
pub(crate) trait Doorbell {
    /// Tells the unit that all commands before index `tail` are complete.
    fn ring(&self, tail: u32);

    /// The index of the first command that the unit has not consumed; any other value if it does not answer.
    fn head(&self) -> u32;
}

/// The state of a ring; its owner has the commands. It has cache lines of its own: each submission writes it, and all CPUs read fields of
/// the unit around it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct CommandRing {
    /// The first place that no CPU has reserved.
    reserved: AtomicU64,
    /// Places below this have been consumed, and may be reserved again. At most `reserved`, and at least `reserved` minus the room.
    /// Includes [`HELD`], which is no part of the number.
    consumed: AtomicU64,
    /// A CPU waits for room, and no other reserves before it. Orders no memory: only exchanges of `reserved` hand out places.
    waiting: AtomicBool,
    /// All below has been rung. Only the CPU that holds `ringing` uses it.
    rung: AtomicU64,
    ringing: AtomicBool,
    /// The CPU that rings next must ring even if nothing is new.
    again: AtomicBool,
    /// For each index, one more than the last place published there.
    written: Vec<AtomicU64>,
    /// The unit counts places modulo this: the size, or twice that.
    modulus: u64,
}

/// A place that is not reserved again until this is dropped. See [`CommandRing::hold`].
#[derive(Debug)]
pub(crate) struct Held<'a> {
    ring: &'a CommandRing,
    place: u64,
}

impl Held<'_> {
    pub fn index(&self) -> usize {
        self.ring.index(self.place)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Release: the holder's stores happen before those of the CPU that reserves the place next, which acquires a later value of
        // `consumed`; only exchanges change it.
        self.ring.consumed.fetch_and(!HELD, Ordering::AcqRel);
    }
}

/// Clears a flag that its maker has set, even if the host panics.
struct Set<'a>(&'a AtomicBool);

impl Drop for Set<'_> {
    fn drop(&mut self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

impl CommandRing {
    /// A ring of `size` commands, a power of two of at least 2, which the unit takes for empty at index 0.
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
            // No truncation: the ring fits into memory.
            written: filled(size as usize, || AtomicU64::new(0))?,
            modulus: u64::from(size),
        })
    }

    /// A ring of `size` commands, a power of two of at least 2 and at most 2^31, whose unit counts modulo twice that.
    ///
    /// # Errors
    /// [`UnitError::OutOfMemory`].
    pub fn with_wrap_bit(size: u32) -> Result<Self, UnitError> {
        Ok(Self { modulus: u64::from(size) * 2, ..Self::new(size)? })
    }

    /// The most commands at once. Without a wrap bit one index stays free, because the unit would take a full ring for an empty one.
    pub fn room(&self) -> u64 {
        if self.modulus > self.size() { self.size() } else { self.size() - 1 }
    }

    fn size(&self) -> u64 {
        self.written.len() as u64
    }

    pub fn index(&self, place: u64) -> usize {
        (place & (self.size() - 1)) as usize
    }

    /// How many places have been consumed, as far as a CPU knows.
    fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Acquire) & !HELD
    }

    /// The first place from `consumed` on with this index, wrap bit included; `None` if the index is invalid.
    fn place_from(&self, consumed: u64, index: u32) -> Option<u64> {
        let index = Some(u64::from(index)).filter(|index| *index < self.modulus)?;
        Some(consumed + (index.wrapping_sub(consumed) & (self.modulus - 1)))
    }

    /// Holds the place of the command at which the unit says it has stopped: `index`, with the wrap bit. `None` if no command is there that
    /// was published before this call and that the unit may have yet to consume; or if another place is held.
    ///
    /// Until the guard is dropped, the command stays the one that was published there, whatever the unit does. The place was not reserved
    /// again before: that takes a `consumed` beyond it, which only rises, and which the exchange found not to be. And it is not reserved
    /// meanwhile, because `consumed` does not rise.
    ///
    /// What its owner did before it published happens before what the caller does next (by the load in `is_written`).
    pub fn hold(&self, index: u32) -> Option<Held<'_>> {
        // Ends: `consumed` has risen each time, while the unit's index stays; otherwise the place is soon not written.
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

    /// Reserves `count` consecutive places, at most [`room`](Self::room), and returns the first. They must be published, or no doorbell
    /// ever covers a later command. If the ring is full, waits for the unit while `waits` returns `true`; then returns `None`.
    pub fn reserve(&self, count: u64, bell: &impl Doorbell, mut waits: impl FnMut() -> bool) -> Option<u64> {
        if count > self.room() {
            return None;
        }
        let (mut is_first, mut gains) = (None, 0_u32);
        loop {
            // `consumed` is read first. It never falls, so `reserved`, read later, is at least as large.
            let consumed = self.consumed();
            let first = self.reserved.load(Ordering::Relaxed);
            // If `consumed` has risen since, the ring seems fuller than it is, and the next iteration reads both anew.
            let fits = first.wrapping_sub(consumed).wrapping_add(count) <= self.room();
            if fits && (is_first.is_some() || !self.waiting.load(Ordering::Relaxed)) {
                // Release and acquire, and only exchanges change it: submissions have one order, and each sees the stores before earlier
                // ones, as `InvalidationQueue` promises.
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
                // CPUs that read `waiting` before it was set may still take some of the freed places.
                gains = gains.wrapping_add(1);
                if (!self.look(consumed, bell) || gains.is_multiple_of(64)) && !waits() {
                    return None;
                }
            }
        }
    }

    /// Reads the unit's index. Returns whether it is beyond `consumed`.
    fn look(&self, consumed: u64, bell: &impl Doorbell) -> bool {
        // No valid index: the unit does not answer.
        let Some(gained) = self.place_from(consumed, bell.head()) else { return false };
        if gained > self.reserved.load(Ordering::Relaxed) {
            // The unit cannot have consumed commands that were never reserved: the index is invalid, or the load of `reserved` came too
            // early, and the next one will do.
            return false;
        }
        if gained == consumed {
            return self.consumed() != consumed;
        }
        // If the exchange succeeds, `consumed` had not changed, because it never falls; so the unit's head was at most a size beyond it
        // when the unit answered.
        // Release, for the acquire in `reserve`: the unit has read what it has consumed before the place is written again.
        match self.consumed.compare_exchange(consumed, gained, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => true,
            // Another CPU found at least some of them; or a place is held, and nothing is gained until it is released.
            Err(now) => now & !HELD != consumed,
        }
    }

    /// Whether the unit has consumed the command at `place`, which is published. Reads the unit's index if no CPU knows yet.
    ///
    /// What the unit did before it consumed happens before what the caller does after `true`: on the CPU that read the index by the
    /// contract of [`Registers`](crate::Registers), and on all others because that CPU's exchange in `look` releases, and the loads here
    /// acquire.
    pub fn has_consumed(&self, place: u64, bell: &impl Doorbell) -> bool {
        let consumed = self.consumed();
        if consumed > place {
            return true;
        }
        self.look(consumed, bell);
        self.consumed() > place
    }

    /// Publishes `count` places from `first` on, which the caller has reserved and written, and makes sure that a CPU rings for them.
    pub fn publish(&self, first: u64, count: u64, bell: &impl Doorbell) {
        for place in first..first + count {
            self.written[self.index(place)].store(place + 1, Ordering::Release);
        }
        self.ring_what_is_written(bell);
    }

    /// Repeats the doorbell: a unit that had stopped may have missed it. Waits for no CPU, so an interrupt handler may call it: if another
    /// CPU, or the interrupted code, is ringing, that one rings once more.
    pub fn ring_again(&self, bell: &impl Doorbell) {
        self.again.store(true, Ordering::Release);
        self.ring_what_is_written(bell);
    }

    /// Rings for all complete commands, and if `again` is set; leaves that to a CPU that is ringing. Ends when no more commands are
    /// complete: a CPU may ring for others for as long as they publish.
    fn ring_what_is_written(&self, bell: &impl Doorbell) {
        loop {
            if self.ringing.swap(true, Ordering::AcqRel) {
                return;
            }
            let ringing = Set(&self.ringing);
            // Before the doorbell; the exchange acquires, so the doorbell comes after all that came before the request.
            let again = self.again.load(Ordering::Relaxed) && self.again.swap(false, Ordering::AcqRel);
            let from = self.rung.load(Ordering::Relaxed);
            let mut to = from;
            // Ends: at most a size of places is published beyond `rung`.
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
