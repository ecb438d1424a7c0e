//! Domains: their policies, and what a device reaches while these change, CPUs meet and hardware fails.

#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../common/mod.rs"]
mod common;
#[path = "../dice/mod.rs"]
mod dice;
#[path = "../manual/mod.rs"]
mod manual;
#[path = "../played/mod.rs"]
mod played;
#[path = "../queued/mod.rs"]
mod queued;
#[path = "../rig/mod.rs"]
mod rig;
#[macro_use]
#[path = "../common/inner_format.rs"]
mod inner_format;

mod caching_mode;
mod changes;
mod device_tlb;
mod exposure;
mod failures;
mod hostile;
mod large_parts;
mod meetings;
mod policies;
mod races;
mod reviewed;
