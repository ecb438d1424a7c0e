use super::*;

/// `device access address: reason` of each kind, with how often.
fn told(log: &str) -> Vec<String> {
    let all = of(&Log::parse(log));
    let told = all.iter().map(|one| {
        let access = one.access.as_deref().unwrap_or("access");
        format!("{} {access} {}: {} ({})", one.device, one.addresses.join(","), one.reason, one.count)
    });
    told.collect()
}

#[test]
fn lines_of_each_vendor_and_time_are_read() {
    for (line, expected) in [
        (
            "DMAR: [DMA Read NO_PASID] Request device [00:02.0] fault addr 0x7c000000 [fault reason 0x06] PTE Read access is not set",
            "0000:00:02.0 read 0x7c000000: nothing is mapped there for this (1)",
        ),
        (
            "DMAR: [DMA Write] Request device [03:00.0] fault addr ffff0000 [fault reason 05] PTE Write access is not set",
            "0000:03:00.0 write 0xffff0000: nothing is mapped there for this (1)",
        ),
        (
            "DMAR: [DMA Read] Request device [0x03:0x00.1] PASID ffffffff fault addr 1000 [fault reason 02] Present bit in context entry is clear",
            "0000:03:00.1 read 0x1000: the device is attached to nothing (1)",
        ),
        (
            "DMAR: [DMA Write PASID 0x5] Request device [03:00.0] fault addr 0x2000 [fault reason 0x71] SM: Present bit in first-level paging entry is clear",
            "0000:03:00.0 write 0x2000: nothing is mapped there for this (1)",
        ),
        (
            "DMAR: [INTR-REMAP] Request device [f0:1f.7] fault index 0x0 [fault reason 0x25] Blocked a compatibility format interrupt request",
            "0000:f0:1f.7 access : an interrupt that nobody allowed it (code 0x25) (1)",
        ),
        (
            "nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xfdf8000000 flags=0x0070]",
            "0000:01:00.0 write 0xfdf8000000: the mapping does not allow this (1)",
        ),
        (
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=0a:00.0 domain=0x001d address=0x000000000637c000 flags=0x0000]",
            "0000:0a:00.0 access 0x637c000: nothing is mapped there for this (1)",
        ),
        (
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=0001:0a:00.0 domain=0x0000 address=0x10 flags=0x0050]",
            "0001:0a:00.0 read 0x10: the device is attached to nothing (1)",
        ),
        (
            "iommu ivhd0: AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=0000:02:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]",
            "0000:02:00.0 read 0xfffffffdf8000000: its context is malformed (1)",
        ),
        (
            "arm-smmu-v3 arm-smmu-v3.0.auto: event: F_PERMISSION client: (unassigned sid) sid: 0x100 ssid: 0x0 iova: 0xfff0 ipa: 0x0",
            "stream 0x100 access 0xfff0: the mapping does not allow this (1)",
        ),
        (
            "arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:\narm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000018100000010\n\
             arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000020800000000\narm-smmu-v3 arm-smmu-v3.0.auto: \t0x00000000ffffe040\n\
             arm-smmu-v3 arm-smmu-v3.0.auto: \t0x00000000ffffe000",
            "stream 0x181 read 0xffffe040: nothing is mapped there for this (1)",
        ),
        (
            "arm-smmu 15000000.iommu: Unhandled context fault: fsr=0x402, iova=0xd65504710, fsynr=0x100011, cbfrsynra=0x1c00, cb=6",
            "stream 0x1c00 write 0xd65504710: nothing is mapped there for this (1)",
        ),
        (
            "virtio_iommu virtio0: page fault from EP 40 at 0xffffe000 [RW]",
            "0000:00:05.0 read and write 0xffffe000: nothing is mapped there for this (1)",
        ),
        (
            "virtio_iommu virtio0: domain fault from EP 65536",
            "0001:00:00.0 access : the device is attached to nothing (1)",
        ),
    ] {
        assert_eq!(told(line), [expected]);
    }
}

#[test]
fn what_has_not_the_form_is_no_fault() {
    for line in [
        "DMAR: DRHD: handling fault status reg 2",
        "DMAR: [DMA Read] Request device [00:02.0",
        "DMAR: [DMA Read] Request device [00:02.0] fault addr 1 [fault reason 999]",
        "DMAR: [DMA Read] Request device [not-a-device] fault addr 1 [fault reason 05]",
        "AMD-Vi: Event logged [",
        "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0x0 flags=0x0000]",
        "AMD-Vi: Event logged [COMMAND_HARDWARE_ERROR address=0x0 flags=0x0000]",
        "a fool: AMD-Vi: Event logged [IO_PAGE_FAULT",
        "arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:",
        "arm-smmu-v3 a: event: F_TRANSLATION",
        "arm-smmu 15000000.iommu: Unhandled context fault:",
        "virtio_iommu virtio0: page fault from EP x at",
        "virtio_iommu virtio0: odd fault from EP 1",
        "virtio_iommu virtio0",
        "usb 1-1: DMAR: [DMA Read] Request device [00:02.0] fault addr 1 [fault reason 05]",
    ] {
        assert_eq!(told(line), [""; 0], "{line}");
    }
}

#[test]
fn faults_of_a_kind_are_counted_and_only_the_first_addresses_told() {
    let line = |address: usize| format!("virtio_iommu virtio0: page fault from EP 40 at {address:#x} [W]\n");
    let log: String = [1, 1, 2, 3, 4, 5].into_iter().map(line).collect();
    let other = "virtio_iommu virtio0: page fault from EP 48 at 0x1 [R]\n";
    assert_eq!(
        told(&format!("{other}{log}")),
        [
            "0000:00:05.0 write 0x1,0x2,0x3: nothing is mapped there for this (6)",
            "0000:00:06.0 read 0x1: nothing is mapped there for this (1)"
        ]
    );
    let many: String =
        (0..1000).map(|ep| format!("virtio_iommu virtio0: page fault from EP {ep} at 0x1 [W]\n")).collect();
    assert_eq!(told(&many).len(), MOST_KINDS);
}
