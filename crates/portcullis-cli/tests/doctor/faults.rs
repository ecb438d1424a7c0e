use super::*;

/// `device access address: reason` of each kind, with how often.
fn told(log: &str) -> Vec<String> {
    let all = of(&Log::parse(log)).kinds;
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
            "0001:0a:00.0 read 0x10: the mapping does not allow this (1)",
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

/// 4.18 to 5.3 print another field as the domain, which is nearly always 0.
#[test]
fn a_domain_of_0_in_amd_s_lines_says_nothing() {
    for (flags, expected) in [
        ("0x0000", "0000:42:00.0 access 0xd4000000: nothing is mapped there for this (1)"),
        ("0x0020", "0000:42:00.0 access 0xd4000000: nothing is mapped there for this (1)"),
        ("0x0050", "0000:42:00.0 read 0xd4000000: the mapping does not allow this (1)"),
        ("0x0070", "0000:42:00.0 write 0xd4000000: the mapping does not allow this (1)"),
    ] {
        for domain in ["0x0000", "0x0007"] {
            let line = format!(
                "nvme 0000:42:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain={domain} address=0xd4000000 flags={flags}]"
            );
            assert_eq!(told(&line), [expected], "{domain}");
        }
    }
}

/// As Linux up to 4.19 prints them, and stable kernels of 4.19.
#[test]
fn events_of_amd_are_read_without_what_stands_before_them() {
    const PAGE: &str = "0000:0b:00.0 access 0x637c000: nothing is mapped there for this (1)";
    for (log, expected) in [
        (
            "AMD-Vi: Event logged [\nusb 3-1: new device\nIO_PAGE_FAULT device=0b:00.0 domain=0x001d address=0x000000000637c000 flags=0x0000]",
            PAGE,
        ),
        (
            "[    8.1] AMD-Vi: Event logged [\n[    8.1] IO_PAGE_FAULT device=0b:00.0 domain=0x001d address=0x000000000637c000 flags=0x0000]",
            PAGE,
        ),
        (
            "mlx5_core 0000:0b:00.0: Event logged [IO_PAGE_FAULT domain=0x0000 address=0x637c000 flags=0x0000]",
            PAGE,
        ),
        (
            "iommu ivhd0: AMD-Vi: Event logged [\niommu ivhd0: INVALID_DEVICE_REQUEST device=0b:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]",
            "0000:0b:00.0 access 0xfffffffdf8000000: its context does not allow this kind of request (1)",
        ),
    ] {
        assert_eq!(told(log), [expected], "{log}");
    }
    for line in [
        "IO_PAGE_FAULT",
        "a: b: IO_PAGE_FAULT device=0b:00.0",
        "no IO_PAGE_FAULT device=0b:00.0 flags=0x0000]",
    ] {
        assert_eq!(told(line), [""; 0], "{line}");
    }
}

/// As Linux up to 4.6 prints them: one message of two lines, the second of which has no time in some copies.
#[test]
fn faults_of_intel_in_two_lines_are_one() {
    for log in [
        "dmar: DMAR:[DMA Read] Request device [05:00.0] fault addr fffe0000 \nDMAR:[fault reason 06] PTE Read access is not set",
        "[    9.1] DMAR: DMAR:[DMA Read] Request device [05:00.0] fault addr fffe0000 \n[    9.1] DMAR:[fault reason 06] PTE Read access is not set",
        "[    9.1] DMAR: DMAR:[DMA Read] Request device [05:00.0] fault addr fffe0000 \n          DMAR:[fault reason 06] PTE Read access is not set",
        "DMAR: DMAR:[DMA Read] Request device [05:00.0] fault addr fffe0000 \nusb 1-1: new\nDMAR:[fault reason 06] PTE Read access is not set",
    ] {
        assert_eq!(
            told(log),
            ["0000:05:00.0 read 0xfffe0000: nothing is mapped there for this (1)"],
            "{log}"
        );
    }
    let interrupt = "dmar: INTR-REMAP: Request device [[f0:1f.7] fault index 57\nINTR-REMAP:[fault reason 34] Present field in the IRTE entry is clear";
    assert_eq!(
        told(interrupt),
        ["0000:f0:1f.7 access : an interrupt that nobody allowed it (code 0x22) (1)"]
    );
    let lone = "DMAR: DMAR:[DMA Read] Request device [05:00.0] fault addr fffe0000 \n";
    assert_eq!(told(lone), [""; 0]);
    let far = format!("{lone}{}DMAR:[fault reason 06] x", "x\n".repeat(50));
    assert_eq!(told(&far), [""; 0]);
}

#[test]
fn global_faults_of_smmu_v2_name_the_stream() {
    let blocked = "arm-smmu 5000000.iommu: Blocked unknown Stream ID 0x429; boot with \"arm-smmu.disable_bypass=0\" to allow, but this may have security implications\n";
    let global = "arm-smmu 5000000.iommu: Unexpected global fault, this could be serious\n";
    let registers = |status: &str| {
        format!(
            "arm-smmu 5000000.iommu: \tGFSR {status}, GFSYNR0 0x00000002, GFSYNR1 0x00000429, GFSYNR2 0x00000000\n"
        )
    };
    const ATTACHED_TO_NOTHING: &str = "stream 0x429 access : the device is attached to nothing (1)";
    let unknown = registers("0x80000002");
    assert_eq!(told(blocked), [ATTACHED_TO_NOTHING]);
    assert_eq!(told(&format!("{blocked}{unknown}")), [ATTACHED_TO_NOTHING]);
    assert_eq!(told(&format!("{global}{unknown}")), [ATTACHED_TO_NOTHING]);
    assert_eq!(
        told(&format!("{global}{}", registers("0x00000040"))),
        ["stream 0x429 access : global fault, GFSR 0x40 (1)"]
    );
    assert_eq!(told(global), [""; 0]);
    assert_eq!(told(&unknown), [""; 0]);
}

#[test]
fn what_has_no_reason_of_ours_is_told_with_its_code() {
    let v3 = |code: u64| {
        let line = |text: &str| format!("arm-smmu-v3 arm-smmu-v3.0.auto: {text}\n");
        let words = [0x181 << 32 | code, 0x208 << 32, 0xffff_e040, 0];
        let words: String = words.iter().map(|word| line(&format!("\t{word:#018x}"))).collect();
        format!("{}{words}", line(&format!("event {code:#04x} received:")))
    };
    let v2 = |status: u32| {
        format!(
            "arm-smmu 5000000.iommu: Unhandled context fault: fsr={status:#x}, iova=0xd65504710, fsynr=0x11, cbfrsynra=0x1c00, cb=6"
        )
    };
    for (log, expected) in [
        (
            "e1000e 0000:00:1f.6: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0000 address=0xfffffffdf8000000 flags=0x0008]".into(),
            "0000:00:1f.6 access : an interrupt that nobody allowed it (flags 0x8) (1)",
        ),
        (v3(0x01), "stream 0x181 read 0xffffe040: code 0x1 (F_UUT) (1)"),
        (v3(0x20), "stream 0x181 read 0xffffe040: code 0x20 (F_TLB_CONFLICT) (1)"),
        (v3(0x24), "stream 0x181 access : code 0x24 (E_PAGE_REQUEST) (1)"),
        (v3(0x77), "stream 0x181 access : code 0x77 (1)"),
        (v2(0x402), "stream 0x1c00 write 0xd65504710: nothing is mapped there for this (1)"),
        (v2(0x410), "stream 0x1c00 write 0xd65504710: context fault, FSR 0x410 (1)"),
        ("virtio_iommu virtio0: unknown fault from EP 8".into(), "0000:00:01.0 access : the IOMMU gives no reason (1)"),
    ] {
        assert_eq!(told(&log), [expected], "{log}");
    }
}

/// Since 6.15: a record, then its words in one or two lines.
#[test]
fn words_of_smmu_v3_behind_a_record_are_one_fault_with_its_access() {
    let record = |code: u64| {
        format!(
            "arm-smmu-v3 a.auto: event {code:#04x} received:\narm-smmu-v3 a.auto: \t{:#018x}\narm-smmu-v3 a.auto: \t0x0000020800000000\n\
             arm-smmu-v3 a.auto: \t0x00000000fffe0040\narm-smmu-v3 a.auto: \t0x0000000000000000\n",
            0x200_u64 << 32 | code
        )
    };
    let page = "arm-smmu-v3 a.auto: event: F_TRANSLATION client: 0000:02:00.0 sid: 0x200 ssid: 0x0 iova: 0xfffe0040 ipa: 0x0\n";
    for (words, access) in [
        ("unpriv data write s1 \"Input address caused fault\" stag: 0x0", "write"),
        ("priv data read s1 \"Input address caused fault\" stag: 0x0", "read"),
        ("unpriv inst read s2 \"Input address caused fault\" stall stag: 0x5", "execute from"),
        ("anything data write", "access"),
    ] {
        let log = format!("{}{page}arm-smmu-v3 a.auto: {words}\n", record(0x10));
        let expected = format!("0000:02:00.0 {access} 0xfffe0040: nothing is mapped there for this (1)");
        assert_eq!(told(&log), [expected]);
    }
    let unknown = format!(
        "{}arm-smmu-v3 a.auto: event: UNKNOWN client: 0000:02:00.0 sid: 0x200 ssid: 0x0\n",
        record(0x20)
    );
    assert_eq!(told(&unknown), ["0000:02:00.0 access : code 0x20 (F_TLB_CONFLICT) (1)"]);
}

#[test]
fn faults_of_risc_v_are_read() {
    for (line, expected) in [
        (
            "riscv,iommu 3010000.iommu: Fault 15 devid: 0x8 iotval: ffff3000 iotval2: 0",
            "device 0x8 write 0xffff3000: nothing is mapped there for this (1)",
        ),
        (
            "iommu_pci 0000:00:01.0: Fault 256 devid: 0x10 iotval: 1000 iotval2: 0",
            "device 0x10 access 0x1000: the device is attached to nothing (1)",
        ),
        (
            "iommu_pci 0000:00:01.0: Fault 273 devid: 0x10 iotval: 0 iotval2: 0",
            "device 0x10 access 0x0: code 273 (1)",
        ),
    ] {
        assert_eq!(told(line), [expected]);
    }
    for line in [
        "riscv,iommu a: Fault x devid: 0x8 iotval: 0 iotval2: 0",
        "riscv,iommu a: Fault 13 devid: ",
        "Fault 13 devid: 0x8 iotval: 0 iotval2: 0",
    ] {
        assert_eq!(told(line), [""; 0], "{line}");
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
