//! Who has which cache line.
//!
//! A line is in the caches of nobody, of one CPU, or of several, of which none has changed it since: MESI's states
//! without the difference between a line that its only holder has changed and one that it has not. Nothing is ever pushed
//! out, as caches have no size here.

use std::collections::HashMap;

/// The most CPUs that there can be.
pub const MOST_CPUS: usize = 256;

/// Bytes of a line, as a power of two.
pub const LINE_BITS: u32 = 6;

/// Lines that are kept together: those of a page of 4 KiB.
const GROUP_BITS: u32 = 6;

/// Places of the table that finds a group without hashing.
const RECENT: usize = 4096;

/// CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Set([u64; MOST_CPUS / 64]);

impl Set {
    fn of(cpu: usize) -> Self {
        let mut set = Self::default();
        set.insert(cpu);
        set
    }

    fn insert(&mut self, cpu: usize) {
        self.0[cpu / 64] |= 1 << (cpu % 64);
    }

    fn has(&self, cpu: usize) -> bool {
        self.0[cpu / 64] & 1 << (cpu % 64) != 0
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; MOST_CPUS / 64]
    }

    /// Whether one is between `first` and `end`.
    fn has_any(&self, first: usize, end: usize) -> bool {
        self.0.iter().enumerate().any(|(index, word)| {
            let (low, high) = (64 * index, 64 * index + 64);
            let (from, to) = (first.clamp(low, high) - low, end.clamp(low, high) - low);
            let below = |bits: usize| if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
            word & below(to) & !below(from) != 0
        })
    }
}

/// A line and its past.
#[derive(Debug, Clone, Copy, Default)]
struct Line {
    holders: Set,
    /// Its only holder has written it.
    changed: bool,
    /// Somebody has written it that others had: so who comes first matters.
    contended: bool,
    /// Transfers of one line follow each other: when the last one is over.
    free_at: u64,
}

/// Where a line comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The CPU's own cache.
    Own,
    /// Memory: nobody has it.
    Memory,
    /// CPUs of the same socket.
    Near,
    /// CPUs of other sockets.
    Far,
}

/// What an access would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    pub source: Source,
    /// Other CPUs' accesses to this line and this one must not change places.
    pub ordered: bool,
}

/// All lines.
pub struct Lines {
    groups: Vec<[Line; 1 << GROUP_BITS]>,
    places: HashMap<u64, u32>,
    recent: Vec<(u64, u32)>,
    per_socket: usize,
    /// The time from one copy of an unchanged line to the next.
    answer: u64,
}

impl Lines {
    pub fn new(per_socket: usize, answer: u64) -> Self {
        let recent = vec![(u64::MAX, 0); RECENT];
        Self { groups: Vec::new(), places: HashMap::new(), recent, per_socket: per_socket.max(1), answer }
    }

    fn line(&mut self, number: u64) -> &mut Line {
        let (group, index) = (number >> GROUP_BITS, number as usize % (1 << GROUP_BITS));
        let recent = &mut self.recent[group as usize % RECENT];
        if recent.0 != group {
            let place = *self.places.entry(group).or_insert_with(|| {
                self.groups.push([Line::default(); 1 << GROUP_BITS]);
                (self.groups.len() - 1) as u32
            });
            *recent = (group, place);
        }
        &mut self.groups[recent.1 as usize][index]
    }

    /// What an access of `cpu` to line `number` would do.
    #[inline]
    pub fn look(&mut self, number: u64, cpu: usize, writes: bool) -> Look {
        let per_socket = self.per_socket;
        let line = self.line(number);
        if line.holders == Set::of(cpu) || (!writes && line.holders.has(cpu)) {
            return Look { source: Source::Own, ordered: line.contended };
        }
        if line.holders.is_empty() {
            return Look { source: Source::Memory, ordered: false };
        }
        let (first, end) = (cpu - cpu % per_socket, cpu - cpu % per_socket + per_socket);
        // A write waits for all who have the line, a read for the nearest of them.
        let near = if writes {
            !line.holders.has_any(0, first) && !line.holders.has_any(end, usize::MAX)
        } else {
            line.holders.has_any(first, end)
        };
        Look { source: if near { Source::Near } else { Source::Far }, ordered: true }
    }

    /// Returns whether `cpu` has the line in its cache, as no other CPU has written it since `cpu` accessed it last.
    pub fn holds(&mut self, number: u64, cpu: usize) -> bool {
        self.line(number).holders.has(cpu)
    }

    /// Nobody has line `number` any more, if CPUs pass it each other.
    pub fn forget(&mut self, number: u64) {
        let line = self.line(number);
        if line.contended {
            line.holders = Set::default();
        }
    }

    /// Nobody else has line `number` before `at`.
    pub fn keep(&mut self, number: u64, at: u64) {
        let line = self.line(number);
        line.free_at = line.free_at.max(at);
    }

