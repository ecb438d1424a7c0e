//! What a mapping costs under each policy, by the code that would run it: the one table from which choices, rates, tables and results for
//! machines take their prices.
//!
//! A driver of the library's runs the library's code, whose time is measured. Under Linux the kernel's own code runs, or the
//! module's: its instructions were counted in a guest, and each has a price. What is copied has one, too, so that a result for Linux is the
//! same each time, and the one that `portcullis scale` has.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport, Report, TraceReport};

use crate::counted::{self, INSTRUCTION_NS, Parts};
use crate::instructions::Instructions;
use crate::look::count;
use crate::on_linux::Offer;
use crate::runs::{Cost, Runs};

/// Whose code a policy runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Library,
    Linux,
    Module,
}

impl Code {
    pub fn name(self) -> &'static str {
        match self {
            Self::Library => "library",
            Self::Linux => "Linux",
            Self::Module => "module",
        }
    }
}

/// What a mapping costs under a policy.
#[derive(Debug, Clone, Copy)]
pub struct Price<'a> {
    pub policy: &'a PolicyReport,
    pub cost: &'a Cost,
    pub code: Code,
    /// Its row in tables.
    pub row: &'static str,
    /// Of Linux or the module for each mapping. Of the library it is the time that was measured.
    pub instructions: Option<f64>,
    /// Nanoseconds: of the library by what was measured here, of the kernel's code by counts.
    pub ns: f64,
    /// The least and the most that it may be.
    pub range_ns: [f64; 2],
    /// What a mapping of strict-ring waits, if that was replayed.
    ring_wait_ns: Option<f64>,
    /// Nanoseconds by counts, which are the same each time: what the choice rests on.
    pub counted: Parts,
}

/// How much longer, or shorter, an instruction of the kernel may take than one of the library.
pub const APART: f64 = 2.0;

impl Price<'_> {
    /// Where each wait takes `times` what the profile has.
    pub fn with_waits(mut self, times: f64) -> Self {
        let longer_ns = self.counted.wait_ns * (times - 1.0);
        self.ns += longer_ns;
        self.range_ns = self.range_ns.map(|ns| ns + longer_ns);
        self.counted.wait_ns += longer_ns;
        self
    }

    /// Where an instruction of the kernel takes [`APART`] as long, or as short.
    pub fn with_kernel(mut self, slower: bool) -> Self {
        if self.code != Code::Library {
            self.ns = self.range_ns[usize::from(slower)];
            self.counted.code_ns *= if slower { APART } else { 1.0 / APART };
        }
        self
    }

    /// Where a copied KiB takes `kib_ns`.
    pub fn with_copies(mut self, kib_ns: f64) -> Self {
        if !self.policy.mode.copies() {
            return self;
        }
        if self.code == Code::Library {
            self.counted = counted::parts(self.policy, self.cost, kib_ns, self.ring_wait_ns);
        } else {
            self.counted.copy_ns = counted::copies_ns(self.policy, kib_ns).unwrap_or(self.counted.copy_ns);
        }
        self.as_counted()
    }

    /// As if what was measured here had been counted.
    pub fn as_measured(mut self) -> Self {
        self.counted = Parts { code_ns: self.ns, wait_ns: 0.0, copy_ns: 0.0 };
        self
    }

    /// As if what was counted had been measured.
    fn as_counted(mut self) -> Self {
        let Parts { code_ns, wait_ns, copy_ns } = self.counted;
        let apart = if self.code == Code::Library { 1.0 } else { APART };
        self.ns = self.counted.ns();
        self.range_ns = [code_ns / apart, code_ns * apart].map(|ns| ns + wait_ns + copy_ns);
        self
    }

    /// What was measured does not tell which of both costs more. Prices of the kernel's code are wrong together, by the same factor.
    pub fn may_be_as_much_as(&self, other: &Self) -> bool {
        if [self.code, other.code].contains(&Code::Library) {
            return self.cost.is_told() && self.cost.overlaps(other.cost);
        }
        let [less, more] = [0, 1].map(|end| self.range_ns[end] < other.range_ns[end]);
        less != more
    }
}

/// The prices of all policies of a report, in its order.
#[derive(Debug)]
pub struct Prices<'a> {
    pub all: Vec<Price<'a>>,
    /// How the kernel's code has its price, where it runs.
    kernel: Option<Kernel>,
}

