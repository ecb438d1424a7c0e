//! Firmware's tables: which units there are, which devices each is in front of, and which memory firmware goes on using.
//!
//! Tables come from firmware, which may be wrong: a table that is cut, that contradicts its lengths, or whose checksum is off
//! is an error, and no field is read from outside its bytes. Each step of a walk moves on, so a walk ends.
//! Reserved regions are what a kernel maps one to one before it [enables](crate::Iommu::enable) a unit.

mod dmar;
mod iort;
mod ivrs;
mod reserved;

pub use dmar::{Dmar, DmarScope, DmarUnit};
pub use iort::{Iort, IortUnit};
pub use ivrs::{Ivrs, IvrsUnit};
pub use reserved::Reserved;

use alloc::vec::Vec;

use portcullis::addr::{AddrError, IovaRange, Permissions};

/// Bytes of the header that all tables share (ACPI Specification, Release 6.5, section 5.2.6).
const HEADER: usize = 36;

/// What is wrong with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcpiError {
    /// It is not this table.
    #[error("the table is {found:?}, and {wanted:?} was looked for")]
    Signature {
        /// The signature it has.
        found: [u8; 4],
        /// The one that was looked for.
        wanted: [u8; 4],
    },
    /// Its bytes do not sum up to 0.
    #[error("the table's checksum is off by {sum}")]
    Checksum {
        /// Their sum.
        sum: u8,
    },
    /// It ends inside what it says that it holds.
    #[error("the table is cut: {bytes} bytes at offset {offset} go beyond its end")]
    Cut {
        /// Where.
        offset: usize,
        /// How many bytes were to be there.
        bytes: usize,
    },
    /// A structure in it is shorter than its kind is.
    #[error("a structure at offset {offset} is {len} bytes long, and too short for what it is")]
    Length {
        /// Where.
        offset: usize,
        /// The length it gives.
        len: usize,
    },
    /// A reserved region of no possible addresses.
    #[error("a reserved region at offset {offset}: {error}")]
    Region {
        /// Where.
        offset: usize,
        /// What is wrong with it.
        error: AddrError,
    },
    /// A run of devices that has none.
    #[error("a run of devices at offset {offset} ends before it begins")]
    Backwards {
        /// Where.
        offset: usize,
    },
    /// It names more reserved regions than it has bytes: one for each pair of a region and a run of streams.
    #[error("the table is {len} bytes long, and names more reserved regions than that")]
    TooMany {
        /// Its length.
        len: usize,
    },
    /// There is no memory for what it says.
    #[error("no memory for what the table says")]
    OutOfMemory,
}

/// The bytes of a table, or of a part of it.
#[derive(Debug, Clone, Copy)]
struct Bytes<'a> {
    bytes: &'a [u8],
    /// Where they begin in the table.
    at: usize,
}

impl<'a> Bytes<'a> {
    /// A whole table: its signature, its length and its checksum are right.
    fn table(bytes: &'a [u8], wanted: [u8; 4]) -> Result<Self, AcpiError> {
        let all = Self { bytes, at: 0 };
        let found = all.take(0, 4)?.try_into().unwrap_or_default();
        if found != wanted {
            return Err(AcpiError::Signature { found, wanted });
        }
        let len = all.u32(4)? as usize;
        let table = all.part(0, len)?;
        if len < HEADER {
            return Err(AcpiError::Length { offset: 0, len });
        }
        match table.bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) {
            0 => Ok(table),
            sum => Err(AcpiError::Checksum { sum }),
        }
    }

    fn take(&self, offset: usize, len: usize) -> Result<&'a [u8], AcpiError> {
        let found = offset.checked_add(len).and_then(|end| self.bytes.get(offset..end));
        found.ok_or(AcpiError::Cut { offset: self.at.saturating_add(offset), bytes: len })
    }

    fn part(&self, offset: usize, len: usize) -> Result<Self, AcpiError> {
        Ok(Self { bytes: self.take(offset, len)?, at: self.at.saturating_add(offset) })
    }

    /// What follows `offset`.
    fn rest(&self, offset: usize) -> Result<Self, AcpiError> {
        let len = self.bytes.len().checked_sub(offset);
        self.part(offset, len.ok_or(AcpiError::Cut { offset: self.at.saturating_add(offset), bytes: 0 })?)
    }

    fn number<const N: usize>(&self, offset: usize) -> Result<u64, AcpiError> {
        let bytes = self.take(offset, N)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn u8(&self, offset: usize) -> Result<u8, AcpiError> {
        Ok(self.number::<1>(offset)? as u8)
    }

    fn u16(&self, offset: usize) -> Result<u16, AcpiError> {
        Ok(self.number::<2>(offset)? as u16)
    }

    fn u32(&self, offset: usize) -> Result<u32, AcpiError> {
        Ok(self.number::<4>(offset)? as u32)
    }

    fn u64(&self, offset: usize) -> Result<u64, AcpiError> {
        self.number::<8>(offset)
    }

    /// Structures that follow one another, each as long as `len` says, and at least as long as `least`.
    fn each(
        self,
        least: usize,
        len: impl Fn(&Self) -> Result<usize, AcpiError>,
        mut f: impl FnMut(Self) -> Result<(), AcpiError>,
    ) -> Result<(), AcpiError> {
        let mut left = self;
        while !left.bytes.is_empty() {
            let len = len(&left)?;
            if len < least.max(1) {
                return Err(AcpiError::Length { offset: left.at, len });
            }
            f(left.part(0, len)?)?;
            left = left.rest(len)?;
        }
        Ok(())
    }
}

