//! What a machine's cache lines and memory cost: by default, or from a file.

use std::path::{Path, PathBuf};

use portcullis_trace::Printable;
use serde::{Deserialize, Serialize};

/// A figure and where it comes from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub value: f64,
    pub source: String,
}

/// Times are nanoseconds; those of copies are for each KiB.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    pub machine: String,
    /// A line of another CPU of the socket, and of another socket.
    pub near_ns: Figure,
    pub far_ns: Figure,
    pub atomic_ns: Figure,
    pub pause_ns: Figure,
    /// From cache to cache, from memory to memory, and from another CPU's cache.
    pub copy_hot_ns: Figure,
    pub copy_cold_ns: Figure,
    pub copy_remote_ns: Figure,
    /// The most that the memory of a socket copies in a second.
    pub socket_copy_gb_per_s: Figure,
    /// One memory read of an IOMMU's page walk.
    pub walk_read_ns: Figure,
}

#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    #[error("{}: {source}", Printable(path.display()))]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is no calibration: {}", Printable(path.display()), Printable(source))]
    Parse { path: PathBuf, source: serde_json::Error },
    #[error("{}: {name} is {value}, expected more than 0, up to 1,000,000", Printable(path.display()))]
    Figure { path: PathBuf, name: &'static str, value: f64 },
}

impl Figure {
    /// `value`, rounded to two digits.
    pub fn new(value: f64, source: &str) -> Self {
        Self { value: (value * 100.0).round() / 100.0, source: source.to_owned() }
    }
}

impl Default for Calibration {
    /// A server of today, in round figures.
    fn default() -> Self {
        let here = "the median of five runs of portcullis calibrate on 2 virtual CPUs of an AMD EPYC (family 26), 23 November 2026";
        Self {
            machine: "a server of today, in round figures (--calibration FILE reads others)".into(),
            near_ns: Figure::new(60.0, "47 to 51 ns on Xeons, 23 to 115 on EPYCs (core-to-core-latency)"),
            far_ns: Figure::new(120.0, "108 to 197 ns (core-to-core-latency)"),
            atomic_ns: Figure::new(6.0, "some 20 cycles on x86"),
            pause_ns: Figure::new(40.0, "x86's pause since Skylake, some 140 cycles"),
            copy_hot_ns: Figure::new(7.7, here),
            copy_cold_ns: Figure::new(142.0, here),
            copy_remote_ns: Figure::new(16.9, &format!("{here}; to a page that is hot, and within a socket")),
            socket_copy_gb_per_s: Figure::new(
                68.0,
                "8 channels of DDR4-3200 move 204.8 GB/s; a copied byte is read, fetched and written",
            ),
            walk_read_ns: Figure::new(197.0, "fitted in Fast & Safe (SOSP 2024)"),
        }
    }
}

impl Calibration {
    /// Each figure with its name in a file.
    pub fn named(&self) -> [(&'static str, &Figure); 9] {
        [
            ("near_ns", &self.near_ns),
            ("far_ns", &self.far_ns),
            ("atomic_ns", &self.atomic_ns),
            ("pause_ns", &self.pause_ns),
            ("copy_hot_ns", &self.copy_hot_ns),
            ("copy_cold_ns", &self.copy_cold_ns),
            ("copy_remote_ns", &self.copy_remote_ns),
            ("socket_copy_gb_per_s", &self.socket_copy_gb_per_s),
            ("walk_read_ns", &self.walk_read_ns),
        ]
    }

    /// What a copied KiB takes: the slot is in the CPU's cache, and the driver's buffer is not.
    pub fn copied_kib_ns(&self) -> f64 {
        (self.copy_hot_ns.value + self.copy_cold_ns.value) / 2.0
    }

    /// That of `file`, or the default.
    pub fn of(file: Option<&Path>) -> Result<Self, CalibrationError> {
        file.map_or_else(|| Ok(Self::default()), Self::load)
    }

    /// Reads what `portcullis calibrate` has printed.
    pub fn load(path: &Path) -> Result<Self, CalibrationError> {
        let at = || path.to_path_buf();
        let text = portcullis_trace::input::settings(path)
            .map_err(|source| CalibrationError::Read { path: at(), source })?;
        let read: Self =
            serde_json::from_str(&text).map_err(|source| CalibrationError::Parse { path: at(), source })?;
        for (name, Figure { value, .. }) in read.named() {
            if !(*value > 0.0 && *value <= 1e6) {
                return Err(CalibrationError::Figure { path: at(), name, value: *value });
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read_and_what_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let text = serde_json::to_string(&Calibration::default()).unwrap();
        std::fs::write(&path, &text).unwrap();
        assert_eq!(Calibration::load(&path).unwrap().near_ns.value, 60.0);
        for (from, to) in [("60.0", "-1"), ("near_ns", "nearly"), ("{", "")] {
            std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
            assert!(Calibration::load(&path).unwrap_err().to_string().contains("calibration.json"), "{from}");
        }
        // Each figure has the same borders, and keeps two digits.
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        let names: Vec<&String> =
            read.as_object().unwrap().keys().filter(|name| *name != "machine").collect();
        assert_eq!(names.len(), 9);
        for name in names {
            for (value, is_read) in [(0.0, false), (0.01, true), (1e6, true), (1e6 + 1.0, false)] {
                let mut changed = read.clone();
                changed[name]["value"] = value.into();
                std::fs::write(&path, changed.to_string()).unwrap();
                let loaded = Calibration::load(&path);
                assert_eq!(loaded.is_ok(), is_read, "{name}: {value}");
                let named = format!("{name} is ");
                assert!(
                    loaded.err().is_none_or(|error| error.to_string().contains(&named)),
                    "{name}: {value}"
                );
            }
        }
        assert_eq!(Figure::new(12.3456, "").value, 12.35);
    }
}
