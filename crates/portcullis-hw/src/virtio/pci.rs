//! The registers of a PCI virtio device: their places, and access to them.

use super::layout::pci;
use crate::host::{Registers, UnitError};

/// Registers with 8-bit and 16-bit accesses: virtio demands that each register is accessed at its own width.
///
/// # Safety
/// Clauses 1 to 8 of [`Registers`], for these accesses, too: they reach the unit once and whole, at these widths, in order with all others.
pub unsafe trait NarrowRegisters: Registers {
    /// Reads the 8-bit register at `offset`.
    fn read8(&self, offset: usize) -> u8;

    /// Writes the 8-bit register at `offset`.
    fn write8(&self, offset: usize, value: u8);

    /// Reads the 16-bit register at `offset`, a multiple of 2.
    fn read16(&self, offset: usize) -> u16;

    /// Writes the 16-bit register at `offset`, a multiple of 2.
    fn write16(&self, offset: usize, value: u16);
}

/// Offsets of the structures of a virtio device, in bytes from the first of the unit's [`Registers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Structures {
    /// The common configuration.
    pub common: usize,
    /// The doorbells, and the size of their region.
    pub notify: usize,
    /// See `notify`.
    pub notify_bytes: u32,
    /// Stride of the doorbells.
    pub notify_multiplier: u32,
    /// The device-specific configuration.
    pub device: usize,
}

impl Structures {
    /// Finds the structures in the configuration space of a PCI device. `read` returns the word at an offset. `place` translates a place in
    /// one of the device's memory regions (number of its base address register; offset; length) to an offset in the window that the host
    /// hands the driver, or returns `None` if it lies outside. For a window that is all of one region, that is the offset, and `None` for
    /// all others.
    ///
    /// Reads at most 48 capabilities: there is no room for more.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]: the device is no virtio-iommu; [`UnitError::Lacks`]: the window does not have one of the structures.
    pub fn find(
        read: impl Fn(u16) -> u32,
        place: impl Fn(u8, u32, u32) -> Option<usize>,
    ) -> Result<Self, UnitError> {
        let id = read(pci::ID);
        if id != pci::VIRTIO_IOMMU {
            return Err(UnitError::NotThere { register: "PCI identity", value: u64::from(id) });
        }
        let (mut common, mut notify, mut device) = (None, None, None);
        let has_any = read(pci::COMMAND_STATUS) & pci::CAPABILITIES != 0;
        let mut at = if has_any { pci::next(read(pci::FIRST_CAPABILITY), 0) } else { 0 };
        // Ends even if the list is circular.
        for _ in 0..48 {
            if at < 0x40 {
                break;
            }
            let head = read(at);
            if pci::number(head) == pci::VENDOR {
                let (offset, length) = (read(at + pci::OFFSET), read(at + pci::LENGTH));
                let placed = || place(read(at + pci::BAR) as u8, offset, length).map(|at| (at, length));
                // The device prefers the first usable one of each type.
                match pci::kind(head) {
                    pci::COMMON if length >= super::layout::common::LENGTH => {
                        common = common.or_else(placed);
                    }
                    pci::DEVICE if length >= super::layout::config::LENGTH => {
                        device = device.or_else(placed);
                    }
                    pci::NOTIFY => {
                        let multiplier = || read(at + pci::MULTIPLIER);
                        notify = notify.or_else(|| placed().map(|placed| (placed, multiplier())));
                    }
                    _ => {}
                }
            }
            at = pci::next(head, 8);
        }
        let lacks = |what| UnitError::Lacks { what, register: "PCI identity", value: u64::from(id) };
        let ((notify, notify_bytes), notify_multiplier) =
            notify.ok_or(lacks("doorbells in the host's window"))?;
        Ok(Self {
            common: common.ok_or(lacks("a common configuration in the host's window"))?.0,
            notify,
            notify_bytes,
            notify_multiplier,
            device: device.ok_or(lacks("a device configuration in the host's window"))?.0,
        })
    }

