//! Machines with one thing changed: what is found then, at each limit and for each reason.

use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::tree::Tree;

/// A machine with files that say something else; one without text is gone.
pub(super) fn changed(name: &str, files: &[(&str, &str)]) -> Found {
    let machine = Machine::read(name);
    for (path, text) in files {
        if text.is_empty() {
            std::fs::remove_file(machine.root.join(path)).unwrap();
        } else {
            machine.file(path, text.as_bytes());
        }
    }
    Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()))
}

#[track_caller]
pub(super) fn finds(name: &str, files: &[(&str, &str)], expected: &str) -> Found {
    let found = changed(name, files);
    let ids: Vec<&str> = found.findings.iter().map(|finding| finding.id).collect();
    assert_eq!(ids.join(" "), expected, "{name}, {files:?}");
    found
}

/// Why most groups are as they are.
#[track_caller]
fn is_by(name: &str, files: &[(&str, &str)], usual: &str, why: Option<&str>) {
    let mode = changed(name, files).facts.mode;
    assert_eq!((mode.usual.as_deref(), mode.why.as_deref()), (Some(usual), why), "{name}, {files:?}");
}

const CMDLINE: &str = "proc/cmdline";
pub(super) const LOG: &str = "dmesg";
pub(super) const VERSION: &str = "Linux version 6.12.57\n";

/// A missing file gives no finding, as it may not have been collected.
#[test]
fn what_was_not_collected_is_said_and_nothing_follows_from_it() {
    let look = |machine: &Machine| Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()));
    let unseen = |found: &Found, path: &str| {
        let why = format!("{path} was not collected");
        found.facts.unseen.iter().any(|unseen| unseen.why == why)
    };
    let text = |found: &Found| anstream::adapter::strip_str(&found.text(80)).to_string();
    const PATHS: [&str; 6] =
        [CMDLINE, "proc/cpuinfo", "sys/class/iommu", "sys/kernel/iommu_groups", "sys/bus", "sys/module"];
    let machine = Machine::new();
    let found = look(&machine);
    assert!(found.findings.is_empty() && PATHS.iter().all(|path| unseen(&found, path)));
    for line in [
        "IOMMU: not known",
        "VFIO: not known",
        "Portcullis: not known",
        "Nothing wrong was found in what was collected.",
    ] {
        assert!(text(&found).contains(line), "{}", text(&found));
    }
    // Without the processor's name `doctor` cannot tell which maker's parameters this kernel reads.
    machine.file(CMDLINE, b"intel_iommu=on amd_iommu=off iommu.stritc=1\n");
    let found = look(&machine);
    let whats: Vec<&str> = found.findings.iter().map(|finding| finding.what.as_str()).collect();
    assert!(matches!(whats[..], [one] if one.contains("iommu.stritc=1")), "{whats:?}");
    // Empty folders say that Linux uses no IOMMU. Firmware's tables would say why, and they are missing, too.
    for path in ["sys/class/iommu", "sys/kernel/iommu_groups"] {
        machine.folder(path);
    }
    let found = look(&machine);
    assert!(text(&found).contains("IOMMU: none in use"));
    assert_eq!(
        (found.findings[0].id, found.findings[0].what.as_str()),
        ("iommu-none", "Linux uses no IOMMU")
    );
    machine.folder("sys/firmware/acpi/tables");
    assert_eq!(look(&machine).findings[0].what, "firmware shows no IOMMU to Linux");
    // On the machine itself everything is seen.
    let found = Found::look(&Tree::new(&Machine::new().root).unwrap(), true, None);
    assert!(PATHS.iter().all(|path| !unseen(&found, path)));
}

/// Behind which IOMMU a device is, its group says.
#[test]
fn a_device_without_a_group_is_open_only_where_groups_were_collected() {
    let machine = Machine::read("no-iommu");
    let ids = || {
        let found = Found::look(&Tree::new(&machine.root).unwrap(), false, None);
        found.findings.iter().map(|finding| finding.id).collect::<Vec<_>>()
    };
    assert!(ids().contains(&"external-open"));
    std::fs::remove_dir(machine.root.join("sys/kernel/iommu_groups")).unwrap();
    assert!(!ids().contains(&"external-open") && !ids().contains(&"iommu-none"));
}

