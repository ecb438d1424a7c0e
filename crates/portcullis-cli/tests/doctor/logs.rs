//! What is found in logs of many kernels, and in a table of Arm's.

use super::changes::{LOG, VERSION, changed, finds};
use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::tree::Tree;

/// What is said of refused accesses.
fn said(log: &str) -> Vec<String> {
    let found = changed("guest-vtd", &[(LOG, &format!("{VERSION}{log}"))]);
    found.findings.iter().filter(|one| one.id == "refused").map(|one| one.what.clone()).collect()
}

#[test]
fn an_invalidation_that_is_not_confirmed_is_found_in_each_form() {
    for lines in [
        "AMD-Vi: Event logged [\nIOTLB_INV_TIMEOUT device=63:00.0 address=0x000000042b5b01a0]",
        "iommu ivhd0: AMD-Vi: Event logged [\niommu ivhd0: IOTLB_INV_TIMEOUT device=63:00.0 address=0x42b5b01a0]",
        "iommu ivhd0: Event logged [IOTLB_INV_TIMEOUT device=63:00.0 address=0x42b5b01a0]",
        "DMAR: VT-d detected invalid descriptor: low=3, high=fffff001",
        "arm-smmu-v3 arm-smmu-v3.0.auto: CMD_SYNC timeout",
    ] {
        finds("guest-vtd", &[(LOG, &format!("{VERSION}{lines}\n"))], "invalidation-timeout");
    }
}

#[test]
fn accesses_beyond_what_is_told_are_counted() {
    let line = |ep: usize| format!("virtio_iommu virtio0: page fault from EP {ep} at 0x1 [W]\n");
    let few: String = (0..64).map(line).collect();
    assert_eq!(said(&few).len(), 64);
    let many: String = (0..1000).chain([999]).map(line).collect();
    let said = said(&many);
    assert_eq!(said.len(), 65);
    assert_eq!(
        said.last().unwrap(),
        "the IOMMU refused 937 more accesses, by further devices or for further reasons"
    );
}

#[test]
fn lines_that_the_kernel_left_out_are_counted() {
    let fault = "virtio_iommu virtio0: page fault from EP 40 at 0x1 [W]\n";
    let left = "dmar_fault: 893 callbacks suppressed\namd_iommu_report_page_fault: 10432 callbacks suppressed\n\
        arm_smmu_context_fault: 5 callbacks suppressed\nprint_req_error: 7 callbacks suppressed\ndmar_fault: x callbacks suppressed\n";
    assert_eq!(
        said(&format!("{fault}{left}")),
        [
            "the IOMMU did not let 0000:00:05.0 write 0x1, at least 1 time: nothing is mapped there for this",
            "the kernel left 11,330 lines about refused accesses out of its log"
        ]
    );
    assert_eq!(said(left).len(), 1);
    let most = format!("dmar_fault: {} callbacks suppressed\n", u64::MAX);
    assert_eq!(said(&most.repeat(2)).len(), 1);
}

/// An IORT with one node of a kind, and a model where SMMUv3's is.
fn iort(kind: u8, model: u8) -> Vec<u8> {
    let mut bytes = [&b"IORT"[..], &[0; 32], &[1, 0, 0, 0, 48, 0, 0, 0, 0, 0, 0, 0]].concat();
    let base = 0x0905_0000_u64.to_le_bytes();
    bytes.extend([&[kind, 76, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 76, 0, 0, 0], &base[..], &[0; 52]].concat());
    bytes[48 + 40] = model;
    bytes[4] = bytes.len() as u8;
    bytes[9] = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    bytes
}

#[test]
fn an_smmu_of_version_2_that_linux_does_not_use_is_no_missing_one() {
    for (kind, model, id) in
        [(3, 0, "iommu-unused"), (4, 0, "iommu-unused"), (4, 2, "iommu-unused"), (0, 0, "iommu-none")]
    {
        let machine = Machine::read("no-iommu");
        machine.file("sys/firmware/acpi/tables/IORT", &iort(kind, model));
        let found = Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()));
        let ids: Vec<&str> = found.findings.iter().map(|finding| finding.id).collect();
        assert!(ids.contains(&id) && !ids.contains(&"firmware-bug"), "{kind} {model}: {ids:?}");
    }
}
