//! Page tables of any requested format. A domain and its queues are compiled once, for all of them: a call selects the format by a
//! well-predicted branch, without a function pointer.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use std::sync::Arc;

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::heap::{OutOfMemory, Shared};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper, TableMapper};
use portcullis::percpu::{Marks, Turn};
use portcullis::pgtable::{AmdV1, Arm, Attributes, MapError, Riscv, Unmapped, VtdSecondStage, X86FirstStage};
use portcullis::platform::Platform;
use portcullis_model::Memory;

use super::queue::ClockedQueue;

/// Page tables of format `X`.
pub(super) type TablesOf<X> = TableMapper<Arc<Memory>, Arc<ClockedQueue>, X>;

macro_rules! formats {
    ($($name:ident: $format:ty,)*) => {
        /// Page tables of one of the formats.
        pub(super) enum Tables {
            $($name(TablesOf<$format>),)*
        }

        $(impl From<TablesOf<$format>> for Tables {
            fn from(tables: TablesOf<$format>) -> Self {
                Self::$name(tables)
            }
        })*

        /// Calls the tables of the selected format.
        macro_rules! on_tables {
            ($tables:expr, $inner:ident => $call:expr) => {
                match $tables {
                    $(Tables::$name($inner) => $call,)*
                }
            };
        }
    };
}

formats! {
    VtdSecondStage: VtdSecondStage,
    X86FirstStage: X86FirstStage,
    AmdV1: AmdV1,
    Arm4K: Arm<12>,
    Arm16K: Arm<14>,
    Arm64K: Arm<16>,
    Riscv: Riscv,
}

impl Tables {
    /// Bytes that they take.
    pub(super) fn table_bytes(&self) -> u64 {
        on_tables!(self, tables => tables.table().table_bytes() as u64)
    }
}

// SAFETY: clauses 1 to 9 are the tables': each method passes its call on.
unsafe impl Mapper for Tables {
    const IS_QUICK: bool = true;

    fn geometry(&self) -> &Geometry {
        on_tables!(self, tables => tables.geometry())
    }

    fn costs(&self) -> Costs {
        on_tables!(self, tables => tables.costs())
    }

    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        on_tables!(self, tables => tables.set_cpus(cpus))
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        // SAFETY: clauses 1 to 4 of `PageTable::map` are the caller's.
        on_tables!(self, tables => unsafe { tables.map(platform, range, list, attributes, gather) })
    }

    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        on_tables!(self, tables => tables.marks(platform))
    }

    #[inline]
    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the clauses of `PageTable::map` are the caller's.
        on_tables!(self, tables => unsafe { tables.map_fast(turn, range, phys, attributes) })
    }

    #[inline]
    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the clauses of `PageTable::map` are the caller's.
        on_tables!(self, tables => unsafe { tables.map_list_fast(turn, range, list, attributes) })
    }

    #[inline]
    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        on_tables!(self, tables => tables.unmap_fast(turn, range))
    }

    #[inline]
    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        on_tables!(self, tables => tables.sync_range(range))
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        on_tables!(self, tables => tables.unmap(platform, range, gather))
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        on_tables!(self, tables => tables.sync(gather))
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        on_tables!(self, tables => tables.reclaim(platform))
    }

    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        on_tables!(self, tables => tables.try_reclaim(platform))
    }
}
