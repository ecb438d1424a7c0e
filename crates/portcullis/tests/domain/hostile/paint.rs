//! Memory that says of itself who may reach it, and a device that looks.

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Iova, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis_model::{Buffer, Iommu};

use crate::rig::{DEVICE, PAGE};

/// What every word of a buffer begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Paint {
    /// It is mapped, or about to be, or waits for the commit of its batch.
    Open = 0x4f50_454e,
    /// Lazy protection has let go of it. It may be reached until the next flush.
    Stale = 0x5354_414c,
    /// Nobody may reach it.
    Closed = 0x434c_4f53,
}

/// What the device leaves where it can write.
const MARK: [u8; 8] = *b"hostile!";
/// Where it does so.
const MARKED: u64 = 16;

/// A buffer of whole pages, painted.
pub struct Painted {
    buffer: Buffer,
    serial: u32,
    paint: Paint,
    /// Where the device had it last.
    pub was_at: Option<Iova>,
}

// SAFETY: the list is that of the buffer, which is atomic memory of its own.
unsafe impl DmaBuffer for Painted {
    fn segments(&self) -> &[PhysSegment] {
        self.buffer.segments()
    }
}

impl Painted {
    pub fn new(buffer: Buffer, serial: u32) -> Self {
        let mut painted = Self { buffer, serial, paint: Paint::Closed, was_at: None };
        painted.paint(Paint::Closed);
        painted
    }

    pub fn segment(&self) -> PhysSegment {
        self.buffer.segments()[0]
    }

    pub fn pages(&self) -> u64 {
        self.buffer.len() / PAGE
    }

    fn word(&self, paint: Paint) -> [u8; 8] {
        (u64::from(paint as u32) << 32 | u64::from(self.serial)).to_le_bytes()
    }

    pub fn paint(&mut self, paint: Paint) {
        let page: Vec<u8> = self.word(paint).repeat(PAGE as usize / 8);
        (0..self.pages()).for_each(|number| self.buffer.write(number * PAGE, &page).unwrap());
        self.paint = paint;
    }

    /// Whether somebody has written to it since it was closed.
    pub fn is_tampered_with(&self) -> bool {
        let expected = self.word(Paint::Closed);
        let mut word = [0; 8];
        let tampered = |number| {
            self.buffer.read(number * PAGE + MARKED, &mut word).unwrap();
            word != expected
        };
        self.paint == Paint::Closed && (0..self.pages()).any(tampered)
    }

    /// Whether the device, which was given `iova` for it, reaches this buffer there, in its last page.
    pub fn is_at(&self, iommu: &Iommu, iova: Iova) -> bool {
        let last = self.pages() - 1;
        let mark = (u64::from(self.serial) << 32 | 7).to_le_bytes();
        let at = Iova::new(iova.get() + last * PAGE + 24);
        if iommu.dma_write(DEVICE, at, &mark).is_err() {
            return false;
        }
        let mut found = [0; 8];
        self.buffer.read(last * PAGE + 24, &mut found).unwrap();
        found == mark
    }
}

/// What the device has found.
#[derive(Debug, Default)]
pub struct Findings {
    pub tries: AtomicU64,
    pub open: AtomicU64,
    pub stale: AtomicU64,
    /// Memory that nobody may reach, read or written.
    pub closed: AtomicU64,
    /// Memory that was never a buffer's.
    pub foreign: AtomicU64,
    /// A buffer that its own address does not lead to.
    pub astray: AtomicU64,
}

impl Findings {
    pub fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The device tries the page at `iova`: reads what is there, and leaves its mark.
    pub fn try_page(&self, iommu: &Iommu, iova: Iova) {
        Self::count(&self.tries);
        let mut word = [0; 8];
        if iommu.dma_read(DEVICE, iova, &mut word).is_ok() {
            let tag = u64::from_le_bytes(word) >> 32;
            let is = |paint: Paint| tag == u64::from(paint as u32);
            Self::count(match () {
                () if is(Paint::Open) => &self.open,
                () if is(Paint::Stale) => &self.stale,
                () if is(Paint::Closed) => &self.closed,
                () => &self.foreign,
            });
        }
        // Where it can it changes something, and whoever owns the memory looks for that later.
        let _ = iommu.dma_write(DEVICE, Iova::new(iova.get() + MARKED), &MARK);
    }

    /// The device tries every page at which it had a buffer last.
    pub fn try_buffer(&self, iommu: &Iommu, painted: &Painted) {
        let Some(iova) = painted.was_at else { return };
        let first = iova.get() & !(PAGE - 1);
        (0..painted.pages()).for_each(|number| self.try_page(iommu, Iova::new(first + number * PAGE)));
    }

    pub fn assert_nothing_forbidden(&self) {
        let bad = [&self.closed, &self.foreign, &self.astray].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(bad, [0; 3], "closed, foreign, astray: {self:?}");
    }
}
