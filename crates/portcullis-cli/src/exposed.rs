//! What a policy leaves open, the same for each form of report.

use portcullis_trace::replay::{Exposure, PolicyReport, Report};

/// Bytes that devices could reach and should not, times seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Exposed {
    /// All memory, all the time: nothing is translated.
    All,
    /// The recording does not tell it.
    NotKnown,
    /// Of the mappings of which the recording tells the bytes, so much.
    AtLeast(f64),
    Sum(f64),
}

impl Exposed {
    /// What `policy` leaves open of freed memory, and of other data, if the recording tells which bytes are buffers.
    pub fn of(policy: &PolicyReport, tells_bytes: bool) -> [Self; 2] {
        // The replay's own figures are of the memory that the recording names alone; the device has all the rest, too.
        if policy.exposure_counted.is_none() {
            [Self::All; 2]
        } else {
            Self::both(policy.exposure, tells_bytes)
        }
    }

    /// The same by the domains' own account, where there is one.
    pub fn counted(policy: &PolicyReport, tells_bytes: bool) -> Option<[Self; 2]> {
        policy.exposure_counted.map(|counted| Self::both(counted, tells_bytes))
    }

    fn both(exposure: Exposure, tells_bytes: bool) -> [Self; 2] {
        let other = match exposure.neighbour_byte_s {
            open if tells_bytes => Self::Sum(open),
            0.0 => Self::NotKnown,
            open => Self::AtLeast(open),
        };
        [Self::Sum(exposure.stale_byte_s), other]
    }

    /// As CSV has it: empty where it is not known.
    pub fn csv(self) -> String {
        match self {
            Self::All => "all".into(),
            Self::NotKnown => String::new(),
            Self::AtLeast(open) | Self::Sum(open) => open.to_string(),
        }
    }

    /// As JSON has it, which prints `null` for a NaN.
    fn json(self) -> f64 {
        match self {
            Self::All | Self::NotKnown => f64::NAN,
            Self::AtLeast(open) | Self::Sum(open) => open,
        }
    }
}

/// `report` as JSON has it.
pub fn for_json(report: &Report) -> Report {
    let mut report = report.clone();
    let tells_bytes = report.trace.tells_copies();
    let figures = |both: [Exposed; 2]| {
        let [stale_byte_s, neighbour_byte_s] = both.map(Exposed::json);
        Exposure { stale_byte_s, neighbour_byte_s }
    };
    for policy in &mut report.policies {
        let (seen, counted) = (Exposed::of(policy, tells_bytes), Exposed::counted(policy, tells_bytes));
        (policy.exposure, policy.exposure_counted) = (figures(seen), counted.map(figures));
    }
    report
}
