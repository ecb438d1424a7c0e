//! The addresses at which something ends: of the aperture, of memory, of a table, of a number of bits.

use portcullis::addr::Permissions;
use portcullis::pgtable::{Attributes, Format, Layout, Memory};

use super::machine::{Backing, Machine, Way};

const POWERS: [u32; 5] = [31, 32, 47, 48, 51];

/// All combinations of what can be asked for, one after the other.
pub fn attributes(number: u64) -> Attributes {
    let digit = |divisor| (number / divisor % 3) as usize;
    Attributes {
        permissions: [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE][digit(1)],
        memory: [Memory::WriteBack, Memory::Uncached, Memory::Device][digit(3)],
        snoop: number & 1 != 0,
        privileged: number & 2 != 0,
        execute: number & 4 != 0,
    }
}

/// Addresses before which something may end.
fn iova_edges<F: Backing, X: Format>(machine: &Machine<F, X>) -> Vec<u64> {
    let (format, top) = (machine.case.format, machine.top());
    let powers = POWERS.into_iter().map(|bits| 1_u64 << bits);
    let tables = (1..=format.levels()).map(|level| 1 << format.shift(level));
    // Past the first frame of a lowest table, and of the root.
    let frames = [1_u64 << (X::GRANULE_SHIFT + 9), 1 << (format.shift(format.levels()) + 9).min(62)];
    let edges = powers.chain(tables).chain(frames).chain([top / 2 + 1]);
    let mut edges: Vec<_> = edges.filter(|edge| *edge <= top && *edge > machine.granule()).collect();
    edges.sort_unstable();
    edges.dedup();
    edges
}

fn phys_edges<F: Backing, X: Format>(machine: &Machine<F, X>) -> Vec<u64> {
    let powers = POWERS.into_iter().map(|bits| 1_u64 << bits);
    powers.filter(|edge| *edge < machine.last_phys()).collect()
}

/// All of them, for one geometry.
pub fn walk_edges<F: Backing, X: Format>(machine: &mut Machine<F, X>) {
    across_edges(machine);
    near_edges(machine);
    ends(machine);
    refusals(machine);
    machine.look_at_all();
    machine.clear();
}

/// Two granules and more, of which one is before the edge, on either side.
fn across_edges<F: Backing, X: Format>(machine: &mut Machine<F, X>) {
    let granule = machine.granule();
    let phys_edges = phys_edges(machine);
    for (number, edge) in (0..).zip(iova_edges(machine)) {
        let mut places: Vec<u64> = phys_edges.iter().map(|edge| edge - granule).collect();
        places.extend([0, (machine.last_phys() + 1).saturating_sub(2 * granule)]);
        for (turn, phys) in (number..).zip(places) {
            let (start, attributes) = (edge - granule, attributes(turn));
            machine.map(Way::Whole, start, &[(phys, 2 * granule)], attributes);
            machine.unmap(start, granule);
            machine.unmap(edge, granule);
            // The same, piece by piece and the other way round, and a third that is elsewhere.
            let list = [(phys + granule, granule), (phys, granule), (2 * granule, granule)];
            machine.map(Way::List, start, &list, attributes);
            machine.unmap(start, 3 * granule);
        }
        // A long one, over both edges at once.
        for phys in phys_edges.iter().map(|edge| edge - 40 * granule) {
            let start = edge.saturating_sub(40 * granule);
            machine.map(Way::Whole, start, &[(phys, 80 * granule)], attributes(number));
            machine.unmap(start + 3 * granule, 70 * granule);
            machine.unmap(start, 80 * granule);
        }
    }
}

