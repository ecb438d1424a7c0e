use super::*;
use crate::doctor::tree::Tree;

/// What is said of each word of a command line: `word: why, instead`.
fn told(maker: Maker, release: &str, cmdline: &str, log: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let parameters = folder.path().join("sys/module/vfio/parameters");
    std::fs::create_dir_all(&parameters).unwrap();
    std::fs::write(parameters.join("enable_unsafe_noiommu_mode"), "N\n").unwrap();
    let kernel = Kernel {
        release: Some(release.into()),
        maker,
        maker_is_known: maker != Maker::Other,
        guest: false,
        confidential: None,
        config: None,
        cmdline: cmdline.split(' ').map(str::to_owned).collect(),
    };
    let tree = Tree::new(folder.path()).unwrap();
    let all = of(&kernel, &tree.host(), &Log::parse(log));
    let told = all.iter().map(|one| {
        let ignored = one.ignored.as_deref().unwrap_or("read");
        let instead = one.instead.as_ref().map_or(String::new(), |instead| format!(", take {instead}"));
        format!("{}: {ignored}{instead}", one.word)
    });
    told.collect()
}

const LOG: &str = "Linux version 6.12\n";

#[track_caller]
fn is_told(maker: Maker, release: &str, cases: &[(&str, &str)]) {
    for (word, expected) in cases {
        let expected = if expected.is_empty() { vec![] } else { vec![format!("{word}: {expected}")] };
        assert_eq!(told(maker, release, word, LOG), expected);
    }
}

#[test]
fn what_a_kernel_reads_is_not_ignored() {
    for word in [
        "iommu=pt",
        "iommu=nopt,force",
        "iommu.passthrough=on",
        "iommu.strict=0",
        "swiotlb=65536,force",
        "intremap=off",
    ] {
        is_told(Maker::Intel, "6.12.1", &[(word, "read")]);
        is_told(Maker::Amd, "6.12.1", &[(word, "read")]);
    }
    // Linux compares no more letters than a word has, and of a switch the first.
    for word in [
        "intel_iommu=onn",
        "iommu=ptt",
        "iommu.strict=yup",
        "iommu.passthrough=OFF",
        "swiotlb=65536",
        "swiotlb=65536,8,force",
        "swiotlb=noforce",
        "iommu=memaper=3",
    ] {
        is_told(Maker::Intel, "6.12.1", &[(word, "read")]);
    }
    // Of a machine that does not say whose it is, nothing is another's.
    for word in ["intel_iommu=on", "amd_iommu=off", "iommu=pt"] {
        is_told(Maker::Other, "6.12.1", &[(word, "read")]);
    }
    is_told(
        Maker::Other,
        "6.12.1",
        &[("amd_iommu=pt", "pt is no value of amd_iommu, take iommu.passthrough=1")],
    );
    for word in ["intel_iommu=on,igfx_off", "intel-iommu=on", "intel_iommu=on,"] {
        is_told(Maker::Intel, "6.12.1", &[(word, "read")]);
    }
    for word in
        ["amd_iommu=off", "ivrs_ioapic[4]=00:14.0", "ivrs_acpihid=00:14.5=AMD0020:0", "amd_iommu_dump=1"]
    {
        is_told(Maker::Amd, "6.12.1", &[(word, "read")]);
    }
    is_told(
        Maker::Arm,
        "6.12.1",
        &[("arm-smmu-v3.disable_bypass=y", "read"), ("iommu.passthrough=1", "read")],
    );
    is_told(Maker::Other, "6.12.1", &[("iommu.strict=1", "read")]);
}

#[test]
fn what_is_about_something_else_is_not_told() {
    for word in [
        "quiet",
        "root=/dev/sda1",
        "pci=noats",
        "immutable",
        "mmu=1",
        "io",
        "",
        "=",
        "ro",
        "iomem=relaxed",
        "intel_pstate=off",
        "amd_pstate=active",
    ] {
        is_told(Maker::Intel, "6.12.1", &[(word, "")]);
        is_told(Maker::Amd, "6.12.1", &[(word, "")]);
        is_told(Maker::Arm, "6.12.1", &[(word, "")]);
    }
}

