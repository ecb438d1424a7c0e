//! How each policy is switched on under Linux: what to type.
//!
//! Linux's own modes are those of its documents `admin-guide/kernel-parameters` and `ABI/testing/sysfs-kernel-iommu_groups`.

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

/// The device that commands name.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// As Linux names it; `None` where there are none on a PCI bus, or several.
    device: Option<String>,
}

impl Place {
    /// The one of `devices` that is on a PCI bus, if there is just one.
    pub fn named(devices: &[String]) -> Self {
        let mut on_pci = devices.iter().filter(|name| is_pci(name));
        Self { device: on_pci.next().filter(|_| on_pci.next().is_none()).cloned() }
    }

    fn device(&self) -> String {
        self.device.as_ref().map_or("DEVICE".into(), |name| Printable(name).to_string())
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

/// How the chosen policy of `offer` is switched on, and Linux's own modes that translate, which need no module: a sentence each.
/// None where nothing was chosen, or a driver of the library's has it.
pub fn of_choice(choice: Option<&str>, offer: Offer, place: &Place) -> Vec<String> {
    let Some(choice) = choice.filter(|_| offer != Offer::Library) else { return Vec::new() };
    let device = place.device();
    let modes = "strict is `iommu.strict=1 iommu.passthrough=0` on the kernel's command line, and lazy `iommu.strict=0 iommu.passthrough=0`";
    let now = "`portcullis doctor` says what holds now, and whether the IOMMU is on at all";
    let mut said = Vec::new();
    if choice == Mode::Bounce.name() {
        said.push(format!(
            "On Linux, bounce is `sudo portcullis protect {device} --policy bounce`, for each device, by our module (docs/linux.md)."
        ));
        said.push(format!("Without the module, {modes}; {now}."));
    } else {
        let module =
            if offer == Offer::Linux { " (Our module, which copies, runs on x86-64 alone.)" } else { "" };
        said.push(format!("On Linux, {modes}; {now}.{module}"));
    }
    said.push(format!(
        "For one device, with its group, and until the next boot: `echo DMA-FQ | sudo tee /sys/bus/pci/devices/{device}/iommu_group/type` is lazy, at once where it is strict (`DMA`) now; \
         `echo DMA` is strict, once no driver has it."
    ));
    said
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
    fn commands_name_a_device_on_a_pci_bus_that_is_the_only_one() {
        let said = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            of_choice(Some("bounce"), Offer::Module, &Place::named(&names)).join(" ")
        };
        let named = said(&["iommu", "0000:02:00.0"]);
        assert!(named.contains("`sudo portcullis protect 0000:02:00.0 --policy bounce`"), "{named}");
        assert!(named.contains("/sys/bus/pci/devices/0000:02:00.0/iommu_group/type`"), "{named}");
        for none in [&["iommu", "a:b:c.d.e", "0000:00:.0", "../../x"][..], &["0000:02:00.0", "0000:03:00.0"]]
        {
            assert!(said(none).contains(" protect DEVICE --policy bounce"), "{none:?}");
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
    fn each_choice_says_how_it_is_switched_on() {
        let of = |name, offer| of_choice(Some(name), offer, &Place::default());
        let strict = of("strict", Offer::Module);
        assert!(
            strict[0].starts_with("On Linux, strict is `iommu.strict=1 iommu.passthrough=0`"),
            "{strict:?}"
        );
        let bounce = of("bounce", Offer::Module);
        assert_eq!((strict.len(), bounce.len()), (2, 3));
        assert!(bounce[1].starts_with("Without the module, strict is `iommu.strict=1"), "{bounce:?}");
        assert!(
            of("strict", Offer::Linux)[0].ends_with(" (Our module, which copies, runs on x86-64 alone.)")
        );
        // Lazy is Linux's default, and what most will compare with.
        for said in [&strict, &bounce] {
            let said = said.join(" ");
            assert!(
                said.contains("lazy `iommu.strict=0 iommu.passthrough=0`") && said.contains("echo DMA-FQ"),
                "{said}"
            );
        }
    }
}
