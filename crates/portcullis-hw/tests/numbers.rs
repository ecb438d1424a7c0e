//! The SMMUv3's command and event numbers against the crate `smmu`, an independent model. It walks no tables and reads no queues in memory:
//! mappings and entries come by calls. So it can only check numbers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::pgtable::Arm;
use portcullis_hw::software::{SmmuV3, Software, SoftwareHost};
use portcullis_hw::{Attachment, Iommu, Reason, smmuv3};
use portcullis_model::Memory;
use smmu::types::{CommandType, EventType};

const CMDQ_BASE: usize = 0x90;
const CMDQ_PROD: usize = 0x98;
const EVENTQ_BASE: usize = 0xa0;
const EVENTQ_PROD: usize = 0x1_00a8;
const ADDRESS: u64 = 0x000f_ffff_ffff_ffe0;

type Unit = smmuv3::Unit<SoftwareHost<SmmuV3, Arc<Memory>>, 12>;

fn unit(memory: &Arc<Memory>) -> Unit {
    // SAFETY: 1: the driver's host has the same frames.
    let unit = unsafe { Software::new(Arc::clone(memory)) };
    let host = SoftwareHost {
        unit,
        now: || 0,
        relax: std::hint::spin_loop,
        patience: 1_000_000,
        cpus: 0,
        cpu: || None,
    };
    smmuv3::Unit::start(host).unwrap()
}

#[test]
fn commands_are_those_of_the_manual() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), 4 << 20);
    let unit = unit(&memory);
    let mut seen = 0;
    let mut told = |expected: &[CommandType]| {
        let software = &unit.host().unit;
        let (base, end) = (software.get64(CMDQ_BASE) & ADDRESS, software.get(CMDQ_PROD));
        let command =
            |index: u32| memory.read_u64(PhysAddr::new(base + u64::from(index % 256) * 16)).unwrap() as u8;
        let commands: Vec<u8> = (seen..end).map(command).collect();
        seen = end;
        assert_eq!(commands, expected.iter().map(|command| *command as u8).collect::<Vec<_>>());
    };
    use CommandType::*;
    unit.enable().unwrap();
    told(&[CfgiAll, Sync, TlbiNsnhAll, Sync]);
    let (one, two) = (Arm::stage_1(40, 40).unwrap(), Arm::stage_2(40, 40).unwrap());
    for (device, format) in [(8, one), (9, two)] {
        let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(0x4000), format };
        // SAFETY: the unit walks no tables.
        unsafe { unit.attach(DeviceId(device), to) }.unwrap();
    }
    told(&[CfgiSte, CfgiCd, Sync, CfgiSte, Sync, CfgiSte, CfgiCd, Sync, CfgiSte, Sync]);
    let range = IovaRange::new(Iova::new(0x5000), 0x1000).unwrap();
    unit.invalidate(DomainId(7), Invalidation::Range { range, leaf_only: true }).unwrap();
    told(&[TlbiNhVa, TlbiS2Ipa, Sync]);
    unit.invalidate(DomainId(7), Invalidation::Domain).unwrap();
    told(&[TlbiNhAsid, TlbiS12Vmall, Sync]);
}

#[test]
fn events_are_those_of_the_manual() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), 4 << 20);
    let unit = unit(&memory);
    unit.enable().unwrap();
    let software = &unit.host().unit;
    let queue = memory.table_at(PhysAddr::new(software.get64(EVENTQ_BASE) & ADDRESS & !0xfff));
    // Events whose record has the address of an access, by the field names of section 7.3.
    let of_access = [
        EventType::FUut,
        EventType::FTranslForbidden,
        EventType::FWalkEabt,
        EventType::FTranslation,
        EventType::FAddrSize,
        EventType::FAccess,
        EventType::FPermission,
        EventType::FTlbConflict,
    ];
    let events = [
        (EventType::FUut, Reason::Other),
        (EventType::CBadStreamid, Reason::NotAttached),
        (EventType::FSteFetch, Reason::Unreadable),
        (EventType::CBadSte, Reason::NotAttached),
        (EventType::FBadAtsTreq, Reason::BadRequest),
        (EventType::FStreamDisabled, Reason::BadRequest),
        (EventType::FTranslForbidden, Reason::BadRequest),
        (EventType::CBadSubstreamid, Reason::BadRequest),
        (EventType::FCdFetch, Reason::Unreadable),
        (EventType::CBadCd, Reason::BadContext),
        (EventType::FWalkEabt, Reason::Unreadable),
        (EventType::FTranslation, Reason::NotMapped),
        (EventType::FAddrSize, Reason::BeyondWidth),
        (EventType::FAccess, Reason::Permission),
        (EventType::FPermission, Reason::Permission),
        (EventType::FTlbConflict, Reason::Other),
        (EventType::FCfgConflict, Reason::BadContext),
        (EventType::EPageRequest, Reason::Other),
        (EventType::FVmsFetch, Reason::Unreadable),
    ];
    for (index, (event, reason)) in events.into_iter().enumerate() {
        queue[index * 4].store(9 << 32 | event as u64, Ordering::Release);
        queue[index * 4 + 2].store(0xffff_e040, Ordering::Release);
        software.set(EVENTQ_PROD, index as u32 + 1);
        let fault = unit.next_fault().unwrap();
        assert_eq!((fault.device, fault.reason), (DeviceId(9), reason), "{event:?}");
        if of_access.contains(&event) {
            assert_eq!(fault.address, Some(Iova::new(0xffff_e040)), "{event:?}");
        }
    }
}
