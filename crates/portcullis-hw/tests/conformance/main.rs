//! One list of cases on QEMU's IOMMUs, each through the driver that a kernel would use, with `edu` as the device.
//!
//! They need QEMU, and run by `cargo xtask conformance`, or with `--ignored`.
#![allow(
    unsafe_code,
    reason = "memory is opened by its number; it is QEMU's, and this process reaches it as atomics only"
)]

mod amdvi;
mod cases;
mod kind;
#[path = "../machine/mod.rs"]
mod machine;
mod riscv;
mod smmuv3;
mod virtio;
mod vtd;

/// The cases, each for every IOMMU: a case itself reports what one cannot show.
macro_rules! every_case {
    ($then:ident $($given:tt)*) => {
        $then! {
            $($given)*
            a_device_that_is_attached_to_nothing_reaches_nothing
            a_mapping_is_read_and_written_as_its_direction_allows
            a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
            a_lazy_unmap_ends_access_with_its_flush
            what_was_absent_is_reached_once_it_is_mapped
            large_pages_are_walked_to_their_ends
            a_part_of_a_large_page_ends_alone
            a_run_across_a_large_border_ends_on_both_sides
            a_list_is_one_piece_for_the_device
            a_list_of_odd_pieces_is_reached_piece_by_piece
            devices_of_two_domains_do_not_reach_each_others_memory
            a_device_moves_between_domains_and_leaves_nothing_behind
            a_device_that_moves_while_it_writes_reaches_one_domain_or_none
            a_number_that_is_used_again_brings_nothing_back
            a_trusted_device_passes_through
            addresses_stay_within_what_a_device_can_say
            the_highest_addresses_of_a_64_bit_device_are_translated
            what_firmware_reserves_is_mapped_one_to_one_and_never_handed_out
            the_invalidation_queue_wraps_and_many_cpus_share_it
            a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out
            thousands_of_mappings_land_where_they_should
            a_unit_that_was_left_on_is_taken_over_and_shut_down
            where_no_unit_is_there_is_an_error
        }
    };
}

/// A test of each case for `$kind`.
macro_rules! tests_of {
    (($kind:ty, $needs:meta) $($case:ident)*) => {
        $(#[test]
        #[$needs]
        fn $case() {
            crate::cases::$case::<$kind>();
        })*
    };
}

macro_rules! on {
    ($($iommu:ident: $kind:ty;)*) => {
        $(mod $iommu {
            every_case!(tests_of ($kind, ignore = "needs QEMU"));
        })*
    };
}

/// Cases of one IOMMU only.
macro_rules! own {
    ($($iommu:ident { $($case:ident)* })*) => {
        mod own {
            $(mod $iommu {
                $(#[test]
                #[ignore = "needs QEMU"]
                fn $case() {
                    crate::$iommu::$case();
                })*
            })*
        }
    };
}

/// The VT-d driver on the software IOMMU, which runs everywhere.
mod software {
    use crate::kind::Tables;
    use crate::machine::SoftwareHost;
    use portcullis_hw::vtd::{FirstStage, Unit};

    type SecondStages = Tables<Unit<SoftwareHost>>;
    type FirstStages = Tables<FirstStage<SoftwareHost>>;

    mod second_stage {
        every_case!(tests_of(super::SecondStages, cfg(all())));
    }

    mod first_stage {
        every_case!(tests_of(super::FirstStages, cfg(all())));
    }

    #[test]
    fn both_stages_at_once() {
        crate::vtd::both_stages_at_once();
    }
}

// `cargo xtask` counts the lines of these two lists, and of the list of cases.
on! {
    vtd_cases: crate::kind::Tables<portcullis_hw::vtd::Unit<crate::machine::QemuHost>>;
    vtd_first_stage: crate::kind::Tables<portcullis_hw::vtd::FirstStage<crate::machine::QemuHost>>;
    amdvi_cases: crate::kind::Tables<portcullis_hw::amdvi::Unit<crate::machine::QemuHost>>;
    riscv_cases: crate::kind::Tables<portcullis_hw::riscv::Unit<crate::machine::QemuHost>>;
    virtio_cases: crate::virtio::VirtioIommu;
    smmuv3_first_stage_4k: crate::kind::Tables<crate::smmuv3::Smmu<12, 0>>;
    smmuv3_first_stage_16k: crate::kind::Tables<crate::smmuv3::Smmu<14, 0>>;
    smmuv3_first_stage_64k: crate::kind::Tables<crate::smmuv3::Smmu<16, 0>>;
    smmuv3_second_stage_4k: crate::kind::Tables<crate::smmuv3::Smmu<12, { crate::smmuv3::FIRST_STAGE }>>;
    smmuv3_second_stage_16k: crate::kind::Tables<crate::smmuv3::Smmu<14, { crate::smmuv3::FIRST_STAGE }>>;
    smmuv3_second_stage_64k: crate::kind::Tables<crate::smmuv3::Smmu<16, { crate::smmuv3::FIRST_STAGE | crate::smmuv3::WIDTH }>>;
    smmuv3_small: crate::kind::Tables<crate::smmuv3::Smmu<12, { crate::smmuv3::COMFORT }>>;
}

own! {
    vtd {
        a_mode_is_asked_for_or_found
    }
    smmuv3 {
        both_stages_at_once
        a_refused_command_is_reported_and_the_queue_goes_on
        records_go_on_after_some_were_lost
    }
    virtio {
        the_interrupt_window_is_a_region_that_domains_keep_free
        granules_of_64_kib_are_mapped_by_their_size
        what_is_mapped_before_a_device_comes_is_there_when_it_comes_again
        many_cpus_share_the_queue_until_its_index_wraps
    }
}
