//! Where each allocator puts the ranges of one script, against `tests/whole/allocators.txt`. With `PORTCULLIS_WRITE_TABLES=1` the test writes
//! the file.

#[path = "../../../portcullis/tests/golden/mod.rs"]
mod golden;

use ::portcullis::iova::Bitmap;

use super::allocator::{Allocator, Make};
use super::portcullis::backing;
use super::tree::HoleTree;
use super::workload::{Shape, Space};

/// Allocates and frees, and says where: `first+pages`, `-` for what was freed, and `no` where there was no room.
fn told<A: Allocator>(name: &str, make: Make<A>, most: u64) -> String {
    let allocator = make(&Space { pages: 1 << 10, live: 256 }).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut live: Vec<A::Range> = Vec::new();
    let mut text = format!("{name}, aligned {}, ranges of up to {most}:", allocator.aligned());
    for _ in 0..200 {
        if random.u64(..3) > 0 || live.is_empty() {
            match allocator.alloc(random.u64(1..=most)) {
                Some(range) => {
                    let pages = allocator.pages(range);
                    text += &format!(" {}+{}", pages.first, pages.pages);
                    live.push(range);
                }
                None => text += " no",
            }
        } else {
            let range = live.swap_remove(random.usize(..live.len()));
            text += &format!(
                " -{}{}",
                allocator.pages(range).first,
                if allocator.free(range) { "" } else { "?" }
            );
        }
    }
    let freed = live.into_iter().filter(|range| allocator.free(*range)).count();
    text + &format!(" {freed} freed {:?}\n", allocator.fault())
}

#[test]
fn ranges_lie_where_they_did() {
    let mut text = String::new();
    for most in [1, 9, 64] {
        text += &told("Bitmap", backing::<Bitmap>(), most);
        text += &told("HoleTree", backing::<HoleTree>(), most);
        #[cfg(feature = "rivals")]
        {
            use super::rivals;
            text += &told("offset-allocator", rivals::offset_allocator(), most);
            text += &told("range-alloc", rivals::range_alloc(), most);
            text += &told("buddy_system_allocator", rivals::buddy_system_allocator(), most);
            text += &told("vm-allocator", rivals::vm_allocator(), most);
            text += &told("vmem", rivals::vmem(), most);
        }
    }
    for shape in [
        Shape::Replace { live: 4 },
        Shape::Full { order: 6 },
        Shape::Pair { pages: 3 },
        Shape::First { allocations: 9 },
        Shape::CrossCpu,
    ] {
        for threads in [1, 2] {
            let plans = shape.plans(threads);
            let plans = plans.iter().map(|plan| {
                format!("{:?} {:?} {:?} of {}", plan.fill, plan.holes, &plan.steps[..9], plan.steps.len())
            });
            text += &format!(
                "{shape:?} {threads} {:?} {:?}\n{}\n",
                shape.scaled(3),
                shape.space(threads),
                plans.collect::<Vec<_>>().join("\n")
            );
        }
    }
    if cfg!(feature = "rivals") {
        golden::is_golden(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis-bench/tests/whole/allocators.txt"),
            &text,
        );
    }
}
