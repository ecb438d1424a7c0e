use loom::sync::Arc;
use loom::thread;

use super::*;

/// Two callers end it, and one ends all, at once.
#[test]
fn of_several_callers_that_end_a_mapping_one_has_it() {
    loom::model(|| {
        let book = Arc::new(Book::new(Iova::new(0x7fff), PageSize::SIZE_4K, Near::new().unwrap()));
        let (iova, len) = (Iova::new(0x2010), 0x1ff0);
        let range = IovaRange::new(Iova::new(0x2000), 0x2000).unwrap();
        book.note(Entry { iova, len, range, neighbours: 0x10, lasting: false }).unwrap();
        let other = {
            let book = Arc::clone(&book);
            thread::spawn(move || u32::from(book.take(iova, len).is_ok()))
        };
        let all = {
            let (book, mut taken) = (Arc::clone(&book), 0);
            thread::spawn(move || {
                book.take_all(|_| taken += 1);
                taken
            })
        };
        let own = u32::from(book.take(iova, len).is_ok());
        assert_eq!(own + other.join().unwrap() + all.join().unwrap(), 1);
        assert_eq!(book.find(iova), None);
    });
}

fn page(at: u64) -> Entry {
    let iova = Iova::new(at);
    let range = IovaRange::new(iova, 0x1000).unwrap();
    Entry { iova, len: 0x1000, range, neighbours: 0, lasting: false }
}

/// Two callers at once, each with a mapping of its own, which it ends.
fn at_once(one: fn(&Book, Entry), at: [u64; 2]) {
    loom::model(move || {
        let book = Arc::new(Book::new(Iova::new(0x7fff), PageSize::SIZE_4K, Near::new().unwrap()));
        let other = {
            let book = Arc::clone(&book);
            thread::spawn(move || one(&book, page(at[1])))
        };
        one(&book, page(at[0]));
        other.join().unwrap();
        assert_eq!(at.map(|at| book.find(Iova::new(at))), [None, None]);
    });
}

/// Each caller looks for another leaf, and one of them is cached.
#[test]
fn callers_that_remember_leaves_at_once_find_each_its_own() {
    let one = |book: &Book, entry: Entry| {
        book.note(entry).unwrap();
        assert_eq!(book.find(entry.iova), Some(entry));
        assert_eq!(book.take(entry.iova, entry.len), Ok(entry));
    };
    at_once(one, [0x4000, 0x2000]);
}

/// The leaf may have just been cached by the other caller.
#[test]
fn a_caller_uses_the_leaf_that_another_remembers() {
    let one = |book: &Book, entry: Entry| {
        book.note(entry).unwrap();
        assert_eq!(book.take(entry.iova, entry.len), Ok(entry));
    };
    at_once(one, [0x3000, 0x2000]);
}
