//! What holds over reboots.

use super::{ASK, Fake, How, KEEP, YES};
use crate::linux::keep::is_rule;

const FILE: &str = "etc/modprobe.d/portcullis.conf";
/// For what no driver is unbound.
const RULE: How = How { yes: false, keep: true };

fn kept(fake: &Fake) -> String {
    let text = std::fs::read_to_string(fake.root.join(FILE)).unwrap();
    let (head, rest) = text.split_once('\n').unwrap();
    assert!(head.starts_with("# Written by `portcullis protect --keep`"), "{head}");
    rest.to_owned()
}

#[test]
fn a_device_is_kept_with_its_policy_and_its_driver_waits() {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce threshold=8192", KEEP).unwrap();
    assert!(fake.is_protected("0000:00:04.0"));
    assert_eq!(
        kept(&fake),
        "options portcullis devices=0000:00:04.0 policy=bounce threshold=8192\nsoftdep nvme pre: portcullis\n"
    );
    fake.protect("eth0", "policy=bounce threshold=8192", KEEP).unwrap();
    assert_eq!(
        kept(&fake),
        "options portcullis devices=0000:00:04.0,0000:00:05.0 policy=bounce threshold=8192\n\
         softdep nvme pre: portcullis\nsoftdep virtio_pci pre: portcullis\n"
    );
    // The same again changes nothing.
    let before = fake.snapshot();
    fake.protect("nvme0n1", "policy=bounce threshold=8192", RULE).unwrap();
    assert_eq!(kept(&fake).matches("0000:00:04.0").count(), 1);
    assert_eq!(fake.snapshot().len(), before.len(), "nothing lies beside the file");
    fake.unprotect("nvme0n1", KEEP).unwrap();
    assert!(!fake.is_protected("0000:00:04.0"));
    assert_eq!(
        kept(&fake),
        "options portcullis devices=0000:00:05.0 policy=bounce threshold=8192\nsoftdep virtio_pci pre: portcullis\n"
    );
    fake.unprotect("eth0", KEEP).unwrap();
    assert!(!fake.root.join(FILE).exists());
    let error = fake.unprotect("eth0", KEEP).unwrap_err().to_string();
    assert!(error.contains("keeps nothing for 0000:00:05.0"), "{error}");
}

/// Who has the file open, as `modprobe` may, reads it as it was to its end.
#[test]
fn a_file_that_is_being_read_is_replaced_and_not_written_over() {
    use std::io::Read;

    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    let before = std::fs::read_to_string(fake.root.join(FILE)).unwrap();
    let mut open = std::fs::File::open(fake.root.join(FILE)).unwrap();
    fake.protect("eth0", "policy=bounce", KEEP).unwrap();
    let mut read = String::new();
    open.read_to_string(&mut read).unwrap();
    assert_eq!(read, before);
    assert_ne!(std::fs::read_to_string(fake.root.join(FILE)).unwrap(), before);
}

#[test]
fn what_is_given_back_for_now_comes_again_at_the_next_boot() {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    fake.unprotect("nvme0n1", YES).unwrap();
    assert!(fake.heard().contains("At the next boot it is protected again"), "{}", fake.heard());
    assert!(kept(&fake).contains("devices=0000:00:04.0 "));
    // Protected for now alone: there is nothing to take out, which is no error.
    fake.protect("eth0", "policy=bounce", YES).unwrap();
    fake.unprotect("eth0", KEEP).unwrap();
    assert!(!fake.is_protected("0000:00:05.0"));
}

/// The module that is loaded would take it again at once.
#[test]
fn a_device_that_the_loaded_module_s_parameters_name_is_kept_no_more_and_stays_protected() {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    fake.file("sys/kernel/portcullis/rules", "0000:00:04.0 policy=bounce\n");
    fake.unprotect("nvme0n1", KEEP).unwrap();
    assert!(!fake.root.join(FILE).exists());
    assert!(fake.is_protected("0000:00:04.0"));
    let said =
        "0000:00:04.0 stays protected until the module is loaded anew, as at a boot: its parameters name it.";
    assert!(fake.heard().contains(said), "{}", fake.heard());
}

#[test]
fn a_device_that_has_gone_is_taken_out_by_its_address() {
    let fake = Fake::new();
    fake.protect("00:06.0", "policy=bounce", KEEP).unwrap();
    std::fs::remove_file(fake.root.join("sys/bus/pci/devices/0000:00:06.0")).unwrap();
    assert!(fake.unprotect("0000:00:06.0", YES).is_err());
    fake.unprotect("0000:00:06.0", KEEP).unwrap();
    assert!(!fake.root.join(FILE).exists());
}

#[test]
fn the_modules_parameters_have_one_policy_for_all() {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    fake.writes.borrow_mut().clear();
    let error = fake.protect("eth0", "policy=strict", KEEP).unwrap_err().to_string();
    assert!(error.contains("keeps policy=bounce for 0000:00:04.0"), "{error}");
    assert!(fake.writes.borrow().is_empty(), "nothing was done before that was found");
    // The only one that is kept may change.
    fake.protect("nvme0n1", "policy=strict", RULE).unwrap();
    assert!(kept(&fake).contains("devices=0000:00:04.0 policy=strict\n"));
}

