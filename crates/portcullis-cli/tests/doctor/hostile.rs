//! Files that say anything.

use super::unpack::Machine;
use crate::doctor::Found;
use crate::doctor::tree::{MOST_BYTES, Tree};

const EVIL: &str = "evil\u{1b}[2J\u{202e}\u{9b}1m\n0 \u{7}";

fn told(machine: &Machine) -> (String, String) {
    let found = Found::look(&Tree::new(&machine.root).unwrap(), false, Some(&|| ()));
    let asked = crate::doctor::args::Doctor { root: None, seconds: 0, json: true };
    (anstream::adapter::strip_str(&found.text(80)).to_string(), found.json(&asked).unwrap())
}

fn is_plain(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || portcullis_trace::printable::is_plain(c))
}

/// Every file below a folder.
fn files(root: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut folders, mut files) = (vec![root.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let kind = entry.symlink_metadata().unwrap().file_type();
            if kind.is_dir() {
                folders.push(entry);
            } else if kind.is_file() {
                files.push(entry);
            }
        }
    }
    files.sort();
    files
}

#[test]
fn no_byte_of_any_file_is_a_command_to_the_terminal() {
    for name in ["server", "laptop", "amd", "arm", "guest-virtio"] {
        let machine = Machine::read(name);
        for path in files(&machine.root) {
            let before = std::fs::read(&path).unwrap();
            let lines = String::from_utf8_lossy(&before)
                .lines()
                .map(|line| format!("{line} {EVIL}\n"))
                .collect::<String>();
            std::fs::write(&path, lines).unwrap();
        }
        // What is behind the text that is looked for, and then nothing that is.
        let (text, json) = told(&machine);
        assert!(is_plain(&text) && is_plain(&json), "{name}: {text}");
        assert!(text.contains(r"evil\u{1b}[2J\u{202e}"), "{name}: {text}");
        files(&machine.root).iter().for_each(|path| std::fs::write(path, EVIL).unwrap());
        let (text, json) = told(&machine);
        assert!(is_plain(&text) && is_plain(&json), "{name}: {text}");
    }
}

#[test]
fn anything_may_stand_in_place_of_a_file() {
    let machine = Machine::read("amd");
    for path in files(&machine.root) {
        let before = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        told(&machine);
        std::fs::create_dir(&path).unwrap();
        told(&machine);
        std::fs::remove_dir(&path).unwrap();
        // A reader of a pipe would wait for ever.
        let name = std::ffi::CString::new(path.as_os_str().to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        told(&machine);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        told(&machine);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, before).unwrap();
    }
}

#[test]
fn any_bytes_are_read_to_an_end() {
    let mut random = fastrand::Rng::with_seed(38);
    let machine = Machine::read("server");
    let all = files(&machine.root);
    for _ in 0..60 {
        let path = &all[random.usize(..all.len())];
        let before = std::fs::read(path).unwrap();
        let mut bytes = before.clone();
        for _ in 0..random.usize(1..8) {
            let at = random.usize(..bytes.len().max(1));
            match random.u8(..3) {
                0 if !bytes.is_empty() => bytes[at] = random.u8(..),
                1 => bytes.truncate(at),
                _ => bytes.extend(std::iter::repeat_with(|| random.u8(..)).take(20)),
            }
        }
        std::fs::write(path, bytes).unwrap();
        let (text, json) = told(&machine);
        assert!(is_plain(&text) && is_plain(&json), "{}", path.display());
        std::fs::write(path, before).unwrap();
    }
}

#[test]
fn no_more_of_a_file_is_read_than_its_limit() {
    let machine = Machine::new();
    machine.file("proc/cmdline", b"");
    let file = std::fs::OpenOptions::new().write(true).open(machine.root.join("proc/cmdline")).unwrap();
    file.set_len(1 << 40).unwrap();
    let tree = Tree::new(&machine.root).unwrap();
    assert_eq!(tree.bytes("proc/cmdline").unwrap().len() as u64, MOST_BYTES);
}

#[test]
fn nothing_beyond_the_root_is_read() {
    let machine = Machine::new();
    machine.folder("proc");
    std::os::unix::fs::symlink("/proc/version", machine.root.join("proc/version")).unwrap();
    std::os::unix::fs::symlink("/proc", machine.root.join("sys")).unwrap();
    let tree = Tree::new(&machine.root).unwrap();
    assert_eq!(tree.bytes("proc/version"), None);
    assert_eq!((tree.host().list("sys"), tree.host().exists("sys/version")), (Vec::new(), false));
    assert!(Tree::new(&machine.root.join("absent")).is_err());
}