/// A reserved region that begins at `start`.
fn reserved(at: usize, start: u64, len: u64, permissions: Permissions) -> Result<Reserved, AcpiError> {
    let range = IovaRange::new(portcullis::addr::Iova::new(start), len);
    let range = range.map_err(|error| AcpiError::Region { offset: at, error })?;
    Ok(Reserved { range, permissions })
}

/// A run of devices.
fn run(at: usize, first: u16, last: u16) -> Result<(u16, u16), AcpiError> {
    if first <= last { Ok((first, last)) } else { Err(AcpiError::Backwards { offset: at }) }
}

fn push<T>(list: &mut Vec<T>, value: T) -> Result<(), AcpiError> {
    list.try_reserve(1).map_err(|_| AcpiError::OutOfMemory)?;
    list.push(value);
    Ok(())
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    /// A table of this signature with a right length and checksum.
    pub fn table(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let mut table = vec![0; HEADER];
        table[..4].copy_from_slice(signature);
        table.extend_from_slice(body);
        seal(&mut table);
        table
    }

    /// Sets the length and the checksum.
    pub fn seal(table: &mut [u8]) {
        let len = table.len() as u32;
        table[4..8].copy_from_slice(&len.to_le_bytes());
        table[9] = 0;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = 0_u8.wrapping_sub(sum);
    }

    /// Tries `parse` on `table` with every byte changed in several ways, and cut everywhere: it returns.
    pub fn spoil<T>(table: &[u8], parse: impl Fn(&[u8]) -> Result<T, AcpiError>) {
        parse(table).map(drop).expect("the table as it is");
        for len in 0..table.len() {
            parse(&table[..len]).map(drop).expect_err("a table that is cut");
            let mut cut = table[..len.max(HEADER)].to_vec();
            seal(&mut cut);
            let _ = parse(&cut);
        }
        for at in 0..table.len() {
            for value in [0, 1, 2, 4, 0x7f, 0x80, 0xfe, 0xff] {
                let mut changed = table.to_vec();
                changed[at] = value;
                let was_changed = changed != table;
                assert!(!was_changed || parse(&changed).is_err(), "the checksum is off");
                let len = u32::from_le_bytes([changed[4], changed[5], changed[6], changed[7]]);
                if len as usize == changed.len() {
                    seal(&mut changed);
                }
                let _ = parse(&changed);
            }
        }
    }

    #[test]
    fn a_table_of_another_name_or_sum_is_none() {
        let dmar = table(b"DMAR", &[0; 12]);
        assert!(Bytes::table(&dmar, *b"DMAR").is_ok());
        assert!(matches!(Bytes::table(&dmar, *b"IVRS"), Err(AcpiError::Signature { .. })));
        let mut wrong = dmar.clone();
        wrong[40] = 3;
        assert!(matches!(Bytes::table(&wrong, *b"DMAR"), Err(AcpiError::Checksum { sum: 3 })));
        assert!(matches!(Bytes::table(&dmar[..20], *b"DMAR"), Err(AcpiError::Cut { .. })));
    }
}