/// Neighbours of a page that is there, by the short way: in a table that is not remembered, and in one that is.
fn near_edges<F: Backing, X: Format>(machine: &mut Machine<F, X>) {
    let granule = machine.granule();
    let mut edges = iova_edges(machine);
    edges.push(machine.top() + 1);
    let phys_edges = phys_edges(machine);
    // Where all edges have a page before them and one after.
    for edge in &edges {
        for start in [edge.saturating_sub(3 * granule), edge + 2 * granule] {
            machine.map(Way::Whole, start, &[(0, granule)], attributes(8));
        }
    }
    let in_one_frame = |a: u64, b: u64| a / granule / 512 == b / granule / 512;
    for round in 0..3 {
        for (number, edge) in (0..).zip(&edges) {
            let phys = match phys_edges.len() {
                0 => 0,
                count => phys_edges[number as usize % count] - granule,
            };
            let before = edge - 2 * granule;
            let (both, attributes) = ([(phys, 2 * granule)], attributes(number + round));
            let is_near = machine.map(Way::AtHand, edge - granule, &both, attributes);
            let is_beyond = *edge > machine.top();
            assert!(!(is_near && is_beyond));
            machine.unmap(edge - granule, 2 * granule);
            for start in [edge - granule, *edge, edge + granule, before] {
                let is_free = machine.plain.first_in(start, granule).is_none();
                let anchor =
                    if start < *edge { edge.saturating_sub(3 * granule) } else { edge + 2 * granule };
                let is_there = machine.plain.find(anchor).is_some();
                let way = if round == 1 { Way::ListAtHand } else { Way::AtHand };
                let is_near = machine.map(way, start, &[(phys, granule)], attributes);
                let must = is_free && is_there && start <= machine.top() && in_one_frame(start, anchor);
                // Where something is longer than two granules at the least.
                let has_room = machine.last_phys() >= phys + granule - 1;
                assert!(is_near || !must || !has_room, "{:?}: near {start:#x}", machine.case.format);
                machine.unmap(start, granule);
            }
            // Several at once, over an edge of memory.
            if let Some(edge_of_memory) = phys_edges.last() {
                let both = [(edge_of_memory - granule, 2 * granule)];
                let apart = [(edge_of_memory - granule, granule), (*edge_of_memory, granule)];
                let lists = [(Way::AtHand, &both[..]), (Way::ListAtHand, &both), (Way::ListAtHand, &apart)];
                for (way, list) in lists {
                    machine.map(way, before, list, attributes);
                    machine.unmap(before, 2 * granule);
                }
            }
        }
    }
    machine.look_at_all();
    machine.clear();
}

/// Leaves of every size at the ends of the aperture and of memory, and parts of them gone.
fn ends<F: Backing, X: Format>(machine: &mut Machine<F, X>) {
    let (granule, top, last) = (machine.granule(), machine.top(), machine.last_phys());
    for (number, size) in (0..).zip(machine.sizes()) {
        if size - 1 > last {
            continue;
        }
        for (start, phys) in
            [(0, last - (size - 1)), (top - (size - 1), 0), (top - (size - 1), last - (size - 1))]
        {
            // Without the tables of smaller ones it is one leaf.
            machine.reclaim(true);
            machine.map(Way::Whole, start, &[(phys, size)], attributes(number + start));
            machine.unmap(start + size / 2 / granule * granule, granule);
            machine.unmap(start + size - granule, granule);
            machine.unmap(start, size);
        }
    }
    // The last two of the smallest, one of which is asked for; and what is asked for is more than there is.
    let ends = top - (2 * granule - 1);
    machine.map(Way::Whole, ends, &[(granule, 2 * granule)], attributes(1));
    machine.unmap(ends, granule);
    machine.unmap(top - (granule - 1), 8 * granule);
}

/// What is refused, and changes nothing.
fn refusals<F: Backing, X: Format>(machine: &mut Machine<F, X>) {
    let (granule, top, last) = (machine.granule(), machine.top(), machine.last_phys());
    let ends = top - (granule - 1);
    // What is there makes the tables, and has them remembered.
    machine.map(Way::Whole, ends - granule, &[(0, granule)], attributes(2));
    machine.map(Way::AtHand, ends, &[(0, granule)], attributes(2));
    machine.unmap(ends, granule);
    for way in [Way::Whole, Way::List, Way::AtHand, Way::ListAtHand] {
        let mut refused = |start, phys, len| {
            let is_mapped = machine.map(way, start, &[(phys, len)], attributes(2));
            assert!(!is_mapped, "{:?}: {way:?} {start:#x} to {phys:#x}, {len:#x}", machine.case.format);
        };
        refused(ends, 0, 2 * granule);
        (0..16).for_each(|number| refused(top + 1 + number * granule, 0, granule));
        refused(top + 1, 0, 2 * granule);
        refused((top + 1).saturating_mul(2) & !(granule - 1), 0, granule);
        (20..63).filter(|bits| 1 << bits > top).for_each(|bits| refused(1 << bits, 0, granule));
        refused(!(granule - 1), 0, granule);
        refused(ends, (last - (granule - 1)) & !(granule - 1), 2 * granule);
        refused(ends, (last + 1).next_multiple_of(granule), granule);
        refused(ends, !(granule - 1), granule);
        refused(ends, 0, granule / 2);
        refused(ends + granule / 2, 0, granule / 2);
        refused(ends, granule / 2, granule);
    }
    machine.unmap(top + 1, granule);
    machine.unmap(!(granule - 1), granule);
}
