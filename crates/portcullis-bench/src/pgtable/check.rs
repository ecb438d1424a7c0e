//! Whether a subject's tables translate to what was mapped.

use super::table::Measured;
use super::work::{Pattern, Work};
use crate::runner::Failure;

/// Each page of each operation: the table, the operation in it, the page.
fn pages(work: &Work) -> impl Iterator<Item = (u64, u64, u64)> {
    let (tables, entries, pages) = (work.tables, work.entries, work.pages);
    let entries = (0..tables).flat_map(move |table| (0..entries).map(move |entry| (table, entry)));
    entries.flat_map(move |(table, entry)| (0..pages).map(move |page| (table, entry, page)))
}

/// Fails unless the first and the last byte of every page lead to its memory.
pub(crate) fn mapped(tables: &dyn Measured, pattern: &Pattern) -> Result<(), Failure> {
    for work in &pattern.threads {
        for (table, entry, page) in pages(work) {
            let (iova, phys) = (work.iova(table, entry) + page * work.page, work.phys(table, entry, page));
            for offset in [0, work.page - 1] {
                let found = tables.look_up(iova + offset);
                if found != Some(phys + offset) {
                    let (iova, phys, found) = (iova + offset, phys + offset, found.unwrap_or_default());
                    return Err(Failure::Broken(format!(
                        "{iova:#x} leads to {found:#x} instead of {phys:#x}"
                    )));
                }
            }
        }
    }
    Ok(())
}

/// Fails unless no page leads anywhere.
pub(crate) fn unmapped(tables: &dyn Measured, pattern: &Pattern) -> Result<(), Failure> {
    for work in &pattern.threads {
        for (table, entry, page) in pages(work) {
            let iova = work.iova(table, entry) + page * work.page;
            if let Some(found) = tables.look_up(iova) {
                return Err(Failure::Broken(format!("{iova:#x} was unmapped and leads to {found:#x}")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use super::*;
    use crate::pgtable::format::Geometry;
    use crate::pgtable::work::Shape;

    /// Translates what it is told to.
    struct Script(BTreeMap<u64, u64>);

    impl Measured for Script {
        fn map_all(&self, _: &Work, _: u64, _: Range<u64>) -> bool {
            true
        }

        fn unmap_all(&self, _: &Work, _: u64, _: Range<u64>) -> bool {
            true
        }

        fn translate_all(&self, _: &Work, _: u64, _: Range<u64>) -> bool {
            true
        }

        fn look_up(&self, iova: u64) -> Option<u64> {
            self.0.get(&(iova & !4095)).map(|page| page | iova & 4095)
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        let geometry = Geometry { granule: 12, index: 9, large: [true; 2], input: 48, last_phys: 1 << 47 };
        for shape in [Shape::Page { level: 1 }, Shape::Run, Shape::Scattered] {
            let pattern = Pattern::new(shape, &geometry, 2, None).unwrap();
            let mut right = BTreeMap::new();
            for work in &pattern.threads {
                for (table, entry, page) in pages(work) {
                    let phys = work.phys(table, entry, page);
                    right.insert(work.iova(table, entry) + page * 4096, phys);
                }
            }
            let script = Script(right.clone());
            assert_eq!(mapped(&script, &pattern), Ok(()));
            assert!(unmapped(&script, &pattern).is_err());
            assert_eq!(unmapped(&Script(BTreeMap::new()), &pattern), Ok(()));
            let last = *right.keys().last().unwrap();
            let mut wrong = right.clone();
            wrong.insert(last, 4096);
            assert!(mapped(&Script(wrong), &pattern).is_err());
            right.remove(&last);
            assert!(mapped(&Script(right), &pattern).is_err());
        }
    }
}
