//! Both kinds of bounce buffers, and what a CPU lends to them.

#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../dice/mod.rs"]
mod dice;
#[path = "../manual/mod.rs"]
mod manual;
#[path = "../played/mod.rs"]
mod played;
#[path = "../rig/mod.rs"]
mod rig;

mod lends;
mod pool;
mod swiotlb;
