//! A device changes hands: its driver lets go of it, its protection is changed, its driver takes it again. If a step fails, all steps
//! before it are undone, and what cannot be is said.

use std::io;
use std::path::{Path, PathBuf};

use super::device::Device;
use super::host::Host;

/// A device with the folder of the driver that has it.
#[derive(Debug, Clone)]
pub struct Bound {
    pub device: Device,
    pub driver: PathBuf,
}

impl Bound {
    /// The name of the driver.
    pub fn name(&self) -> String {
        self.driver.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Unbind,
    Change,
    Bind,
}

/// A step that failed.
#[derive(Debug)]
pub struct Failed {
    pub step: Step,
    pub device: Device,
    /// What was wrong, as it was then.
    pub why: String,
    /// What could not be put back, as steps that failed as well.
    pub left: Vec<(Step, Device, io::Error)>,
}

/// A change of protection, and the way back.
pub struct Change<'c> {
    pub forth: &'c dyn Fn() -> io::Result<()>,
    pub back: &'c dyn Fn() -> io::Result<()>,
}

/// What was done, in order.
enum Done<'d> {
    Unbound(&'d Bound),
    Changed(&'d Device),
    Bound(&'d Bound),
}

impl Host<'_> {
    /// Those of the devices that have a driver.
    pub fn bound(&self, devices: &[Device]) -> Vec<Bound> {
        let of = |device: &Device| {
            let driver = self.follow(&device.path.join("driver"))?;
            Some(Bound { device: device.clone(), driver })
        };
        devices.iter().filter_map(of).collect()
    }

    /// Takes each device of `bound` from its driver, changes the protection of `device`, and gives them back.
    pub fn change(&self, bound: &[Bound], device: &Device, change: &Change<'_>) -> Result<(), Failed> {
        let mut done = Vec::new();
        let result = self.steps(bound, device, change, &mut done);
        result.map_err(|(step, device, error)| {
            let why = if step == Step::Change { self.why_refused(device, &error) } else { error.to_string() };
            Failed { step, device: device.clone(), why, left: self.undo(done, change) }
        })
    }

    fn steps<'d>(
        &self,
        bound: &'d [Bound],
        device: &'d Device,
        change: &Change<'_>,
        done: &mut Vec<Done<'d>>,
    ) -> Result<(), (Step, &'d Device, io::Error)> {
        for one in bound {
            self.tell_driver(&one.driver, "unbind", &one.device)
                .map_err(|error| (Step::Unbind, &one.device, error))?;
            done.push(Done::Unbound(one));
        }
        (change.forth)().map_err(|error| (Step::Change, device, error))?;
        done.push(Done::Changed(device));
        for one in bound {
            self.tell_driver(&one.driver, "bind", &one.device)
                .map_err(|error| (Step::Bind, &one.device, error))?;
            done.push(Done::Bound(one));
        }
        Ok(())
    }

    /// Undoes what was done, the last first, each whether or not the others can be.
    fn undo(&self, done: Vec<Done<'_>>, change: &Change<'_>) -> Vec<(Step, Device, io::Error)> {
        let undone = done.into_iter().rev().filter_map(|one| {
            let (step, device, result) = match one {
                Done::Bound(one) => {
                    (Step::Unbind, &one.device, self.tell_driver(&one.driver, "unbind", &one.device))
                }
                Done::Changed(device) => (Step::Change, device, (change.back)()),
                Done::Unbound(one) => {
                    (Step::Bind, &one.device, self.tell_driver(&one.driver, "bind", &one.device))
                }
            };
            Some((step, device.clone(), result.err()?))
        });
        undone.collect()
    }

    fn tell_driver(&self, driver: &Path, what: &str, device: &Device) -> io::Result<()> {
        self.outside.write(&driver.join(what), &device.name)
    }
}