    /// The offset of the doorbell with this `QUEUE_NOTIFY_OFF`, if it is in the region.
    pub(super) fn doorbell(&self, number: u16) -> Option<usize> {
        let offset = u64::from(number) * u64::from(self.notify_multiplier);
        let fits = offset.checked_add(2).is_some_and(|end| end <= u64::from(self.notify_bytes));
        self.notify.checked_add(usize::try_from(offset).ok().filter(|_| fits)?)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn doorbells_lie_apart_by_all_of_the_product() {
        let of = |multiplier| {
            let all = Structures {
                common: 0,
                notify: 0x1000,
                notify_bytes: 64,
                notify_multiplier: multiplier,
                device: 0,
            };
            [0, 1, 2, 15, 16].map(|number| all.doorbell(number))
        };
        assert_eq!(of(4), [Some(0x1000), Some(0x1004), Some(0x1008), Some(0x103c), None]);
        // Twice this overflows 32 bits.
        assert_eq!(of(1 << 31), [Some(0x1000), None, None, None, None]);
        assert_eq!(of(0), [Some(0x1000); 5]);
    }

    /// A configuration space with these capabilities, each with its offset, type, next and data.
    fn space(capabilities: &[(u16, u8, u16, [u32; 4])]) -> impl Fn(u16) -> u32 + '_ {
        move |offset| match offset {
            pci::ID => pci::VIRTIO_IOMMU,
            pci::COMMAND_STATUS => pci::CAPABILITIES,
            pci::FIRST_CAPABILITY => capabilities.first().map_or(0, |first| u32::from(first.0)),
            _ => {
                let inside = |entry: &&(u16, u8, u16, [u32; 4])| (entry.0..entry.0 + 20).contains(&offset);
                capabilities.iter().find(inside).map_or(0, |(at, kind, next, words)| {
                    match usize::from(offset - at) / 4 {
                        0 => pci::VENDOR | u32::from(*next) << 8 | u32::from(*kind) << 24,
                        index => words[index - 1],
                    }
                })
            }
        }
    }

    fn in_region_4(region: u8, offset: u32, _: u32) -> Option<usize> {
        (region == 4).then_some(offset as usize)
    }

    #[test]
    fn the_first_structure_that_the_window_has_is_taken() {
        let found = Structures::find(
            space(&[
                (0x40, pci::COMMON, 0x60, [0, 0, 0x38, 0]),
                (0x60, pci::COMMON, 0x80, [4, 0x1000, 0x38, 0]),
                (0x80, pci::COMMON, 0xa0, [4, 0x9000, 0x38, 0]),
                (0xa0, pci::DEVICE, 0xc0, [4, 0x2000, 0x1000, 0]),
                (0xc0, pci::NOTIFY, 0, [4, 0x3000, 0x1000, 4]),
            ]),
            in_region_4,
        );
        let found = found.unwrap();
        assert_eq!((found.common, found.device, found.notify), (0x1000, 0x2000, 0x3000));
        assert_eq!((found.doorbell(1), found.doorbell(0x3ff)), (Some(0x3004), Some(0x3ffc)));
        assert_eq!(found.doorbell(0x400), None, "beyond the doorbells");
    }

    #[test]
    fn what_is_no_virtio_iommu_or_has_no_structures_is_an_error() {
        for id in [u32::MAX, 0, 0x1041_1af4] {
            let found = Structures::find(|_| id, in_region_4);
            assert_eq!(found, Err(UnitError::NotThere { register: "PCI identity", value: u64::from(id) }));
        }
        // A circular list.
        let circle = [(0x40, 5, 0x40, [0; 4])];
        assert!(matches!(Structures::find(space(&circle), in_region_4), Err(UnitError::Lacks { .. })));
        // A common configuration that is too short.
        let short = [
            (0x40, pci::COMMON, 0x60, [4, 0, 0x37, 0]),
            (0x60, pci::DEVICE, 0x80, [4, 0x2000, 0x1000, 0]),
            (0x80, pci::NOTIFY, 0, [4, 0x3000, 0x1000, 4]),
        ];
        assert!(matches!(Structures::find(space(&short), in_region_4), Err(UnitError::Lacks { .. })));
    }

    #[test]
    fn doorbells_never_wrap() {
        let structures = Structures {
            common: 0,
            notify: usize::MAX - 4,
            notify_bytes: u32::MAX,
            notify_multiplier: u32::MAX,
            device: 0,
        };
        assert_eq!(structures.doorbell(0), Some(usize::MAX - 4));
        assert_eq!((structures.doorbell(1), structures.doorbell(u16::MAX)), (None, None));
    }
}
