//! The cost of an operation by the number of concurrent CPUs: measured by `cargo xtask coherence --keep`, and derived from that.

use super::machine::Machine;

/// The measurement's cost of a transfer, in nanoseconds: within a socket, and between two.
const NEAR: f64 = 60.0;
const FAR: f64 = 120.0;

/// The measurement's hardware time of a submission, for operations with the waits of `vtd`.
const VTD: f64 = 710.0;

/// CPUs share waits for the hardware.
pub(super) const SHARED: &str = "vtd-shared-raw@vtd";
/// The hardware time of an SMMUv3, in the same way.
const SMMUV3: f64 = 240.0;

/// Each CPU has an SMMUv3 queue (ECMDQ).
pub(super) const QUEUES: &str = "smmu-own-raw@smmuv3";
/// A CPU submits individually. Measured on one CPU.
pub(super) const ALONE: &str = "vtd-raw@vtd";

/// The file in the repository.
const MEASURED: &str = include_str!("operations.txt");

/// One operation on a number of CPUs.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    name: String,
    pages: u64,
    cpus: u32,
    per_socket: u32,
    ns: f64,
    /// Transfers between CPUs, and the part between sockets.
    transfers: f64,
    far: f64,
    lines: Vec<Line>,
}

impl Row {
    fn sockets(&self) -> u32 {
        self.cpus.div_ceil(self.per_socket.max(1))
    }
}

/// A source line, and its share of an operation's transfers.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// From 0 to 1.
    pub share: f64,
    /// The file and the line, and what called it.
    pub source: String,
}

/// All measurements.
#[derive(Debug, Clone, PartialEq)]
pub struct Operations(Vec<Row>);

/// The cost of a one-page operation by the number of concurrent CPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Nanoseconds for each, by the number of CPUs; for none as for one.
    pub ns: Vec<f64>,
    /// Inferred parts, as text.
    pub inferred: Vec<String>,
    /// Its transfers by source line, the most first.
    pub lines: Vec<Line>,
    /// Transfers of each, on the most CPUs measured.
    pub transfers: f64,
}

/// The difference between an operation of more pages and one of one page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Additional nanoseconds that are independent of other CPUs.
    pub own_ns: f64,
    /// The factor of its time on shared state.
    pub shared: f64,
}

impl Operations {
    /// The repository's measurements.
    ///
    /// # Errors
    /// A fault in the file, which its tests would have found.
    pub fn measured() -> Result<Self, String> {
        Self::parse(MEASURED)
    }

