//! A machine with a handle, and what the tests do with it.

use portcullis::addr::{Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::dma::{DmaAttributes, DmaMapError, DmaOps, DmaUnmapError, OpsConfig};
use portcullis::domain::Policy;
use portcullis_model::Buffer;

use crate::queue::world::{Machine, PAGE, World};

/// What copies up to here.
pub const THRESHOLD: u64 = 16 * PAGE;

/// Every configuration.
pub const CONFIGS: [OpsConfig; 3] = [
    OpsConfig::Strict,
    OpsConfig::Lazy { window_ns: 3_600_000_000_000 },
    OpsConfig::Bounce { threshold: THRESHOLD },
];

pub type Ops = DmaOps<Machine>;

/// A machine whose device has a handle with this configuration.
pub fn machine(config: OpsConfig) -> (World, Ops) {
    let world = World::new(Policy::Strict);
    let ops = world.nic.ops(config).unwrap();
    (world, ops)
}

/// A driver's buffer in the middle of memory that is all its test's, filled with `byte`.
pub fn buffer(world: &World, len: u64, byte: u8) -> Buffer {
    let buffer = world.memory.buffer(len).unwrap();
    buffer.write(0, &vec![byte; len as usize]).unwrap();
    buffer
}

pub fn contents(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len() as usize];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// A part of a buffer.
pub fn part(buffer: &Buffer, offset: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(buffer.phys().get() + offset), len }
}

/// What the handle's methods are, for memory that is the test's.
pub trait Calls {
    fn maps(&self, piece: PhysSegment, direction: Direction) -> Result<Iova, DmaMapError>;
    fn maps_as(
        &self,
        piece: PhysSegment,
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Iova, DmaMapError>;
    fn maps_list(&self, list: &[PhysSegment], direction: Direction) -> Result<Vec<DmaSegment>, DmaMapError>;
    fn ends(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError>;
    fn ends_uncopied(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError>;
    fn syncs_for_cpu(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError>;
    fn syncs_for_device(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError>;
}

impl<X: portcullis::dma::Machine> Calls for DmaOps<X> {
    fn maps(&self, piece: PhysSegment, direction: Direction) -> Result<Iova, DmaMapError> {
        self.maps_as(piece, direction, DmaAttributes::default())
    }

    fn maps_as(
        &self,
        PhysSegment { phys, len }: PhysSegment,
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Iova, DmaMapError> {
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        unsafe { self.map(phys, len, direction, attributes) }
    }

    fn maps_list(&self, list: &[PhysSegment], direction: Direction) -> Result<Vec<DmaSegment>, DmaMapError> {
        let mut out = vec![DmaSegment::default(); list.len()];
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        let count = unsafe { self.map_sg(list, direction, DmaAttributes::default(), &mut out) }?;
        out.truncate(count);
        Ok(out)
    }

    fn ends(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        unsafe { self.unmap(iova, len, DmaAttributes::default()) }
    }

    fn ends_uncopied(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        unsafe { self.unmap(iova, len, DmaAttributes { skip_copy: true, ..DmaAttributes::default() }) }
    }

    fn syncs_for_cpu(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        unsafe { self.sync_for_cpu(at, len) }
    }

    fn syncs_for_device(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the memory is the test's, all of it atomics, and no two calls for one mapping run at once.
        unsafe { self.sync_for_device(at, len) }
    }
}

/// The address and length that end what was mapped as `segments`.
pub fn whole(segments: &[DmaSegment]) -> (Iova, u64) {
    let (first, last) = (segments[0].iova, segments[segments.len() - 1]);
    (first, last.iova.get() + last.len - first.get())
}
