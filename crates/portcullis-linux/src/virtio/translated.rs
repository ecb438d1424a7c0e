//! A transport of a device behind an IOMMU. (`tests/kernel` includes this file, so it needs no `std`.)

use thiserror::Error;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{PhysAddr, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `VIRTIO_F_ACCESS_PLATFORM` (virtio 1.2, section 6 "Reserved Feature Bits").
const ACCESS_PLATFORM: u64 = 1 << 33;

/// A transport whose driver accepts address translation by an IOMMU, which the drivers of `virtio-drivers` do not.
#[derive(Debug)]
pub struct Translated<T>(T);

/// A device does not offer address translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the device does not offer VIRTIO_F_ACCESS_PLATFORM: it may go round the IOMMU, to memory of others (QEMU's offer it with iommu_platform=on)"
)]
pub struct NotTranslated;

impl<T: Transport> Translated<T> {
    /// Wraps an uninitialised transport.
    ///
    /// # Errors
    /// [`NotTranslated`]
    pub fn new(mut transport: T) -> core::result::Result<Self, NotTranslated> {
        if transport.read_device_features() & ACCESS_PLATFORM == 0 {
            return Err(NotTranslated);
        }
        Ok(Self(transport))
    }
}

impl<T: Transport> Transport for Translated<T> {
    fn device_type(&self) -> DeviceType {
        self.0.device_type()
    }
    fn read_device_features(&mut self) -> u64 {
        self.0.read_device_features()
    }
    fn write_driver_features(&mut self, features: u64) {
        self.0.write_driver_features(features | ACCESS_PLATFORM);
    }
    fn max_queue_size(&mut self, queue: u16) -> u32 {
        self.0.max_queue_size(queue)
    }
    fn notify(&mut self, queue: u16) {
        self.0.notify(queue);
    }
    fn get_status(&self) -> DeviceStatus {
        self.0.get_status()
    }
    fn set_status(&mut self, status: DeviceStatus) {
        self.0.set_status(status);
    }
    fn set_guest_page_size(&mut self, size: u32) {
        self.0.set_guest_page_size(size);
    }
    fn requires_legacy_layout(&self) -> bool {
        self.0.requires_legacy_layout()
    }
    fn queue_set(
        &mut self,
        queue: u16,
        size: u32,
        descriptors: PhysAddr,
        driver: PhysAddr,
        device: PhysAddr,
    ) {
        self.0.queue_set(queue, size, descriptors, driver, device);
    }
    fn queue_unset(&mut self, queue: u16) {
        self.0.queue_unset(queue);
    }
    fn queue_used(&mut self, queue: u16) -> bool {
        self.0.queue_used(queue)
    }
    fn ack_interrupt(&mut self) -> InterruptStatus {
        self.0.ack_interrupt()
    }
    fn read_config_generation(&self) -> u32 {
        self.0.read_config_generation()
    }
    fn read_config_space<V: FromBytes + IntoBytes>(&self, offset: usize) -> Result<V> {
        self.0.read_config_space(offset)
    }
    fn write_config_space<V: IntoBytes + Immutable>(&mut self, offset: usize, value: V) -> Result<()> {
        self.0.write_config_space(offset, value)
    }
}
