//! Instructions of a map and its unmap, as they were counted: of Linux and of the module in a guest, of the library by callgrind.

use portcullis_model::scale::{LINUX_STRICT, LINUX_STRICT_SMMU};

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
    /// The library's strict, as callgrind counts raw-1, raw-4 and sg-16.
    pub const OURS: Self = Self { page: 490.0, more: (635.0 - 490.0) / 3.0, piece: (2_110.0 - 490.0) / 15.0 };
    /// The library's lazy: lazy-1.
    const OUR_LAZY: Self = Self { page: 528.0, more: 0.0, piece: 0.0 };
    /// The library's bounce: pool-1. It copies a page, or several pieces, through one slot.
    pub const OUR_BOUNCE: Self = Self { page: 214.0, more: 0.0, piece: 0.0 };

    /// From counts for a page, for 16 pages in one piece, and for a list of 16.
    const fn from_rows(page: f64, one_piece: f64, list: f64) -> Self {
        Self { page, more: (one_piece - page) / 15.0, piece: (list - page) / 15.0 }
    }

    /// For a mapping of a page, those of the kernel and those of the library whose time `scale` has in the row of this name; and how tables
    /// call the row of the kernel's.
    pub fn in_scale(row: &str) -> Option<(&'static str, [f64; 2])> {
        let (name, kernel, ours) = match row {
            LINUX_STRICT => ("linux-strict", Self::LINUX_STRICT, Self::OURS),
            // The same without a lock that CPUs share.
            LINUX_STRICT_SMMU => (LINUX_STRICT_SMMU, Self::LINUX_STRICT, Self::OURS),
            "lazy" => ("linux-lazy", Self::LINUX_LAZY, Self::OUR_LAZY),
            "bounce" => ("linux-bounce", Self::MODULE_BOUNCE, Self::OUR_BOUNCE),
            _ => return None,
        };
        Some((name, [kernel.page, ours.page]))
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
        let bench = include_str!("../../portcullis-bench/tests/instructions.rs");
        // What was counted is no further than this below a bar.
        for (name, price) in [
            ("raw-1", Instructions::OURS.of(1.0, 1.0)),
            ("raw-4", Instructions::OURS.of(4.0, 1.0)),
            ("sg-16", Instructions::OURS.of(16.0, 16.0)),
            ("pool-1", Instructions::OUR_BOUNCE.of(1.0, 1.0)),
            ("lazy-1", Instructions::OUR_LAZY.of(1.0, 1.0)),
        ] {
            let (_, bar) = bench.split_once(&format!("(\"{name}\", ")).unwrap();
            let bar: f64 = bar.split_once(')').unwrap().0.parse().unwrap();
            assert!((0.96 * bar..=bar).contains(&price.round()), "{name}: {price}, and {bar} at most");
        }
    }
}
