//! Why Linux is lazy or strict, or protects nothing.

use serde::Serialize;

use super::devices::Devices;
use super::kernel::{Kernel, Maker};
use super::log::Log;
use super::units::Unit;

/// How most devices are protected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mode {
    /// `strict`, `lazy` or `passthrough`; `None` where nothing says so.
    pub usual: Option<String>,
    pub why: Option<String>,
}

impl Mode {
    pub fn read(kernel: &Kernel, units: &[Unit], devices: &Devices, log: &Log) -> Self {
        let usual = devices.modes().into_iter().next().map(|(mode, _)| mode).or_else(|| logged(log));
        if units.is_empty() && devices.groups.is_empty() {
            return Self { usual: None, why: None };
        }
        let why = usual.as_deref().and_then(|mode| match mode {
            "passthrough" => passthrough(kernel, log),
            "strict" => strict(kernel, units, log),
            "lazy" => lazy(kernel, log),
            _ => None,
        });
        Self { usual, why }
    }
}

/// The mode that devices have after a boot without passthrough, and why; `None` where nothing says so.
pub fn translated(kernel: &Kernel, units: &[Unit], log: &Log) -> Option<(&'static str, String)> {
    let lazily = || lazy(kernel, log).map(|why| ("lazy", why));
    let is_asked = kernel.switch("iommu.strict") == Some(false);
    let built = kernel.config.as_ref().and_then(|config| config.default_mode);
    match strict(kernel, units, log) {
        // What an emulated unit asks for holds whatever the parameter says.
        Some(why) if !is_asked || why.starts_with(CACHING) => Some(("strict", why)),
        _ if is_asked => lazily(),
        // Linux's `iommu_dma_strict` begins with what CONFIG_IOMMU_DEFAULT_DMA_STRICT says.
        _ if built == Some("passthrough") => built_in(kernel, "passthrough").map(|why| ("lazy", why)),
        _ => lazily(),
    }
}

const TYPE: &str = "iommu: Default domain type: ";
const POLICY: &str = "iommu: DMA domain TLB invalidation policy: ";

/// What the log says on kernels whose groups have no `type`.
fn logged(log: &Log) -> Option<String> {
    let policy = log.after(POLICY).and_then(|rest| rest.split(' ').next());
    match (log.after(TYPE)?, policy) {
        (kind, _) if kind.starts_with("Passthrough") => Some("passthrough".into()),
        (_, Some(policy)) => Some(policy.to_owned()),
        // Before 5.15 Intel's and AMD's drivers were lazy without a word.
        _ => None,
    }
}

fn passthrough(kernel: &Kernel, log: &Log) -> Option<String> {
    // The last word about it holds.
    let asked = |word: &String| kernel.passes_through(word).map(|on| (on, word.clone()));
    match kernel.cmdline.iter().rev().find_map(asked) {
        Some((on, word)) => on.then(|| format!("the kernel's parameter {word}")),
        None => built_in(kernel, "passthrough").or_else(|| {
            let kind = log.after(TYPE).filter(|kind| kind.starts_with("Passthrough"));
            kind.map(|_| "the kernel's default".into())
        }),
    }
}

/// How the reason begins that an emulated unit is.
const CACHING: &str = "caching mode";

fn strict(kernel: &Kernel, units: &[Unit], log: &Log) -> Option<String> {
    if kernel.switch("iommu.strict") == Some(true) {
        return Some("the kernel's parameter iommu.strict=1".into());
    }
    for (name, value) in [("intel_iommu", "strict"), ("amd_iommu", "fullflush")] {
        if kernel.says(name, value) {
            return Some(format!("the kernel's parameter {name}={value}"));
        }
    }
    let is_said = log.has("batching disallowed due to virtualization")
        || log.has("Using strict mode due to virtualization");
    if is_said || units.iter().any(|unit| unit.caching_mode == Some(true)) {
        return Some(format!(
            "{CACHING} (the IOMMU is emulated, and each map tells the host, so Linux does not put off unmaps)"
        ));
    }
    let is_built = || kernel.config.as_ref().is_some_and(|config| config.default_mode.is_some());
    let default = || {
        (kernel.maker == Maker::Arm && log.after(POLICY).is_none() && !is_built())
            .then(|| "Linux's default for Arm".into())
    };
    built_in(kernel, "strict").or_else(default).or_else(|| default_of(log, "strict"))
}

fn lazy(kernel: &Kernel, log: &Log) -> Option<String> {
    if kernel.switch("iommu.strict") == Some(false) {
        return Some("the kernel's parameter iommu.strict=0".into());
    }
    built_in(kernel, "lazy").or_else(|| default_of(log, "lazy"))
}

/// By the configuration that the kernel was built with.
fn built_in(kernel: &Kernel, mode: &str) -> Option<String> {
    let config = kernel.config.as_ref()?;
    (config.default_mode == Some(mode)).then(|| {
        let name = match mode {
            "passthrough" => "CONFIG_IOMMU_DEFAULT_PASSTHROUGH",
            "lazy" => "CONFIG_IOMMU_DEFAULT_DMA_LAZY",
            _ => "CONFIG_IOMMU_DEFAULT_DMA_STRICT",
        };
        format!("the default that this kernel was built with ({name})")
    })
}

fn default_of(log: &Log, mode: &str) -> Option<String> {
    let said = log.after(POLICY)?;
    (said.starts_with(mode) && !said.contains("command line"))
        .then(|| "the kernel's default, as its log says".into())
}