#[test]
fn what_is_ignored_is_told_with_what_was_meant() {
    is_told(
        Maker::Amd,
        "6.12.1",
        &[
            ("amd_iommu=pt", "pt is no value of amd_iommu, take iommu.passthrough=1"),
            ("amd_iommu=on", "on is no value of amd_iommu"),
            ("amd_iommu=fullflush,soft", "soft is no value of amd_iommu"),
            ("intel_iommu=on", "it is for Intel's IOMMU, which this machine does not have"),
            ("iommu=strict", "strict is no value of iommu, take iommu.strict=1"),
            ("iommu=lazy", "lazy is no value of iommu, take iommu.strict=0"),
            ("iommu.strict=ja", "ja is neither 1 nor 0, take iommu.strict=1"),
            ("amd_iomu=off", "Linux has no parameter of this name, take amd_iommu=off"),
            ("iommu.passthru=1", "read"),
        ][..8],
    );
    is_told(
        Maker::Intel,
        "6.12.1",
        &[
            ("intel_iommu", "it needs a value behind a =, take intel_iommu=on"),
            ("intel_iommu=pt", "pt is no value of intel_iommu, take iommu.passthrough=1"),
            ("intel_iommu=ON", "ON is no value of intel_iommu, take intel_iommu=on"),
            ("intel_iommu=no", "no is no value of intel_iommu"),
            ("intel_iommu=on,sm-on", "sm-on is no value of intel_iommu, take intel_iommu=sm_on"),
            ("iommu=passthrough", "passthrough is no value of iommu, take iommu.passthrough=1"),
            ("iommu=noppt", "noppt is no value of iommu, take iommu=nopt"),
            ("iommu.strict=2", "2 is neither 1 nor 0, take iommu.strict=1"),
            ("iommu.forcedac=2", "2 is neither 1 nor 0, take iommu.forcedac=1"),
            ("iommu.stritc=1", "Linux has no parameter of this name, take iommu.strict=1"),
            ("swiotlb=fource", "fource is no value of swiotlb, take swiotlb=force"),
            ("swiotlb=64M", "it reads 64 slots of 2 KiB and not the M, take swiotlb=32768"),
            ("swiotlb=65536,force,4", "force,4 is no value of swiotlb"),
            ("amd_iommu=on", "it is for AMD's IOMMU, which this machine does not have"),
            ("iommu=on", "on is no value of iommu, take intel_iommu=on"),
            ("itnel_iommu=on", "Linux has no parameter of this name, take intel_iommu=on"),
            ("iommu.stict=1", "Linux has no parameter of this name, take iommu.strict=1"),
            ("swotlb=force", "Linux has no parameter of this name, take swiotlb=force"),
            // Of less than five letters, a name is anybody's.
            ("iomu=pt", ""),
            ("oimmu=pt", "Linux has no parameter of this name, take iommu=pt"),
            ("arm-smmu.disable_bypass=0", "it is for Arm's SMMU, which this machine does not have"),
            ("vfio.no_such=1", "the module vfio of this kernel has no parameter no_such"),
            ("vfio.enable_unsafe_noiommu_mode=1", "read"),
        ],
    );
    is_told(
        Maker::Arm,
        "6.12.1",
        &[
            ("iommu=pt", "only kernels for x86 read it, take iommu.passthrough=1"),
            ("intel_iommu=on", "it is for Intel's IOMMU, which this machine does not have"),
            ("iommu=nopt", "only kernels for x86 read it, take iommu.passthrough=0"),
        ],
    );
}

#[test]
fn what_is_newer_than_the_kernel_is_ignored() {
    let strict = "x86 kernels read it since 5.14, and this one is older";
    is_told(
        Maker::Intel,
        "5.10.0",
        &[("iommu.strict=1", &format!("{strict}, take intel_iommu=strict")), ("iommu.strict=0", strict)],
    );
    is_told(
        Maker::Amd,
        "5.10.0",
        &[
            ("iommu.strict=1", &format!("{strict}, take amd_iommu=fullflush")),
            ("iommu.passthrough=1", "read"),
        ],
    );
    let passthrough = "x86 kernels read it since 5.4, and this one is older, take iommu=pt";
    is_told(Maker::Intel, "4.19.0", &[("iommu.passthrough=1", passthrough)]);
    is_told(Maker::Arm, "4.19.0", &[("iommu.strict=1", "read")]);
    is_told(Maker::Intel, "5.14.0", &[("iommu.strict=1", "read")]);
}

#[test]
fn a_patched_kernel_reads_more() {
    let word = "pcie_acs_override=downstream,multifunction";
    let told = |log: &str| told(Maker::Amd, "6.12.1", word, log)[0].contains("only kernels with a patch");
    assert!(told(LOG));
    assert!(!told(
        "Linux version 6.12\nWarning: PCIe ACS overrides enabled; This may allow non-IOMMU protected peer-to-peer DMA\n"
    ));
    assert!(!told("[900.0] a log without its beginning"));
}

#[test]
fn words_are_as_far_apart_as_their_letters() {
    for (a, b, far) in [
        ("", "", 0),
        ("a", "", 1),
        ("", "ab", 2),
        ("iommu", "iommu", 0),
        ("iomu", "iommu", 1),
        ("oimmu", "iommu", 1),
        ("abc", "xyz", 3),
    ] {
        assert_eq!((distance(a, b), distance(b, a)), (far, far), "{a} {b}");
    }
    assert_eq!(distance(&"x".repeat(1 << 20), "iommu"), 40);
}
