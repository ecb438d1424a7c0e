//! `portcullis protect` and `portcullis unprotect`.

use portcullis_trace::Printable;

use super::args::{How, Settings};
use super::change::{Bound, Change};
use super::device::{Device, FindError, list};
use super::host::Host;
use super::keep::{self, KeepError};
use super::refused::{Refusal, Unloaded};
use super::stops::{Stop, told};

/// Why a device is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    #[error(transparent)]
    Find(#[from] FindError),
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error(transparent)]
    Module(#[from] Unloaded),
    #[error("only root may do this: begin the command with sudo")]
    NotRoot,
    #[error(
        "{} is a rule, and no device: it takes effect when drivers take devices, so it needs --keep",
        Printable(rule)
    )]
    Rule { rule: String },
    #[error(
        "{device} has no IOMMU group, so nothing can keep it from memory. Is the IOMMU on, in the firmware's settings (VT-d, AMD-Vi), and on \
         Intel's machines by intel_iommu=on on the kernel's command line? Behind virtio-iommu a device has a group once a driver has had it."
    )]
    NoIommu { device: Device },
    #[error(
        "{device} is in the hands of {driver}, which gives it to a virtual machine or a program: it is protected by that"
    )]
    Vfio { device: Device, driver: String },
    #[error("{device} is no PCI device, and the module takes no others")]
    NotPci { device: Device },
    #[error(
        "{device} would be taken again at once, as the module's parameters say {}: take that out (`portcullis unprotect {} --keep`), \
         and load the module anew, as at a boot",
        Printable(rule),
        Printable(rule)
    )]
    Ruled { device: Device, rule: String },
    #[error("{device} is not protected by Portcullis; `portcullis status` says what is")]
    NotProtected { device: Device },
    #[error("{device}: {stops}, and this system needs it. {}", advice(*keeps))]
    Needed { device: Device, stops: String, keeps: bool },
    #[error("nobody is here to be asked, so this needs --yes: {what}")]
    Unasked { what: String },
    #[error("nothing was changed, as you said")]
    Declined,
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What to do with a device that cannot be spared.
fn advice(keeps: bool) -> &'static str {
    if keeps {
        "Take it out of use, or go on with --yes."
    } else {
        "Protect it from the next boot on, with --keep. --yes does it now all the same, and is for disks that the system can lose, \
         as half of a mirror."
    }
}

/// Protects what `name` means, or switches its policy.
pub fn protect(host: &Host<'_>, name: &str, settings: &Settings, how: How) -> Result<(), ProtectError> {
    if !host.outside.is_root() {
        return Err(ProtectError::NotRoot);
    }
    if keep::is_rule(name) {
        return if how.keep {
            Ok(host.settle(&host.keep(name, settings)?)?)
        } else {
            Err(ProtectError::Rule { rule: name.into() })
        };
    }
    let device = found(host, name)?;
    if host.bus(&device).is_none_or(|bus| bus != "pci") {
        return Err(ProtectError::NotPci { device });
    }
    if host.group(&device).is_none() {
        return Err(ProtectError::NoIommu { device });
    }
    // Before anything is done, as it may be refused.
    let plan = how.keep.then(|| host.keep(&device.name, settings)).transpose()?;
    host.load()?;
    if host.is_protected(&device) {
        let before = host.settings(&device);
        host.set(&device, settings).map_err(|error| host.refused(&device, &error))?;
        let before = before.map_or("another policy".into(), |before| before.to_string());
        let text =
            format!("{device}: {settings} in place of {}, with its driver running.", Printable(before));
        host.outside.say(&text);
    } else {
        take(host, &device, settings, how)?;
    }
    Ok(plan.map_or(Ok(()), |plan| host.settle(&plan))?)
}

/// Protects a device that is not, with all that the IOMMU does not tell from it.
fn take(host: &Host<'_>, device: &Device, settings: &Settings, how: How) -> Result<(), ProtectError> {
    let bound = host.bound(&host.sharing(device));
    // To unbind it would wait until that program ends.
    if let Some(one) = bound.iter().find(|one| one.name() == "vfio-pci") {
        return Err(ProtectError::Vfio { device: one.device.clone(), driver: one.name() });
    }
    match may_unbind(host, device, &bound, how) {
        // From the next boot on is all that can be had.
        Err(ProtectError::Needed { stops, .. }) if how.keep => {
            let text =
                format!("{device} stays as it is until the next boot: {stops}, and this system needs it.");
            host.outside.say(&text);
            return Ok(());
        }
        may => may?,
    }
    host.outside.begin();
    let change = Change { forth: &|| host.set(device, settings), back: &|| host.give_back(device) };
    host.change(&bound, device, &change).map_err(|failed| Refusal::new(host, failed, "protected"))?;
    let again = match bound.as_slice() {
        [] => "It has no driver now; one that takes it is behind Portcullis.".into(),
        bound => {
            let again = |one: &Bound| format!("{} has {} again", Printable(one.name()), one.device);
            format!("{}.", list(&bound.iter().map(again).collect::<Vec<_>>()))
        }
    };
    host.outside.say(&format!("{device} is protected: {settings}. {again}"));
    Ok(())
}

