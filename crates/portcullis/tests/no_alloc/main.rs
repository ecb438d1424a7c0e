//! What asks for no memory, and what holds where there is none. In a binary of its own, because it replaces the global
//! allocator.

#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../iova_model/mod.rs"]
mod iova_model;
#[path = "../limited/mod.rs"]
mod limited;

mod bounce_pool;
mod iova_bitmap;
mod iova_space;
mod iova_space_memory;
mod refused;
mod swiotlb;
