//! Which kernel runs, on what kind of processor, and how its parameters are changed.

use serde::Serialize;

use super::finding::Step;
use super::log::Log;
use crate::linux::host::Host;
use crate::machine::quoted;

/// Whose processor it is: each maker has an IOMMU of its own, and parameters for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Maker {
    Intel,
    Amd,
    Arm,
    /// RISC-V and all others.
    Other,
}

#[derive(Debug, Serialize)]
pub struct Kernel {
    pub release: Option<String>,
    /// Whose IOMMU the machine has or would have.
    pub maker: Maker,
    /// Whether anything tells that.
    #[serde(skip)]
    pub maker_is_known: bool,
    /// Whether it is a virtual machine.
    pub guest: bool,
    /// Whether its memory is hidden from the host, which says how.
    pub confidential: Option<&'static str>,
    /// Where it takes its defaults from, if the file is there.
    pub config: Option<Config>,
    pub cmdline: Vec<String>,
}

/// What the kernel was built with.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Config {
    /// `passthrough`, `lazy` or `strict`.
    pub default_mode: Option<&'static str>,
    /// Whether Intel's IOMMU is on without a parameter.
    pub intel_on: bool,
}

impl Kernel {
    pub fn read(host: &Host<'_>, log: &Log) -> Self {
        let version = || {
            host.file("proc/version")?.strip_prefix("Linux version ")?.split(' ').next().map(str::to_owned)
        };
        let release = host.file("proc/sys/kernel/osrelease").or_else(version);
        let cpu = host.file("proc/cpuinfo").unwrap_or_default();
        let config = release.as_ref().and_then(|release| host.file(&format!("boot/config-{release}")));
        let maker = maker(host, &cpu);
        Self {
            maker,
            maker_is_known: maker != Maker::Other || !cpu.is_empty(),
            guest: is_guest(host, &cpu, log),
            confidential: confidential(host, log),
            config: config.map(|text| Config::parse(&text)),
            cmdline: words(&host.file("proc/cmdline").unwrap_or_default()),
            release,
        }
    }

    /// Whether it is as new as this version. One that is not known is taken for new.
    pub fn since(&self, version: (u32, u32)) -> bool {
        self.version().is_none_or(|own| own >= version)
    }

    /// The first two numbers of its release.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release.as_ref()?.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    pub fn is_x86(&self) -> bool {
        matches!(self.maker, Maker::Intel | Maker::Amd)
    }

    /// The value of a parameter's last occurrence; empty where it has none.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let value = |word: &'_ str| -> Option<(usize, usize)> {
            let (key, at) = word.split_once('=').map_or((word, word.len()), |(key, _)| (key, key.len() + 1));
            (key.replace('-', "_") == name.replace('-', "_")).then_some((at, word.len()))
        };
        self.cmdline.iter().rev().find_map(|word| value(word).and_then(|(at, end)| word.get(at..end)))
    }

    /// Whether a parameter that has a list of words has this one. Linux compares no more letters than the word has.
    pub fn says(&self, name: &str, word: &str) -> bool {
        self.parameter(name).is_some_and(|value| value.split(',').any(|one| one.starts_with(word)))
    }

    /// Whether a word of the command line asks for passthrough, or for none; `None` where it is about something else.
    pub fn passes_through(&self, word: &str) -> Option<bool> {
        let (name, value) = word.split_once('=')?;
        match name.replace('-', "_").as_str() {
            "iommu.passthrough" => switched(value).filter(|_| !self.is_x86() || self.since((5, 4))),
            "iommu" if self.is_x86() || !self.maker_is_known => {
                let asks = |one: &str| match one {
                    _ if one.starts_with("pt") => Some(true),
                    _ if one.starts_with("nopt") => Some(false),
                    _ => None,
                };
                value.split(',').rev().find_map(asks)
            }
            _ => None,
        }
    }

    /// Whether a parameter that is switched is on, or off.
    pub fn switch(&self, name: &str) -> Option<bool> {
        switched(self.parameter(name)?)
    }
}

