//! Kernel parameters about IOMMUs, and those of them that this kernel ignores.
//!
//! Linux is silent about most of them: `amd_iommu=pt` is a line in the log at the best, and the machine boots without what was meant.
//!
//! Sources: Documentation/admin-guide/kernel-parameters.txt of Linux 6.12, and the functions that read them (`intel_iommu_setup`,
//! `parse_amd_iommu_options`, x86's `iommu_setup`, `iommu_set_def_domain_type`, `iommu_dma_setup`, `setup_io_tlb_npages`).

use serde::Serialize;

use super::kernel::{Kernel, Maker, switched};
use super::log::Log;
use crate::linux::host::Host;
use crate::look::number_of;

/// A parameter that is about IOMMUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parameter {
    pub word: String,
    /// Why the kernel ignores it, if it does.
    pub ignored: Option<String>,
    /// What does what was meant.
    pub instead: Option<String>,
    /// What was meant holds all the same.
    #[serde(skip)]
    pub harmless: bool,
}

/// Whose kernels read a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    All,
    X86,
    Only(Maker),
}

/// What a parameter may say.
#[derive(Clone, Copy)]
enum Values {
    Switch,
    /// A list of words with commas, each read if it begins with one of these.
    Words(&'static [&'static str]),
    /// Up to two numbers, and one of these words, with commas.
    Slots(&'static [&'static str]),
    Any,
}

struct Known {
    name: &'static str,
    on: On,
    values: Values,
    /// The first version that reads it on x86.
    since: (u32, u32),
}

const fn known(name: &'static str, on: On, values: Values) -> Known {
    Known { name, on, values, since: (0, 0) }
}

const KNOWN: [Known; 17] = [
    Known { name: "iommu.passthrough", on: On::All, values: Values::Switch, since: (5, 4) },
    Known { name: "iommu.strict", on: On::All, values: Values::Switch, since: (5, 14) },
    Known { name: "iommu.forcedac", on: On::All, values: Values::Switch, since: (5, 13) },
    known("iommu", On::X86, Values::Words(&X86)),
    known("intel_iommu", On::Only(Maker::Intel), Values::Words(&INTEL)),
    known("amd_iommu", On::Only(Maker::Amd), Values::Words(&AMD)),
    known("amd_iommu_dump", On::Only(Maker::Amd), Values::Any),
    known("amd_iommu_intr", On::Only(Maker::Amd), Values::Words(&["legacy", "vapic"])),
    known("ivrs_ioapic", On::Only(Maker::Amd), Values::Any),
    known("ivrs_hpet", On::Only(Maker::Amd), Values::Any),
    known("ivrs_acpihid", On::Only(Maker::Amd), Values::Any),
    known(
        "intremap",
        On::X86,
        Values::Words(&["on", "off", "nosid", "no_x2apic_optout", "nopost", "posted_msi"]),
    ),
    known("swiotlb", On::All, Values::Slots(&["force", "noforce"])),
    known("arm_smmu.disable_bypass", On::Only(Maker::Arm), Values::Switch),
    known("arm_smmu_v3.disable_bypass", On::Only(Maker::Arm), Values::Switch),
    known("arm_smmu.force_stage", On::Only(Maker::Arm), Values::Any),
    known("arm_smmu_v3.disable_msipolling", On::Only(Maker::Arm), Values::Switch),
];

const X86: [&str; 23] = [
    "off",
    "force",
    "noforce",
    "biomerge",
    "panic",
    "nopanic",
    "merge",
    "nomerge",
    "forcesac",
    "allowdac",
    "nodac",
    "usedac",
    "soft",
    "pt",
    "nopt",
    "group_mf",
    "calgary",
    "noagp",
    "noaperture",
    "memaper",
    "fullflush",
    "nofullflush",
    "leak",
];
const INTEL: [&str; 11] = [
    "on",
    "off",
    "igfx_off",
    "forcedac",
    "strict",
    "sp_off",
    "sm_on",
    "sm_off",
    "tboot_noforce",
    "nobounce",
    "eth_off",
];
const AMD: [&str; 11] = [
    "fullflush",
    "force_enable",
    "off",
    "force_isolation",
    "pgtbl_v1",
    "pgtbl_v2",
    "irtcachedis",
    "nohugepages",
    "pgsize_4k",
    "v2_pgsizes_only",
    "nosnp",
];