    /// The access, at `now`, where a transfer takes `latency`, or half of it where no data moves, as a CPU writes what it has a copy of. Returns when the CPU has the line.
    #[inline]
    pub fn access(&mut self, number: u64, cpu: usize, writes: bool, now: u64, latency: u64) -> u64 {
        let answer = self.answer;
        let line = self.line(number);
        let mine = Set::of(cpu);
        if line.holders == mine {
            line.changed |= writes;
            return now;
        }
        if !writes && line.holders.has(cpu) {
            return now;
        }
        let latency = if line.holders.has(cpu) { latency / 2 } else { latency };
        let mut done = now + latency;
        if !line.holders.is_empty() {
            let begin = now.max(line.free_at);
            done = begin + latency;
            // Many can have a copy of what nobody changes at the same time, unless each answer takes its own.
            if writes || line.changed {
                line.free_at = done;
            } else if answer > 0 {
                line.free_at = begin + answer;
            }
        }
        if writes {
            line.contended |= !line.holders.is_empty();
            line.holders = mine;
        } else {
            line.holders.insert(cpu);
        }
        line.changed = writes;
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two CPUs a socket; a transfer takes 10.
    struct Four(Lines);

    impl Four {
        fn new() -> Self {
            Self(Lines::new(2, 0))
        }

        fn access(&mut self, cpu: usize, writes: bool, now: u64) -> (Source, u64) {
            let look = self.0.look(1, cpu, writes);
            let latency = if look.source == Source::Own { 0 } else { 10 };
            (look.source, self.0.access(1, cpu, writes, now, latency))
        }

        fn reads(&mut self, cpu: usize) -> Source {
            self.access(cpu, false, 0).0
        }

        fn writes(&mut self, cpu: usize) -> Source {
            self.access(cpu, true, 0).0
        }
    }

    #[test]
    fn a_line_is_its_writers_until_somebody_else_wants_it() {
        let mut line = Four::new();
        assert_eq!(
            (line.writes(0), line.writes(0), line.reads(0)),
            (Source::Memory, Source::Own, Source::Own)
        );
        assert_eq!((line.reads(1), line.reads(1), line.reads(0)), (Source::Near, Source::Own, Source::Own));
        // The other one must give it up; then it comes back.
        assert_eq!(
            (line.writes(0), line.writes(0), line.writes(1)),
            (Source::Near, Source::Own, Source::Near)
        );
    }

    #[test]
    fn a_read_takes_the_nearest_copy_and_a_write_waits_for_all() {
        let mut line = Four::new();
        assert_eq!(
            (line.reads(3), line.reads(0), line.reads(1)),
            (Source::Memory, Source::Far, Source::Near)
        );
        assert_eq!((line.writes(1), line.writes(0)), (Source::Far, Source::Near));
        assert_eq!((line.reads(2), line.reads(3)), (Source::Far, Source::Near));
    }

    #[test]
    fn transfers_of_a_line_that_is_written_follow_each_other() {
        let mut line = Four::new();
        line.writes(0);
        assert_eq!(line.access(1, true, 100), (Source::Near, 110));
        assert_eq!(line.access(0, true, 103), (Source::Near, 120));
        // The first copy of a changed line occupies it; further ones do not wait for each other.
        assert_eq!(line.access(1, false, 105).1, 130);
        assert_eq!((line.access(2, false, 200).1, line.access(3, false, 200).1), (210, 210));
    }

    #[test]
    fn copies_may_have_to_wait_for_each_other() {
        let mut line = Four(Lines::new(4, 4));
        line.writes(0);
        // The first copy takes the line from its writer; then each answer takes 4.
        assert_eq!((1..4).map(|cpu| line.access(cpu, false, 100).1).collect::<Vec<_>>(), [110, 120, 124]);
        // It has a copy: no data moves.
        assert_eq!(line.access(0, true, 200).1, 205);
    }

    #[test]
    fn order_matters_where_lines_change_hands() {
        let mut line = Four::new();
        line.writes(0);
        assert!(!line.0.look(1, 0, true).ordered && line.0.look(1, 1, false).ordered);
        line.reads(1);
        // Written once and read by all: nothing depends on who comes first.
        assert!(!line.0.look(1, 1, false).ordered);
        line.writes(0);
        assert!(line.0.look(1, 0, false).ordered);
    }

    #[test]
    fn sets_know_their_sockets() {
        let mut set = Set::of(63);
        set.insert(200);
        assert!(set.has_any(0, 64) && set.has_any(63, 64) && set.has_any(128, 256) && set.has_any(200, 201));
        assert!(!set.has_any(0, 63) && !set.has_any(64, 200) && !set.has_any(201, usize::MAX));
    }
}
