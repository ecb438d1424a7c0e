//! The exact words of all commands, by the manuals, with the second-highest domain and device numbers.

#[track_caller]
fn are(commands: &[([u64; 2], [u64; 2])]) {
    for (command, words) in commands {
        assert_eq!(command, words, "{command:x?}");
    }
}

/// VT-d 6.5.2.
#[test]
fn vtd() {
    use crate::vtd::layout::descriptor::*;
    let drain = DRAIN_WRITES | DRAIN_READS;
    are(&[
        (CONTEXT_ALL, [0x11, 0]),
        (context_of(0xfffe, 0x8001), [0x8001_fffe_0031, 0]),
        (iotlb_all(drain), [0xd2, 0]),
        (iotlb_domain(drain, 0xfffe), [0xfffe_00e2, 0]),
        (iotlb_pages(drain, 0xfffe, 0x20_0000, 9, true), [0xfffe_00f2, 0x20_0049]),
        (iotlb_pages(DRAIN_WRITES, 0xfffe, 0x5000, 0, false), [0xfffe_0072, 0x5000]),
        (first_stage_all(0xfffe), [0xfffe_0026, 0]),
        (first_stage_pages(0xfffe, 0x20_0000, 9, true), [0xfffe_0036, 0x20_0049]),
        (first_stage_pages(0xfffe, 0x5000, 0, false), [0xfffe_0036, 0x5000]),
        (PASIDS_ALL, [0x37, 0]),
        (pasids_of(0xfffe), [0xfffe_0017, 0]),
        (device_tlb(0xfffe, 0x5000, 0), [0xfffe_0000_0003, 0x5000]),
        (device_tlb(0xfffe, 0x20_0000, 9), [0xfffe_0000_0003, 0x2f_f001]),
        (wait(7, 0x1_0000_0004), [0x7_0000_0025, 0x1_0000_0004]),
        (NOTHING, [0x22, 0]),
    ]);
}

/// AMD 2.4.
#[test]
fn amdvi() {
    use crate::amdvi::layout::command::*;
    are(&[
        (completion_wait(7, 0x1_0000_0008), [0x1000_0001_0000_0009, 7]),
        (NOTHING, [0x1000_0000_0000_0000, 0]),
        (BARRIER, [0x1000_0000_0000_0004, 0]),
        (devtab_entry(0xfffe), [0x2000_0000_0000_fffe, 0]),
        (pages(0xfffe, 0x5000, 0, true), [0x3000_fffe_0000_0000, 0x5000]),
        (pages(0xfffe, 0x5000, 0, false), [0x3000_fffe_0000_0000, 0x5002]),
        (pages(0xfffe, 0x20_0000, 9, true), [0x3000_fffe_0000_0000, 0x2f_f001]),
        (device_tlb(0xfffe, 0x5000, 0), [0x4000_fffe_0100_fffe, 0x5000]),
        (device_tlb(0xfffe, 0x20_0000, 9), [0x4000_fffe_0100_fffe, 0x2f_f001]),
        (ALL, [0x8000_0000_0000_0000, 0]),
    ]);
}

/// RISC-V IOMMU, "Command-Queue"; address ranges: 9.3.
#[test]
fn riscv() {
    use crate::riscv::layout::command::*;
    are(&[
        (VMA_ALL, [1, 0]),
        (vma(0xf_fffe), [0x1_ffff_e001, 0]),
        (vma_pages(0xfffe, 0x5000, 0), [0x1_0fff_e401, 0x1400]),
        (vma_pages(0xfffe, 0x6000, 1), [0x1_0fff_e401, 0x1a00]),
        (vma_of_guest(0xfffe), [0x0fff_e002_0000_0001, 0]),
        (GVMA_ALL, [0x81, 0]),
        (gvma(0xfffe), [0x0fff_e002_0000_0081, 0]),
        (gvma_pages(0xfffe, 0x5000, 0), [0x0fff_e002_0000_0481, 0x1400]),
        (DIRECTORY_ALL, [3, 0]),
        (directory(0xff_fffe), [0xffff_fe02_0000_0003, 0]),
        (fence(7, 0x1_0000_0004), [0x7_0000_3402, 0x4000_0001]),
        (NOTHING, [2, 0]),
        (device_tlb(0xfffe, 0x5000, 0), [0x00ff_fe00_0000_0004, 0x5000]),
        (device_tlb(0x1_fffe, 0x5000, 0), [0x01ff_fe02_0000_0004, 0x5000]),
    ]);
}

/// SMMUv3 4.3 to 4.7.
#[test]
fn smmuv3() {
    use crate::smmuv3::layout::command::*;
    are(&[
        (CFGI_ALL, [0x04, 31]),
        (stream(0x00ff_fffe), [0x00ff_fffe_0000_0003, 0]),
        (context(0x00ff_fffe), [0x00ff_fffe_0000_0005, 1]),
        (TLBI_ALL, [0x30, 0]),
        (TLBI_EL2, [0x20, 0]),
        (tlbi_asid(0xfffe), [0xfffe_0000_0000_0011, 0]),
        (tlbi_vmid(0xfffe), [0x0000_fffe_0000_0028, 0]),
        (tlbi_asid_address(0xfffe, 0xffff_f000, true), [0xfffe_0000_0000_0012, 0xffff_f001]),
        (tlbi_vmid_address(0xfffe, 0xffff_f000, false), [0x0000_fffe_0000_002a, 0xffff_f000]),
        (
            range(tlbi_vmid_address(0xfffe, 0xffff_f000, true), 12, 31, 5),
            [0x0000_fffe_0051_f02a, 0xffff_f401],
        ),
        (range(tlbi_asid_address(1, 0, false), 16, 1, 0), [0x0001_0000_0000_1012, 0xc00]),
        (SYNC, [0x46, 0]),
    ]);
}
