//! Pages of the CPUs' buffers in memory, one behind the other, each with its CPU's number and its length before it: as they are read, and as a
//! [`Spool`](super::spool::Spool) has them. So a page is copied once on its way from the kernel to the file.

/// Before a page: the number of its CPU, and how many bytes it has, of 32 bits each.
pub const HEAD: usize = 8;

/// Stands where a CPU's number would, at the end of a round.
pub const ROUND: u32 = u32::MAX;

/// Bytes that are handed on at once.
const FULL: usize = 1 << 20;

/// Pages, and ends of rounds.
#[derive(Debug)]
pub struct Pages {
    bytes: Vec<u8>,
    used: usize,
    /// The most bytes of a page.
    page: usize,
}

impl Pages {
    /// Makes room for pages of at most `page` bytes each.
    pub fn new(page: usize) -> Self {
        Self { bytes: vec![0; FULL + page + 2 * HEAD], used: 0, page }
    }

    /// Room for one page more. There is none where they are [full](Self::is_full).
    pub fn room(&mut self) -> &mut [u8] {
        let start = self.used + HEAD;
        self.bytes.get_mut(start..start + self.page).unwrap_or_default()
    }

    /// Takes the first `len` bytes of the [room](Self::room) for a page of `cpu`.
    pub fn keep(&mut self, cpu: u32, len: usize) {
        self.head(cpu, len.min(self.page));
    }

    /// All buffers have been read once more.
    pub fn end_round(&mut self) {
        self.head(ROUND, 0);
    }

    fn head(&mut self, cpu: u32, len: usize) {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&cpu.to_ne_bytes());
        // No truncation: a page is shorter.
        head[4..].copy_from_slice(&(len as u32).to_ne_bytes());
        if let Some(bytes) = self.bytes.get_mut(self.used..self.used + HEAD) {
            bytes.copy_from_slice(&head);
            self.used += HEAD + len;
        }
    }

    /// Whether it is time to hand them on. Then there is still room for the end of a round.
    pub fn is_full(&self) -> bool {
        self.used >= FULL
    }

    /// All of them, with what is before each.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or_default()
    }

    /// The pages, with the number of the CPU of each. Ends of rounds are left out.
    pub fn each(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let mut rest = self.bytes();
        std::iter::from_fn(move || {
            let (head, after) = rest.split_at_checked(HEAD)?;
            let (cpu, len) = read(head.try_into().ok()?);
            let (page, after) = after.split_at_checked(len)?;
            rest = after;
            Some((cpu, page))
        })
        .filter(|(cpu, _)| *cpu != ROUND)
    }

    pub fn clear(&mut self) {
        self.used = 0;
    }
}

/// What stands before a page: its CPU's number, or [`ROUND`], and its length.
pub fn read(head: [u8; HEAD]) -> (u32, usize) {
    let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    (word(0), word(4) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_as_they_were_read() {
        let mut pages = Pages::new(4096);
        let (mut kept, mut expected) = (Vec::new(), 0);
        // Up to the last page that there is room for, and the end of a round behind it.
        for number in 0_u32.. {
            let len = if number % 3 == 0 { 4096 } else { number as usize % 4096 };
            pages.room()[..len].fill(number as u8);
            pages.keep(number, len);
            kept.push((number, vec![number as u8; len]));
            expected += HEAD + len;
            if pages.is_full() || number % 2 == 0 {
                pages.end_round();
                expected += HEAD;
            }
            if pages.is_full() {
                break;
            }
        }
        let each: Vec<_> = pages.each().map(|(cpu, page)| (cpu, page.to_vec())).collect();
        assert!(each.len() > 250 && each == kept, "{} of {}", each.len(), kept.len());
        assert_eq!(pages.bytes().len(), expected);
        pages.clear();
        assert_eq!((pages.each().count(), pages.bytes()), (0, &[][..]));
    }
}
