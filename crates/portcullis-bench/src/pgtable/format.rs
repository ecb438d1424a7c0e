//! The formats that are measured, each as the hardware that has it is usually set up.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::pgtable::{AmdV1, Arm, Format, Layout, Riscv, VtdSecondStage, X86FirstStage};
use portcullis::std_platform::StdPlatform;

use super::memory::Memory;
use super::ours::{Locked, Tables};
use super::stores::Stores;
use super::subject::Ours;
use super::table::Measured;
use super::work::Pattern;
use crate::runner::Failure;

/// Bits of physical addresses: all formats have them, and they hold every address of this process.
const PHYS: u32 = 48;

/// What is measured: with 48 bits of I/O virtual address where the format has a choice, and with leaves at the
/// lowest three levels.
fn all() -> [Result<Arc<dyn AnyFormat>, SetupError>; 15] {
    [
        any(VtdSecondStage::new(4, 3, PHYS)),
        any(X86FirstStage::new(4, 3, PHYS)),
        any(X86FirstStage::new(5, 3, PHYS)),
        any(AmdV1::new(4, 3, PHYS)),
        any(Arm::<12>::stage_1(48, PHYS)),
        any(Arm::<14>::stage_1(48, PHYS)),
        any(Arm::<16>::stage_1(48, PHYS)),
        any(Arm::<12>::stage_2(48, PHYS)),
        any(Arm::<14>::stage_2(48, PHYS)),
        any(Arm::<16>::stage_2(48, PHYS)),
        any(Riscv::sv39().within(3, PHYS)),
        any(Riscv::sv48().within(3, PHYS)),
        any(Riscv::sv57().within(3, PHYS)),
        any(Riscv::sv39x4().within(3, PHYS)),
        any(Riscv::sv48x4().within(3, PHYS)),
    ]
}

fn any<X: Format>(format: Result<X, SetupError>) -> Result<Arc<dyn AnyFormat>, SetupError> {
    Ok(Arc::new(format?))
}

/// The formats.
pub(crate) fn formats() -> Vec<Arc<dyn AnyFormat>> {
    all().into_iter().flatten().collect()
}

/// What a workload must know of a format to be laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The binary logarithm of the granule.
    pub granule: u32,
    /// The binary logarithm of the entries of a table.
    pub index: u32,
    /// The levels above the lowest at which a single entry can be a leaf.
    pub large: [bool; 2],
    /// The bits of an address.
    pub input: u32,
    /// The highest physical address.
    pub last_phys: u64,
}

/// A format, whichever it is.
pub(crate) trait AnyFormat: Send + Sync {
    fn name(&self) -> &'static str;

    fn geometry(&self) -> Geometry;

    /// Tables for the work of `pattern`.
    fn open(
        &self,
        subject: Ours,
        platform: &StdPlatform,
        pattern: &Pattern,
    ) -> Result<Arc<dyn Measured>, Failure>;
}

impl<X: Format> AnyFormat for X {
    fn name(&self) -> &'static str {
        Format::name(self)
    }

    fn geometry(&self) -> Geometry {
        let single = |level| self.leaf_sizes().iter().any(|size| size.level == level && size.run == 0);
        Geometry {
            granule: X::GRANULE_SHIFT,
            index: <X as Layout>::INDEX_BITS,
            large: [single(2), single(3)],
            input: self.input_bits(),
            last_phys: self.last_phys().get(),
        }
    }

    fn open(
        &self,
        subject: Ours,
        platform: &StdPlatform,
        pattern: &Pattern,
    ) -> Result<Arc<dyn Measured>, Failure> {
        Ok(match subject {
            Ours::Engine { coherent: true } => Arc::new(Tables::new(Memory::<true>, *self, platform)?),
            Ours::Engine { coherent: false } => Arc::new(Tables::new(Memory::<false>, *self, platform)?),
            Ours::Locked => Arc::new(Locked::new(Tables::new(Memory::<true>, *self, platform)?)),
            Ours::Stores { coherent: true } => Arc::new(Stores::new(Memory::<true>, *self, pattern)?),
            Ours::Stores { coherent: false } => Arc::new(Stores::new(Memory::<false>, *self, pattern)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_exists_and_has_a_name_of_its_own() {
        assert!(all().iter().all(Result::is_ok));
        let mut names: Vec<_> = formats().iter().map(|format| format.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all().len());
    }

    /// Bits of a granule, of a table's index and of an address, and whether the third level has leaves.
    #[test]
    fn each_format_is_as_usually_set_up() {
        let of = |format: &Arc<dyn AnyFormat>| {
            let geometry = format.geometry();
            assert_eq!(geometry.last_phys, (1 << 48) - 1, "{}", format.name());
            (format.name(), geometry.granule, geometry.index, geometry.input, geometry.large[1])
        };
        let expected = [
            ("vtd-ss", 12, 9, 48, true),
            ("x86-4", 12, 9, 47, true),
            ("x86-5", 12, 9, 56, true),
            ("amd-v1", 12, 9, 48, true),
            ("arm-s1-4k", 12, 9, 48, true),
            ("arm-s1-16k", 14, 11, 48, false),
            ("arm-s1-64k", 16, 13, 48, false),
            ("arm-s2-4k", 12, 9, 48, true),
            ("arm-s2-16k", 14, 11, 48, false),
            ("arm-s2-64k", 16, 13, 48, false),
            ("riscv-sv39", 12, 9, 38, true),
            ("riscv-sv48", 12, 9, 47, true),
            ("riscv-sv57", 12, 9, 56, true),
            ("riscv-sv39x4", 12, 9, 41, true),
            ("riscv-sv48x4", 12, 9, 50, true),
        ];
        let found: Vec<_> = formats().iter().map(of).collect();
        assert_eq!(found, expected);
        assert!(formats().iter().all(|format| format.geometry().large[0]));
    }
}
