//! A device changes hands: in which order, and what is left when a step fails.

use super::{ASK, Fake, Modprobe, YES};
use crate::linux::protect::ProtectError;

const DISK: &str = "0000:00:04.0";
const DRIVER: &str = "sys/bus/pci/drivers/nvme";
const BOUNCE: &str = "policy=bounce";

/// The error of protecting the disk, as a sentence.
fn refusal(fake: &Fake) -> String {
    fake.protect("nvme0n1", BOUNCE, YES).unwrap_err().to_string()
}

/// A second device in the group of the disk, with its driver, and a bridge there with its own.
fn with_a_companion() -> Fake {
    let fake = Fake::new();
    fake.pci("0000:00:04.1", "1", Some("e1000e"));
    fake.file("sys/devices/pci0000:00/0000:00:04.1/class", "0x020000\n");
    fake.pci("0000:00:03.0", "1", Some("pcieport"));
    fake.file("sys/devices/pci0000:00/0000:00:03.0/class", "0x060400\n");
    fake.pci("0000:00:04.2", "1", None);
    fake
}

#[test]
fn a_device_without_a_driver_is_protected_at_once() {
    let fake = Fake::new();
    fake.protect("00:06.0", "policy=lazy window_us=250", ASK).unwrap();
    assert_eq!(
        *fake.writes.borrow(),
        ["sys/kernel/portcullis/protect 0000:00:06.0 policy=lazy window_us=250"]
    );
    assert!(fake.is_protected("0000:00:06.0") && fake.questions.borrow().is_empty());
    assert!(fake.heard().contains("00:06.0 is 0000:00:06.0 (no driver, IOMMU group 3)."), "{}", fake.heard());
    // Its own name says nothing of itself.
    fake.protect("0000:00:06.0", "policy=strict", ASK).unwrap();
    assert!(fake.heard().contains(" 0000:00:06.0: no driver, IOMMU group 3."), "{}", fake.heard());
    assert!(
        fake.heard().contains("0000:00:06.0 is protected: policy=lazy window_us=250"),
        "{}",
        fake.heard()
    );
}

#[test]
fn a_device_with_a_driver_is_taken_from_it_and_given_back() {
    let fake = Fake::new();
    fake.protect("/dev/nvme0n1", "policy=bounce threshold=8192", YES).unwrap();
    let expected = [
        format!("{DRIVER}/unbind {DISK}"),
        format!("sys/kernel/portcullis/protect {DISK} policy=bounce threshold=8192"),
        format!("{DRIVER}/bind {DISK}"),
    ];
    assert_eq!(*fake.writes.borrow(), expected);
    assert!(fake.is_protected(DISK) && fake.has_driver(DISK) && fake.begun.get());
    assert!(
        fake.heard().contains("/dev/nvme0n1 is 0000:00:04.0 (driver nvme, IOMMU group 1)."),
        "{}",
        fake.heard()
    );
    assert!(fake.heard().contains("nvme has 0000:00:04.0 again"), "{}", fake.heard());
}

#[test]
fn nothing_is_taken_from_a_driver_without_being_asked_for() {
    for (answer, is_done) in [(Some(true), true), (Some(false), false), (None, false)] {
        let fake = Fake::new();
        fake.answer.set(answer);
        let result = fake.protect(DISK, BOUNCE, ASK);
        assert_eq!((result.is_ok(), fake.is_protected(DISK)), (is_done, is_done), "{result:?}");
        assert_eq!(fake.writes.borrow().is_empty(), !is_done);
        assert_eq!(fake.questions.borrow().len(), 1);
        assert!(
            fake.questions.borrow()[0].contains("0000:00:04.0 from its driver nvme"),
            "{:?}",
            fake.questions
        );
        match answer {
            Some(true) => {}
            Some(false) => assert!(matches!(result, Err(ProtectError::Declined)), "{result:?}"),
            None => assert!(result.unwrap_err().to_string().contains("needs --yes")),
        }
    }
}

#[test]
fn a_policy_is_switched_while_the_driver_runs() {
    let fake = Fake::new();
    fake.protect(DISK, "policy=bounce threshold=8192", YES).unwrap();
    fake.writes.borrow_mut().clear();
    fake.protect(DISK, "policy=strict", ASK).unwrap();
    assert_eq!(*fake.writes.borrow(), [format!("sys/kernel/portcullis/protect {DISK} policy=strict")]);
    assert!(
        fake.heard().contains("policy=strict in place of policy=bounce threshold=8192"),
        "{}",
        fake.heard()
    );
    assert!(fake.has_driver(DISK) && fake.questions.borrow().is_empty());
}