impl<'a> Prices<'a> {
    /// By the code that runs where these policies are on `offer`.
    pub fn of(runs: &'a Runs, offer: Offer) -> Self {
        let Report { policies, .. } = &runs.report;
        let kib_ns = runs.calibration.copied_kib_ns();
        let ring = policies.iter().find(|policy| policy.mode == Mode::StrictRing);
        let ring_wait_ns = ring.map(|ring| ring.wait_ns_per_op);
        let kernel = (offer == Offer::Module).then(|| Kernel::of(runs)).flatten();
        let price = |(policy, cost): (&'a PolicyReport, &'a Cost)| {
            let of_kernel = kernel.and_then(|kernel| kernel.price(policy, cost));
            of_kernel.unwrap_or_else(|| of_library(policy, cost, kib_ns, ring_wait_ns))
        };
        Self { all: policies.iter().zip(&runs.costs).map(price).collect(), kernel }
    }

    /// Those of the kernel's code whose cost the recording tells.
    pub fn of_kernel(&self) -> impl Iterator<Item = &Price<'a>> {
        self.all.iter().filter(|price| price.code != Code::Library && price.cost.is_told())
    }

    /// Where the rows of the kernel's code come from.
    pub fn said(&self) -> Option<String> {
        let Kernel { kib_ns, .. } = self.kernel?;
        let each = |text: fn(&Price<'_>) -> String| {
            let mut all: Vec<String> = self.of_kernel().map(text).collect();
            let last = all.pop()?;
            Some(if all.is_empty() { last } else { format!("{} and {last}", all.join(", ")) })
        };
        Some(format!(
            "{}: the code of Linux 6.12 and of our module, estimated. Such a mapping takes it {} instructions (docs/linux.md; counted in a guest behind VT-d), each at \
             {INSTRUCTION_NS} ns (docs/replay.md). Waits are those of the rows strict, bounce and lazy; a copied KiB takes {} ns (--calibration). An instruction of \
             the kernel may take half or twice that: {}. Not in it: CPUs that wait for each other's locks (`portcullis scale` has them).",
            each(|price| price.row.to_owned())?,
            each(|price| count(price.instructions.unwrap_or_default().round() as u64))?,
            count(kib_ns.round() as u64),
            each(|price| {
                let [least, most] = price.range_ns.map(|ns| count(ns.round() as u64));
                format!("{} {least} to {most} ns", price.row)
            })?,
        ))
    }
}

/// The library's code, whose time was measured if there were enough mappings.
fn of_library<'a>(
    policy: &'a PolicyReport,
    cost: &'a Cost,
    kib_ns: f64,
    ring_wait_ns: Option<f64>,
) -> Price<'a> {
    let price = Price {
        policy,
        cost,
        code: Code::Library,
        row: policy.policy,
        instructions: None,
        ns: cost.median_ns,
        range_ns: [cost.least_ns, cost.most_ns],
        ring_wait_ns,
        counted: counted::parts(policy, cost, kib_ns, ring_wait_ns),
    };
    if cost.timed { price } else { price.as_counted() }
}

/// How many mappings there are of a kind, and what a mean one is like.
#[derive(Debug, Clone, Copy)]
struct Shape {
    maps: f64,
    pages: f64,
    pieces: f64,
}

impl Shape {
    fn of(maps: u64, bytes: u64, pieces: u64) -> Self {
        let of_each = |all: u64| all as f64 / maps.max(1) as f64;
        let pieces = of_each(pieces).max(1.0);
        Self { maps: maps as f64, pages: (of_each(bytes) / 4096.0).max(pieces), pieces }
    }

    /// Instructions of each.
    fn each(self, counts: Instructions) -> f64 {
        counts.of(self.pages, self.pieces)
    }
}

/// What the kernel's code takes for a recording's mappings.
#[derive(Debug, Clone, Copy)]
struct Kernel {
    all: Shape,
    /// What bounce copies, and what it maps.
    small: Shape,
    large: Shape,
    /// What a copied KiB takes.
    kib_ns: f64,
}

impl Kernel {
    /// `None` where the recording does not tell what mappings are like.
    fn of(runs: &Runs) -> Option<Self> {
        let TraceReport { maps, bytes_mapped, pieces_mapped, costs_known, large, .. } = runs.report.trace;
        if !costs_known || maps == 0 || pieces_mapped == 0 {
            return None;
        }
        let small = Shape::of(
            maps.saturating_sub(large.maps),
            bytes_mapped.saturating_sub(large.bytes),
            pieces_mapped.saturating_sub(large.pieces),
        );
        Some(Self {
            all: Shape::of(maps, bytes_mapped, pieces_mapped),
            small,
            large: Shape::of(large.maps, large.bytes, large.pieces),
            kib_ns: runs.calibration.copied_kib_ns(),
        })
    }

