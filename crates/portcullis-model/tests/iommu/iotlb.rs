//! The IOTLB by itself: sets, replacement and removal are exactly those of the hardware.

use std::collections::HashSet;

use portcullis::addr::{DomainId, Iova, IovaRange, PageSize, Permissions, PhysAddr};
use portcullis_model::iotlb::{Entry, Iotlb, IotlbConfig};
use proptest::prelude::*;

const A: DomainId = DomainId(1);
const B: DomainId = DomainId(2);

fn entry(domain: DomainId, iova: u64, phys: u64, size: PageSize) -> Entry {
    Entry {
        iova: Iova::new(iova),
        phys: PhysAddr::new(phys),
        stale: None,
        domain,
        size,
        permissions: Permissions::READ_WRITE,
        by_part: false,
    }
}

fn page(domain: DomainId, number: u64) -> Entry {
    entry(domain, number << 12, (number + 1000) << 12, PageSize::SIZE_4K)
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), len).unwrap()
}

#[test]
fn the_least_recently_used_of_the_set_makes_room() {
    let mut iotlb = Iotlb::new(IotlbConfig { entries: 8, ways: 2 });
    // Four sets: pages 0, 4 and 8 share one, page 1 is in another.
    assert_eq!(iotlb.insert(page(A, 0)), None);
    assert_eq!(iotlb.insert(page(A, 4)), None);
    assert_eq!(iotlb.insert(page(A, 1)), None);
    assert!(iotlb.lookup(A, Iova::new(0)).is_some());
    assert!(iotlb.peek(A, Iova::new(4 << 12)).is_some(), "a peek does not make it younger");
    assert_eq!(iotlb.insert(page(A, 8)), Some(page(A, 4)));
    assert_eq!(iotlb.lookup(A, Iova::new(4 << 12)), None);
    assert_eq!(iotlb.insert(page(A, 12)), Some(page(A, 0)));
    assert!(iotlb.peek(A, Iova::new(1 << 12)).is_some());
    assert_eq!(iotlb.len(), 3);
}

#[test]
fn the_same_page_is_replaced_in_place() {
    let mut iotlb = Iotlb::new(IotlbConfig { entries: 2, ways: 2 });
    iotlb.insert(page(A, 0));
    iotlb.insert(page(A, 2));
    let moved = entry(A, 0, 0x5000, PageSize::SIZE_4K);
    assert_eq!(iotlb.insert(moved), Some(page(A, 0)));
    assert_eq!(iotlb.peek(A, Iova::new(0x123)).unwrap().translate(Iova::new(0x123)), PhysAddr::new(0x5123));
    assert_eq!(iotlb.len(), 2);
}

#[test]
fn large_pages_are_one_entry_and_removed_as_a_whole() {
    let mut iotlb = Iotlb::new(IotlbConfig { entries: 128, ways: 8 });
    iotlb.insert(entry(A, 2 << 21, 6 << 21, PageSize::SIZE_2M));
    iotlb.insert(entry(A, 1 << 30, 5 << 30, PageSize::SIZE_1G));
    iotlb.insert(page(A, 7));
    let at = Iova::new((2 << 21) + 0x12345);
    assert_eq!(iotlb.lookup(A, at).unwrap().translate(at), PhysAddr::new((6 << 21) + 0x12345));
    assert_eq!(iotlb.lookup(B, at), None);

    let mut removed = Vec::new();
    let mut invalidate = |iotlb: &mut Iotlb, domain, block: (u64, u64), asked: (u64, u64)| {
        let (block, asked) = (range(block.0, block.1), range(asked.0, asked.1));
        removed.clear();
        iotlb.invalidate_range(domain, block, asked, |entry| removed.push(entry.size));
        removed.sort();
        removed.clone()
    };
    let (start, large) = (2 << 21, 1 << 21);
    let all = (0, u64::MAX);
    for part in [(start + 0x5000, 0x1000), (start, large - 1), (start + 1, large), (start - 0x1000, large)] {
        assert_eq!(invalidate(&mut iotlb, A, part, part), []);
        assert_eq!(invalidate(&mut iotlb, A, all, part), [PageSize::SIZE_4K, PageSize::SIZE_1G], "{part:x?}");
        iotlb.insert(entry(A, 1 << 30, 5 << 30, PageSize::SIZE_1G));
        iotlb.insert(page(A, 7));
    }
    assert_eq!(invalidate(&mut iotlb, B, all, all), [], "another domain's range");
    assert_eq!(invalidate(&mut iotlb, A, (start, large), (start, large)), [PageSize::SIZE_2M]);
    assert_eq!(invalidate(&mut iotlb, A, all, all), [PageSize::SIZE_4K, PageSize::SIZE_1G]);
    assert!(iotlb.is_empty());

    // If the architecture says so, any part of it does.
    iotlb.insert(Entry { by_part: true, ..entry(A, start, 6 << 21, PageSize::SIZE_2M) });
    for (part, gone) in [((start - 1, 1), 0), ((start + large, 1), 0), ((start + large - 1, 1), 1)] {
        assert_eq!(invalidate(&mut iotlb, A, part, part).len(), gone);
    }
}

#[test]
fn odd_dimensions_are_rounded_not_refused() {
    for (entries, ways, capacity) in [(0, 0, 1), (0, 8, 1), (5, 2, 4), (3, 8, 3), (7, 0, 7)] {
        let mut iotlb = Iotlb::new(IotlbConfig { entries, ways });
        assert_eq!(iotlb.capacity(), capacity);
        for number in 0..20 {
            iotlb.insert(page(A, number));
        }
        assert_eq!(iotlb.len(), capacity);
    }
}

