//! How each policy is switched on under Linux: what to type.
//!
//! Linux's own modes are those of its documents `admin-guide/kernel-parameters` and `ABI/testing/sysfs-kernel-iommu_groups`.

use std::path::Path;

use portcullis::domain::Policy;
use portcullis_model::scale::{LINUX_STRICT, LINUX_STRICT_SMMU};
use portcullis_trace::Printable;
use portcullis_trace::replay::Mode;

use crate::args::On;

/// What a verdict chooses among.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// Linux's own modes.
    Linux,
    /// These, and the module's.
    Module,
    /// All that the library has.
    Library,
}

impl Offer {
    /// What there is on a machine whose IOMMU has page tables of `format`: the module runs on x86-64 alone.
    pub fn of(on: On, format: &str) -> Self {
        match on {
            On::Library => Self::Library,
            On::Linux if is_x86(format) => Self::Module,
            On::Linux => Self::Linux,
        }
    }

    /// Whether `mode` is among them.
    pub fn has(self, mode: Mode) -> bool {
        match mode {
            // The module's `auto` waits for each buffer that it maps; adaptive waits for them in groups.
            Mode::StrictBatch | Mode::StrictRing | Mode::Adaptive => self == Self::Library,
            Mode::Bounce => self != Self::Linux,
            Mode::Each(_) | Mode::Swiotlb | Mode::Registered => true,
        }
    }
}

/// What the library's figures leave out, where Linux's own drivers are protected. docs/linux.md has these counts.
pub const LINUX_CODE: &str = "Linux's own code is not in these figures: with it a mapping and its unmap take 2,604 instructions under strict, 2,105 under lazy, and 1,206 under the \
                              module's bounce, without waits and copies (docs/linux.md).";

/// Linux's own strict mode as a design of `scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnStrict {
    /// The design's name.
    pub name: &'static str,
    /// Where it differs from the library's.
    pub differs: &'static str,
    /// The design that is the same but for a lock that the CPUs behind an IOMMU share; `None` where there is none.
    pub unlocked: Option<&'static str>,
}

impl OwnStrict {
    const X86: Self = Self {
        name: LINUX_STRICT,
        differs: "a CPU holds the domain's lock while it waits",
        unlocked: Some(LINUX_STRICT_SMMU),
    };
    const ARM: Self = Self {
        name: LINUX_STRICT_SMMU,
        differs: "each unmap has a CMD_SYNC of its own, and the SMMU carries out one after the other",
        unlocked: None,
    };

    /// Where page tables are of `format`. That of RISC-V was not looked at.
    pub fn of(format: &str) -> Option<Self> {
        match format {
            _ if is_x86(format) => Some(Self::X86),
            _ if format.starts_with("arm") => Some(Self::ARM),
            _ => None,
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::X86, Self::ARM].into_iter().find(|own| own.name == name)
    }
}

/// Whether IOMMUs of x86-64 have page tables of `format`: VT-d's, those of processors, and AMD-Vi's.
pub fn is_x86(format: &str) -> bool {
    ["vtd", "x86", "amd"].iter().any(|name| format.starts_with(name))
}

/// The device that commands name, and its IOMMU group.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// As Linux names it; `None` where the recording has none like it.
    device: Option<String>,
    /// `None` where this machine has no such device, or it is in none.
    group: Option<String>,
}

impl Place {
    /// The first of `devices` that is on a PCI bus, with the group that it has on this machine, of which the recording is.
    pub fn here(devices: &[String]) -> Self {
        Self::of(devices, Path::new("/sys"))
    }

    /// The same, of no machine.
    pub fn named(devices: &[String]) -> Self {
        Self { device: devices.iter().find(|name| is_pci(name)).cloned(), group: None }
    }

    fn of(devices: &[String], sys: &Path) -> Self {
        let Self { device, .. } = Self::named(devices);
        let link = device.as_ref().and_then(|name| {
            std::fs::read_link(sys.join("bus/pci/devices").join(name).join("iommu_group")).ok()
        });
        let group = link.and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
        Self { device, group: group.filter(|number| number.bytes().all(|byte| byte.is_ascii_digit())) }
    }

    fn device(&self) -> String {
        self.device.as_ref().map_or("DEVICE".into(), |name| Printable(name).to_string())
    }

    /// The file that says how a group is protected.
    fn type_file(&self) -> String {
        format!("/sys/kernel/iommu_groups/{}/type", self.group.as_deref().unwrap_or("N"))
    }
}