#[test]
fn devices_that_the_iommu_does_not_tell_apart_change_together() {
    let fake = with_a_companion();
    fake.protect(DISK, BOUNCE, YES).unwrap();
    let of = |what: &str, device: &str| format!("{what} {device}");
    let e1000e = "sys/bus/pci/drivers/e1000e";
    let protect = "sys/kernel/portcullis/protect";
    // The bridge keeps its driver. The module takes all others of the group by itself.
    assert_eq!(
        *fake.writes.borrow(),
        [
            of(&format!("{DRIVER}/unbind"), DISK),
            of(&format!("{e1000e}/unbind"), "0000:00:04.1"),
            of(protect, "0000:00:04.0 policy=bounce"),
            of(&format!("{DRIVER}/bind"), DISK),
            of(&format!("{e1000e}/bind"), "0000:00:04.1"),
        ]
    );
    assert!(fake.heard().contains("does not tell them apart"), "{}", fake.heard());
    fake.unprotect("0000:00:04.1", YES).unwrap();
    assert!(!fake.is_protected(DISK) && !fake.is_protected("0000:00:04.1"));
    assert!(fake.has_driver(DISK) && fake.has_driver("0000:00:04.1") && fake.has_driver("0000:00:03.0"));
}

/// Whichever write fails, everything is as it was.
#[test]
fn a_step_that_fails_undoes_those_before_it() {
    for failing in 0..5 {
        let fake = with_a_companion();
        let before = fake.snapshot();
        fake.failing.set(Some(failing));
        let error = refusal(&fake);
        assert!(error.contains("Everything is as it was"), "{failing}: {error}");
        assert_eq!(fake.snapshot(), before, "{failing}: {:?}", fake.writes);

        fake.failing.set(None);
        fake.protect(DISK, "policy=bounce threshold=8192", YES).unwrap();
        fake.protect("0000:00:04.1", "policy=lazy window_us=5", YES).unwrap();
        let before = fake.snapshot();
        fake.writes.borrow_mut().clear();
        fake.failing.set(Some(failing));
        let error = fake.unprotect(DISK, YES).unwrap_err().to_string();
        assert!(error.contains("Everything is as it was"), "{failing}: {error}");
        assert_eq!(fake.snapshot(), before, "{failing}: {:?}", fake.writes);
    }
}

#[test]
fn what_cannot_be_put_back_is_said() {
    let fake = Fake::new();
    fake.refuse("sys/kernel/portcullis/protect", libc::ENOSPC);
    fake.refuse(&format!("{DRIVER}/bind"), libc::ENODEV);
    let error = refusal(&fake);
    assert!(error.contains("can name too few addresses"), "{error}");
    assert!(error.contains("NOT PUT BACK: 0000:00:04.0 has no driver"), "{error}");
    assert!(error.contains("`echo 0000:00:04.0 > /sys/bus/pci/drivers_probe`"), "{error}");

    let fake = Fake::new();
    fake.refuse(&format!("{DRIVER}/bind"), libc::EIO);
    fake.refuse("sys/kernel/portcullis/unprotect", libc::EBUSY);
    let error = refusal(&fake);
    assert!(error.contains("its driver does not take it afterwards"), "{error}");
    assert!(error.contains("the protection of 0000:00:04.0 is not as it was"), "{error}");
}

#[test]
fn what_the_module_says_no_to_becomes_a_sentence() {
    for (error, expected) in [
        (libc::ENODEV, "0000:00:04.0 is gone"),
        (libc::EOPNOTSUPP, "docs/linux.md#what-can-go-wrong"),
        (libc::EBUSY, "its IOMMU group belongs to something else, such as vfio"),
        (libc::ENOSPC, "can name too few addresses"),
        (libc::EINVAL, "its version is 0.1.0, and this is"),
        (libc::ENOMEM, "not enough memory"),
        (libc::EPERM, "0000:00:04.0: Operation not permitted"),
    ] {
        let fake = Fake::new();
        fake.refuse("sys/kernel/portcullis/protect", error);
        let text = refusal(&fake);
        assert!(text.contains(expected), "{error}: {text}");
        assert!(
            text.ends_with(". Everything is as it was; `dmesg | grep portcullis` says more."),
            "{error}: {text}"
        );
        if error == libc::EINVAL {
            fake.file("sys/bus/pci/devices/0000:00:04.0/removable", "removable\n");
            assert!(refusal(&fake).contains("refuses lazy"));
        }
        // While it is protected, it has its driver.
        if error == libc::EBUSY {
            let text = fake
                .host()
                .refused(&fake.host().find(DISK).unwrap(), &std::io::Error::from_raw_os_error(error));
            let first = "drivers have 0000:00:04.0 (nvme), which must be unbound first. ";
            assert!(text.to_string().contains(first), "{text}");
        }
    }
}

