//! What a process that drives devices by itself finds in a guest: it maps its memory for QEMU's `edu` by VFIO, and looks what the device
//! reaches. `tests/guest/jobs/user.sh` calls it; it prints what that prints.
#![allow(unsafe_code, reason = "a mapper for the process's memory is made, and processes are")]

mod edu;
mod ends;
mod interrupts;
mod limits;
mod maps;
mod pairs;
mod plugs;
mod virtio;

use std::process::ExitCode;

use portcullis::addr::IovaRange;
use portcullis::dma::{DmaDomain, DmaMask};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::Heap;
use portcullis_linux::vfio::{Device, KernelMapper, Machine, OpenError};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
pub(crate) type Space = Shared<Domain<KernelMapper, StdPlatform>>;

/// Which of the kernel's interfaces is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Iommufd,
    Type1,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Iommufd => "iommufd",
            Self::Type1 => "type1",
        }
    }

    fn open(self, name: &str) -> std::result::Result<Device, OpenError> {
        match self {
            Self::Iommufd => Device::open(name),
            Self::Type1 => Device::open_type1(name),
        }
    }

    /// A device, and a domain of its address space.
    pub(crate) fn domain(self, name: &str) -> Result<(Device, Space)> {
        let device = self.open(name)?;
        // SAFETY: the domain gets the heap's memory, and the process's by number.
        let mapper = unsafe { device.space().mapper() };
        let space = Domain::new(StdPlatform::new(), mapper, Policy::Strict)?;
        Ok((device, space))
    }
}

/// What queues of a device stand on. `edu` reaches 32 bits of addresses, as the guest's machine has it.
pub(crate) fn attached(device: &Device, space: &Space) -> Result<portcullis::dma::Device<Machine>> {
    let domain = DmaDomain::<Machine>::over(space.clone(), Some(Heap))?;
    Ok(domain.attach(device.id(), DmaMask::BITS_32)?)
}

/// A check that holds or not.
pub(crate) fn check(what: &str, held: bool, why: impl std::fmt::Debug) {
    if held { println!("ok {what}") } else { println!("not ok {what}: {why:?}") }
}

pub(crate) fn pages(range: IovaRange, first: u64, count: u64) -> Result<IovaRange> {
    let start = range.start().checked_add(first * 4096).ok_or("no such page")?;
    Ok(IovaRange::new(start, count * 4096)?)
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let way = |word| match word {
        "iommufd" => Ok(Way::Iommufd),
        "type1" => Ok(Way::Type1),
        _ => Err(format!("there is no way {word}")),
    };
    match *words {
        ["open", name] => println!("{:?}", Device::open(name)?.space().kind()),
        ["maps", by, edu, other] => {
            maps::transfers(way(by)?, edu, other)?;
            maps::kinds(way(by)?, edu)?;
            maps::parts(way(by)?, edu)?;
            maps::refused(way(by)?, edu)?;
        }
        ["ends", by, edu] => {
            ends::fork(way(by)?, edu)?;
            ends::killed(way(by)?, edu)?;
        }
        ["interrupts", by, edu, card] => {
            interrupts::of_edu(way(by)?, edu)?;
            interrupts::of_card(way(by)?, card)?;
        }
        ["plugs", by, edu, hot, id, next] => plugs::plugs(way(by)?, edu, hot, [id, next])?,
        ["virtio", by, name] => virtio::disk(way(by)?, name)?,
        ["held", by, edu] => ends::hold(way(by)?, edu)?,
        ["pairs", edu, bytes, count] => pairs::pairs(edu, bytes.parse()?, count.parse()?)?,
        ["entries", edu, most] => limits::entries(edu, most.parse()?)?,
        ["pages", by, name] => limits::pages(way(by)?, name)?,
        ["huge", by, edu, kind] => limits::huge(way(by)?, edu, kind)?,
        ["locked", by, edu] => limits::locked(way(by)?, edu)?,
        _ => {
            return Err(
                "usage: portcullis-user open|maps|ends|interrupts|plugs|virtio|huge|entries|locked|pages|pairs .."
                    .into(),
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
