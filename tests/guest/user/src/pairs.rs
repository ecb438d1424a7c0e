//! What a map and an unmap take, as the library for C does them.

use std::time::Instant;

use portcullis::addr::Direction;
use portcullis::bounce::PoolConfig;
use portcullis::dma::{MapAttributes, OpsConfig, UnmapAttributes};
use portcullis_linux::heap::HeapBuffer;

use crate::edu::Edu;
use crate::{Result, Way, attached};

/// Prints the nanoseconds of a map and an unmap that copy so many bytes: the best of ten rounds.
pub fn pairs(name: &str, bytes: u64, count: u32) -> Result<()> {
    let (device, space) = Way::Iommufd.domain(name)?;
    let _edu = Edu::new(&device)?;
    let threshold = PoolConfig::default().threshold;
    let ops = attached(&device, &space)?.ops(OpsConfig::Bounce { threshold })?;
    let buffer = HeapBuffer::new(32 * 4096).ok_or("no memory")?;
    let mut best = f64::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..count {
            // SAFETY: the buffer stays, and nothing touches it.
            unsafe {
                let iova = ops.map(buffer.phys(), bytes, Direction::ToDevice, MapAttributes::default())?;
                ops.unmap(iova, bytes, UnmapAttributes::default())?;
            }
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(count));
    }
    println!("{best:.1}");
    Ok(())
}