/// Modules with parameters of their own, which `/sys/module` shows where they are loaded.
const MODULES: [&str; 8] = [
    "vfio",
    "vfio_pci",
    "vfio_iommu_type1",
    "iommufd",
    "arm_smmu",
    "arm_smmu_v3",
    "virtio_iommu",
    "portcullis",
];

/// The parameters about IOMMUs, in the order of the command line.
pub fn of(kernel: &Kernel, host: &Host<'_>, log: &Log) -> Vec<Parameter> {
    kernel.cmdline.iter().filter_map(|word| one(word, kernel, host, log)).collect()
}

fn one(word: &str, kernel: &Kernel, host: &Host<'_>, log: &Log) -> Option<Parameter> {
    let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    let plain = plain(name);
    let told = |ignored: Option<(String, Option<String>)>| {
        let harmless = ignored.as_ref().is_some_and(|(_, instead)| instead.is_none());
        let (ignored, instead) = ignored.map_or((None, None), |(why, instead)| (Some(why), instead));
        Some(Parameter { word: word.into(), ignored, instead, harmless })
    };
    if let Some(known) = KNOWN.iter().find(|known| known.name == plain) {
        return told(known.ignored(value, kernel));
    }
    if plain == "pcie_acs_override" {
        return told(acs_override(log));
    }
    if let Some((module, parameter)) = plain.split_once('.').filter(|(module, _)| MODULES.contains(module)) {
        let folder = format!("sys/module/{module}/parameters");
        let is_absent = host.exists(&folder) && !host.exists(&format!("{folder}/{parameter}"));
        let why = format!("the module {module} of this kernel has no parameter {parameter}");
        return told(is_absent.then_some((why, None)));
    }
    let nearest = nearest(&plain, kernel)?;
    let value = value.map_or(String::new(), |value| format!("={value}"));
    told(Some(("Linux has no parameter of this name".into(), Some(format!("{nearest}{value}")))))
}

/// Linux takes `-` and `_` for the same.
fn plain(name: &str) -> String {
    let name = name.replace('-', "_");
    name.split_once('[').map_or(name.clone(), |(name, _)| name.to_owned())
}

/// The patch that reads it is not in Linux, but in the kernels of some distributions, which tell.
fn acs_override(log: &Log) -> Option<(String, Option<String>)> {
    let why =
        "only kernels with a patch that is not in Linux read it, and the log of this one does not say so";
    (!log.has("ACS overrides enabled") && log.state == super::log::State::Whole).then_some((why.into(), None))
}