/// Gives what `name` means back to Linux.
pub fn unprotect(host: &Host<'_>, name: &str, how: How) -> Result<(), ProtectError> {
    if !host.outside.is_root() {
        return Err(ProtectError::NotRoot);
    }
    // A device may be kept that is no longer there.
    if keep::is_rule(name) || host.is_kept(name) && host.find(name).is_err() {
        return if how.keep {
            Ok(host.settle(&host.keep_no_more(name)?)?)
        } else {
            Err(ProtectError::Rule { rule: name.into() })
        };
    }
    let device = found(host, name)?;
    let is_protected = host.is_protected(&device);
    if !is_protected && !how.keep {
        return Err(ProtectError::NotProtected { device });
    }
    let plan = match how.keep.then(|| host.keep_no_more(&device.name)).transpose() {
        // It is protected for now alone.
        Err(KeepError::Absent { .. }) if is_protected => None,
        plan => plan?,
    };
    if is_protected {
        match host.rule_for(&device) {
            Some(_) if how.keep => host.outside.say(&format!(
                "{device} stays protected until the module is loaded anew, as at a boot: its parameters name it."
            )),
            Some(rule) => return Err(ProtectError::Ruled { device, rule }),
            None => put_back(host, &device, how)?,
        }
    }
    if !how.keep && host.is_kept(&device.name) {
        host.outside
            .say(&format!("At the next boot it is protected again: --keep takes it out of {}.", keep::PATH));
    }
    Ok(plan.map_or(Ok(()), |plan| host.settle(&plan))?)
}

/// Gives a device back, with all that the IOMMU does not tell from it.
fn put_back(host: &Host<'_>, device: &Device, how: How) -> Result<(), ProtectError> {
    let bound = host.bound(&host.sharing(device));
    may_unbind(host, device, &bound, how)?;
    // The named one first: with it the module takes the others, whose settings may be others.
    let mut before: Vec<_> =
        host.sharing(device).into_iter().filter_map(|one| Some((host.settings(&one)?, one))).collect();
    before.sort_by_key(|(_, one)| one != device);
    let again = || before.iter().try_for_each(|(settings, one)| host.set(one, settings));
    host.outside.begin();
    let change = Change { forth: &|| host.give_back(device), back: &again };
    host.change(&bound, device, &change).map_err(|failed| Refusal::new(host, failed, "given back"))?;
    let mode = host
        .linux_mode(device)
        .map_or(String::new(), |mode| format!(", which protects by its own mode: {}", Printable(mode)));
    host.outside.say(&format!("{device} is Linux's again{mode}."));
    Ok(())
}

/// Finds a device, and says what was found.
fn found(host: &Host<'_>, name: &str) -> Result<Device, FindError> {
    let device = host.find(name)?;
    let driver = host.driver(&device).map_or("no driver".into(), |driver| format!("driver {driver}"));
    let group = host.group(&device).map_or(String::new(), |group| format!(", IOMMU group {group}"));
    let about = format!("{}{}", Printable(driver), Printable(group));
    host.outside.say(&if name == device.name {
        format!("{device}: {about}.")
    } else {
        format!("{} is {device} ({about}).", Printable(name))
    });
    Ok(device)
}

/// Whether drivers may be unbound: says what stops meanwhile, and asks.
fn may_unbind(host: &Host<'_>, device: &Device, bound: &[Bound], how: How) -> Result<(), ProtectError> {
    if bound.is_empty() {
        return Ok(());
    }
    let devices: Vec<Device> = bound.iter().map(|one| one.device.clone()).collect();
    let stops = host.stops(&devices);
    let fatal: Vec<Stop> = stops.iter().filter(|stop| stop.is_fatal).cloned().collect();
    if let Some(stops) = told(&fatal).filter(|_| !how.yes) {
        return Err(ProtectError::Needed { device: device.clone(), stops, keeps: how.keep });
    }
    let drivers: Vec<String> =
        bound.iter().map(|one| format!("{} from its driver {}", one.device, Printable(one.name()))).collect();
    let stop = told(&stops)
        .map_or("Nothing is known to use it.".into(), |stops| format!("Meanwhile all on it stops: {stops}."));
    let shares =
        if bound.len() > 1 { " The IOMMU does not tell them apart, so they change together." } else { "" };
    let back = if bound.len() > 1 { "gives them back" } else { "gives it back" };
    let what = format!("This takes {}, and {back}.{shares} {stop}", list(&drivers));
    if how.yes {
        host.outside.say(&what);
        return Ok(());
    }
    match host.outside.ask(&format!("{what} Go on?")) {
        Some(true) => Ok(()),
        Some(false) => Err(ProtectError::Declined),
        None => Err(ProtectError::Unasked { what }),
    }
}