#[test]
fn swiotlb_is_full_from_nine_tenths_on() {
    let (slots, most) =
        ("sys/kernel/debug/swiotlb/io_tlb_nslabs", "sys/kernel/debug/swiotlb/io_tlb_used_hiwater");
    finds("guest-vtd", &[(slots, "1000"), (most, "899")], "");
    let found = finds("guest-vtd", &[(slots, "1000"), (most, "900")], "swiotlb-full");
    assert!(
        found.findings[0].what.contains("1 MiB of 1 MiB in use at the most (90 %)"),
        "{}",
        found.findings[0].what
    );
    finds(
        "guest-vtd",
        &[(slots, "1000"), (most, ""), ("sys/kernel/debug/swiotlb/io_tlb_used", "950")],
        "swiotlb-full",
    );
    finds("guest-vtd", &[(slots, "0"), (most, "900")], "");
    let full = format!(
        "{VERSION}ast 0000:07:00.0: swiotlb buffer is full (sz: 3145728 bytes), total 32768 (slots), used 0 (slots)\n"
    );
    finds("guest-vtd", &[(LOG, &full)], "swiotlb-full");
}

#[test]
fn what_grows_is_told_from_a_thousand_and_two_percent_on() {
    let look = |first: u64, second: u64| {
        let slab = |n: u64| format!("iommu_iova {n} {n} 64\n");
        let found =
            changed("server", &[("proc/slabinfo", &slab(first)), ("later/proc/slabinfo", &slab(second))]);
        found.findings.iter().any(|finding| finding.id == "growing")
    };
    for (first, second, grows) in [
        (0, 1_000, false),
        (0, 1_001, true),
        (50_000, 51_000, false),
        (50_000, 51_001, true),
        (100_000, 102_000, false),
        (100_000, 102_001, true),
        (9_000, 5_000, false),
        (8_000_000, 8_000_000, false),
        (8_000_001, 1, true),
    ] {
        assert_eq!(look(first, second), grows, "{first}, {second}");
    }
}

#[test]
fn an_external_device_is_safe_where_it_is_strict_or_the_module_s() {
    let kind = "sys/kernel/iommu_groups/15/type";
    finds("laptop", &[(kind, "DMA")], "thunderbolt-open ignored-parameter");
    finds("laptop", &[(kind, "identity")], "external-open thunderbolt-open ignored-parameter");
    let policy = ("sys/kernel/portcullis/devices/0000:05:00.0/policy", "bounce");
    finds("laptop", &[policy], "thunderbolt-open ignored-parameter");
    // With the module there is one way more.
    let found = changed("laptop", &[("sys/kernel/portcullis/protect", "\n")]);
    let next = &found.findings[0].next;
    assert_eq!(next[0].commands, ["sudo portcullis protect 0000:05:00.0 --policy bounce"]);
    assert_eq!(next[1].commands.len(), 3);
    // Linux's own word for it, and a port that is not external.
    finds(
        "guest-virtio",
        &[("sys/bus/pci/devices/0000:00:06.0/untrusted", "1\n")],
        "external-open refused dma-api",
    );
    for removable in ["fixed", "unknown"] {
        let file = ("sys/bus/pci/devices/0000:05:00.0/removable", removable);
        finds("laptop", &[file], "thunderbolt-open ignored-parameter");
    }
    finds(
        "laptop",
        &[("sys/bus/thunderbolt/devices/domain0/iommu_dma_protection", "1")],
        "external-open ignored-parameter",
    );
}

#[test]
fn a_group_without_a_driver_has_none_to_take_away() {
    let text = changed("laptop", &[("sys/bus/pci/devices/0000:05:00.0/driver", "")]).text(400);
    let text = anstream::adapter::strip_str(&text).to_string();
    assert!(text.contains("while nothing uses it: make its group 15 strict:"), "{text}");
}

