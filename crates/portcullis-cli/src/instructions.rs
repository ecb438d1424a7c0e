//! Instructions of a map and its unmap, as they were counted in a guest: of Linux and of the module.

use portcullis_model::scale::{self, LINUX_STRICT, LINUX_STRICT_SMMU, Mapping};

/// Without waits and copies.
#[derive(Debug, Clone, Copy)]
pub struct Instructions {
    /// For a page.
    page: f64,
    /// For each more in one piece of memory.
    more: f64,
    /// For each more that is a piece of its own, in a list.
    piece: f64,
}

impl Instructions {
    /// Linux 6.12 and the module behind VT-d: the first, the third and the fourth row of docs/linux.md.
    pub const LINUX_STRICT: Self = Self::from_rows(2_604.0, 3_210.0, 11_433.0);
    pub const LINUX_LAZY: Self = Self::from_rows(2_105.0, 2_708.0, 10_931.0);
    pub const MODULE_STRICT: Self = Self::from_rows(2_829.0, 3_453.0, 12_636.0);
    pub const MODULE_BOUNCE: Self = Self::from_rows(1_206.0, 1_205.0, 2_528.0);

    /// From counts for a page, for 16 pages in one piece, and for a list of 16.
    const fn from_rows(page: f64, one_piece: f64, list: f64) -> Self {
        Self { page, more: (one_piece - page) / 15.0, piece: (list - page) / 15.0 }
    }

    /// For a policy of `scale`: the name that tables give to the row of the kernel's code, and two counts of instructions. The first is for a
    /// mapping that the policy copies, the second for any other; a policy that does not choose by size has the same count twice.
    pub fn in_scale(policy: &scale::Policy) -> Option<(&'static str, [Self; 2])> {
        Some(match policy.name {
            LINUX_STRICT => ("linux-strict", [Self::LINUX_STRICT; 2]),
            // The same without a lock that CPUs share.
            LINUX_STRICT_SMMU => (LINUX_STRICT_SMMU, [Self::LINUX_STRICT; 2]),
            "lazy" => ("linux-lazy", [Self::LINUX_LAZY; 2]),
            "bounce" => ("linux-bounce", [Self::MODULE_BOUNCE, Self::MODULE_STRICT]),
            _ => return None,
        })
    }

    /// Those of the kernel for `mapping` under a policy of `scale`.
    pub fn of_mapping(policy: &scale::Policy, mapping: &Mapping) -> Option<f64> {
        let (_, [copied, mapped]) = Self::in_scale(policy)?;
        let counts = if policy.copies(mapping) { copied } else { mapped };
        Some(counts.of(mapping.pages as f64, mapping.pieces as f64))
    }

    /// Instructions for a mapping of this number of pages and pieces.
    pub fn of(self, pages: f64, pieces: f64) -> f64 {
        self.page + self.piece * (pieces - 1.0).max(0.0) + self.more * (pages - pieces).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_the_kernel_s_instructions_are_those_of_the_document() {
        let document = include_str!("../../../docs/linux.md");
        // Linux lazy, Linux strict, `lazy`, `strict`, `bounce`.
        let cells = |start: &str| -> Vec<f64> {
            let row = document.lines().find(|line| line.starts_with(start)).unwrap();
            row.split('|').skip(2).take(5).map(|cell| cell.trim().replace(',', "").parse().unwrap()).collect()
        };
        let [page, one, list] = [
            "| 4 KiB, without the data | 2,105 |",
            "| 64 KiB in one piece, without the data |",
            "| 16 pages in a list, without the data |",
        ]
        .map(cells);
        for (at, counts) in [
            (0, Instructions::LINUX_LAZY),
            (1, Instructions::LINUX_STRICT),
            (3, Instructions::MODULE_STRICT),
            (4, Instructions::MODULE_BOUNCE),
        ] {
            let said = [counts.of(1.0, 1.0), counts.of(16.0, 1.0), counts.of(16.0, 16.0)];
            assert_eq!(said.map(f64::round), [page[at], one[at], list[at]]);
        }
    }
}