/// What Linux takes for a yes or a no (`kstrtobool`): it looks at the first letter, and after an `o` at the second.
pub fn switched(value: &str) -> Option<bool> {
    let mut letters = value.chars().map(|letter| letter.to_ascii_lowercase());
    match (letters.next()?, letters.next()) {
        ('1' | 'y' | 't', _) | ('o', Some('n')) => Some(true),
        ('0' | 'n' | 'f', _) | ('o', Some('f')) => Some(false),
        _ => None,
    }
}

/// The words of a command line: quotes keep blanks together, and what stands behind `--` is init's.
fn words(text: &str) -> Vec<String> {
    let (mut all, mut word, mut in_quotes) = (Vec::new(), String::new(), false);
    for c in text.chars().chain([' ']) {
        match c {
            '"' => in_quotes = !in_quotes,
            _ if c.is_whitespace() && !in_quotes => {
                if !word.is_empty() {
                    all.push(std::mem::take(&mut word));
                }
            }
            _ => word.push(c),
        }
    }
    if !word.is_empty() {
        all.push(word);
    }
    let end = all.iter().position(|word| word == "--").unwrap_or(all.len());
    all.truncate(end);
    all
}

/// What firmware's tables and Linux's names say comes first: an emulated machine may have one maker's processor and another's IOMMU.
fn maker(host: &Host<'_>, cpu: &str) -> Maker {
    let units = host.list("sys/class/iommu");
    let is = |name: &str, table: &str| {
        units.iter().any(|unit| unit.starts_with(name))
            || host.exists(&format!("sys/firmware/acpi/tables/{table}"))
    };
    match () {
        () if is("dmar", "DMAR") => Maker::Intel,
        () if is("ivhd", "IVRS") => Maker::Amd,
        () if is("smmu", "IORT") || cpu.contains("CPU implementer") => Maker::Arm,
        () if cpu.contains("GenuineIntel") => Maker::Intel,
        () if cpu.contains("AuthenticAMD") || cpu.contains("HygonGenuine") => Maker::Amd,
        () => Maker::Other,
    }
}

fn is_guest(host: &Host<'_>, cpu: &str, log: &Log) -> bool {
    const VENDORS: [&str; 8] =
        ["QEMU", "VMware, Inc.", "innotek GmbH", "Xen", "Amazon EC2", "Google", "Bochs", "Red Hat"];
    let has_flag =
        cpu.lines().any(|line| line.starts_with("flags") && line.split(' ').any(|one| one == "hypervisor"));
    let vendor = host.file("sys/class/dmi/id/sys_vendor");
    let is_vendor = |vendor: &String| VENDORS.contains(&vendor.as_str());
    has_flag || vendor.as_ref().is_some_and(is_vendor) || log.after("Hypervisor detected: ").is_some()
}

