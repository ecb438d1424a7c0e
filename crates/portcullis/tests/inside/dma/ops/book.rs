use super::*;

fn entry(iova: u64, len: u64, neighbours: u64) -> Entry {
    let iova = Iova::new(iova);
    let range = IovaRange::of_pages(iova, len, PageSize::SIZE_4K).unwrap();
    Entry { iova, len, range, neighbours, lasting: false }
}

/// Wherever it begins, and whatever stood in the words before.
#[test]
fn a_mapping_is_found_by_every_address_in_it_and_by_no_other() {
    let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
    for first in 1..40_u64 {
        for pages in 1..20_u64 {
            let noted = entry(first * 4096 + 100, pages * 4096 - 200, 200);
            book.note(noted).unwrap();
            for page in 0..64 {
                let inside = (first..first + pages).contains(&page);
                let found = book.find(Iova::new(page * 4096 + 150));
                assert_eq!(found, inside.then_some(noted), "{page} of {pages} from {first}");
            }
            assert_eq!(book.find(noted.range.last()), Some(noted));
            assert_eq!(book.take(noted.iova, noted.len), Ok(noted));
            assert_eq!(book.take(noted.iova, noted.len), Err(DmaUnmapError::NotMapped { iova: noted.iova }));
        }
    }
    assert_eq!((0..64).find_map(|page| book.find(Iova::new(page * 4096))), None);
}

/// A number of bytes in gaps, odd or even, is no mapping.
#[test]
fn what_is_beside_the_pieces_of_a_list_is_kept_with_it() {
    let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
    for gaps in [1, 2, 3, 4, 5, 7, 4095, 8001] {
        let noted = entry(8 * 4096 + 8, 3 * 4096 - 16, 16 + gaps);
        book.note(noted).unwrap();
        for page in 8..11 {
            assert_eq!(book.find(Iova::new(page * 4096)), Some(noted), "{gaps}");
            let at = Iova::new(page * 4096 + 8);
            assert!(book.take(at, 77).is_err());
        }
        assert_eq!(noted.used(), 3 * 4096 - 16 - gaps);
        assert_eq!(book.take(noted.iova, noted.len), Ok(noted));
    }
}

/// One of the leaves is cached in that place, and the others are looked up.
#[test]
fn mappings_whose_leaves_share_a_place_are_told_apart() {
    let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
    let apart = WordLeaf::WORDS * Near::LEAVES as u64 * 4096;
    let all = [1, 2, 3].map(|number| entry(number * apart + 0x5010, number * 4096, 4096));
    all.iter().for_each(|entry| book.note(*entry).unwrap());
    for entry in all.iter().chain(&all) {
        assert_eq!(book.find(entry.iova), Some(*entry));
    }
    for (left, entry) in all.iter().enumerate() {
        assert_eq!(book.take(entry.iova, entry.len), Ok(*entry));
        assert!(all[left + 1..].iter().all(|other| book.find(other.iova) == Some(*other)));
        assert_eq!(book.find(entry.iova), None);
    }
}

#[test]
fn all_mappings_are_taken_once() {
    let book = Book::new(Iova::new(u64::MAX), PageSize::SIZE_4K, Near::new().unwrap());
    let all = [entry(4096, 1, 4095), entry(3 << 40, 9 * 4096, 0), entry(u64::MAX - 4095, 4096, 0)];
    let all = all.map(|entry| Entry { lasting: entry.len == 1, ..entry });
    all.iter().for_each(|entry| book.note(*entry).unwrap());
    let mut taken = alloc::vec::Vec::new();
    book.take_all(|entry| taken.push(entry));
    assert_eq!(taken, all);
    book.take_all(|entry| panic!("{entry:?}"));
    let most = book.most;
    assert_eq!(most, u64::MAX >> 4 >> 12, "four flags and an offset in a page are beside it");
    assert_eq!(book.note(entry(0, most + 1, 0)), Err(NotNoted::TooLong));
    assert_ne!(book.note(entry(0, most, 0)), Err(NotNoted::TooLong));
    assert_eq!(book.error(NotNoted::TooLong, most + 1), DmaMapError::TooLong { len: most + 1, most });
}
