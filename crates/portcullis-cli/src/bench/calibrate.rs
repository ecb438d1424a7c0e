//! `portcullis calibrate`.

use std::process::ExitCode;

use portcullis_bench::calibrate::{CalibrateError, calibrate};

use crate::calibration::{Calibration, Figure};
use crate::look::number_of;
use crate::{look, print};

/// Why nothing was measured or printed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Measure(#[from] CalibrateError),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Measures and prints.
pub fn run() -> Result<ExitCode, CommandError> {
    let measured = calibrate()?;
    let here = "measured by portcullis calibrate";
    let assumed = Calibration::default();
    let or =
        |value: Option<f64>, other: &Figure| value.map_or(other.clone(), |value| Figure::new(value, here));
    let near_ns = or(measured.line_ns, &assumed.near_ns);
    let far_ns = Figure {
        value: near_ns.value * 2.0,
        source: "twice near_ns: which CPUs share a socket is not looked for".into(),
    };
    let calibration = Calibration {
        machine: format!(
            "{}, {}",
            crate::look::number_of(measured.cpus as u64, "CPU"),
            crate::machine::cpu().unwrap_or_else(|| std::env::consts::ARCH.into())
        ),
        near_ns,
        far_ns,
        atomic_ns: Figure::new(measured.atomic_ns, here),
        pause_ns: Figure::new(measured.pause_ns, here),
        copy_hot_ns: Figure::new(measured.copy_hot_ns, here),
        copy_cold_ns: Figure::new(measured.copy_cold_ns, here),
        copy_remote_ns: or(measured.copy_remote_ns, &assumed.copy_remote_ns),
        socket_copy_gb_per_s: Figure::new(
            measured.copy_gb_per_s,
            &format!(
                "{here}: what {} copied together, taken for what a socket's memory copies at the most. That is too little where \
                 a socket has more CPUs: then write its figure here, a third of what its memory moves in a second",
                number_of(measured.cpus as u64, "CPU")
            ),
        ),
        walk_read_ns: assumed.walk_read_ns,
    };
    for sentence in doubts(&calibration) {
        look::tell(&look::wrap(&format!("warning: {sentence}"), "  "));
    }
    print(&(serde_json::to_string_pretty(&calibration).map_err(std::io::Error::from)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// What no machine has that does nothing else. (Between sockets of a large server a line takes some 300 ns.)
fn doubts(calibration: &Calibration) -> Vec<String> {
    let bounds = [
        ("near_ns", calibration.near_ns.value, 5.0, 600.0),
        ("atomic_ns", calibration.atomic_ns.value, 0.5, 100.0),
        ("copy_hot_ns", calibration.copy_hot_ns.value, 2.0, 100.0),
        ("copy_cold_ns", calibration.copy_cold_ns.value, 10.0, 1_000.0),
        ("copy_remote_ns", calibration.copy_remote_ns.value, 2.0, 1_000.0),
    ];
    let doubted = bounds.into_iter().filter(|(_, value, least, most)| !(*least..=*most).contains(value));
    doubted
        .map(|(name, value, least, most)| {
            format!(
                "{name} of {value:.1} is not between {least} and {most}, as on a machine that does nothing else: measure again when it is idle, \
                 before `scale` takes this file"
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_was_busy_is_doubted() {
        let mut calibration = Calibration::default();
        assert!(doubts(&calibration).is_empty(), "{:?}", doubts(&calibration));
        (calibration.near_ns.value, calibration.copy_cold_ns.value) = (12_807.0, 6_761.0);
        let said = doubts(&calibration);
        assert!(
            said.len() == 2 && said[0].starts_with("near_ns of 12807.0 is not between 5 and 600"),
            "{said:?}"
        );
    }
}