    /// Reads what `cargo xtask coherence --keep` has written.
    ///
    /// # Errors
    /// The number of the first invalid line, from 1.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rows: Vec<Row> = Vec::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let understood = match line.split_once(' ') {
                Some(("op", rest)) => row(rest).map(|row| rows.push(row)),
                Some(("line", rest)) => rest.split_once(' ').and_then(|(share, source)| {
                    let line = Line { share: share.parse().ok()?, source: source.to_owned() };
                    rows.last_mut().map(|row| row.lines.push(line))
                }),
                _ => None,
            };
            understood.ok_or_else(|| format!("operations, line {}: {line}", at + 1))?;
        }
        Ok(Self(rows))
    }

    fn of(&self, name: &str, pages: u64) -> Vec<&Row> {
        let mut rows: Vec<&Row> =
            self.0.iter().filter(|row| row.name == name && row.pages == pages).collect();
        rows.sort_by_key(|row| row.cpus);
        rows
    }

    /// Nanoseconds to map and unmap one page by `name` on a single CPU; `None` if that was not measured.
    pub fn alone_ns(&self, name: &str) -> Option<f64> {
        Some(self.of(name, 1).iter().find(|row| row.cpus == 1)?.ns)
    }

    /// The cost of `name` for one page with 1, 2 .. concurrent CPUs of `machine`.
    ///
    /// # Errors
    /// It was not measured at all.
    pub fn curve(&self, name: &str, machine: &Machine) -> Result<Curve, String> {
        let rows = self.of(name, 1);
        let alone = self.alone_ns(name).ok_or_else(|| format!("{name}: not measured"))?;
        let mut points: Vec<(f64, f64)> = vec![(1.0, alone)];
        let (mut sockets, mut latencies) = (false, false);
        let mut numbers: Vec<u32> = rows.iter().map(|row| row.cpus).filter(|cpus| *cpus > 1).collect();
        numbers.dedup();
        for cpus in numbers {
            // The most similar measurement.
            let off = |row: &&&Row| row.sockets().abs_diff(machine.sockets);
            let Some(row) = rows.iter().filter(|row| row.cpus == cpus).min_by_key(off) else { continue };
            let shared = (row.ns - alone).max(0.0);
            let far = if row.transfers > 0.0 { row.far / row.transfers } else { 0.0 };
            let mean = |near: f64, other: f64| near * (1.0 - far) + other * far;
            let factor = mean(machine.near_ns, machine.far_ns) / mean(NEAR, FAR);
            sockets |= shared > alone && row.sockets() != machine.sockets && cpus <= machine.cpus;
            latencies |= shared > alone && (factor - 1.0).abs() > 0.02;
            points.push((f64::from(cpus), alone + shared * factor));
        }
        let mut inferred = Vec::new();
        if sockets {
            inferred.push(format!("{name}: measured on another number of sockets for some numbers of CPUs"));
        }
        if latencies {
            inferred.push(format!(
                "{name}: measured with transfers of {NEAR} and {FAR} ns, taken to grow and shrink with them"
            ));
        }
        let most = points.last().map_or(1.0, |point| point.0);
        if f64::from(machine.cpus) > most {
            inferred.push(format!("{name}: more than {most} CPUs at once"));
        }
        let ns = (0..=machine.cpus).map(|cpus| interpolate(&points, f64::from(cpus.max(1)))).collect();
        let last = rows.last();
        Ok(Curve {
            ns,
            inferred,
            lines: last.map(|row| row.lines.clone()).unwrap_or_default(),
            transfers: last.map_or(0.0, |row| row.transfers),
        })
    }

    /// The cost of each submission besides the hardware's own time, with 1, 2 .. concurrent CPUs of `machine`, by `way`: [`SHARED`],
    /// [`ALONE`] or [`QUEUES`]. It was measured with the waits of `vtd`, of which each submission to a ring takes one, and two while others
    /// submit; or with one wait of `smmuv3` on CPUs' own queues.
    ///
    /// # Errors
    /// It was not measured.
    pub(super) fn ring(&self, way: &str, machine: &Machine) -> Result<Curve, String> {
        let (with, without) = (self.curve(way, machine)?, self.curve("raw", machine)?);
        let both = with.ns.iter().zip(&without.ns).enumerate();
        let ns = both.map(|(cpus, (with, without))| {
            let waits = match way {
                QUEUES => SMMUV3,
                _ if cpus > 1 => 2.0 * VTD,
                _ => VTD,
            };
            (with - without - waits).max(0.0)
        });
        Ok(Curve { ns: ns.collect(), ..with })
    }

    /// The difference between `name` with `pages` pages and with one page. Without a measured size, that of a page table's own work.
    pub fn size(&self, name: &str, pages: u64) -> Size {
        let alone =
            |name: &str, pages| self.of(name, pages).first().filter(|row| row.cpus == 1).map(|row| row.ns);
        let mut sizes: Vec<u64> = self.0.iter().filter(|row| row.name == name).map(|row| row.pages).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let own = if sizes.len() > 1 { name } else { "raw" };
        let points: Vec<(f64, f64)> = [1, 4, 16, 64]
            .iter()
            .filter_map(|pages| Some((*pages as f64, alone(own, *pages)? - alone(own, 1)?)))
            .collect();
        let shared = |pages: u64| {
            let (few, many) = (self.of(name, 1), self.of(name, pages));
            let both = many.iter().rev().find_map(|row| {
                let same = |other: &&&Row| (other.cpus, other.per_socket) == (row.cpus, row.per_socket);
                let other = few.iter().find(same).filter(|other| other.cpus > 1)?;
                Some((other.ns - few.first()?.ns, row.ns - many.first()?.ns))
            });
            // Unshared state stays unshared.
            both.filter(|(one, _)| *one > 10.0).map(|(one, more)| (more / one).max(1.0))
        };
        let shares: Vec<(f64, f64)> =
            sizes.iter().filter_map(|pages| Some((*pages as f64, shared(*pages)?))).collect();
        let shared = if shares.is_empty() { 1.0 } else { line(&shares, pages as f64) };
        Size { own_ns: line(&points, pages as f64).max(0.0), shared }
    }
}

/// `NAME-PAGES[-liveN or -anyN][@PROFILE] CPUS PER_SOCKET NS TRANSFERS FAR ..`
fn row(text: &str) -> Option<Row> {
    let mut words = text.split(' ');
    let name = words.next()?;
    // The order of unmaps, and the hardware, make a different operation.
    let (name, profile) = name.split_at(name.find('@').unwrap_or(name.len()));
    let (name, order) = match (name.split_once("-live"), name.split_once("-any")) {
        (Some((name, _)), _) => (name, ""),
        (_, Some((name, _))) => (name, "-any"),
        _ => (name, ""),
    };
    let (name, pages) = name.rsplit_once('-')?;
    let (cpus, per_socket) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mut number = || words.next()?.parse().ok().filter(|number: &f64| number.is_finite());
    let (ns, transfers, far) = (number()?, number()?, number()?);
    let name = format!("{name}{order}{profile}");
    Some(Row { name, pages: pages.parse().ok()?, cpus, per_socket, ns, transfers, far, lines: Vec::new() })
}

/// Interpolates between two points as a power of the number; extrapolates the last two.
fn interpolate(points: &[(f64, f64)], at: f64) -> f64 {
    let Some(above) = points.iter().position(|point| point.0 >= at).or(points.len().checked_sub(1)) else {
        return 0.0;
    };
    let (right, left) = (points[above], points[above.saturating_sub(1)]);
    if right.0 == at || above == 0 {
        return right.1;
    }
    let slope = (right.1 / left.1).ln() / (right.0 / left.0).ln();
    left.1 * (at / left.0).powf(slope)
}

/// Interpolates linearly, and extrapolates.
fn line(points: &[(f64, f64)], at: f64) -> f64 {
    let Some(above) = points.iter().position(|point| point.0 >= at).or(points.len().checked_sub(1)) else {
        return 0.0;
    };
    let (right, left) = (points[above], points[above.saturating_sub(1)]);
    if above == 0 || right.0 == left.0 {
        return right.1;
    }
    left.1 + (right.1 - left.1) * (at - left.0) / (right.0 - left.0)
}
