//! The CPU usage during a recording: a comment line at its beginning, which `portcullis record` writes and other readers skip.

use std::fmt;

/// The prefix of the figures.
const MARK: &str = "# portcullis:";

/// The length of the recording, and the CPU usage.
///
/// ```
/// use portcullis_trace::Measured;
///
/// let measured = Measured { cpus: 4, wall_ns: 10_000_000_000, busy_ns: 9_000_000_000, own_ns: 100_000_000 };
/// let line = "# portcullis: cpus=4 wall_ns=10000000000 busy_ns=9000000000 own_ns=100000000";
/// assert_eq!(measured.to_string(), line);
/// assert_eq!(Measured::read(line.as_bytes()), Some(measured));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// CPUs that were online.
    pub cpus: u32,
    /// From enabling to disabling the events, in nanoseconds.
    pub wall_ns: u64,
    /// CPU time of the whole machine in between, in nanoseconds, except idle and I/O wait. It includes the recorder's, and the kernel's for
    /// tracing.
    pub busy_ns: u64,
    /// CPU time of the recorder, in nanoseconds.
    pub own_ns: u64,
}

impl Measured {
    /// Parses `line`, a comment; `None` if it is another, or has impossible figures.
    pub fn read(line: &[u8]) -> Option<Self> {
        let rest = std::str::from_utf8(line).ok()?.strip_prefix(MARK)?;
        let value = |key: &str| {
            let word = rest.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='))?;
            word.parse::<u64>().ok()
        };
        let measured = Self {
            cpus: u32::try_from(value("cpus")?).ok()?,
            wall_ns: value("wall_ns")?,
            busy_ns: value("busy_ns")?,
            own_ns: value("own_ns")?,
        };
        (measured.cpus > 0 && measured.wall_ns > 0).then_some(measured)
    }

    /// The CPU usage, from 0 to 1.
    pub fn share(&self) -> f64 {
        (self.busy_ns as f64 / (self.wall_ns as f64 * f64::from(self.cpus))).min(1.0)
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpus, wall_ns, busy_ns, own_ns } = self;
        write!(f, "{MARK} cpus={cpus} wall_ns={wall_ns} busy_ns={busy_ns} own_ns={own_ns}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_cannot_be_are_none() {
        let of = |text: &str| Measured::read(text.as_bytes());
        assert!(of("# portcullis: cpus=1 wall_ns=1 busy_ns=0 own_ns=0 more=7").is_some());
        for text in [
            "# portcullis: cpus=0 wall_ns=1 busy_ns=0 own_ns=0",
            "# portcullis: cpus=1 wall_ns=0 busy_ns=0 own_ns=0",
            "# portcullis: cpus=1 wall_ns=1 busy_ns=0",
            "# portcullis: cpus=5000000000 wall_ns=1 busy_ns=0 own_ns=0",
            "# portcullis: cpus=1 wall_ns=-1 busy_ns=0 own_ns=0",
            "# tracer: nop",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn a_share_is_of_all_cpus() {
        let measured = Measured { cpus: 2, wall_ns: 1_000, busy_ns: 500, own_ns: 100 };
        assert_eq!(measured.share(), 0.25);
        assert_eq!(Measured { busy_ns: 5_000, ..measured }.share(), 1.0);
    }
}
