//! The cost of address placement for a ring: misses per access of the IOTLB and of the paging-structure caches. `tests/common/placement.rs`
//! describes the experiment; its results are the same on every machine. Run with `cargo run --release --example placement -p
//! portcullis-model`.

#[path = "../tests/common/placement.rs"]
mod placement;

use placement::{Blocks, Pace, Placed, Setup, run};

const PLACED: [Placed; 4] = [Placed::Pages, Placed::Ranges, Placed::Arenas, Placed::Coloured];

fn main() {
    println!(
        "Misses per access. page: addresses from the space, page by page; range: descriptor by descriptor;"
    );
    println!("ring: from an arena for each ring, without colours; colour: with a colour each.");
    println!("The least that strict protection allows is one IOTLB miss for each page that is mapped.");
    let (step, random) = (Pace::InStep, Pace::Uneven);
    table(step, Blocks::Two, (128, 8));
    table(step, Blocks::Two, (64, 4));
    table(random, Blocks::Two, (128, 8));
    table(random, Blocks::One, (128, 8));
}

fn table(pace: Pace, blocks: Blocks, (iotlb_entries, iotlb_ways): (usize, usize)) {
    let pace_name = if pace == Pace::InStep { "in step" } else { "at random" };
    let blocks_name = if blocks == Blocks::One { "one block" } else { "up to two blocks" };
    print!("\nIOTLB of {iotlb_entries} in {iotlb_ways} ways, 64 tables per level in 4 ways; ");
    println!("rings {pace_name}; {blocks_name} per invalidation");
    println!("{:21}{:^28}{:^28}{:^14}", "", "IOTLB", "lowest table", "next above");
    print!("{:>6}{:>7}{:>8}", "pages", "rings", "least");
    print!("{:>7}{:>7}{:>7}{:>7}", "page", "range", "ring", "colour");
    println!("{:>7}{:>7}{:>7}{:>7}{:>7}{:>7}", "page", "range", "ring", "colour", "page", "colour");
    for pages in [1, 64] {
        let (warm_up, counted) = if pages == 1 { (2048, 1024) } else { (512, 128) };
        for rings in [1, 4, 8, 16, 40] {
            let setup = Setup { rings, pages, pace, blocks, iotlb_entries, iotlb_ways, warm_up, counted };
            let rates = PLACED.map(|placed| run(setup, placed));
            // The pages of a descriptor, per access to them and to the ring's own memory.
            let least = pages as f64 / (4 * pages + 2) as f64;
            print!("{pages:>6}{rings:>7}{least:>8.3}");
            rates.iter().for_each(|rates| print!("{:>7.3}", rates.iotlb));
            rates.iter().for_each(|rates| print!("{:>7.3}", rates.levels[0]));
            println!("{:>7.3}{:>7.3}", rates[0].levels[1], rates[3].levels[1]);
        }
    }
}