impl Known {
    /// Why it is ignored, and what does what was meant.
    fn ignored(&self, value: Option<&str>, kernel: &Kernel) -> Option<(String, Option<String>)> {
        if let Some(why) = self.elsewhere(kernel) {
            return Some((why, instead(self.name, value, kernel)));
        }
        if kernel.is_x86() && !kernel.since(self.since) {
            let why =
                format!("x86 kernels read it since {}.{}, and this one is older", self.since.0, self.since.1);
            return Some((why, instead(self.name, value, kernel)));
        }
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            return Some(("it needs a value behind a =".into(), instead(self.name, Some("on"), kernel)));
        };
        match self.values {
            Values::Switch if switched(value).is_none() => {
                Some((format!("{value} is neither 1 nor 0"), Some(format!("{}=1", self.name))))
            }
            Values::Words(words) => {
                let is_read = |one: &str| words.iter().any(|word| one.starts_with(word));
                let odd = value.split(',').find(|one| !is_read(one) && !one.is_empty())?;
                Some(self.is_no_value(odd, words, kernel))
            }
            Values::Slots(words) => {
                let is_number = |one: &&str| !one.is_empty() && one.bytes().all(|byte| byte.is_ascii_digit());
                let numbers = value.split(',').take(2).take_while(is_number).count();
                let rest = value.split(',').skip(numbers).collect::<Vec<_>>().join(",");
                let is_read = rest.is_empty() || words.contains(&rest.as_str());
                (!is_read)
                    .then(|| self.slots(value).unwrap_or_else(|| self.is_no_value(&rest, words, kernel)))
            }
            _ => None,
        }
    }

    /// A size where a number of slots is read.
    fn slots(&self, value: &str) -> Option<(String, Option<String>)> {
        const UNITS: [(char, u64); 3] = [('K', 10), ('M', 20), ('G', 30)];
        let unit = value.chars().last()?;
        let (_, shift) = UNITS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(&unit))?;
        let number: u64 = value.trim_end_matches(unit).parse().ok()?;
        let slots = number.checked_mul(1 << shift)? / super::memory::SLOT;
        let why = format!("it reads {} of 2 KiB and not the {unit}", number_of(number, "slot"));
        Some((why, Some(format!("{}={slots}", self.name))))
    }

    /// A value that is not read, with one of `words` that it was most likely to be.
    fn is_no_value(&self, odd: &str, words: &[&str], kernel: &Kernel) -> (String, Option<String>) {
        // Two letters are near to too much: `no` to `on`.
        let is_meant = |word: &&&str| {
            odd.eq_ignore_ascii_case(word) || odd.len() > 2 && word.len() > 2 && distance(odd, word) <= 1
        };
        let meant = words.iter().find(is_meant).map(|word| format!("{}={word}", self.name));
        let why = format!("{odd} is no value of {}", self.name);
        (why, instead(self.name, Some(odd), kernel).or(meant))
    }

    fn elsewhere(&self, kernel: &Kernel) -> Option<String> {
        let maker = kernel.maker;
        let whose = match self.on {
            On::All => return None,
            _ if !kernel.maker_is_known => return None,
            On::X86 if matches!(maker, Maker::Intel | Maker::Amd) => return None,
            On::X86 => return Some("only kernels for x86 read it".into()),
            On::Only(one) if one == maker => return None,
            On::Only(Maker::Intel) => "Intel's IOMMU",
            On::Only(Maker::Amd) => "AMD's IOMMU",
            On::Only(_) => "Arm's SMMU",
        };
        Some(format!("it is for {whose}, which this machine does not have"))
    }
}

/// What does what `name=value` was to do, on this machine; `None` where that is so without it.
fn instead(name: &str, value: Option<&str>, kernel: &Kernel) -> Option<String> {
    let value = value.unwrap_or_default();
    let has = |word: &str| value.split(',').any(|one| one == word);
    let passthrough =
        if kernel.is_x86() && !kernel.since((5, 4)) { "iommu=pt" } else { "iommu.passthrough=1" };
    let strict = match (kernel.maker, kernel.since((5, 14))) {
        (Maker::Intel, false) => "intel_iommu=strict",
        (Maker::Amd, false) => "amd_iommu=fullflush",
        _ => "iommu.strict=1",
    };
    match name {
        "iommu.passthrough" => (switched(value)?).then(|| passthrough.into()),
        "iommu.strict" => (switched(value)?).then(|| strict.into()),
        _ if has("pt") || has("passthrough") => Some(passthrough.into()),
        _ if has("nopt") => Some("iommu.passthrough=0".into()),
        _ if has("strict") || has("fullflush") => Some(strict.into()),
        _ if has("lazy") => Some("iommu.strict=0".into()),
        _ if has("on") && kernel.maker == Maker::Intel && name == "iommu" => Some("intel_iommu=on".into()),
        _ if has("on") && name == "intel_iommu" && kernel.maker == Maker::Intel => {
            Some("intel_iommu=on".into())
        }
        // AMD's and Arm's are on by themselves.
        _ => None,
    }
}

/// The parameter of IOMMUs that a name was most likely to be.
fn nearest(name: &str, kernel: &Kernel) -> Option<&'static str> {
    let is_ours = |known: &&Known| known.elsewhere(kernel).is_none();
    let near = KNOWN.iter().filter(is_ours).map(|known| (distance(name, known.name), known.name)).min()?;
    let most = if name.len() < 5 { 0 } else { name.len() / 4 };
    (near.0 <= most.min(2)).then_some(near.1)
}

/// How many letters must be put in, taken out, replaced or swapped with the next one. Words that are long are far from all.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(40).collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut best = (rows[i][j] + usize::from(x != y)).min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i - 1] == *y && b[j - 1] == *x {
                best = best.min(rows[i - 1][j - 1] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
#[path = "../../tests/doctor/parameters.rs"]
mod tests;