/// A PCI address, with its domain or without.
pub fn is_pci(name: &str) -> bool {
    let hex = |text: &str, len: std::ops::RangeInclusive<usize>| {
        len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = name.split(':').collect();
    let (domain, bus, rest) = match parts[..] {
        [bus, rest] => ("0000", bus, rest),
        [domain, bus, rest] => (domain, bus, rest),
        _ => return false,
    };
    let slot = rest.split_once('.');
    hex(domain, 4..=8)
        && hex(bus, 2..=2)
        && slot.is_some_and(|(at, function)| hex(at, 2..=2) && hex(function, 1..=1))
}

/// How `mode` is switched on: a clause.
pub fn how(mode: Mode, place: &Place) -> String {
    let device = place.device();
    let group = |word: &str, when: &str| {
        format!(
            "or until the next boot for one group, {when}, `echo {word} | sudo tee {}`",
            place.type_file()
        )
    };
    const UNBOUND: &str = "while no driver has any of its devices";
    match mode {
        Mode::Each(Policy::Strict) => format!(
            "`iommu.strict=1 iommu.passthrough=0` on the kernel's command line (`portcullis doctor` says what this machine needs besides, \
             and what holds now); {}",
            group("DMA", UNBOUND)
        ),
        Mode::Each(Policy::Passthrough) => {
            format!("`iommu.passthrough=1` on the kernel's command line; {}", group("identity", UNBOUND))
        }
        Mode::Each(_) => format!(
            "`iommu.strict=0 iommu.passthrough=0` on the kernel's command line; {}",
            group("DMA-FQ", "under its driver if it is strict")
        ),
        Mode::Bounce => format!(
            "`sudo portcullis protect {device} --policy bounce`, and so for each other device, with the module, which takes the driver \
             away for a moment, and has run in QEMU alone so far, on x86-64"
        ),
        Mode::Adaptive => {
            "no setting: the module's policy `auto` copies or maps, too, but waits for each buffer that it maps, and no row has its cost"
                .into()
        }
        Mode::Swiotlb => {
            "`swiotlb=force` on the kernel's command line, with the IOMMU off or passed through".into()
        }
        Mode::Registered => {
            "no setting: an application has it that registers its memory once, by VFIO, iommufd or io_uring"
                .into()
        }
        Mode::StrictBatch | Mode::StrictRing => {
            "no setting: a driver has it that uses the library's queues (docs/porting.md)".into()
        }
    }
}

/// What Linux calls `mode`, or who has it there.
pub fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Each(Policy::Strict) => "strict, `iommu.strict=1`, a group's type `DMA`",
        Mode::Each(Policy::Passthrough) => "passthrough, `iommu.passthrough=1`, a group's type `identity`",
        Mode::Each(_) => "lazy, its flush queue, `iommu.strict=0`, a group's type `DMA-FQ`",
        Mode::Bounce => "our module's `--policy bounce`",
        Mode::Adaptive => {
            "no setting; our module's `--policy auto` copies or maps, too, but waits for each buffer that it maps"
        }
        Mode::Swiotlb => "`swiotlb=force`",
        Mode::Registered => "no setting; VFIO, iommufd, and io_uring's registered buffers",
        Mode::StrictBatch | Mode::StrictRing => "no setting; a driver's own, with the library's queues",
    }
}

/// How the chosen policy of `offer` is switched on, and Linux's own modes that translate, which need no module.
pub fn of_choice(choice: &str, offer: Offer, place: &Place) -> String {
    let strict = Mode::Each(Policy::Strict);
    let chosen = Mode::named(choice).unwrap_or(strict);
    let of = |mode: Mode| format!("{}: {}", mode.name(), how(mode, place));
    let lazy = Mode::Each(Policy::LAZY);
    if chosen == strict {
        let module =
            if offer == Offer::Linux { " Our module, which copies, runs on x86-64 alone." } else { "" };
        format!("On Linux, {}. For {}.{module}", of(strict), of(lazy))
    } else {
        format!(
            "On Linux, {} (docs/linux.md). Without the module, {}. For {}.",
            of(chosen),
            of(strict),
            of(lazy)
        )
    }
}

#[cfg(test)]
mod tests {
    use portcullis_trace::replay::FORMATS;

    use super::*;