#[test]
fn passthrough_is_told_with_what_asked_for_it() {
    let groups = ["0", "1", "2"].map(|n| format!("sys/kernel/iommu_groups/{n}/type"));
    let all: Vec<(&str, &str)> = groups.iter().map(|path| (path.as_str(), "identity")).collect();
    let found =
        finds("guest-vtd", &[&all[..], &[(CMDLINE, "intel_iommu=on iommu=pt")]].concat(), "passthrough");
    assert!(
        found.findings[0]
            .what
            .contains("2 devices are under passthrough, by the kernel's parameter iommu=pt")
    );
    let caching =
        "caching mode (the IOMMU is emulated, and each map tells the host, so Linux does not put off unmaps)";
    assert_eq!(
        found.findings[0].next[0].say,
        format!(
            "take iommu=pt out of the kernel's command line, in the boot loader, and reboot; devices are strict then, by {caching}"
        )
    );
    // The commands of each group that is concerned.
    let files: Vec<&str> = found.findings[0].next[1..].iter().map(|step| step.commands[1].as_str()).collect();
    assert_eq!(files, [1, 2].map(|n| format!("echo DMA | sudo tee /sys/kernel/iommu_groups/{n}/type")));
    let found = finds("guest-vtd", &all[1..2], "passthrough");
    assert!(
        found.findings[0].what.starts_with("0000:00:02.0 is under passthrough: "),
        "{}",
        found.findings[0].what
    );
    // A bridge alone maps nothing.
    finds("guest-vtd", &all[..1], "");
    let said = format!("{VERSION}iommu: Default domain type: Passthrough \n");
    is_by("guest-vtd", &[&all[..], &[(LOG, &said)]].concat(), "passthrough", Some("the kernel's default"));
    is_by(
        "guest-vtd",
        &[&all[..], &[(CMDLINE, "iommu.passthrough=y")]].concat(),
        "passthrough",
        Some("the kernel's parameter iommu.passthrough=y"),
    );
    for (words, why) in [
        ("iommu=pt iommu.passthrough=0", None),
        ("iommu.passthrough=0 iommu=pt", Some("the kernel's parameter iommu=pt")),
    ] {
        is_by("guest-vtd", &[&all[..], &[(CMDLINE, words)]].concat(), "passthrough", why);
    }
}

/// What to take out of the command line, what to add, and how devices are protected then.
#[test]
fn the_way_out_of_passthrough_names_its_end() {
    let groups = ["0", "1", "2"].map(|n| format!("sys/kernel/iommu_groups/{n}/type"));
    let all: Vec<(&str, &str)> = groups.iter().map(|path| (path.as_str(), "identity")).collect();
    let config = "boot/config-6.12.57+deb13-amd64";
    // A unit of hardware, and a log without the default.
    let bare = [("sys/class/iommu/dmar0/intel-iommu/cap", "d2008c222f0606"), (LOG, VERSION)];
    let says = |files: &[(&str, &str)]| -> Vec<String> {
        let found = changed("guest-vtd", &[&all[..], &bare, files].concat());
        let steps = &found.findings[0].next;
        assert_eq!(found.findings[0].id, "passthrough");
        assert!(steps[steps.len() - 1].say.contains("make its group 2 strict"), "{steps:?}");
        steps[..steps.len() - 2].iter().map(|step| step.say.clone()).collect()
    };
    let take = |words: &str, then: &str| {
        format!("take {words} out of the kernel's command line, in the boot loader{then}")
    };
    let add = |then: &str| {
        format!("add iommu.passthrough=0 to the kernel's command line, in the boot loader, and reboot{then}")
    };
    let lazy = "; devices are lazy then, by the kernel's parameter iommu.strict=0";
    for (cmdline, expected) in [
        ("iommu=pt iommu.strict=0", take("iommu=pt", &format!(", and reboot{lazy}"))),
        // The last of them holds.
        ("iommu.passthrough=0 iommu=pt,force", take("iommu=pt,force", ", and reboot")),
        (
            "iommu=pt iommu.passthrough=on iommu.strict=1",
            take(
                "iommu=pt and iommu.passthrough=on",
                ", and reboot; devices are strict then, by the kernel's parameter iommu.strict=1",
            ),
        ),
        (
            "iommu=pt iommu.passthrough=0",
            "reboot: iommu.passthrough=0 is on the kernel's command line already, so the groups were changed since".into(),
        ),
        ("iommu.strict=0", add(lazy)),
    ] {
        assert_eq!(says(&[(CMDLINE, cmdline)]), [expected], "{cmdline}");
    }
    // A kernel that was built so passes through without a word, too.
    let built = (config, "CONFIG_IOMMU_DEFAULT_PASSTHROUGH=y");
    let then = "; devices are lazy then, by the default that this kernel was built with (CONFIG_IOMMU_DEFAULT_PASSTHROUGH)";
    assert_eq!(says(&[(CMDLINE, "quiet"), built]), [add(then)]);
    assert_eq!(says(&[(CMDLINE, "iommu=pt"), built]), [take("iommu=pt", ""), add(then)]);
    let strict = (config, "CONFIG_IOMMU_DEFAULT_DMA_STRICT=y");
    let by = "by the default that this kernel was built with (CONFIG_IOMMU_DEFAULT_DMA_STRICT)";
    assert_eq!(
        says(&[(CMDLINE, "iommu=pt"), strict]),
        [take("iommu=pt", &format!(", and reboot; devices are strict then, {by}"))]
    );
}

