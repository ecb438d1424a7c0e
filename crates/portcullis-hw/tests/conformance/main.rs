//! One list of cases on QEMU's IOMMUs, each through the driver that a kernel would use, with `edu` as the device.
//!
//! They need QEMU, and run by `cargo xtask conformance`, or where they are asked for with `--ignored`.
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

/// The cases, for each of QEMU's IOMMUs.
macro_rules! on {
    ($($iommu:ident: $kind:ty { $($case:ident)* })*) => {
        $(mod $iommu {
            $(#[test]
            #[ignore = "needs QEMU"]
            fn $case() {
                crate::cases::$case::<$kind>();
            })*
        })*
    };
}

/// The same cases with the same driver on the software IOMMU, which is everywhere.
mod software {
    #[test]
    fn both_stages_at_once() {
        crate::vtd::both_stages_at_once();
    }

    macro_rules! here {
        ($($stage:ident: $unit:ident { $($case:ident)* })*) => {
            $(mod $stage {
                use crate::kind::Tables;
                use crate::machine::SoftwareHost;
                use portcullis_hw::vtd::$unit;

                $(#[test]
                fn $case() {
                    crate::cases::$case::<Tables<$unit<SoftwareHost>>>();
                })*
            })*
        };
    }

    here! {
        second_stage: Unit {
            a_device_that_is_attached_to_nothing_reaches_nothing
            a_mapping_is_read_and_written_as_its_direction_allows
            a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
            a_lazy_unmap_ends_access_with_its_flush
            large_pages_are_walked_to_their_ends
            a_list_is_one_piece_for_the_device
            devices_of_two_domains_do_not_reach_each_others_memory
            a_device_moves_between_domains_and_leaves_nothing_behind
            a_number_that_is_used_again_brings_nothing_back
            a_trusted_device_passes_through
            addresses_stay_within_what_a_device_can_say
            the_invalidation_queue_wraps_and_many_cpus_share_it
            thousands_of_mappings_land_where_they_should
            a_unit_that_was_left_on_is_taken_over_and_shut_down
        }
        first_stage: FirstStage {
            a_device_that_is_attached_to_nothing_reaches_nothing
            a_mapping_is_read_and_written_as_its_direction_allows
            a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
            a_lazy_unmap_ends_access_with_its_flush
            large_pages_are_walked_to_their_ends
            a_list_is_one_piece_for_the_device
            devices_of_two_domains_do_not_reach_each_others_memory
            a_device_moves_between_domains_and_leaves_nothing_behind
            a_number_that_is_used_again_brings_nothing_back
            a_trusted_device_passes_through
            addresses_stay_within_what_a_device_can_say
            the_invalidation_queue_wraps_and_many_cpus_share_it
            thousands_of_mappings_land_where_they_should
            a_unit_that_was_left_on_is_taken_over_and_shut_down
        }
    }
}

/// What concerns one IOMMU only.
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

on! {
    vtd_cases: crate::kind::Tables<portcullis_hw::vtd::Unit<crate::machine::QemuHost>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_number_that_is_used_again_brings_nothing_back
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    vtd_first_stage: crate::kind::Tables<portcullis_hw::vtd::FirstStage<crate::machine::QemuHost>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_number_that_is_used_again_brings_nothing_back
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    amdvi_cases: crate::kind::Tables<portcullis_hw::amdvi::Unit<crate::machine::QemuHost>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_number_that_is_used_again_brings_nothing_back
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    riscv_cases: crate::kind::Tables<portcullis_hw::riscv::Unit<crate::machine::QemuHost>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_number_that_is_used_again_brings_nothing_back
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        a_command_that_the_unit_does_not_know_is_reported_and_the_next_is_carried_out
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    virtio_cases: crate::virtio::VirtioIommu {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_first_stage_4k: crate::kind::Tables<crate::smmuv3::Smmu<12, 0>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_first_stage_16k: crate::kind::Tables<crate::smmuv3::Smmu<14, 0>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_first_stage_64k: crate::kind::Tables<crate::smmuv3::Smmu<16, 0>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_second_stage_4k: crate::kind::Tables<crate::smmuv3::Smmu<12, { crate::smmuv3::FIRST_STAGE }>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_second_stage_16k: crate::kind::Tables<crate::smmuv3::Smmu<14, { crate::smmuv3::FIRST_STAGE }>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_second_stage_64k: crate::kind::Tables<crate::smmuv3::Smmu<16, { crate::smmuv3::FIRST_STAGE | crate::smmuv3::WIDTH }>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
    smmuv3_small: crate::kind::Tables<crate::smmuv3::Smmu<12, { crate::smmuv3::COMFORT }>> {
        a_device_that_is_attached_to_nothing_reaches_nothing
        a_mapping_is_read_and_written_as_its_direction_allows
        a_strict_unmap_ends_access_and_without_its_invalidation_it_does_not
        a_lazy_unmap_ends_access_with_its_flush
        large_pages_are_walked_to_their_ends
        a_list_is_one_piece_for_the_device
        devices_of_two_domains_do_not_reach_each_others_memory
        a_device_moves_between_domains_and_leaves_nothing_behind
        a_trusted_device_passes_through
        addresses_stay_within_what_a_device_can_say
        the_invalidation_queue_wraps_and_many_cpus_share_it
        thousands_of_mappings_land_where_they_should
        a_unit_that_was_left_on_is_taken_over_and_shut_down
        where_no_unit_is_there_is_an_error
    }
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
}
