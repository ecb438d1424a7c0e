//! Domains of units: reserved regions, devices, mappings, and their end.

use std::sync::Arc;

use portcullis::addr::{
    DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment,
};
use portcullis::dma::{DmaMask, Queue, QueueConfig};
use portcullis::domain::Policy;
use portcullis::pgtable::Format;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::Reserved;
use portcullis_hw::{Iommu, UnitError};
use portcullis_model::Memory;

use super::heard::{Tables, below};
use super::text::Transcript;
use super::{Board, FOLDER, Told};

pub fn plays<K: Told, X: Format, U: Iommu<X, Frames = Tables<false>>>(
    name: &str,
    start: impl Fn(Board<K>) -> Result<U, UnitError>,
) {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), 8 << 20);
    let unit = Arc::new(start(Board::new(&memory, (0, 0))).ok().unwrap());
    unit.enable().unwrap();
    let mut said = Transcript::new(&format!("{name}, by domains"), below);
    let range = |start, len| IovaRange::new(Iova::new(start), len).unwrap();
    let region = |start, len, permissions| Reserved { range: range(start, len), permissions };
    for (number, policy, last, regions) in [
        (0xffff, Policy::Strict, u64::MAX, &[][..]),
        (7, Policy::Passthrough, u64::MAX, &[]),
        (7, Policy::Strict, 0x9000_0fff, &[region(0x9000_0800, 0x1000, Permissions::READ)]),
        (7, Policy::Strict, u64::MAX, &[region(0xfee0_0000, 0x1000, Permissions::READ)]),
        (7, Policy::Strict, u64::MAX, &[region(1 << 60, 0x1000, Permissions::READ)]),
        (
            7,
            Policy::Strict,
            0x9fff_ffff,
            &[
                region(0x9000_0800, 0x1800, Permissions::READ),
                region(0x9000_1000, 0x1000, Permissions::WRITE),
                region(0x4000_0000, 0x20_0000, Permissions::READ_WRITE),
            ],
        ),
    ] {
        said.part(format_args!("number {number}, {policy:?}, up to {last:#x}, {} regions", regions.len()));
        let build = || {
            let builder = unit.domain(DomainId(number))?.policy(policy).last_iova(Iova::new(last));
            let builder = builder.for_device(DeviceId(0x28))?.reserve(range(0x8000_0000, 0x1000_0000));
            // SAFETY: the unit walks no tables.
            unsafe { builder.regions(regions.iter().copied()) }.build(StdPlatform::new())
        };
        let Ok(domain) = said.call_as("build", build, |_| String::new()) else { continue };
        for (device, mask) in [
            (0x28, DmaMask::BITS_64),
            (0x29, DmaMask::BITS_32),
            (0x28, DmaMask::BITS_64),
            (0x77_7777, DmaMask::BITS_64),
        ] {
            let attach = || domain.attach(DeviceId(device), mask);
            let call = format!("attach {device:#x} up to {:#x}", mask.last());
            let Ok(device) = said.call_as(call, attach, |_| String::new()) else { continue };
            let mut queue: Queue<_> = device.queue(QueueConfig::direct()).unwrap();
            for (phys, len) in
                [(0x10_0000_0010, 0x100), (0x10_0000_0800, 0x3000), (0x10_0020_0000, 0x40_0000)]
            {
                let mut view = [DmaSegment::default()];
                let list = [PhysSegment { phys: PhysAddr::new(phys), len }];
                let map = || {
                    // SAFETY: the unit walks no tables.
                    unsafe { queue.map_raw(&list, Direction::FromDevice, &mut view) }
                        .map(|(mapping, _)| (mapping, view))
                };
                let show = |(_, view): &(_, [DmaSegment; 1])| format!("{:#x}", view[0].iova);
                let Ok((mapping, _)) = said.call_as(format_args!("map {phys:#x}+{len:#x}"), map, show) else {
                    continue;
                };
                let _ = said.call("unmap", || queue.unmap_raw(mapping));
            }
        }
        let _ =
            said.call("another of this number", || unit.domain::<StdPlatform>(DomainId(number)).map(drop));
        for device in [0x29, 0x29] {
            let _ = said.call(format_args!("detach {device:#x}"), || domain.detach(DeviceId(device)));
        }
        drop(domain);
        said.note("the domain is gone", ());
    }
    let _ = said.call("shut down", || unit.shut_down());
    said.note("frames", memory.frames_in_use());
    said.assert_is(FOLDER, &format!("{name}-domains"));
}