#[test]
fn many_groups_are_named_and_the_first_have_commands() {
    let files = [0, 1, 2, 3].map(|n| format!("sys/kernel/iommu_groups/{n}/type"));
    let all: Vec<(&str, &str)> = files.iter().map(|path| (path.as_str(), "identity")).collect();
    let found = changed("server", &all);
    let finding = found.findings.iter().find(|finding| finding.id == "passthrough").unwrap();
    let with = finding.next.iter().filter(|step| step.say.contains("make its group ")).count();
    assert_eq!((with, finding.next.last().unwrap().say.as_str()), (3, "and so for group 3"));
}

#[test]
fn a_mode_has_its_reason() {
    let config = "boot/config-6.12.57+deb13-amd64";
    let cap = "sys/class/iommu/dmar0/intel-iommu/cap";
    let caching =
        "caching mode (the IOMMU is emulated, and each map tells the host, so Linux does not put off unmaps)";
    is_by("guest-vtd", &[(LOG, VERSION)], "strict", Some(caching));
    is_by("guest-vtd", &[(cap, "d2008c222f0606")], "strict", Some(caching));
    is_by("guest-vtd", &[(LOG, VERSION), (cap, "d2008c222f0606")], "strict", None);
    for word in ["iommu.strict=1", "intel_iommu=strict"] {
        is_by("guest-vtd", &[(CMDLINE, word)], "strict", Some(&format!("the kernel's parameter {word}")));
    }
    is_by(
        "guest-amdvi",
        &[(CMDLINE, "amd_iommu=fullflush")],
        "strict",
        Some("the kernel's parameter amd_iommu=fullflush"),
    );
    let built = "the default that this kernel was built with (CONFIG_IOMMU_DEFAULT_DMA_STRICT)";
    let strict = (config, "CONFIG_IOMMU_DEFAULT_DMA_STRICT=y");
    is_by("guest-vtd", &[(LOG, VERSION), (cap, "d2008c222f0606"), strict], "strict", Some(built));
    let (arm, said) = ("Linux's default for Arm", "the kernel's default, as its log says");
    is_by("arm", &[], "strict", Some(said));
    is_by("arm", &[(LOG, VERSION)], "strict", Some(arm));
    is_by("laptop", &[(CMDLINE, "iommu.strict=0")], "lazy", Some("the kernel's parameter iommu.strict=0"));
    is_by("laptop", &[], "lazy", Some(said));
    is_by("laptop", &[(LOG, VERSION)], "lazy", None);
    // Of a kernel whose groups have no type, the log alone tells.
    let policy = format!(
        "{VERSION}iommu: Default domain type: Translated\niommu: DMA domain TLB invalidation policy: lazy mode\n"
    );
    is_by("old-kernel", &[(LOG, &policy)], "lazy", Some(said));
}