#[test]
fn the_module_is_loaded_before_anything_is_changed() {
    let without = || {
        let fake = Fake::new();
        std::fs::remove_dir_all(fake.root.join("sys/kernel/portcullis")).unwrap();
        fake
    };
    let fake = without();
    fake.protect(DISK, BOUNCE, YES).unwrap();
    assert!(fake.is_protected(DISK));
    for (modprobe, expected) in [
        (
            Modprobe::Says("modprobe: FATAL: Module portcullis not found in directory /lib/modules/6.12.0"),
            "docs/linux.md says how to get it",
        ),
        (
            Modprobe::Says("modprobe: ERROR: could not insert 'portcullis': Key was rejected by service"),
            "docs/linux.md#secure-boot",
        ),
        (Modprobe::Says("modprobe: ERROR: Required key not available"), "docs/linux.md#secure-boot"),
        (Modprobe::Says("modprobe: ERROR: Unknown symbol in module"), "Unknown symbol in module"),
        (Modprobe::Says("\u{1b}[2J"), r"\u{1b}[2J"),
        (Modprobe::IsNotThere, "no program modprobe"),
        (Modprobe::LoadsNothing, "/sys/kernel/portcullis/protect is not there"),
    ] {
        let fake = without();
        fake.modprobe.set(modprobe);
        let error = refusal(&fake);
        assert!(error.contains(expected), "{error}");
        assert!(fake.writes.borrow().is_empty() && fake.has_driver(DISK));
    }
}

#[test]
fn who_may_not_is_told_before_anything_else() {
    let fake = Fake::new();
    fake.is_root.set(false);
    assert!(refusal(&fake).contains("sudo"));
    assert!(fake.unprotect(DISK, YES).unwrap_err().to_string().contains("sudo"));
    assert!(fake.writes.borrow().is_empty());
}

#[test]
fn a_device_without_an_iommu_stays_with_its_driver() {
    let fake = Fake::new();
    std::fs::remove_file(fake.root.join("sys/devices/pci0000:00/0000:00:04.0/iommu_group")).unwrap();
    let error = refusal(&fake);
    assert!(error.contains("has no IOMMU group") && error.contains("intel_iommu=on"), "{error}");
    assert!(fake.writes.borrow().is_empty());
}

#[test]
fn a_device_is_given_back_to_linux() {
    let fake = Fake::new();
    assert!(matches!(fake.unprotect(DISK, YES), Err(ProtectError::NotProtected { .. })));
    fake.protect(DISK, BOUNCE, YES).unwrap();
    fake.writes.borrow_mut().clear();
    fake.unprotect("nvme0n1", YES).unwrap();
    let expected = [
        format!("{DRIVER}/unbind {DISK}"),
        format!("sys/kernel/portcullis/unprotect {DISK}"),
        format!("{DRIVER}/bind {DISK}"),
    ];
    assert_eq!(*fake.writes.borrow(), expected);
    assert!(!fake.is_protected(DISK) && fake.has_driver(DISK));
    assert!(
        fake.heard().contains("0000:00:04.0 is Linux's again, which protects by its own mode: lazy"),
        "{}",
        fake.heard()
    );
}

/// To take it from there would wait for the machine's end.
#[test]
fn a_device_that_a_virtual_machine_has_stays_there() {
    let fake = Fake::new();
    fake.pci("0000:00:04.1", "1", Some("vfio-pci"));
    let error = refusal(&fake);
    assert!(
        error.contains("0000:00:04.1 is in the hands of vfio-pci") && fake.writes.borrow().is_empty(),
        "{error}"
    );
}

#[test]
fn a_device_of_another_bus_stays_with_its_driver() {
    let fake = Fake::new();
    let path = "sys/devices/platform/fe9c0000.ethernet";
    fake.on_bus("platform", "fe9c0000.ethernet", path, "12", Some("dwmac"));
    let error = fake.protect("platform/fe9c0000.ethernet", "policy=strict", YES).unwrap_err().to_string();
    assert!(error.contains("no PCI device") && fake.writes.borrow().is_empty(), "{error}");
}

/// It would be taken again as soon as its driver binds.
#[test]
fn a_device_that_a_rule_names_stays_protected() {
    for (rule, is_meant) in [
        ("0000:00:04.0", true),
        ("class:0108", true),
        ("driver:nvme", true),
        ("all", true),
        ("0000:00:05.0", false),
        ("class:02", false),
        ("driver:nvm", false),
        ("untrusted", false),
    ] {
        let fake = Fake::new();
        fake.protect(DISK, BOUNCE, YES).unwrap();
        fake.writes.borrow_mut().clear();
        fake.file(
            "sys/kernel/portcullis/rules",
            &format!("{rule} policy=bounce window_us=10000 threshold=131072\n"),
        );
        let result = fake.unprotect(DISK, YES);
        assert_eq!(
            (result.is_err(), fake.writes.borrow().is_empty()),
            (is_meant, is_meant),
            "{rule}: {result:?}"
        );
        if let Err(error) = result {
            assert!(error.to_string().contains(&format!("`portcullis unprotect {rule} --keep`")), "{error}");
        }
    }
}
