//! What a recording of this machine is replayed with.

use std::path::Path;

use crate::doctor::Kind;

/// Options of `replay` that make it assume the IOMMU of the machine at `root`, and what is to be known of them. Where it has no IOMMU that is
/// known, they are as without a machine.
pub fn options(root: &Path) -> (&'static [&'static str], Option<&'static str>) {
    let mut kinds = kinds(root);
    kinds.sort();
    match kinds.first() {
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

/// The kinds of the IOMMUs that Linux drives there.
fn kinds(root: &Path) -> Vec<Kind> {
    let folder = root.join("sys/class/iommu");
    let all = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    all.map(|unit| {
        let above = std::fs::read_link(unit.path().join("device")).unwrap_or_default();
        let above = above.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Kind::of(&unit.file_name().to_string_lossy(), &above)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Arguments;

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
            assert_eq!(super::options(root.path()), (&[][..], None));
            let unit = root.path().join("sys/class/iommu").join(name);
            std::fs::create_dir_all(&unit).unwrap();
            std::os::unix::fs::symlink(format!("../../../devices/{above}"), unit.join("device")).unwrap();
            let (found, said) = super::options(root.path());
            assert_eq!((found, said.is_some()), (options, says), "{name}");
            // `replay` takes them.
            Arguments::try_parse_from([&["portcullis", "replay", "x"], found].concat()).unwrap();
        }
    }
}