#[derive(Debug, Clone)]
enum Op {
    Insert(u16, u64, bool),
    Lookup(u16, u64),
    Range(u16, u64, u64),
    Domain(u16),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0_u16..2, 0_u64..64, prop::bool::weighted(0.2)).prop_map(|(d, n, large)| Op::Insert(d, n, large)),
        4 => (0_u16..2, 0_u64..64).prop_map(|(d, n)| Op::Lookup(d, n)),
        1 => (0_u16..2, 0_u64..64, 1_u64..40).prop_map(|(d, n, len)| Op::Range(d, n, len)),
        1 => (0_u16..2).prop_map(Op::Domain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Against LRU lists, one per set. "Large" pages here are of 16 KiB, to overlap often.
    #[test]
    fn it_is_a_set_associative_lru_cache(
        (sets, ways) in (1_u64..6, 1_usize..5),
        ops in prop::collection::vec(op(), 1..300),
    ) {
        let large = PageSize::from_shift(14).unwrap();
        let mut iotlb = Iotlb::new(IotlbConfig { entries: sets as usize * ways, ways });
        let mut model: Vec<Vec<Entry>> = vec![Vec::new(); sets as usize];
        let last = |entry: &Entry| entry.iova.get() + entry.size.bytes() - 1;
        for op in ops {
            match op {
                Op::Insert(domain, number, is_large) => {
                    let size = if is_large { large } else { PageSize::SIZE_4K };
                    let start = Iova::new(number << 12).align_down(size);
                    let new = entry(DomainId(domain), start.get(), (number + 1024) << 16, size);
                    let set = &mut model[(start.get() >> size.shift()) as usize % sets as usize];
                    let name = |entry: &Entry| (entry.iova, entry.size, entry.domain);
                    let same = set.iter().position(|old| name(old) == name(&new));
                    let gone = same.or((set.len() == ways).then_some(0)).map(|at| set.remove(at));
                    set.push(new);
                    prop_assert_eq!(iotlb.insert(new), gone);
                }
                Op::Lookup(domain, number) => {
                    let at = Iova::new(number << 12);
                    let mut expected = None;
                    for size in [PageSize::SIZE_4K, large] {
                        let set = &mut model[(at.get() >> size.shift()) as usize % sets as usize];
                        let hit = set.iter().position(|old| {
                            let page = at.align_down(size);
                            old.domain == DomainId(domain) && old.size == size && old.iova == page
                        });
                        if let Some(hit) = hit {
                            let hit = set.remove(hit);
                            set.push(hit);
                            expected = Some(hit);
                            break;
                        }
                    }
                    prop_assert_eq!(iotlb.peek(DomainId(domain), at), expected);
                    prop_assert_eq!(iotlb.lookup(DomainId(domain), at), expected);
                }
                Op::Range(domain, number, pages) => {
                    let (start, end) = (number << 12, (number + pages) << 12);
                    let hit = |entry: &Entry| {
                        entry.domain == DomainId(domain) && start <= entry.iova.get() && last(entry) < end
                    };
                    let mut removed = 0;
                    let range = range(start, end - start);
                    iotlb.invalidate_range(DomainId(domain), range, range, |entry| {
                        assert!(hit(&entry));
                        removed += 1;
                    });
                    let before: usize = model.iter().map(Vec::len).sum();
                    model.iter_mut().for_each(|set| set.retain(|entry| !hit(entry)));
                    prop_assert_eq!(removed, before - model.iter().map(Vec::len).sum::<usize>());
                }
                Op::Domain(domain) => {
                    model.iter_mut().for_each(|set| set.retain(|entry| entry.domain != DomainId(domain)));
                    iotlb.invalidate_domain(DomainId(domain), |_| ());
                }
            }
            let names = |entry: Entry| (entry.domain, entry.iova.get(), entry.size);
            let held: HashSet<_> = iotlb.iter().map(names).collect();
            let expected: HashSet<_> = model.iter().flatten().copied().map(names).collect();
            prop_assert_eq!(held, expected);
            prop_assert_eq!(iotlb.len(), model.iter().map(Vec::len).sum::<usize>());
        }
    }
}

/// An invalidation removes a page by its architecture: as a whole, or by any part; and no page that the request only covers in part.
#[test]
fn what_a_range_removes_is_what_its_architecture_says() {
    let large = PageSize::SIZE_2M;
    let (first, half, size) = (2 << 20, 1 << 20, 2 << 20);
    let whole = (first, size);
    for (block, asked, goes, by_part) in [
        (whole, whole, true, true),
        ((0, 8 << 20), whole, true, true),
        ((0, 8 << 20), (4 << 20, 1), true, true),
        ((0, 8 << 20), (first, half), false, true),
        // Half of it, for what lies before.
        ((half, size), (half, half), false, true),
        ((first + half, size), (4 << 20, half), false, true),
        ((first, half), (first, half), false, true),
        ((first + size - 1, 1), (first + size - 1, 1), false, true),
        ((first, 1), (first, 1), false, true),
        ((first + size, size), (first + size, size), false, false),
        ((0, first), (0, first), false, false),
    ] {
        for (kind, expected) in [(false, goes), (true, by_part)] {
            let mut iotlb = Iotlb::new(IotlbConfig { entries: 8, ways: 2 });
            iotlb.insert(Entry { by_part: kind, ..entry(A, first, 64 << 20, large) });
            iotlb.insert(Entry { by_part: kind, ..entry(B, first, 64 << 20, large) });
            let mut removed = Vec::new();
            iotlb.invalidate_range(A, range(block.0, block.1), range(asked.0, asked.1), |entry| {
                removed.push(entry.domain);
            });
            let expected: &[DomainId] = if expected { &[A] } else { &[] };
            assert_eq!(removed, expected, "{block:x?} {asked:x?}, by part: {kind}");
        }
    }
}