#[test]
fn rules_for_devices_to_come_are_kept_and_nothing_else_is_done() {
    let fake = Fake::new();
    fake.file("sys/bus/pci/devices/0000:00:05.0/removable", "removable\n");
    fake.file("sys/bus/pci/devices/0000:00:05.0/class", "0x020000\n");
    for (rule, waits) in [
        ("driver:nvme", &["nvme"][..]),
        ("driver:not-there-yet", &["not-there-yet"]),
        ("class:0108", &["nvme"]),
        ("untrusted", &["virtio_pci"]),
        ("all", &["nvme", "virtio_pci"]),
    ] {
        let error = fake.protect(rule, "policy=bounce", ASK).unwrap_err().to_string();
        assert!(error.contains("needs --keep"), "{error}");
        fake.protect(rule, "policy=bounce", RULE).unwrap();
        let softdeps: String =
            waits.iter().map(|driver| format!("softdep {driver} pre: portcullis\n")).collect();
        assert_eq!(kept(&fake), format!("options portcullis devices={rule} policy=bounce\n{softdeps}"));
        fake.unprotect(rule, RULE).unwrap();
        assert!(!fake.root.join(FILE).exists());
    }
    assert!(fake.writes.borrow().is_empty());
    for name in [
        "driver:",
        "driver:a b",
        "class:x\ny",
        "class:010",
        "class:",
        "class:01080299",
        "driver:a,b",
        "alles",
        "eth0",
        "options:x",
    ] {
        assert!(!is_rule(name), "{name}");
    }
}

#[test]
fn a_driver_that_is_built_in_cannot_wait() {
    let fake = Fake::new();
    std::fs::remove_file(fake.root.join("sys/bus/pci/drivers/nvme/module")).unwrap();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    assert_eq!(kept(&fake), "options portcullis devices=0000:00:04.0 policy=bounce\n");
    assert!(fake.heard().contains("nvme is built into this kernel"), "{}", fake.heard());
}

#[test]
fn a_file_of_somebody_else_s_stays() {
    for text in [
        "options portcullis policy=lazy\n",
        "",
        "# Written by somebody\noptions portcullis devices=all policy=lazy\n",
    ] {
        let fake = Fake::new();
        fake.file(FILE, text);
        let error = fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap_err().to_string();
        assert!(error.contains("not written by this program"), "{error}");
        assert!(error.contains("options portcullis devices=0000:00:04.0 policy=bounce"), "{error}");
        assert!(fake.writes.borrow().is_empty(), "nothing was done before that was found");
        assert!(
            fake.unprotect("nvme0n1", KEEP).unwrap_err().to_string().contains("not written by this program")
        );
        assert_eq!(std::fs::read_to_string(fake.root.join(FILE)).unwrap(), text);
    }
}

#[test]
fn what_the_initramfs_needs_is_said_as_this_system_does_it() {
    for (program, expected) in [
        (None, "If this system has an initramfs"),
        (Some("usr/sbin/update-initramfs"), "(update-initramfs -u)"),
        (Some("usr/bin/dracut"), "(dracut --force"),
        (Some("usr/bin/mkinitcpio"), "MODULES"),
    ] {
        let fake = Fake::new();
        program.iter().for_each(|program| fake.file(program, ""));
        fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
        assert!(fake.heard().contains(expected), "{}", fake.heard());
    }
}

#[test]
fn a_class_has_two_digits_four_or_six_of_either_case() {
    let fake = Fake::new();
    fake.pci("0000:00:07.0", "7", Some("xhci_hcd"));
    fake.file("sys/bus/pci/devices/0000:00:07.0/class", "0x0c0330\n");
    for rule in ["class:0c", "class:0C", "class:0c03", "class:0C03", "class:0c0330", "class:0C0330"] {
        assert!(is_rule(rule), "{rule}");
        fake.protect(rule, "policy=bounce", RULE).unwrap();
        let wanted =
            format!("options portcullis devices={rule} policy=bounce\nsoftdep xhci_hcd pre: portcullis\n");
        assert_eq!(kept(&fake), wanted);
        fake.unprotect(rule, RULE).unwrap();
    }
}

/// A module's name comes from the kernel's links, and must be one word in the file.
#[test]
fn a_module_whose_name_would_be_another_line_does_not_wait() {
    let fake = Fake::new();
    for (driver, module) in [("odd", "a b"), ("odder", "a\nb")] {
        fake.link(&format!("sys/bus/pci/drivers/{driver}/module"), &format!("sys/module/{module}"));
        fake.protect(&format!("driver:{driver}"), "policy=bounce", RULE).unwrap();
        assert_eq!(kept(&fake), format!("options portcullis devices=driver:{driver} policy=bounce\n"));
        fake.unprotect(&format!("driver:{driver}"), RULE).unwrap();
    }
}

/// The driver of a device that was removed later still waits for the module.
#[test]
fn drivers_that_wait_are_all_that_ever_had_to() {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce", KEEP).unwrap();
    std::fs::remove_file(fake.root.join("sys/bus/pci/devices/0000:00:04.0")).unwrap();
    fake.protect("eth0", "policy=bounce", KEEP).unwrap();
    assert_eq!(
        kept(&fake),
        "options portcullis devices=0000:00:04.0,0000:00:05.0 policy=bounce\n\
         softdep nvme pre: portcullis\nsoftdep virtio_pci pre: portcullis\n"
    );
}
