use super::*;

fn bare(name: &str) -> Unit {
    let (address_bits, page_sizes, caching_mode, node, devices) = (None, Vec::new(), None, None, 0);
    Unit {
        name: name.into(),
        kind: Kind::of(name, ""),
        address_bits,
        page_sizes,
        caching_mode,
        node,
        devices,
    }
}

const SMALL: u64 = 4 << 10;
const MIDDLE: u64 = 2 << 20;
const LARGE: u64 = 1 << 30;

#[test]
fn a_name_tells_the_kind_and_of_virtio_that_of_its_device() {
    assert_eq!(Kind::of("0000:00:10.0", "virtio5"), Kind::VirtioIommu);
    assert_eq!(Kind::of("ivhd0", "0000:00:00.2"), Kind::AmdVi);
    for (name, kind) in [
        ("dmar0", Kind::Vtd),
        ("ivhd12", Kind::AmdVi),
        ("smmu3.0x000000002b400000", Kind::SmmuV3),
        ("smmu.0x000000002b400000", Kind::SmmuV2),
        ("riscv-iommu@3010000", Kind::RiscV),
        ("", Kind::Other),
        ("s390-iommu.00000001", Kind::Other),
    ] {
        assert_eq!(Kind::of(name, ""), kind, "{name}");
    }
}

/// Registers of machines whose logs are public, of none, and of all.
#[test]
fn registers_of_vtd_tell_widths_and_pages() {
    let all = vec![SMALL, MIDDLE, LARGE];
    for (cap, ecap, expected) in [
        (0x01c0_000c_4066_0462, 0x029a_00f0_505e, (Some(39), all.clone(), Some(false))),
        (0x08d2_078c_106f_0466, 0x00f0_20df, (Some(48), all.clone(), Some(false))),
        (0x00d2_008c_222f_0686, 0x00f0_0f5a, (Some(48), all.clone(), Some(true))),
        // Three levels, and small pages alone.
        (0x2f << 16 | 1 << 9, 0, (Some(39), vec![SMALL], Some(false))),
        (0, 0, (None, vec![SMALL], Some(false))),
        (u64::MAX, u64::MAX, (Some(57), all.clone(), Some(true))),
        // Tables of the first stage alone.
        (0x3f << 16 | 1 << 60, 1 << 47, (Some(57), vec![SMALL, MIDDLE], Some(false))),
        (0x3f << 16 | 1 << 56, 1 << 47, (Some(48), all.clone(), Some(false))),
        (0x3f << 16 | 1 << 55 | 1 << 57, 1 << 47, (Some(48), vec![SMALL, MIDDLE], Some(false))),
        (0x3f << 16 | 1 << 10 | 1 << 56, 0, (Some(48), vec![SMALL], Some(false))),
    ] {
        let mut unit = bare("dmar0");
        vtd(cap, ecap, &mut unit);
        assert_eq!((unit.address_bits, unit.page_sizes, unit.caching_mode), expected, "{cap:#x}");
    }
}

fn kernel(release: &str) -> Kernel {
    let (maker, guest, confidential, config) = (super::super::kernel::Maker::Amd, false, None, None);
    Kernel {
        release: Some(release.into()),
        maker,
        maker_is_known: true,
        guest,
        confidential,
        config,
        cmdline: Vec::new(),
    }
}

#[test]
fn features_of_amd_are_in_the_order_of_the_kernel() {
    for (features, release, bits) in [
        ("58f77ef22294ade:0", "6.8.0", Some(64)),
        ("0:58f77ef22294ade", "6.1.0", Some(64)),
        ("58f77ef22294ade", "5.4.0", Some(64)),
        ("400:0", "6.12.0", Some(57)),
        ("0:400", "6.12.0", Some(48)),
        ("", "6.12.0", None),
        (":", "6.12.0", None),
        ("zz:1", "6.12.0", None),
        ("1ffffffffffffffff", "6.12.0", None),
    ] {
        let mut unit = bare("ivhd0");
        amd(Some(features), &kernel(release), &mut unit);
        assert_eq!(unit.address_bits, bits, "{features}");
        assert_eq!(unit.page_sizes.is_empty(), bits.is_none());
    }
}

#[test]
fn lines_of_the_log_tell_of_arm_and_virtio() {
    let log = Log::parse(
        "arm-smmu-v3 arm-smmu-v3.0.auto: ias 44-bit, oas 44-bit (features 0x00008325)\n\
         arm-smmu-v3 arm-smmu-v3.1.auto: ias x-bit\n\
         arm-smmu 2b400000.iommu: \tSupported page sizes: 0x61311000\n\
         arm-smmu 2b400000.iommu: \tStage-1: 48-bit VA -> 40-bit IPA\n\
         virtio_iommu virtio3: input address: 64 bits\n\
         virtio_iommu virtio3: page mask: 0xfffffffffffff000\n\
         virtio_iommu virtio4: input address:\nvirtio_iommu virtio4: page mask: x\n",
    );
    let of = |name: &str, device: &str| {
        let mut unit = bare(name);
        if device.starts_with("virtio") {
            virtio(&log, device, &mut unit);
        } else {
            arm(&log, device, &mut unit);
        }
        (unit.address_bits, unit.page_sizes)
    };
    assert_eq!(of("smmu3.0x1", "arm-smmu-v3.0.auto"), (Some(44), vec![]));
    assert_eq!(of("smmu3.0x2", "arm-smmu-v3.1.auto"), (None, vec![]));
    let sizes = [SMALL, 64 << 10, 1 << 20, MIDDLE, 16 << 20, 512 << 20, LARGE];
    let (bits, found) = of("smmu.0x3", "2b400000.iommu");
    assert_eq!((bits, found.iter().all(|size| sizes.contains(size)), found.len()), (Some(48), true, 7));
    assert_eq!(of("0000:00:10.0", "virtio3"), (Some(64), vec![SMALL]));
    assert_eq!(of("0000:00:11.0", "virtio4"), (None, vec![]));
}

#[test]
fn a_mask_of_all_sizes_tells_the_least() {
    assert_eq!(of_mask("0xffffffffffff0000"), [64 << 10]);
    assert_eq!(of_mask("0x40201000"), [SMALL, MIDDLE, LARGE]);
    assert_eq!((of_mask("0"), of_mask(""), of_mask("0xfffffffffffffffff")), (vec![], vec![], vec![]));
}
