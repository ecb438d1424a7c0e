//! What a map and an unmap take, as the library for C does them.

use std::time::Instant;

use portcullis::addr::Direction;
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaAttributes, DmaMask, DomainBuilder, OpsConfig};
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::{Heap, HeapBuffer};
use portcullis_linux::vfio::Device;

use crate::Result;
use crate::edu::Edu;

/// Prints the nanoseconds of a map and an unmap that copy so many bytes: the best of ten rounds.
pub fn pairs(name: &str, bytes: u64, count: u32) -> Result<()> {
    let device = Device::open(name)?;
    let _edu = Edu::new(&device)?;
    let pool = PoolConfig::default().reached_by(DmaMask::bits(28).last());
    // SAFETY: the domain gets the heap's memory, and the process's by number.
    let builder = DomainBuilder::new(unsafe { device.space().mapper() }).bounce(Heap, pool);
    let domain = builder.build(StdPlatform::new())?;
    let attached = domain.attach(device.id(), DmaMask::bits(28))?;
    let ops = attached.ops(OpsConfig::Bounce { threshold: pool.threshold })?;
    let buffer = HeapBuffer::new(32 * 4096).ok_or("no memory")?;
    let mut best = f64::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..count {
            // SAFETY: the buffer stays, and nothing touches it.
            unsafe {
                let iova = ops.map(buffer.phys(), bytes, Direction::ToDevice, DmaAttributes::default())?;
                ops.unmap(iova, bytes, DmaAttributes::default())?;
            }
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(count));
    }
    println!("{best:.1}");
    Ok(())
}
