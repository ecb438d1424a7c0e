//! The drivers of IOMMUs, below which everything lies: firmware's tables, registers, what units
//! write to memory.

pub mod acpi;
mod lying;
pub mod units;
mod virtio;

use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis_hw::Fault;
use portcullis_model::Memory;

use crate::reached::note;

/// Enough for what drivers allocate, a device table of 64 Ki devices among it.
const MEMORY: u64 = 8 << 20;

/// Where memory begins.
const BASE: u64 = 1 << 20;

fn memory() -> Arc<Memory> {
    Memory::with_base(PhysAddr::new(BASE), MEMORY)
}

/// Nothing was read or freed that the driver does not own.
fn is_sound(memory: &Memory) {
    assert_eq!(memory.stray_tables(), 0, "memory that is not the driver's was used");
    assert_eq!(memory.bad_frees(), 0, "memory was freed twice, or was not the driver's");
}

/// Faults can be told, whatever they say.
fn told(fault: Option<Fault>) -> bool {
    let Some(fault) = fault else { return false };
    note(format_args!("fault: {fault}"));
    !fault.to_string().is_empty()
}
