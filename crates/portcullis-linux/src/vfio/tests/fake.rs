//! A kernel.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{Iova, IovaRange, Permissions};

use crate::vfio::KernelMapper;
use crate::vfio::calls::Calls;
use crate::vfio::ranges::Ranges;

pub const PAGE: u64 = 4096;

/// Its interface: they differ in their errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Iommufd,
    Type1,
}

pub struct Fake {
    way: Way,
    /// By first address: the mapping, its memory, and its permissions.
    pub mappings: Mutex<BTreeMap<u64, (IovaRange, u64, Permissions)>>,
    pub most: u64,
    /// Calls so far, and which of them fails with which code.
    pub calls: AtomicUsize,
    pub fails: Mutex<Option<(usize, i32)>>,
    /// From that call on all unmaps fail.
    pub stuck: AtomicUsize,
}

impl Fake {
    pub fn new(way: Way) -> Arc<Self> {
        let never = AtomicUsize::new(usize::MAX);
        let (mappings, calls, fails) = Default::default();
        Arc::new(Self { way, mappings, most: 1 << 16, calls, fails, stuck: never })
    }

    pub fn mapper(self: &Arc<Self>) -> KernelMapper {
        KernelMapper::over(Arc::clone(self) as _, &ranges(self)).unwrap()
    }

    fn fails(&self) -> Result<usize, i32> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match *self.fails.lock().unwrap() {
            Some((at, code)) if at == call => Err(code),
            _ => Ok(call),
        }
    }

    /// What a device reaches at an address.
    pub fn reaches(&self, iova: u64) -> Option<(u64, Permissions)> {
        let mappings = self.mappings.lock().unwrap();
        let (range, address, permissions) = *mappings.range(..=iova).next_back()?.1;
        range.contains(Iova::new(iova)).then(|| (address + (iova - range.start().get()), permissions))
    }

    pub fn count(&self) -> usize {
        self.mappings.lock().unwrap().len()
    }
}

/// A PC's: without interrupt addresses.
pub fn ranges(fake: &Fake) -> Ranges {
    let allowed = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
    let allowed =
        allowed.map(|(first, last)| IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap());
    Ranges {
        allowed: allowed.to_vec(),
        page_sizes: PAGE | 2 << 20,
        most_mappings: (fake.way == Way::Type1).then_some(fake.most),
    }
}

// SAFETY: 1 and 2: no device reaches anything through it.
unsafe impl Calls for Fake {
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32> {
        self.fails()?;
        let mut mappings = self.mappings.lock().unwrap();
        let meets = |(other, ..): &(IovaRange, u64, Permissions)| {
            other.start() <= range.last() && range.start() <= other.last()
        };
        if mappings.values().any(meets) {
            return Err(libc::EEXIST);
        }
        if !ranges(self).allowed.iter().any(|allowed| allowed.contains_range(range)) {
            return Err(if self.way == Way::Type1 { libc::EINVAL } else { libc::EADDRINUSE });
        }
        if self.way == Way::Type1 && mappings.len() as u64 >= self.most {
            return Err(libc::ENOSPC);
        }
        mappings.insert(range.start().get(), (range, address, permissions));
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, i32> {
        if self.fails()? >= self.stuck.load(Ordering::Relaxed) {
            return Err(libc::EBUSY);
        }
        let mut mappings = self.mappings.lock().unwrap();
        let cut = |other: &IovaRange| {
            other.start() <= range.last() && range.start() <= other.last() && !range.contains_range(*other)
        };
        if mappings.values().any(|(other, ..)| cut(other)) {
            return Err(if self.way == Way::Type1 { libc::EINVAL } else { libc::ENOENT });
        }
        let mut bytes = 0;
        mappings.retain(|_, (other, ..)| {
            let goes = range.contains_range(*other);
            bytes += if goes { other.len() } else { 0 };
            !goes
        });
        Ok(bytes)
    }
}
