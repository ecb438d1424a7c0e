//! A device's file, which its registers and interrupts share, and its release.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use memmap2::MmapRaw;

use super::interrupts::Event;
use super::registers::Bar;
use super::space::{AddressSpace, Member};

/// The common part of a device, its registers and its interrupts. The last of them closes the file.
#[derive(Debug)]
pub struct Opened {
    name: String,
    space: AddressSpace,
    /// `None` once it is released.
    member: RwLock<Option<Member>>,
    /// Held for the whole of a release: the group that the kernel did not release, because another process has the device.
    kept: Mutex<Option<u32>>,
    /// The BARs and interrupts to be notified of a release.
    bars: Mutex<Vec<Weak<Bar>>>,
    events: Mutex<Vec<Weak<Event>>>,
    /// Used interrupt indices: of the device, where VFIO allows one kind at a time, and of unplug requests.
    pub in_use: Mutex<[bool; 2]>,
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics half-way while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds to a list, and removes dropped items.
fn note<T>(list: &Mutex<Vec<Weak<T>>>, new: impl IntoIterator<Item = Weak<T>>) {
    let mut list = locked(list);
    list.retain(|one| one.strong_count() > 0);
    list.extend(new);
}

impl Opened {
    pub fn new(name: &str, space: AddressSpace, member: Member) -> Self {
        let (kept, bars, events, in_use) = Default::default();
        Self { name: name.to_owned(), space, member: RwLock::new(Some(member)), kept, bars, events, in_use }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn space(&self) -> &AddressSpace {
        &self.space
    }

    pub fn is_released(&self) -> bool {
        self.member.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// The error of calls after the device was released.
    pub fn released(&self) -> io::Error {
        io::Error::new(io::ErrorKind::NotConnected, format!("{} was released", self.name))
    }

    /// Makes calls for the device, whose file stays open meanwhile.
    ///
    /// # Errors
    /// That of the calls, or that it was released.
    pub fn with<T>(&self, calls: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let member = self.member.read().unwrap_or_else(PoisonError::into_inner);
        calls(&member.as_ref().ok_or_else(|| self.released())?.file)
    }

    /// Drops a mapping of registers: a concurrent release finds the mapping, or waits until it is gone.
    pub fn while_not_released(&self, drops: impl FnOnce()) {
        let _member = self.member.read().unwrap_or_else(PoisonError::into_inner);
        drops();
    }

    /// As [`with`](Self::with), for a mapping of registers.
    pub fn map(&self, calls: impl FnOnce(&File) -> io::Result<MmapRaw>) -> io::Result<Arc<Bar>> {
        self.with(|file| {
            let bar = Arc::new(Bar::new(calls(file)?));
            note(&self.bars, [Arc::downgrade(&bar)]);
            Ok(bar)
        })
    }

    /// As [`with`](Self::with), for calls that make the kernel signal these.
    pub fn signal<T>(
        &self,
        events: &[Arc<Event>],
        calls: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<T> {
        self.with(|file| {
            note(&self.events, events.iter().map(Arc::downgrade));
            calls(file)
        })
    }

    /// Replaces all registers by memory. No mapping is dropped meanwhile.
    fn cover(&self) -> io::Result<()> {
        let bars = locked(&self.bars);
        let bars = bars.iter().filter_map(Weak::upgrade).filter(|bar| !bar.is_covered());
        let ready = bars.map(|bar| Ok((bar.memory_for()?, bar))).collect::<io::Result<Vec<_>>>()?;
        ready.into_iter().try_for_each(|(memory, bar)| bar.cover(memory))
    }

    /// Releases the device: see [`Device::release`](super::Device::release).
    pub fn release(&self) -> io::Result<()> {
        let mut kept = locked(&self.kept);
        let mut member = self.member.write().unwrap_or_else(PoisonError::into_inner);
        // A mapping holds the file, which is closed only after all of these are gone.
        self.cover()?;
        let gone = member.take();
        drop(member);
        let gone = match (gone, *kept) {
            (Some(member), _) => {
                *kept = member.group;
                self.space.remove(member)
            }
            (None, Some(group)) => self.space.remove_again(group),
            (None, None) => Ok(()),
        };
        if gone.is_ok() {
            *kept = None;
        }
        locked(&self.events).iter().filter_map(Weak::upgrade).for_each(|event| event.signal());
        gone
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // There is no caller to report to. If another process has the file, the device goes on.
        let _ = self.release();
    }
}