/// The technique that hides a guest's memory from its host: there devices reach only what is copied for them.
fn confidential(host: &Host<'_>, log: &Log) -> Option<&'static str> {
    let said = |text: &str| {
        log.lines
            .iter()
            .any(|line| line.starts_with("Memory Encryption Features active:") && line.contains(text))
    };
    match () {
        () if said("SEV-SNP") => Some("AMD SEV-SNP"),
        () if said("SEV") => Some("AMD SEV"),
        () if said("Intel TDX") || host.exists("sys/class/misc/tdx_guest") => Some("Intel TDX"),
        () if log.has("RME: Using RSI version") => Some("Arm CCA"),
        () => None,
    }
}

impl Config {
    fn parse(text: &str) -> Self {
        let is = |name: &str| text.lines().any(|line| line.trim_end() == format!("CONFIG_{name}=y"));
        let default_mode = match () {
            () if is("IOMMU_DEFAULT_PASSTHROUGH") => Some("passthrough"),
            () if is("IOMMU_DEFAULT_DMA_LAZY") => Some("lazy"),
            () if is("IOMMU_DEFAULT_DMA_STRICT") => Some("strict"),
            () => None,
        };
        Self { default_mode, intel_on: is("INTEL_IOMMU_DEFAULT_ON") }
    }
}

/// How to boot with a word more on this system's command line.
pub fn boot_with(host: &Host<'_>, word: &str) -> Vec<Step> {
    let (say, command) = if host.exists("usr/sbin/grubby") || host.exists("sbin/grubby") {
        ("add it to every boot entry", format!("sudo grubby --update-kernel=ALL --args={}", quoted(word)))
    } else if host.exists("etc/default/grub") {
        let update = if host.exists("usr/sbin/update-grub") {
            "sudo update-grub"
        } else {
            "sudo grub2-mkconfig -o /boot/grub2/grub.cfg"
        };
        let edit = quoted(&format!("s|^GRUB_CMDLINE_LINUX=\"|&{word} |"));
        (
            "add it to the boot loader's configuration",
            format!("sudo sed -i {edit} /etc/default/grub && {update}"),
        )
    } else if host.exists("etc/kernel/cmdline") {
        let edit = quoted(&format!("s|$| {word}|"));
        (
            "add it to every boot entry",
            format!("sudo sed -i {edit} /etc/kernel/cmdline && sudo kernel-install add-all"),
        )
    } else {
        let say = format!("add {word} to the kernel's command line, in the boot loader, and reboot");
        return vec![Step { say, commands: Vec::new() }];
    };
    let say = format!("boot with {word}: {say}, and reboot");
    vec![Step { say, commands: vec![command, "sudo reboot".into()] }]
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn kernel(release: &str, cmdline: &str) -> Kernel {
        let (guest, confidential, config) = (false, None, None);
        let cmdline = words(cmdline);
        let (maker, maker_is_known) = (Maker::Intel, true);
        Kernel { release: Some(release.into()), maker, maker_is_known, guest, confidential, config, cmdline }
    }

    #[test]
    fn a_command_line_has_words_and_the_last_of_a_name_counts() {
        let kernel =
            kernel("6.12.1", "quiet iommu=pt a=\"b c\" iommu=nopt,force intel-iommu=on\n -- iommu=off");
        assert_eq!(kernel.cmdline.len(), 5);
        assert_eq!(kernel.parameter("iommu"), Some("nopt,force"));
        assert_eq!((kernel.parameter("quiet"), kernel.parameter("a")), (Some(""), Some("b c")));
        assert_eq!((kernel.parameter("intel_iommu"), kernel.parameter("absent")), (Some("on"), None));
        assert!(kernel.says("iommu", "force") && !kernel.says("iommu", "pt"));
        assert_eq!(words("\"unclosed a b"), ["unclosed a b "]);
        assert_eq!(words("").len(), 0);
    }

    #[test]
    fn releases_of_any_kind_have_a_version() {
        for (release, version) in [
            ("6.12.57+deb13-amd64", Some((6, 12))),
            ("5.4.0-150-generic", Some((5, 4))),
            ("7.0-rc1", Some((7, 0))),
            ("6", None),
            ("", None),
            ("x.y", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(kernel(release, "").version(), version, "{release}");
        }
        assert!(kernel("5.14.0", "").since((5, 14)) && !kernel("5.4.1", "").since((5, 14)));
        assert!(kernel("?", "").since((5, 14)));
    }

    #[test]
    fn a_configuration_has_a_default_mode() {
        let mode = |text: &str| Config::parse(text).default_mode;
        assert_eq!(mode("CONFIG_IOMMU_DEFAULT_DMA_LAZY=y\n"), Some("lazy"));
        assert_eq!(mode("# CONFIG_IOMMU_DEFAULT_DMA_STRICT is not set\n"), None);
        assert_eq!(mode("CONFIG_IOMMU_DEFAULT_PASSTHROUGH=y"), Some("passthrough"));
        assert!(Config::parse("CONFIG_INTEL_IOMMU_DEFAULT_ON=y\n").intel_on);
        assert!(!Config::parse("CONFIG_INTEL_IOMMU_DEFAULT_ON_INTGPU_OFF=y\n").intel_on);
    }
}