    #[test]
    fn an_address_of_pci_has_parts_of_fixed_lengths() {
        for name in ["0000:01:00.0", "01:00.0", "10000:e1:1f.7", "abcdef01:fe:0A.1"] {
            assert!(is_pci(name), "{name}");
        }
        for name in [
            "",
            "01",
            "01:00",
            "1:00.0",
            "001:00.0",
            "01:0.0",
            "01:000.0",
            "01:00.",
            "01:00.00",
            "000:01:00.0",
            "123456789:01:00.0",
            "0000:01:00.0:0",
            "0000:0g:00.0",
            "0000:01:0-.0",
            "0000:01:00.x",
        ] {
            assert!(!is_pci(name), "{name}");
        }
    }

    #[test]
    fn commands_name_the_device_and_its_group_where_they_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        std::os::unix::fs::symlink("../../../kernel/iommu_groups/17", device.join("iommu_group")).unwrap();
        let named = |names: &[&str]| {
            Place::of(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), folder.path())
        };
        let strict = Mode::Each(Policy::Strict);
        assert!(
            how(strict, &named(&["iommu", "0000:01:00.0"]))
                .ends_with("`echo DMA | sudo tee /sys/kernel/iommu_groups/17/type`")
        );
        assert!(
            how(strict, &named(&["0000:02:00.0"]))
                .ends_with("`echo DMA | sudo tee /sys/kernel/iommu_groups/N/type`")
        );
        let bounce = |names: &[&str]| how(Mode::Bounce, &named(names));
        assert!(
            bounce(&["0000:02:00.0"]).starts_with("`sudo portcullis protect 0000:02:00.0 --policy bounce`")
        );
        assert!(
            bounce(&["iommu", "a:b:c.d.e", "0000:00:.0", "../../x"])
                .contains(" protect DEVICE --policy bounce")
        );
        // What is no number is no group.
        std::fs::remove_file(device.join("iommu_group")).unwrap();
        std::os::unix::fs::symlink("x/1; rm", device.join("iommu_group")).unwrap();
        assert!(how(strict, &named(&["0000:01:00.0"])).ends_with("/N/type`"));
    }

    #[test]
    fn the_counts_of_linux_s_code_are_those_of_the_document() {
        let document = include_str!("../../../docs/linux.md");
        let row =
            document.lines().find(|line| line.starts_with("| 4 KiB, without the data | 2,105 |")).unwrap();
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        // Linux lazy, Linux strict, `lazy`, `strict`, `bounce`.
        for count in [cells[3], cells[6]] {
            assert!(LINUX_CODE.contains(&format!(" {count} ")), "{count}: {LINUX_CODE}");
        }
    }

    #[test]
    fn the_module_is_offered_where_it_runs() {
        let offered = |format| {
            let has = |mode: &&Mode| mode.is_strict() && Offer::of(On::Linux, format).has(**mode);
            Mode::ALL.iter().filter(has).map(|mode| mode.name()).collect::<Vec<_>>()
        };
        for format in FORMATS {
            let expected = match format {
                "vtd-ss" | "x86-4" | "x86-5" | "amd-v1" => &["strict", "bounce"][..],
                _ => &["strict"],
            };
            assert_eq!(offered(format), expected, "{format}");
            assert!(Mode::ALL.iter().all(|mode| Offer::of(On::Library, format).has(*mode)), "{format}");
        }
    }

    #[test]
    fn each_policy_says_how_it_is_switched_on() {
        let said: Vec<String> = Mode::ALL.iter().map(|mode| how(*mode, &Place::default())).collect();
        let has = |at: usize, text: &str| assert!(said[at].contains(text), "{}", said[at]);
        for (at, text) in [
            "iommu.strict=1",
            "docs/porting.md",
            "docs/porting.md",
            "--policy bounce",
            "policy `auto`",
            "DMA-FQ",
            "registers",
            "swiotlb=force",
            "echo identity | sudo tee",
        ]
        .into_iter()
        .enumerate()
        {
            has(at, text);
        }
        let of = |name| of_choice(name, Offer::Module, &Place::default());
        let alone = of_choice("strict", Offer::Linux, &Place::default());
        assert_eq!(alone, of("strict") + " Our module, which copies, runs on x86-64 alone.");
        assert!(
            of("strict").starts_with("On Linux, strict: `iommu.strict=1 iommu.passthrough=0`")
                && !of("strict").contains("Without")
        );
        assert!(
            of("bounce").contains(
                "(docs/linux.md). Without the module, strict: `iommu.strict=1 iommu.passthrough=0`"
            )
        );
        // Lazy is Linux's default, and what most will compare with.
        for choice in ["strict", "bounce"] {
            assert!(
                of(choice).contains(". For lazy: `iommu.strict=0 iommu.passthrough=0`"),
                "{}",
                of(choice)
            );
        }
    }
}