    /// The price of a policy that the kernel has; `None` for others.
    fn price<'a>(&self, policy: &'a PolicyReport, cost: &'a Cost) -> Option<Price<'a>> {
        let of = |counts: Instructions| self.all.each(counts);
        let (code, row, instructions) = match policy.mode {
            Mode::Each(Policy::Strict) => (Code::Linux, "linux-strict", of(Instructions::LINUX_STRICT)),
            Mode::Each(Policy::Lazy { .. }) => (Code::Linux, "linux-lazy", of(Instructions::LINUX_LAZY)),
            Mode::Bounce => {
                // Large buffers are mapped as strict maps them.
                let copied = self.small.each(Instructions::MODULE_BOUNCE) * self.small.maps;
                let mapped = self.large.each(Instructions::MODULE_STRICT) * self.large.maps;
                let instructions = (copied + mapped) / self.all.maps;
                (Code::Module, "linux-bounce", instructions)
            }
            _ => return None,
        };
        // Results of earlier versions have no count of them.
        let copy_ns = if policy.mode.copies() { counted::copies_ns(policy, self.kib_ns)? } else { 0.0 };
        let counted =
            Parts { code_ns: instructions * INSTRUCTION_NS, wait_ns: policy.wait_ns_per_op, copy_ns };
        let (instructions, ns) = (Some(instructions), counted.ns());
        let price = Price {
            policy,
            cost,
            code,
            row,
            instructions,
            ns,
            range_ns: [ns; 2],
            ring_wait_ns: None,
            counted,
        };
        Some(price.as_counted())
    }
}

#[cfg(test)]
mod tests {
    use portcullis_model::scale::{self, LINUX_STRICT, Mapping};
    use portcullis_trace::Large;

    use super::*;
    use crate::replay::short_run;

    /// Runs whose mappings have `bytes` in `pieces`, and whose strict took 490 ns besides its waits.
    fn runs(bytes: u64, pieces: u64) -> Runs {
        let (mut runs, _) = short_run();
        let trace = &mut runs.report.trace;
        (trace.maps, trace.bytes_mapped, trace.pieces_mapped) = (10, bytes * 10, pieces * 10);
        for (policy, cost) in runs.report.policies.iter_mut().zip(&mut runs.costs) {
            policy.wait_ns_per_op = if policy.policy == "strict" { 700.0 } else { 5.0 };
            let copied = if policy.mode == Mode::Bounce { 20_480 } else { 0 };
            (policy.operations, policy.copied_bytes) = (10, Some(copied));
            policy.invalidations = if policy.policy == "strict" { 10 } else { 0 };
            cost.median_ns = 490.0 + policy.wait_ns_per_op;
        }
        runs
    }

    fn of<'a>(prices: &'a Prices<'a>, row: &str) -> Price<'a> {
        *prices.all.iter().find(|price| price.row == row).unwrap()
    }

    #[test]
    fn the_kernel_s_code_has_the_price_of_its_instructions() {
        let runs = runs(4096, 1);
        let prices = Prices::of(&runs, Offer::Module);
        let [strict, lazy, bounce] =
            ["linux-strict", "linux-lazy", "linux-bounce"].map(|row| of(&prices, row));
        // 0.16 ns each, and what is waited.
        assert!((strict.ns - (416.64 + 700.0)).abs() < 1e-6 && (lazy.ns - (336.8 + 5.0)).abs() < 1e-6);
        assert_eq!(lazy.range_ns.map(f64::round), [173.0, 679.0]);
        // Two KiB for each, at 74.85 ns, whatever was measured.
        assert!((bounce.ns - (192.96 + 5.0 + 149.7)).abs() < 1e-6, "{bounce:?}");
        assert_eq!(
            [strict.code, lazy.code, bounce.code].map(|code| code == Code::Module),
            [false, false, true]
        );
        let said = prices.said().unwrap();
        assert!(
            said.starts_with("linux-strict, linux-bounce and linux-lazy: the code of Linux 6.12"),
            "{said}"
        );
        assert!(said.contains("takes it 2,604, 1,206 and 2,105 instructions"), "{said}");
        assert!(said.contains("a copied KiB takes 75 ns"), "{said}");
        assert!(said.contains("linux-strict 908 to 1,533 ns, linux-bounce"), "{said}");
        assert!(said.contains(" and linux-lazy 173 to 679 ns."), "{said}");
    }