#[test]
fn what_keeps_the_iommu_off_is_named() {
    let sums_up = |bytes: &str| (String::from("sys/firmware/acpi/tables/VIOT"), bytes.to_owned());
    let (viot, _) = sums_up("");
    for (word, maker) in [("intel_iommu=off", "broken-firmware"), ("iommu=off", "broken-firmware")] {
        let found = finds(maker, &[(CMDLINE, word)], "iommu-off firmware-bug");
        assert_eq!(found.findings[0].what, format!("the IOMMU is off, by the kernel's parameter {word}"));
    }
    // Without a table there is nothing that a parameter could keep off.
    finds("no-iommu", &[(CMDLINE, "iommu=off")], "iommu-none external-open vfio-noiommu");
    // Tables that nobody could read, and an Intel kernel that is not told to use them.
    let found = changed("no-iommu", &[("sys/firmware/acpi/tables/DMAR", "x"), (CMDLINE, "quiet")]);
    assert_eq!(found.findings[0].id, "iommu-unused");
    // In a virtual machine, and in one whose memory is hidden.
    let guest = ("proc/cpuinfo", "flags : fpu hypervisor\n");
    let found = finds("no-iommu", &[guest], "external-open vfio-noiommu iommu-none");
    assert_eq!(found.findings[2].severity, crate::doctor::finding::Severity::Notice);
    let found = finds("no-iommu", &[guest, (&viot, "x")], "iommu-unused external-open vfio-noiommu");
    assert!(found.findings[0].next[0].commands[0].contains("virtio_iommu"), "{:?}", found.findings[0]);
    for (log, said) in
        [("Intel TDX", "Intel TDX"), ("AMD SEV", "AMD SEV"), ("AMD SEV SEV-ES SEV-SNP", "AMD SEV-SNP")]
    {
        let log = format!("{VERSION}Memory Encryption Features active: {log}\n");
        let found = finds("no-iommu", &[guest, (LOG, &log)], "external-open vfio-noiommu");
        assert_eq!(found.facts.kernel.confidential, Some(said));
    }
}

#[test]
fn a_device_without_a_group_is_told_where_it_should_have_one() {
    // Behind a virtio-iommu it joins its group with its driver.
    finds("guest-virtio", &[], "refused dma-api");
    let bound = |name: &str| {
        let machine = Machine::read(name);
        machine.folder("sys/bus/pci/drivers/e1000e");
        let link = machine.root.join("sys/bus/pci/devices/0000:00:07.0/driver");
        std::os::unix::fs::symlink("../../../bus/pci/drivers/e1000e", link).unwrap();
        Found::look(&Tree::new(&machine.root).unwrap(), false, None)
    };
    let found = bound("guest-virtio");
    assert_eq!(found.findings[0].what, "0000:00:07.0 (e1000e) is behind no IOMMU");
}

#[test]
fn a_shared_group_without_its_bridge_names_the_first_device() {
    let machine = Machine::read("amd");
    // The bridge is in no group: which one it is that joins the cards is not known.
    std::fs::remove_file(machine.root.join("sys/bus/pci/devices/0000:02:00.0/iommu_group")).unwrap();
    let found = Found::look(&Tree::new(&machine.root).unwrap(), false, None);
    let shared = found.findings.iter().find(|finding| finding.id == "shared-group").unwrap();
    let json = serde_json::to_string(shared).unwrap();
    assert!(json.contains("the bridge above them may pass"), "{json}");
    assert!(json.contains("lspci -vvv -s 0000:03:00.0 | grep -i acs"), "{json}");
}

#[test]
fn limits_matter_where_devices_are_given_away() {
    let (limits, pages) = ("proc/self/limits", "sys/kernel/mm/transparent_hugepage/enabled");
    let memlock = |kib: u64| {
        format!("Max locked memory         {}              8388608              bytes\n", kib << 10)
    };
    let base = "firmware-bug refused growing group-in-use";
    finds("server", &[(limits, &memlock(65_535))], &format!("{base} memlock no-huge-pages"));
    finds("server", &[(limits, &memlock(65_536))], &format!("{base} no-huge-pages"));
    finds("server", &[(limits, &memlock(65_536)), (pages, "always [madvise] never")], base);
    finds("guest-vtd", &[(limits, &memlock(64)), (pages, "always madvise [never]")], "");
    let entries = |n: &'static str| ("sys/module/vfio_iommu_type1/parameters/dma_entry_limit", n);
    finds("guest-amdvi", &[entries("65534")], "unsafe-interrupts dma-entry-limit");
    finds("guest-amdvi", &[entries("65535")], "unsafe-interrupts");
    let iommufd = ("sys/module/iommufd/parameters/allow_unsafe_interrupts", "Y");
    let found = finds("guest-vtd", &[iommufd], "unsafe-interrupts");
    assert_eq!(
        found.findings[0].next[1].commands,
        ["echo N | sudo tee /sys/module/iommufd/parameters/allow_unsafe_interrupts"]
    );
}

