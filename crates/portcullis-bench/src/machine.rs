//! What a benchmark ran on.

use std::fs;

/// The machine, as far as it explains the figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// What the processor calls itself, or `unknown`.
    pub model: String,
    /// The operating system, with the kernel's release where it tells.
    pub os: String,
    /// The instruction set.
    pub arch: &'static str,
}

impl Machine {
    /// This machine. Reads files of `/proc` where there are any.
    pub fn here() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpus,
            model: model().unwrap_or_else(|| "unknown".into()),
            os: format!("{} {}", std::env::consts::OS, release.trim()).trim().into(),
            arch: std::env::consts::ARCH,
        }
    }
}

fn model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_told_as_linux_knows_it() {
        let Machine { cpus, model, os, arch } = Machine::here();
        assert_eq!(cpus, std::thread::available_parallelism().unwrap().get());
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!((os, arch), (format!("linux {}", release.trim_end()), std::env::consts::ARCH));
        let about = fs::read_to_string("/proc/cpuinfo").unwrap();
        let named = about.lines().find_map(|line| line.strip_prefix("model name\t: "));
        assert_eq!(model, named.unwrap_or("unknown"));
    }
}
