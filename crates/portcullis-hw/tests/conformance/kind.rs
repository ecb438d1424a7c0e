//! The interface of an IOMMU for the cases, and its implementation for units with tables in memory.
#![allow(dead_code, reason = "each of the programs that use it uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions};
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::Format;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::Reserved;
use portcullis_hw::{
    Access, Attachment, Fault, Iommu, Numbers, Reason, UnitDomainBuilder, UnitError, UnitMapper, UnitTables,
};

use super::machine::{Machine, Ram, Result};

/// An IOMMU of QEMU's, with its driver.
pub trait Kind: Sized + Sync {
    /// What changes translations.
    type Mapper: UnitMapper;
    /// Configurations, as machine options.
    const UNITS: &[&str];
    /// Whether the model records faults; if not, why not.
    const RECORDS: std::result::Result<(), &str> = Ok(());
    /// Other behaviour that the model lacks, and why.
    const GAPS: &[(&str, &str)] = &[];

    /// The access in the model's record of an unattached device's write.
    const UNATTACHED_WRITE: Option<Access> = Some(Access::Write);
    /// Whether every record has the kind of access; otherwise some do.
    const TELLS_ACCESS: bool = true;
    /// The reason in records of an unattached device.
    const NOT_ATTACHED: Reason = Reason::NotAttached;
    /// The smallest page.
    const GRANULE: u64 = 4096;
    /// Whether tables have write-only entries.
    const WRITE_ONLY: bool = true;
    /// Whether a driver that takes over changes no access until it is enabled.
    const KEEPS_UNTIL_ENABLED: bool = true;

    /// Whether the model caches non-present entries in caching mode; if not, why not.
    const CACHES_ABSENT: std::result::Result<(), &str> =
        Err("QEMU looks for it again, also where it says that it caches it");

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine>;

    /// A machine without a unit, if there is one.
    fn machine_without() -> Option<Result<Machine>>;

    /// Starts the driver on the machine's unit, without enabling it.
    fn start(machine: &Machine) -> Result<Self>;

    fn enable(&self) -> Result<()>;

    /// Begins a domain of the unit, to which all of the machine's devices may be attached.
    fn domain(&self, number: DomainId) -> Result<UnitDomainBuilder<Self::Mapper, StdPlatform>>;

    /// Addresses that the unit translates for no device, or that devices reserve.
    fn reserved(&self) -> Result<Vec<IovaRange>>;

    /// Memory of the mapper's tables, if they are in memory.
    fn table_bytes(mapper: &Self::Mapper) -> Option<usize>;

    /// Lets a device reach all memory.
    fn pass_through(&self, device: DeviceId) -> Result<()>;

    /// Detaches a device that no domain has attached.
    fn detach(&self, device: DeviceId) -> Result<()>;

    /// Faults since the last call.
    fn faults(&self) -> Vec<Fault>;

    /// `true`: from now on invalidations are confirmed and not executed. `false`: executed again. Returns whether the IOMMU has any.
    fn neglect(&self, neglect: bool) -> bool;

    /// A `Reserved` of `range` for `device`: parsed from the unit's ACPI table, if there is one.
    fn firmware(_: DeviceId, range: IovaRange) -> Result<Reserved> {
        Ok(Reserved { range, permissions: Permissions::READ_WRITE })
    }

    /// Whether the unit reports caching mode.
    fn caches_absent(&self) -> bool;

    /// Submits extra invalidations, if the IOMMU has any.
    fn submit(&self, requests: &[Request]) -> Result<()>;

    /// Moves the tail of the unit's queue over an invalid command. Returns whether that is possible here.
    fn confuse(_: &Machine) -> bool {
        false
    }

    /// Turns the unit off.
    fn shut_down(self) -> Result<()>;
}