    #[test]
    fn no_time_is_in_the_price_of_the_kernel_s_code() {
        let mut runs = runs(4096, 1);
        let all = |runs: &Runs| {
            let prices = Prices::of(runs, Offer::Module);
            ["linux-strict", "linux-lazy", "linux-bounce"].map(|row| {
                let price = of(&prices, row);
                assert_eq!(price.ns.to_bits(), price.counted.ns().to_bits());
                [price.ns, price.range_ns[0], price.range_ns[1]].map(f64::to_bits)
            })
        };
        let before = all(&runs);
        for cost in &mut runs.costs {
            (cost.least_ns, cost.median_ns, cost.most_ns) = (1.0, cost.median_ns * 3.0, 1e6);
        }
        assert_eq!(all(&runs), before);
    }

    #[test]
    fn the_library_s_code_is_what_its_drivers_run() {
        let runs = runs(4096, 1);
        for offer in [Offer::Library, Offer::Linux] {
            let prices = Prices::of(&runs, offer);
            assert!(
                prices
                    .all
                    .iter()
                    .all(|price| price.code == Code::Library && price.row == price.policy.policy)
            );
            assert_eq!(prices.said(), None);
        }
        let prices = Prices::of(&runs, Offer::Module);
        assert_eq!(of(&prices, "strict-ring").ns, 495.0);
    }

    /// Of a page, and of a list of 64 pages that is too large to be copied: neither is like the mean of both.
    #[test]
    fn large_buffers_under_bounce_take_the_module_s_strict() {
        let mut runs = runs(4096, 1);
        let trace = &mut runs.report.trace;
        (trace.bytes_mapped, trace.pieces_mapped) = (5 * 4096 + 5 * 64 * 4096, 5 + 5 * 64);
        trace.large = Large { maps: 5, bytes: 5 * 64 * 4096, pieces: 5 * 64 };
        let prices = Prices::of(&runs, Offer::Module);
        let [strict, bounce] =
            ["linux-strict", "linux-bounce"].map(|row| of(&prices, row).instructions.unwrap());
        assert!((bounce - (1_206.0 + 2_829.0 + 63.0 * 9_807.0 / 15.0) / 2.0).abs() < 1e-6, "{bounce}");
        assert!((strict - (2_604.0 + 2_604.0 + 63.0 * 8_829.0 / 15.0) / 2.0).abs() < 1e-6, "{strict}");
        // `scale` has the same of the same mappings.
        let mapping =
            |pages| Mapping { pages, pieces: pages, bytes: pages * 4096, shared: false, received: false };
        for (name, counted) in [(LINUX_STRICT, strict), ("bounce", bounce)] {
            let policy = scale::Policy::named(name).unwrap();
            let of = |pages| Instructions::of_mapping(policy, &mapping(pages)).unwrap();
            assert!(((of(1) + of(64)) / 2.0 - counted).abs() < 1e-6, "{name}");
        }
    }

    #[test]
    fn lists_take_more_for_each_piece() {
        let runs = runs(65_536, 16);
        let prices = Prices::of(&runs, Offer::Module);
        let strict = of(&prices, "linux-strict");
        assert_eq!(strict.instructions.map(f64::round), Some(11_433.0));
        assert!((strict.ns - (11_433.0 * INSTRUCTION_NS + 700.0)).abs() < 1e-6);
    }

    #[test]
    fn what_the_recording_does_not_tell_is_not_estimated() {
        let mut runs = runs(4096, 1);
        runs.report.trace.pieces_mapped = 0;
        assert_eq!(Prices::of(&runs, Offer::Module).of_kernel().count(), 0);
        runs.report.trace.pieces_mapped = 10;
        runs.report.trace.costs_known = false;
        assert_eq!(Prices::of(&runs, Offer::Module).of_kernel().count(), 0);
    }

    #[test]
    fn prices_of_the_kernel_s_code_are_wrong_by_the_same_factor() {
        let mut runs = runs(4096, 1);
        let of_strict = runs.report.policies.iter_mut().find(|policy| policy.policy == "strict");
        of_strict.unwrap().wait_ns_per_op = 100.0;
        let prices = Prices::of(&runs, Offer::Module);
        let [strict, lazy] = ["linux-strict", "linux-lazy"].map(|row| of(&prices, row));
        // Their ranges overlap, and yet the one costs more at either end.
        assert!(lazy.range_ns[1] > strict.range_ns[0] && !lazy.may_be_as_much_as(&strict));
        let slow = lazy.with_kernel(true);
        assert_eq!((slow.ns, slow.counted.code_ns), (lazy.range_ns[1], 2.0 * lazy.counted.code_ns));
        let mut other = lazy;
        other.range_ns = [lazy.range_ns[0] - 1.0, lazy.range_ns[1] + 1.0];
        assert!(other.may_be_as_much_as(&lazy));
    }
}
