//! A device's file, which its registers and interrupts hold open, too, and how all of them let go of it at once.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use memmap2::MmapRaw;

use super::interrupts::Event;
use super::registers::Bar;
use super::space::{AddressSpace, Member};

/// What a device, its registers and its interrupts share. The last of them closes the file.
#[derive(Debug)]
pub struct Opened {
    name: String,
    space: AddressSpace,
    /// `None` once it is released.
    member: RwLock<Option<Member>>,
    /// Held by whoever releases it, until that is over: the group that the kernel has kept then, as another process has the device.
    kept: Mutex<Option<u32>>,
    /// What is to be told of that.
    bars: Mutex<Vec<Weak<Bar>>>,
    events: Mutex<Vec<Weak<Event>>>,
    /// Which indices of interrupts are in use: the device's own, of which VFIO lets one kind be in use, and requests to unplug it.
    pub in_use: Mutex<[bool; 2]>,
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics half-way while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds to a list, and forgets those that are gone.
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

    /// The error of whatever needs the device's file after it was closed.
    pub fn released(&self) -> io::Error {
        io::Error::new(io::ErrorKind::NotConnected, format!("{} was released", self.name))
    }

    /// Makes calls for the device. Its file stays open meanwhile.
    ///
    /// # Errors
    /// That of the calls, or that it was released.
    pub fn with<T>(&self, calls: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let member = self.member.read().unwrap_or_else(PoisonError::into_inner);
        calls(&member.as_ref().ok_or_else(|| self.released())?.file)
    }

    /// Drops a mapping of registers: a release beside it finds the mapping, or waits until it is gone.
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

    /// As [`with`](Self::with), for calls that have the kernel signal these.
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

    /// Puts memory in the place of all registers. None is dropped meanwhile.
    fn cover(&self) -> io::Result<()> {
        let bars = locked(&self.bars);
        let bars = bars.iter().filter_map(Weak::upgrade).filter(|bar| !bar.is_covered());
        let ready = bars.map(|bar| Ok((bar.memory_for()?, bar))).collect::<io::Result<Vec<_>>>()?;
        ready.into_iter().try_for_each(|(memory, bar)| bar.cover(memory))
    }

    /// Lets go of the device: see [`Device::release`](super::Device::release).
    pub fn release(&self) -> io::Result<()> {
        let mut kept = locked(&self.kept);
        let mut member = self.member.write().unwrap_or_else(PoisonError::into_inner);
        // A mapping holds the file, so no one can say that it is closed before all of these are gone.
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
        // There is no one to tell. Where another process has the file, all goes on as it was.
        let _ = self.release();
    }
}