#[test]
fn lines_of_the_log_that_are_no_fault_of_a_device_are_findings_too() {
    for (line, expected) in [
        ("DMAR: VT-d detected Invalidation Time-out Error: SID 0", "invalidation-timeout"),
        (
            "arm-smmu-v3 arm-smmu-v3.0.auto: CMD_SYNC timeout at 0x00000010 [hwprod 0x00000014, hwcons 0x00000010]",
            "invalidation-timeout",
        ),
        (
            "iommu ivhd0: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=63:00.0 address=0x42b5b01a0]",
            "invalidation-timeout",
        ),
        ("AMD-Vi: Disabling interrupt remapping", "interrupts-open"),
        (
            "DMAR: [Firmware Bug]: RMRR entry for device 02:00.0 is broken - applying workaround",
            "firmware-bug",
        ),
        ("ACPI: [Firmware Bug]: BIOS _OSI(Linux) query ignored", ""),
        ("DMAR: No ATSR found", ""),
        ("software IO TLB: mapped [mem 0x000000006c76d000-0x000000007076d000] (64MB)", ""),
    ] {
        let log = format!("{VERSION}{line}\n");
        finds("guest-vtd", &[(LOG, &log)], expected);
    }
    finds("guest-vtd", &[(CMDLINE, "intremap=off")], "interrupts-open");
    finds("guest-virtio", &[("sys/kernel/debug/dma-api/error_count", "0")], "refused");
}

#[test]
fn what_the_module_counts_and_should_not_is_told() {
    let count = |errors: &'static str, lost: &'static str| {
        let folder = "sys/kernel/portcullis/devices/0000:00:03.0";
        let files = [
            (format!("{folder}/errors"), errors),
            (format!("{folder}/lost_bytes"), lost),
            (format!("{folder}/policy"), "strict"),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let found = changed("guest-vtd", &files);
        found.findings.iter().map(|finding| finding.what.clone()).collect::<Vec<_>>()
    };
    assert_eq!(count("0", "0"), [""; 0]);
    assert_eq!(count("1", "0"), ["the module portcullis refused 1 call of its driver for 0000:00:03.0"]);
    assert_eq!(count("0", "8192"), ["the module portcullis lost 8 KiB of addresses for 0000:00:03.0"]);
    let both =
        "the module portcullis refused 2 calls of its driver, and lost 8 KiB of addresses for 0000:00:03.0";
    assert_eq!(count("2", "8192"), [both]);
}

#[test]
fn a_word_is_added_to_the_command_line_as_the_system_does_it() {
    let commands = |files: &[(&str, &str)]| {
        let asked = [("proc/cmdline", "root=/dev/sda1 iommu=strict\n")];
        let found = changed("arm", &[&asked, files].concat());
        let finding = found.findings.into_iter().find(|finding| finding.id == "ignored-parameter").unwrap();
        finding.next[0].commands.clone()
    };
    let grub = "sudo sed -i 's|^GRUB_CMDLINE_LINUX=\"|&iommu.strict=1 |' /etc/default/grub && ";
    assert_eq!(commands(&[])[0], format!("{grub}sudo grub2-mkconfig -o /boot/grub2/grub.cfg"));
    assert_eq!(commands(&[("usr/sbin/update-grub", "x")])[0], format!("{grub}sudo update-grub"));
    assert_eq!(
        commands(&[("usr/sbin/grubby", "x")]),
        ["sudo grubby --update-kernel=ALL --args=iommu.strict=1", "sudo reboot"]
    );
    let gone = ("etc/default/grub", "");
    assert_eq!(
        commands(&[gone, ("etc/kernel/cmdline", "x")])[0],
        "sudo sed -i 's|$| iommu.strict=1|' /etc/kernel/cmdline && sudo kernel-install add-all"
    );
    assert_eq!(commands(&[gone]), [""; 0]);
}
