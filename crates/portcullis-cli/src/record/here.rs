//! What a recording of this machine is replayed with.

use crate::doctor::{Kind, kinds};
use crate::linux::host::Host;

/// The options by which `replay` assumes the IOMMU of this machine, and a sentence that goes with them. A machine whose IOMMU is not known
/// has none.
pub fn options(host: &Host<'_>) -> (&'static [&'static str], Option<&'static str>) {
    match kinds(host).map(|(_, kind)| kind).min() {
        Some(Kind::AmdVi) => (
            &["--format", "amd-v1"],
            Some(
                "Waits are those of VT-d, since none of AMD's IOMMU are published: docs/replay.md#an-amd-machine says how to measure this \
                 machine's.",
            ),
        ),
        Some(Kind::SmmuV3 | Kind::SmmuV2) => (&["--profile", "smmuv3"], None),
        Some(Kind::VirtioIommu) => (&["--profile", "virtio-iommu"], None),
        Some(Kind::RiscV) => (
            &["--format", "riscv-sv48"],
            Some("Waits are those of VT-d, since none of RISC-V's IOMMU are published."),
        ),
        Some(Kind::Vtd | Kind::Other) | None => (&[], None),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Arguments;
    use crate::linux::host::Here;

    #[test]
    fn a_recording_is_replayed_with_the_iommu_of_its_machine() {
        for (name, above, options, says) in [
            ("dmar0", "dmar0", &[][..], false),
            ("ivhd0", "0000:00:00.2", &["--format", "amd-v1"], true),
            ("smmu3.0x00000000050000000", "arm-smmu-v3.0.auto", &["--profile", "smmuv3"], false),
            ("0000:00:01.0", "virtio0", &["--profile", "virtio-iommu"], false),
            ("riscv-iommu@10010000", "3010000.iommu", &["--format", "riscv-sv48"], true),
            ("else", "else", &[], false),
        ] {
            let root = tempfile::tempdir().unwrap();
            let host = Host::new(root.path(), &Here);
            assert_eq!(super::options(&host), (&[][..], None));
            let unit = root.path().join("sys/class/iommu").join(name);
            std::fs::create_dir_all(&unit).unwrap();
            std::os::unix::fs::symlink(format!("../../../devices/{above}"), unit.join("device")).unwrap();
            let (found, said) = super::options(&host);
            assert_eq!((found, said.is_some()), (options, says), "{name}");
            // `replay` takes them.
            Arguments::try_parse_from([&["portcullis", "replay", "x"], found].concat()).unwrap();
        }
    }
}