/// An ACPI table with this signature, and `parts` behind its header.
pub fn table(signature: [u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let mut table = [&signature[..], &[0; 32], &parts.concat()].concat();
    let len = table.len() as u32;
    table[4..8].copy_from_slice(&len.to_le_bytes());
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    table
}

/// A unit that can be told to neglect invalidations: it returns `Ok`, and does nothing. Its type does not name the unit's, so that the
/// domains above are compiled once for each format.
pub struct Careless<X> {
    unit: Arc<dyn Iommu<X, Frames = Ram>>,
    neglect: Arc<AtomicBool>,
}

// SAFETY: broken on purpose while `neglect` is set; the cases then access memory that nothing else uses.
unsafe impl<X: Format> InvalidationQueue for Careless<X> {
    fn invalidate(
        &self,
        domain: DomainId,
        invalidation: Invalidation,
    ) -> std::result::Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> std::result::Result<(), InvalidationError> {
        if self.neglect.load(Ordering::Relaxed) { Ok(()) } else { self.unit.submit(requests) }
    }

    fn costs(&self) -> Costs {
        self.unit.costs()
    }

    fn caches_absent(&self) -> bool {
        self.unit.caches_absent()
    }
}

// SAFETY: clauses 1 to 5 are the unit's.
unsafe impl<X: Format> Iommu<X> for Careless<X> {
    type Frames = Ram;

    fn frames(&self) -> &Ram {
        self.unit.frames()
    }

    fn numbers(&self) -> &Numbers {
        self.unit.numbers()
    }

    fn layout(&self) -> std::result::Result<X, UnitError> {
        self.unit.layout()
    }

    fn domains(&self) -> (DomainId, DomainId) {
        self.unit.domains()
    }

    fn last_iova(&self) -> Iova {
        self.unit.last_iova()
    }

    fn reserved(&self) -> &'static [IovaRange] {
        self.unit.reserved()
    }

    fn enable(&self) -> std::result::Result<(), UnitError> {
        self.unit.enable()
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<X>) -> std::result::Result<(), UnitError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.unit.attach(device, to) }
    }

    fn detach(&self, device: DeviceId) -> std::result::Result<(), UnitError> {
        self.unit.detach(device)
    }

    fn next_fault(&self) -> Option<Fault> {
        self.unit.next_fault()
    }

    fn shut_down(self) -> std::result::Result<(), UnitError> {
        Err(UnitError::Shared)
    }
}

/// A unit with tables in memory.
#[derive(Debug)]
pub struct Tables<U> {
    pub unit: Arc<U>,
    neglect: Arc<AtomicBool>,
}

/// The mapper of its domains.
type Own<X> = UnitTables<X, Careless<X>>;

impl<U> Tables<U> {
    pub fn new(unit: U) -> Self {
        Self { unit: Arc::new(unit), neglect: Arc::default() }
    }

    pub fn domain<X: Format>(&self, number: DomainId) -> Result<UnitDomainBuilder<Own<X>, StdPlatform>>
    where
        U: Iommu<X, Frames = Ram>,
    {
        let (unit, neglect) = (Arc::clone(&self.unit) as _, Arc::clone(&self.neglect));
        Ok(Arc::new(Careless { unit, neglect }).domain(number)?)
    }

    pub fn pass_through<X: Format>(&self, device: DeviceId) -> Result<()>
    where
        U: Iommu<X>,
    {
        // SAFETY: 3: this process accesses QEMU's memory only by atomics.
        Ok(unsafe { self.unit.attach(device, Attachment::PassThrough) }?)
    }

    pub fn neglect(&self, neglect: bool) -> bool {
        self.neglect.store(neglect, Ordering::Relaxed);
        true
    }

    pub fn shut_down<X: Format>(self) -> Result<()>
    where
        U: Iommu<X>,
    {
        let unit = Arc::into_inner(self.unit).ok_or("a domain still has the unit")?;
        Ok(unit.shut_down()?)
    }
}

/// The common part of all units with tables: a `Kind` for `Tables<$unit>` with layout `$layout`, and the given rest.
macro_rules! kind_with_tables {
    ($unit:ty, $layout:ty, { $($rest:item)* }) => {
        impl Kind for Tables<$unit> {
            type Mapper = UnitTables<$layout, Careless<$layout>>;
            $($rest)*

            fn enable(&self) -> Result<()> {
                Ok(Iommu::<$layout>::enable(&*self.unit)?)
            }

            fn domain(&self, number: DomainId) -> Result<UnitDomainBuilder<Self::Mapper, StdPlatform>> {
                Tables::domain(self, number)
            }

            fn reserved(&self) -> Result<Vec<portcullis::addr::IovaRange>> {
                Ok(Iommu::<$layout>::reserved(&*self.unit).to_vec())
            }

            fn caches_absent(&self) -> bool {
                self.unit.caches_absent()
            }

            fn table_bytes(mapper: &Self::Mapper) -> Option<usize> {
                Some(mapper.table().table_bytes())
            }

            fn pass_through(&self, device: DeviceId) -> Result<()> {
                Tables::pass_through::<$layout>(self, device)
            }

            fn detach(&self, device: DeviceId) -> Result<()> {
                Ok(Iommu::<$layout>::detach(&*self.unit, device)?)
            }

            fn faults(&self) -> Vec<Fault> {
                std::iter::from_fn(|| Iommu::<$layout>::next_fault(&*self.unit)).collect()
            }

            fn neglect(&self, neglect: bool) -> bool {
                Tables::neglect(self, neglect)
            }

            fn submit(&self, requests: &[Request]) -> Result<()> {
                Ok(self.unit.submit(requests)?)
            }

            fn shut_down(self) -> Result<()> {
                Tables::shut_down::<$layout>(self)
            }
        }
    };
}

pub(crate) use kind_with_tables;
