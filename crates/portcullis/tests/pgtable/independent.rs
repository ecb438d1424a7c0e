//! Our page tables read by walkers of the registry that nobody here wrote, or beside tables that
//! such crates build.
//!
//! Random maps and unmaps, pages of every size among them; after each round every walker looks at
//! addresses in and around all mappings, and must find what a plain list says, and the rights that
//! it knows of. What each of them can see is in
//! `docs/porting.md`.

#![allow(missing_docs, reason = "a test")]

mod arm;
mod riscv;
mod x86;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::dice::Dice;
use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{Attributes, Format, PageTable};
use portcullis::std_platform::StdPlatform;
use portcullis_model::Memory;

/// Rounds of each test.
const ROUNDS: u64 = if cfg!(debug_assertions) { 20 } else { 200 };

static PLATFORM: LazyLock<StdPlatform> = LazyLock::new(StdPlatform::new);

/// What is mapped at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    pub len: u64,
    pub phys: u64,
    pub attributes: Attributes,
}

/// A page table, and a plain list of what it maps.
pub struct Bench<X: Format> {
    pub memory: Arc<Memory>,
    pub table: PageTable<Arc<Memory>, X>,
    pub plain: BTreeMap<u64, Mapped>,
    /// Where memory that is mapped lies: the first address, and how many bytes.
    place: (u64, u64),
    pub dice: Dice,
}

impl<X: Format> Bench<X> {
    /// Tables in `memory`, of mappings to `place`.
    pub fn new(memory: Arc<Memory>, format: X, place: (u64, u64)) -> Self {
        let table = PageTable::new(Arc::clone(&memory), format).unwrap();
        Self { memory, table, plain: BTreeMap::new(), place, dice: Dice::new(format.name().len() as u64) }
    }

    /// Whether nothing is mapped in `len` bytes at `start`.
    fn is_free(&self, start: u64, len: u64) -> bool {
        let before = self.plain.range(..start + len).next_back();
        before.is_none_or(|(at, mapped)| at + mapped.len <= start)
    }

    /// Maps something, or unmaps something; below 2^`bits`, by pages of up to 2^`most` bytes.
    pub fn step(&mut self, bits: u32, most: u32, attributes: impl Fn(&mut Dice) -> Attributes) {
        let dice = &mut self.dice;
        if dice.below(3) == 0 && !self.plain.is_empty() {
            let index = dice.below(self.plain.len() as u64) as usize;
            let (start, mapped) =
                self.plain.iter().nth(index).map(|(start, mapped)| (*start, *mapped)).unwrap();
            self.plain.remove(&start);
            let range = IovaRange::new(Iova::new(start), mapped.len).unwrap();
            // SAFETY: nothing walks the table meanwhile.
            let unmapped = unsafe { self.table.unmap(&*PLATFORM, range, &mut |_| true) };
            assert_eq!(unmapped.bytes, mapped.len);
            return;
        }
        // As aligned as pages of some size are; both addresses alike, or the memory less.
        let shift = 12 + dice.below(u64::from(most) - 11) as u32;
        let unit = 1_u64 << shift;
        let len = ((dice.below(3) + 1) << shift) + if dice.below(3) == 0 { dice.below(20) << 12 } else { 0 };
        let start = dice.below((1 << bits) / unit) * unit;
        let phys = self.place.0
            + dice.below((self.place.1 / unit).max(1)) * unit
            + if shift <= 21 && dice.below(3) == 0 { dice.below(8) << 12 } else { 0 };
        let attributes = attributes(dice);
        if start + len > 1 << bits || phys + len > self.place.0 + self.place.1 || !self.is_free(start, len) {
            return;
        }
        let range = IovaRange::new(Iova::new(start), len).unwrap();
        // SAFETY: no device uses the memory.
        unsafe { self.table.map(&*PLATFORM, range, PhysAddr::new(phys), attributes) }.unwrap();
        self.plain.insert(start, Mapped { len, phys, attributes });
    }

    /// Addresses in and around all that is mapped below 2^`bits`, each with what is there: where it
    /// leads, and by what rights.
    pub fn looks(&self, bits: u32) -> Vec<(u64, Option<(u64, Attributes)>)> {
        let mut all = Vec::new();
        for (start, mapped) in &self.plain {
            let last = start + mapped.len - 1;
            let middle = start + mapped.len / 2;
            let around = [start.checked_sub(1), Some(*start), Some(middle), Some(last), Some(last + 1)];
            all.extend(around.into_iter().flatten().filter(|at| *at < 1 << bits));
        }
        all.into_iter().map(|at| (at, self.find(at))).collect()
    }

    fn find(&self, at: u64) -> Option<(u64, Attributes)> {
        let (start, mapped) = self.plain.range(..=at).next_back()?;
        (at - start < mapped.len).then(|| (mapped.phys + (at - start), mapped.attributes))
    }

    /// The word at `address`.
    pub fn word(&self, address: u64) -> u64 {
        self.memory.read_u64(PhysAddr::new(address)).unwrap()
    }
}

/// To read, or to read and write.
pub fn rights(dice: &mut Dice) -> Attributes {
    let permissions = if dice.below(2) == 0 { Permissions::READ } else { Permissions::READ_WRITE };
    Attributes::from(permissions)
}

pub fn writes(attributes: &Attributes) -> bool {
    attributes.permissions.allows(Permissions::WRITE)
}
