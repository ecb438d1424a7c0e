//! What one thread of a benchmark drives: mappings with numbers, each made or not.

/// A thread's mappings, each of which is made or not.
pub trait Lane: Send {
    /// Maps buffer `index`; whether that worked.
    fn map(&mut self, index: usize) -> bool;

    /// Unmaps it; whether that worked.
    fn unmap(&mut self, index: usize) -> bool;

    /// What the device was given for buffer `index` when it was mapped last.
    fn address(&self, index: usize) -> u64;

    /// Maps and unmaps buffer 0, `count` times; in a loop that is compiled for the subject, as those below.
    fn pairs(&mut self, count: u64) -> bool {
        (0..count).all(|_| self.map(0) && self.unmap(0))
    }

    /// Maps the buffers from `first` up to `end`.
    fn maps(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.map(index))
    }

    /// Unmaps each of them and maps it again.
    fn renews(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.unmap(index) && self.map(index))
    }

    /// Unmaps them.
    fn unmaps(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.unmap(index))
    }

    /// Commits what waits for the rest of a batch; whether that worked.
    fn finish(&mut self) -> bool {
        true
    }
}

/// Remembers what was mapped as buffer `index`.
#[inline]
pub(crate) fn put<T>(places: &mut [T], index: usize, value: Option<T>) -> bool {
    match (places.get_mut(index), value) {
        (Some(place), Some(value)) => {
            *place = value;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes each call, and refuses that of this number.
    #[derive(Default)]
    struct Noted {
        calls: Vec<(char, usize)>,
        refuses: Option<usize>,
    }

    impl Noted {
        fn note(&mut self, what: char, index: usize) -> bool {
            self.calls.push((what, index));
            self.refuses != Some(self.calls.len())
        }
    }

    impl Lane for Noted {
        fn map(&mut self, index: usize) -> bool {
            self.note('m', index)
        }

        fn unmap(&mut self, index: usize) -> bool {
            self.note('u', index)
        }

        fn address(&self, _: usize) -> u64 {
            0
        }
    }

    #[test]
    fn several_calls_are_each_made_until_one_fails() {
        type Work = fn(&mut Noted) -> bool;
        let of = |refuses, work: Work| {
            let mut lane = Noted { refuses, ..Noted::default() };
            let worked = work(&mut lane);
            let calls: Vec<String> =
                lane.calls.iter().map(|(what, index)| format!("{what}{index}")).collect();
            (worked, calls.join(" "))
        };
        let cases: [(Work, &str); 4] = [
            (|lane| lane.pairs(2), "m0 u0 m0 u0"),
            (|lane| lane.maps(3, 7), "m3 m4 m5 m6"),
            (|lane| lane.renews(3, 5), "u3 m3 u4 m4"),
            (|lane| lane.unmaps(3, 7), "u3 u4 u5 u6"),
        ];
        for (work, all) in cases {
            assert_eq!(of(None, work), (true, all.into()));
            assert_eq!(of(Some(2), work), (false, all[..5].into()));
        }
    }

    #[test]
    fn what_was_mapped_is_remembered_where_there_is_a_place() {
        let mut places = [1, 2];
        assert!(put(&mut places, 1, Some(3)) && !put(&mut places, 0, None) && !put(&mut places, 2, Some(4)));
        assert_eq!(places, [1, 3]);
    }
}
